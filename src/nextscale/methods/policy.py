"""A method at work on one call: eight hooks, and a declaration of what they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nextscale.engine.entropy import token_entropy
from nextscale.engine.rows import Rows
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Scale, Schedule
from nextscale.engine.trace import Costs
from nextscale.errors import NextscaleError, choices
from nextscale.methods.device_inputs import DeviceInputs
from nextscale.methods.selection import Selection, scatter
from nextscale.methods.token_cache import TokenCaches

if TYPE_CHECKING:
    from nextscale.kernels.logit_lens import LogitLens

Choices = Sequence[dict[str, Selection | None]]
Numbers = Tensor | np.ndarray  # of a report: those that a captured scale left on the host are arrays
Group = tuple[str, ...]  # sublayers of a block whose tokens are selected together


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may know of the call: never which backbone it is on."""

    images: int
    schedule: Schedule
    sampling: Sampling
    depth: int
    sublayers: tuple[str, ...]  # of a block
    bits: int | None = None  # per token; None for a codebook
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of the layers' matrix products
    decode: Callable[[Tensor], Tensor] | None = None  # feature maps -> images in [-1, 1]
    costs: Costs | None = None  # of the model's layers
    warmup: int | None = None  # number of a warm-up call: see `Capabilities.warmup_calls`


class ScalePlan(NamedTuple):
    """Decided on the host, once per scale."""

    actions: tuple[str, ...]  # per image: "run", "skip" this scale, or "stop" for good
    guided: tuple[bool, ...]  # per image: whether its unconditional row still runs; it cannot come back
    capacity: int  # KV entries to reserve per row; 0 = each layer reserves what it keeps
    groups: tuple[Group, ...]
    needs: frozenset[str] = frozenset()  # "attention_entropy"
    needs_hidden: bool = True  # False: no layer of this scale has to be shown to the policy
    variant: Hashable = None  # what else decides which code will run; with the rows it names a captured scale


@dataclass(frozen=True)
class Capabilities:
    """What a policy does, declared: runtimes ask for nothing else, and compositions merge it.

    The default claims everything, so a policy that declares nothing runs right, if not as fast as it could.
    """

    selects: bool = True  # `select` may prune tokens; False: every layer is left alone
    acts_in_scale: bool = True  # `finalize`, `on_logits` or `report` does something
    reads_features: bool = True  # `on_features` looks at the maps between two scales
    keeps_input: bool = False  # pruned tokens keep their input, that is, `restore` is not overridden
    # `restore` on a residual stream whose last sum is pending, in one pass where that is possible; None = it is not.
    fused_restore: Callable[..., Tensor | None] | None = None
    kv_tokens: int | None = None  # KV entries per row to reserve at once: None = those of all scales, 0 = grow
    # Settings that decide which code runs inside a scale, and with which numbers that are not uploaded: calls that
    # share them share captured scales. None: nothing can be captured. To declare it is to promise that nothing between
    # `plan_scale` and `on_report` waits for the device, reads host numbers that `ScalePlan.variant` does not name, or
    # leaves tensors anywhere but in `memory` and the report.
    graph_key: Hashable = None
    warmup_calls: int = 1  # calls, told apart by `PolicyContext.warmup`, after which every kind of scale has been run

    @property
    def host_only(self) -> bool:
        """Whether the policy decides on the host alone, so that its scales are those of the plain run."""
        return not self.selects and not self.acts_in_scale

    @property
    def capturable(self) -> bool:
        return self.host_only or self.graph_key is not None


HOST_ONLY = Capabilities(selects=False, acts_in_scale=False, reads_features=False)


@dataclass
class ScaleContext:
    """What is known inside a scale: who runs, and what its blocks reported so far."""

    scale: Scale
    rows: Rows
    logit_lens: Callable[..., Tensor]  # (hidden states [R, N, C], guided, codes) -> the head's logits per image
    chosen: Choices = field(default_factory=list)  # per layer, of every sublayer; None = all
    attention_entropy: list[Tensor] = field(default_factory=list)  # per layer [R, K], if the plan needs it
    context: int = 0  # tokens that ran in front of the scale's own
    token_entropy: Callable[[Tensor, str], Tensor] = token_entropy  # of logits; an executor may have a faster one
    fused_logit_lens: LogitLens | None = None  # entropy of the conditional prediction without its logits, if possible

    def lens_entropy(self, x: Tensor, guided: bool, codes: Tensor | None, unit: str) -> Tensor:
        """Entropy [B, N] of the prediction that the model's own head would make of the states x [R, N, C]."""
        if self.fused_logit_lens is not None and not guided and codes is None:
            return self.fused_logit_lens.entropy(x, unit)
        return self.token_entropy(self.logit_lens(x, guided, codes), unit)


@dataclass(frozen=True)
class Activation:
    """When an image began to be reduced. Scales count from 1."""

    scale: int | None = None  # the first reduced one
    star: int | None = None  # the one that decided it
    reason: str = "none"
    eta: float | None = None


@dataclass(frozen=True)
class Decision:
    """Why a scale of an image was reduced as it was."""

    entropy: float | None = None
    growth: float | None = None
    smoothed_growth: float | None = None
    ratio: float | None = None  # None: the counts say it
    layer_entropy: tuple[float, ...] = ()
    layer_ratio: tuple[float, ...] = ()
    share: float | None = None  # of the cells that was planned to be kept, where that was known before
    threshold: float | None = None  # nats that a cell must exceed to be kept, where an image takes what it needs


@dataclass(frozen=True)
class Explanation:
    """Of one image: when its reduction began, and why each scale was reduced as it was."""

    activation: Activation = Activation()
    decisions: Mapping[int, Decision] = field(default_factory=dict)  # by scale, from 1
    budget: float | None = None  # share of the plain run's FLOPs that was to be spent

    def decision(self, scale: Scale) -> Decision:
        return self.decisions.get(scale.index + 1, Decision())


class Policy:
    """A method at work on one call. `select` and `restore` stay on the device."""

    capabilities = Capabilities()
    name: str = ""  # of the method, for errors

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.memory = TokenCaches()  # from scale to scale, by name
        self.uploads = DeviceInputs()

    # The hooks, in the order in which they are called.

    def plan_scale(self, scale: Scale) -> ScalePlan:
        """Decide on the host who runs this scale and how."""
        return self.plan(scale)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        """Choose the tokens that pass through `group` of `layer`; None = all of them."""
        return None

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        """Make the group's output for all tokens, from its input x and the chosen tokens' output y."""
        return y if chosen is None else scatter(x, chosen, y)

    def finalize(self, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Say the last word on the hidden state; a weight [B, N] of 0 makes a cell add nothing."""
        return x, None

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        """Look at what came out: x [R, N, C], the logits of every row, and the guided logits."""

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        """Name what the host will want to know of this scale: tensors with an entry for every image that runs."""
        return {}

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        """Keep the report. The scale may still be running: reading a number waits for it, so read late."""

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        """Look at the maps of all images with this scale's codes in them; `context.decode` makes images of them."""

    def explain(self, image: int) -> Explanation:
        """Explain the decisions about an image, for the trace."""
        return Explanation()

    # What hooks may call.

    def plan(self, scale: Scale, **changes: Any) -> ScalePlan:
        """Run every image, guided as long as the call asks for it, and leave it alone, but for these changes."""
        c = self.context
        guided = (scale.index < c.sampling.guided_until,) * c.images
        usual = ScalePlan(("run",) * c.images, guided, 0, (c.sublayers,), needs_hidden=self.capabilities.selects)
        unknown = [name for name in changes if name not in ScalePlan._fields]
        if unknown:
            raise NextscaleError(f"a plan has no field {unknown[0]!r}; allowed: {choices(ScalePlan._fields)}")
        return usual._replace(**changes)

    def upload(self, name: str, numbers: list[float] | Tensor) -> Tensor:
        """Put numbers on the device, into a static buffer where a captured scale reads them."""
        return self.uploads.upload(name, numbers, self.context.device)

    def gather_rows(self, rows: Rows, numbers: Tensor) -> Tensor:
        """Take those of the images that run, out of one per image of the call."""
        all_active = len(rows.image_ids) == self.context.images
        return numbers if all_active else numbers[torch.tensor(rows.image_ids, device=numbers.device)]

    def release(self) -> None:
        """Let go of caches and of the model when the run is over; keep what the trace asks for."""
        self.context = dataclasses.replace(self.context, decode=None)
        self.memory, self.uploads = TokenCaches(), DeviceInputs()


class PlainPolicy(Policy):
    """Compute everything."""

    capabilities = HOST_ONLY
