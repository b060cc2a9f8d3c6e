"""Policies that return nonsense are named, with the hook; callbacks are looked at before the first scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.pipelines import ask, embeds, same_tokens

from nextscale.errors import NextscaleError
from nextscale.methods import NOVA, RandomSelection, SkipVAR, ToProVAR
from nextscale.methods.base import Method
from nextscale.methods.policy import Capabilities, Policy
from nextscale.methods.selection import Selection


@dataclass(frozen=True)
class Own(Method):
    """A method whose policy has one hook replaced."""

    name = "own"
    summary = "For tests."
    hook: str = "select"
    does: Any = None

    def start(self, context):
        policy = OwnPolicy(context)
        setattr(policy, self.hook, lambda *args, **more: self.does(policy, *args, **more))
        return policy


class OwnPolicy(Policy):
    def select(self, layer, group, x, ctx):
        return super().select(layer, group, x, ctx)


def chosen(index=None, count=None, dtype=torch.long):
    """A Selection that is fine but for what is given."""

    def select(policy, layer, group, x, ctx):
        usual = torch.zeros(len(x), 1, dtype=dtype)
        rows = torch.ones(len(x), dtype=dtype)
        return Selection(usual if index is None else index(x), rows if count is None else count(x))

    return select


def planned(**more):
    return lambda policy, scale: policy.plan(scale, **more)


def completed(weight):
    return lambda policy, x, ctx: (x, weight(x, ctx))


NONSENSE = [
    *(("plan_scale", lambda policy, scale, v=v: v) for v in (None, 5, "run", (), ("run",), object())),
    ("plan_scale", planned(actions=("run", "run"))),
    ("plan_scale", planned(actions=("dance",))),
    ("plan_scale", planned(actions="run")),
    ("plan_scale", planned(actions=([],))),
    ("plan_scale", planned(guided=(True, True))),
    ("plan_scale", planned(guided=("yes",))),
    ("plan_scale", planned(guided=None)),
    ("plan_scale", planned(capacity=-1)),
    ("plan_scale", planned(capacity=1.5)),
    ("plan_scale", planned(capacity=10**12)),
    ("plan_scale", planned(groups=())),
    ("plan_scale", planned(groups=(("ffn",), ("self",)))),
    ("plan_scale", planned(groups=5)),
    ("plan_scale", planned(needs={"magic"})),
    ("plan_scale", planned(needs="attention_entropy")),
    ("plan_scale", planned(needs_hidden=None)),
    ("plan_scale", planned(needs_hidden="no")),
    ("plan_scale", planned(variant=[])),
    *(("select", lambda *a, v=v: v) for v in (5, "all", (), torch.zeros(2, 1).long(), object())),
    ("select", chosen(index=lambda x: torch.zeros(len(x), 1))),
    ("select", chosen(index=lambda x: torch.zeros(len(x), 1, dtype=torch.int32))),
    ("select", chosen(index=lambda x: torch.zeros(len(x)).long())),
    ("select", chosen(index=lambda x: torch.zeros(len(x) + 1, 1).long())),
    ("select", chosen(index=lambda x: torch.zeros(len(x), x.shape[1] + 1).long())),
    ("select", chosen(index=lambda x: torch.full((len(x), 1), x.shape[1]))),
    ("select", chosen(index=lambda x: torch.full((len(x), 1), -1))),
    ("select", chosen(index=lambda x: torch.zeros(len(x), 1, device="meta").long())),
    ("select", chosen(index=lambda x: [[0]])),
    ("select", chosen(count=lambda x: torch.ones(len(x)))),
    ("select", chosen(count=lambda x: torch.full((len(x),), 2))),
    ("select", chosen(count=lambda x: torch.full((len(x),), -1))),
    ("select", chosen(count=lambda x: 1)),
    *(("restore", lambda *a, v=v: v) for v in (None, 5, "x", torch.zeros(1), torch.zeros(2, 1, 32))),
    ("restore", lambda policy, layer, group, x, chosen, y, ctx: x.double()),
    ("restore", lambda policy, layer, group, x, chosen, y, ctx: x[:, :, :1]),
    ("restore", lambda policy, layer, group, x, chosen, y, ctx: x.to("meta")),
    *(("finalize", lambda *a, v=v: v) for v in (None, 5, (1,), (1, 2), (None, None), "xy")),
    ("finalize", lambda policy, x, ctx: x),
    ("finalize", lambda policy, x, ctx: (x[:1], None)),
    ("finalize", completed(lambda x, ctx: 1.0)),
    ("finalize", completed(lambda x, ctx: torch.ones(3))),
    ("finalize", completed(lambda x, ctx: torch.full((1, x.shape[1]), torch.nan))),
    *(("report", lambda *a, v=v: v) for v in (None, 5, {"a": 1.0}, {1: torch.zeros(1)}, [torch.zeros(1)])),
]


@pytest.mark.parametrize(("hook", "does"), NONSENSE, ids=[f"{h}{i}" for i, (h, _) in enumerate(NONSENSE)])
def test_nonsense_is_named(var, hook: str, does) -> None:
    with pytest.raises(NextscaleError) as caught:
        var(1, seed=1, output_type="latent", method=Own(hook, does))
    said = str(caught.value)
    assert said.startswith(f"own: {hook} ")
    assert "\n" not in said
    assert len(said) < 300


@pytest.mark.parametrize("tokens", [-1, 1.5, "x", 10**12, True])
def test_nonsense_in_capabilities_is_named(var, monkeypatch, tokens) -> None:
    monkeypatch.setattr(OwnPolicy, "capabilities", Capabilities(kv_tokens=tokens))
    with pytest.raises(NextscaleError, match="own: capabilities must declare kv_tokens as None or a whole number"):
        var(1, seed=1, output_type="latent", method=Own())


def test_nonsense_of_a_part_is_named(var) -> None:
    from nextscale import Truncate

    with pytest.raises(NextscaleError, match="own: plan_scale planned actions"):
        var(1, method=Truncate(1) + Own("plan_scale", planned(actions=("dance",))))
    with pytest.raises(NextscaleError, match="own: plan_scale must return a ScalePlan"):
        var(1, method=Truncate(1) + Own("plan_scale", lambda policy, scale: None))


def test_nan_of_a_policy(var) -> None:
    def restore(policy, layer, group, x, chosen, y, ctx):
        return y * torch.nan

    with pytest.raises(NextscaleError, match=r"logits of scale 1 are not finite: .* or own made such values$"):
        var(1, method=Own("restore", restore))


def test_text_in_front_is_checked_too(hart) -> None:
    with pytest.raises(NextscaleError, match="own: restore must return"):
        ask(hart, method=Own("restore", lambda policy, layer, group, x, chosen, y, ctx: y[:, :0]))
    with pytest.raises(NextscaleError, match="own: select returned a Selection whose index goes from 7 to 7"):
        ask(hart, method=Own("select", chosen(index=lambda x: torch.full((len(x), 1), 7))))


def test_a_plan_with_an_unknown_field(var) -> None:
    with pytest.raises(NextscaleError, match="a plan has no field 'action'; allowed: actions, guided"):
        var(1, method=Own("plan_scale", planned(action=("run",))))


def test_a_method_that_starts_nothing(var) -> None:
    @dataclass(frozen=True)
    class Nothing(Own):
        def start(self, context):
            return None

    with pytest.raises(NextscaleError, match="own: start must return a Policy, not None"):
        var(1, method=Nothing())


@pytest.mark.parametrize("callback", [lambda: None, lambda a, b: None, lambda *, end: None, 5, "x"], ids=range(5))
def test_callbacks_are_looked_at_before_the_first_scale(var, callback, monkeypatch) -> None:
    monkeypatch.setattr("nextscale.engine.output.generate", lambda *args: pytest.fail("a scale was run"))
    with pytest.raises(NextscaleError, match="callback_on_scale_end must be a function of one argument, a ScaleEnd"):
        var(1, callback_on_scale_end=callback)


@pytest.mark.parametrize("answer", [False, np.False_, np.bool_(0), torch.tensor(False)], ids=repr)
def test_every_false_stops(var, answer) -> None:
    out = var(1, seed=1, callback_on_scale_end=lambda end: answer if end.scale.index == 2 else None)
    assert out.trace.to_dict()["images"][0]["stopped_after"] == 3


@pytest.mark.parametrize("answer", [True, np.True_, torch.tensor(True), None], ids=repr)
def test_every_other_answer_goes_on(var, answer) -> None:
    out = var(1, seed=1, callback_on_scale_end=lambda end: answer)
    assert same_tokens(out, var(1, seed=1))


@pytest.mark.parametrize("answer", [5, "stop", 0, np.zeros(3), [], object()], ids=lambda a: type(a).__name__)
def test_other_answers_are_refused(var, answer) -> None:
    with pytest.raises(
        NextscaleError, match=r"the callback returned .*; allowed: None, False to stop, a set of images that leave, or"
    ):
        var(1, seed=1, callback_on_scale_end=lambda end: answer)


METHODS = {
    "none": None,
    "nova": NOVA(t_est=2, metric="random"),
    "toprovar": ToProVAR(tau=0.1, token_stage=False),
    "random": RandomSelection(NOVA(t_est=2)),
    "skipvar": SkipVAR(decision="clipart"),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_callers_default_dtype_changes_nothing(any_pipe, name: str) -> None:
    options = {"seed": 3, "method": METHODS[name], "output_type": "pt"}
    if any_pipe.backbone.prompts == "label":
        options["prompt"] = [1, 2]
    else:
        options["prompt_embeds"] = embeds(3, 5)
    if any_pipe.backbone.family == "infinity":
        options["pixel_budget"] = "0.06M"
    expected, maps = any_pipe(**options), []
    torch.set_default_dtype(torch.float64)
    try:
        found = any_pipe(**options, callback_on_scale_end=lambda end: maps.append(end.features.dtype))
        pixels = found.images * 2 - 1
        tokens = any_pipe.encode(pixels)
        any_pipe.decode(torch.zeros(1, any_pipe.tokenizer.config.code_dim, 4, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_tokens(expected, found)
    assert set(maps) == {torch.float32}
    assert found.images.dtype == torch.float32
    assert torch.equal(expected.images, found.images)
    assert all(torch.equal(a, b) for a, b in zip(tokens, any_pipe.encode(pixels), strict=True))
