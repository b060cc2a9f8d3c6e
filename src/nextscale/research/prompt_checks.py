"""Prompts of a list, checked before the first image: hours later is too late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nextscale.engine.prompts import read_prompts
from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline


@dataclass(frozen=True)
class BadPrompt:
    where: str  # it stands: file and line
    prompt: str
    reason: str


def bad_prompts(pipe: Pipeline, asked: Iterable[tuple[Any, str]]) -> list[BadPrompt]:
    """Find the prompts that the model cannot draw, among prompts and where they stand."""
    known: dict[Any, str | None] = {}
    found = []
    for prompt, where in asked:
        if prompt not in known:
            known[prompt] = problem(pipe, prompt)
        reason = known[prompt]
        if reason is not None:
            found.append(BadPrompt(where, str(prompt), reason))
    return found


def problem(pipe: Pipeline, prompt: Any) -> str | None:
    """Say what is wrong with one prompt or class label; nothing is encoded."""
    try:
        read_prompts(pipe.backbone, pipe.spec.name, prompt, None, None, None, 1)
        if isinstance(prompt, str):
            prompt.encode()
            check = getattr(pipe.text_encoder, "check", None)  # an encoder that reads anything has none
            if check is not None:
                check(prompt)
    except UnicodeEncodeError:
        return "the prompt holds half a character (a lone surrogate)"
    except NextscaleError as error:
        return str(error)
    return None


def refuse(bad: Sequence[BadPrompt], skip: bool, total: int) -> None:
    """Raise for the first, unless they are to be skipped and others remain."""
    if not bad or (skip and len(bad) < total):
        return
    more = f" ({len(bad) - 1} more of {total} prompts cannot be drawn either)" if len(bad) > 1 else ""
    way = "no prompt is left" if skip else "--skip-bad leaves such prompts out"
    raise NextscaleError(f"{bad[0].where}: {bad[0].reason}{more}; {way}")


def skipped(bad: Sequence[BadPrompt]) -> dict[str, Any]:
    """Describe the skipped prompts for a manifest."""
    return {"count": len(bad), "prompts": [asdict(b) for b in bad]}
