"""A few of the hostile requests that `python tests/serve/hostile_requests.py` makes a thousand of."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="needs pip install 'nextscale[serve]'")

from hostile_requests import KINDS, attack_server
from live_server import Live


def test_hostile_requests(small: Live) -> None:
    report = attack_server(("127.0.0.1", small.port), 6 * len(KINDS), held=10)
    assert not report.problems, "\n".join(report.lines())
    assert {200, 400, 404, 405, 413, 415} <= {verdict.status for verdict in report.verdicts}
    assert small.wait_for(lambda: not small.engine.running and not small.engine.waiting)
    assert small.wait_for(lambda: not small.server.server_state.connections, 90)
