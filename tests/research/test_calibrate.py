"""Settings fitted to a model: what comes out does what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support import files
from support.files import VAR_CASE

from nextscale import NOVA, SkipVAR, SparseVAR, Taper, ToProVAR
from nextscale.errors import NextscaleError
from nextscale.methods.typical_entropies import TypicalEntropies
from nextscale.research.calibrate.shares import measure_shares
from nextscale.research.calibrate.skipvar import _fit, calibrate_skipvar
from nextscale.research.calibrate.sparsevar import calibrate_sparsevar
from nextscale.research.calibrate.taper import calibrate_taper
from nextscale.research.calibrate.toprovar import calibrate_toprovar
from nextscale.research.evaluate.ssim import ssim

LABELS = [i % 10 for i in range(64)]


def test_ssim() -> None:
    torch.manual_seed(0)
    a = torch.rand(2, 3, 40, 30) * 2 - 1
    assert torch.allclose(ssim(a, a), torch.ones(2, dtype=torch.float64))
    noisy = [ssim(a, (a + level * torch.randn_like(a)).clamp(-1, 1)).mean().item() for level in (0.05, 0.2, 1.0)]
    assert 1 > noisy[0] > noisy[1] > noisy[2] > -1
    # Two flat images: only the first factor is left, (2 m n + c) / (m^2 + n^2 + c).
    flat, other, c = torch.full((1, 3, 16, 16), 0.5), torch.full((1, 3, 16, 16), 0.25), (0.01 * 2) ** 2
    assert ssim(flat, other).item() == pytest.approx((0.25 + c) / (0.25 + 0.0625 + c), abs=1e-9)


def test_toprovar(var, tmp_path: Path) -> None:
    preset = calibrate_toprovar(var, LABELS, target=0.7)
    (tmp_path / "mine.json").write_text(json.dumps(preset))
    method = ToProVAR.preset(str(tmp_path / "mine.json"))
    assert preset["calibrated_on"] == "tiny-var"
    traced = var(LABELS[:16], seed=0, method=method).trace.to_dict()["images"]
    share = sum(i["tokens_computed"] for i in traced) / sum(i["tokens_full"] for i in traced)
    assert abs(share - 0.7) < 0.08
    started = [i["activation"]["scale"] for i in traced]
    assert sum(s is not None for s in started) > 4


def test_a_budget_below_what_one_layer_allows_is_reached(var) -> None:
    """Eq. 6 clips, so a_max may exceed 1, and beta may come from a higher quantile."""
    preset = calibrate_toprovar(var, LABELS, target=0.55)
    assert abs(preset["reached"] - 0.55) < 0.03
    assert preset["fields"]["a_max"] > 1


def test_sparsevar(var, tmp_path: Path) -> None:
    preset = calibrate_sparsevar(var, LABELS, target=0.4)
    assert [entry["block"] for entry in preset["blocks"]] == [0.25, 0.5, 0.75, 1.0]
    assert all(abs(entry["excluded"] - 0.4) < 0.1 for entry in preset["blocks"])
    assert len({entry["ssim"] for entry in preset["blocks"]}) > 1
    (tmp_path / "mine.json").write_text(json.dumps(preset))
    method = SparseVAR.preset(str(tmp_path / "mine.json"))
    assert method.block == max(preset["blocks"], key=lambda entry: entry["ssim"])["block"]
    with pytest.raises(NextscaleError, match="target must lie in"):
        calibrate_sparsevar(var, LABELS, target=1)


def test_toprovar_with_too_few_prompts(var) -> None:
    with pytest.raises(NextscaleError, match="at least 64 prompts, not 3"):
        calibrate_toprovar(var, [1, 2, 3])
    with pytest.raises(NextscaleError, match="target must lie in"):
        calibrate_toprovar(var, LABELS, target=2)
    with pytest.raises(NextscaleError, match=r"^prompt 65: a class label must be a whole number, from 0 to 9, not 10$"):
        calibrate_toprovar(var, [*LABELS, 10])


def test_skipvar(var, tmp_path: Path) -> None:
    decision = calibrate_skipvar(var, LABELS, target=0.55, at=0.6)
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(decision))
    assert sum(decision["seen"].values()) == pytest.approx(1)
    complete = var(LABELS[:32], seed=0, output_type="pt").images
    out = var(LABELS[:32], seed=0, method=SkipVAR(str(path), at=0.6), output_type="pt")
    stopped = [i["stopped_after"] for i in out.trace.to_dict()["images"]]
    left_out = sum(s is not None for s in stopped) / 32
    assert abs(left_out - (1 - decision["seen"]["left out 0"])) < 0.35
    kept = torch.tensor([s is None for s in stopped])
    assert 4 < kept.sum() < 28, "some images stop and some do not"
    score = ssim(out.images, complete, span=1.0)
    assert score[kept].mean() > score[~kept].mean() + 0.2
    assert (score[~kept] >= 0.55).float().mean() > 0.5, "those that stop are mostly those that may"


def test_taper(var, tmp_path: Path) -> None:
    """On the prompts that it was measured on, a budget is spent in the mean; images differ."""
    (tmp_path / "mine.json").write_text(json.dumps(calibrate_taper(var, LABELS)))
    typical = TypicalEntropies.read(str(tmp_path / "mine.json"))
    assert [at for at, _ in typical.scales] == [t / 8 for t in range(2, 9)]
    for budget in (0.3, 0.55):
        images = var(LABELS, seed=0, method=Taper(budget=budget, entropies=str(tmp_path / "mine.json"))).trace.to_dict()
        spent = [image["flops"] / image["flops_full"] for image in images["images"]]
        assert sum(spent) / 64 == pytest.approx(budget, rel=0.05)
        assert min(spent) < 0.95 * budget < budget < max(spent)
    likely = typical.budget_of(typical.spendings[4].ssim)
    assert Taper(quality=typical.spendings[4].ssim, entropies=str(tmp_path / "mine.json")).quality < 1
    assert likely == pytest.approx(typical.spendings[4].spent)


def test_the_fit_is_logistic_regression() -> None:
    """Against what scikit-learn's LogisticRegression finds on standardized features."""
    features = [[0.01 * (7 * i % 20), 0.03 * (i * i % 23)] for i in range(40)]
    labels = [min(int(8 * a + 2 * b), 2) for a, b in features]
    found = _fit(features, labels)
    assert found["classes"] == [0, 1, 2]
    assert np.allclose(found["coef"], [[-1.9978, -1.37849], [0.22961, 0.00121], [1.76819, 1.37728]], atol=1e-4)
    assert np.allclose(found["intercept"], [0.23177, 1.3009, -1.53268], atol=1e-4)
    assert np.allclose(found["scale"], np.std(features, axis=0))
    same = _fit([[0.5, i / 10] for i in range(10)], [1] * 10)  # one class, and a feature that never changes
    assert (same["classes"], same["coef"], same["scale"][0]) == ([1], [[0.0, 0.0]], 1.0)


def test_shares_become_a_table(var, tmp_path: Path) -> None:
    table = measure_shares(var, LABELS, SparseVAR(start_scale=0.7, tau=0.97, anchor=2))
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(table))
    entries = dict(map(tuple, table["entries"]))
    assert min(entries) == 6 / 8
    assert all(0 < share < 1 for share in entries.values())
    nova = NOVA(t_est=2, alpha=0.0, scale_linkage=False, layer_linkage=False, scale_table=str(path))
    image = var(3, seed=0, method=nova).trace.to_dict()["images"][0]
    assert [e["ratio"] for e in image["scales"][5:]] == pytest.approx([entries[t / 8] for t in (6, 7, 8)])
    for text in ("{", '{"entries": [[2, 0.5]]}', '{"entries": []}'):
        path.write_text(text)
        with pytest.raises(NextscaleError, match="not a scale table"):
            NOVA(scale_table=str(path))


def test_commands(tmp_path: Path, monkeypatch, capsys) -> None:
    import sys

    from nextscale.cli import main

    weights = files.flat(tmp_path, VAR_CASE, "mine.pth")
    files.tokenizer(tmp_path, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    prompts, out = tmp_path / "labels.txt", tmp_path / "preset.json"

    def call(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nextscale", "calibrate", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    options = ("toprovar", "--weights", weights, "--prompts", prompts, "--out", out, "--target", 0.8, "--device", "cpu")
    labels = [str(i % 12) for i in range(64)]
    prompts.write_text("1\n2\n")
    assert call(*options) == (2, "error: calibration needs at least 64 prompts, not 2\n")
    prompts.write_text("\r\n\r\n".join(["1", "a fox", *labels, "12"]))
    code, output = call(*options)
    assert code == 2
    assert output.startswith(
        f"error: {prompts}, line 3: a class label must be a whole number, from 0 to 11, not 'a fox' (1 more"
    )
    assert not out.exists()
    assert call(*options, "--skip-bad")[0] == 0
    assert ToProVAR.preset(str(out)).a_max > 0
    skipped = json.loads(out.read_text())["skipped"]
    assert skipped["count"] == 2
    assert [(e["where"], e["prompt"]) for e in skipped["prompts"]] == [
        (f"{prompts}, line 3", "a fox"),
        (f"{prompts}, line 133", "12"),
    ]
    for path in (tmp_path / "mine.pth" / "below.json", tmp_path):
        assert call("toprovar", "--prompts", prompts, "--out", path)[0] == 2
