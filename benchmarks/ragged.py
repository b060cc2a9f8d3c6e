"""Linear layers of packed tokens whose number only the GPU knows, against cuBLAS, which is told it.

    python benchmarks/ragged.py [--dtype bfloat16 | fp8] [--tokens 2 16 ...] [--json FILE]

The layers of Infinity-2B. Median microseconds of one layer inside of a CUDA graph of at least 20 calls, whose weights
take turns so that none is found in the L2 cache. The kernel has room for 8192 tokens; cuBLAS gets exactly those there
are. At last, milliseconds of an image of 1024 x 1024: all layers of its reduced scales, each kind as often as a block
has it, with as many tokens as the decisions of `decisions.json` keep, times two for guidance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decisions import SIDES, T_EST, Decision, read_decisions
from nextscale.io.writing import atomic_write
from nextscale.kernels import ragged_linear
from nextscale.kernels.fp8 import FP8Linear, gelu
from nextscale.methods import NOVA
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import KEPT, LayerLinkage
from nextscale.methods.nova.policy import MAX_RATIO

SHAPES = {  # outputs, inputs, and whether GELU follows
    "qkv": (6144, 2048, False),
    "proj": (2048, 2048, False),
    "fc1": (8192, 2048, True),
    "fc2": (2048, 8192, False),
}
OFTEN = {"qkv": 1, "proj": 3, "fc1": 1, "fc2": 1}  # in a block: cross-attention has two like proj
TOKENS = (2, 16, 64, 128, 200, 320, 410, 640, 800, 1024, 1600, 3200, 8000)
ROOM, DEPTH, COPIES = 8192, 32, 2  # tokens, blocks, and rows of an image
CALLS, REPLAYS = 20, 25
COLD = 192 << 20  # bytes of weights after which the first ones are no longer in any L2 cache


def kept(decision: Decision) -> list[int]:
    """Tokens of every layer of the reduced scales of an image."""
    rule, m, found = LayerLinkage(True, rounds=False), NOVA(), []
    for t, side in enumerate(SIDES, start=1):
        if decision.star is None or t <= decision.star:
            continue
        played = Growth(T_EST, m.alpha, dict(enumerate(decision.entropy, 1)), decision.star)
        ratio = 1 / (1 + math.exp(-(t - (decision.star + 1)) / m.tau)) - m.lam * math.tanh(played.latest(t) or 0.0)
        layer_stats = torch.zeros(DEPTH, 4, 1, dtype=torch.float64)
        asked = torch.tensor([min(max(ratio, 0.0), MAX_RATIO)], dtype=torch.float64)
        for layer, mean in enumerate(decision.means(t, DEPTH)):
            rule.update(torch.tensor([mean], dtype=torch.float64), asked, layer_stats, layer, side**2)
        found += [int(n) for n in layer_stats[:, KEPT, 0]]
    return found


def histogram(decisions: Sequence[Decision]) -> Counter[int]:
    """How many layers have so many tokens, of all images."""
    return Counter(COPIES * n for decision in decisions for n in kept(decision) if n)


def between(times: dict[int, float], tokens: int) -> float:
    """A straight line between what was measured; behind it, in proportion."""
    known = sorted(times)
    if tokens <= known[0]:
        return times[known[0]]
    if tokens >= known[-1]:
        return times[known[-1]] * tokens / known[-1]
    low, high = next((a, b) for a, b in itertools.pairwise(known) if a <= tokens <= b)
    return times[low] + (times[high] - times[low]) * (tokens - low) / (high - low)


def per_image(times: dict[int, float], layers: Counter[int], images: int) -> float:
    """Milliseconds of one kind of layers in an image, a mean over them."""
    return sum(between(times, m) * n for m, n in layers.items()) / images / 1e3


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of a call, a median over replays."""
    for call in calls:  # kernels are compiled, and workspaces made
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) * 1e3 / len(calls))
    return statistics.median(found)


def a_layer(out: int, into: int, small: bool) -> nn.Linear | FP8Linear:
    layer = nn.Linear(into, out, device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=0.02)
    return FP8Linear(layer) if small else layer


def by_cublas(x: Tensor, layer: nn.Linear | FP8Linear, reader: nn.Module | None) -> Tensor:
    """As the models call it."""
    if isinstance(layer, FP8Linear):
        return layer(x) if reader is None else gelu(layer(x), reader)
    if reader is None:
        return F.linear(x, layer.weight, layer.bias)
    return torch._addmm_activation(layer.bias, x[0], layer.weight.t(), use_gelu=True)[None]


def off(found: Tensor, exact: Tensor) -> float:
    found, exact = found.float(), exact.float()
    return ((found - exact).norm() / exact.norm()).item()


def measure(name: str, small: bool, tokens: Sequence[int]) -> dict[str, dict[int, float]]:
    out, into, activated = SHAPES[name]
    sets = max(3, math.ceil(COLD / (out * into * (1 if small else 2))))
    layers = [a_layer(out, into, small) for _ in range(sets)]
    reader = a_layer(64, out, small) if activated else None
    room = torch.randn(1, ROOM, into, device="cuda", dtype=torch.bfloat16)
    if small:
        room = layers[0].rounded(room)  # type: ignore[operator]
    turns = list(itertools.islice(itertools.cycle(layers), math.ceil(CALLS / len(layers)) * len(layers)))
    times: dict[str, dict[int, float]] = {"ragged": {}, "cublas": {}, "off": {}}
    for m in tokens:
        start = torch.tensor([0, m // 2, m], dtype=torch.int32, device="cuda")
        x = room[:, :m].contiguous()
        # Neither keeps the results of a call.
        ways: dict[str, Callable[[Any], Tensor]] = {
            "ragged": lambda layer, start=start: ragged_linear.linear(room, layer, start, gelu_for=reader),
            "cublas": lambda layer, x=x: by_cublas(x, layer, reader),
        }
        times["off"][m] = off(ways["ragged"](layers[0])[:, :m], ways["cublas"](layers[0]))
        for way, call in ways.items():
            times[way][m] = microseconds([lambda layer=layer, call=call: call(layer) for layer in turns])
        ours, theirs = times["ragged"][m], times["cublas"][m]
        print(
            f"{name:<5} {out:>5} x {into:<5} {m:>6} {ours:>9.1f} {theirs:>9.1f} {ours / theirs:>6.2f} "
            f"{times['off'][m]:>9.1e}",
            flush=True,
        )
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "fp8"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help=f"from 1 to {ROOM}")
    parser.add_argument("--layers", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not all(1 <= m <= ROOM for m in options.tokens):
        parser.error(f"--tokens: from 1 to {ROOM}")
    decisions = read_decisions()
    layers = histogram(decisions)
    print(
        f"{layers.total()} layers of {len(decisions)} images have {min(layers)} to {max(layers)} tokens, "
        f"median {statistics.median(layers.elements()):.0f}"
    )
    if not torch.cuda.is_available():
        parser.error("the rest needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}")
    print(f"{'layer':<19} {'tokens':>6} {'ragged':>9} {'cuBLAS':>9} {'ratio':>6} {'off by':>9}")
    small = options.dtype == "fp8"
    times = {name: measure(name, small, sorted(set(options.tokens))) for name in options.layers}
    sums = {
        name: {way: OFTEN[name] * per_image(found[way], layers, len(decisions)) for way in ("ragged", "cublas")}
        for name, found in times.items()
    }
    sums["all"] = {way: sum(s[way] for s in sums.values()) for way in ("ragged", "cublas")}
    print("milliseconds of an image")
    for name, s in sums.items():
        print(f"{name:<5} {s['ragged']:>8.2f} {s['cublas']:>8.2f} {s['ragged'] / s['cublas']:>6.2f}")
    if options.json is not None:
        known = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": options.dtype}
        content = {**known, "microseconds": times, "image": sums}
        with atomic_write(options.json) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
