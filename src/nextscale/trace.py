"""What was computed where. It watches a run and never changes it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from nextscale.methods.base import Stats
from nextscale.models.base import Backbone, State
from nextscale.run import Rows
from nextscale.schedule import Scale, Schedule

SCHEMA = 1


@dataclass(frozen=True)
class TracedImage:
    """Who an image of the call is."""

    seed: int | None
    prompt: str | None = None
    label: int | None = None


@dataclass(frozen=True)
class _ScaleRecord:
    rows: Rows
    kept: list[dict[str, Tensor | None]]  # per layer and part [R]; None = all
    text_lengths: Tensor | None  # [R]


@dataclass
class Trace:
    backbone: Backbone
    schedule: Schedule
    images: list[TracedImage]
    guided_until: int  # scales that a plain run guides
    header: dict[str, Any]  # model, dtype, device, runtime, method
    seconds: dict[str, float] = field(default_factory=dict)
    stopped_after: list[int | None] = field(default_factory=list)
    records: dict[int, _ScaleRecord] = field(default_factory=dict)

    def ran(self, scale: Scale, rows: Rows, stats: Stats, state: State) -> None:
        # Tensors are kept as they are and read when somebody asks: a run is never made to wait.
        self.records[scale.index] = _ScaleRecord(rows, stats.kept, state.text_lengths)

    def _scale(self, image: int, scale: Scale, cached: list[int]) -> tuple[dict[str, Any], int]:
        """One scale of one image and its FLOPs; `cached` are the KV entries of each layer so far."""
        entry: dict[str, Any] = {
            "scale": scale.index + 1,
            "grid": [scale.h, scale.w],
            "tokens": scale.tokens,
            "context": 0,
            "ran": False,
            "rows": 0,
            "entropy": None,
            "growth": None,
            "smoothed_growth": None,
            "ratio": 1.0,
            "layers": [],
        }
        record = self.records.get(scale.index)
        if record is None or image not in record.rows.which:
            return entry, 0
        places = [row for row, owner in enumerate(record.rows.all) if owner == image]
        flops = len(places) * self.backbone.head_flops(scale.tokens)
        for layer, parts in enumerate(record.kept):
            kept = {part: scale.tokens if c is None else int(c[places[0]]) for part, c in parts.items()}
            cached[layer] += kept["self"]
            for part, count in kept.items():
                for place in places:
                    keys = cached[layer]
                    if part == "cross" and record.text_lengths is not None:
                        keys = int(record.text_lengths[place])
                    flops += self.backbone.flops(part, count, keys)
            shown: dict[str, Any] = {
                "layer": layer + 1,
                "entropy": None,
                "ratio": 1 - kept["self"] / scale.tokens,
                "kept": kept["self"],
            }
            if len(set(kept.values())) > 1:
                shown["groups"] = kept
            entry["layers"].append(shown)
        entry.update(ran=True, rows=len(places), ratio=0.0)
        return entry, flops

    def _image(self, image: int) -> dict[str, Any]:
        who, depth = self.images[image], self.backbone.depth
        cached = [0] * depth
        entries, flops = [], 0
        full: dict[str, int] = defaultdict(int)
        text = self._text_lengths(image)
        for scale in self.schedule:
            entry, cost = self._scale(image, scale, cached)
            entries.append(entry)
            flops += cost
            rows = 2 if scale.index < self.guided_until else 1
            full["row_tokens"] += depth * scale.tokens * rows
            for branch in range(rows):
                keys = {"self": scale.start + scale.tokens, "cross": text[branch]}
                per_layer = sum(self.backbone.flops(p, scale.tokens, keys.get(p, 0)) for p in self.backbone.parts)
                full["flops"] += depth * per_layer + self.backbone.head_flops(scale.tokens)
        kept = [sum(layer["kept"] for layer in e["layers"]) for e in entries]
        return {
            "index": image,
            "seed": who.seed,
            "prompt": who.prompt,
            "label": who.label,
            "activation": {"scale": None, "star": None, "reason": "none", "eta": None},
            "stopped_after": self.stopped_after[image] if self.stopped_after else None,
            "scales": entries,
            "tokens_computed": sum(kept),
            "tokens_full": depth * self.schedule.tokens,
            "row_tokens_computed": sum(k * e["rows"] for k, e in zip(kept, entries, strict=True)),
            "row_tokens_full": full["row_tokens"],
            "flops": flops,
            "flops_full": full["flops"],
        }

    def _text_lengths(self, image: int) -> list[int]:
        """Text keys of the conditional and the unconditional row, as the first scale had them."""
        record = self.records.get(0)
        if record is None or record.text_lengths is None:
            return [0, 0]
        lengths = [int(record.text_lengths[r]) for r, owner in enumerate(record.rows.all) if owner == image]
        return [lengths[0], lengths[-1]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.header,
            "images": [self._image(i) for i in range(len(self.images))],
            "seconds": self.seconds,
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def summary(self) -> str:
        """A table of the first image: scales, rows, tokens kept."""
        data = self.to_dict()
        image = data["images"][0]
        lines = ["scale  grid       rows  tokens  kept per layer (mean)"]
        for e in image["scales"]:
            kept = sum(layer["kept"] for layer in e["layers"]) / max(len(e["layers"]), 1)
            grid = f"{e['grid'][0]}x{e['grid'][1]}"
            lines.append(f"{e['scale']:>5}  {grid:<9}  {e['rows']:>4}  {e['tokens']:>6}  {kept:>8.1f}")
        share = image["row_tokens_computed"] / image["row_tokens_full"]
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in data["seconds"].items())
        lines.append(f"computed {share:.1%} of the tokens of a plain run; {seconds}")
        return "\n".join(lines)
