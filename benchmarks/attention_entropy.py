"""Attention that also returns its entropy: what the entropy costs, at the shapes of all scales of a model.

    python benchmarks/attention_entropy.py [--model infinity-8b] [--tune]

Two rows, bfloat16, random queries and keys; milliseconds of one layer, medians by CUDA events after a warm-up, inside a
CUDA graph as `runtime="graphs"` has it.
  naive     scores in float32, a chunk of queries at a time, beside the fastest attention
  identity  sum_j a_j s_j = q . sum_j a_j k_j: a second flash attention whose values are the keys
  fused     our kernel with entropy;  plain: the same kernel without
  cudnn, flash: torch's attention without entropy
"""

from __future__ import annotations

import argparse
import itertools
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nextscale.engine.schedule import infinity_schedule
from nextscale.kernels.sdpa import attention_entropy, scaled_dot_product_attention
from nextscale.kernels.triton import flash_attention as kernels
from nextscale.models.registry import MODELS

ROWS = 2


def identity(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(q, k, v, scale=scale)[:2]
    mean_key = flash(q, k, k, scale=scale)[0]
    return out, (lse - (q.float() * mean_key.float()).sum(-1) * scale).mean(1)


def milliseconds(function, repeats: int = 20) -> float:
    from triton.testing import do_bench_cudagraph

    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return do_bench_cudagraph(function, rep=repeats, return_mode="median")
    except RuntimeError:  # torch has no such kernel for this shape
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="infinity-8b")
    parser.add_argument("--tune", action="store_true", help="try other block sizes at the three largest scales")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    config = MODELS[options.model].backbone
    heads, width = config.heads, config.width // config.heads
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} rows, {heads} heads of {width}, bfloat16")
    names = ("naive", "identity", "fused", "plain", "cudnn", "flash")
    print(f"{'queries':>8} {'keys':>6} " + " ".join(f"{n:>9}" for n in names) + "   entropy off by")
    totals = dict.fromkeys(names, 0.0)
    fastest = 0.0
    for scale in infinity_schedule(1.0, "1M"):
        n, s = scale.tokens, scale.start + scale.tokens
        # Cosine attention: unit vectors, and a learned factor of 10 that is part of the queries.
        q, k, v = (torch.randn(ROWS, heads, m, width, device="cuda", dtype=torch.bfloat16) for m in (n, s, s))
        q, k = (torch.nn.functional.normalize(t.float(), dim=-1).bfloat16() for t in (q, k))
        q = q * 10

        def torch_with(backend: SDPBackend, q=q, k=k, v=v) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, 1.0)

        runs = {
            "naive": lambda q=q, k=k, v=v: (scaled_dot_product_attention(q, k, v, 1.0), attention_entropy(q, k, 1.0)),
            "identity": lambda q=q, k=k, v=v: identity(q, k, v, 1.0),
            "fused": lambda q=q, k=k, v=v: kernels.fused_attention(q, k, v, 1.0, return_entropy=True),
            "plain": lambda q=q, k=k, v=v: kernels.fused_attention(q, k, v, 1.0),
            "cudnn": lambda t=torch_with: t(SDPBackend.CUDNN_ATTENTION),
            "flash": lambda t=torch_with: t(SDPBackend.FLASH_ATTENTION),
        }
        out, entropy = runs["fused"]()
        exact = attention_entropy(q, k, 1.0)
        off = ((entropy - exact).norm() / exact.norm()).item()
        error = (
            out.float() - scaled_dot_product_attention(q.float(), k.float(), v.float(), 1.0)
        ).norm() / out.float().norm()
        assert error < 0.01, f"attention is off by {error:.3f}"
        with mock.patch.object(kernels, "SHORT_KV", 0):  # else few keys have another kernel without entropy
            times = {name: milliseconds(run) for name, run in runs.items()}
        fastest += min(times["cudnn"], times["flash"])
        for name, time in times.items():
            totals[name] += time
        print(f"{n:>8} {s:>6} " + " ".join(f"{times[m]:>9.3f}" for m in names) + f"   {off:.1e}", flush=True)
        if options.tune and n >= 1024:
            for bq, bk, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
                config = {"BLOCK_Q": bq, "BLOCK_K": bk, "num_warps": warps, "num_stages": stages}
                try:
                    with mock.patch.object(kernels, "block_config", lambda *sizes, config=config: dict(config)):
                        t = [
                            milliseconds(
                                lambda e=e, q=q, k=k, v=v: kernels.fused_attention(q, k, v, 1.0, return_entropy=e), 6
                            )
                            for e in (True, False)
                        ]
                except Exception as failure:  # too much shared memory
                    print(f"    {config}: {str(failure)[:60]}")
                    continue
                print(
                    f"    {bq:>4} {bk:>4} {warps} warps {stages} stages: {t[0]:.3f} with entropy, {t[1]:.3f} without",
                    flush=True,
                )
    print(f"{'all':>8} {'':>6} " + " ".join(f"{totals[n]:>9.3f}" for n in names))
    print(f"entropy costs {totals['fused'] / totals['plain'] - 1:+.1%} against the same kernel without it")
    print(f"and {totals['fused'] / fastest - 1:+.1%} against the fastest of torch at every scale ({fastest:.3f} ms)")


if __name__ == "__main__":
    main()
