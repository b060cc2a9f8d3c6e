"""Attention over a short text: its linear layers one after the other, or multiplied into keys and values.

    python benchmarks/cross_attention.py [--model infinity-2b] [--text 64] [--rows 2] [--layers 12]

Microseconds of a layer, both in one run, and how far each is from the same in float64. On a GPU in bfloat16, by CUDA
events over a graph of several layers with weights of their own, after two warm-up runs; elsewhere in float32.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nextscale.engine.schedule import infinity_schedule
from nextscale.kernels import absorbed_cross_attention
from nextscale.models.infinity import TextAttention
from nextscale.models.registry import MODELS

REPEATS = 5
CHECKED = 64  # queries that are compared with float64


def microseconds(run: Callable[[], object]) -> float:
    """Of one run of all layers."""
    run()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time is a warm-up
        before.record()
        for _ in range(REPEATS):
            graph.replay()
        after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / REPEATS * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="infinity-2b")
    parser.add_argument("--text", type=int, default=64, help="slots of the text; a row sees 40 of them, or all")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    config = MODELS[options.model].backbone
    heads, width = config.heads, config.width // config.heads
    layers = [TextAttention(config.width, config.width, heads, rounded=False) for _ in range(options.layers)]
    for layer in layers:
        for p in layer.parameters():
            nn.init.normal_(p, std=0.02)
        layer.to(device, dtype)
    text = [torch.randn(options.rows, options.text, 2, heads, width, device=device).to(dtype) for _ in layers]
    pairs = [t.permute(2, 0, 3, 1, 4) for t in text]
    lengths = torch.full((options.rows,), min(40, options.text), device=device)
    visible = (torch.arange(options.text, device=device) < lengths[:, None])[:, None, None]
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}, torch {torch.__version__}, {dtype}, {options.rows} rows, {heads} heads of {width}")
    print(f"{'queries':>8} {'one by one':>11} {'absorbed':>9} {'off by':>8} {'off by':>8}")
    for scale in infinity_schedule(1.0, "1M"):
        x = torch.randn(options.rows, scale.tokens, config.width, device=device).to(dtype)

        def one_by_one(n: int, x: Tensor = x) -> Tensor:
            return layers[n].proj(layers[n](x, *pairs[n], visible, lengths))

        def absorbed(n: int, x: Tensor = x) -> Tensor:
            return absorbed_cross_attention.attend(x, layers[n].q, layers[n].proj, *pairs[n], width**-0.5, lengths)

        exact = copy.deepcopy(layers[0]).double()
        few = x[:, :CHECKED].double()
        right = exact.proj(exact(few, *(t.double() for t in pairs[0]), visible))
        off = [float((f(0)[:, :CHECKED] - right).norm() / right.norm()) for f in (one_by_one, absorbed)]
        times = [
            microseconds(lambda f=f: [f(n) for n in range(options.layers)]) / options.layers
            for f in (one_by_one, absorbed)
        ]
        print(f"{scale.tokens:>8} {times[0]:>11.1f} {times[1]:>9.1f} {off[0]:>8.1e} {off[1]:>8.1e}", flush=True)


if __name__ == "__main__":
    main()
