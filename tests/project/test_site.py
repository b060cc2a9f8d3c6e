"""The documentation's site, as far as that shows without building it, and versions that are named twice."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from nextscale import __version__
from nextscale.methods import METHODS

ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))


def pages(nav: list | str) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in nav for part in entry.values() for page in pages(part)]


def test_navigation_names_every_page_once() -> None:
    named = pages(SITE["nav"])
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", API, ids=lambda path: path.stem)
def test_what_the_reference_shows_exists(page: Path) -> None:
    names = re.findall(r"^::: nextscale\.(\S+)$", page.read_text(), re.MULTILINE)
    assert names
    for path in names:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(f"nextscale.{module}".rstrip(".")), name), name


def test_the_reference_shows_all_methods() -> None:
    page = (DOCS / "api" / "methods.md").read_text()
    assert set(re.findall(r"^::: nextscale\.(\w+)$", page, re.MULTILINE)) == {
        *(method.__name__ for method in METHODS.values()),
        "Compose",
    }


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.rglob("*.md")], ids=lambda path: path.name)
def test_links_into_the_repository(page: Path) -> None:
    """A page of the site links to others of its own; whatever stands beside README.md is no part of it."""
    within = DOCS if DOCS in page.parents else ROOT
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
        target = (page.parent / link).resolve()
        assert target.exists(), link
        assert within in target.parents, link


def test_versions_agree() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = (repo["rev"] for repo in hooks if repo["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={ruff.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()
