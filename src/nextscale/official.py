"""Live objects of the official repositories -> a pipeline that shares their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nextscale.checkpoints.families import backbones
from nextscale.checkpoints.files import StateFile, TensorInfo
from nextscale.checkpoints.pretrained import Part, assemble, official_part
from nextscale.engine.schedule import PIXEL_BUDGETS
from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline

if TYPE_CHECKING:
    from nextscale.text.base import TextEncoder


class LiveState(StateFile):
    """The state dict of a module in memory."""

    mapped = False

    def __init__(self, what: str, state: Mapping[str, Tensor]) -> None:
        # torch.compile wraps modules, and its name then stands in every key.
        self.state = {key.replace("_orig_mod.", ""): t for key, t in state.items() if isinstance(t, Tensor)}
        infos = {key: TensorInfo(tuple(t.shape), t.dtype) for key, t in self.state.items()}
        super().__init__(Path(f"the {what} object"), infos)

    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        return {key: self.state[key] for key in keys}


def from_official(model: Any, vae: Any = None, *, text_encoder: TextEncoder | None = None) -> Pipeline:
    """A pipeline over a VAR or Infinity object of the official code, on its device and in its dtype.

    Weights are shared, not copied, except the few that we keep in another dtype than the object does. VAR objects
    know their tokenizer; for Infinity pass `vae`. Without `text_encoder`, prompts are given as `prompt_embeds`.
    """
    if vae is None:
        vae = next(iter(getattr(model, "vae_proxy", ())), None)
    if vae is None:
        raise NextscaleError("pass the tokenizer object too: from_official(model, vae)")
    backbone = official_part([_live(model)], backbones())
    tokenizer = official_part([_live(vae)], (str(backbone.family.tokenizer),))
    if backbone.family.read_live is not None:
        configs = backbone.family.read_live(backbone.config, tokenizer.config, model, vae)
        backbone, tokenizer = (
            dataclasses.replace(part, config=config)
            for part, config in zip((backbone, tokenizer), configs, strict=True)
        )
    plan = assemble(backbone, tokenizer, spec=None, source=type(model).__name__)
    spec = plan.spec
    if spec.pixel_budget is not None and getattr(model, "pn", None) in PIXEL_BUDGETS:
        spec = dataclasses.replace(spec, pixel_budget=model.pn)
    parts = (
        _build(plan.backbone, "blocks.0.attn.qkv.weight"),
        _build(plan.tokenizer, "decoder.conv_in.weight"),
    )
    return Pipeline(*parts, spec, text_encoder)


def _live(module: Any) -> LiveState:
    if not hasattr(module, "state_dict"):
        raise NextscaleError(f"a {type(module).__name__} object is no model: it has no state_dict")
    return LiveState(type(module).__name__, module.state_dict())


def _build(part: Part, measure: str) -> Any:
    """Build a part in the dtype and on the device of one of its own weights."""
    key = next(key for key, name in part.names.items() if name == measure)
    weight = part.state.tensors([key])[key]
    return part.build(weight.dtype, weight.device)
