"""What sampling from a restored state gives, scale by scale: does "restore, then sample" work on a model's codes?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.schedule import Scale, Schedule
from nextscale.io.progress import bar
from nextscale.research.analyze import style
from nextscale.research.analyze.data import Data
from nextscale.research.analyze.restoring import RestoreScale
from nextscale.research.analyze.study import Study

FIRST = 3  # scale: the one before it has several cells
SHARES = {  # in the table, in the figure
    "repeated": ("plain=before", "plain run: equal to the scale before"),
    "before": ("restored=before", "restored: equal to the scale before"),
    "plain": ("restored=plain", "restored: equal to the plain run"),
    "likeliest": ("same likeliest", "restored: likeliest value as if computed"),
    "kept": ("kept=plain", "computed beside them: equal to the plain run"),
}
LOGITS = {"size": ("|logit|", "computed"), "change": ("change", "difference of restored and computed")}


@dataclasses.dataclass
class Predicted:
    """Of every scale that ran."""

    tokens: list[Tensor] = dataclasses.field(default_factory=list)  # [N] or, bits, [N, d]
    logits: list[Tensor] = dataclasses.field(default_factory=list)  # after guidance
    kept: list[Tensor] = dataclasses.field(default_factory=list)  # [N], whether a cell was computed


def measure(study: Study) -> Data:
    """Compare a plain run with runs that restore one scale: means over all images."""
    schedule, found = study.pipe.schedule(**study.size), list[list[dict[str, float]]]()
    scales = list(schedule)[FIRST - 1 :]
    with bar("restored", len(study.images) * len(scales), study.pipe.progress_bar) as advance:
        for asked, seed in study.images:
            plain = run(study, asked.prompt, seed)
            found.append([])
            for scale in scales:  # each run ends with its scale: about as much as one plain run in all
                restored = run(study, asked.prompt, seed, RestoreScale(scale.index + 1))
                found[-1].append(compare(plain, restored, scale, schedule))
                advance(1)
    means = [{k: sum(e[k] for e in each) / len(each) for k in each[0]} for each in zip(*found, strict=True)]
    return {
        **study.about(),
        "codes": "bits" if study.pipe.backbone.token_shape else "codes",
        "scales": [scale.index + 1 for scale in scales],
        "found": [{key: round(value, 5) for key, value in mean.items()} for mean in means],
    }


def compare(plain: Predicted, restored: Predicted, scale: Scale, schedule: Schedule) -> dict[str, float]:
    """One scale of one image: shares of equal bits or codes, and logits."""
    t = scale.index
    old = nearest(plain.tokens[t - 1], list(schedule)[t - 1], scale)
    computed, made, kept = plain.tokens[t], restored.tokens[t], restored.kept[t]
    logits = [run_.logits[t][~kept] for run_ in (plain, restored)]
    want, have = (signed(each) for each in logits)
    return {
        "repeated": share(computed == old),
        "before": share((made == old)[~kept]),
        "plain": share((made == computed)[~kept]),
        "likeliest": share(logits[0].argmax(-1) == logits[1].argmax(-1)),
        "kept": share((made == computed)[kept]),
        "size": float(want.abs().mean()),
        "change": float((have - want).abs().mean()),
    }


def run(study: Study, prompt: str | int, seed: int, method: RestoreScale | None = None) -> Predicted:
    """What is predicted at every scale, or up to the one that is restored."""
    seen = Predicted()

    def after(end: ScaleEnd) -> bool | None:
        seen.tokens.append(end.tokens[0].cpu())
        seen.logits.append(end.logits[0].float().cpu())
        seen.kept.append(torch.from_numpy(end.computed(0)).flatten() > 0)
        return False if method is not None and end.scale.index + 1 == method.scale else None

    ask: dict[str, Any] = {"seed": seed, "method": method, "callback_on_scale_end": after, "output_type": "latent"}
    study.pipe(prompt, **ask, **study.size)
    return seen


def nearest(tokens: Tensor, before: Scale, scale: Scale) -> Tensor:
    """The tokens of the scale before, on the grid of this one: each cell has that of the cell it lies in."""
    y, x = torch.arange(scale.h) * before.h // scale.h, torch.arange(scale.w) * before.w // scale.w
    return tokens[(y[:, None] * before.w + x).flatten()]


def signed(logits: Tensor) -> Tensor:
    """Of bits, how much likelier 1 is than 0; of codes, how much likelier each is than their mean."""
    if logits.shape[-1] == 2 and logits.ndim == 3:
        return logits[..., 1] - logits[..., 0]
    return logits - logits.mean(-1, keepdim=True)


def share(equal: Tensor) -> float:
    return float(equal.float().mean())


def overall(data: Data) -> dict[str, float]:
    """The mean over scales, weighted by their tokens."""
    weights = [data["grids"][t - 1][0] * data["grids"][t - 1][1] for t in data["scales"]]
    return {
        key: sum(w * e[key] for w, e in zip(weights, data["found"], strict=True)) / sum(weights)
        for key in data["found"][0]
    }


def table(data: Data) -> list[str]:
    """Lines for the terminal."""
    heads = [head for head, _ in (*SHARES.values(), *LOGITS.values())]
    lines = [f"{'scale':>5} {'grid':>9}  " + "  ".join(f"{head:>15}" for head in heads)]
    rows = [
        (str(t), "{}x{}".format(*data["grids"][t - 1]), e) for t, e in zip(data["scales"], data["found"], strict=True)
    ]
    for scale, grid, entry in (*rows, ("all", "", overall(data))):
        cells = [f"{entry[key]:>15.1%}" for key in SHARES] + [f"{entry[key]:>15.3f}" for key in LOGITS]
        lines.append(f"{scale:>5} {grid:>9}  " + "  ".join(cells))
    what = data["codes"]
    return [
        *lines,
        f"Shares of equal {what}; the more certain half of the cells was restored, the other half (kept) computed.",
        "Restore, then sample works where restored=plain is near kept=plain, and repeats the last step where"
        " restored=before is near 100 %.",
    ]


def draw(data: Data, path: Path) -> None:
    figure = style.new_figure(4.8)
    panels = figure.subplots(1, 2, width_ratios=(1.5, 1))
    scales, found = data["scales"], data["found"]
    looks = zip(
        SHARES.items(), (style.BLACK, style.RED, style.BLUE, style.SKY, style.GREEN), ("--", *["-"] * 4), strict=True
    )
    for (key, (_, label)), color, dashes in looks:
        values = [100 * e[key] for e in found]
        panels[0].plot(scales, values, "o", ls=dashes, color=color, ms=4, lw=1.5, label=label)
    panels[0].set(ylabel=f"share of the {data['codes']}, %", ylim=(-3, 103))
    for (key, (_, label)), color in zip(LOGITS.items(), (style.GREEN, style.RED), strict=True):
        panels[1].plot(scales, [e[key] for e in found], "o-", color=color, ms=4, lw=1.5, label=label)
    panels[1].set(ylabel="mean absolute logit of a restored cell", ylim=(0, None))
    for axes in panels:
        _axes(axes, data)
    title = "Half of the cells of one scale dropped, restored and sampled; all scales before it as in the plain run"
    style.set_title_of_many(figure, title, data)
    style.save(figure, path)


def _axes(axes: Any, data: Data) -> None:
    axes.set_xticks(data["scales"], [f"{t}\n{style.side(*data['grids'][t - 1])}" for t in data["scales"]])
    axes.set_xlabel("scale (tokens per side below)")
    axes.grid(color="0.92")
    axes.tick_params(labelsize=9)
    axes.legend(fontsize=8.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    style.plain_axes(axes)
