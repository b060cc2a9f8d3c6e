"""The plain runtime: the only place that gathers tokens before a layer and restores them behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nextscale.cache.kv import EntropyRecordingCache, KVCache, commit_lengths
from nextscale.engine.entropy import token_entropy
from nextscale.engine.forward import forward_scale
from nextscale.engine.guidance import guide, guide_hidden
from nextscale.engine.sampling import ScaleSettings
from nextscale.engine.schedule import Scale
from nextscale.engine.state import GenerationState, not_finite
from nextscale.errors import NextscaleError
from nextscale.kernels import logit_lens, restore
from nextscale.kernels.logit_lens import LogitLens, RestoredState
from nextscale.kernels.sdpa import without_cudnn
from nextscale.methods.policy import Group, Policy, ScaleContext
from nextscale.methods.selection import Packed, Selection, every_token, scatter
from nextscale.methods.validation import check_selection, check_states
from nextscale.models.base import Attend, Backbone, Block, supports_packed
from nextscale.models.residual import ResidualStream
from nextscale.runtime.base import CallContext, Executor, ScaleBatch, ScaleOutput
from nextscale.tokenizers.base import ImageTokenizer


class Eager(Executor):
    name = "eager"
    packs = True  # whether tokens that a method keeps may lie packed
    token_entropy = staticmethod(token_entropy)

    def open(self, call: CallContext, inputs: tuple[Tensor | None, ...], images: int, guided: bool) -> GenerationState:
        cond = call.backbone.prepare(inputs, call.schedule)
        features = call.tokenizer.empty_features(images, call.schedule)
        return GenerationState(call.backbone, cond, features, call.schedule, guided)

    def decode(self, tokenizer: ImageTokenizer, features: Tensor) -> Tensor:
        return tokenizer.decode(features)

    def run_scale(self, call: CallContext, batch: ScaleBatch, features: Tensor, kv: Sequence[KVCache]) -> ScaleOutput:
        rows = None if batch.row_indices is None else batch.row_indices.to(call.backbone.device)
        for cache in kv:
            cache.active_rows = rows
        if rows is not None:
            batch = dataclasses.replace(batch, cond=batch.cond.take(rows))
        if batch.rows.images < len(features):
            features = features[list(batch.rows.image_ids)]
        output = forward_scale(call, batch, features, kv, self)
        active = self.active_mask()
        if active is None:
            return output
        active = active[: batch.rows.images]
        new = torch.where(active.view(-1, *(1,) * (features.ndim - 1)), output.features, features)
        tokens = torch.where(active.view(-1, *(1,) * (output.tokens.ndim - 1)), output.tokens, -1)
        return dataclasses.replace(output, features=new, tokens=tokens)

    # What other runtimes do in another way

    def scale_settings(self, call: CallContext, batch: ScaleBatch) -> ScaleSettings:
        """Guidance, temperature, top-k and top-p of a scale."""
        return call.sampling.settings(batch.scale.index)

    def head(self, backbone: Backbone, cond: Any, x: Tensor, codes: Tensor | None = None) -> Tensor:
        """Predict logits of hidden states x [R, N, C]."""
        return backbone.head(cond, x, codes)

    def require_finite(self, call: CallContext, raw: Tensor, logits: Tensor, scale: Scale) -> None:
        """Refuse bad numbers, which would otherwise end as noise, or as a failed assertion of the sampler."""
        if not torch.isfinite(logits).all():
            error = not_finite(bool(torch.isfinite(raw).all()), scale, call.backbone)
            if not call.policy.name:
                raise error
            raise NextscaleError(f"{error}, or {call.policy.name} made such values")

    def run_block(
        self, block: Block, stream: ResidualStream, block_cond: Any, attend: Attend, sublayers: Sequence[str]
    ) -> None:
        """Add what some sublayers of a block make of the stream."""
        block(stream, block_cond, attend, sublayers)

    def layer_done(self, layer: int) -> None:
        """Do what is to be done behind a layer of a scale."""

    def on_report_ready(self, report: dict[str, Tensor]) -> None:
        """Hand over the report: the host can decide about the next scale while this one is drawn."""

    def active_mask(self) -> Tensor | None:
        """Mask [R] of active rows where only the device knows them; None: all are."""
        return None

    @property
    def is_capturing(self) -> bool:
        """Whether nothing may be waited for."""
        return False

    # Blocks

    def run_blocks(
        self, call: CallContext, batch: ScaleBatch, x: Tensor, kv: Sequence[KVCache], settings: ScaleSettings
    ) -> tuple[Tensor, ScaleContext]:
        """Send x [R, N, C] through all blocks; the policy prunes tokens and restores them."""
        backbone, rows, plan = call.backbone, batch.rows, batch.plan
        ctx = self.scale_context(call, batch, x, settings)
        positions, records = backbone.positions(batch.cond, batch.scale), "attention_entropy" in plan.needs
        active = self.active_mask()
        all_active = None if active is None else self.layout(every_token(x, active), backbone, x.shape[1])
        stream = ResidualStream(x)
        chosen_by_layer: list[dict[str, Selection | None]] = []
        ctx.chosen = chosen_by_layer
        for layer, block in enumerate(backbone.blocks):
            cache = EntropyRecordingCache(kv[layer], rows.images) if records else kv[layer]
            attend = functools.partial(cache.attend, positions=positions)
            run = functools.partial(self.run_block, block, block_cond=backbone.block_cond(batch.cond, layer))
            chosen_by_layer.append({})
            for group in plan.groups:
                if not plan.needs_hidden and active is None:  # nobody asks for the sum between two layers
                    run(stream, attend=attend, sublayers=group)
                    chosen_by_layer[-1].update(dict.fromkeys(group))
                    continue
                x = stream.sum
                chosen = self.select(call, batch, layer, group, x, ctx, active)
                computed = all_active if chosen is None else chosen.behind(ctx.context)
                if chosen is not None and ctx.context and active is not None:
                    computed = chosen.behind(ctx.context).only(active)
                stream = ResidualStream(x, computed)
                with nullcontext() if computed is None else without_cudnn(x.device):
                    run(stream, attend=functools.partial(attend, chosen=computed), sublayers=group)
                chosen_by_layer[-1].update(dict.fromkeys(group, chosen))
                if chosen is None and all_active is not None:  # inactive rows keep what they were
                    stream = ResidualStream(put(x, all_active, stream))
                if plan.needs_hidden:
                    stream = restored(call.policy, layer, group, x, chosen, stream, ctx)
            if layer in call.guide_after:
                stream = ResidualStream(guide_hidden(stream.sum, rows.images, rows.guided, settings.weight))
            if isinstance(cache, EntropyRecordingCache):
                ctx.attention_entropy.append(cache.entropy[:, ctx.context :])
            self.layer_done(layer)
        if ctx.fused_logit_lens is not None:
            ctx.fused_logit_lens.forget()
        commit_lengths(kv)
        return stream.sum[:, ctx.context :], ctx

    def scale_context(self, call: CallContext, batch: ScaleBatch, x: Tensor, settings: ScaleSettings) -> ScaleContext:
        """Prepare what the policy may ask for inside this scale, whose input is x."""
        backbone, rows, cond = call.backbone, batch.rows, batch.cond
        weight = settings.weight if 0 in call.sampling.guidance_layers else 1.0

        def logit_lens(hidden: Tensor, guided: bool, codes: Tensor | None = None) -> Tensor:
            if guided:  # as in the head
                return guide(self.head(backbone, cond, hidden), rows.images, rows.guided, weight, settings.by)
            return self.head(backbone, cond, hidden[: rows.images], codes)  # conditional rows come first

        ctx = ScaleContext(batch.scale, rows, logit_lens, token_entropy=self.token_entropy)
        # Context tokens stand in front of the first scale: they are always computed, and methods do not see them.
        ctx.context = x.shape[1] - batch.scale.tokens
        ctx.fused_logit_lens = self.fused_logit_lens(backbone, cond, rows.images, x)
        return ctx

    def fused_logit_lens(self, backbone: Backbone, cond: Any, images: int, x: Tensor) -> LogitLens | None:
        """Entropy of the head's prediction without its logits, where there is a kernel for states like x."""
        if not logit_lens.supports(x) or not backbone.token_shape:
            return None
        head = functools.cache(lambda: backbone.bit_head(cond, images))  # made once a scale, and only if somebody asks
        return LogitLens(images, head)

    def select(
        self,
        call: CallContext,
        batch: ScaleBatch,
        layer: int,
        group: Group,
        x: Tensor,
        ctx: ScaleContext,
        active: Tensor | None,
    ) -> Selection | None:
        """Ask the policy which tokens of x pass through a group; None = all."""
        if not batch.plan.needs_hidden:
            return None
        own = x[:, ctx.context :]
        chosen = call.policy.select(layer, group, own, ctx)
        if chosen is None:
            return None
        check_selection(call.policy, chosen, own)
        return self.layout(chosen if active is None else chosen.only(active), call.backbone, batch.scale.tokens)

    def layout(self, chosen: Selection, backbone: Backbone, tokens: int) -> Selection:
        """Pack tokens where there are kernels for that; elsewhere rows are padded to the longest."""
        packs = self.packs and supports_packed(backbone)
        if packs and not isinstance(chosen, Packed):
            chosen = Packed.of_mask(chosen.mask(tokens))
        if isinstance(chosen, Packed) and not self.is_capturing:
            chosen = chosen.known()
        return chosen if packs or not isinstance(chosen, Packed) else chosen.plain


def restored(
    policy: Policy,
    layer: int,
    group: Group,
    x: Tensor,
    chosen: Selection | None,
    stream: ResidualStream,
    ctx: ScaleContext,
) -> ResidualStream:
    """Restore pruned tokens: the group's output for all tokens, from its input x and the chosen ones' stream."""
    can = policy.capabilities
    if ctx.context:
        y = stream.sum if stream.packed is None else stream.packed.padded(stream.sum)
        own = policy.restore(layer, group, x[:, ctx.context :], chosen, y[:, ctx.context :], ctx)
        check_states(policy, "restore", own, x[:, ctx.context :])
        return ResidualStream(torch.cat((y[:, : ctx.context], own), dim=1))
    found: Tensor | None = None
    if can.keeps_input and isinstance(chosen, Packed) and restore.supports(x):
        lens = ctx.fused_logit_lens
        moments = None if lens is None else lens.moments(x, chosen)
        found = restore.fused_scatter(x, chosen, stream, moments)
        if lens is not None and moments is not None:
            lens.restored = RestoredState(found, chosen)
    elif can.fused_restore is not None:
        found = can.fused_restore(layer, group, x, chosen, stream, ctx)
    if found is None:
        y = chosen.padded(stream.sum) if isinstance(chosen, Packed) else stream.sum
        found = policy.restore(layer, group, x, chosen, y, ctx)
        check_states(policy, "restore", found, x)
    return ResidualStream(found)


def put(x: Tensor, chosen: Selection, stream: ResidualStream) -> Tensor:
    """Put the chosen tokens' stream into x [R, N, C]."""
    if isinstance(chosen, Packed) and restore.supports(x):
        return restore.fused_scatter(x.clone(), chosen, stream)  # a policy may ask what x was
    return scatter(x, chosen, chosen.padded(stream.sum) if isinstance(chosen, Packed) else stream.sum)
