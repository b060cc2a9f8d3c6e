"""What every runtime must do: bodies of tests.

`pipe` is eager, `other` is the same model with the executor in question. test_cuda_graphs.py and test_warmup.py run
them with emulated graphs on a CPU, test_gpu.py with CUDA graphs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pipelines import ask, embeds, same_tokens

from nextscale import NOVA, SkipVAR
from nextscale.engine.callback import ScaleEnd
from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.policy import PlainPolicy

UNGUIDED = {"var": 0.0, "infinity": 1.0, "hart": 0.0}  # guidance_scale of a plain run of each family
REDUCED = NOVA(t_est=2, alpha=10, uncomputed="nothing")


@dataclass(frozen=True)
class Leaving(Method):
    """Images skip scales, stop, or lose their guidance, each at its own; with another method's reduction.

    Pairs are (image, scale), both from 0; an image stops, or is unguided, from that scale on.
    """

    name, summary = "leaving", ""
    like: Method | None = None
    skip: tuple[tuple[int, int], ...] = ()
    stop: tuple[tuple[int, int], ...] = ()
    unguided: tuple[tuple[int, int], ...] = ()

    def start(self, context):
        policy = PlainPolicy(context) if self.like is None else self.like.start(context)
        inner = policy.plan_scale

        def plan_scale(scale):
            plan, k, actions, guided = inner(scale), scale.index, [], []
            for image in range(context.images):
                stops = any(i == image and k >= s for i, s in self.stop)
                actions.append("stop" if stops else "skip" if (image, k) in self.skip else "run")
                guided.append(plan.guided[image] and not any(i == image and k >= s for i, s in self.unguided))
            return plan._replace(actions=tuple(actions), guided=tuple(guided))

        policy.plan_scale = plan_scale
        return policy


# Images that skip a scale, stop early, or lose their unconditional row before the others.
LEAVING = {
    "one skips": {"skip": ((0, 3),)},
    "the first is unguided first": {"unguided": ((0, 3), (1, 5))},
    "the last is unguided first": {"unguided": ((0, 5), (1, 3))},
    "one skips, one is unguided": {"skip": ((1, 3),), "unguided": ((0, 4),)},
    "one is unguided and stops": {"unguided": ((0, 3),), "stop": ((0, 5),)},
}


def counts(out: Any) -> list[list[tuple[int, list[int]]]]:
    """Rows and kept tokens of every layer, per image and scale."""
    images = out.trace.to_dict()["images"]
    return [[(s["rows"], [layer["kept"] for layer in s["layers"]]) for s in image["scales"]] for image in images]


def same(expected: Any, found: Any) -> bool:
    """The same tokens are kept, and the same are drawn. In half precision but for a few of the last scale: its own keys
    a captured call looks at behind all others, so they are added up in another order."""
    if counts(expected) != counts(found):
        return False
    if found.trace.to_dict()["dtype"] == "float32":
        return same_tokens(expected, found)
    *first, last = zip(expected.tokens, found.tokens, strict=True)
    return all(torch.equal(a, b) for a, b in first) and (last[0] != last[1]).float().mean().item() < 0.05


def alike(expected: Any, found: Any) -> bool:
    """The same; in half precision, until a token differs because kernels add up in another order: few do at once."""
    if found.trace.to_dict()["dtype"] == "float32":
        return same(expected, found)
    for k, (a, b) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        if not torch.equal(a == -1, b == -1):
            return False
        kept = [np.array([n for image in counts(out) for n in image[k][1]]) for out in (expected, found)]
        if len(kept[0]) != len(kept[1]) or (abs(kept[0] - kept[1]) > np.maximum(2, 0.1 * kept[0])).any():
            return False
        if not torch.equal(a, b) or not np.array_equal(*kept):
            return bool((a != b).sum().item() <= max(3, 0.1 * a.numel()))
    return True


def all_captured(pipe: Any, out: Any) -> bool:
    """Whether no scale of the newest call was run eagerly."""
    return len(pipe.executor.replayed) == sum(bool((t != -1).any()) for t in out.tokens)


def batches_are_padded(pipe, other, method: Method | None) -> None:
    """A batch of three images is padded to four if that was warmed up."""
    size = {"pixel_budget": "0.06M"} if pipe.backbone.family == "infinity" else None
    other.warm_up([size], [method], [4], text_tokens=16)
    before = other.captured
    for first, images in ((0, 4), (0, 3), (2, 3), (1, 4)):
        expected, found = (ask(p, images, first=first, method=method, output_type="latent") for p in (pipe, other))
        assert alike(expected, found), (first, images)
        assert len(found.images) == images == len(found.trace.to_dict()["images"])
        assert all(len(tokens) == images for tokens in found.tokens)
        assert all_captured(other, found)
    assert other.captured == before


def settings(pipe) -> list[dict[str, Any]]:
    """One other value for each setting that the model knows; every one changes its images."""
    known: list[dict[str, Any]] = [
        {"guidance_scale": 1.5},
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_p": 0.5},
        {"greedy": True},
        {"guidance_layers": (-1,)},
    ]
    return known if pipe.backbone.family == "infinity" else [*known, {"top_k": 3}, {"smooth": True}]


def settings_are_those_of_the_call(pipe, other, method: Method | None = None) -> None:
    """A call does not get another one's settings, though both have the same shape."""
    plain = ask(pipe, 1, method=method, output_type="latent")
    for options in ({}, *settings(pipe), {}):
        expected, found = (ask(p, 1, method=method, output_type="latent", **options) for p in (pipe, other))
        assert same_tokens(expected, plain) == (not options), f"{options} changes nothing, so it cannot be seen"
        assert same(expected, found), options


def numbers_are_uploaded(pipe, other) -> None:
    """Guidance, temperature, top-k and top-p change from call to call; what was captured is replayed."""
    family = pipe.backbone.family
    scales = len(ask(pipe, 1, output_type="latent").tokens)
    some = [UNGUIDED[family] if k in (2, 4) else 2.5 for k in range(scales)]  # the others have a weight
    numbers: list[dict[str, Any]] = [{"guidance_scale": 1.5}, {"guidance_scale": some}, {"temperature": 0.6}]
    for base in ({"top_p": 0.9}, {"top_p": 0.0}):
        plain = ask(pipe, 1, output_type="latent", **base)
        ask(other, 1, output_type="latent", **base)
        before = other.executor.captured
        more = [{"top_p": 0.4}, {"top_k": 1}] if base["top_p"] else [{"top_k": 1 if family == "infinity" else 3}]
        for options in (*numbers, *more, {}):
            expected, found = (ask(p, 1, output_type="latent", **{**base, **options}) for p in (pipe, other))
            assert same_tokens(expected, plain) == (not options), f"{options} changes nothing, so it cannot be seen"
            assert same(expected, found), options
        assert other.executor.captured == before
    if family == "infinity":  # a bit has no codebook to be sorted
        before = other.executor.captured
        ask(other, 1, output_type="latent", top_p=0.9)
        assert other.executor.captured == before


def prompts_of_any_length(pipe, other) -> None:
    """Few shapes of text: a full one and a short one share theirs. The model reads up to 128 tokens."""
    seen = []
    for length in (5, 65, 64, 100, 128, 5, 1, 65):
        options = {"prompt_embeds": embeds(length, seed=length), "pixel_budget": "0.06M", "seed": 139}
        expected, found = (p(output_type="latent", **options) for p in (pipe, other))
        assert same(expected, found), length
        seen.append(other.executor.captured)
    scales = len(found.tokens)
    assert seen == [scales] + [2 * scales] * 7


def methods_are_those_of_the_call(pipe, other, methods: Sequence[Method]) -> None:
    """The same for what a method does inside a scale."""
    seen = []
    for method in (*methods, methods[0]):
        expected, found = (ask(p, 1, method=method, output_type="latent") for p in (pipe, other))
        assert same(expected, found), method
        seen.append(expected)
    assert not any(same(a, b) for a, b in pairwise(seen)), "two of them give the same, so nothing can be seen"


def an_old_output_stays(pipe, other, method: Method | None) -> None:
    """An output read after other calls holds what is its own."""

    def look(out) -> dict[str, Any]:
        scales = range(1, len(out.tokens) + 1)
        return {
            "maps": [out.images.cpu().numpy()],
            "tokens": [t.cpu().numpy() for t in out.tokens],
            "kept": [out.trace.kept(0, scale, layer) for scale in scales for layer in (1, 3)],
            "flops": [out.trace.to_dict()["images"][0][name] for name in ("flops", "flops_full")],
        }

    def calls(p) -> Iterator[Any]:
        return (ask(p, 1, first=first, method=method, output_type="latent") for first in (0, 2, 4, 0))

    found = [look(out) for out in list(calls(other))]
    # In half precision eager calls differ a little: those of the same kind, then, looked at at once.
    expected = [look(out) for out in calls(pipe if pipe.dtype == torch.float32 else other)]
    assert not np.array_equal(expected[0]["tokens"][-1], expected[1]["tokens"][-1])
    assert method is None or any(
        not np.array_equal(*pair) for pair in zip(*(e["kept"] for e in expected[:2]), strict=True)
    )
    for a, b in zip(expected, found, strict=True):
        for name in a:
            close = np.array_equal if name != "maps" else functools.partial(np.allclose, atol=1e-4)
            assert all(map(close, a[name], b[name])), name


def infinite_logits_are_noticed(other) -> None:
    """Infinity, not NaN: nothing else would stop such a run, for its maps are finite."""
    plain = {"guidance_scale": UNGUIDED[other.backbone.family]}  # the difference of two infinite ones would be NaN
    for _ in range(2):
        ask(other, 1, **plain)
        with pytest.raises(NextscaleError, match="logits of scale 1 are not finite: guidance_scale or temperature"):
            ask(other, 1, temperature=1e-39, **plain)
    bias = other.backbone.head_linear.bias
    before = bias.clone()
    for bad in (torch.inf, -torch.inf):
        with torch.no_grad():
            bias[-1] = bad
        with pytest.raises(NextscaleError, match=r"scale 1 are not finite: the weights of head_linear\.bias"):
            ask(other, 1, **plain)
    with torch.no_grad():
        bias.copy_(before)
    ask(other, 1, **plain)


def what_a_callback_keeps_stays(pipe, method: Method | None) -> None:
    """Maps, tokens and logits of a scale, read after later scales and calls, in which images may be inactive."""
    kept, copies = [], []
    names = ("features", "tokens", "logits", "raw_logits", "hidden")

    def keep(end) -> None:
        kept.append(end)
        copies.append({name: getattr(end, name).clone() for name in names})

    for first in (0, 2):
        ask(pipe, 2, first=first, method=method, callback_on_scale_end=keep)
    assert len(kept) > 8
    for end, copy in zip(kept, copies, strict=True):
        for name in names:
            assert torch.equal(getattr(end, name), copy[name]), (end.scale.index, name)


def images_that_leave(pipe, other, how: dict[str, Any], like: Method | None) -> int:
    """Batches of which some images skip a scale, stop or lose guidance; calls without that share what was captured.

    Returns how many scales a call captures that was made before.
    """
    method = Leaving(like, **how)
    for first, m in ((0, method), (2, like), (2, method), (0, method)):
        expected, found = (ask(p, 2, first=first, method=m, output_type="latent") for p in (pipe, other))
        assert alike(expected, found), (first, m)
    # Only what a method remembers of an image that skips a scale is not captured.
    assert all_captured(other, found) == (like is None or not how.get("skip"))
    rows = [[scale[0] for scale in image] for image in counts(expected)]
    assert rows[0] != rows[1] or len(set(rows[0])) > 1, "somebody left"
    before = other.executor.captured
    ask(other, 2, method=method)
    return other.executor.captured - before


def images_that_a_callback_lets_go(pipe, other, like: Method | None) -> None:
    """Images leave a batch between two scales because nobody wants them any more; the others do not notice."""
    for gone in ({0: {0}}, {2: {1}, 4: {2}}, {1: {0, 2}}, {}):

        def let_go(end: ScaleEnd, gone: dict[int, set[int]] = gone) -> set[int]:
            return gone.get(end.scale.index, set())

        expected, found = (
            ask(p, 3, method=like, output_type="latent", callback_on_scale_end=let_go) for p in (pipe, other)
        )
        assert alike(expected, found), gone
        assert all_captured(other, found)


def skipvar_decides_for_each_image(pipe, other, like: Method, folder: Path) -> None:
    """SkipVAR in a batch whose images leave at different scales, alone and with a method that drops tokens."""
    # Of the tiny Infinity's images some are below 0.75 in feature B, some above 0.8.
    content = {
        name: {"classes": [0, 2], "mean": [0, edge], "scale": [1, 1], "coef": [[0, 0], [0, sign]], "intercept": [0, 0]}
        for name, edge, sign in (("skip", 0.75, -1), ("uncond", 0.8, 1))
    }
    decision = folder / "decision.json"
    decision.write_text(json.dumps(content))
    for method in (SkipVAR(str(decision), at=0.5), SkipVAR(str(decision), at=0.5) + like):
        ends = set()
        for first in (0, 2, 0):
            expected, found = (ask(p, 3, first=first, method=method, output_type="latent") for p in (pipe, other))
            assert alike(expected, found), (first, method)
            if other.executor.supports_inactive_rows(other.backbone):
                assert all_captured(other, found)
            ends |= {tuple(scale[0] for scale in image[-2:]) for image in counts(expected)}
        assert ends == {(0, 0), (1, 1), (2, 2)}, "images stop, lose guidance or stay"
