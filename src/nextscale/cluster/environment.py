"""What Ray reads from the environment, before it is imported; whatever is set already stays."""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"  # where the processes of a cluster of one machine meet
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere that nobody asked for
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its warnings are for those who write Ray
    "RAY_worker_niceness": "0",  # workers do what the command would do itself, and Ray's default is behind all others
}


def prepare() -> None:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
