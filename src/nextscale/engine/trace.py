"""What was computed where, and why. It watches a run and never changes it."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nextscale.engine.rows import Rows
from nextscale.engine.schedule import Scale, Schedule
from nextscale.io.arguments import read_choice, read_count, read_path
from nextscale.io.writing import atomic_write, finite

if TYPE_CHECKING:
    from nextscale.methods.policy import Choices, Decision, Explanation, Policy, ScaleContext
    from nextscale.models.base import Backbone, Conditioning

SCHEMA = 1


@dataclass(frozen=True)
class TracedImage:
    """Who an image of the call is."""

    seed: int | None
    prompt: str | None = None
    label: int | None = None


@dataclass(frozen=True)
class _Ran:
    rows: Rows
    chosen: Choices  # per layer and part; None = all
    text_lengths: Tensor | None  # of all rows that have a place
    places: Tensor | None  # of these rows among them; None = all
    context: int

    @functools.cached_property
    def text_keys(self) -> list[int]:
        """That cross-attention sees, of every row."""
        if self.text_lengths is None:
            return [0] * len(self.rows.all)
        lengths = self.text_lengths.tolist()
        return lengths if self.places is None else [lengths[place] for place in self.places.tolist()]


Counts = list[dict[str, "list[int] | None"]]  # per layer and part, the tokens of every row; None = all


@dataclass(frozen=True)
class Costs:
    """What the trace has to know of a backbone, as numbers: an output must not keep a model alive."""

    depth: int
    parts: tuple[str, ...]
    per_token: dict[str, int]  # FLOPs of a part, besides
    per_key: dict[str, int]  # those for every key that a token sees
    head: int
    context: int = 0  # tokens that run in front of the first scale's own

    @classmethod
    def of(cls, backbone: Backbone) -> Costs:
        fixed = {part: backbone.flops(part, 1, 0) for part in backbone.sublayers}
        growing = {part: backbone.flops(part, 1, 1) - fixed[part] for part in backbone.sublayers}
        return cls(backbone.depth, backbone.sublayers, fixed, growing, backbone.head_flops(1), backbone.context)

    def flops(self, part: str, tokens: int, keys: int) -> int:
        return tokens * (self.per_token[part] + self.per_key[part] * keys)


@dataclass
class Trace:
    costs: Costs
    schedule: Schedule
    images: list[TracedImage]
    guided_until: int  # scales that a plain run guides
    header: dict[str, Any] = field(default_factory=dict)  # model, dtype, device, runtime, method
    seconds: dict[str, float] = field(default_factory=dict)
    stopped_after: list[int | None] = field(default_factory=list)
    policy: Policy | None = None
    records: dict[int, _Ran] = field(default_factory=dict)
    _counts: dict[int, Counts] = field(default_factory=dict)
    _lengths: tuple[Tensor, Tensor] | None = None  # of the text, as a state has them and as they are kept

    def ran(self, ctx: ScaleContext, cond: Conditioning, places: Tensor | None = None) -> None:
        """`places` of the rows at work in the state; None = all."""
        # Tensors are kept as they are and read when somebody asks: a run is never made to wait.
        lengths = cond.text_lengths
        if lengths is not None:
            if self._lengths is None or self._lengths[0] is not lengths:
                self._lengths = lengths, lengths.clone()  # the next call may write over them
            lengths = self._lengths[1]
        self.records[ctx.scale.index] = _Ran(ctx.rows, ctx.chosen, lengths, places, ctx.context)

    def finished(self, policy: Policy, stopped_after: list[int | None]) -> None:
        self.policy, self.stopped_after = policy, stopped_after

    def kept(self, image: int, scale: int, layer: int, group: str | None = None, row: int = 0) -> np.ndarray:
        """Which cells were computed, [h, w] of bool. Scale and layer count from 1; row 1 is the unconditional one."""
        layer, row = read_count(layer, "layer", 1, self.costs.depth), read_count(row, "row", 0, 1)
        part = "self" if group is None else read_choice(group, "group", self.costs.parts)
        where, record, places = self._find(image, scale)
        if record is None or row >= len(places):
            return np.zeros(where.grid, dtype=bool)
        chosen = record.chosen[layer - 1][part]
        if chosen is None:
            return np.ones(where.grid, dtype=bool)
        return chosen.mask(where.tokens)[places[row]].view(where.grid).cpu().numpy()

    def computed(self, image: int, scale: int) -> np.ndarray:
        """The share of layers that computed each cell of a scale (1 = the first), [h, w]."""
        where, record, places = self._find(image, scale)
        if record is None or not places:
            return np.zeros(where.grid)
        masks = [c.mask(where.tokens)[places[0]] for c in (parts["self"] for parts in record.chosen) if c is not None]
        complete = self.costs.depth - len(masks)  # layers
        counts = torch.stack(masks).sum(0).view(where.grid).cpu().numpy() if masks else np.zeros(where.grid)
        return (counts + complete) / self.costs.depth

    @property
    def counts(self) -> dict[int, Counts]:
        """The tokens of every scale that ran: read from the device at once, for a read costs more than a number."""
        unread = {index: record.chosen for index, record in self.records.items() if index not in self._counts}
        distinct = {id(c): c.count for chosen in unread.values() for p in chosen for c in p.values() if c is not None}
        rows = torch.cat(list(distinct.values())).tolist() if distinct else []
        ends = itertools.accumulate(map(len, distinct.values()))
        read = {key: rows[end - len(count) : end] for (key, count), end in zip(distinct.items(), ends, strict=True)}
        for index, chosen in unread.items():
            self._counts[index] = [{p: None if c is None else read[id(c)] for p, c in ps.items()} for ps in chosen]
        return self._counts

    def tokens(self, image: int) -> float:
        """The tokens computed for an image in the mean over layers, rows with guidance not counted twice."""
        total = 0
        for index, counts in self.counts.items():
            where, record, places = self._find(image, index + 1)
            if record is not None and places:
                kept = [parts["self"] for parts in counts]
                total += sum(where.tokens if count is None else count[places[0]] for count in kept)
        return total / self.costs.depth

    def _find(self, image: int, scale: int) -> tuple[Scale, _Ran | None, list[int]]:
        """A scale, what is known of its run, and the rows of an image in it."""
        image = read_count(image, "image", 0, len(self.images) - 1)
        where = list(self.schedule)[read_count(scale, "scale", 1, len(self.schedule)) - 1]
        record = self.records.get(where.index)
        return where, record, [] if record is None else [r for r, owner in enumerate(record.rows.all) if owner == image]

    def text_tokens(self, image: int) -> int:
        """How many tokens the prompt of an image has."""
        image = read_count(image, "image", 0, len(self.images) - 1)
        context = self.records[0].context if 0 in self.records else 0  # where the text runs in front of the image
        return context + 1 if context else self._text_lengths(image)[0]

    def _scale(self, image: int, scale: Scale, cached: list[int], why: Decision) -> tuple[dict[str, Any], int]:
        """One scale of one image and its FLOPs; `cached` are the KV entries of each layer so far."""
        entry: dict[str, Any] = {
            "scale": scale.index + 1,
            "grid": [scale.h, scale.w],
            "tokens": scale.tokens,
            "context": 0,
            "ran": False,
            "rows": 0,
            "entropy": why.entropy,
            "growth": why.growth,
            "smoothed_growth": why.smoothed_growth,
            "ratio": 1.0,
            "layers": [],
        }
        if why.share is not None:
            entry["share"] = why.share
        if why.threshold is not None:
            entry["threshold"] = why.threshold
        record = self.records.get(scale.index)
        if record is None or image not in record.rows.image_ids:
            return entry, 0
        places = [row for row, owner in enumerate(record.rows.all) if owner == image]
        flops = len(places) * scale.tokens * self.costs.head
        for layer, parts in enumerate(self.counts[scale.index]):
            kept = {p: scale.tokens if c is None else c[places[0]] for p, c in parts.items()}
            cached[layer] += record.context + kept["self"]
            for part, count in kept.items():
                for place in places:
                    keys = cached[layer]
                    if part == "cross":
                        keys = record.text_keys[place]
                    flops += self.costs.flops(part, record.context + count, keys)
            shown: dict[str, Any] = {
                "layer": layer + 1,
                "entropy": why.layer_entropy[layer] if why.layer_entropy else None,
                "ratio": why.layer_ratio[layer] if why.layer_ratio else 1 - kept["self"] / scale.tokens,
                "kept": kept["self"],
            }
            if len(set(map(id, parts.values()))) > 1:
                shown["groups"] = kept
            entry["layers"].append(shown)
        mean = sum(e["ratio"] for e in entry["layers"]) / max(len(entry["layers"]), 1)
        entry.update(ran=True, context=record.context, rows=len(places), ratio=mean if why.ratio is None else why.ratio)
        return entry, flops

    def _scales(self, image: int, why: Explanation) -> tuple[list[dict[str, Any]], list[int]]:
        """The scales of one image and the FLOPs of each."""
        cached = [0] * self.costs.depth
        found = [self._scale(image, scale, cached, why.decision(scale)) for scale in self.schedule]
        return [entry for entry, _ in found], [flops for _, flops in found]

    def flops(self, image: int) -> list[int]:
        """The FLOPs of every scale of an image."""
        image = read_count(image, "image", 0, len(self.images) - 1)
        assert self.policy is not None, "the call is over"
        return self._scales(image, self.policy.explain(image))[1]

    def plain_flops(self, image: int) -> list[int]:
        """The FLOPs of every scale in a run that leaves nothing out."""
        image = read_count(image, "image", 0, len(self.images) - 1)
        text, found = self._text_lengths(image), []
        context = self.records[0].context if 0 in self.records else 0
        for scale in self.schedule:
            flops = 0
            for branch in range(self._plain_rows(scale)):
                keys = {"self": context + scale.start + scale.tokens, "cross": text[branch]}
                tokens = scale.tokens if scale.index else context + scale.tokens
                per_layer = sum(self.costs.flops(p, tokens, keys.get(p, 0)) for p in self.costs.parts)
                flops += self.costs.depth * per_layer + scale.tokens * self.costs.head
            found.append(flops)
        return found

    def _plain_rows(self, scale: Scale) -> int:
        return 2 if scale.index < self.guided_until else 1

    def image(self, image: int) -> dict[str, Any]:
        """The entry of an image in `to_dict()`."""
        image = read_count(image, "image", 0, len(self.images) - 1)
        assert self.policy is not None, "the call is over"
        why = self.policy.explain(image)
        who, depth = self.images[image], self.costs.depth
        entries, flops = self._scales(image, why)
        full_flops = sum(self.plain_flops(image))
        if why.budget is not None:
            for entry, spent in zip(entries, itertools.accumulate(flops), strict=True):
                entry["budget_left"] = why.budget - spent / full_flops
        kept = [sum(layer["kept"] for layer in e["layers"]) for e in entries]
        return {
            "index": image,
            "seed": who.seed,
            "prompt": who.prompt,
            "label": who.label,
            "activation": dict(vars(why.activation)),
            "stopped_after": self.stopped_after[image] if self.stopped_after else None,
            "scales": entries,
            "tokens_computed": sum(kept),
            "tokens_full": depth * self.schedule.tokens,
            "row_tokens_computed": sum(k * e["rows"] for k, e in zip(kept, entries, strict=True)),
            "row_tokens_full": depth * sum(scale.tokens * self._plain_rows(scale) for scale in self.schedule),
            "flops": sum(flops),
            "flops_full": full_flops,
        }

    def _text_lengths(self, image: int) -> list[int]:
        """Text keys of the conditional and the unconditional row, as the first scale that it ran had them."""
        for record in self.records.values():
            lengths = [record.text_keys[r] for r, owner in enumerate(record.rows.all) if owner == image]
            if lengths:
                return [lengths[0], lengths[-1]]
        return [0, 0]

    def to_dict(self) -> dict[str, Any]:
        return finite(
            {
                "schema": SCHEMA,
                **self.header,
                "images": [self.image(i) for i in range(len(self.images))],
                "seconds": self.seconds,
            }
        )

    def save(self, path: str | Path) -> None:
        """As JSON; a name ending in .npz stores the maps of computed cells of every image, scale, layer and group."""
        path = Path(read_path(path, "the path of a trace"))
        with atomic_write(path) as file:
            if path.suffix == ".npz":
                np.savez_compressed(file, **self._maps())
            else:
                file.write((json.dumps(self.to_dict(), indent=1) + "\n").encode())

    def _maps(self) -> dict[str, Any]:
        maps = {}
        for image in range(len(self.images)):
            for index, record in self.records.items():
                for layer in range(1, self.costs.depth + 1):
                    for part in record.chosen[layer - 1]:
                        for row in range(record.rows.all.count(image)):
                            name = f"image{image}/scale{index + 1}/layer{layer}/{part}/row{row}"
                            maps[name] = self.kept(image, index + 1, layer, part, row)
        return maps

    def share(self, image: int = 0) -> float:
        """The tokens computed for an image, of those that a plain run computes; guidance rows count."""
        counts = self.image(image)
        return counts["row_tokens_computed"] / counts["row_tokens_full"]

    def summary(self) -> str:
        """A table of the first image: scales, rows, tokens kept."""
        data = self.to_dict()
        image = data["images"][0]
        budgeted = "budget_left" in image["scales"][0]
        lines = ["scale  grid       rows  tokens  ratio  kept per layer (mean)"]
        lines[0] += "  planned  budget left" if budgeted else ""
        for e in image["scales"]:
            kept = sum(layer["kept"] for layer in e["layers"]) / max(len(e["layers"]), 1)
            grid = f"{e['grid'][0]}x{e['grid'][1]}"
            lines.append(
                f"{e['scale']:>5}  {grid:<9}  {e['rows']:>4}  {e['tokens']:>6}  {e['ratio']:>5.2f}  {kept:>8.1f}"
            )
            if budgeted:
                lines[-1] += f"{e.get('share', 1.0):>22.0%}  {e['budget_left']:>11.1%}"
        active = image["activation"]
        if active["reason"] != "none":
            since = f"from scale {active['scale']}" if active["scale"] else "no scale reduced"
            lines.append(f"{data.get('method', {}).get('name', 'method')}: {since} ({active['reason']})")
        share = self.share()
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in data["seconds"].items())
        lines.append(f"computed {share:.1%} of the tokens of a plain run; {seconds}")
        return "\n".join(lines)
