"""Kernels of attention in Triton's interpreter, against plain numpy: ragged rows, odd sizes, NaN where nobody may look.

In float32, which the interpreter multiplies rightly; a GPU runs them in 16 bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fences import fenced, fences, some, whole
from support.plain import Array, attention, close, close_fp8, cosine, halves, pairs, plain
from torch import Tensor, nn

from nextscale.kernels.fp8 import FP8_DTYPE, InputFormat
from nextscale.kernels.triton import absorbed_cross_attention as absorbed_cross_attention_kernels
from nextscale.kernels.triton import flash_attention as flash_attention_kernels
from nextscale.kernels.triton import flash_tiles
from nextscale.kernels.triton import kv_store as kv_store_kernels
from nextscale.kernels.triton import short_kv_attention as short_kv_attention_kernels
from nextscale.kernels.triton import varlen_attention as varlen_attention_kernels
from nextscale.kernels.triton.absorbed_cross_attention import fused_fold, fused_softmax
from nextscale.kernels.triton.flash_attention import fused_attention
from nextscale.kernels.triton.flash_tiles import num_kv_splits, num_kv_splits_on_device
from nextscale.kernels.triton.kv_store import split_and_store
from nextscale.methods.selection import Packed

triton = pytest.importorskip("triton")
tl = triton.language


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


@triton.jit
def _decide(found_ptr, items, keys, num_sms, IDLE: tl.constexpr, BUSY: tl.constexpr):
    tl.store(found_ptr, num_kv_splits_on_device(items, keys, num_sms, IDLE, BUSY))


CONFIG = {"BLOCK_Q": 16, "BLOCK_K": 16, "num_warps": 4}


def split_keys(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Small blocks, and so many programs that share the keys."""
    monkeypatch.setattr(flash_attention_kernels, "block_config", lambda *sizes: dict(CONFIG))
    monkeypatch.setattr(flash_attention_kernels, "num_kv_splits", lambda *sizes: splits)


def min_keys(monkeypatch: pytest.MonkeyPatch, idle: int, busy: int) -> None:
    """So many keys are worth a program."""
    for module in (flash_tiles, varlen_attention_kernels):
        monkeypatch.setattr(module, "MIN_KEYS_IDLE", idle)
        monkeypatch.setattr(module, "MIN_KEYS_BUSY", busy)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(("queries", "length", "more"), [(1, [1, 16], [0, 1]), (17, [33, 5], [15, 16])])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_attention(
    monkeypatch, splits: int, queries: int, length: list[int], more: list[int], return_entropy: bool
) -> None:
    """With four splits some of them have no key."""
    split_keys(monkeypatch, splits)
    total = [a + b for a, b in zip(length, more, strict=True)]
    q, k, v = heads_inside(2, 2, queries, 32), some(2, 2, 50, 32), heads_inside(2, 2, 50, 32)
    q *= 2
    hidden(k, total), hidden(v, total)
    output, entropy = fused_attention(q, k, v, 0.3, whole(*length), whole(*more), return_entropy)
    exact, right = attention(q, k, v, 0.3, total)
    close(output, exact)
    assert (entropy is not None) == return_entropy
    if entropy is not None:
        close(entropy, right)


def test_attention_over_all_keys(monkeypatch) -> None:
    split_keys(monkeypatch, 1)
    q, k, v = some(1, 3, 5, 32), some(1, 3, 33, 32), some(1, 3, 33, 32)
    output, entropy = fused_attention(q, k, v, 0.3, None, None, True)
    exact, right = attention(q, k, v, 0.3)
    close(output, exact)
    close(entropy, right)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("length", "more"), [([0, 17, 16], [16, 1, 33]), ([50, 1, 40], [0, 40, 0])])
def test_attention_whose_newest_keys_lie_apart(monkeypatch, splits: int, length: list[int], more: list[int]) -> None:
    """All keys of a row may be of the last scale, or none."""
    split_keys(monkeypatch, splits)
    q, k, v = heads_inside(3, 2, 17, 32), some(3, 2, 50, 32), heads_inside(3, 2, 50, 32)
    last_kv = heads_inside(3, 2, 40, 32), heads_inside(3, 2, 40, 32)
    for t, n in ((k, length), (v, length), (last_kv[0], more), (last_kv[1], more)):
        hidden(t, n)
    output, entropy = fused_attention(q, k, v, 0.3, whole(*length), whole(*more), True, last_kv)
    joined = (
        torch.stack([torch.cat((a[r, :, :n], b[r], a[r, :, n:]), 1) for r, n in enumerate(length)])
        for a, b in zip((k, v), last_kv, strict=True)
    )
    exact, right = attention(q, *joined, 0.3, [a + b for a, b in zip(length, more, strict=True)])
    close(output, exact)
    close(entropy, right)


@pytest.mark.parametrize("num_sms", [132, 1], ids=["a round", "rounds"])
@pytest.mark.parametrize(
    ("queries", "keys", "length"),
    [(1, 1, [1, 1]), (16, 15, [15, 1]), (17, 16, [3, 16]), (130, 17, [16, 17]), (65, 128, None)],
)
def test_attention_over_few_keys(monkeypatch, num_sms: int, queries: int, keys: int, length: list[int] | None) -> None:
    monkeypatch.setattr(short_kv_attention_kernels, "num_sms", lambda _: num_sms)
    q, k, v = heads_inside(2, 3, queries, 32), some(2, 3, keys, 32), heads_inside(2, 3, keys, 32)
    lengths = None
    if length is not None:
        hidden(k, length), hidden(v, length)
        lengths = whole(*length)
    output, _ = fused_attention(q, k, v, 0.3, lengths)
    assert output.transpose(1, 2).is_contiguous(), "as the projection reads it"
    close(output, attention(q, k, v, 0.3, length)[0])


@pytest.mark.parametrize("splits", [0, 1, 2], ids=["few keys", "walk", "merge"])
def test_attention_in_front_of_fp8(monkeypatch, splits: int) -> None:
    if splits:
        monkeypatch.setattr(flash_attention_kernels, "SHORT_KV", 0)
        split_keys(monkeypatch, splits)
    q, k, v = heads_inside(2, 2, 9, 32), some(2, 2, 20, 32), some(2, 2, 20, 32)
    v[0, 0, 0] = 1e6  # too large for FP8
    output, _ = fused_attention(q, k, v, 0.3, whole(20, 7), input_format=InputFormat(FP8_DTYPE, 4.0))
    exact = attention(q, k, v, 0.3, [20, 7])[0] * 4
    assert exact.max() > 448
    close_fp8(output, exact)


def packed(counts: Sequence[int], cells: int, capacity: int) -> tuple[Packed, list[Tensor]]:
    """So many of the cells of every row, and which; behind them is anything."""
    index = [torch.randperm(cells)[:n].sort().values for n in counts]
    cell = torch.full((capacity,), -(2**31))
    cell[: sum(counts)] = torch.cat([row * cells + these for row, these in enumerate(index)])
    slot = torch.full((len(counts), cells), -1, dtype=torch.int32)
    start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return Packed(fenced(cell.int()), fenced(start), slot), index


def one_by_one(rows: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """What every row has of [1, H, T, D] or [1, T]."""
    first = 0
    for n in counts:
        yield rows[..., first : first + n, :] if rows.ndim == 4 else rows[:, first : first + n]
        first += n


# Queries and earlier keys of rows, splits of the keys, and SMs.
PACKED = [
    ([0, 1], [0, 0], 1, 2),
    ([1, 0], [31, 200], 4, 8),
    ([63, 65], [0, 37], 1, 2),
    ([63, 65], [37, 0], 2, 10),
    ([17, 130, 5], [200, 1, 64], 1, 3),
    ([17, 130, 5], [64, 70, 200], 2, 5),
    ([40, 40], [16, 3], 4, 16),
    ([0, 0, 0], [5, 5, 5], 1, 2),
    ([2, 0, 3, 0, 1], [80, 9, 0, 1, 47], 2, 6),
]


@pytest.mark.parametrize(("counts", "length", "splits", "num_sms"), PACKED)
@pytest.mark.parametrize(
    ("apart", "return_entropy", "dtype"),
    [(False, True, torch.int32), (True, False, torch.long)],
    ids=["entropy", "last scale"],
)
def test_packed_attention(monkeypatch, counts, length, splits, num_sms, apart, return_entropy, dtype) -> None:
    """Rows have any number of queries, and splits any number of keys; nobody looks behind them."""
    min_keys(monkeypatch, *((9999, 9999) if splits == 1 else (4, 4)))
    monkeypatch.setattr(varlen_attention_kernels, "BLOCKS", {"BLOCK_Q": 32, "BLOCK_K": 32, "num_warps": 4})
    items = 2 * sum(-(-n // 32) for n in counts)
    keys = max(a + b if a else 0 for a, b in zip(counts, length, strict=True))
    assert num_kv_splits(items, keys, num_sms) == splits or not items
    monkeypatch.setattr(varlen_attention_kernels, "num_sms", lambda _: num_sms)
    rows, total = len(counts), [a + b for a, b in zip(counts, length, strict=True)]
    chosen, _ = packed(counts, max(*counts, 1), sum(counts) + 20)
    q = heads_inside(1, 2, sum(counts) + 20, 32)
    q[:, :, sum(counts) :] = math.nan
    k, v = some(rows, 2, 240, 32), heads_inside(rows, 2, 240, 32)
    hidden(k, total), hidden(v, total)
    all_k, all_v, behind = k.clone(), v.clone(), None
    if apart:
        behind = tuple(fenced(torch.full((rows, 2, 140, 32), math.nan)) for _ in "kv")
        for there, here in zip(behind, (k, v), strict=True):
            for row, (n, more) in enumerate(zip(length, counts, strict=True)):
                there[row, :, :more] = here[row, :, n : n + more]
            hidden(here, length)
    counters = fenced(torch.zeros(3 * num_sms, dtype=torch.int32))
    monkeypatch.setattr(varlen_attention_kernels, "counters", lambda _: counters)
    lengths = fenced(torch.tensor(length, dtype=dtype))
    output, entropy = fused_attention(q, k, v, 0.3, lengths, None, return_entropy, behind, chosen=chosen, grown=True)
    assert not counters.any(), "for the next call"
    assert output.shape == q.shape
    assert output.transpose(1, 2).is_contiguous(), "as the projection reads it"
    assert (entropy is not None) == return_entropy
    entropies = one_by_one(q[:, 0, :, 0] if entropy is None else entropy, counts)
    for row, (queries, found, spread) in enumerate(
        zip(one_by_one(q, counts), one_by_one(output, counts), entropies, strict=True)
    ):
        if counts[row]:
            exact, right = attention(queries, all_k[row : row + 1], all_v[row : row + 1], 0.3, [total[row]])
            close(found, exact)
            if return_entropy:
                close(spread, right)


def test_packed_queries_split_keys_as_others_do(monkeypatch) -> None:
    """The device and the host decide alike."""
    min_keys(monkeypatch, 4, 8)
    decided = {}
    for items, keys, num_sms in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 12, 13), (7, 8, 16, 31, 32, 64), (1, 4, 16)):
        found = torch.zeros(1, dtype=torch.int32)
        _decide[(1,)](found, items, keys, num_sms, IDLE=4, BUSY=8)
        decided[items, keys, num_sms] = int(found)
        assert int(found) == num_kv_splits(items, keys, num_sms)
    assert set(decided.values()) == {1, 2, 4}


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, FP8_DTYPE], ids=["16 bits", "fp8"])
def test_packed_attention_as_a_layer_reads_it(monkeypatch, splits: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(varlen_attention_kernels, "num_sms", lambda _: 8)
    counts, length = [3, 17], [60, 40]
    chosen, _ = packed(counts, 30, 64)
    q, k, v = heads_inside(1, 2, 64, 32), some(2, 2, 80, 32), some(2, 2, 80, 32)
    v[0, 0, 0] = 1e4  # too large for FP8
    min_keys(monkeypatch, *((8, 8) if splits > 1 else (9999, 9999)))
    monkeypatch.setattr(varlen_attention_kernels, "BLOCKS", CONFIG)
    wanted = InputFormat(dtype, 4.0)
    output, _ = fused_attention(q, k, v, 0.3, whole(*length), input_format=wanted, chosen=chosen, grown=True)
    for row, (queries, found) in enumerate(zip(one_by_one(q, counts), one_by_one(output, counts), strict=True)):
        exact, _ = attention(queries, k[row : row + 1], v[row : row + 1], 0.3, [length[row] + counts[row]])
        if dtype == FP8_DTYPE:
            close_fp8(found, exact * 4)
        else:
            assert found.dtype == dtype
            close(found, exact, 2e-3)


@pytest.mark.parametrize("num_sms", [3, 1], ids=["a round", "rounds"])
@pytest.mark.parametrize("capacity", [300, 8], ids=["", "few"])
@pytest.mark.parametrize("keys", [17, 130], ids=["held", "walked"])
def test_packed_queries_over_a_text(monkeypatch, num_sms: int, capacity: int, keys: int) -> None:
    for module in (short_kv_attention_kernels, varlen_attention_kernels):
        monkeypatch.setattr(module, "num_sms", lambda _: num_sms)
    for counts in ([0, 8], [8, 0], [0, 0], [3, 5]) if capacity == 8 else ([17, 130, 5], [1, 0, 297]):
        rows = len(counts)
        length = [keys, 5, keys - 1][:rows]
        chosen, _ = packed(counts, 300, capacity)
        q, k, v = heads_inside(1, 3, capacity, 32), some(rows, 3, keys, 32), heads_inside(rows, 3, keys, 32)
        q[:, :, sum(counts) :] = math.nan
        hidden(k, length), hidden(v, length)
        output, _ = fused_attention(q, k, v, 0.3, whole(*length), chosen=chosen)
        for row, (queries, found) in enumerate(zip(one_by_one(q, counts), one_by_one(output, counts), strict=True)):
            if counts[row]:
                close(found, attention(queries, k[row : row + 1], v[row : row + 1], 0.3, [length[row]])[0])


def some_positions(turn: str, rows: int, cells: int, width: int) -> Tensor:
    angle = torch.randn(rows, cells, width if turn == "halves" else width // 2)
    return fenced(torch.stack((angle.cos(), angle.sin()), -1))


def of_keys(x: Array, log_scale: Tensor | None, positions: Array | None, turn: str, query: bool) -> Array:
    """x [H, K, D] as attention wants it."""
    if log_scale is not None:
        x = cosine(x, plain(log_scale.flatten()) if query else None)
    if positions is None:
        return x
    return halves(x, positions) if turn == "halves" else pairs(x, positions)


COSINE = [1.3, 7.0]  # exp(7) is above 100
SHAPES = [(32, 1, [2, 6]), (64, 9, None)]
TURNS = [("still", 1), ("pairs", 1), ("pairs", 2), ("halves", 1), ("halves", 2)]  # and so many rows of positions


@pytest.mark.parametrize(
    ("turn", "own", "normed", "width", "tokens", "starts"),
    [
        *((*turn, normed, *shape) for turn in TURNS for normed in (False, True) for shape in SHAPES),
        ("pairs", 2, True, 64, 257, [2, 6]),
    ],
)
def test_keys_and_values(turn: str, own: int, normed: bool, width: int, tokens: int, starts: list[int] | None) -> None:
    rows, heads, room = 2, 2, tokens + 9
    scale = fenced(torch.tensor(COSINE).view(1, heads, 1, 1)) if normed else None
    attn = SimpleNamespace(log_scale=scale, pairs=turn == "pairs")
    qkv = some(rows, tokens, 3, heads, width)
    qkv[0, 0, :, 0] *= 1e-9 / math.sqrt(width)  # still a direction
    positions = None if turn == "still" else some_positions(turn, own, tokens, width)
    keys, values = (fenced(torch.full((rows, room, heads, width), math.nan).transpose(1, 2)) for _ in range(2))
    q = split_and_store(attn, qkv, positions, keys, values, 4 if starts is None else whole(*starts))
    assert q.shape == (rows, heads, tokens, width)
    for row, first in enumerate(starts or [4, 4]):
        angles = None if positions is None else plain(positions[row % own])
        asked, kept, given = plain(qkv[row]).transpose(1, 2, 0, 3)
        close(q[row], of_keys(asked, scale, angles, turn, True), 1e-4)
        close(keys[row, :, first : first + tokens], of_keys(kept, scale, angles, turn, False))
        close(values[row, :, first : first + tokens], given, 0)
        for t in (keys, values):
            assert t[row, :, :first].isnan().all()
            assert t[row, :, first + tokens :].isnan().all()


@pytest.mark.parametrize(("turn", "own"), TURNS)
@pytest.mark.parametrize("normed", [False, True], ids=["", "cosine"])
@pytest.mark.parametrize(
    ("counts", "starts"),
    [([0, 1], None), ([1, 0], torch.long), ([9, 7], torch.int32), ([17, 20, 5], torch.long), ([20, 20], None)],
)
def test_keys_and_values_of_packed_tokens(
    monkeypatch, turn: str, own: int, normed: bool, counts: list[int], starts: torch.dtype | None
) -> None:
    """Of their rows, to their rows; what lies behind all of them goes nowhere."""
    monkeypatch.setattr(kv_store_kernels, "num_sms", lambda _: 1)
    rows, total, heads, width, cells, room = len(counts), sum(counts), 2, 32, 20, 29
    scale = fenced(torch.tensor(COSINE).view(1, heads, 1, 1)) if normed else None
    attn = SimpleNamespace(log_scale=scale, pairs=turn == "pairs")
    chosen, index = packed(counts, cells, total + 11)
    qkv = some(1, total + 11, 3, heads, width)
    qkv[:, total:] = math.nan
    positions = None if turn == "still" else some_positions(turn, rows if own > 1 else 1, cells, width)
    keys, values = (fenced(torch.full((rows, room, heads, width), math.nan).transpose(1, 2)) for _ in range(2))
    firsts = [4] * rows if starts is None else [room - counts[0], *[2] * (rows - 1)]
    start = 4 if starts is None else fenced(torch.tensor(firsts, dtype=starts))
    q = split_and_store(attn, qkv, positions, keys, values, start, chosen)
    assert q.shape == (1, heads, total + 11, width)
    assert q.transpose(1, 2).is_contiguous()
    begin = 0
    for row, (n, first) in enumerate(zip(counts, firsts, strict=True)):
        angles = None if positions is None else plain(positions[row if own > 1 else 0])[index[row].numpy()]
        asked, kept, given = plain(qkv[0, begin : begin + n]).transpose(1, 2, 0, 3)
        close(q[0, :, begin : begin + n], of_keys(asked, scale, angles, turn, True), 1e-4)
        close(keys[row, :, first : first + n], of_keys(kept, scale, angles, turn, False))
        close(values[row, :, first : first + n], given, 0)
        begin += n
        for t in (keys, values):
            assert t[row, :, :first].isnan().all()
            assert t[row, :, first + n :].isnan().all(), "what is nobody's goes nowhere"


@pytest.mark.parametrize("programs", [528, 4], ids=["a round", "rounds"])
@pytest.mark.parametrize(("slots", "length"), [(48, [1, 47]), (16, [16, 5]), (32, None)])
def test_attention_that_absorbs_its_linear_layers(monkeypatch, programs: int, slots: int, length) -> None:
    """Keys and values that know the layers, the weights over them, and both put together: against the layers one by
    one."""
    monkeypatch.setattr(absorbed_cross_attention_kernels, "PROGRAMS", programs)
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
