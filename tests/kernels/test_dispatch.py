"""`NEXTSCALE_KERNELS`: off gives references, nonsense is refused, and without a GPU or an interpreter nothing runs."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import nextscale.kernels
from nextscale.errors import NextscaleError
from nextscale.kernels import dispatch, linear_fp32, residual_norm

OPERATIONS = [m.name for m in pkgutil.iter_modules(nextscale.kernels.__path__) if not m.ispkg]
WITHOUT_KERNEL = {"dispatch", "linear_gelu", "occupancy", "sdpa", "split_k"}


def run(code: str, **switches: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | switches
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("mode", ["", "auto", "off"])
def test_modes_without_an_interpreter(monkeypatch, mode: str) -> None:
    monkeypatch.setenv("NEXTSCALE_KERNELS", mode)
    assert dispatch.read_device() == (None if mode == "off" else "cuda")
    assert dispatch.MODES["interpret"] == "cpu"


@pytest.mark.parametrize("mode", ["on", "OFF", "cuda"])
def test_another_mode_is_refused(monkeypatch, mode: str) -> None:
    monkeypatch.setenv("NEXTSCALE_KERNELS", mode)
    with pytest.raises(NextscaleError, match=f"NEXTSCALE_KERNELS is '{mode}'; allowed: auto, off, interpret"):
        dispatch.read_device()


def test_off_does_not_load_triton() -> None:
    done = run(
        "import sys, nextscale.pipeline\n"
        "from nextscale.kernels import dispatch\n"
        "assert dispatch.DEVICE is None and dispatch.triton is dispatch.MissingTriton\n"
        "assert 'triton' not in sys.modules",
        NEXTSCALE_KERNELS="off",
    )
    assert not done.returncode, done.stderr


def test_the_interpreter_runs_kernels_on_the_cpu() -> None:
    pytest.importorskip("triton")
    done = run(
        "import torch\n"
        "from nextscale.kernels import bit_sampling\n"
        "rows = torch.randn(2, 3, 8, 2)\n"  # a kernel without a loop: Triton 3.6 interprets none with NumPy 2.5
        "assert bit_sampling.supports(rows) and not bit_sampling.supports(rows.bfloat16())\n"
        "combined = bit_sampling.fused_combine(rows, 1, 3.0, 1.0)\n"
        "assert torch.allclose(combined, 3 * rows[:1] - 2 * rows[1:], atol=1e-5)",
        NEXTSCALE_KERNELS="interpret",
    )
    assert not done.returncode, done.stderr


@torch.inference_mode()
def test_references_run_where_kernels_do_not() -> None:
    x, layer = torch.randn(2, 3, 64), nn.Linear(64, 5)
    assert not dispatch.enabled(x)
    assert not residual_norm.supports(x)
    assert torch.equal(linear_fp32.linear_fp32(x, layer), layer(x))


def test_what_is_enabled(monkeypatch) -> None:
    half, exact = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    for device, found in ((None, (False, False)), ("cuda", (False, False)), ("cpu", (False, True))):
        monkeypatch.setattr(dispatch, "DEVICE", device)
        assert (dispatch.enabled(half), dispatch.enabled(exact)) == found, "the interpreter cannot read bfloat16"
        assert dispatch.enabled_on(torch.device("cpu")) == (device == "cpu")
        assert dispatch.enabled_on(torch.device("cuda")) == (device == "cuda")
    assert not dispatch.has_tma(torch.device("cpu"))


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - WITHOUT_KERNEL))
def test_every_operation_has_one_predicate(name: str) -> None:
    assert callable(importlib.import_module(f"nextscale.kernels.{name}").supports)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_nobody_launches_what_stands_in_for_triton() -> None:
    """Kernels can be imported without Triton."""
    jit = dispatch.MissingTriton.jit
    assert jit(abs) is abs
    assert jit(do_not_specialize=["rows"])(abs) is abs
    assert dispatch.MissingTriton.constexpr(3) == 3
