"""Progress bars on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(text: str, total: int, show: bool | None, data: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar. `show=None`: only on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:.2f}/s")

    sizes = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if data else (MofNCompleteColumn(), RateColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *sizes, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda step: progress.advance(task, step)
