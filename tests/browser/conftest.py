"""A real browser and real servers with the embedded model: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from browsing import KEY, Opener

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
START = 120  # seconds that a server may take until it is ready, on a busy machine


def chromium() -> str:
    """The browser's program; the test is skipped where there is none."""
    given = os.environ.get("NEXTSCALE_CHROMIUM")
    found = given or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium: install Debian's package, or name the program in NEXTSCALE_CHROMIUM")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make test-browser installs it")
    program = chromium()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., str]]:
    """Start `nextscale serve` with options and return its address."""
    pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
    pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> str:
        command = [sys.executable, "-u", "-m", "nextscale", "serve", "--port", "0", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        return wait_until_ready(process)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[str]) -> str:
    """The address in "ready at ADDRESS"; what else the server says is kept for the message of a failure."""
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:  # to the end, or the server would wait for a reader some day
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get(timeout=START)) is not None:
        said.append(line)
        if "ready at http" in line:
            return line.split("ready at ")[1].strip()
    raise AssertionError("the server ended: " + "".join(said))


@pytest.fixture(scope="session")
def server(start_server: Callable[..., str]) -> str:
    return start_server()


@pytest.fixture(scope="session")
def small_server(start_server: Callable[..., str]) -> str:
    """One that asks for a key and in which a single image may wait."""
    return start_server("--api-key", KEY, "--max-queue", "1")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    opener = Opener(browser)
    yield opener
    opener.close()
