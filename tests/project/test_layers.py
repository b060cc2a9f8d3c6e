"""Modules import from their own layer and from lower ones, inside functions too; types alone may look up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
# The lowest first. A module belongs to the longest name that its own begins with.
LAYERS = (
    ("errors", "version"),
    ("io",),
    ("kernels",),
    tuple(f"engine.{name}" for name in ("schedule", "sampling", "rng", "entropy", "guidance", "rows", "trace")),
    ("cache",),
    ("models", "tokenizers", "text"),
    ("checkpoints", "methods"),
    ("runtime.base",),
    ("engine",),
    ("runtime",),
    ("pipeline", "testing", "official"),  # the last makes a pipeline, and no checkpoint of ours needs it
    ("cluster",),
    ("research", "serve"),
    ("cli",),
)
ALLOWED: dict[tuple[str, str], str] = {}  # (module, what it imports): the reason


def layer(module: str) -> int:
    named = [(len(name), n) for n, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    assert named, f"{module} is in no layer"
    return max(named)[1]


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def test_no_module_imports_a_higher_layer() -> None:
    wrong = []
    for path in sorted((SOURCE / "nextscale").rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE / "nextscale").with_suffix("").parts).removesuffix(".__init__")
        if module in ("__init__", "__main__"):
            continue
        for name in imported(ast.parse(path.read_text())):
            target = name.removeprefix("nextscale.")
            if name.startswith("nextscale.") and layer(target) > layer(module) and (module, target) not in ALLOWED:
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)
