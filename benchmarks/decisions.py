"""Decisions of NOVA that differ from call to call, for models whose own would mean nothing (random weights).

    python benchmarks/decisions.py                     # the share of tokens that they keep, as recorded and varied
    python benchmarks/decisions.py --out benchmarks/decisions.json [--device cuda]     # records them anew

Recorded from the model that comes with the package: 96 prompts, half of them with full backgrounds, NOVA's preset
literal (which looks at every layer of every scale) with t_est=6.
Of each the inflection t*, the mean entropy of every scale, and at every reduced scale that of every layer.
`RecordedNOVA` plays them on a model of any depth: layers are stretched, every mean is multiplied by a random factor of
0.9 to 1.1, t* is shifted by -1, 0, 1, 2 in turn, and one prompt in twelve is never reduced. So no decision comes twice;
probe, ranking, selection and restoration work as ever.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.io.progress import bar
from nextscale.methods import NOVA
from nextscale.methods.nova.growth import Growth
from nextscale.methods.nova.layer_linkage import KEPT, LayerLinkage
from nextscale.methods.nova.policy import MAX_RATIO, NOVAPolicy
from nextscale.methods.policy import Policy, PolicyContext, ScaleContext, ScalePlan
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.scenes import TASKS, read_scene_prompts

FILE = Path(__file__).with_name("decisions.json")
PROMPTS, T_EST = 96, 6
BACKGROUNDS = (" in a meadow", " on a beach", " in the snow", " at night", " in the sea", " at sunset")
BACKGROUNDS += (" on a checkered background", " on a striped background")
SHIFTS = (-1, 0, 1, 2)
NEVER = 12  # one prompt of so many
SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)  # of the grids of 1024 x 1024


@dataclass(frozen=True)
class Decision:
    star: int | None  # the scale of inflection; None: nothing is reduced
    entropy: tuple[float, ...]  # of every scale
    layers: dict[int, tuple[float, ...]]  # per scale, of every layer

    def means(self, t: int, depth: int) -> list[float]:
        """Stretch to a model of so many layers; scales that were not reduced look like the first one that was."""
        known = self.layers[min(self.layers, key=lambda s: abs(s - t))]
        places = [i * (len(known) - 1) / max(depth - 1, 1) for i in range(depth)]
        return [known[int(p)] + (p - int(p)) * (known[min(int(p) + 1, len(known) - 1)] - known[int(p)]) for p in places]


def read_decisions(path: Path = FILE) -> list[Decision]:
    content = json.loads(path.read_text())
    return [
        Decision(d["star"], tuple(d["entropy"]), {int(t): tuple(m) for t, m in d["layers"].items()})
        for d in content["decisions"]
    ]


def alternating(star: int, spread: float, depth: int) -> Decision:
    """Let layers keep more and less in turn: each mean lies by `spread` above or below that of all before it."""
    means = [1.0]
    for layer in range(1, depth):
        means.append(sum(means) / layer * (1 - spread if layer % 2 else 1 + spread))
    return Decision(star, (0.0,) * 20, {0: tuple(means)})


def vary(decisions: list[Decision], seed: int = 0) -> Iterator[Decision]:
    """Vary decisions without end, never the same twice."""
    rng, n = random.Random(seed), 0
    while True:
        for d in decisions:
            star = None if d.star is None or n % NEVER == NEVER - 1 else d.star + SHIFTS[n % len(SHIFTS)]
            layers = {t: tuple(m * rng.uniform(0.9, 1.1) for m in means) for t, means in d.layers.items()}
            yield Decision(star, d.entropy, layers)
            n += 1


class NextDecision:
    """A source that gives what was put there, so that the same decision can be played again in another order.

    One object for all calls: graphs are kept by method, and a method by its source.
    """

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def __next__(self) -> Decision:
        return self.decision


@dataclass(frozen=True)
class RecordedNOVA(NOVA):
    """NOVA whose decisions are taken from `source`, another one for every image of every call."""

    source: Any = field(default=None, compare=False)  # an iterator of decisions

    def start(self, context: PolicyContext) -> Policy:
        return RecordedPolicy(context, self, [next(self.source) for _ in range(context.images)])

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": {}}


class RecordedPolicy(NOVAPolicy):
    def __init__(self, context: PolicyContext, method: NOVA, decisions: list[Decision]) -> None:
        super().__init__(context, method)
        self.decisions = decisions
        for growth, decision in zip(self.growth, decisions, strict=True):
            growth.star = decision.star

    def plan_scale(self, scale: Scale) -> ScalePlan:
        self.t, depth = scale.index + 1, self.context.depth
        plan = super().plan_scale(scale)
        if any(self.ratio[self.t]) and self.links_on_device:
            means = [d.means(self.t, depth) for d in self.decisions]
            self.device_means = self.upload("means", [m[layer] for layer in range(depth) for m in means])
        return plan

    def _read_reports(self) -> None:
        super()._read_reports()
        self.layer_means = {i: list(d.means(self.t, self.context.depth)) for i, d in enumerate(self.decisions)}

    def _ratio(self, growth: Growth, t: int) -> float:
        decision = self.decisions[next(i for i, g in enumerate(self.growth) if g is growth)]
        played = Growth(growth.t_est, growth.alpha, dict(enumerate(decision.entropy, 1)), decision.star)
        return super()._ratio(played, t)

    def _layer_entropy(self, layer: int, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        entropy, _ = super()._layer_entropy(layer, x, ctx)
        images = self.context.images
        return entropy, self.gather_rows(ctx.rows, self.device_means[layer * images : (layer + 1) * images])


def kept_share(decision: Decision, depth: int = 32) -> float:
    """Count the share of the tokens of a 1024 x 1024 image that a model with so many layers computes."""
    rule, m, kept = LayerLinkage(True, rounds=False), NOVA(), 0.0
    for t, side in enumerate(SIDES, start=1):
        if decision.star is None or t <= decision.star:
            kept += side**2
            continue
        played = Growth(T_EST, m.alpha, dict(enumerate(decision.entropy, 1)), decision.star)
        ratio = 1 / (1 + math.exp(-(t - (decision.star + 1)) / m.tau)) - m.lam * math.tanh(played.latest(t) or 0.0)
        layer_stats = torch.zeros(depth, 4, 1, dtype=torch.float64)
        asked = torch.tensor([min(max(ratio, 0.0), MAX_RATIO)])
        for layer, mean in enumerate(decision.means(t, depth)):
            rule.update(torch.tensor([mean], dtype=torch.float64), asked.double(), layer_stats, layer, side**2)
        kept += layer_stats[:, KEPT].mean().item()
    return kept / sum(side**2 for side in SIDES)


def prompts() -> list[str]:
    """Half as they are asked in the scenes benchmark, on white; half on something."""
    scene_prompts = [
        a.prompt for task in TASKS for a in [a for a in read_scene_prompts() if a.task == task][: PROMPTS // len(TASKS)]
    ]
    return [prompt + BACKGROUNDS[n // 2 % len(BACKGROUNDS)] * (n % 2) for n, prompt in enumerate(scene_prompts)]


def record(device: str) -> dict[str, Any]:
    pipe = Pipeline.from_pretrained(device=device, progress_bar=False)
    method = dataclasses.replace(NOVA.preset("literal"), t_est=T_EST)
    found = []
    with bar("record", PROMPTS, None) as advance:
        for seed, prompt in enumerate(prompts()):
            image = pipe(prompt, seed=seed, method=method, output_type="latent").trace.to_dict()["images"][0]
            layers = {e["scale"]: [layer["entropy"] for layer in e["layers"]] for e in image["scales"]}
            found.append(
                {
                    "prompt": prompt,
                    "star": image["activation"]["star"],
                    "entropy": [round(e["entropy"], 4) for e in image["scales"]],
                    "layers": {t: [round(m, 4) for m in ms] for t, ms in layers.items() if None not in ms},
                }
            )
            advance(1)
    return {"model": pipe.spec.name, "method": method.to_dict(), "decisions": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.out is None:
        recorded = read_decisions()
        for name, some in (("as recorded", recorded), ("varied", list(itertools.islice(vary(recorded), 192)))):
            shares = [kept_share(d) for d in some]
            print(f"{name}: median {statistics.median(shares):.1%}, mean {statistics.mean(shares):.1%} of the tokens")
        return
    options.out.write_text(json.dumps(record(options.device), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
