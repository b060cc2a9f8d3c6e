"""What a worker does by itself. No cluster is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nextscale.cluster import ray_workers
from nextscale.cluster.ray_workers import DataActor, Failure, PipelineActor


class Died(BaseException):
    pass


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_whose_gpu_is_lost_dies(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """It would fail with all that is left: faster than the others do it, until all is given up."""

    def synchronize(device: Any) -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(unit: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def leave(code: int) -> None:
        raise Died

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(ray_workers.os, "_exit", leave)
    pipe = SimpleNamespace(device=torch.device("cuda"))
    rows = {"index": [0], "unit": [ray_workers.cloudpickle.dumps("a")]}
    calls = [
        lambda: DataActor(lambda: pipe, lambda pipe: fail)(rows),
        lambda: PipelineActor(lambda: pipe).do(lambda pipe: fail, 0, "a"),
    ]
    for call in calls:
        if lost:
            with pytest.raises(Died):
                call()
            continue
        found = call()
        result = found[1] if isinstance(found, tuple) else ray_workers.pickle.loads(found["result"][0])
        assert isinstance(result, Failure)
        assert result.is_ours
