"""The documentation's site, as far as that shows without building it (`make docs` builds it)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from nextscale.methods import METHODS

ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
API = sorted((ROOT / "docs" / "api").glob("*.md"))


def pages(nav: list | str) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in nav for part in entry.values() for page in pages(part)]


def test_navigation_names_every_page_once() -> None:
    named = pages(SITE["nav"])
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


@pytest.mark.parametrize("page", API, ids=lambda path: path.stem)
def test_what_the_reference_shows_exists(page: Path) -> None:
    names = re.findall(r"^::: nextscale\.(\S+)$", page.read_text(), re.MULTILINE)
    assert names
    for path in names:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(f"nextscale.{module}".rstrip(".")), name), name


def test_the_reference_shows_all_methods() -> None:
    page = (ROOT / "docs" / "api" / "methods.md").read_text()
    assert set(re.findall(r"^::: nextscale\.(\w+)$", page, re.MULTILINE)) == {
        *(method.__name__ for method in METHODS.values()),
        "Compose",
    }
