"""Files that users hand in: one sentence that names the file, whatever they hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nextscale.errors import NextscaleError
from nextscale.io import reading
from nextscale.io.reading import read_json, read_lines
from nextscale.research.evaluate.score_files import ImageFolder, read_prompts
from nextscale.research.evaluate.sweep import read_sweep
from nextscale.research.evaluate.tune import read_space
from nextscale.research.export.manifest import read_manifest
from nextscale.research.export.plan import ExportPlan
from nextscale.text.words import Lexicon

DEEP = b"[" * 100_000 + b"]" * 100_000
BROKEN = {
    b'{"a": 1,\n "a": 2}': "it has the key 'a' twice",
    b'{"a": 1,\n "b": }': "line 2, column 7 is not JSON: Expecting value",
    b'{"a": NaN}': "NaN is not JSON",
    b'{"a": "\\ud83e"}': "it holds half a character",
    DEEP: "it is nested too deeply",
    b'{"a": ' * 50_000: "it is nested too deeply",
    b"": "it is empty",
    b" \n": "it is empty",
    '{"a": 1}'.encode("utf-16"): "it is UTF-16; save it as UTF-8",
    '{"a": 1}'.encode("utf-16-be"): "it is not text: line 1 holds a NUL byte",
    b'{"a": 1,\n "b": "\x00"}': "it is not text: line 2 holds a NUL byte",
    b'{"a": 1,\n "b": "\xe4"}': "it is not text: line 2 is not UTF-8",
    b"9" * 5000: "Exceeds the limit",
}


@pytest.mark.parametrize("content", BROKEN, ids=lambda c: repr(c[:24]))
def test_broken_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(NextscaleError) as caught:
        read_json(path, "a sweep")
    assert str(caught.value).startswith(f"{path} is not a sweep: {BROKEN[content]}")
    assert len(str(caught.value)) < len(str(path)) + 200
    assert "\n" not in str(caught.value)


def test_what_editors_add_changes_nothing(tmp_path: Path) -> None:
    path, value = tmp_path / "x", {"a": ["é", "🦊"]}
    for data in (
        json.dumps(value).encode(),
        b"\xef\xbb\xbf" + json.dumps(value, indent=1).replace("\n", "\r\n").encode(),
    ):
        path.write_bytes(data)
        assert read_json(path, "x") == value
    path.write_bytes("\ufeffa fox\r\n\r\n  two cats \rthree".encode())
    assert read_lines(path) == [(1, "a fox"), (3, "two cats"), (4, "three")]


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        tmp_path: "it is a folder",
        tmp_path / "pipe": "it is no regular file",  # it would be waited for
        tmp_path / "nowhere": "No such file",
        tmp_path / ("x" * 300): "File name too long",
    }.items():
        with pytest.raises(NextscaleError, match=f"cannot be read: {words}"):
            read_json(path, "x")
        with pytest.raises(NextscaleError, match=f"cannot be read: {words}"):
            read_lines(path)
    (tmp_path / "large").write_bytes(b"1" * 2000)
    monkeypatch.setattr(reading, "MAX_BYTES", 1000)
    with pytest.raises(NextscaleError, match="large is not x: it has 2,000 bytes, and 1,000 are allowed"):
        read_json(tmp_path / "large", "x")


READERS = {
    "sweep": lambda path: read_sweep(str(path)),
    "space": lambda path: read_space("nova", path),
    "manifest": read_manifest,
    "score": lambda path: read_prompts(path, ImageFolder(path.parent, {"1.png": (8, 8)})),
    "vocabulary": Lexicon.read,
    **{name: lambda path, name=name: ExportPlan.read(name, path) for name in ("geneval", "mjhq", "imagereward")},
    "hpsv2": lambda path: ExportPlan.read("hpsv2", path.rename(path.with_name("photo.json"))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "content", [*BROKEN, b"3", b"[[1]]", b'{"a": {"b": [1]}}', b'"x"', b"null"], ids=lambda c: repr(c[:24])
)
def test_every_reader_names_the_file(reader: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(NextscaleError) as caught:
        READERS[reader](path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "the list of values is empty"),
        ({"low": 1}, "a range has the numbers"),
        ({"low": 1, "high": "2"}, "a range has the numbers"),
        ({"low": 1, "high": 2, "steps": 1}, "a range has the numbers"),
        ({"low": 3, "high": 2}, "low must be at most high"),
        ({"low": 1, "high": 2, "step": 0}, "step above 0"),
        ({"low": 0, "high": 0.5, "log": True}, "low above 0 for log"),
    ],
)
def test_a_search_space_that_cannot_be_searched(values: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"nova": {"alpha": values}}))
    with pytest.raises(NextscaleError, match=words) as caught:
        read_space("nova", path)
    assert f"{path}, nova.alpha: " in str(caught.value)
