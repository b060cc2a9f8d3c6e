"""What the shell offers behind an option. Written out, for the shell waits: loading torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

MODELS = (
    "clipart",
    "var-d16",
    "var-d20",
    "var-d24",
    "var-d30",
    "var-d36",
    "infinity-125m",
    "infinity-2b",
    "infinity-8b",
    "infinity-8b-512",
    "hart-0.7b",
)
METHODS = (
    "nova",
    "toprovar",
    "sparsevar",
    "fastvar",
    "skipvar",
    "ld_pruning",
    "taper",
    "drop_guidance",
    "truncate",
    "random_selection",
)
AUTO, LEVELS = "auto", ("balanced", "fast")
RUNTIMES = ("eager", "compiled", "graphs")
DTYPES = ("float32", "bfloat16", "float16")
PIXEL_BUDGETS = ("0.06M", "0.25M", "0.60M", "1M", "4M")
_PRESETS = Path(__file__).parents[1] / "methods" / "presets"


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def methods(incomplete: str) -> list[str]:
    """The last method of a list or composition: its name, or its presets once the name is there."""
    start = max(incomplete.rfind(","), incomplete.rfind("+")) + 1
    before, word = incomplete[:start], incomplete[start:]
    name, colon, _ = word.partition(":")
    offered = [f"{name}:{preset}" for preset in _presets(name)] if colon else ["none", AUTO, *METHODS]
    return [before + each for each in one_of(offered)(word)]


def presets(incomplete: str) -> list[str]:
    return one_of(sorted({preset for name in METHODS for preset in _presets(name)}))(incomplete)


def _presets(name: str) -> list[str]:
    return sorted(p.stem.removeprefix(f"{name}-") for p in _PRESETS.glob("*.json") if p.stem.startswith(f"{name}-"))
