"""HART's residual diffusion: a small MLP that turns noise into what the last codes leave out, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAINING_STEPS = 1000
LATENT_SCALE = 0.6  # training divides its targets by this
FREQUENCIES = 128


def sinusoid(value: Tensor) -> Tensor:
    """cos, then sin, of `value` [...] at 128 frequencies: [..., 256]."""
    rates = torch.exp(
        -math.log(10000) * torch.arange(FREQUENCIES, device=value.device, dtype=torch.float32) / FREQUENCIES
    )
    angle = value.float()[..., None] * rates
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class SinusoidEmbedding(nn.Module):
    """A number as a vector: sinusoid and two layers. The indices 0, 2 match the official keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, value: Tensor) -> Tensor:
        return self.mlp(sinusoid(value).to(next(self.parameters()).dtype))


@dataclass(frozen=True)
class Step:
    """One ancestral step, from noisy to clean; numbers of the spaced schedule in float64."""

    time: int  # of training, the input of the net
    recip: float  # sqrt(1 / abar)
    recipm1: float  # sqrt(1 / abar - 1)
    of_clean: float  # of the posterior mean
    of_noisy: float
    log_beta: float
    log_posterior: float


def ancestral_steps(count: int) -> list[Step]:
    """The cosine schedule of 1000 steps, spaced to `count`; the noisiest first."""

    def level(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    n = TRAINING_STEPS
    betas = np.array([min(1 - level((i + 1) / n) / level(i / n), 0.999) for i in range(n)])
    product = np.cumprod(1 - betas)
    stride, time, times = (n - 1) / (count - 1), 0.0, []
    for _ in range(count):
        times.append(round(time))
        time += stride
    spaced = product[times]
    before = np.append(1.0, spaced[:-1])
    beta = 1 - spaced / before
    posterior = beta * (1 - before) / (1 - spaced)
    floor = np.append(posterior[1], posterior[1:])  # the last step has none of its own
    steps = [
        Step(
            times[i],
            math.sqrt(1 / spaced[i]),
            math.sqrt(1 / spaced[i] - 1),
            beta[i] * math.sqrt(before[i]) / (1 - spaced[i]),
            (1 - before[i]) * math.sqrt(1 - beta[i]) / (1 - spaced[i]),
            math.log(beta[i]),
            math.log(floor[i]),
        )
        for i in range(count)
    ]
    return steps[::-1]


class DiffusionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, 3 * width)

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(y)).chunk(3, dim=-1)
        return v + gate * self.mlp(self.norm(v) * (1 + scale) + shift)


class ResidualDiffusion(nn.Module):
    def __init__(self, code_dim: int, condition: int, width: int, depth: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.time_embed = SinusoidEmbedding(width)
        self.condition = nn.Linear(condition, width)
        self.enter = nn.Linear(code_dim, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(depth))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, 2 * code_dim)

    def forward(self, x: Tensor, time: int, condition: Tensor) -> Tensor:
        """Noise and variance [R, N, 2 d] of the noisy x [R, N, d], given the embedded condition [R, N, W]."""
        y = self.time_embed(torch.full((1,), time, device=x.device)) + condition
        v = self.enter(x.to(condition.dtype))
        for block in self.blocks:
            v = block(v, y)
        shift, scale = self.final_modulation(F.silu(y)).chunk(2, dim=-1)
        return self.leave(F.layer_norm(v, v.shape[-1:], eps=1e-6) * (1 + scale) + shift).float()

    def sample(
        self,
        condition: Tensor,
        expand_to_rows: Callable[[Tensor], Tensor],
        guide: Callable[[Tensor], Tensor],
        normal: Callable[[str], Tensor],
    ) -> Tensor:
        """Residuals [B, N, d] for the conditions [R, N, C] of all rows.

        `expand_to_rows` makes one entry per row of one per image, `guide` the reverse; `normal` draws noise by name.
        """
        embedded = self.condition(condition)
        x = normal("start")
        for number, step in enumerate(ancestral_steps(self.steps)):
            rows = self(expand_to_rows(x), step.time, embedded)
            noise, variance = rows.chunk(2, dim=-1)
            noise, share = guide(noise), (variance[: len(x)] + 1) / 2  # only the noise is guided
            clean = (step.recip * x - step.recipm1 * noise).clamp(-1, 1)
            x = step.of_clean * clean + step.of_noisy * x
            if number + 1 < self.steps:
                log_variance = share * step.log_beta + (1 - share) * step.log_posterior
                x = x + (log_variance / 2).exp() * normal(f"step {number}")
        return x * LATENT_SCALE
