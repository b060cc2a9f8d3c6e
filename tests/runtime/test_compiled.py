"""The compiled runtime gives what the eager one gives, and compiles few functions."""

from __future__ import annotations

import copy

import pytest
import torch
from support.pipelines import ask, same_tokens

from nextscale import NOVA, Truncate
from nextscale.models.fp8 import to_fp8
from nextscale.runtime.compiled import Compiled
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var


class CountingBackend:
    """A backend of torch.compile that runs what it is given and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, module, inputs):
        self.asked += 1
        return module.forward


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_blocks_give_the_same_tokens(any_pipe, fresh) -> None:
    plain = ask(any_pipe, 2, output_type="pt")
    backend = CountingBackend()
    other = copy.copy(any_pipe)
    other.executor = Compiled(backend)
    again = ask(other, 2, output_type="pt")
    assert same_tokens(plain, again)
    assert torch.allclose(plain.images, again.images, atol=1e-5)
    assert again.trace.to_dict()["runtime"] == "compiled"
    # Three functions, each for one token and for any number of them: not one for every layer or scale.
    assert backend.asked <= 6


def test_compiled_blocks_with_a_method(any_pipe, fresh) -> None:
    method = NOVA(t_est=2, alpha=10, uncomputed="nothing") + Truncate(1)
    plain = ask(any_pipe, 2, method=method)
    other = copy.copy(any_pipe)
    other.executor = Compiled("eager")
    again = ask(other, 2, method=method)
    assert plain.trace.share() < 0.9
    assert same_tokens(plain, again)


@pytest.mark.parametrize("make", [tiny_var, tiny_infinity, tiny_hart])
def test_compiled_blocks_in_fp8(make, fresh) -> None:
    """Every layer has factors of its own, and they still share their code."""
    plain = make().to(dtype="bfloat16")
    to_fp8(plain.backbone, plain.tokenizer)
    backend = CountingBackend()
    other = copy.copy(plain)
    other.executor = Compiled(backend)
    assert same_tokens(ask(plain, 2), ask(other, 2))
    assert backend.asked <= 6
