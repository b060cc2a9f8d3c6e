"""Restore pruned tokens from what the layer added one scale before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nextscale.engine.schedule import Scale
from nextscale.kernels import restore
from nextscale.kernels.logit_lens import RestoredState
from nextscale.methods.policy import Capabilities, Group, Policy, PolicyContext, ScaleContext
from nextscale.methods.selection import Packed, Selection, gather, scatter
from nextscale.models.residual import ResidualStream


class CachedPolicy(Policy):
    """Restore pruned tokens from a cache; subclasses write `select`.

    A pruned token's output is its input plus the increment that the layer gave at this place one scale before
    ("residual"), or the layer's output there ("feature"), or its input alone ("zero"). At the end of a scale, cells
    that fewer than the required share of layers computed are sampled like all others, or add "nothing" to the map.

    Which of the two does less harm depends on the tokenizer ("auto"). A restored state predicts what was right one
    scale before, and that step has been taken. Codes of a codebook can be small, so taking it again does little. Bits
    have one amplitude at every scale: a cell near its target needs the opposite bit every time.
    """

    def __init__(
        self,
        context: PolicyContext,
        kind: str = "residual",
        restore_mode: str = "nearest",
        after: int = 0,
        uncomputed: str = "sample",
        required: float = 1.0,
        extends_restore: bool = False,
    ) -> None:
        """`required`: the share of layers that must compute a cell. `extends_restore`: the subclass has a `restore` of
        its own, so no kernel may stand in for it."""
        super().__init__(context)
        self.kind, self.restore_mode = kind, restore_mode
        self.uncomputed = uncomputed
        if uncomputed == "auto":
            self.uncomputed = "sample" if context.bits is None else "nothing"
        self.required = math.ceil(required * context.depth - 1e-9)  # layers
        self.tracks_computed = self.uncomputed == "nothing"
        self.may_keep_nothing = False  # in a scale; the host leaves it out if it knows, else it adds nothing
        self.after = after  # scales that are never followed by a reduced one need not be recorded
        self.computed: Tensor | None = None  # cells [B, N] of this scale that enough layers computed, if it matters
        self.capabilities = Capabilities(
            reads_features=False,
            keeps_input=kind == "zero" and not extends_restore,
            fused_restore=self._fused_restore if kind == "residual" and not extends_restore else None,
            kv_tokens=0,  # the KV cache grows with what is kept
        )

    def records(self, scale: Scale) -> bool:
        """Whether a later scale may need what this one leaves behind."""
        return self.after <= scale.index < len(self.context.schedule) - 1

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        if self.kind == "zero":
            return super().restore(layer, group, x, chosen, y, ctx)
        if chosen is None and not self.records(ctx.scale):
            return y
        cache, rows, grid = self.memory["added", layer, group], ctx.rows, ctx.scale.grid
        cached = None if chosen is None else cache.read(rows, grid, self.restore_mode)
        restored, new = self._restored(None if cached is None else cached.to(x.dtype), x, chosen, y)
        if self.records(ctx.scale):
            # Kept as exactly as the layers compute: at a high resolution this is most of a run's memory.
            cache.store(rows, grid, new.to(self.context.dtype))
        return restored

    def _fused_restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, stream: ResidualStream, ctx: ScaleContext
    ) -> Tensor | None:
        """Restore in the pass that makes the stream's last sum; None where there is no kernel for it."""
        if not restore.supports(x):
            return None
        cache, rows, grid = self.memory["added", layer, group], ctx.rows, ctx.scale.grid
        latest, logit_lens = cache.latest(rows), ctx.fused_logit_lens
        new = cache.buffer(rows, grid, x, self.context.dtype) if self.records(ctx.scale) else None
        if chosen is None and new is not None:
            if logit_lens is not None:
                logit_lens.forget()  # x will not be what it saw
            restored = restore.fused_record(x, stream, new)
        elif isinstance(chosen, Packed) and latest is not None and self.restore_mode in restore.MODES:
            grids, mode = (latest.grid, grid), self.restore_mode
            moments = None if logit_lens is None else logit_lens.moments(x, chosen)
            restored = restore.fused_restore(x, latest.maps, grids, mode, chosen, stream, new, moments)
            if logit_lens is not None and moments is not None:
                logit_lens.restored = RestoredState(restored, chosen, latest.maps, grids, mode)
        else:
            return None
        if new is not None:
            cache.store(rows, grid, new)
        return restored

    def _restored(self, cached: Tensor | None, x: Tensor, chosen: Selection | None, y: Tensor) -> tuple[Tensor, Tensor]:
        """The output of all tokens, and what the next scale will find."""
        feature = self.kind == "feature"
        if chosen is None:
            return y, y if feature else y - x
        if cached is None:  # nothing to restore from: the first scale that this image runs
            restored = scatter(x, chosen, y)
            return restored, restored if feature else restored - x
        if feature:
            restored = scatter(cached, chosen, y)
            return restored, restored
        # What a dropped token received ages with it.
        return scatter(x + cached, chosen, y), scatter(cached, chosen, y - gather(x, chosen))

    def finalize(self, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Count the layers that computed each cell. A scale in which none computed any adds nothing."""
        taken = [next(iter(chosen.values())) for chosen in ctx.chosen]
        reduced = [chosen for chosen in taken if chosen is not None]
        if not reduced or not (self.tracks_computed or self.may_keep_nothing):
            self.computed = None
            return x, None
        masks = {id(chosen): chosen.mask(ctx.scale.tokens)[: ctx.rows.images] for chosen in reduced}
        if len(masks) == 1 and len(taken) - len(reduced) < self.required:  # all layers share one selection
            computed = somewhere = next(iter(masks.values()))
        else:
            layers = torch.stack([masks[id(chosen)] for chosen in reduced]).sum(0) + (len(taken) - len(reduced))
            computed, somewhere = layers >= self.required, layers > 0
        self.computed = computed if self.tracks_computed else None
        if self.uncomputed == "nothing":
            return x, computed.float()
        return x, somewhere.any(1, keepdim=True).expand_as(somewhere).float() if self.may_keep_nothing else None
