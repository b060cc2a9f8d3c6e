"""How uncertain the model is from scale to scale, which is what NOVA goes by, and how much its bits change.

    python -m training.entropy --run FOLDER [--model FOLDER_OR_NAME] [--prompts 200]

Captions as in training, backgrounds and all, are sampled plainly. The entropy is that of the conditional logits as
they leave the head; a token has the sum of its bits' entropies, in nats.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.entropy import token_entropy
from nextscale.engine.schedule import Grid, Schedule
from nextscale.methods.nova.growth import Growth
from nextscale.pipeline import Pipeline
from training.common import device, read_config
from training.evaluate import Progress, load_pipeline, model_arguments, read_method
from training.scenes import Scenes, read_vocabulary

T_EST, ALPHA = 5, 0.5  # NOVA's own settings
FLAT = 0.06  # a cell is flat if no color channel (0..1) of its pixels spans more


def nearest(values: Tensor, before: Grid, now: Grid) -> Tensor:
    """Bits [B, N, d] of one grid, at the cells of another."""
    (h, w), (old_h, old_w) = now, before
    y = ((torch.arange(h, device=values.device) + 0.5) * old_h / h).long()
    x = ((torch.arange(w, device=values.device) + 0.5) * old_w / w).long()
    return values[:, (y[:, None] * old_w + x).flatten()]


def flat_cells(images: Tensor, grid: Grid) -> Tensor:
    """Where an image [B, 3, H, W] in [0, 1] has one color, [B, N]; that is mostly its background."""
    span = F.adaptive_max_pool2d(images, grid) + F.adaptive_max_pool2d(-images, grid)
    return (span.amax(1) < FLAT).flatten(1)


def persistence(tokens: list[Tensor], images: Tensor, schedule: Schedule) -> Tensor:
    """Per scale from the second on and per image: equal bits, bits, equal bits in flat cells, bits in flat cells."""
    rows = []
    for t in range(1, len(schedule)):
        before, now = schedule.grids[t - 1], schedule.grids[t]
        same = (tokens[t] == nearest(tokens[t - 1], before, now)) & (tokens[t] >= 0)  # -1: did not run
        ran = (tokens[t] >= 0).sum((1, 2))
        flat = flat_cells(images, now)[..., None]
        rows.append(
            torch.stack((same.sum((1, 2)), ran, (same & flat).sum((1, 2)), (flat & (tokens[t] >= 0)).sum((1, 2))))
        )
    return torch.stack(rows).permute(0, 2, 1).double().cpu()  # [scales - 1, B, 4]


class Measured:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.entropy: list[Tensor] = []  # per batch [scales, B]
        self.bits: list[Tensor] = []  # per batch [scales - 1, B, 4]

    def sample(self, pipe: Pipeline, prompts: list[str], seeds: list[int], **options: Any) -> None:
        per_scale: list[Tensor] = []

        def note(end: ScaleEnd) -> None:
            conditional = end.raw_logits[: len(end.images)]  # those rows come first
            values = torch.full((len(prompts),), torch.nan, dtype=torch.float64, device=conditional.device)
            values[list(end.images)] = token_entropy(conditional).double().mean(1)
            per_scale.append(values)

        made = pipe(prompts, seed=seeds, callback_on_scale_end=note, output_type="pt", **options)
        left_out = [torch.full_like(per_scale[0], torch.nan)] * (len(self.schedule) - len(per_scale))
        self.entropy.append(torch.stack((*per_scale, *left_out)).cpu())
        self.bits.append(persistence(made.tokens, made.images.float(), self.schedule))


def activations(entropy: np.ndarray) -> list[Growth]:
    """NOVA's rule for every prompt, from the means [scales, prompts]."""
    result = []
    for column in entropy.T.tolist():
        growth = Growth(T_EST, ALPHA)
        for t, value in enumerate(column, start=1):
            if value == value:  # a scale that did not run has none
                growth.add(t, value)
        result.append(growth)
    return result


def report(measured: Measured) -> dict[str, Any]:
    """Prints the tables; returns their numbers."""
    entropy = torch.cat(measured.entropy, dim=1).numpy()
    bits = torch.cat(measured.bits, dim=1).sum(1)  # [scales - 1, 4]
    scales = []
    print("\nscale   grid     mean     10 %     90 %      min      max   same bits   in flat cells (of all)")
    for scale in measured.schedule:
        values = entropy[scale.index][~np.isnan(entropy[scale.index])]
        line: dict[str, Any] = {"scale": scale.index + 1, "grid": list(scale.grid)}
        text = f"{scale.index + 1:>5}{scale.h:>4} x{scale.w:>3}"
        if len(values):
            low, high = np.quantile(values, (0.1, 0.9)).tolist()
            line |= {"mean": float(values.mean()), "p10": low, "p90": high}
            line |= {"min": float(values.min()), "max": float(values.max())}
            text += "".join(f"{line[k]:>9.3f}" for k in ("mean", "p10", "p90", "min", "max"))
            if scale.index:
                same, every, flat_same, flat = bits[scale.index - 1].tolist()
                line |= {"same_bits": same / every, "flat_share": flat / every}
                line["same_bits_flat"] = flat_same / flat if flat else None
                inside = f"{flat_same / flat:>13.1%} ({flat / every:.0%})" if flat else f"{'-':>13} (0%)"
                text += f"{same / every:>12.1%}   {inside}"
        print(text)
        scales.append(line)
    found = activations(entropy)
    eta = [g.eta for g in found if g.eta is not None]
    growing = sum(e > 0 for e in eta) / max(1, len(eta))
    stars = Counter("never" if g.star is None else str(g.star) for g in found)
    reasons = Counter(g.reason for g in found)
    if eta:
        low, middle, high = np.quantile(eta, (0.1, 0.5, 0.9)).tolist()
        print(f"\neta (t_est = {T_EST}): {growing:.1%} of {len(eta)} prompts above 0; ", end="")
        print(f"10 % {low:.4f}, median {middle:.4f}, 90 % {high:.4f}")
    print(f"scale of inflection t* (alpha = {ALPHA}); reduction starts one scale later:")
    order = [str(t) for t in range(T_EST + 1, len(measured.schedule) + 1)] + ["never"]
    histogram = {t: stars[t] for t in order}
    for t, n in histogram.items():
        print(f"  {t:>5} {n:>5}  {n / len(found):>6.1%}  {'#' * round(40 * n / len(found))}")
    print("reasons: " + ", ".join(f"{name} {n}" for name, n in reasons.most_common()))
    return {
        "t_est": T_EST,
        "alpha": ALPHA,
        "prompts": len(found),
        "scales": scales,
        "eta_positive": growing,
        "eta": eta,
        "stars": histogram,
        "reasons": dict(reasons),
        "entropy": entropy.T.round(5).tolist(),  # per prompt
    }


def draw(result: dict[str, Any], path: Path) -> bool:
    """Curve and histogram; False where there is no matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    scales = [s for s in result["scales"] if "mean" in s]
    t = [s["scale"] for s in scales]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    left.fill_between(t, [s["min"] for s in scales], [s["max"] for s in scales], color="C0", alpha=0.12, lw=0)
    left.fill_between(t, [s["p10"] for s in scales], [s["p90"] for s in scales], color="C0", alpha=0.3, lw=0)
    left.plot(t, [s["mean"] for s in scales], "o-", color="C0", ms=4)
    left.axvline(result["t_est"], color="0.5", lw=1, ls="--")
    left.text(result["t_est"] + 0.1, 0.98, "t_est", color="0.4", va="top", transform=left.get_xaxis_transform())
    left.set(xlabel="scale", ylabel="entropy of a token, nats", xticks=t, ylim=(0, None))
    left.set_title(f"mean, 10 to 90 %, range of {result['prompts']} prompts", fontsize=10)
    names, counts = list(result["stars"]), list(result["stars"].values())
    right.bar(range(len(names)), counts, color="C1")
    right.set_xticks(range(len(names)), names)
    right.set(xlabel="scale of inflection t*", ylabel="prompts")
    right.set_title(f"alpha = {result['alpha']}, eta > 0 in {result['eta_positive']:.0%}", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    where = device()
    size: dict[str, Any] = {}
    if options.smoke:
        options.prompts, size = 2, {"pixel_budget": "0.25M"}  # fewer scales would leave nothing after t_est
        logging.getLogger("nextscale").setLevel(logging.ERROR)  # that such images are small is known
    scenes, rng = Scenes(read_vocabulary()), np.random.default_rng(2 * 10**6)
    captions = [scenes.draw(rng).caption for _ in range(options.prompts)]
    pipe = load_pipeline(options.model, read_config(options.config, options.smoke), where)
    measured, progress = Measured(pipe.schedule(**size)), Progress(len(captions))
    method = read_method(options.method, options.set)
    for i in range(0, len(captions), options.batch):
        part = captions[i : i + options.batch]
        measured.sample(pipe, part, list(range(i, i + len(part))), method=method, **size)
        progress(i + len(part))
    result = report(measured)
    out = options.run
    out.mkdir(parents=True, exist_ok=True)
    head = {"model": options.model, "captions": captions}
    (out / "entropy.json").write_text(json.dumps({**head, **result}) + "\n")
    drawn = draw(result, out / "entropy.png")
    print(f"\nwrote {out / 'entropy.json'}" + (f" and {out / 'entropy.png'}" if drawn else "; no matplotlib, no image"))


if __name__ == "__main__":
    main()
