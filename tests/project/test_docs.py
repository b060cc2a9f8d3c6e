"""The code in the documentation is run, in order, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["add-a-model.md", "add-a-method.md"])
def test_code_of_a_page(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_structure_page_names_every_module() -> None:
    page = (DOCS / "structure.md").read_text()
    source = DOCS.parent / "src" / "nextscale"
    modules = {str(p.relative_to(source)) for p in source.rglob("*.py") if p.stat().st_size}
    named = set(re.findall(r"^\| `([\w/]+\.py)`", page, re.MULTILINE))
    assert modules - named == set()
    assert named - modules == set()
