"""`nextscale verify`: recorded runs of the official code, played again by ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import NextscaleError, choices
from nextscale.research.verify import hart, infinity, var
from nextscale.research.verify.base import Case, Check, Recording, read_json, tensors_of

FAMILIES: dict[str, Any] = {"VAR": var, "Infinity": infinity, "HART": hart}


@dataclass(frozen=True)
class Verification:
    checks: list[Check]
    not_compared: list[str]  # recorded tensors that nothing was compared with
    pictures: dict[str, list[Tensor]]  # per run, the decoded images [B, 3, H, W] after each scale
    mutated: str | None

    @property
    def ok(self) -> bool:
        """Nothing recorded is off, and nothing recorded was left out."""
        return all(check.ok for check in self.checks) and not self.not_compared


def verify(
    folder: str | Path, mutate: str | None = None, keep_pictures: bool = False, device: torch.device | str = "cpu"
) -> Verification:
    """Play every run of a recorded case. `mutate` names a parameter of the transformer ("" = any) to change first."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    name = config.get("model")
    tokenizer = config.get("tokenizer")
    if name is None and isinstance(tokenizer, dict) and tokenizer.get("quantizer_type") == "var_hybrid":
        name = "HART"  # whose cases do not say it
    family = FAMILIES.get(str(name))
    if family is None:
        raise NextscaleError(f"config.json has model {name!r}; allowed: {choices(FAMILIES)}")
    tensors = tensors_of(folder / "io.safetensors")
    if (folder / infinity.ROUNDED).exists():
        extra = tensors_of(folder / infinity.ROUNDED)
        tensors.update({f"{infinity.ROUNDED}/{name}": t for name, t in extra.items()})
    try:
        case: Case = family.open_case(folder, config, Recording(tensors), torch.device(device))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError) as error:
        if isinstance(error, NextscaleError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NextscaleError(f"{folder / 'config.json'} holds a value that cannot be used: {reason}") from None
    if not case.runs and case.backbone is not None:
        raise NextscaleError(f"{folder / 'config.json'} describes no run")
    mutated = None if mutate is None else change_one_weight(case.backbone or case.tokenizer, mutate)
    with torch.backends.cudnn.flags(allow_tf32=False):  # on a GPU, convolutions would round to 10 bits
        family.play(case, keep_images=keep_pictures)
    return Verification(list(case.recorded.checks.values()), case.recorded.unused, case.images, mutated)


def change_one_weight(model: torch.nn.Module, name: str = "") -> str:
    """Move one number of one parameter, so that a comparison that cannot fail is found out."""
    parameters = dict(model.named_parameters())
    usual = ("mlp.fc2.weight", "mlp.down.weight", "decoder.conv_out.weight")
    name = name or next(n for end in usual for n in parameters if n.endswith(end))
    if name not in parameters:
        raise NextscaleError(f"{type(model).__name__} has no parameter {name!r}")
    changed = parameters[name].detach().clone()  # the parameter itself may be the mapped file
    changed.view(-1)[changed.numel() // 2] += 1
    parameters[name].data = changed
    return name
