"""Kernels that work on maps and logits, in Triton's interpreter against plain numpy: norms, convolutions, codes, bits,
the lens.

Sizes of 1, one more than a block, odd widths; all that nobody may read is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fences import fenced, fences, some, some_tokens
from support.plain import (
    Array,
    bit_entropy,
    close,
    close_fp8,
    conv,
    folded,
    group_norm,
    layer_norm,
    plain,
    resized,
    resized_tokens,
    sigmoid,
    unfolded,
)
from torch import Tensor, nn

from nextscale.kernels.fp8 import FP8_DTYPE, InputFormat
from nextscale.kernels.logit_lens import BitHead, BitStats, RestoredState
from nextscale.kernels.triton import group_norm as group_norm_kernels
from nextscale.kernels.triton import linear_fp32 as linear_fp32_kernels
from nextscale.kernels.triton import restored_logit_lens as restored_logit_lens_kernels
from nextscale.kernels.triton.bit_sampling import fused_combine, fused_draw, fused_entropy
from nextscale.kernels.triton.conv import fused_conv
from nextscale.kernels.triton.conv_out import fused_norm_and_conv
from nextscale.kernels.triton.feature_maps import fused_add, fused_inputs
from nextscale.kernels.triton.logit_lens import fused_head, fused_logit_lens
from nextscale.kernels.triton.restored_logit_lens import fused_restored_logit_lens
from nextscale.methods.selection import Packed


@pytest.fixture(autouse=True)
def _fences(request, monkeypatch) -> Iterator[None]:
    with fences(request.node.name, monkeypatch):
        yield


def a_map(batch: int, channels: int, *size: int, by: float = 0.2, plus: float = 0.1) -> Tensor:
    """Channels last, and so small that a norm's epsilon counts."""
    x = torch.randn(batch, channels, *size) * by + plus
    return fenced(x.contiguous(memory_format=torch.channels_last))


def a_norm(groups: int, channels: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(groups, channels, eps=0.01).requires_grad_(False)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("splits", [264, 2], ids=["many splits", "two splits"])
@pytest.mark.parametrize(("groups", "channels", "size"), [(8, 8, (1, 1)), (8, 64, (5, 13)), (4, 256, (7, 19))])
def test_group_norm(monkeypatch, silu: bool, splits: int, groups: int, channels: int, size: tuple[int, int]) -> None:
    monkeypatch.setattr(group_norm_kernels, "MAX_SPLITS", splits)
    norm, x, h, offset = a_norm(groups, channels), a_map(2, channels, *size), a_map(2, channels, *size), some(channels)
    plus, same = plain(offset)[:, None, None], InputFormat(torch.float32)
    close(
        group_norm_kernels.fused_norm(x, offset, norm, silu, False, None, same), group_norm(plain(x) + plus, norm, silu)
    )
    exact = group_norm(plain(x), norm, silu)
    close_fp8(group_norm_kernels.fused_norm(x, None, norm, silu, False, None, InputFormat(FP8_DTYPE, 16.0)), exact * 16)
    total = plain(x) + plain(h) + plus
    joined, sums = group_norm_kernels.fused_add(x, h, offset, groups)
    assert joined.data_ptr() == h.data_ptr(), "in its place"
    close(joined, total)
    known_sums(sums, total)
    found = group_norm_kernels.fused_norm(x, None, norm, silu, True, None, same)
    assert found.data_ptr() == x.data_ptr(), "in its place"
    close(found, exact, 1e-4)
    close(group_norm_kernels.fused_norm(h, None, norm, silu, False, sums, same), group_norm(total, norm, silu), 1e-4)


def known_sums(sums: Tensor, exact: Array) -> None:
    """Over all parts, of the groups of maps."""
    groups = exact.reshape(len(exact), sums.shape[2], -1)
    close(sums.sum(-1), np.stack((groups.sum(-1), (groups**2).sum(-1)), 1), 1e-3)


def test_a_norm_of_many_sums() -> None:
    """More than a program adds up at once."""
    norm, x = a_norm(4, 32), a_map(2, 32, 3, 5)
    groups = plain(x).reshape(2, 4, -1)
    share = torch.rand(1100, dtype=torch.float64)
    exact = np.stack((groups.sum(-1), (groups**2).sum(-1)), 1)[..., None] * plain(share / share.sum())
    sums = fenced(torch.from_numpy(exact).float())
    close(
        group_norm_kernels.fused_norm(x, None, norm, True, False, sums, InputFormat(torch.float32)),
        group_norm(plain(x), norm, True),
    )


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "joined"),
    [(128, 128, (9, 17), True), (128, 256, (17, 3), False), (256, 128, (1, 1), True)],
)
def test_a_convolution(channels: int, outputs: int, size: tuple[int, int], joined: bool) -> None:
    """With its descriptors of tiles, in float32 instead of FP8."""
    x, term = a_map(2, channels, *size, by=1.0), some(outputs)
    weight = fenced((torch.randn(outputs, channels, 3, 3) / 30).contiguous(memory_format=torch.channels_last))
    other = a_map(2, outputs, *size) if joined else None
    found, sums = fused_conv(x, SimpleNamespace(weight=weight, factor=0.5), term, 32, other)
    exact = conv(plain(x), plain(weight)) / 2 + plain(term)[:, None, None] + (plain(other) if joined else 0)
    close(found, exact, 1e-4)
    known_sums(sums, exact)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "outputs", "size"), [(32, 3, (1, 1)), (64, 1, (3, 47)), (32, 3, (33, 32))])
def test_norm_and_a_convolution_to_few_channels(channels: int, outputs: int, size: tuple[int, int], bias: bool) -> None:
    norm, layer = a_norm(8, channels), nn.Conv2d(channels, outputs, 3, padding=1, bias=bias).requires_grad_(False)
    x = a_map(2, channels, *size)
    taps = fenced(layer.weight.permute(1, 2, 3, 0).flatten(1))
    exact = conv(group_norm(plain(x), norm, True), plain(layer.weight))
    exact = exact + plain(layer.bias)[:, None, None] if bias else exact
    close(fused_norm_and_conv(x, norm, layer, taps, None), exact, 1e-4)


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 4), (8, 6)])
def test_codes_go_into_a_map_and_out_of_it(patch: int, grid: tuple[int, int]) -> None:
    features, codes = some(2, 5, 8 * patch, 6 * patch), some(2, math.prod(grid), 5 * patch**2)
    enlarged = resized(folded(plain(codes), grid, patch), features.shape[2:])
    close(fused_add(features, codes, grid, patch), plain(features) + enlarged)
    small = resized(plain(features), (grid[0] * patch, grid[1] * patch))
    close(fused_inputs(features, grid, patch), unfolded(small, patch))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 19, 27)])
def test_bits(shape: tuple[int, int, int]) -> None:
    """Guidance, entropy and the draw; the last shape has one bit more than two programs take."""
    images, tokens, bits = shape
    rows = some(2 * images, tokens, bits, 2, by=3.0)
    found = fused_combine(rows, images, 2.5, 0.7)
    close(found, 0.7 * (2.5 * plain(rows[:images]) - 1.5 * plain(rows[images:])))
    weight, one, by = torch.tensor([2.5, 1.0, 0.7], dtype=torch.float64).unbind()
    for on_device in ((weight, by), (2.5, by), (weight, 0.7)):
        assert torch.equal(fused_combine(rows, images, *on_device), found)
    endless = torch.cat((rows[:images], torch.full_like(rows[images:], torch.inf)))
    assert torch.equal(fused_combine(endless, images, one, 1.0), rows[:images])
    logits = some(images, tokens, bits, 2, by=3.0)
    logits[0, 0, 0] = 1.5  # as likely as each other
    z = plain(logits[..., 1]) - plain(logits[..., 0])
    close(fused_entropy(logits, "token"), bit_entropy(z).sum(-1))
    close(fused_entropy(logits, "bit"), bit_entropy(z).mean(-1))
    noise = fenced(torch.empty(logits.shape).exponential_())
    noise[0, 0, 0] = torch.tensor([0.5, 0.6])
    for top_p, top_k in ((0.0, 0), (0.4, 900), (0.9, 0), (0.9, 1), (0.0, 1)):
        p = np.stack((sigmoid(-z), sigmoid(z)), -1)
        if top_p or top_k == 1:  # of two values only the less likely one can be left out
            p[((p <= 1 - top_p) | (top_k == 1)) & (p < p[..., ::-1])] = 0
        race = p / plain(noise)
        assert (np.abs(race[..., 0] - race[..., 1]) > 1e-6 * race.max(-1)).all(), "no decision is close"
        assert np.array_equal(fused_draw(logits, noise, top_p, top_k).numpy(), race.argmax(-1))
        on_device = torch.tensor([top_p, top_k], dtype=torch.float64).unbind()
        assert np.array_equal(fused_draw(logits, noise, *on_device).numpy(), race.argmax(-1))


@pytest.mark.parametrize("programs", [264, 1], ids=["splits", "whole"])
@pytest.mark.parametrize(
    ("rows", "tokens", "channels", "outputs"), [(1, 1, 64, 1), (2, 33, 192, 10), (1, 65, 1024, 128), (3, 7, 256, 65)]
)
def test_an_exact_linear_layer(monkeypatch, programs, rows, tokens, channels, outputs) -> None:
    monkeypatch.setattr(linear_fp32_kernels, "PROGRAMS", programs)
    x, weight, bias = some(rows, tokens, channels), some(outputs, channels), some(outputs)
    close(linear_fp32_kernels.fused_linear(x, weight, bias), plain(x) @ plain(weight).T + plain(bias), 1e-4)


def a_head(images: int, channels: int, bits: int) -> BitHead:
    factor = some(images, channels, bits, by=0.1)
    return BitHead(factor, fenced(factor.sum(1)), some(images, bits), 0.05)


@pytest.mark.parametrize(("channels", "bits"), [(64, 1), (1100, 5)])
def test_a_head_of_bits(channels: int, bits: int) -> None:
    weight, bias, scale, shift = some(2 * bits, channels), some(2 * bits), some(3, channels), some(3, channels)
    factor, total, term = fused_head(weight, bias, scale, shift)
    apart = plain(weight[1::2] - weight[::2])
    exact = (1 + plain(scale))[:, :, None] * apart.T
    close(factor, exact)
    close(total, exact.sum(1), 1e-4)
    close(term, plain(shift) @ apart.T + plain(bias[1::2] - bias[::2]), 1e-4)


def looked(x: Array, head: BitHead, unit: str) -> tuple[Array, Array, Array]:
    products = x @ plain(head.factor)
    z = layer_norm(x, head.eps) @ plain(head.factor) + plain(head.term)[:, None]
    entropy = bit_entropy(z)
    moments = np.stack((x.mean(-1), x.var(-1)), -1)
    return entropy.sum(-1) if unit == "token" else entropy.mean(-1), products, moments


def agree(stats: BitStats, exact: tuple[Array, Array, Array]) -> None:
    close(stats.entropy, exact[0], 1e-4)
    close(stats.products[..., : exact[1].shape[-1]], exact[1], 1e-4)
    close(stats.moments, exact[2], 1e-4)


@pytest.mark.parametrize("unit", ["token", "bit"])
@pytest.mark.parametrize(("tokens", "channels", "bits"), [(1, 64, 1), (65, 256, 5), (9, 128, 17)])
def test_the_lens(unit: str, tokens: int, channels: int, bits: int) -> None:
    x = fenced((torch.randn(2, tokens + 3, channels) * 0.3 + 0.2)[:, 3:])
    head = a_head(2, channels, bits)
    agree(BitStats(*fused_logit_lens(x, head, unit)), looked(plain(x), head, unit))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", None])
@pytest.mark.parametrize(("grids", "counts"), [(((3, 4), (5, 7)), [0, 35]), (((9, 8), (10, 10)), [65, 1])])
@pytest.mark.parametrize(("programs", "spare"), [(132, 200), (1, 0)], ids=["many programs", "one program"])
def test_the_lens_follows_holes_that_are_filled(
    monkeypatch, mode: str | None, grids, counts: list[int], programs: int, spare: int
) -> None:
    """What is left of an earlier stats is as good as a stats at all of it. Without a mode, holes stay as they are."""
    monkeypatch.setattr(restored_logit_lens_kernels, "num_sms", lambda device: programs)
    images, channels, bits, cells = 2, 128, 5, math.prod(grids[1])
    x, head = some(2 * images, cells, channels, by=0.3), a_head(images, channels, bits)
    stats = BitStats(*fused_logit_lens(x[:images], head, "bit"))
    chosen, _ = some_tokens(cells, counts * 2, 2 * sum(counts) + spare)
    cached = None if mode is None else some(2 * images, math.prod(grids[0]), channels, by=0.3)
    hole = chosen.slot[..., None] < 0
    new = torch.randn(x.shape) if cached is None else x + torch.from_numpy(resized_tokens(cached, grids, mode)).float()
    x.copy_(torch.where(hole, x if cached is None else new, torch.randn(x.shape)))
    exact = looked(plain(x[:images]), head, "bit")
    stats.moments.copy_(torch.from_numpy(exact[2]))  # by whoever filled them
    restored = RestoredState(x, chosen) if cached is None else RestoredState(x, chosen, cached, grids, mode)
    fused_restored_logit_lens(restored, stats, head, "bit")
    agree(stats, exact)


@pytest.mark.parametrize("mode", ["bilinear", None])
def test_a_batch_sees_what_its_images_see(mode: str | None) -> None:
    """To the last digit, whatever room there is."""
    images, channels, grids = 2, 128, ((3, 4), (9, 9))
    cells = math.prod(grids[1])
    x, head = some(2 * images, cells, channels, by=0.3), a_head(images, channels, 5)
    cached = None if mode is None else some(2 * images, math.prod(grids[0]), channels)
    chosen, kept = some_tokens(cells, [66, 70, 66, 70])
    stats = BitStats(*fused_logit_lens(x[:images], head, "bit"))
    alone = [BitStats(*(fenced(t[i : i + 1]) for t in stats)) for i in range(images)]
    more = (grids, mode) if mode is not None else ()
    fused_restored_logit_lens(RestoredState(x, chosen, cached, *more), stats, head, "bit")
    for i in range(images):
        mask = torch.zeros(1, cells, dtype=torch.bool)
        mask[0, kept[i]] = True
        mine = BitHead(*(fenced(t[i : i + 1]) for t in head[:3]), head.eps)
        old = None if cached is None else fenced(cached[i : i + 1])
        fused_restored_logit_lens(
            RestoredState(fenced(x[i : i + 1]), Packed.of_mask(mask), old, *more), alone[i], mine, "bit"
        )
        assert torch.equal(alone[i].entropy[0], stats.entropy[i])
