"""At which scale NOVA would begin to reduce, per category of prompts (NOVA, Figure 8)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from nextscale.methods.nova import NOVA
from nextscale.methods.nova.growth import Growth
from nextscale.research.analyze import style
from nextscale.research.analyze.band import Band
from nextscale.research.analyze.data import Data


def measure(band: Band, method: NOVA) -> Data:
    """Find the first reduced scale from entropies of plain runs, as NOVA's run is plain until then."""
    entropies = band.guided if method.entropy_of == "guided" else band.conditional
    last = entropies.shape[1]
    first: list[int | None] = []
    for row in entropies.tolist():
        growth = Growth(method.t_est, method.alpha)
        for t, value in enumerate(row, start=1):
            growth.add(t, value)
        first.append(None if growth.star is None or growth.star == last else growth.star + 1)
    return {**band.about(), "t_est": method.t_est, "alpha": method.alpha, "scales": last, "first_reduced": first}


def draw(data: Data, path: Path) -> None:
    names = list(dict.fromkeys(data["categories"]))
    pairs = list(zip(data["categories"], data["first_reduced"], strict=True))
    scales = list(range(data["t_est"] + 2, data["scales"] + 1))  # the earliest that the rule allows, and later
    figure = style.new_figure(1.9 + 0.42 * len(names))
    axes = figure.subplots()
    end = dict.fromkeys(names, 0.0)
    for scale, color in zip([*scales, None], [*style.gradient(len(scales)), "0.85"], strict=True):
        label = "never" if scale is None else f"scale {scale}"
        for y, name in enumerate(names):
            found = Counter(first for category, first in pairs if category == name)
            share = found[scale] / found.total()
            axes.barh(y, share, left=end[name], color=color, edgecolor="white", label=None if y else label)
            if share >= 0.06:
                dark = scale is not None and scale - scales[0] < 0.6 * len(scales)
                where = (end[name] + share / 2, y)
                axes.text(*where, f"{share:.0%}", ha="center", va="center", fontsize=9, color="w" if dark else "k")
            end[name] += share
    counts: Counter[str] = Counter(data["categories"])
    axes.set_yticks(
        range(len(names)), [style.escape_dollars(f"{name} ({counts[name]})") for name in names], fontsize=9.5
    )
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the images")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), title="first reduced scale")
    style.plain_axes(axes)
    one = " (one image only)" if len(pairs) == 1 else ""
    figure.suptitle(
        f"Where NOVA begins to reduce, {data['model']}{one}: t_est = {data['t_est']}, alpha = {data['alpha']:g}",
        fontsize=12,
    )
    style.save(figure, path)
