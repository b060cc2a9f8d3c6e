"""Every way in which a command can end: an exit code and, unless it is done, one line on stderr."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import logging
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import typer

from nextscale.errors import NextscaleError, readable
from nextscale.version import __version__

DONE, FAILED, UNUSABLE, CRASHED, STOPPED, UNREAD = 0, 1, 2, 70, 130, 141
_CommandError: Any = typer.BadParameter.__mro__[2]  # typer's click, which older versions import and newer ones contain


class _Ascii(io.TextIOWrapper):
    """An ASCII stream that says latin-1: click takes one that says ASCII for a mistake and writes UTF-8 into it."""

    def __init__(self, stream: io.TextIOWrapper, errors: str) -> None:
        super().__init__(stream.buffer, encoding="latin-1", errors=errors, line_buffering=stream.line_buffering)

    def write(self, text: str) -> int:
        return super().write(text.encode("ascii", self.errors or "replace").decode("ascii"))


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return readable(super().format(record))


def exit_code(app: Callable[..., Any]) -> int:
    """Run the command line. Whatever happens in it, this returns."""
    _prepare_logging()
    # A terminal that lacks a character shows "?" for it: no reason to lose what took minutes to compute.
    with _degrading("stdout", "replace"), _degrading("stderr", "backslashreplace"):
        return _exit_code(app)


def _exit_code(app: Callable[..., Any]) -> int:
    try:
        code = app(prog_name="nextscale", standalone_mode=False)  # exit codes come back as values
        code = code if isinstance(code, int) else DONE
    except SystemExit as error:  # of completion, and of typer where nobody reads our output
        code = UNREAD if _unread(error.__context__) else error.code if isinstance(error.code, int) else FAILED
    except KeyboardInterrupt:
        code = STOPPED
    except Exception as error:
        code = _explain(error)
    if code == STOPPED:
        _say("stopped")
    return _flushed(code)


def _explain(error: Exception) -> int:
    if isinstance(error, NextscaleError):
        _say(f"error: {error}")
        return UNUSABLE
    if isinstance(error, typer.Abort):
        return STOPPED
    if isinstance(error, _CommandError):
        return _explain_usage(error)
    if _unread(error):
        return UNREAD
    if _out_of_memory(error):
        _say(f"error: out of memory: {str(error).partition(os.linesep)[0]}")
        return FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(f"error: {os.strerror(error.errno)}" + (f": {error.filename}" if error.filename else ""))
        return FAILED
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    _say(f"error: something went wrong inside nextscale ({readable(what)}); {_keep(error)}; please report it")
    return CRASHED


def _explain_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return UNUSABLE
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" See `{context.command_path} --help`."
    message = error.format_message()
    _say(f"error: {message}{'' if message.endswith(('.', '?', ')')) else '.'}{hint}")
    return UNUSABLE


def _keep(error: Exception) -> str:
    """Write the traceback and say where. A file that only its owner may read, for it quotes the command line."""
    torch = sys.modules.get("torch")
    lines = [
        f"nextscale {__version__}, python {platform.python_version()} on {platform.platform()}, "
        f"torch {getattr(torch, '__version__', 'not loaded')}",
        f"arguments: {sys.argv[1:]!r}",
        "".join(traceback.format_exception(error)),
    ]
    name = None
    try:
        handle, name = tempfile.mkstemp(prefix="nextscale-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(lines))
    except OSError as reason:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return f"the details could not be written ({reason.strerror})"
    return f"the details are in {name}"


def _out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    on_host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return on_device or on_host


def _unread(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


@contextlib.contextmanager
def _degrading(name: str, errors: str) -> Iterator[None]:
    """Let a standard stream write something else for what its encoding lacks."""
    stream = getattr(sys, name)
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    if codecs.lookup(stream.encoding).name != "ascii":
        stream.reconfigure(errors=errors)
        yield
        return
    stream.flush()
    plain = _Ascii(stream, errors)
    setattr(sys, name, plain)
    try:
        yield
    finally:
        setattr(sys, name, stream)
        with contextlib.suppress(OSError):
            plain.detach()  # or the stream would be closed with it


def _prepare_logging() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        typer.echo(readable(line), err=True)


def _flushed(code: int) -> int:
    """Flush the output now, as Python would complain of it at its very end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if not code and not _unread(error):
            _say(f"error: cannot write the output: {error.strerror}")
        code = code or (UNREAD if _unread(error) else FAILED)
        with contextlib.suppress(OSError, ValueError):
            out = sys.stdout.fileno()
            os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return code
