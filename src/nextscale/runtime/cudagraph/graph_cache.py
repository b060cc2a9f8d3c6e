"""What was captured for one shape of call: graphs by what decides the code of a scale, and what each leaves behind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from nextscale.engine.rows import Rows
from nextscale.runtime.base import ScaleOutput
from nextscale.runtime.cudagraph.readback import HostReadback, SelectionRecord
from nextscale.runtime.cudagraph.static_buffers import StaticBuffers


@dataclass(frozen=True)
class StaticOutputs:
    """Where a scale writes. Graphs share memory: `output` and `selections` hold until another one is replayed."""

    output: ScaleOutput
    selections: SelectionRecord
    readback: HostReadback
    memory: dict[Hashable, Any]  # of the policy
    memory_layout: int  # where that lies
    uniform_length: list[bool]  # per layer: the rows of its KV cache are still equally long


@dataclass(frozen=True)
class CapturedScale:
    graph: Any  # like `GraphSegments`
    outputs: StaticOutputs


@dataclass(frozen=True)
class GraphKey:
    """What decides the code of a scale."""

    scale: int
    watched: bool
    rows: Rows
    has_inactive_rows: bool
    variant: Hashable
    needs: frozenset[str]
    memory_layout: int
    uploads: tuple[str, ...]
    # Per layer, tokens that its KV cache holds at most, and whether rows are equally long. None: only the device knows,
    # for every layer prunes tokens, or some rows are inactive.
    kv_lengths: tuple[tuple[int, bool], ...] | None


@dataclass
class CallGraphs:
    """The graphs of one shape of call, and the buffers that they read and write."""

    buffers: StaticBuffers
    conditioning: tuple[Any, Any]  # a graph, and what it computes from the inputs
    scales: dict[GraphKey, CapturedScale] = field(default_factory=dict)
