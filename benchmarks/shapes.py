"""Calls of different shapes in random order after one warm-up: nothing is captured, and none disturbs the next.

    python benchmarks/shapes.py [--model infinity-2b] [--quantize fp8] [--calls 96] [--sizes 1M 0.25M]
                                [--guidance 3 4] [--texts 8 200] [--seed 0] [--json FILE]

On a CUDA GPU, at the true shapes with random weights: bfloat16, runtime graphs, batch 1, decode included, text encoder
not counted. Plain calls and NOVA with recorded decisions (benchmarks/decisions.py), two sizes, two weights of guidance,
texts from the shortest to the longest; another seed, text and decision in every call, every shape equally often.

Printed are, of the one `warm_up`: how long every shape took, the scales that were captured for it, and what torch
holds of the device afterwards, caches emptied. Of every kind of call (its text by the length that it is padded to):
median and 95th percentile. A plain call always computes the same, so for these it says how many lie within 5 % of the
median of their kind, and how far the farthest is. What a call of NOVA costs is decided anew each time: so all calls are
made once more, with the same texts, seeds and decisions, one kind after the other, and each is compared with itself
(random order / sorted). At last: the scales that were captured after the warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decisions import T_EST, Decision, NextDecision, RecordedNOVA, read_decisions, vary
from memory import random_pipeline
from nextscale.engine.memory import GIB
from nextscale.models.fp8 import to_fp8
from nextscale.pipeline import Pipeline
from nextscale.runtime import warmup
from nextscale.runtime.registry import make_executor
from timed import Timed, p95, reserved_bytes, synchronize, timed, times

NEAR = 0.05
PLAIN, NOVA = "plain", "nova"


@dataclass(frozen=True, order=True)
class Kind:
    size: str  # pixel budget; "" = the model's own
    method: str
    guidance: float
    text: int  # tokens that it is padded to


@dataclass(frozen=True, eq=False)  # it is itself only
class Call:
    kind: Kind
    tokens: int  # of its text
    seed: int
    decision: Decision


@dataclass(frozen=True)
class Sweep:
    sizes: Sequence[str]
    guidance: Sequence[float]
    texts: tuple[int, int]  # tokens of the shortest and the longest
    calls: int
    seed: int = 0


class Player:
    """Makes calls, each with the decision that it says."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe, self.source = pipe, NextDecision(read_decisions()[0])
        self.methods = {PLAIN: None, NOVA: RecordedNOVA(t_est=T_EST - 1, source=self.source)}

    def play(self, call: Call) -> Timed:
        self.source.decision = call.decision
        kind, device = call.kind, self.pipe.device
        generator = torch.Generator().manual_seed(call.seed)
        text = torch.randn(call.tokens, self.pipe.backbone.config.text_dim, generator=generator).to(device)
        more = {"method": self.methods[kind.method], "guidance_scale": kind.guidance, **size_of(kind.size)}
        return timed(self.pipe, prompt_embeds=[text], seed=call.seed, output_type="pt", **more)


def size_of(budget: str) -> dict[str, str]:
    return {"pixel_budget": budget} if budget else {}


def sample_calls(pipe: Pipeline, asked: Sweep) -> list[Call]:
    """Make calls of every kind equally often, in random order."""
    rng, (shortest, longest) = random.Random(asked.seed), asked.texts
    slots = [0, *(slot for slot in warmup.text_lengths(pipe, longest) if slot is not None)]
    lengths = {slot: (max(before + 1, shortest), min(slot, longest)) for before, slot in itertools.pairwise(slots)}
    rungs = [slot for slot, (low, high) in lengths.items() if low <= high]
    kinds = [Kind(*kind) for kind in itertools.product(asked.sizes, (PLAIN, NOVA), asked.guidance, rungs)]
    dealt = list(itertools.islice(itertools.cycle(kinds), asked.calls))
    rng.shuffle(dealt)
    decisions = vary(read_decisions(), asked.seed)
    return [Call(kind, rng.randint(*lengths[kind.text]), n, next(decisions)) for n, kind in enumerate(dealt)]


@contextmanager
def record_shapes(device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Note what every shape of the warm-ups inside takes."""
    real, notes = warmup.warm_up_shape, []

    def warm_up_shape(pipe: Pipeline, shape: warmup.CallShape, *given: Any) -> None:
        before, began = pipe.captured, time.perf_counter()
        real(pipe, shape, *given)
        synchronize(device)
        seconds, captured = time.perf_counter() - began, pipe.captured - before
        what = {"size": shape.size.get("pixel_budget", ""), "method": NOVA if shape.method else PLAIN}
        notes.append(
            {**what, "text": shape.text, "s": seconds, "captured": captured, "gib": reserved_bytes(device) / GIB}
        )

    warmup.warm_up_shape = warm_up_shape
    try:
        yield notes
    finally:
        warmup.warm_up_shape = real


def compare(pipe: Pipeline, asked: Sweep) -> dict[str, Any]:
    """All that is printed."""
    player, calls = Player(pipe), sample_calls(pipe, asked)
    with record_shapes(pipe.device) as shapes:
        sizes = [size_of(size) for size in asked.sizes]
        pipe.warm_up(sizes, list(player.methods.values()), text_tokens=asked.texts[1])
    captured = pipe.captured
    for call in {(call.kind.size, call.kind.method): call for call in calls}.values():
        player.play(call)  # what `reserved_bytes` gave back is fetched again
    mixed = {call: player.play(call) for call in calls}
    ordered = {call: player.play(call) for call in sorted(calls, key=lambda call: (call.kind, call.seed))}
    kinds = sorted({call.kind for call in calls})
    return {
        "shapes": shapes,
        "warm_up_s": sum(shape["s"] for shape in shapes),
        "kinds": [kind_statistics(kind, mixed, ordered) for kind in kinds],
        PLAIN: deviation([call for call in calls if call.kind.method == PLAIN], mixed),
        NOVA: compare_orders([call for call in calls if call.kind.method == NOVA], mixed, ordered),
        "captures": pipe.captured - captured,
    }


def kind_statistics(kind: Kind, mixed: dict[Call, Timed], ordered: dict[Call, Timed]) -> dict[str, Any]:
    calls = [call for call in mixed if call.kind == kind]
    found = {**dataclasses.asdict(kind), **times([mixed[call] for call in calls])}
    return {
        **found,
        **(deviation(calls, mixed) if kind.method == PLAIN else {}),
        **compare_orders(calls, mixed, ordered),
    }


def deviation(calls: Sequence[Call], mixed: dict[Call, Timed]) -> dict[str, float]:
    """Measure how near calls are to the median of their kind."""
    seconds: dict[Kind, list[float]] = {}
    for call in calls:
        seconds.setdefault(call.kind, []).append(mixed[call].seconds)
    off = [abs(s / statistics.median(alike) - 1) for alike in seconds.values() for s in alike]
    return {"near": sum(far <= NEAR for far in off) / len(off), "farthest": max(off)} if off else {}


def compare_orders(calls: Sequence[Call], mixed: dict[Call, Timed], ordered: dict[Call, Timed]) -> dict[str, float]:
    """Divide the seconds of calls in random order by those of the same calls sorted."""
    ratios = [mixed[call].seconds / ordered[call].seconds for call in calls]
    return {"ratio": statistics.median(ratios), "p95_ratio": p95(ratios)} if ratios else {}


def show(found: dict[str, Any]) -> None:
    print(f"warm-up: {found['warm_up_s']:.1f} s\n{'shape':<24} {'text':>5} {'s':>6} {'captured':>8} {'GiB held':>8}")
    for n, shape in enumerate(found["shapes"], start=1):
        name = f"{n} {shape['size']} {shape['method']}"
        print(f"{name:<24} {shape['text']:>5} {shape['s']:>6.1f} {shape['captured']:>8} {shape['gib']:>8.2f}")
    print(
        f"\n{'size':<6} {'method':<6} {'guidance':>8} {'text':>5} {'calls':>5} {'ms':>8} {'p95':>8} "
        f"{'within 5 %':>10} {'farthest':>8} {'random / sorted':>15} {'p95':>6}"
    )
    for kind in found["kinds"]:
        near, far = (f"{kind[name]:.1%}" if name in kind else "-" for name in ("near", "farthest"))
        print(
            f"{kind['size']:<6} {kind['method']:<6} {kind['guidance']:>8g} {kind['text']:>5} {kind['calls']:>5} "
            f"{kind['ms']:>8.1f} {kind['p95_ms']:>8.1f} {near:>10} {far:>8} {kind['ratio']:>15.3f} "
            f"{kind['p95_ratio']:>6.3f}"
        )
    if plain := found[PLAIN]:
        print(
            f"\nplain: {plain['near']:.1%} of the calls within 5 % of the median of their kind, the farthest "
            f"{plain['farthest']:.1%} away"
        )
    if nova := found[NOVA]:
        print(f"nova: random order / sorted, call by call: median {nova['ratio']:.3f}, p95 {nova['p95_ratio']:.3f}")
    print(f"{found['captures']} scales captured after the warm-up")


def read_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="infinity-2b")
    parser.add_argument("--quantize", choices=["fp8"])
    parser.add_argument("--calls", type=int, default=96, help="in random order, and as many sorted")
    parser.add_argument("--sizes", nargs="+", default=["1M", "0.25M"], help="pixel budgets; HART has one size only")
    parser.add_argument("--guidance", nargs="+", type=float, default=[3.0, 4.0])
    parser.add_argument("--texts", nargs=2, type=int, default=[8, 200], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    if not 1 <= options.texts[0] <= options.texts[1] or options.calls < 1:
        parser.error("allowed: at least one call, and texts of 1 token or more, the shortest first")
    return options


def main() -> None:
    options = read_options()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    pipe = random_pipeline(options.model, "bfloat16")
    if options.quantize:
        to_fp8(pipe.backbone, pipe.tokenizer)
    pipe.executor = make_executor("graphs", pipe.device)
    sizes = [""] if pipe.backbone.family == "hart" else options.sizes
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.model}, {options.quantize or 'bfloat16'}"
    )
    found = compare(pipe, Sweep(sizes, options.guidance, tuple(options.texts), options.calls, options.seed))
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, "quantize": options.quantize, **found}, indent=1))


if __name__ == "__main__":
    main()
