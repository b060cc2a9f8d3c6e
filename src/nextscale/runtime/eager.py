"""The plain way to run a planned scale: the only place that gathers and scatters."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.cache.kv import LayerCache, Memory, WatchedCache, count_lengths
from nextscale.engine.entropy import token_entropy
from nextscale.engine.guidance import Number, combine, combine_inside
from nextscale.engine.rng import NoiseSource
from nextscale.engine.sampling import Sampling, ScaleNumbers, sample
from nextscale.engine.schedule import Scale, Schedule
from nextscale.engine.state import GenerationState, Rows, not_finite, places_of
from nextscale.errors import NextscaleError
from nextscale.kernels.logit_lens import LogitLens, looks
from nextscale.kernels.restore import fused_put, puts
from nextscale.kernels.sdpa import fresh_shapes
from nextscale.methods.base import Numbers, Policy, ScaleContext, ScalePlan
from nextscale.methods.selection import Packed, Selection, every_token, scatter
from nextscale.methods.validation import check_completed, check_report, check_selection, check_states
from nextscale.models.base import Backbone, takes_packed, through
from nextscale.models.residual import Stream
from nextscale.tokenizers.base import ImageTokenizer


@dataclass(frozen=True)
class CallContext:
    """What stays the same in a call."""

    backbone: Backbone
    tokenizer: ImageTokenizer
    schedule: Schedule
    sampling: Sampling
    policy: Policy
    draws: NoiseSource
    forced: Sequence[Tensor] = ()  # tokens of the first scales that the user gives, [B, ...]
    watched: bool = True  # somebody looks at the maps between two scales

    @property
    def guide_after(self) -> list[int]:
        """Blocks after which guidance is applied inside the transformer."""
        return [self.backbone.depth + layer for layer in self.sampling.guidance_layers if layer < 0]


@dataclass(frozen=True)
class ScaleBatch:
    """A scale to be run, and by whom."""

    scale: Scale
    plan: ScalePlan
    rows: Rows
    placed: Rows  # all that have a place in caches and state
    cond: Any  # of those
    returns: bool = False  # somebody who rests will run later scales

    @functools.cached_property
    def places(self) -> Tensor | None:
        """Those of the rows; None = all that there are."""
        return None if self.rows == self.placed else places_of(self.rows, self.placed)


@dataclass(frozen=True)
class ScaleOutput:
    """What a scale made of the images that ran it; maps and tokens may be those of all images."""

    features: Tensor  # [b, d, H, W]
    tokens: Tensor  # [b, N] indices or [b, N, d] bits
    logits: Tensor  # guided, before top-k and top-p
    raw: Tensor  # logits of every row, before temperature and guidance
    hidden: Tensor  # output of the last block, [R, N, C]
    ctx: ScaleContext
    report: Mapping[str, Numbers]  # what the policy tells the host


class Eager:
    name = "eager"
    captured = 0  # scales, as CUDA graphs
    rehearsing = False  # calls are made for what they leave behind, and nobody looks at their pictures
    grown = 0  # times that the pages of their KV caches have become more
    overwrites = False  # whether the next scale writes into the tensors of a Step
    text_slots: tuple[int, ...] = ()  # prompts are padded to the next of them; () = to the longest
    through = staticmethod(through)
    token_entropy = staticmethod(token_entropy)

    def head(self, backbone: Backbone, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        """Logits of hidden states x [R, N, C]."""
        return backbone.head(cond, x, codes)

    def fused_logit_lens(self, backbone: Backbone, cond: Any, images: int, x: Tensor) -> LogitLens | None:
        """Entropy of the head's prediction without its logits, where there is a kernel for states like x."""
        if not looks(x) or not backbone.token_shape:
            return None
        head = functools.cache(lambda: backbone.bit_head(cond, images))  # made once a scale, and only if somebody asks
        return LogitLens(images, head)

    def open(self, call: CallContext, inputs: tuple[Tensor | None, ...], images: int, guided: bool) -> GenerationState:
        """A call begins."""
        cond = call.backbone.prepare(inputs, call.schedule)
        return GenerationState(call.backbone, cond, call.tokenizer.blank(images, call.schedule), call.schedule, guided)

    def warmed(self, batches: Sequence[int]) -> None:
        """What calls of so many pictures need is there."""

    def forget(self) -> None:
        """Let go of what is kept between calls."""

    def forget_others(self) -> bool:
        """Let go of what is kept for calls of other shapes; whether there was anything."""
        return False

    def layer_done(self, layer: int) -> None:
        """A layer of a scale has been run."""

    def on_report_ready(self, report: dict[str, Tensor]) -> None:
        """All that the host will ask for is known: it can decide about the next scale while this one is drawn."""

    def check(self, backbone: Backbone) -> None:
        """Complain about scales whose logits were not finite. Asked when the host has nothing else to do."""

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        """Maps [B, d, H, W] -> pictures [B, 3, H, W] in [-1, 1]."""
        return tokenizer.decode(features)

    packs = True  # whether tokens that a method keeps may lie packed

    def laid_out(self, chosen: Selection, backbone: Backbone, tokens: int) -> Selection:
        """As the blocks take it: packed where there are kernels for that. Elsewhere rows are padded to the longest."""
        packs = self.packs and takes_packed(backbone)
        if packs and not isinstance(chosen, Packed):
            chosen = Packed.of_mask(chosen.mask(tokens))
        if isinstance(chosen, Packed) and not self.is_capturing:
            chosen = chosen.known()
        return chosen if packs or not isinstance(chosen, Packed) else chosen.plain

    @property
    def is_capturing(self) -> bool:
        """Whether nothing may be waited for."""
        return False

    def numbers(self, call: CallContext, scale: Scale) -> ScaleNumbers:
        """Of the settings, as the code of this scale reads them."""
        return call.sampling.numbers(scale.index)

    def at_work(self) -> Tensor | None:
        """[R], False for rows of the task that rest, where only the device knows which; None: all work."""
        return None

    def rests(self, backbone: Backbone) -> bool:
        """Whether there are captured scales, in which rows may rest."""
        return False

    def places(self, images: int, backbone: Backbone, draws: NoiseSource, forced: Sequence[Tensor]) -> int:
        """For how many pictures a call of so many is made."""
        return images

    def run_scale(
        self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[LayerCache]
    ) -> ScaleOutput:
        """From the maps so far [B, d, H, W] to those with this scale in them."""
        backbone, tokenizer, sampling, policy = call.backbone, call.tokenizer, call.sampling, call.policy
        scale, rows, cond = batch.scale, batch.rows, batch.cond
        places = None if batch.places is None else batch.places.to(backbone.device)
        for cache in kv:
            cache.active = places
        if places is not None:
            cond = cond.take(places)
        if rows.images < len(features):
            features = features[list(rows.which)]
        at_work = self.at_work()
        numbers = self.numbers(call, scale)
        weight = numbers.weight
        if at_work is not None and rows.unconditional:  # of every image: 1 where its unconditional row rests
            weight = torch.where(at_work[rows.images :], weight, 1.0)
        before = rows.spread(tokenizer.inputs(features, scale)) if scale.index else None
        x = backbone.embed(cond, before, scale)
        x, ctx = self.run_blocks(call, batch, cond, x, kv, weight, at_work)
        completed = policy.finalize(x, ctx)
        check_completed(policy, completed, x, rows.images)
        x, cell_weight = completed
        raw = self.head(backbone, cond, x)
        on_logits = weight if 0 in sampling.guidance_layers else 1.0
        logits = combine(raw, rows.images, rows.guided, on_logits, numbers.by)
        try:
            self.require_finite(raw, logits, scale, backbone)
        except NextscaleError as error:
            if not policy.name:
                raise
            raise NextscaleError(f"{error}, or {policy.name} made such values") from None
        policy.on_logits(x, raw, logits, ctx)
        report = policy.report(ctx)
        check_report(policy, report, rows.images)
        self.on_report_ready(report)
        target = call.forced[scale.index][list(rows.which)] if scale.index < len(call.forced) else None
        drawn = sample(logits, scale, sampling, numbers, call.draws, rows.which, tokenizer, target)
        codes = drawn.codes
        if scale.index == len(call.schedule) - 1:
            codes = backbone.finish(cond, x, drawn, tokenizer, rows, weight, call.draws)
        codes = codes if cell_weight is None else codes * cell_weight[..., None]
        new, tokens = tokenizer.add(features, codes, scale, call.schedule), drawn.tokens
        if at_work is not None:
            own = at_work[: rows.images]
            new = torch.where(own.view(-1, *(1,) * (new.ndim - 1)), new, features)
            tokens = torch.where(own.view(-1, *(1,) * (tokens.ndim - 1)), tokens, -1)
        return ScaleOutput(new, tokens, logits, raw, x, ctx, report)

    def run_blocks(
        self,
        call: CallContext,
        batch: ScaleBatch,
        cond: Any,
        x: Tensor,
        kv: Sequence[LayerCache],
        weight: Number,
        at_work: Tensor | None,
    ) -> tuple[Tensor, ScaleContext]:
        """x [R, N, C] through all blocks; guidance of this `weight` is also applied after some of them."""
        backbone, policy = call.backbone, call.policy
        scale, plan, rows = batch.scale, batch.plan, batch.rows

        def logit_lens(hidden: Tensor, guided: bool, codes: Tensor | None = None) -> Tensor:
            """The model's own head on a state between two layers."""
            if guided:
                return combine(self.head(backbone, cond, hidden), rows.images, rows.guided, weight)
            return self.head(backbone, cond, hidden[: rows.images], codes)  # conditional rows come first

        chosen_by_layer: list[dict[str, Selection | None]] = []
        ctx = ScaleContext(scale, rows, logit_lens, chosen_by_layer, token_entropy=self.token_entropy)
        ctx.fused_logit_lens = self.fused_logit_lens(backbone, cond, rows.images, x)
        positions = backbone.positions(cond, scale)
        # Context tokens stand in front of the first scale: they are always computed, and methods do not see them.
        ctx.context = before = x.shape[1] - scale.tokens
        stream = Stream(x)
        everyone = None if at_work is None else self.laid_out(every_token(x, at_work), backbone, x.shape[1])
        for layer, block in enumerate(backbone.blocks):
            block_cond = backbone.block_cond(cond, layer)
            memory: Memory = kv[layer]
            if "attention_entropy" in plan.needs:
                memory = WatchedCache(kv[layer], rows.images)
            taken: dict[str, Selection | None] = {}
            for group in plan.groups:
                if not plan.needs_hidden and at_work is None:  # nobody asks for the sum between two layers
                    self.through(block, group, stream, block_cond, positions, memory)
                    taken.update(dict.fromkeys(group))
                    continue
                x = stream.sum
                chosen = policy.select(layer, group, x[:, before:], ctx) if plan.needs_hidden else None
                if chosen is not None:
                    check_selection(policy, chosen, x[:, before:])
                    chosen = self.laid_out(chosen if at_work is None else chosen.only(at_work), backbone, scale.tokens)
                through = everyone
                if chosen is not None:
                    through = chosen.behind(before)
                    if before and at_work is not None:
                        through = through.only(at_work)
                stream = Stream(x, through)
                with nullcontext() if through is None else fresh_shapes(x.device):
                    self.through(block, group, stream, block_cond, positions, memory, through)
                taken.update(dict.fromkeys(group, chosen))
                if chosen is None and everyone is not None:  # who rests stays as it was
                    stream = Stream(put(x, everyone, stream))
                    if not plan.needs_hidden:
                        continue
                if not before:
                    filled = policy.restore_residual(layer, group, x, chosen, stream, ctx)
                    check_states(policy, "fill", filled, x)
                    stream = Stream(filled)
                    continue
                y = stream.sum if not isinstance(stream.chosen, Packed) else stream.chosen.padded(stream.sum)
                filled = policy.restore(layer, group, x[:, before:], chosen, y[:, before:], ctx)
                check_states(policy, "fill", filled, x[:, before:])
                stream = Stream(torch.cat((y[:, :before], filled), dim=1))
            if layer in call.guide_after:
                stream = Stream(combine_inside(stream.sum, rows.images, rows.guided, weight))
            chosen_by_layer.append(taken)
            if isinstance(memory, WatchedCache):
                ctx.attention_entropy.append(memory.entropy[:, before:])
            self.layer_done(layer)
        if ctx.fused_logit_lens is not None:
            ctx.fused_logit_lens.forget()
        count_lengths(kv)
        return stream.sum[:, before:], ctx

    def require_finite(self, raw: Tensor, logits: Tensor, scale: Scale, backbone: Backbone) -> None:
        """Bad numbers would otherwise end as noise, or as a failed assertion of the sampler."""
        if not torch.isfinite(logits).all():
            raise not_finite(bool(torch.isfinite(raw).all()), scale, backbone)


def put(x: Tensor, chosen: Selection, stream: Stream) -> Tensor:
    """x [R, N, C] with the chosen tokens' stream in its places."""
    if isinstance(chosen, Packed) and puts(x):
        return fused_put(x.clone(), chosen, stream)  # a policy may ask what x was
    return scatter(x, chosen, chosen.padded(stream.sum) if isinstance(chosen, Packed) else stream.sum)
