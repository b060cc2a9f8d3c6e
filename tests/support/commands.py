"""A command run in this process: starting Python and loading torch takes seconds."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from nextscale.cli import main
from nextscale.models.registry import MODELS


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Text(io.TextIOWrapper):
    """A stream of text as those of a process are, which can be read afterwards."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def read_back(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)


def run(*args: object, encoding: str = "utf-8", terminal: bool = False) -> Done:
    out, err = Text(encoding, terminal), Text(encoding, terminal)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["nextscale", *map(str, args)]),
    ):
        try:
            main()
            code: object = None
        except SystemExit as stopped:
            code = stopped.code
    assert code is None or isinstance(code, int)
    return Done(code or 0, out.read_back(), err.read_back())


class Recorder:
    """Stands in for the pipeline, and notes what it was given."""

    def __init__(self, images: int) -> None:
        self.loaded: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.more: dict[str, Any] = {}  # of whoever else is spied on
        self.backbone, self.trace, self.spec = self, self, MODELS["infinity-2b"]
        self.prompts, self.images, self.progress_bar = "text", [Image.new("RGB", (8, 8))] * images, None

    def from_pretrained(self, source: str, **options: Any) -> Recorder:
        self.loaded = {"source": source, **options}
        return self

    def __call__(self, prompt: str, **options: Any) -> Recorder:
        self.asked = {"prompt": prompt, **options}
        return self

    def save(self, path: Path) -> None:
        self.more["trace"] = path

    def summary(self) -> str:
        return "a summary"
