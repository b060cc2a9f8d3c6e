"""The frame of every method: what is decided, per image, and who is asked when.

A `Method` is configuration; `Method.start` makes the `Policy` that is at work during one call.
The base `Policy` decides nothing: it is the plain run.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nextscale.engine.entropy import token_entropy
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Scale, Schedule
from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import LARGEST, read_count, read_flag, read_list, read_number, read_text, shown
from nextscale.io.reading import read_json
from nextscale.kernels.logit_lens import Filled
from nextscale.kernels.restore import fused_put, puts
from nextscale.methods.device_inputs import DeviceInputs
from nextscale.methods.package_data import stored, stored_names
from nextscale.methods.selection import Packed, Selection, scatter
from nextscale.methods.token_cache import TokenCaches

if TYPE_CHECKING:
    from nextscale.engine.state import Rows
    from nextscale.kernels.logit_lens import LogitLens
    from nextscale.models.residual import Stream

M = TypeVar("M", bound="Method")
Choices = Sequence[dict[str, Selection | None]]
Numbers = Tensor | np.ndarray  # of a report: those that a captured scale left on the host are arrays
Group = tuple[str, ...]  # parts of a block whose tokens are selected together
SCHEMA = 1  # of stored methods and presets


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may know of the call: never which backbone it is on."""

    images: int
    schedule: Schedule
    sampling: Sampling
    depth: int
    parts: tuple[str, ...]
    bits: int | None = None  # per token; None for a codebook
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32  # of the layers' matrix products
    decode: Callable[[Tensor], Tensor] | None = None  # feature maps -> pictures in [-1, 1]


class ScalePlan(NamedTuple):
    """Decided on the host, once per scale."""

    actions: tuple[str, ...]  # per image: "run", "skip" this scale, or "stop" for good
    guided: tuple[bool, ...]  # per image: whether its unconditional row still runs; it cannot come back
    capacity: int  # KV slots to reserve per row; 0 = each layer reserves what it keeps
    groups: tuple[Group, ...]
    needs: frozenset[str] = frozenset()  # "attention_entropy"
    needs_hidden: bool = True  # False: no layer of this scale has to be shown to the policy
    variant: Hashable = None  # what else decides which code will run; with the rows it names a captured scale


@dataclass
class ScaleContext:
    """What is known inside a scale: who runs, and what its blocks reported so far."""

    scale: Scale
    rows: Rows
    logit_lens: Callable[..., Tensor]  # (hidden states [R, N, C], guided, codes) -> the head's logits per image
    chosen: Choices = field(default_factory=list)  # per layer, of every part; None = all
    attention_entropy: list[Tensor] = field(default_factory=list)  # per layer [R, K], if the plan needs it
    context: int = 0  # tokens that ran in front of the scale's own
    token_entropy: Callable[[Tensor, str], Tensor] = token_entropy  # of logits; an executor may have a faster one
    fused_logit_lens: LogitLens | None = (
        None  # entropy of the conditional prediction without its logits, where it can be had
    )

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
    ratio: float | None = None  # None: told by the counts
    layer_entropy: tuple[float, ...] = ()
    layer_ratio: tuple[float, ...] = ()


class Policy:
    """A method at work on one call. `select` and `restore` stay on the device."""

    # Whether a scale's work can be captured: nothing between `plan_scale` and `on_report` waits for the device, reads
    # host numbers that `ScalePlan.variant` does not tell, or leaves tensors anywhere but in `memory` and the report.
    capturable: bool = False

    method: Any = None  # its settings, hashable
    name: str = ""  # of the method, for errors

    def __init__(self, context: PolicyContext) -> None:
        self.context = context
        self.memory = TokenCaches()
        self.uploads = DeviceInputs()

    @property
    def passive(self) -> bool:
        """Whether it decides on the host alone, so that its scales are those of the plain run."""
        kind, inside = type(self), ("select", "fill", "complete", "end_scale", "report")
        return all(getattr(kind, name) is getattr(Policy, name) for name in inside)

    @property
    def structure(self) -> Hashable:
        """Those of its settings that decide which code runs inside a scale, and with which numbers that nobody tells.

        Calls that share them share captured scales. None: unknown, so nothing can be captured.
        """
        return self.method

    @property
    def is_passthrough(self) -> bool:
        """Whether it leaves every layer alone, so that nothing has to be shown to it inside a scale."""
        kind = type(self)
        return kind.select is Policy.select and kind.restore is Policy.restore

    @property
    def watches(self) -> bool:
        """Whether it looks at the maps between two scales."""
        return type(self).on_features is not Policy.on_features

    def expected_tokens(self) -> int:
        """KV slots per row to reserve at once; 0 = grow with what is kept."""
        return self.context.schedule.tokens

    def plan_scale(self, scale: Scale) -> ScalePlan:
        return self.plan(scale)

    def plan(self, scale: Scale, **more: Any) -> ScalePlan:
        """Every image runs, guided as long as the call asks for it, and is left alone; or what `more` says."""
        c = self.context
        guided = (scale.index < c.sampling.guided_until,) * c.images
        usual = ScalePlan(("run",) * c.images, guided, 0, (c.parts,), needs_hidden=not self.is_passthrough)
        unknown = [name for name in more if name not in ScalePlan._fields]
        if unknown:
            raise NextscaleError(f"a plan has no field {unknown[0]!r}; allowed: {choices(ScalePlan._fields)}")
        return usual._replace(**more)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        """The tokens that pass through `group` of `layer`; None = all of them."""
        return None

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        """The group's output for all tokens, from its input x and the chosen tokens' output y."""
        return y if chosen is None else scatter(x, chosen, y)

    def restore_residual(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, stream: Stream, ctx: ScaleContext
    ) -> Tensor:
        """The same from a stream whose last sum has not been made yet: who can make it on the way saves a pass."""
        if not isinstance(chosen, Packed) or not self.keeps_input or not puts(x):
            y = chosen.padded(stream.sum) if isinstance(chosen, Packed) else stream.sum
            return self.restore(layer, group, x, chosen, y, ctx)
        logit_lens = ctx.fused_logit_lens
        moments = None if logit_lens is None else logit_lens.moments(x, chosen)
        filled = fused_put(x, chosen, stream, moments)
        if logit_lens is not None and moments is not None:
            logit_lens.filled = Filled(filled, chosen)
        return filled

    @property
    def keeps_input(self) -> bool:
        """Whether tokens that were not chosen stay as they are."""
        return type(self).restore is Policy.restore

    def finalize(self, x: Tensor, ctx: ScaleContext) -> tuple[Tensor, Tensor | None]:
        """Last word on the hidden state; a weight [B, N] of 0 makes a cell add nothing."""
        return x, None

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        """See what came out: x [R, N, C], the logits of every row, and the guided logits."""

    def report(self, ctx: ScaleContext) -> dict[str, Tensor]:
        """What the host will want to know of this scale: tensors with an entry for every image at work."""
        return {}

    def on_report(self, ctx: ScaleContext, report: Mapping[str, Numbers]) -> None:
        """The scale has been run, or soon will be: whoever asks for a number waits for it, so ask late."""

    @property
    def rehearsals(self) -> int:
        """Calls after which every kind of scale has been run that it can decide for."""
        return 1

    def rehearse(self, number: int) -> None:
        """Decide for this call so that it is one of them, whatever the pictures are like."""

    def upload(self, name: str, numbers: list[float] | Tensor) -> Tensor:
        """Numbers that the host gives or makes, on the device at a fixed place, where a captured scale reads them."""
        return self.uploads.upload(name, numbers, self.context.device)

    def gather_rows(self, rows: Rows, numbers: Tensor) -> Tensor:
        """Those of the images at work, out of one per image of the call."""
        everyone = len(rows.which) == self.context.images
        return numbers if everyone else numbers[torch.tensor(rows.which, device=numbers.device)]

    def on_features(self, features: Tensor, ctx: ScaleContext) -> None:
        """See the maps of all images with this scale's codes in them; `context.decode` makes pictures of them."""

    def activation(self, image: int) -> Activation:
        """For the trace."""
        return Activation()

    def decision(self, image: int, scale: Scale) -> Decision:
        """For the trace."""
        return Decision()

    def conclude(self) -> None:
        """Pictures are being decoded: read what the trace and later calls will want to know."""

    def release(self) -> None:
        """The run is over: let go of caches and of the model, keep what the trace asks for."""
        self.context = dataclasses.replace(self.context, decode=None)
        self.memory, self.uploads = TokenCaches(), DeviceInputs()


@dataclass(frozen=True)
class Method(ABC):
    """A frozen dataclass whose fields are its configuration."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one sentence
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Read fields by the kind that they are declared as; those who have ranges, too, check them behind this."""
        for f in dataclasses.fields(self):
            read = _READERS.get(getattr(f.type, "__name__", f.type))
            if read is not None:
                object.__setattr__(self, f.name, read(getattr(self, f.name), f"{self.name}: {f.name}"))

    @abstractmethod
    def start(self, context: PolicyContext) -> Policy: ...

    def begin(self, context: PolicyContext) -> Policy:
        """`start`, for those who run it."""
        policy = self.start(context)
        if not isinstance(policy, Policy):
            raise NextscaleError(f"{self.name}: start must return a Policy, not {shown(policy)}")
        policy.name = self.name
        return policy

    def without(self, *names: str) -> Hashable:
        """All settings but these."""
        return type(self), *(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in names)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "fields": dataclasses.asdict(self)}

    @classmethod
    def from_fields(cls: type[M], fields: dict[str, Any]) -> M:
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise NextscaleError(f"{cls.name} has no field {unknown[0]!r}; allowed: {choices(known) or 'none'}")
        # JSON has no tuples.
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})

    @classmethod
    def preset(cls: type[M], name: str) -> M:
        """A stored configuration, by name or as a file."""
        path = stored(cls.name, name)
        if not os.path.isfile(path):
            have = stored_names(cls.name)
            raise NextscaleError(f"{cls.name} has no preset {name!r}; allowed: {choices(have) or 'none'}, or a file")
        content = read_stored(path)
        if content["name"] != cls.name:
            raise NextscaleError(f"{path} is a preset of {content['name']}, not of {cls.name}")
        if not isinstance(content.get("fields"), dict):
            raise NextscaleError(f"{path} is not a stored method: it needs 'name' and 'fields'")
        return cls.from_fields(content["fields"])

    def __add__(self, other: Method) -> Method:
        from nextscale.methods.compose import Compose

        return Compose((self, other))

    def require(self, name: str, low: float, high: float, *, above: bool = False, below: bool = False) -> None:
        """Check a field's range; `above` and `below` leave out the ends."""
        value = getattr(self, name)
        if not low <= value <= high or (above and value == low) or (below and value == high):
            interval = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
            raise NextscaleError(f"{self.name}: {name} must lie in {interval}, not {shown(value)}")

    def require_one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise NextscaleError(f"{self.name}: {name} must be one of {choices(allowed)}, not {shown(value)}")


def _read_method(value: Any, name: str) -> Method:
    if not isinstance(value, Method):
        raise NextscaleError(f"{name} must be a method such as NOVA(), not {shown(value)}")
    return value


def _read_methods(value: Any, name: str) -> tuple[Method, ...]:
    return tuple(_read_method(v, name) for v in read_list(value, name, "a list of methods"))


# Of fields, by what they are declared as.
_READERS: dict[Any, Callable[[Any, str], Any]] = {
    "int": functools.partial(read_count, least=-LARGEST),
    "float": read_number,
    "bool": read_flag,
    "str": read_text,
    "Method": _read_method,
    "tuple[Method, ...]": _read_methods,
}


def read_stored(path: Path) -> dict[str, Any]:
    """A method or preset in a JSON file."""
    return check_stored(read_json(path, "a stored method"), str(path))


def check_stored(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or "name" not in content:
        raise NextscaleError(f"{where} is not a stored method: it needs 'name' and 'fields'")
    if content.get("schema", SCHEMA) != SCHEMA:
        raise NextscaleError(f"{where} has schema {content['schema']!r}; this version reads {SCHEMA}")
    return content
