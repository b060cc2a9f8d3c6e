"""The code in the documentation is run, in order, as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["add-a-model.md", "add-a-method.md", "add-a-runtime.md"])
def test_code_of_a_page(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert blocks
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_architecture_page_names_every_room() -> None:
    page = (DOCS / "architecture.md").read_text()
    source = DOCS.parent / "src" / "nextscale"
    rooms = {p.name for p in source.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms - set(re.findall(r"`(\w+)/`", page)) == set()
    files = set(re.findall(r"`(\w+/[\w/]*\w+\.py)`", page))
    assert not [name for name in files if not (source / name).is_file() and not (DOCS.parent / name).is_file()]
