"""What a worker takes of a cluster, and how many workers it has room for."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nextscale.errors import NextscaleError

CPU, GPU = "CPU", "GPU"
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Placement:
    """Where workers run, as the command line names it."""

    address: str = "local"  # of the cluster; "local": one that is started on this machine
    replicas: int | None = None  # None: as many as there is room for
    resources: tuple[tuple[str, float], ...] = ()  # of each, besides a GPU if the cluster has any, or else a core

    @classmethod
    def read(cls, address: str | None, replicas: int | None, resources: str | None) -> Placement:
        require_ray()
        return cls(read_address(address), replicas, read_resources(resources))

    def needs(self, device: str | None, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """What each worker takes, on a device or on the best that the nodes of the cluster have."""
        on_gpu = any(node.get(GPU, 0) >= 1 for node in nodes) if device is None else device.startswith("cuda")
        return {GPU if on_gpu else CPU: 1.0, **dict(self.resources)}

    def room(self, needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
        """How many workers to start: a worker is on one node, whatever others have left."""
        if self.replicas is not None:
            return self.replicas
        found = sum(min(int(node.get(name, 0) / number) for name, number in needs.items()) for node in nodes)
        if not found:
            lacking = ", ".join(f"{number:g} {name}" for name, number in needs.items())
            there = ", ".join(f"{max(node.get(name, 0) for node in nodes):g} {name}" for name in needs)
            raise NextscaleError(
                f"a worker needs {lacking}, and a node has {there} at most; --replicas waits for nodes that are to come"
            )
        return found


def require_ray(what: str = "--workers ray") -> None:
    if importlib.util.find_spec("ray") is None:
        raise NextscaleError(f"{what} needs ray: pip install 'nextscale[ray]'")


def read_address(text: str | None) -> str:
    """Read the address of a cluster, and see whether somebody listens there: Ray itself would wait for minutes."""
    if text in (None, "local", "auto"):
        return text or "local"
    read = re.fullmatch(r"(\[?[\w.:-]+?\]?):(\d{1,5})", text or "", re.ASCII)
    if read is None:
        raise NextscaleError(f"--address {text!r} is no address of a cluster; allowed: auto, local, HOST:PORT")
    try:
        socket.create_connection((read[1].strip("[]"), int(read[2])), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NextscaleError(f"no cluster can be reached at --address {text}: {reason}") from None
    return text or ""


def read_resources(text: str | None) -> tuple[tuple[str, float], ...]:
    """Read NAME=NUMBER,..."""
    found: dict[str, float] = {}
    for part in () if text is None else text.split(","):
        read = re.fullmatch(r"\s*([A-Za-z_][\w:.-]*)\s*=\s*(\d{1,6}(?:\.\d{1,4})?)\s*", part, re.ASCII)
        if read is None or not float(read[2]) or read[1] in found:
            raise NextscaleError(f"--resources {text!r} is not a list of what a worker takes, such as GPU=1 or CPU=4")
        if float(read[2]) > 1 and not float(read[2]).is_integer():
            raise NextscaleError(f"--resources {text!r}: more than 1 of a resource must be a whole number")
        found[read[1]] = float(read[2])
    return tuple(found.items())


def as_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """The needs as Ray's arguments."""
    named = {"num_cpus": needs.get(CPU, 0), "num_gpus": needs.get(GPU, 0)}
    return {**named, "resources": {name: n for name, n in needs.items() if name not in (CPU, GPU)}}
