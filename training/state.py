"""What a training needs to go on on another machine, in files small enough to be carried there.

Weights are kept in half precision, averages as their difference from them in 8 bits, AdamW's moments in bfloat16.
Muon's momentum, a memory of twenty steps, starts anew. Saving rounds what is in memory, too: whoever goes on after it
and whoever resumes it take the same steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nextscale.checkpoints.int8 import SCALE_SUFFIX, dequantize, quantize_state
from training.common import Average
from training.store import read_parts, save_parts

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Training:
    modules: dict[str, nn.Module]
    optimizers: list[torch.optim.Optimizer]
    average: Average
    steps: int = 0
    elapsed: float = 0.0  # seconds of the plan

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return {f"{name}.{key}": p for name, module in self.modules.items() for key, p in module.named_parameters()}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        named = self.named
        weights = {key: p.half() for key, p in named.items()}
        shifts = {
            f"average.{key}": slow - weights[key].float() for key, slow in zip(named, self.average.slow, strict=True)
        }
        held = {key: state for key, p in named.items() for o in self.optimizers if (state := o.state.get(p))}
        moments = {f"{m}.{key}": state[m].bfloat16() for key, state in held.items() for m in MOMENTS if m in state}
        counts = {int(state["step"]) for state in held.values() if "step" in state}
        save_parts(folder, "state", {**weights, **quantize_state(shifts), **moments})
        about = {
            "steps": self.steps,
            "elapsed": self.elapsed,
            "average": self.average.steps,
            "updates": max(counts, default=0),
        }
        (folder / "state.json").write_text(json.dumps(about) + "\n")
        self.load(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        tensors, about = read_parts(folder, "state"), json.loads((folder / "state.json").read_text())
        self.steps, self.elapsed, self.average.steps = about["steps"], about["elapsed"], about["average"]
        for optimizer in self.optimizers:
            optimizer.state.clear()
        owner = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for (key, p), slow in zip(self.named.items(), self.average.slow, strict=True):
            p.copy_(tensors[key])
            shift: Tensor = tensors[f"average.{key}"]
            scale = tensors.get(f"average.{key}{SCALE_SUFFIX}")
            slow.copy_(shift if scale is None else dequantize(shift, scale)).add_(p)
            if f"{MOMENTS[0]}.{key}" in tensors:
                state = {m: torch.empty_like(p).copy_(tensors[f"{m}.{key}"]) for m in MOMENTS}
                owner[p].state[p] = {"step": torch.tensor(float(about["updates"]), device=p.device), **state}
