"""A plain run watched from inside: entropies after every scale and before every layer, what each block changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from nextscale.engine.callback import ScaleEnd
from nextscale.engine.entropy import token_entropy
from nextscale.engine.schedule import Grid, Scale
from nextscale.io.images import to_pil
from nextscale.methods.base import Method
from nextscale.methods.policy import Group, Policy, PolicyContext, ScaleContext, ScalePlan
from nextscale.methods.selection import Selection
from nextscale.pipeline import Pipeline

SIDE = 256  # pixels to which images are reduced: figures show them small


@dataclass
class Watched:
    """What a run showed. Lists have an entry per scale; maps are [h, w], of layers [depth, h, w]; entropies in nats."""

    model: str
    prompt: str | int
    seed: int
    grids: list[Grid]
    thumbnails: list[np.ndarray] = field(default_factory=list)  # so far, [H, W, 3] bytes
    images: list[Image.Image] = field(default_factory=list)  # the same in full size
    codes: list[np.ndarray] = field(default_factory=list)  # what the scale's own tokens stand for, [d, h, w]
    features: list[np.ndarray] = field(default_factory=list)  # the maps that the decoder would read, [d, H, W]
    conditional: list[np.ndarray] = field(default_factory=list)  # entropy of the raw conditional prediction
    guided: list[np.ndarray] = field(default_factory=list)  # after temperature and guidance
    logit_lens: list[np.ndarray] = field(
        default_factory=list
    )  # entropy of what the head would predict before each layer
    moved: list[np.ndarray] = field(default_factory=list)  # mean squared change of the state by each layer
    attention: np.ndarray | None = None  # attention entropy of each layer, at the watched scale
    attention_scale: int = 0  # from 1

    def about(self) -> dict[str, Any]:
        """What every figure's data begins with."""
        return {"model": self.model, "prompt": self.prompt, "seed": self.seed, "grids": [list(g) for g in self.grids]}


@dataclass(frozen=True)
class Watcher(Method):
    """A method that records and changes nothing: every selection is None, the path of a plain run."""

    name = "watcher"
    summary = "Watches a plain run."

    attention_at: float = 6 / 13  # the scale, as a share of the schedule, whose attention is looked at

    def start(self, context: PolicyContext) -> WatchingPolicy:
        return WatchingPolicy(context, self)


class WatchingPolicy(Policy):
    """The watcher at work on a call with one image."""

    def __init__(self, context: PolicyContext, method: Watcher) -> None:
        super().__init__(context)
        self.attention_scale = max(round(method.attention_at * len(context.schedule)), 2) - 1  # index
        self.logit_lens: list[list[np.ndarray]] = []
        self.moved: list[list[np.ndarray]] = []
        self.conditional: list[np.ndarray] = []
        self.guided: list[np.ndarray] = []
        self.attention: np.ndarray | None = None

    def plan_scale(self, scale: Scale) -> ScalePlan:
        self.logit_lens.append([])
        self.moved.append([])
        needs = frozenset({"attention_entropy"}) if scale.index == self.attention_scale else frozenset()
        return self.plan(scale, needs=needs)

    def select(self, layer: int, group: Group, x: Tensor, ctx: ScaleContext) -> Selection | None:
        self.logit_lens[-1].append(_map(token_entropy(ctx.logit_lens(x, False)), ctx))
        return None

    def restore(
        self, layer: int, group: Group, x: Tensor, chosen: Selection | None, y: Tensor, ctx: ScaleContext
    ) -> Tensor:
        self.moved[-1].append(_map((y - x)[:1].square().mean(-1), ctx))
        return super().restore(layer, group, x, chosen, y, ctx)

    def on_logits(self, x: Tensor, raw: Tensor, logits: Tensor, ctx: ScaleContext) -> None:
        self.conditional.append(_map(token_entropy(raw[:1]), ctx))
        self.guided.append(_map(token_entropy(logits), ctx))
        if ctx.attention_entropy:
            self.attention = np.stack([_map(layer[:1], ctx) for layer in ctx.attention_entropy])


def _map(values: Tensor, ctx: ScaleContext) -> np.ndarray:
    """[1, N] -> [h, w]"""
    return values[0].float().view(ctx.scale.grid).cpu().numpy()


def thumbnail(image: Image.Image) -> np.ndarray:
    """[H, W, 3] bytes, at most SIDE pixels per side."""
    shrunk = image.convert("RGB")
    shrunk.thumbnail((SIDE, SIDE))
    return np.asarray(shrunk)


def watch(pipe: Pipeline, prompt: str | int, seed: int, attention_at: float = 6 / 13, **size: Any) -> Watched:
    run = Watched(pipe.spec.name, prompt, seed, list(pipe.schedule(**size).grids))

    def after(end: ScaleEnd) -> None:
        (image,) = to_pil(end.decode())
        run.images.append(image)
        run.thumbnails.append(thumbnail(image))
        codes = pipe.tokenizer.codes(end.tokens)[0].mT
        run.codes.append(codes.unflatten(1, end.scale.grid).float().cpu().numpy())
        run.features.append(end.features[0].float().cpu().numpy())

    out = pipe(
        prompt, seed=seed, method=Watcher(attention_at), callback_on_scale_end=after, output_type="latent", **size
    )
    policy = out.trace.policy
    assert isinstance(policy, WatchingPolicy)
    run.conditional, run.guided = policy.conditional, policy.guided
    run.logit_lens, run.moved = ([np.stack(layers) for layers in each] for each in (policy.logit_lens, policy.moved))
    run.attention, run.attention_scale = policy.attention, policy.attention_scale + 1
    return run
