"""What policies may return. A device may be waiting for the host, so only what the host knows anyway is looked at:
kinds, shapes, dtypes. Numbers are looked at on a CPU alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import is_flag, short_repr
from nextscale.methods.policy import Policy, ScalePlan
from nextscale.methods.selection import Packed, Selection

ACTIONS = ("run", "skip", "stop")
NEEDS = ("attention_entropy",)


def wrong(policy: Policy, hook: str, what: str) -> NextscaleError:
    return NextscaleError(f"{policy.name or type(policy).__name__}: {hook} {what}")


def check_plan(policy: Policy, plan: Any) -> ScalePlan:
    images, parts, tokens = policy.context.images, policy.context.sublayers, policy.context.schedule.tokens
    if not isinstance(plan, ScalePlan):
        raise wrong(
            policy, "plan_scale", f"must return a ScalePlan, as self.plan(scale) makes it, not {short_repr(plan)}"
        )
    if len(_all(plan.actions)) != images or not all(isinstance(a, str) and a in ACTIONS for a in plan.actions):
        raise _unfit(policy, plan, "actions", f"one of {choices(ACTIONS)} for each of {images} images")
    if len(_all(plan.guided)) != images or not all(map(is_flag, plan.guided)):
        raise _unfit(policy, plan, "guided", f"True or False for each of {images} images")
    if not _whole(plan.capacity, 0, tokens):
        raise _unfit(policy, plan, "capacity", f"a whole number from 0 to {tokens}")
    if tuple(part for group in _all(plan.groups) for part in _all(group)) != parts:
        raise _unfit(policy, plan, "groups", f"tuples that divide {choices(parts)}, in this order")
    if not isinstance(plan.needs, (frozenset, set)) or not plan.needs <= {*NEEDS}:
        raise _unfit(policy, plan, "needs", f"a frozenset with none or some of {choices(NEEDS)}")
    if not is_flag(plan.needs_hidden):
        raise _unfit(policy, plan, "needs_hidden", "True or False")
    if not isinstance(plan.variant, Hashable):
        raise _unfit(policy, plan, "variant", "hashable")
    return plan


def _unfit(policy: Policy, plan: ScalePlan, field: str, allowed: str) -> NextscaleError:
    return wrong(policy, "plan_scale", f"planned {field} = {short_repr(getattr(plan, field))}; allowed: {allowed}")


def _all(values: Any) -> Sequence[Any]:
    """Nothing of what is no list."""
    return values if isinstance(values, (tuple, list)) else ()


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_kv_tokens(policy: Policy, most: int) -> int:
    """Read how many KV entries a policy wants to be reserved at once."""
    tokens = policy.capabilities.kv_tokens
    if tokens is None:
        return most
    if not _whole(tokens, 0, most):
        allowed = f"None or a whole number from 0 to {most}"
        raise wrong(policy, "capabilities", f"must declare kv_tokens as {allowed}, not {short_repr(tokens)}")
    return tokens


def check_selection(policy: Policy, chosen: Any, x: Tensor) -> None:
    """Of the tokens x [R, N, C]."""
    if not isinstance(chosen, Selection):
        raise wrong(policy, "select", f"must return a Selection or None, not {short_repr(chosen)}")
    if isinstance(chosen, Packed):  # made by a kernel of ours
        return
    rows, tokens = x.shape[:2]
    for name, tensor, dims in (("index", chosen.index, 2), ("count", chosen.count, 1)):
        fine = isinstance(tensor, Tensor) and tensor.ndim == dims and len(tensor) == rows and tensor.device == x.device
        if not fine or tensor.dtype != torch.long or (dims == 2 and tensor.shape[1] > tokens):
            shape = f"[{rows}, up to {tokens}]" if dims == 2 else f"[{rows}]"
            have = f"{short_repr(tensor)}{f' on {tensor.device}' if isinstance(tensor, Tensor) else ''}"
            allowed = f"a tensor {shape} of int64 on {x.device}"
            raise wrong(policy, "select", f"returned a Selection whose {name} is {have}; allowed: {allowed}")
    if x.device.type == "cpu":
        _check_range(policy, "index", chosen.index, tokens - 1)
        _check_range(policy, "count", chosen.count, chosen.index.shape[1])


def _check_range(policy: Policy, name: str, numbers: Tensor, most: int) -> None:
    if numbers.numel():
        low, high = (int(n) for n in numbers.aminmax())
        if low < 0 or high > most:
            found = f"returned a Selection whose {name} goes from {low} to {high}; allowed: 0 to {most}"
            raise wrong(policy, "select", found)


def check_states(policy: Policy, hook: str, states: Any, like: Tensor) -> None:
    """Hidden states of all tokens."""
    if (
        not isinstance(states, Tensor)
        or states.shape != like.shape
        or states.dtype != like.dtype
        or states.device != like.device
    ):
        have = f"{short_repr(states)}{f' on {states.device}' if isinstance(states, Tensor) else ''}"
        raise wrong(policy, hook, f"must return {short_repr(like)} on {like.device}, not {have}")


def check_finalized(policy: Policy, finalized: Any, x: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
    """`x` [R, N, C] is what the policy was given."""
    if not isinstance(finalized, tuple) or len(finalized) != 2:
        raise wrong(policy, "finalize", f"must return hidden states and a weight or None, not {short_repr(finalized)}")
    states, weight = finalized
    check_states(policy, "finalize", states, x)
    if weight is None:
        return states, None
    shape = (images, x.shape[1])
    fine = isinstance(weight, Tensor) and weight.shape == shape and weight.device == x.device
    if not fine or weight.dtype.is_complex or (x.device.type == "cpu" and not torch.isfinite(weight).all()):
        allowed = f"None or a tensor {list(shape)} of finite numbers on {x.device}"
        raise wrong(policy, "finalize", f"returned the weight {short_repr(weight)}; allowed: {allowed}")
    return states, weight


def check_report(policy: Policy, report: Any, images: int) -> dict[str, Tensor]:
    if not isinstance(report, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in report.items()
    ):
        raise wrong(policy, "report", f"must return a dict of tensors by name, not {short_repr(report)}")
    for name, value in report.items():
        if not value.ndim or len(value) != images:
            found = f"returned {name!r} as {short_repr(value)}; allowed: an entry for each of {images} images"
            raise wrong(policy, "report", found)
    return report
