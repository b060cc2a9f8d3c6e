"""Other ways to run a scale give what the eager one gives. What needs a GPU is in test_gpu.py."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from conftest import ask, same_tokens
from torch import nn

from nextscale import NOVA, Truncate
from nextscale.draws import FixedDraws, PerImageDraws
from nextscale.errors import NextscaleError
from nextscale.runtime import make_executor
from nextscale.runtime.compiled import Compiled
from nextscale.runtime.decoder import Doubled, for_gpu
from nextscale.tokenizers.autoencoder import Decoder, Upsample


class Counting:
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
    backend = Counting()
    other = copy.copy(any_pipe)
    other.executor = Compiled(backend)
    again = ask(other, 2, output_type="pt")
    assert same_tokens(plain, again)
    assert torch.allclose(plain.images, again.images, atol=1e-5)
    assert again.trace.to_dict()["runtime"] == "compiled"
    # Two functions, each for one token and for any number of them, and the decoder: not one for every layer or scale.
    assert backend.asked <= 5


def test_compiled_blocks_with_a_method(any_pipe, fresh) -> None:
    method = NOVA(t_est=2, alpha=10, uncomputed="nothing") + Truncate(1)
    plain = ask(any_pipe, 2, method=method)
    other = copy.copy(any_pipe)
    other.executor = Compiled("eager")
    again = ask(other, 2, method=method)
    assert plain.trace.share() < 0.9
    assert same_tokens(plain, again)


def test_enlarging_is_a_transposed_convolution() -> None:
    torch.manual_seed(0)
    upsample = Upsample(6)
    x = torch.randn(2, 6, 5, 7)
    assert torch.allclose(Doubled(upsample.conv)(x), upsample(x), atol=1e-5)


def test_the_decoder_for_a_gpu_shares_its_weights() -> None:
    torch.manual_seed(0)
    decoder = Decoder(32, (1, 2, 2), 4, 1, True)
    for norm in (m for m in decoder.modules() if isinstance(m, nn.GroupNorm)):
        nn.init.normal_(norm.weight)
    twin = for_gpu(decoder)
    z = torch.randn(1, 4, 6, 5)
    assert torch.allclose(twin(z), decoder(z), atol=1e-5)
    assert twin.conv_in.weight is decoder.conv_in.weight
    assert set(decoder.state_dict()) == set(Decoder(32, (1, 2, 2), 4, 1, True).state_dict())


def test_fixed_draws_are_those_of_the_call_at_work() -> None:
    first, second = PerImageDraws([1, 2]), PerImageDraws([3, 4])
    fixed = FixedDraws(first)
    probs = torch.rand(2, 5, 3)
    place = fixed.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_)
    assert torch.equal(fixed.categorical(probs, 2, (0, 1)), first.categorical(probs, 2, (0, 1)))
    fixed.source = second
    fixed.refill(2, (0, 1))
    assert torch.equal(fixed.categorical(probs, 2, (0, 1)), second.categorical(probs, 2, (0, 1)))
    assert fixed.noise(probs, 2, (0, 1), "token", torch.Tensor.exponential_) is place


def test_padding_of_prompts_changes_nothing(any_pipe) -> None:
    plain = ask(any_pipe, 2)
    other = copy.copy(any_pipe)
    other.executor = make_executor("eager", any_pipe.device)
    other.executor.text_slots = 64
    assert same_tokens(plain, ask(other, 2))


def test_an_unknown_runtime() -> None:
    with pytest.raises(NextscaleError, match="unknown runtime 'fast'; allowed: eager, compiled, graphs"):
        make_executor("fast", torch.device("cpu"))


def test_graphs_without_a_gpu(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert make_executor("graphs", torch.device("cpu")).name == "eager"
    assert "runtime graphs needs a CUDA GPU, not cpu; the pictures are made with runtime eager" in caplog.text
