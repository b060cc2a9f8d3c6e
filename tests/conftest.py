from __future__ import annotations

import os

import pytest

from nextscale.pipeline import Pipeline
from nextscale.testing import tiny_hart, tiny_infinity, tiny_var


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Where everything was installed on purpose, a test that is skipped has failed."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("NEXTSCALE_NO_SKIPS"):
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr[2]}"


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
