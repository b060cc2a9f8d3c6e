"""Kernels of attention in Triton's interpreter, against plain numpy: ragged rows, odd sizes, NaN where nobody may look.

In float32, which the interpreter multiplies rightly; a GPU runs them in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fences import fenced, fences, some, whole
from nextscale.kernels import absorbed_triton, few_keys_triton
from nextscale.kernels.absorbed_triton import fused_fold, fused_softmax
from nextscale.kernels.attention_triton import fused
from nextscale.kernels.fp8 import FORMAT, Reads
from nextscale.kernels.keys_triton import split_and_store
from nextscale.methods.selection import Selection
from plain import attention, close, cosine, eight_bits, plain


@pytest.fixture(autouse=True)
def _fences(request, monkeypatch) -> Iterator[None]:
    with fences(request.node.name, monkeypatch):
        yield


def heads_inside(*shape: int) -> Tensor:
    """[R, H, K, D] whose heads lie inside of a token, as a linear layer gives them."""
    rows, heads, tokens, width = shape
    return fenced(torch.randn(rows, tokens, heads, width).transpose(1, 2))


def hidden(k: Tensor, length: list[int]) -> Tensor:
    """NaN behind the first `length` keys of every row."""
    for row, n in enumerate(length):
        k[row, :, n:] = math.nan
    return k


TUNED = {"BLOCK_Q": 16, "BLOCK_K": 16, "num_warps": 4}


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize(("queries", "length", "more"), [(1, [1, 16], [0, 1]), (17, [33, 5], [15, 16])])
@pytest.mark.parametrize("entropy", [False, True])
def test_attention(shares: int, queries: int, length: list[int], more: list[int], entropy: bool) -> None:
    """With four shares some of them have no key."""
    total = [a + b for a, b in zip(length, more, strict=True)]
    q, k, v = heads_inside(2, 2, queries, 32), some(2, 2, 50, 32), heads_inside(2, 2, 50, 32)
    q *= 2
    hidden(k, total), hidden(v, total)
    seen, spread = fused(q, k, v, 0.3, whole(*length), whole(*more), entropy, SHARES=shares, **TUNED)
    exact, right = attention(q, k, v, 0.3, total)
    close(seen, exact)
    assert (spread is not None) == entropy
    if spread is not None:
        close(spread, right)


def test_attention_over_all_keys() -> None:
    q, k, v = some(1, 3, 5, 32), some(1, 3, 33, 32), some(1, 3, 33, 32)
    seen, spread = fused(q, k, v, 0.3, None, None, True, SHARES=1, **TUNED)
    exact, right = attention(q, k, v, 0.3)
    close(seen, exact)
    close(spread, right)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize(("length", "more"), [([0, 17, 16], [16, 1, 33]), ([50, 1, 40], [0, 40, 0])])
def test_attention_whose_newest_keys_lie_apart(shares: int, length: list[int], more: list[int]) -> None:
    """Of a row all keys may lie there, or none."""
    q, k, v = heads_inside(3, 2, 17, 32), some(3, 2, 50, 32), heads_inside(3, 2, 50, 32)
    tail = heads_inside(3, 2, 40, 32), heads_inside(3, 2, 40, 32)
    for t, n in ((k, length), (v, length), (tail[0], more), (tail[1], more)):
        hidden(t, n)
    seen, spread = fused(q, k, v, 0.3, whole(*length), whole(*more), True, tail, SHARES=shares, **TUNED)
    joined = (
        torch.stack([torch.cat((a[r, :, :n], b[r], a[r, :, n:]), 1) for r, n in enumerate(length)])
        for a, b in zip((k, v), tail, strict=True)
    )
    exact, right = attention(q, *joined, 0.3, [a + b for a, b in zip(length, more, strict=True)])
    close(seen, exact)
    close(spread, right)


@pytest.mark.parametrize("programs", [396, 4], ids=["a round", "rounds"])
@pytest.mark.parametrize(
    ("queries", "keys", "length"),
    [(1, 1, [1, 1]), (16, 15, [15, 1]), (17, 16, [3, 16]), (130, 17, [16, 17]), (65, 128, None)],
)
def test_attention_over_few_keys(monkeypatch, programs: int, queries: int, keys: int, length: list[int] | None) -> None:
    monkeypatch.setattr(few_keys_triton, "PROGRAMS", programs)
    q, k, v = heads_inside(2, 3, queries, 32), some(2, 3, keys, 32), heads_inside(2, 3, keys, 32)
    lengths = None
    if length is not None:
        hidden(k, length), hidden(v, length)
        lengths = whole(*length)
    seen, _ = fused(q, k, v, 0.3, lengths)
    assert seen.transpose(1, 2).is_contiguous(), "as the projection reads it"
    close(seen, attention(q, k, v, 0.3, length)[0])


@pytest.mark.parametrize(
    "tuned", [{}, {"SHARES": 1, **TUNED}, {"SHARES": 2, **TUNED}], ids=["few keys", "walk", "join"]
)
def test_attention_in_front_of_8_bits(tuned: dict[str, int]) -> None:
    q, k, v = heads_inside(2, 2, 9, 32), some(2, 2, 20, 32), some(2, 2, 20, 32)
    v[0, 0, 0] = 1e6  # too large for 8 bits
    seen, _ = fused(q, k, v, 0.3, whole(20, 7), reads=Reads(FORMAT, 4.0), **tuned)
    exact = attention(q, k, v, 0.3, [20, 7])[0] * 4
    assert exact.max() > 448
    eight_bits(seen, exact)


FEW = [(1, None), (9, (0, 9)), (8, (8, 1))]
KEYS = [(width, rotary, *few) for width in (32, 64) for rotary in (0, 1, 2) for few in FEW]


@pytest.mark.parametrize(("width", "rotary", "tokens", "counts"), [*KEYS, (64, 2, 257, (256, 3))])
def test_keys_and_values(width: int, rotary: int, tokens: int, counts: tuple[int, int] | None) -> None:
    """`rotary`: so many rows of positions."""
    rows, heads, cells, room = 2, 2, tokens + 3, tokens + 9
    attn = SimpleNamespace(log_scale=fenced(torch.tensor([1.3, 7.0]).view(1, heads, 1, 1)))  # exp(7) is above 100
    qkv = some(rows, tokens, 3, heads, width)
    qkv[0, 0, :, 0] *= 1e-9 / math.sqrt(width)  # still a direction
    angle = torch.randn(max(rotary, 1), cells if counts else tokens, width // 2)
    positions = fenced(torch.stack((angle.cos(), angle.sin()), -1)) if rotary else None
    keys, values = (fenced(torch.full((rows, room, heads, width), math.nan).transpose(1, 2)) for _ in range(2))
    chosen, start, starts = None, 4, [4, 4]
    stored = [tokens] * rows if counts is None else list(counts)
    index = torch.arange(tokens).repeat(rows, 1)
    if counts is not None:
        index = torch.stack([torch.randperm(cells)[:tokens].sort().values for _ in range(rows)])
        for row, n in enumerate(counts):  # padding
            index[row, n:] = cells - 1
            qkv[row, n:] = math.nan
        chosen, starts = Selection(fenced(index), whole(*counts)), [room - tokens, 2]
        start = whole(*starts)
    q = split_and_store(attn, qkv, positions, keys, values, start, chosen)
    assert q.shape == (rows, heads, tokens, width)
    for row, (n, first) in enumerate(zip(stored, starts, strict=True)):
        turn = None if positions is None else plain(positions[row % rotary])[index[row]]
        asked, kept, given = plain(qkv[row]).transpose(1, 2, 0, 3)
        close(q[row, :, :n], cosine(asked, plain(attn.log_scale.flatten()), turn)[:, :n], 1e-4)
        close(keys[row, :, first : first + n], cosine(kept, None, turn)[:, :n])
        close(values[row, :, first : first + n], given[:, :n], 0)
        for t in (keys, values):
            assert t[row, :, :first].isnan().all()
            assert t[row, :, first + n :].isnan().all(), "padding goes nowhere"


@pytest.mark.parametrize("programs", [528, 4], ids=["a round", "rounds"])
@pytest.mark.parametrize(("slots", "length"), [(48, [1, 47]), (16, [16, 5]), (32, None)])
def test_attention_that_absorbs_its_linear_layers(monkeypatch, programs: int, slots: int, length) -> None:
    """Keys and values that know the layers, the weights over them, and both put together: against the layers one by
    one."""
    monkeypatch.setattr(absorbed_triton, "PROGRAMS", programs)
    rows, heads, width, channels, queries = 2, 2, 32, 192, 11
    q, proj = nn.Linear(channels, heads * width), nn.Linear(heads * width, channels)
    k, v = torch.randn(2, rows, slots, heads, width).permute(0, 1, 3, 2, 4)
    k, v, x = fenced(k), fenced(v), some(rows, queries, channels)
    lengths = None
    if length is not None:
        hidden(k, length), hidden(v, length)
        lengths = whole(*length)
    with torch.inference_mode():
        keys, bias, values = fused_fold(q, proj, k, v, 0.3 / math.log(2), lengths)
    asked = plain(x) @ plain(q.weight).T + plain(q.bias)
    asked = torch.from_numpy(asked).unflatten(-1, (heads, width)).transpose(1, 2)
    for row, n in enumerate(length or [slots] * rows):
        weight = plain(q.weight).reshape(heads, width, channels)
        by = 0.3 / math.log(2)
        close(keys[row].unflatten(0, (heads, slots))[:, :n], plain(k[row, :, :n]) @ weight * by)
        term = np.einsum("htd,hd->ht", plain(k[row, :, :n]), plain(q.bias).reshape(heads, width)) * by
        close(bias[row].view(heads, slots)[:, :n], term)
        assert (bias[row].view(heads, slots)[:, n:] == -math.inf).all()
    scores = fenced((plain_product(x, keys)).float())
    p = fused_softmax(scores, bias, heads, torch.float32)
    assert torch.allclose(p.sum(-1), torch.full((rows, queries), float(heads)))
    found = plain_product(p, values.mT)
    seen, _ = attention(asked, k, v, 0.3, length)
    exact = seen.transpose(0, 2, 1, 3).reshape(rows, queries, -1) @ plain(proj.weight).T + plain(proj.bias)
    close(found, exact)


def plain_product(x: Tensor, keys: Tensor) -> Tensor:
    return x.double() @ keys.double().mT
