"""What an import brings with it: loading torch takes seconds, and serving needs no research."""

from __future__ import annotations

import subprocess
import sys

import pytest

LISTED = "import sys; print(*sorted(n for n in sys.modules if n == 'torch' or n.startswith('nextscale.')))"


def loaded(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", f"{code}\n{LISTED}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import nextscale", ("torch", "nextscale.research", "nextscale.cli", "nextscale.pipeline")),
        ("import nextscale.cli", ("torch", "nextscale.research", "nextscale.pipeline")),
        ("from nextscale import Pipeline, NOVA", ("nextscale.research", "nextscale.cli")),
    ],
)
def test_an_import_brings_only_what_it_needs(code: str, absent: tuple[str, ...]) -> None:
    assert not [name for name in loaded(code) if name.startswith(absent)]
