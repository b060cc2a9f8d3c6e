"""A command run in this process: starting Python and loading torch takes seconds."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from nextscale.cli import main


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Text(io.TextIOWrapper):
    """A stream of text as those of a process are, which can be read afterwards."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)

    def read_back(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)


def run(*args: object, encoding: str = "utf-8") -> Done:
    out, err = Text(encoding), Text(encoding)
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
