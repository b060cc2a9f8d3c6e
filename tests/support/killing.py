"""A command that is killed in the middle. It waits there for it, so no busy machine can change the place."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

# The file after the last that may be finished is whole, but not yet in its place.
CODE = """
import os, signal, sys
left, real = int(sys.argv.pop(1)), os.replace
def replace(source, target):
    global left
    if left == 0:
        os.write(1, b"here\\n")
        signal.pause()
    left -= 1
    real(source, target)
os.replace = replace
from nextscale.cli import main
main()
"""


def kill_after(files: int, args: list[str], environment: dict[str, str]) -> None:
    """Run a command of ours and kill it when it has put so many files in their places."""
    environment = {**environment, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    command = [sys.executable, "-c", CODE, str(files), *args]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    patience = threading.Timer(300, child.kill)  # a child that hangs elsewhere
    patience.start()
    said = child.stdout.readline()  # empty where it ended by itself
    patience.cancel()
    child.send_signal(signal.SIGKILL)
    errors = child.communicate()[1].decode()
    assert said == b"here\n", errors
    assert child.returncode == -signal.SIGKILL
