"""What people install: the wheel and the source archive, built from a copy of the repository and opened."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools has arguments of its own
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both. No isolated environment: it would be downloaded."""
    copy, out = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("built")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    for folder in ("src", "tests", "docs"):
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "data")
        shutil.copytree(ROOT / folder, copy / folder, ignore=left_out)
    for weights in copy.rglob("*.safetensors"):
        weights.write_bytes(b"")  # only whether they are there is asked for, and to pack them takes seconds
    command = [sys.executable, "-c", BUILD, str(out)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes]:
    """Its files; those of the metadata folder begin with `dist-info/`."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        return {re.sub(r"^[^/]+\.dist-info/", "dist-info/", name): file.read(name) for name in file.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, bytes]) -> Message:
    return email.message_from_bytes(wheel["dist-info/METADATA"])


@pytest.fixture(scope="module")
def archive(built: Path) -> dict[str, int]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as file:
        return {name.partition("/")[2]: file.getmember(name).size for name in file.getnames()}


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE", "MODEL_CARD.md"])
def test_licenses_and_notices_travel(name: str, wheel: dict[str, bytes], archive: dict[str, int]) -> None:
    assert wheel[f"dist-info/licenses/{name}"] == (ROOT / name).read_bytes()
    assert archive[name] == (ROOT / name).stat().st_size


def test_the_notice_names_all_that_the_weights_learned_from(wheel: dict[str, bytes]) -> None:

    notice = wheel["dist-info/licenses/NOTICE"].decode()
    for source in json.loads((ROOT / "training" / "sources.json").read_text()).values():
        assert f"{source['package']} {source['version']}" in notice
        assert source["source"] in notice
    assert "Copyright (c) Microsoft Corporation." in notice
    assert "The above copyright notice and this permission notice shall be included in all copies" in notice
    assert "Copyright 2013 Google, Inc." in notice


def test_all_of_the_package_is_in_the_wheel(wheel: dict[str, bytes]) -> None:
    source = ROOT / "src"
    wanted = {p.relative_to(source) for p in (source / "nextscale").rglob("*") if p.is_file()}
    wanted = {str(p) for p in wanted if "__pycache__" not in p.parts}
    assert wanted == {name for name in wheel if not name.startswith("dist-info/")}


def test_the_archive_has_no_tests_that_cannot_run(archive: dict[str, int]) -> None:
    assert not [name for name in archive if name.startswith("tests/")]
    assert {"pyproject.toml", "setup.py", "README.md", "src/nextscale/assets/clipart/model.safetensors"} <= set(archive)


def test_the_long_description_stands_alone(metadata: Message) -> None:
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(text.splitlines()) > 100
    assert text.startswith("# nextscale")
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", text)  # neither images nor links into the repository
    assert "MODEL_CARD.md says what it can and cannot draw" in text


def test_every_extra_is_declared(metadata: Message) -> None:
    """Those that the sentences of the package tell people to install."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for path in files for name in re.findall(r"nextscale\[([a-z]+)\]", path.read_text())}
    assert named
    assert named <= set(metadata.get_all("Provides-Extra", []))
