"""What makes CUDA graphs. Only this needs a GPU, so tests inject another recorder."""

from __future__ import annotations

from typing import Any

import torch

from nextscale.runtime.base import CallContext
from nextscale.runtime.cudagraph.capture import StaticScale
from nextscale.runtime.cudagraph.graph_cache import CapturedScale
from nextscale.runtime.cudagraph.segments import GraphSegments
from nextscale.runtime.cudagraph.static_buffers import StaticBuffers
from nextscale.runtime.cudagraph.sync_detection import require_no_sync


class CUDARecorder:
    def capture_conditioning(self, call: CallContext, buffers: StaticBuffers) -> tuple[Any, Any]:
        """Capture how the conditioning follows from the inputs. That ran before, so nothing is left to compile."""
        graph = GraphSegments(torch.cuda.graph_pool_handle())  # for itself: it stays when all others are captured anew
        torch.cuda.synchronize()
        with torch.cuda.stream(buffers.arena.stream), graph.capture():
            cond = call.backbone.prepare(buffers.inputs, call.schedule)
        torch.cuda.synchronize()
        return graph, cond

    def capture_scale(self, run: StaticScale) -> CapturedScale:
        """Capture the scale, with its features written to their buffer behind it."""
        if not type(run.call.policy).__module__.startswith("nextscale."):
            require_no_sync(run)
        buffers, arena = run.buffers, run.buffers.arena
        arena.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(arena.stream):  # compiles, measures, loads: nothing of that may be captured
            run()
        torch.cuda.current_stream().wait_stream(arena.stream)
        buffers.rollback()
        torch.cuda.synchronize()
        graph = GraphSegments(arena.scale_pool)
        arena.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(arena.stream), graph.capture():
            arena.reserve_workspace(buffers.workspace_bytes)
            outputs = run(graph)
            buffers.features.copy_(outputs.output.features)
        torch.cuda.current_stream().wait_stream(arena.stream)
        return CapturedScale(graph, outputs)
