"""Tables of the documents, made from docs/measured/embedded.json by `benchmarks/results.py`.

A document has a place for each, which this fills:

    <!-- results: NAME -->
    ...
    <!-- end -->

What was not measured yet stays as it is. White and full backgrounds stand side by side, as "white / full", wherever a
column has both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nextscale.methods import Method
from nextscale.methods.auto import AUTO
from nextscale.methods.naming import format_method, parse_method
from nextscale.research.evaluate.scenes import BACKGROUNDS

DOCUMENTS = ("README.md", "MODEL_CARD.md", "docs/results.md", "docs/taper.md")
MIN_IMAGES = 48  # images; with fewer, there are too few for an interval
MISSING = "Not measured on this model yet; `make results` does."
PLACE = re.compile(r"(<!-- results: ([\w -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
README_METHODS = (
    "none",
    "nova:paper",
    "nova:balanced",
    "nova:fast",
    "fastvar:fast",
    "sparsevar:fast",
    "taper:0.12",
    "taper:0.25",
    "taper:0.4",
    "truncate:2",
)
NAMES = {"none": "plain", "nova:paper": "NOVA()"}
Row = dict[str, Any]
Measured = dict[str, Any]


def written(measured: Measured, root: Path) -> dict[Path, str]:
    """Every document, as the measurements have it."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; allowed: {', '.join(TABLES)}")
        needs, make = TABLES[name]
        text = make(measured) if all(key in measured for key in needs) else match[3].strip() or MISSING
        return f"{match[1]}\n{text}\n\n{match[4]}"

    paths = [root / name for name in DOCUMENTS]
    return {path: PLACE.sub(fill, path.read_text(encoding="utf-8")) for path in paths}


class Sweep:
    """The rows of a sweep, by method and background."""

    def __init__(self, measured: Measured, name: str) -> None:
        content = measured[f"sweep {name}"]
        self.command, self.images = content["command"], content["images"]
        self.where = f"{content['hardware']}, torch {content['torch']}"
        self.rows: dict[str, dict[str, Row]] = {}
        for row in content["rows"]:
            self.rows.setdefault(row["method"], {})[row["background"]] = row
        self.backgrounds = [b for b in BACKGROUNDS if any(b in rows for rows in self.rows.values())]

    def pair(self, name: str, key: str, form: str = "{:.3f}", scale: float = 1.0) -> str:
        """A number on both backgrounds."""
        values = [self.rows[name][b].get(key) for b in self.backgrounds]
        return " / ".join("–" if v is None else form.format(v * scale) for v in values)

    def share(self, name: str, key: str) -> str:
        return f"{self.pair(name, key, '{:.1f}', 100)} %"

    def interval(self, name: str, key: str, background: str, digits: int = 1, sign: str = "+") -> str:
        row = self.rows[name][background]
        low, high = row.get(f"{key} low"), row.get(f"{key} high")
        if row.get(key) is None or low is None or high is None:
            return "–"
        if self.images < MIN_IMAGES:
            return f"{row[key]:{sign}.{digits}f}"
        return f"{row[key]:{sign}.{digits}f} ({low:{sign}.{digits}f} to {high:{sign}.{digits}f})"

    def about(self) -> str:
        without = "" if self.images >= MIN_IMAGES else ", which are too few for intervals"
        return f"    {self.command}\n\n{self.images} images{without}; {self.where}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sweep_table(name: str) -> Callable[[Measured], str]:
    """All settings of a sweep; nothing at all where it was not run."""

    def make(measured: Measured) -> str:
        sweep = Sweep(measured, name)
        head = ["setting", "FLOPs", "scenes", "PSNR", "SSIM", "perceptual"]
        head += [f"PSNR against truncation, {b}" for b in sweep.backgrounds]
        rows = []
        for method in sweep.rows:
            if method == "none":
                continue
            cells = [f"`{method}`", sweep.share(method, "flops"), sweep.pair(method, "scenes")]
            cells += [
                sweep.pair(method, "psnr", "{:.1f}"),
                sweep.pair(method, "ssim"),
                sweep.pair(method, "perceptual"),
            ]
            rows.append(cells + [sweep.interval(method, "psnr vs truncate", b) for b in sweep.backgrounds])
        return f"{sweep.about()}\n{table(head, rows)}"

    return make


def methods(measured: Measured) -> str:
    return f"![quality against FLOPs of all methods](curve.png)\n\n{sweep_table('methods')(measured)}"


def readme(measured: Measured) -> str:
    sweep = Sweep(measured, "main")
    times = {row["method"]: row for row in measured.get("seconds", {}).get("rows", ())}
    head = ["method", "shows what was asked", "SSIM", "PSNR, dB", "FLOPs", "dB above truncation at equal FLOPs", "CPU"]
    rows = []
    for name in README_METHODS:
        plain, speed = name == "none", f"{times[name]['speed']:.1f}x" if name in times else "–"
        cells = [f"`{NAMES.get(name, name)}`", sweep.pair(name, "scenes")]
        cells += ["–"] * 2 if plain else [sweep.pair(name, "ssim"), sweep.pair(name, "psnr", "{:.1f}")]
        gains = " / ".join(sweep.interval(name, "psnr vs truncate", b) for b in sweep.backgrounds)
        rows.append([*cells, sweep.share(name, "flops"), "–" if plain or name.startswith("truncate") else gains, speed])
    return f"{table(head, rows)}\n\n{sweep.about()}"


def presets(measured: Measured) -> str:
    """What each preset is, and what it was measured to be on the list that it was chosen on."""
    found = measured["presets"]
    head = ["preset", "settings", "FLOPs", "SSIM", "PSNR", "scenes"]
    chosen, best = dict(found["chosen"]), ""
    for stem in [stem for stem in chosen if stem.startswith(f"{AUTO}-")]:
        levels = chosen.pop(stem)
        best = f"\n\n`{AUTO}` is `{levels['balanced']}` on this model, `{AUTO}:fast` is `{levels['fast']}`."
    rows = []
    for stem, content in chosen.items():
        method = _method(content)
        on = [content["measured"][b] for b in BACKGROUNDS]
        share = " / ".join(f"{100 * m['flops']:.1f}" for m in on)
        numbers = [" / ".join(form.format(m[key]) for m in on) for key, form in _NUMBERS.items()]
        rows.append([f"`{stem.replace('-', ':', 1)}`", f"`{format_method(method)}`", f"{share} %", *numbers])
    return f"    {found['command']}\n\n{table(head, rows)}{best}"


def _method(content: dict[str, Any]) -> Method | None:
    method = parse_method(content["name"])
    return None if method is None else type(method).from_fields(content["fields"])


_NUMBERS = {"ssim": "{:.3f}", "psnr": "{:.1f}", "scenes": "{:.3f}"}


def calibrations(measured: Measured) -> str:
    toprovar, sparsevar = measured["calibrations"]["toprovar"], measured["calibrations"]["sparsevar"]
    fields, blocks = toprovar["fields"], sparsevar["blocks"]
    best = max(blocks, key=lambda b: b["ssim"])
    rows = []
    for b in blocks:
        cells = [f"{b['block']:.3f}", f"{b['tau']:.3f}", f"{100 * b['excluded']:.1f} %", f"{b['ssim']:.3f}"]
        rows.append([f"**{cell}**" for cell in cells] if b is best else cells)
    return (
        f"ToProVAR, asked for {toprovar['target']:.0%} of the tokens, computes {toprovar['reached']:.0%} with tau = "
        f"{fields['tau']:.3f}, beta = {fields['beta']:.3f} (from the {toprovar['quantile']:.0%} quantile of dominance) "
        f"and a_max = {fields['a_max']:.2f}. SparseVAR, asked to exclude {sparsevar['target']:.0%} of the tokens of "
        f"sparse scales, by the block whose change it follows:\n\n"
        + table(["block, as a share of the depth", "tau", "excluded", "SSIM"], rows)
    )


def grader(measured: Measured) -> str:
    found = measured["grader"]
    tasks = list(found[BACKGROUNDS[0]])
    head = ["task", *(f"{b} backgrounds" for b in found)]

    def cell(background: str, task: str) -> str:
        verdicts = found[background][task]
        return f"{verdicts['accuracy']:.3f} of {verdicts['pictures']}"

    return table(head, [[task.replace("colour", "color"), *(cell(b, task) for b in found)] for task in tasks])


def tasks(measured: Measured) -> str:
    sweep = Sweep(measured, "main")
    names = [n for n in README_METHODS if n in sweep.rows]
    kinds = [k for k in sweep.rows["none"][sweep.backgrounds[0]] if k in measured["grader"][BACKGROUNDS[0]]]
    head = ["method", *(k.replace("colour", "color") for k in kinds)]
    return table(head, [[f"`{NAMES.get(n, n)}`", *(sweep.pair(n, k) for k in kinds)] for n in names])


def findings(measured: Measured) -> str:
    """What the tables say, each with its interval."""
    sweep = Sweep(measured, "main")

    def cells(name: str, key: str, digits: int, sign: str = "") -> list[str]:
        return [sweep.interval(name, key, b, digits, sign) for b in sweep.backgrounds]

    rows = [["plain: scenes", *cells("none", "scenes", 3)]]
    for name in ("nova:paper", "nova:literal"):
        label = f"`{NAMES.get(name, name)}`"
        rows += [[f"{label}: scenes", *cells(name, "scenes", 3)], [f"{label}: SSIM", *cells(name, "ssim", 3)]]
    for name in sweep.rows:
        if name != "none" and not name.startswith("truncate"):
            label = f"`{NAMES.get(name, name)}` against truncation at equal FLOPs, dB"
            rows.append([label, *cells(name, "psnr vs truncate", 1, "+")])
    return f"{table(['finding', *(f'{b} backgrounds' for b in sweep.backgrounds)], rows)}\n\n{sweep.about()}"


def taper(measured: Measured) -> str:
    """What giving every image what it needs is worth."""
    sweep, found = Sweep(measured, "taper"), measured["sweep taper"]["spread"]
    head = ["setting", "FLOPs, mean", "FLOPs, most", "PSNR, mean", "PSNR, worst tenth", "1 - SSIM"]
    rows = []
    for name in sorted((n for n in found if n.startswith("taper")), key=lambda n: (found[n]["flops"], n)):
        f = found[name]
        shares = [f"{100 * f[key]:.1f} %" for key in ("flops", "most")]
        rows.append([f"`{name}`", *shares, f"{f['psnr']:.1f}", f"{f['worst']:.1f}", f"{f['dissimilarity']:.4f}"])
    figure = "![quality against FLOPs of Taper, adaptive and with fixed shares, and of truncation](taper-curve.png)"
    return f"{figure}\n\n{table(head, rows)}\n\n{sweep.about()}"


def seconds(measured: Measured) -> str:
    found = measured["seconds"]
    head = ["method", "seconds", "speed-up", "tokens", "PSNR", "SSIM"]
    rows = [
        [f"`{r['method']}`", f"{r['seconds']:.2f}", f"{r['speed']:.2f}x", f"{100 * r['tokens']:.1f} %"]
        + (["–", "–"] if r["method"] == "none" else [f"{r['psnr']:.1f}", f"{r['ssim']:.3f}"])
        for r in found["rows"]
    ]
    about = f"float32, batch 1, {found['threads']} threads, {found['prompts']} prompts, torch {found['torch']}"
    return f"{about}, one process:\n\n{table(head, rows)}"


def activation(measured: Measured) -> str:
    found = measured["entropy"]
    means = [s["mean"] for s in found["scales"]]
    grows = next((t for t, (a, b) in enumerate(itertools.pairwise(means), 1) if b < a), len(means))
    stars = ", ".join(f"{t} for {n}" for t, n in found["stars"].items() if n)
    head = ["scale", *(str(s["scale"]) for s in found["scales"])]
    rows = [["nats per token", *(f"{mean:.2f}" for mean in means)]]
    rows.append(["bits as in the scale before", *(_percent(s.get("same_bits")) for s in found["scales"])])
    rows.append(["likewise, flat cells", *(_percent(s.get("same_bits_flat")) for s in found["scales"])])
    return (
        f"{table(head, rows)}\n\nThe mean grows until scale {grows}. NOVA's eta (t_est = {found['t_est']}) is above 0 "
        f"for {found['eta_positive']:.0%} of {found['prompts']} prompts; with alpha = {found['alpha']} the inflection "
        f"t* lies at scale {stars} of them."
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


SWEEPS = ("methods", "nova-table4", "nova-table5", "toprovar-table4", "sparsevar-table4", "sparsevar-table5")
SWEEPS += ("taper-experiments",)
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Measured], str]]] = {  # name -> what it needs, what makes it
    "readme": (("sweep main",), readme),
    "findings": (("sweep main",), findings),
    "tasks": (("sweep main", "grader"), tasks),
    "taper": (("sweep taper",), taper),
    "grader": (("grader",), grader),
    "presets": (("presets",), presets),
    "calibrations": (("calibrations",), calibrations),
    "seconds": (("seconds",), seconds),
    "activation": (("entropy",), activation),
    **{name: ((f"sweep {name}",), sweep_table(name)) for name in SWEEPS},
    "methods": (("sweep methods",), methods),
}
