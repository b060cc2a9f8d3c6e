from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nextscale.pipeline import Pipeline
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var

DATA = Path(__file__).parent / "data"
# Recordings that are too many for the repository lie beside it on the machines of its authors.
SHARED = Path(os.environ.get("NEXTSCALE_SHARED", Path(__file__).parents[2] / "shared"))
BUNDLED = sorted(p.parent for p in DATA.glob("**/config.json"))
MORE = sorted(p.parent for p in SHARED.glob("goldens/*/*/config.json"))
MORE += sorted(
    Path(p).parent
    for root in os.environ.get("NEXTSCALE_CASES", "").split(":")
    if root
    for p in Path(root).glob("**/config.json")
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Where everything was installed on purpose, a test that is skipped has failed."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("NEXTSCALE_NO_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr[2]}"


def embeds(*lengths: int, seed: int = 0, dim: int = 128) -> list[torch.Tensor]:
    """Text features of made-up prompts."""
    generator = torch.Generator().manual_seed(1000 + seed)  # not the numbers of the tiny models
    return [torch.randn(n, dim, generator=generator) for n in lengths]


@pytest.fixture(scope="session")
def var() -> Pipeline:
    return tiny_var()


@pytest.fixture(scope="session")
def infinity() -> Pipeline:
    return tiny_infinity()


@pytest.fixture(scope="session")
def patchified() -> Pipeline:
    return tiny_infinity(patchify=True)


@pytest.fixture(scope="session")
def hart() -> Pipeline:
    return tiny_hart()


@pytest.fixture(params=["var", "infinity", "patchified", "hart"])
def any_pipe(request: pytest.FixtureRequest) -> Pipeline:
    return request.getfixturevalue(request.param)


def ask(pipe: Pipeline, images: int = 1, first: int = 0, **options):
    """A call whose i-th image is always the same prompt, on any model; the seeds have no close decision."""
    which = range(first, first + images)
    options.setdefault("seed", [139 + i for i in which])
    if pipe.backbone.prompts == "label":
        return pipe([i % 10 for i in which], **options)
    if pipe.backbone.family == "infinity":
        options.setdefault("pixel_budget", "0.06M")
    return pipe(prompt_embeds=[embeds(3 + i, seed=i)[0] for i in which], **options)


def same_tokens(a, b) -> bool:
    return len(a.tokens) == len(b.tokens) and all(torch.equal(x, y) for x, y in zip(a.tokens, b.tokens, strict=True))
