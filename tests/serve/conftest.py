"""Live servers: a small model that takes class numbers, the embedded one, and an engine of scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nextscale.pipeline import Pipeline
from nextscale.serve.served_model import ServedModel

if TYPE_CHECKING:  # it needs the extra, and the engine's tests do not
    from live_server import Live

FAST = "truncate:5"  # half a second for an image of 512 x 512, and less for smaller ones


@pytest.fixture(scope="session")
def embedded() -> Pipeline:
    return Pipeline.from_pretrained()


@pytest.fixture(scope="session")
def live(embedded: Pipeline) -> Iterator[Live]:
    """The embedded model under two names, quick and plain."""
    from live_server import served

    with served([ServedModel(embedded, "clipart", FAST), ServedModel(embedded, "plain", "none")]) as live:
        yield live


@pytest.fixture(scope="session")
def small(var: Pipeline) -> Iterator[Live]:
    """A model whose images take milliseconds; its prompts are class numbers."""
    from live_server import served

    with served([ServedModel(var, "small", "none")]) as live:
        yield live


@pytest.fixture
def scripted() -> Iterator[Live]:
    from live_server import ScriptedEngine, running

    with running(ScriptedEngine()) as live:
        yield live
