"""One batch on the device: its call of the pipeline, and what clients see of it meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.trace import Trace
from nextscale.serve.jobs import ALL, Finished, Pixels, Preview, ScaleMap
from nextscale.serve.observer import Observer
from nextscale.serve.previews import decode_preview, pixels_of, preview_scales
from nextscale.serve.ticket import Slot

logger = logging.getLogger(__name__)


class EndRun(Exception):
    """Nobody waits for any image of the batch, or the engine stops."""


class BatchRun:
    """`others` counts the images that wait; with more than `many` of them nobody gets a preview."""

    def __init__(
        self, slots: Sequence[Slot], others: Callable[[], int], many: int, stops: Callable[[], bool], observer: Observer
    ) -> None:
        self.slots, self.others, self.many, self.stops, self.observer = slots, others, many, stops, observer
        self.model, self.job = slots[0].ticket.model, slots[0].ticket.job
        self.clock = self.model.clock
        seconds = self.model.expected_seconds(self.job)
        self.scales = len(seconds)
        self.shown_after = [preview_scales(slot.ticket.job.previews, seconds) for slot in slots]
        self.scales_run: list[int] = []
        self.begun = time.monotonic()
        self.previewing = 0.0  # seconds that went into previews

    def __call__(self) -> None:
        """Make the images and hand them out."""
        jobs = [slot.ticket.job for slot in self.slots]
        width, height = self.model.size_of(self.job)
        negative = None if self.job.negative_prompt is None else [job.negative_prompt or "" for job in jobs]
        self.clock.mark("begun")
        output = self.model.pipe(
            [job.prompt for job in jobs],  # type: ignore[arg-type]
            negative_prompt=negative,
            seed=[slot.seed for slot in self.slots],
            height=height,
            width=width,
            guidance_scale=self.job.guidance_scale,
            method=self.job.method,
            callback_on_scale_end=self.after_scale,
            output_type="pt",
        )
        taken = self.elapsed()
        self.measure()
        for row, (slot, pixels) in enumerate(zip(self.slots, pixels_of(output.images), strict=True)):
            if not slot.gone:
                self.finish(row, slot, pixels, output.trace, taken)

    def after_scale(self, end: ScaleEnd) -> set[int] | None:
        """Let images leave that nobody waits for, and show those that somebody wants to see."""
        self.clock.mark(f"scale {end.scale.index}")
        self.scales_run.append(end.scale.index)
        gone = {row for row, slot in enumerate(self.slots) if slot.gone}
        if self.stops() or len(gone) == len(self.slots):
            raise EndRun
        scale = end.scale.index + 1
        wanted = [
            row
            for row in end.images
            if row not in gone and scale in self.shown_after[row] and scale > self.slots[row].shown
        ]
        begun = time.monotonic()
        if wanted:
            try:
                self.show(end, wanted)
            except Exception:  # such as too little memory: no reason to lose the image
                logger.exception("a preview failed")
                self.observer.preview_skipped()
        self.previewing += time.monotonic() - begun
        self.clock.mark(f"shown {end.scale.index}")
        return gone

    def elapsed(self) -> float:
        """Seconds since the run began, without those that went into previews."""
        return time.monotonic() - self.begun - self.previewing

    def show(self, end: ScaleEnd, rows: list[int]) -> None:
        others = self.others()
        if others > self.many:
            self.observer.preview_skipped()
            return
        elapsed = self.elapsed()
        delays = others > 0 or len(rows) < len(self.slots)  # somebody who did not ask for it
        small = delays or 2 * end.scale.h <= end.features.shape[2]  # a coarse grid has no more to show
        images = decode_preview(end.decode, end.features[rows], small)
        for row, pixels in zip(rows, pixels_of(images), strict=True):
            slot = self.slots[row]
            cells = to_bytes(end.computed(row)) if slot.ticket.job.previews == ALL else None
            where = slot.index, slot.previews, end.scale.index + 1, self.scales, end.scale.grid
            slot.previews, slot.shown = slot.previews + 1, end.scale.index + 1
            slot.ticket.send(Preview(*where, pixels, cells, elapsed), self.observer.preview_made)

    def measure(self) -> None:
        """Learn how long the scales took, and tell the observer."""
        seconds, before = [0.0] * self.scales, "begun"
        for index in self.scales_run:
            seconds[index] = self.clock.between(before, f"scale {index}")
            before = f"shown {index}"
            self.observer.scale_done(self.model.name, index + 1, seconds[index])
        self.model.observe_seconds(self.job, seconds)

    def finish(self, row: int, slot: Slot, pixels: Pixels, trace: Trace, taken: float) -> None:
        tokens, plain = round(trace.tokens(row)), trace.schedule.tokens
        scales = scale_maps(trace, row) if slot.ticket.job.previews == ALL else None
        done = Finished(
            slot.index,
            pixels,
            slot.seed,
            self.job.method if isinstance(self.job.method, str) else self.job.method.name,
            tokens,
            plain,
            trace.text_tokens(row),
            taken,
            self.begun - slot.since,
            scales,
        )
        answered = self.model.name, tokens, plain, time.monotonic() - slot.since
        slot.done = True
        slot.ticket.send(done, lambda: self.observer.finished(*answered))


def scale_maps(trace: Trace, row: int) -> list[ScaleMap]:
    maps = []
    for entry in trace.image(row)["scales"]:
        kept = round(sum(layer["kept"] for layer in entry["layers"]) / trace.costs.depth)
        cells = to_bytes(trace.computed(row, entry["scale"]))
        maps.append(ScaleMap(entry["scale"], tuple(entry["grid"]), kept, cells))
    return maps


def to_bytes(share: np.ndarray) -> np.ndarray:
    return np.round(255 * share).astype(np.uint8)
