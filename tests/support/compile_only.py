"""A pytest plugin: compile for Hopper what the interpreted tests launch, and run nothing. No GPU is needed.

A test passes if each kernel that it launches compiles at these arguments; what it asserts of results is not looked at.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from contextlib import suppress
from types import SimpleNamespace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import nextscale.kernels.triton as kernels
from nextscale.kernels import dispatch

ERRORS: list[str] = []
TARGET = GPUTarget("cuda", 90, 32)


def launch(kernel: JITFunction, grid):
    def compiled(*args, **options) -> None:
        try:
            kernel.run(*args, grid=grid, warmup=True, **options)
        except Exception as error:
            ERRORS.append(f"{kernel.__name__}: {error}")

    return compiled


triton.runtime.driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: TARGET
    )
)
JITFunction.__getitem__ = launch
dispatch.DEVICE = "cpu"  # where the tests' tensors are
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"{kernels.__name__}.{module.name}")
os.environ["TRITON_INTERPRET"] = "1"  # for the tests, which ask; kernels have been read without it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    ERRORS.clear()
    with suppress(Exception):  # nothing was computed, so nothing is right
        yield
    assert not ERRORS, "\n".join(ERRORS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    try:
        return (yield)
    except AssertionError:  # a fence
        return None
