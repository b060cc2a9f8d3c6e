from __future__ import annotations

import torch

from nextscale.io import devices


def test_a_container_has_no_more_memory_than_it_may_take(tmp_path, monkeypatch) -> None:
    free, half, odd = (tmp_path / name for name in ("free", "half", "odd"))
    whole = devices.total_memory.__wrapped__(torch.device("cpu"))
    half.write_text(f"{whole // 2}\n")
    free.write_text("max\n")
    for paths, expected in (([free, odd], whole), ([odd, half], whole // 2)):
        monkeypatch.setattr(devices, "CGROUP_LIMITS", [str(path) for path in paths])
        assert devices.total_memory.__wrapped__(torch.device("cpu")) == expected
