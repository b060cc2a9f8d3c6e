"""`nextscale serve --replicas`: how it ends, and what it says instead of a start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from processes import descendants, is_running, titled, wait_for


def test_a_signal_ends_it_while_models_are_loaded() -> None:
    command = [sys.executable, "-u", "-m", "nextscale", "serve", "--replicas", "1", "--port", "0", "--grace", "60"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for(lambda: descendants(process.pid) & set(titled("ray::ServeReplica")), 90), "it begins to load"
        children = descendants(process.pid)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - begun < 20
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "ready at" not in out
    assert out.endswith("stopped while loading\n")
    replicas = children & set(titled("ray::ServeReplica"))
    assert wait_for(lambda: not any(map(is_running, replicas)), 20), "nobody goes on loading"
