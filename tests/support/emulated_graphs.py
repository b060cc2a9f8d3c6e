"""CUDA graphs without a GPU: the same operations on the same static buffers, on any device."""

from __future__ import annotations

import copy

from nextscale.runtime.cudagraph.executor import CUDAGraphExecutor
from nextscale.runtime.cudagraph.graph_cache import CapturedScale
from nextscale.runtime.cudagraph.recorder import CUDARecorder


class EmulatedGraph:
    """Runs a scale again where it ran before, and leaves the results there."""

    def __init__(self, run) -> None:
        self.run, self.outputs = run, run()
        run.buffers.rollback()  # capturing computes nothing

    def replay(self) -> None:
        # The call that was captured has let go of its memory; a real graph still knows the addresses.
        policy, buffers = self.run.call.policy, self.run.buffers
        policy.memory, policy.uploads = buffers.memory, buffers.uploads
        old, new = self.outputs, self.run()
        for name in ("logits", "raw", "hidden"):
            getattr(old.output, name).copy_(getattr(new.output, name))
        if new.selections.masks is not None:
            old.selections.masks.copy_(new.selections.masks)
        buffers.features.copy_(new.output.features)

    def wait(self) -> None:
        pass


class EmulatedConditioning:
    def __init__(self, run) -> None:
        self.run, self.cond = run, run()

    def replay(self) -> None:
        for old, new in zip(self.cond.tensors(), self.run().tensors(), strict=True):
            old.copy_(new)


class EmulatedRecorder(CUDARecorder):
    def capture_conditioning(self, call, buffers):
        graph = EmulatedConditioning(lambda: call.backbone.prepare(buffers.inputs, call.schedule))
        return graph, graph.cond

    def capture_scale(self, run):
        graph = EmulatedGraph(run)
        return CapturedScale(graph, graph.outputs)


class EmulatedGraphs(CUDAGraphExecutor):
    text_buckets = (8,)  # the tests' prompts are short

    def __init__(self) -> None:
        super().__init__()
        self.recorder = EmulatedRecorder()


def emulated(pipe):
    """The same model with emulated graphs."""
    other = copy.copy(pipe)
    other.executor = EmulatedGraphs()
    return other
