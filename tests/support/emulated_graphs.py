"""CUDA graphs without a GPU: the same operations on the same static buffers, on any device."""

from __future__ import annotations

from nextscale.runtime.cudagraph.executor import Graphs


class EmulatedGraph:
    """What a CUDA graph does, on any device: the same operations on the same places, results where they were."""

    def __init__(self, run, program) -> None:
        self.run, self.program, self.made = run, program, run()
        self.policy = run.__closure__[[*run.__code__.co_freevars].index("call")].cell_contents.policy
        program.go_back()  # capturing computes nothing

    def replay(self) -> None:
        # The call that recorded has let go of its memory; a real graph still knows the places.
        self.policy.memory, self.policy.uploads = self.program.memory, self.program.uploads
        old, new = self.made, self.run()
        for name in ("logits", "raw", "hidden"):
            getattr(old.output, name).copy_(getattr(new.output, name))
        if new.chosen.masks is not None:
            old.chosen.masks.copy_(new.chosen.masks)
        self.program.features.copy_(new.output.features)

    def wait(self) -> None:
        pass


class EmulatedGraphs(Graphs):
    """Graphs without a GPU, so that the fixed places can be tested anywhere."""

    text_slots = (8,)  # the tests' prompts are short

    def __init__(self) -> None:
        super().__init__()
        self.recorded = 0

    def record_state(self, call, program):
        def run():
            return call.backbone.prepare(program.inputs, call.schedule)

        state = run()

        class Begin:
            def replay(self) -> None:
                for place, new in zip(state.tensors(), run().tensors(), strict=True):
                    place.copy_(new)

        return Begin(), state

    def record(self, run, program):
        self.recorded += 1
        again = EmulatedGraph(run, program)
        return again, again.made
