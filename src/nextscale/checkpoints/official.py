"""Live objects of the official repositories -> a pipeline that shares their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nextscale.checkpoints.files import StateFile, TensorInfo
from nextscale.checkpoints.load import BACKBONES
from nextscale.checkpoints.pretrained import TOKENIZER_OF, Part, assemble, official_part
from nextscale.errors import NextscaleError
from nextscale.schedule import PIXEL_BUDGETS

if TYPE_CHECKING:
    from nextscale.pipeline import Pipeline
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
    from nextscale.pipeline import Pipeline

    if vae is None:
        vae = next(iter(getattr(model, "vae_proxy", ())), None)
    if vae is None:
        raise NextscaleError("pass the tokenizer object too: from_official(model, vae)")
    backbone = official_part([_live(model)], BACKBONES)
    tokenizer = official_part([_live(vae)], (TOKENIZER_OF[backbone.family],))
    read = {"var": _read_var, "infinity": _read_infinity}[backbone.family]
    plan = assemble(*read(backbone, tokenizer, model, vae), spec=None, source=type(model).__name__)
    spec = plan.spec
    if backbone.family == "infinity" and getattr(model, "pn", None) in PIXEL_BUDGETS:
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
    """In the dtype and on the device of one of its own weights."""
    key = next(key for key, name in part.names.items() if name == measure)
    weight = part.state.tensors([key])[key]
    return part.build(weight.dtype, weight.device)


def _only(model: Any, name: str, value: Any) -> None:
    found = getattr(model, name, value)
    if found != value:
        raise NextscaleError(f"{type(model).__name__} has {name} = {found!r}, but only {value!r} is supported")


def _read_var(backbone: Part, tokenizer: Part, model: Any, vae: Any) -> tuple[Part, Part]:
    """What the shapes do not tell: heads without cosine attention, epsilon, the share of phi."""
    config = dataclasses.replace(
        backbone.config,
        heads=getattr(model, "num_heads", backbone.config.heads),
        sides=tuple(getattr(model, "patch_nums", backbone.config.sides)),
        eps=getattr(getattr(model.blocks[0], "ln_wo_grad", None), "eps", backbone.config.eps),
    )
    quantizer = vae.quantize
    vq = dataclasses.replace(
        tokenizer.config,
        phi_ratio=abs(getattr(quantizer, "quant_resi_ratio", tokenizer.config.phi_ratio)),
        normalised=bool(getattr(quantizer, "using_znorm", False)),
    )
    return dataclasses.replace(backbone, config=config), dataclasses.replace(tokenizer, config=vq)


def _read_infinity(backbone: Part, tokenizer: Part, model: Any, vae: Any) -> tuple[Part, Part]:
    _only(model, "rope2d_normalized_by_hw", 2)
    _only(model, "add_lvl_embeding_only_first_block", 1)
    if bool(getattr(model, "apply_spatial_patchify", 0)) != (backbone.config.bits == 4 * tokenizer.config.code_dim):
        raise NextscaleError(f"the {type(vae).__name__} object is not the tokenizer of this {type(model).__name__}")
    config = dataclasses.replace(backbone.config, eps=getattr(model, "norm_eps", backbone.config.eps))
    return dataclasses.replace(backbone, config=config), tokenizer
