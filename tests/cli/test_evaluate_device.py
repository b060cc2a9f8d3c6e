"""An evaluation names the device that drew, which with workers is not the command's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nextscale.cli.evaluate import _print


def test_the_summary_names_the_device_of_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, spec=SimpleNamespace(name="infinity-2b"))
    bench = SimpleNamespace(pipe=pipe, device="cuda", batch=8, items=[], skipped=(), with_features=True)
    _print([], bench, "seconds", {})
    assert "0 images of infinity-2b on cuda, batch 8, bfloat16; " in capsys.readouterr().out
