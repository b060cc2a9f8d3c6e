"""What kernels compute, on a GPU (`make test-gpu`) and, by the plain operations that stand for them, on the CPU: both
against numpy in float64 (`plain.py`). What would compare torch with itself on the CPU runs on a GPU only; there, and in
Triton's interpreter (`make test-kernels`), is the kernel."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from support import plain
from support.pipelines import ask, same_tokens
from torch import nn
from torch.nn import functional as F

from nextscale import NOVA
from nextscale.cache.kv import KVCache, select_positions
from nextscale.engine.entropy import token_entropy
from nextscale.engine.guidance import guide
from nextscale.engine.sampling import keep_top
from nextscale.engine.schedule import Scale
from nextscale.errors import NextscaleError
from nextscale.kernels import (
    absorbed_cross_attention,
    bit_sampling,
    feature_maps,
    flash_attention,
    kv_store,
    logit_lens,
    residual_norm,
)
from nextscale.kernels.bit_sampling import fused_draw
from nextscale.kernels.conv import convolve
from nextscale.kernels.conv import supports as supports_conv
from nextscale.kernels.conv_out import norm_and_conv, taps
from nextscale.kernels.fp8 import FP8_DTYPE, FP8Conv, FP8Linear, input_format
from nextscale.kernels.group_norm import add, group_norm
from nextscale.kernels.kv_store import split_and_store
from nextscale.kernels.linear_fp32 import linear_fp32
from nextscale.kernels.linear_gelu import linear_gelu
from nextscale.kernels.linear_small import linear_split_k
from nextscale.kernels.logit_lens import BitHead, BitStats, LogitLens, RestoredState, fused_logit_lens
from nextscale.kernels.pinned_copy import copy_pinned
from nextscale.kernels.residual_norm import Norm, gather_rows
from nextscale.kernels.restore import fused_record, fused_restore, fused_scatter
from nextscale.kernels.sdpa import attention_entropy
from nextscale.kernels.split_k import SplitKPartials
from nextscale.methods.nova.layer_linkage import LayerLinkage
from nextscale.methods.restore import CachedPolicy
from nextscale.methods.selection import Packed, Selection, scatter, topk_select
from nextscale.methods.token_cache import resize_tokens
from nextscale.models.fp8 import input_rms, round_convolutions, to_fp8
from nextscale.models.infinity import InfinityConditioning, TextAttention
from nextscale.models.layers import MLP, SelfAttention, rotate_half, rotate_pairs
from nextscale.models.residual import ResidualStream
from nextscale.runtime.decoder import GPUDecoder
from nextscale.runtime.registry import make_executor
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var
from nextscale.tokenizers.autoencoder import Decoder
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer

gpu = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
on_both = pytest.mark.parametrize("device", ["cpu", gpu])
on_gpu = pytest.mark.parametrize("device", [gpu])


def off(found: torch.Tensor, exact: torch.Tensor | plain.Array) -> float:
    exact = torch.as_tensor(exact, dtype=torch.float64, device=found.device)
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm())


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


@on_both
@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (2, 3, 5, 37), (1, 2, 200, 333), (3, 1, 64, 64)])
@pytest.mark.parametrize("width", [32, 128])
def test_attention_with_entropy(device: str, shape, width: int) -> None:
    rows, heads, queries, keys = shape
    torch.manual_seed(queries)
    q, k, v = (torch.randn(rows, heads, n, width, device=device).to(dtype_of(device)) for n in (queries, keys, keys))
    q = q * 3
    length = torch.randint(1, keys + 1, (rows,), device=device)
    assert flash_attention.supports(q) == (device == "cuda")
    for lengths in (None, length):
        seen, entropy = flash_attention.attend(q, k, v, 0.2, lengths, return_entropy=True)
        exact, right = plain.attention(q, k, v, 0.2, None if lengths is None else lengths.tolist())
        assert off(seen, exact) < (0.01 if device == "cuda" else 1e-5)
        assert (entropy.cpu() - torch.from_numpy(right)).abs().max() < 2e-3
    counted_late, _ = flash_attention.attend(q, k, v, 0.2, length - 1, torch.ones_like(length))
    assert torch.equal(counted_late, seen)


@on_both
@pytest.mark.parametrize("shape", [(2, 3, 5, 37), (2, 2, 200, 333), (1, 1, 40, 900)])
def test_attention_whose_newest_keys_lie_apart(device: str, shape) -> None:
    rows, heads, queries, keys = shape
    torch.manual_seed(queries)
    q, k, v, *tail = (
        torch.randn(rows, heads, n, 128, device=device).to(dtype_of(device)) for n in (queries, *[keys] * 4)
    )
    length, more = (torch.randint(1, keys + 1, (rows,), device=device) for _ in range(2))
    seen, entropy = flash_attention.attend(q, k, v, 0.2, length, more, return_entropy=True, last_scale_kv=tuple(tail))

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """More keys than are seen, those of the tail behind the others of their row."""
        return torch.stack([torch.cat((a[r, :, :n], b[r], a[r, :, n:]), 1) for r, n in enumerate(length)])

    exact, right = plain.attention(q, *map(joined, (k, v), tail), 0.2, (length + more).tolist())
    assert off(seen, exact) < (0.01 if device == "cuda" else 1e-5)
    assert (entropy.cpu() - torch.from_numpy(right)).abs().max() < 2e-3


def packed_cells(counts: Sequence[int], cells: int, device: str) -> tuple[Packed, list[torch.Tensor]]:
    """So many of the cells of every row, and which."""
    mask = torch.stack([torch.randperm(cells) < n for n in counts])
    return Packed.of_mask(mask.to(device)), [row.nonzero()[:, 0] for row in mask]


def check_packed(seen, entropy, q, keys, values, counts: Sequence[int], total: Sequence[int], most: float) -> None:
    begin = 0
    for row, n in enumerate(counts):
        mine = slice(begin, begin + n)
        begin += n
        if n:
            exact, right = plain.attention(q[:, :, mine], keys[row][None], values[row][None], 0.2, [total[row]])
            assert off(seen[:, :, mine], exact) < most
            assert entropy is None or (entropy[:, mine].cpu() - torch.from_numpy(right)).abs().max() < 2e-3


@on_both
@pytest.mark.parametrize("counts", [[0, 1], [1, 0], [63, 65], [17, 130, 5], [400, 3], [400, 400]])
@pytest.mark.parametrize("length", [0, 37, 1500])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("width", [32, 128])
def test_attention_of_packed_queries(device: str, counts: list[int], length: int, apart: bool, width: int) -> None:
    torch.manual_seed(length)
    rows, total = len(counts), [length + row + n for row, n in enumerate(counts)]
    chosen, _ = packed_cells(counts, 400, device)
    shape = 1, 3, len(chosen.cell), width
    q = torch.randn(shape, device=device).to(dtype_of(device)) * 3
    q[:, :, sum(counts) :] = math.nan
    k, v = torch.randn(2, rows, 3, max(total) + 9, width, device=device).to(q.dtype)
    tail = torch.full((2, rows, 3, 400, width), math.nan, device=device, dtype=q.dtype)
    lengths = torch.arange(length, length + rows, device=device)
    keys, values = k.clone(), v.clone()
    for row, n in enumerate(total):
        begin = n - counts[row]
        for there, here in zip(tail, (k, v), strict=True):
            there[row, :, : counts[row]] = here[row, :, begin:n]
            here[row, :, begin if apart else n :] = math.nan
    for entropy in (False, True):
        seen, told = flash_attention.attend(
            q, k, v, 0.2, lengths, None, entropy, tuple(tail) if apart else None, chosen=chosen, grown=True
        )
        assert seen.shape == q.shape
        check_packed(seen, told, q, keys, values, counts, total, 0.01 if device == "cuda" else 1e-5)


@on_both
@pytest.mark.parametrize("counts", [[0, 1], [63, 65], [17, 130, 5], [400, 400]])
@pytest.mark.parametrize("slots", [48, 200])
def test_packed_queries_over_a_text(device: str, counts: list[int], slots: int) -> None:
    torch.manual_seed(slots)
    chosen, _ = packed_cells(counts, 400, device)
    q = torch.randn(1, 3, len(chosen.cell), 128, device=device).to(dtype_of(device))
    k, v = torch.randn(2, len(counts), 3, slots, 128, device=device).to(q.dtype)
    length = [slots, 7, slots - 1][: len(counts)]
    for row, n in enumerate(length):
        k[row, :, n:] = v[row, :, n:] = math.nan
    seen, _ = flash_attention.attend(q, k, v, 0.2, torch.tensor(length, device=device), chosen=chosen)
    check_packed(seen, None, q, k, v, counts, length, 0.01 if device == "cuda" else 1e-5)


@on_gpu
def test_a_graph_of_packed_queries_is_replayed_with_other_counts(device: str) -> None:
    """One launch for all counts; splits of the keys are merged alike every time."""
    from nextscale.kernels.triton.varlen_attention import counters

    torch.manual_seed(0)
    heads, cells = 4, 2048
    place, _ = packed_cells([1, 1], cells, device)
    q = torch.randn(1, heads, 2 * cells, 128, device=device).bfloat16()
    k, v = torch.randn(2, 2, heads, 5000, 128, device=device).bfloat16()
    length = torch.tensor([2900, 1500], device=device)

    def see() -> tuple[torch.Tensor, torch.Tensor | None]:
        return flash_attention.attend(q, k, v, 0.2, length, return_entropy=True, chosen=place, grown=True)

    see()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen, entropy = see()
    for counts in ([1, 1], [2048, 800], [0, 3], [64, 64], [500, 700], [0, 0], [2048, 2048], [1, 1]):
        place.start.copy_(packed_cells(counts, cells, device)[0].start)
        graph.replay()
        first = seen.clone()
        total = [n + m for n, m in zip(length.tolist(), counts, strict=True)]
        check_packed(seen, entropy, q, k, v, counts, total, 0.01)
        assert not counters(q.device).any()
        graph.replay()
        assert torch.equal(first[:, :, : sum(counts)], seen[:, :, : sum(counts)])


@on_both
@pytest.mark.parametrize("slots", [48, 64])
def test_attention_that_absorbs_its_linear_layers(device: str, slots: int) -> None:
    """As far from the exact result as the layers one by one, and not farther."""
    torch.manual_seed(slots)
    cross = TextAttention(384, 384, 3, rounded=False)
    for p in cross.parameters():
        nn.init.normal_(p, std=0.05)
    exact = copy.deepcopy(cross).double().to(device)
    cross.to(device, dtype_of(device))
    x = torch.randn(2, 800, 384, device=device).to(dtype_of(device))
    k, v = torch.randn(2, slots, 2, 3, 128, device=device).to(x.dtype).permute(2, 0, 3, 1, 4)
    for lengths in (None, torch.tensor([slots, 7], device=device)):
        mask = None if lengths is None else (torch.arange(slots, device=device) < lengths[:, None])[:, None, None]
        right = exact.proj(exact(x.double(), k.double(), v.double(), mask))
        with torch.inference_mode():
            absorbed = absorbed_cross_attention.attend(x, cross.q, cross.proj, k, v, 128**-0.5, lengths)
            assert off(absorbed, right) < (5e-3 if device == "cuda" else 1e-6)
            if device == "cuda":
                assert absorbed_cross_attention.supports(x, k, cross.q, cross.proj)
                assert torch.equal(cross.attend(x, k, v, mask, lengths), absorbed)
                assert off(absorbed, right) < 1.2 * off(cross.proj(cross(x, k, v, mask, lengths)), right)
    assert not absorbed_cross_attention.supports(x[:, :100], k, cross.q, cross.proj), "too few queries"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_attention_whose_keys_are_split(splits: int, monkeypatch) -> None:
    from nextscale.kernels.triton import flash_attention as kernels
    from nextscale.kernels.triton.flash_tiles import num_kv_splits

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 128, device="cuda").bfloat16() for n in (70, 700, 700))
    length = torch.tensor([700, 30], device="cuda")  # some splits are empty
    monkeypatch.setattr(kernels, "num_kv_splits", lambda *sizes: splits)
    seen, entropy = kernels.fused_attention(q, k, v, 0.2, length, return_entropy=True)
    exact, right = flash_attention.attend(q.double(), k.double(), v.double(), 0.2, length, return_entropy=True)
    assert off(seen, exact) < 0.01
    assert (entropy - right).abs().max() < 2e-3
    assert num_kv_splits(32, 1000, 132) == 4
    assert num_kv_splits(32, 100, 132) == num_kv_splits(264, 4000, 132) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("queries", "keys"), [(70, 40), (70, 700), (600, 700), (3000, 700)])
@pytest.mark.parametrize("entropy", [False, True])
@torch.no_grad()
def test_attention_in_front_of_fp8(queries: int, keys: int, entropy: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 128, device="cuda").bfloat16() for n in (queries, keys, keys))
    layer = FP8Linear(nn.Linear(384, 64).to("cuda", torch.bfloat16), 0.5)
    length = torch.tensor([keys, 30], device="cuda")
    seen, _ = flash_attention.attend(q, k, v, 0.2, length, return_entropy=entropy, input_format=input_format(layer))
    exact, _ = flash_attention.attend(q.double(), k.double(), v.double(), 0.2, length)
    assert seen.shape == exact.shape
    assert seen.dtype == FP8_DTYPE
    assert off(seen.float() / layer.input_format.scale, exact) < 0.035, "three bits"


@on_gpu
@pytest.mark.parametrize("count", [1, 163])
def test_numbers_between_host_and_device(device: str, count: int) -> None:
    here = torch.rand(count, dtype=torch.float64, pin_memory=True)
    there = torch.zeros(count, dtype=torch.float64, device=device)
    copy_pinned(there, here)
    assert torch.equal(there.cpu(), here)
    back = torch.zeros(count, dtype=torch.float64, pin_memory=True)
    copy_pinned(back, there * 2)
    torch.cuda.synchronize()
    assert torch.equal(back, here * 2)


def test_the_entropy_of_equal_keys_is_the_logarithm_of_their_number() -> None:
    q, k = torch.randn(1, 2, 3, 32), torch.ones(1, 2, 40, 32)
    _, entropy = flash_attention.attend(q, k, k, 1.0, torch.tensor([7]), return_entropy=True)
    assert torch.allclose(entropy, torch.full((1, 3), 7.0).log())
    assert torch.allclose(attention_entropy(q, k, 1.0), torch.full((1, 3), 40.0).log())


@pytest.mark.parametrize(
    ("device", "ragged"), [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=gpu.marks)]
)
@pytest.mark.parametrize("rotary", [False, True])
def test_keys_and_values_go_to_the_cache(device: str, rotary: bool, ragged: bool) -> None:
    torch.manual_seed(0)
    rows, tokens, heads, width = 2, 9, 3, 64
    attn = SelfAttention(heads * width, heads, cosine=True).to(device).requires_grad_(False)
    attn.log_scale.normal_(1, 3)
    qkv = torch.randn(rows, tokens, 3, heads, width, device=device).to(dtype_of(device))
    angle = torch.randn(rows, tokens, width // 2, device=device)
    positions = torch.stack((angle.cos(), angle.sin()), -1) if rotary else None
    order = torch.stack([torch.randperm(tokens, device=device) for _ in range(rows)])
    chosen = Selection(order, torch.tensor([4, 9], device=device)) if ragged else None
    cache = KVCache.empty(rows, heads, width, qkv.dtype, qkv.device)
    assert kv_store.supports(attn, qkv, positions) == (device == "cuda")
    for _ in range(2):  # behind what is there
        q = cache.update(attn, qkv, positions, chosen)
    turned = None if positions is None else plain.plain(select_positions(positions, chosen))
    most = 0.01 if device == "cuda" else 1e-5
    assert cache.lengths.tolist() == ([8, 18] if ragged else [18, 18])
    for row, kept in enumerate([4, 9] if ragged else [9, 9]):
        q0, k0, v0 = plain.plain(qkv[row]).transpose(1, 2, 0, 3)
        turn = None if turned is None else turned[row]
        assert off(q[row], plain.cosine(q0, plain.plain(attn.log_scale).flatten(), turn)) < most
        assert off(cache.k[row, :, kept : 2 * kept], plain.cosine(k0, None, turn)[:, :kept]) < most
        assert off(cache.v[row, :, :kept], v0[:, :kept]) < 1e-6
    seen, _ = cache.attention(attn, q)
    assert seen.shape == (rows, heads, tokens, width)
    assert torch.isfinite(seen).all()


@on_gpu
@pytest.mark.parametrize("turn", ["still", "pairs", "halves"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("counts", [[0, 1], [63, 65], [17, 130, 5]])
def test_keys_and_values_of_packed_tokens(device: str, turn: str, normed: bool, counts: list[int]) -> None:
    torch.manual_seed(0)
    rows, cells, heads, width = len(counts), 130, 3, 64
    rotate = rotate_half if turn == "halves" else rotate_pairs
    attn = SelfAttention(heads * width, heads, normed, rotate).to(device).requires_grad_(False)
    chosen, index = packed_cells(counts, cells, device)
    qkv = torch.randn(1, len(chosen.cell), 3, heads, width, device=device).bfloat16()
    qkv[:, sum(counts) :] = math.nan
    angle = torch.randn(rows, cells, width if turn == "halves" else width // 2, device=device)
    positions = None if turn == "still" else torch.stack((angle.cos(), angle.sin()), -1)
    assert kv_store.supports(attn, qkv, positions)
    start = torch.arange(rows, device=device)
    k, v = torch.full((2, rows, heads, 200, width), math.nan, device=device, dtype=qkv.dtype)
    q = split_and_store(attn, qkv, positions, k, v, start, chosen)
    assert q.shape == (1, heads, len(chosen.cell), width)
    log_scale = None if attn.log_scale is None else plain.plain(attn.log_scale).flatten()
    begin = 0
    for row, n in enumerate(counts):
        wanted = list(plain.plain(qkv[0, begin : begin + n]).transpose(1, 2, 0, 3))
        for part in range(2):
            if normed:
                wanted[part] = plain.cosine(wanted[part], log_scale if part == 0 else None)
            if positions is not None:
                turned = plain.halves if turn == "halves" else plain.pairs
                wanted[part] = turned(wanted[part], plain.plain(positions[row, index[row]]))
        found = q[0, :, begin : begin + n], k[row, :, row : row + n], v[row, :, row : row + n]
        for one, exact in zip(found, wanted, strict=True):
            assert n == 0 or off(one, exact) < 0.01
        for place in (k[row], v[row]):
            assert torch.cat((place[:, :row], place[:, row + n :]), 1).isnan().all()
        begin += n


NORMS = {
    "modulated": lambda m: Norm(1e-6, m[:, :, 2], m[:, :, 3], plus_one=True),
    "layer norm": lambda m: Norm(1e-6, m[0, 0, 2], m[0, 0, 3]),
    "rms": lambda m: Norm(1e-6, m[0, 0, 2], rms=True),
    "bare": lambda m: Norm(1e-6),
}


@on_both
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_a_stream_is_summed_by_the_norm_that_reads_it(device: str, norm, gated: bool) -> None:
    torch.manual_seed(0)
    rows, cells, channels = 2, 7, 48
    x = torch.randn(rows, cells + 2, channels, device=device)[:, 2:]
    modulation = torch.randn(rows, 1, 6, channels, device=device)
    norm, gate = norm(modulation), modulation[:, :, 0] if gated else None
    some = Selection(torch.tensor([[6, 0, 3], [1, 2, 5]], device=device), torch.tensor([3, 2], device=device))
    assert residual_norm.supports(x) == (device == "cuda")
    exact = nn.Linear(channels, 16).to(device)
    reader = nn.Linear(channels, 16).to(device, dtype_of(device))
    for chosen in (None, some):
        stream, expected = ResidualStream(x, chosen), x.double() if chosen is None else chosen.of(x).double()
        by = 1.0 if gate is None else gate.double()
        for _ in range(2):
            delta = torch.randn(expected.shape, device=device).to(dtype_of(device))
            stream.add(delta, gate)
            expected = expected + delta.double() * by
        found = stream.normed(norm, reader)
        assert off(found, normed(expected, norm)) < (0.01 if device == "cuda" else 1e-5)
        for parts in some_parts(expected.shape, device):
            stream.add(parts, gate)
            expected = expected + parts.total().double() * by
            assert off(stream.normed(norm, exact), normed(expected, norm)) < 1e-5
            assert off(stream.sum, expected) < 1e-5
            stream.add(parts, gate)
            expected = expected + parts.total().double() * by
            assert off(stream.sum, expected) < 1e-5


def normed(x: torch.Tensor, norm: Norm) -> plain.Array:
    y = plain.layer_norm(plain.plain(x), norm.eps, norm.rms)
    y = y if norm.factor is None else y * (plain.plain(norm.factor) + norm.plus_one)
    return y if norm.term is None else y + plain.plain(norm.term)


def some_parts(shape: Sequence[int], device: str) -> list[SplitKPartials]:
    """What linear layers of few rows give, and those in 8 bits."""
    bias = torch.randn(shape[-1], device=device)
    whole = torch.randn(1, *shape, device=device).to(dtype_of(device))
    return [
        SplitKPartials(torch.randn(4, *shape, device=device), bias),
        SplitKPartials(whole, bias),
        SplitKPartials(whole),
    ]


@on_both
@torch.no_grad()
def test_a_norm_in_front_of_fp8(device: str) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(2, 5, 48, device=device) * 7, torch.randn(2, 1, 48, device=device)
    norm = Norm(1e-6, scale, scale.flip(-1), plus_one=True)
    layer = nn.Linear(48, 32).to(device, torch.bfloat16)
    small = FP8Linear(layer)
    read = ResidualStream(x).normed(norm, small)
    assert read.dtype == (FP8_DTYPE if device == "cuda" else torch.bfloat16)
    exact = torch.from_numpy(normed(x, norm)).to(device)
    three_bits(small.rounded(read), exact, small)
    assert off(small(read), exact @ layer.weight.double().t() + layer.bias.double()) < 0.05


def three_bits(rounded: torch.Tensor, exact: torch.Tensor, layer: FP8Linear) -> None:
    assert rounded.dtype == FP8_DTYPE
    assert ((rounded.float() / layer.input_format.scale - exact).abs() <= exact.abs() / 15 + 1e-3).all()
    assert rounded.float().abs().max() > 4, "the range is used"


@on_both
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (2, 17), (2, 64), (2, 65)])
@torch.no_grad()
def test_a_linear_layer_for_few_rows(device: str, rows) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, 1024, device=device).to(dtype_of(device))
    layer = nn.Linear(1024, 128).to(x)
    small = FP8Linear(copy.deepcopy(layer))
    found, rounded = linear_split_k(x, layer), linear_split_k(x, small)
    assert isinstance(found, SplitKPartials) == (device == "cuda" and rows != (2, 65))
    total = found.total() if isinstance(found, SplitKPartials) else found
    most = 0.01 if device == "cuda" else 1e-5
    assert off(total, plain.plain(x) @ plain.plain(layer.weight).T + plain.plain(layer.bias)) < most
    assert isinstance(rounded, SplitKPartials)
    assert len(rounded.partials) == (4 if device == "cuda" and rows != (2, 65) else 1)
    product = plain.plain(small.rounded(x).float()) @ plain.plain(small.weight.float()).T * small.factor
    assert off(rounded.total(), product + plain.plain(small.bias)) < most


@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_linear_layer_in_fp8(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 96).to(device, dtype)
    layer.weight[:8] *= 100  # one factor for all: the range is wide enough
    x = (torch.randn(2, 5, 256, device=device) * torch.logspace(-1, 1, 5, device=device)[:, None]).to(dtype)
    small = FP8Linear(layer)
    assert small.weight.dtype == torch.float8_e4m3fn
    exact = layer.double()(x.double())
    layer.to(dtype)
    # Errors average out: of 256 products, the sum is off by a sixteenth of what one of them is.
    product = x.double().norm(dim=-1)[..., None] * layer.weight.double().norm(dim=-1) / math.sqrt(256)
    off_by = ((small(x).double() - exact) / (product + exact.abs())).square().mean(-1).sqrt()
    assert off_by.max() < 0.05, "three bits and a half of the numbers are left"
    other = torch.randn(96, device=device, dtype=dtype)
    assert off(small(x, other) - other, small(x) - layer.bias) < 0.02
    assert torch.equal(small(small.rounded(x)), small(x))
    for usual in (0.01, 30.0):  # inputs of other sizes lose nothing where these are known
        assert torch.equal(FP8Linear(layer, usual).rounded(x * usual).float().isfinite(), torch.ones_like(x).bool())
        off_now = off(FP8Linear(layer, usual)(x * usual) - layer.bias, (small(x) - layer.bias) * usual)
        assert off_now < 0.05
    much = small.rounded(torch.tensor([1e6, -1e6, math.nan, 0.0] * 8, device=device)).float().tolist()
    assert much[:2] == [448, -448], "what is too large stays finite"
    assert math.isnan(much[2]), "what is no number stays none"
    layer.weight.zero_()
    assert torch.equal(FP8Linear(layer)(x), layer.bias.expand(2, 5, -1)), "no weights at all"
    layer.weight[0, 0] = math.nan
    assert FP8Linear(layer)(x)[..., 0].isnan().all(), "the logits will tell"


@on_both
@pytest.mark.parametrize("rows", [(2, 5), (2, 600), (3, 2100)], ids=["few", "some", "many"])
@torch.no_grad()
def test_an_mlp_in_fp8(device: str, rows) -> None:
    torch.manual_seed(0)
    mlp = MLP(64, 256).to(device, torch.bfloat16)
    x = torch.randn(*rows, 64, device=device).bfloat16()
    exact = mlp.double()(x.double())
    mlp.bfloat16()
    sizes = input_rms(mlp, 1.0)
    mlp.fc1, mlp.fc2 = FP8Linear(mlp.fc1, sizes["fc1"]), FP8Linear(mlp.fc2, sizes["fc2"])
    between = linear_gelu(x, mlp.fc1, mlp.fc2)
    assert between.dtype == (FP8_DTYPE if device == "cuda" else torch.bfloat16)
    three_bits(mlp.fc2.rounded(between), F.gelu(mlp.fc1(x).float(), approximate="tanh"), mlp.fc2)
    found = mlp(x)
    assert isinstance(found, SplitKPartials)
    assert off(found.total(), exact) < 0.06


@on_both
@pytest.mark.parametrize("rule", [LayerLinkage(True), LayerLinkage(True, 1, 0.3), LayerLinkage(False)])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_linkage(device: str, rule: LayerLinkage, rounds: bool, known: bool) -> None:
    """The kernel against the formula, image by image."""
    torch.manual_seed(0)
    rule, tokens, ratio = rule._replace(rounds=rounds), 60, [0.6, 0.0, 0.99]
    notes = torch.full((5, 4, 3), torch.nan, dtype=torch.float64, device=device)
    before: list[list[float]] = [[], [], []]
    for layer in range(5):
        entropy = torch.rand(3, tokens, device=device) * (1 + layer % 3)
        asked = torch.tensor(ratio, dtype=torch.float64, device=device)
        means = torch.rand(3, dtype=torch.float64, device=device) if known else None  # those of some other scale
        chosen = rule.keep(entropy, entropy, asked, notes, layer, 2, means)
        for image in range(3):
            mean = entropy[image].double().mean().item() if means is None else means[image].item()
            usual = sum(before[image][rule.first :]) / max(layer - rule.first, 1)
            deviation = (mean - usual) / usual if rule.linked and layer > rule.first else 0.0
            share = min(max(ratio[image] * (1 - deviation), rule.lowest), 1.0) if ratio[image] else 0.0
            kept = math.floor((1 - share) * tokens + 0.5) if rounds else max(tokens - math.floor(share * tokens), 1)
            assert kept == rule.kept(share, tokens)
            assert notes[layer, :, image].tolist() == pytest.approx([mean, share, deviation, kept], abs=1e-9)
            highest = sorted(entropy[image].topk(kept).indices.tolist())
            for row in (image, image + 3):
                assert chosen.count[row] == kept
                assert chosen.index[row, :kept].tolist() == highest
            before[image].append(mean)


@on_both
@pytest.mark.parametrize("cells", [1, 16, 100, 4096])
def test_selection(device: str, cells: int) -> None:
    torch.manual_seed(cells)
    score = torch.randn(3, cells)
    score[0, : cells // 2] = score[0, 0]  # ties
    score[1, -1] = -0.0
    count = torch.randint(1, cells + 1, (3,))
    for images in (3, 1):
        for copies in (1, 2):
            found = topk_select(score[:images].to(device), count[:images].to(device), copies)
            assert isinstance(found, Packed) == (device == "cuda")
            assert found.count.tolist() == count[:images].tolist() * copies
            mask = torch.zeros(images * copies, cells, dtype=torch.bool)
            for row, n in enumerate(found.count.tolist()):
                kept = plain.highest(score[row % images], n)
                assert found.index[row, :n].tolist() == kept
                mask[row, kept] = True
            assert torch.equal(found.mask(cells).cpu(), mask)
            if isinstance(found, Packed):
                right, total = Packed.of_mask(mask), int(mask.sum())
                assert torch.equal(found.cell[:total].cpu(), right.cell[:total])
                assert torch.equal(found.start.cpu(), right.start)
                assert torch.equal(found.slot.cpu(), right.slot)


@on_both
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("grids", [((3, 4), (5, 7)), ((6, 6), (8, 8)), ((2, 2), (2, 2)), ((16, 16), (20, 20))])
def test_holes_are_filled(device: str, mode: str, grids) -> None:
    torch.manual_seed(0)
    (h, w), (height, width) = grids
    cells, channels = height * width, 96
    x, cached = torch.randn(2, cells, channels), torch.randn(2, h * w, channels)
    chosen = topk_select(torch.randn(2, cells), torch.tensor([1, max(cells // 2, 1)]))
    y = torch.randn(2, chosen.index.shape[1], channels)
    policy = CachedPolicy.__new__(CachedPolicy)
    policy.kind = "residual"
    expected, new = policy._restored(resize_tokens(cached, *grids, mode), x, chosen, y)
    right = plain.plain(x) + plain.resized_tokens(cached, grids, mode)
    for row, n in enumerate(chosen.count.tolist()):
        right[row, chosen.index[row, :n]] = plain.plain(y[row, :n])
    plain.close(expected, right, 1e-5)
    plain.close(new, right - plain.plain(x), 1e-5)
    plain.close(scatter(x, chosen, y)[chosen.mask(cells)], right[chosen.mask(cells)], 0)
    if device == "cuda":
        there = Packed.of_mask(chosen.mask(cells).to(device))
        packed = there.packed(y.to(device))
        packed[:, int(there.start[-1]) :] = torch.nan
        added = torch.full((2, cells, channels), torch.nan, device=device)
        delta, gate = torch.randn(packed.shape, device=device), torch.randn(2, 1, channels, device=device)
        for waiting in (None, delta, *some_parts(packed.shape, device)):
            stream = ResidualStream(packed)
            if waiting is not None:
                missing = waiting.total() if isinstance(waiting, SplitKPartials) else waiting
                less = packed - gather_rows(gate, there) * missing
                stream = ResidualStream(less)
                stream.add(waiting, gate)
            found = fused_restore(x.to(device), cached.to(device), grids, mode, there, stream, added)
            assert off(found.cpu(), expected) < 1e-6
            assert off(added.cpu(), new) < 1e-6
            stream = ResidualStream(packed)
            if waiting is not None:
                stream = ResidualStream(less)
                stream.add(waiting, gate)
            assert off(fused_scatter(x.to(device), there, stream).cpu(), scatter(x, chosen, y)) < 1e-6
            if waiting is not None:
                whole, missing = ResidualStream(expected.to(device)), torch.randn(2, cells, channels, device=device)
                whole.add(missing, gate)
                added.fill_(torch.nan)
                right = expected.to(device) + gate * missing
                assert off(fused_record(x.to(device), whole, added), right) < 1e-6
                assert off(added, right - x.to(device)) < 1e-6


@on_both
@pytest.mark.parametrize("unit", ["token", "bit"])
def test_the_entropy_of_the_lens(device: str, unit: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(128, 2 * 5).to(device).requires_grad_(False)
    x = torch.randn(2, 45, 128, device=device) * 3 + 1
    scale, shift = torch.randn(2, 2, 1, 128, device=device)
    logits = head(Norm(1e-6, scale, shift, plus_one=True).apply(x)).unflatten(-1, (5, 2))
    parts = BitHead.of(head, scale[:, 0], shift[:, 0], 1e-6)
    assert torch.allclose(parts.logits(x), logits[..., 1] - logits[..., 0], atol=1e-4)
    assert logit_lens.supports(x) == (device == "cuda")
    if device == "cuda":
        assert off(fused_logit_lens(x, parts, unit)[0], token_entropy(logits, unit)) < 1e-5


@on_gpu
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("grids", [((3, 4), (5, 7)), ((8, 9), (12, 12))])
@torch.no_grad()
def test_the_lens_follows_holes_that_are_filled(device: str, mode: str, grids) -> None:
    """Layer after layer, what is left of a state's products is as good as a look at all of it."""
    torch.manual_seed(0)
    (h, w), (height, width) = grids
    cells, channels, bits = height * width, 128, 5
    head = BitHead.of(nn.Linear(channels, 2 * bits).to(device), *torch.randn(2, 2, channels, device=device), 1e-6)
    x = torch.randn(4, cells, channels, device=device) * 3 + 1
    exact_head = BitHead(head.factor.double(), head.total.double(), head.term.double(), head.eps)
    lens, exact = LogitLens(2, lambda: head), x.double()
    for layer in range(4):
        z = exact_head.logits(exact[:2])
        entropy = token_entropy(torch.stack((torch.zeros_like(z), z), dim=-1))
        cached = torch.randn(4, h * w, channels, device=device).to(dtype_of(device))
        count = torch.tensor([1 + layer, cells // 3], device=device).repeat(2)
        chosen = topk_select(entropy.float().repeat(2, 1), count)
        assert isinstance(chosen, Packed)
        y = torch.randn(1, 4 * cells, channels, device=device)
        assert off(lens.entropy(x, "token"), entropy) < 1e-5
        moments = lens.moments(x, chosen)
        assert moments is not None
        if layer == 1:  # holes stay as they are
            x = fused_scatter(x, chosen, ResidualStream(y), moments)
            lens.restored = RestoredState(x, chosen)
        else:
            x = fused_restore(x, cached, grids, mode, chosen, ResidualStream(y), None, moments)
            lens.restored = RestoredState(x, chosen, cached, grids, mode)
        assert off(moments[..., 0], x[:2].mean(-1)) < 1e-5
        before = resize_tokens(cached.double(), *grids, mode)
        exact = scatter(exact + before * (layer != 1), chosen, chosen.padded(y).double())


@torch.no_grad()
def test_the_lens_trusts_only_what_it_saw() -> None:
    lens, x = LogitLens(1, lambda: None), torch.zeros(2, 3, 4)
    chosen = Packed.of_mask(torch.ones(2, 3, dtype=torch.bool))
    assert lens.moments(x, chosen) is None  # nothing was looked at
    lens.stats = BitStats(torch.zeros(1, 3), torch.zeros(1, 3, 16), torch.zeros(1, 3, 2))
    lens.state = x
    assert lens.moments(x.clone(), chosen) is None
    lens.state = x
    assert lens.moments(x, Selection(chosen.index, chosen.count)) is None
    lens.state = x
    assert lens.moments(x, chosen) is lens.stats.moments
    assert lens.moments(x, chosen) is None  # not since it was filled


def test_the_head_of_bits_in_another_form(infinity) -> None:
    backbone = infinity.backbone
    x = torch.randn(4, 7, backbone.width) * 3 + 1
    state = InfinityConditioning(None, None, [], torch.randn(4, 1, 2, backbone.width), [], [], None, None)
    with torch.no_grad():
        logits = backbone.head(state, x[:2])
        parts = backbone.bit_head(state, 2)
        assert torch.allclose(parts.logits(x[:2]), logits[..., 1] - logits[..., 0], atol=1e-4)


@on_both
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "side"), [(32, 5), (128, 33), (512, 16)])
def test_group_norm(device: str, channels: int, side: int, silu: bool) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(32, channels, eps=1e-6).requires_grad_(False).to(device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.to(dtype_of(device))
    x = (torch.randn(2, channels, side, side + 2, device=device) * 3 + 1).to(dtype_of(device))
    x = x.contiguous(memory_format=torch.channels_last)
    offset = torch.randn(channels, device=device).to(dtype_of(device))
    most, values, plus = 0.01 if device == "cuda" else 1e-5, plain.plain(x), plain.plain(offset)[:, None, None]
    assert off(group_norm(x, None, norm, silu), plain.group_norm(values, norm, silu)) < most
    assert off(group_norm(x, offset, norm, silu), plain.group_norm(values + plus, norm, silu)) < most
    h = torch.randn_like(x)
    total = values + plain.plain(h) + plus
    joined, sums = add(x, h, offset, 32)
    assert off(joined, total) < most
    found = group_norm(joined.clone(memory_format=torch.preserve_format), None, norm, silu, sums=sums)
    assert off(found, plain.group_norm(plain.plain(joined), norm, silu)) < most


@on_both
@torch.no_grad()
@pytest.mark.parametrize(("channels", "side"), [(32, 5), (128, 33)])
def test_norm_and_a_convolution_to_few_channels(device: str, channels: int, side: int) -> None:
    torch.manual_seed(0)
    norm, conv = nn.GroupNorm(32, channels, eps=1e-6), nn.Conv2d(channels, 3, 3, padding=1)
    nn.init.normal_(norm.weight)
    x = (torch.randn(2, channels, side, side + 2, device=device) * 3 + 1).to(dtype_of(device))
    x = x.contiguous(memory_format=torch.channels_last)
    norm, conv = norm.to(device, dtype_of(device)), conv.to(device, dtype_of(device))
    exact = plain.conv(plain.group_norm(plain.plain(x), norm, True), plain.plain(conv.weight))
    exact = exact + plain.plain(conv.bias)[:, None, None]
    found = norm_and_conv(x, norm, conv, taps(conv))
    assert off(found, exact) < (0.01 if device == "cuda" else 1e-5)
    assert found.dtype == x.dtype


@on_both
@torch.no_grad()
@pytest.mark.parametrize("small", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("channels", "outputs", "side"), [(128, 128, 33), (256, 128, 16), (128, 256, 5), (256, 512, 20)]
)
def test_a_convolution_with_what_comes_behind(device, channels, outputs, side, joined, small) -> None:
    torch.manual_seed(0)
    last = {"dtype": dtype_of(device), "memory_format": torch.channels_last}
    conv = nn.Conv2d(channels, outputs, 3, padding=1).to(device).to(**last)
    x = torch.randn(2, channels, side, side + 2, device=device).to(**last)
    kept = torch.randn(2, outputs, side, side + 2, device=device).to(**last) if joined else None
    term = torch.randn(outputs, device=device).to(dtype_of(device))
    layer = FP8Conv(conv) if small else conv
    x = layer.rounded(x).contiguous(memory_format=torch.channels_last) if small else x
    exact = plain.conv(plain.plain(x.float()), plain.plain(layer.weight.float())) * (layer.factor if small else 1)
    exact = exact + plain.plain(term)[:, None, None] + (0 if kept is None else plain.plain(kept))
    assert supports_conv(layer, x.device) == (device == "cuda" and torch.cuda.get_device_capability() >= (9, 0))
    found, sums, late = convolve(x, layer, term, 32, kept)
    found = found if late is None else found + late[:, None, None]
    assert off(found, exact) < (0.01 if device == "cuda" else 1e-5)
    if sums is not None:
        groups = found.double().unflatten(1, (32, -1))
        assert off(sums[:, 0].sum(-1), groups.sum((2, 3, 4))) < 1e-3
        assert off(sums[:, 1].sum(-1), groups.square().sum((2, 3, 4))) < 1e-3


@on_both
@torch.no_grad()
@pytest.mark.parametrize("small", [False, True], ids=["plain", "fp8"])
def test_a_decoder(device: str, small: bool) -> None:
    torch.manual_seed(0)
    decoder = Decoder(128, (1, 2), 8, 1, False).requires_grad_(False).to(device)
    for module in decoder.modules():  # biases and norms that do something
        if isinstance(module, (nn.GroupNorm, nn.Conv2d)):
            nn.init.normal_(module.bias, std=0.3)
    exact = copy.deepcopy(decoder).double()
    decoder.to(dtype_of(device))
    if small:
        round_convolutions(decoder, lambda layer: True)
        assert sum(isinstance(m, FP8Conv) for m in decoder.modules()) == 2 * 6
    z = torch.randn(3, 8, 11, 18, device=device)
    right = exact(z.double())
    found = GPUDecoder(decoder)(z.to(dtype_of(device)))
    assert found.shape == right.shape
    assert off(found, right) < (0.06 if small else 0.02)


@on_gpu
@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 70, 9000])
@pytest.mark.parametrize(("channels", "outputs"), [(192, 10), (1024, 64)])
def test_an_exact_linear_layer(device: str, tokens: int, channels: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, tokens, channels, device=device), nn.Linear(channels, outputs).to(device)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    found = linear_fp32(x, layer)
    assert off(found, exact) < 2e-6
    assert torch.equal(found[:1], linear_fp32(x[:1], layer))


@on_both
@torch.no_grad()
@pytest.mark.parametrize("patchify", [False, True])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 4), (8, 6)])
def test_codes_go_into_a_map_and_out_of_it(device: str, patchify: bool, grid) -> None:
    torch.manual_seed(0)
    shape = BSQConfig(5, channels=32, multipliers=(1, 1), residual_blocks=1, patchify=patchify)
    tokenizer, (h, w) = BSQTokenizer(shape), (8, 6)
    scale, p = Scale(0, *grid, 0), tokenizer.patch
    features = torch.randn(2, 5, h * p, w * p, device=device)
    codes = torch.randn(2, scale.tokens, 5 * p * p, device=device)
    exact = plain.plain(features) + plain.resized(plain.folded(plain.plain(codes), grid, p), features.shape[2:])
    small = plain.resized(plain.plain(features), (grid[0] * p, grid[1] * p))
    schedule = SimpleNamespace(last=(h, w))
    assert off(tokenizer.add(features, codes, scale, schedule), exact) < 1e-6
    found = tokenizer.inputs(features, scale)
    assert off(found, plain.unfolded(small, p)) < 1e-6
    assert feature_maps.supports(features) == (device == "cuda")


@on_both
@pytest.mark.parametrize(("top_p", "top_k"), [(0.0, 0), (0.97, 0), (0.0, 1)])
def test_bits_are_drawn(device: str, top_p: float, top_k: int) -> None:
    torch.manual_seed(0)
    raw = torch.randn(4, 300, 5, 2, device=device) * 3
    raw[0, 0, 0] = 0.0  # as likely as each other
    logits = guide(raw, 2, None, 3.0, 1 / 0.7)
    scaled = raw * (1 / 0.7)
    assert torch.equal(logits, 3.0 * scaled[:2] + (1 - 3.0) * scaled[2:])
    values = plain.plain(raw) / 0.7
    assert off(logits, 3 * values[:2] - 2 * values[2:]) < 1e-6
    entropy = plain.bit_entropy(plain.plain(logits[..., 1]) - plain.plain(logits[..., 0]))
    assert off(token_entropy(logits), entropy.sum(-1)) < 1e-5
    assert off(token_entropy(logits, "bit"), entropy.mean(-1)) < 1e-5
    noise = torch.empty_like(logits).exponential_()
    weight, by, p, k = torch.tensor([3.0, 1 / 0.7, top_p, top_k], dtype=torch.float64, device=device).unbind()
    assert torch.equal(guide(raw, 2, None, weight, by), logits)
    assert torch.equal(guide(raw, 2, None, weight), guide(raw, 2, None, 3.0))
    expected = (keep_top(logits, top_k, top_p).softmax(-1) / noise).argmax(-1)
    assert bit_sampling.supports(logits) == (device == "cuda")
    if device == "cuda":
        assert torch.equal(fused_draw(logits, noise, top_p, top_k), expected.int())
        assert torch.equal(fused_draw(logits, noise, p, k), expected.int())


@on_both
@torch.no_grad()
def test_linear_with_gelu(device: str) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 7, 64), nn.Linear(64, 96)
    exact = plain.gelu(plain.plain(x) @ plain.plain(layer.weight).T + plain.plain(layer.bias))
    layer = layer.to(device, dtype_of(device))
    found = linear_gelu(x.to(device, dtype_of(device)), layer, layer)
    assert off(found, exact) < (0.01 if device == "cuda" else 1e-5)


MAKERS = {"var": tiny_var, "infinity": tiny_infinity, "hart": tiny_hart}


@on_both
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_model_in_fp8(device: str, make) -> None:
    """Its logits from the same tokens, against those of a model in float32; and it can be captured."""
    tokens = ask(make(), 2).tokens
    plain, small = make(), make().to(device, dtype="bfloat16")
    to_fp8(small.backbone, small.tokenizer)
    rounded = [m for m in small.backbone.modules() if isinstance(m, FP8Linear)]
    assert len(rounded) >= 4 * 4
    saved = sum(m.weight.numel() for m in rounded)
    before, after = (p.estimate().weights for p in (make().to(dtype="bfloat16"), small))
    assert abs(before - after - saved) < 0.1 * saved, "what is left of them is counted"
    with pytest.raises(NextscaleError, match="keeps its dtype"):
        small.to(dtype="float32")
    small.to(device, torch.bfloat16)
    logits: list[list[torch.Tensor]] = [[], []]
    for pipe, kept in zip((plain, small), logits, strict=True):
        ask(pipe, 2, force_tokens=tokens, callback_on_scale_end=lambda e, kept=kept: kept.append(e.logits.cpu()))
    exact, found = (torch.cat([t.flatten() for t in kept]) for kept in logits)
    assert 0.001 < off(found, exact) < 0.3
    if device == "cuda":
        small.executor = make_executor("graphs", small.device)
        for method in (None, NOVA(t_est=2)):
            assert same_tokens(ask(small, 2, method=method), ask(small, 2, method=method))


@on_gpu
@pytest.mark.parametrize("tma", [True, False], ids=["fetched", "loaded"])
@pytest.mark.parametrize("small", [False, True], ids=["16 bits", "fp8"])
def test_a_graph_of_a_product_is_replayed_with_other_numbers_of_tokens(
    device: str, small: bool, tma: bool, monkeypatch
):
    """Also as GPUs before Hopper load tiles."""
    from nextscale.kernels import ragged_linear

    monkeypatch.setattr(ragged_linear, "uses_tma", lambda device: tma)
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 1536).to(device, torch.bfloat16).requires_grad_(False)
    layer = FP8Linear(layer) if small else layer
    x = torch.randn(1, 2048, 1024, device=device).bfloat16()
    x = layer.rounded(x) if small else x
    start = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    with torch.inference_mode():
        expected = (layer(x) if small else torch.nn.functional.linear(x, layer.weight, layer.bias)).float()
        ragged_linear.linear(x, layer, start)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ragged_linear.linear(x, layer, start)
        for total in (0, 1, 64, 65, 200, 640, 1300, 2048, 3):
            start[1:] = torch.tensor([total // 2, total])
            graph.replay()
            first = found[:, :total].clone()
            assert not total or off(first, expected[:, :total]) < 0.01
            graph.replay()
            assert torch.equal(first, found[:, :total])
            assert not (ragged_linear.counters(x.device) & 0x7FFFFFFF).any()
