"""Parity with the official code, number by number."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipelines import BUNDLED, DATA, MORE
from typer.testing import CliRunner

from nextscale.cli import app
from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.models.layers import SelfAttention
from nextscale.research.verify import verify
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer
from nextscale.tokenizers.vq import VQConfig, VQTokenizer

CASE = DATA / "var_shared_adaln"
TEXT_CASE = DATA / "infinity_like_8b"


@pytest.mark.parametrize("case", BUNDLED + MORE, ids=lambda p: p.name)
def test_recorded_case(case: Path) -> None:
    report = verify(case)
    assert [f"{c.quantity}: {c.error} > {c.tolerance}, {c.first_off}" for c in report.checks if not c.ok] == []
    assert report.not_compared == []
    wanted = {"greedy.logits", "tf.logits", "vae.recon"}
    if case.parent.name == "hart":
        wanted = {"hybrid.s3.tokens"} if case.name.startswith("tokenizer") else {"greedy.logits", "greedy.diff.sample"}
    assert wanted <= {c.quantity for c in report.checks}


@pytest.mark.parametrize(
    "name",
    [
        "position",
        "level_embed.weight",
        "word_embed.weight",
        "shared_modulation.1.bias",
        "blocks.1.offset",
        "blocks.2.attn.qkv.weight",
        "blocks.2.attn.v_bias",
        "blocks.0.attn.log_scale",
        "blocks.3.mlp.fc1.bias",
        "head_modulation.1.weight",
        "head_linear.bias",
    ],
)
def test_any_changed_weight_of_var_is_noticed(name: str) -> None:
    assert not verify(CASE, mutate=name).ok


@pytest.mark.parametrize(
    "name",
    [
        "unconditional",  # the greedy run has a negative prompt, the insertion run has not
        "text_norm",
        "text_pool.query",
        "text_pool.v_bias",
        "text_proj.2.bias",
        "blocks.1.cross.kv.weight",
        "blocks.1.cross_norm.bias",
        "blocks.3.attn.proj.weight",
    ],
)
def test_any_changed_weight_of_infinity_is_noticed(name: str) -> None:
    assert not verify(TEXT_CASE, mutate=name).ok


def test_a_changed_tokenizer_is_noticed(tmp_path: Path) -> None:
    case = copy_case(CASE, tmp_path)
    state = load_file(case / "vae.safetensors")
    state["decoder.conv_out.bias"] = state["decoder.conv_out.bias"] + 0.01
    save_file(state, case / "vae.safetensors")
    wrong = {c.quantity for c in verify(case).checks if not c.ok}
    assert wrong == {"greedy.image", "sampled.image", "smooth.image", "vae.recon"}


def copy_case(case: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case, tmp_path / "case"))


def edit_config(case: Path, change) -> None:
    config = json.loads((case / "config.json").read_text())
    change(config)
    (case / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("case", "change", "names"),
    [
        (CASE, lambda c: c["runs"]["greedy"].update(temperature=2), "'temperature'"),
        (CASE, lambda c: c["runs"]["greedy"].pop("cfg"), "'cfg'"),
        (CASE, lambda c: c["transformer"].update(rope=1), "'rope'"),
        (CASE, lambda c: c["vae"].update(double_z=True), "'double_z'"),
        (CASE, lambda c: c.update(model="Switti"), "'Switti'"),
        (CASE, lambda c: c.update(runs={}), "no run"),
        (CASE, lambda c: c["runs"].update(other=c["runs"]["greedy"]), "'other.labels'"),
        (CASE, lambda c: c["transformer"].update(embed_dim=128), "shape"),
        (TEXT_CASE, lambda c: c["transformer"].update(rope2d_normalized_by_hw=1), "rope2d_normalized_by_hw = 1"),
        (TEXT_CASE, lambda c: c["runs"]["greedy"].update(cfg_list=[1.0]), "7 scales"),
        (TEXT_CASE, lambda c: c["runs"]["greedy"].update(gt_leak=2), "gt_leak = 2"),
        (TEXT_CASE, lambda c: c.update(h_div_w_template=7), "7"),
        (CASE, lambda c: c["runs"]["greedy"].update(g_seed=None), "g_seed None"),
        (CASE, lambda c: c["runs"]["greedy"].update(cfg=[1.0]), "cannot be used"),
        (CASE, lambda c: c["transformer"].update(depth="4"), "depth = .4. is not a whole number"),
        (CASE, lambda c: c["transformer"].update(patch_nums=[]), r"sides = \[\] is not a list"),
        (CASE, lambda c: c.update(model=["VAR"]), "VAR"),
        (TEXT_CASE, lambda c: c["runs"]["greedy"].update(cfg_insertion_layer=0), "cannot be used"),
    ],
)
def test_a_case_we_do_not_understand_is_refused(tmp_path: Path, case: Path, change, names: str) -> None:
    case = copy_case(case, tmp_path)
    edit_config(case, change)
    with pytest.raises(NextscaleError, match=names):
        verify(case)


def test_missing_tokens_are_no_pass(tmp_path: Path) -> None:
    case = copy_case(CASE, tmp_path)
    io = load_file(case / "io.safetensors")
    del io["sampled.tokens.3"]
    save_file(io, case / "io.safetensors")
    with pytest.raises(NextscaleError, match=r"sampled\.tokens\.3"):
        verify(case)


def test_nan_is_no_match(tmp_path: Path) -> None:
    case = copy_case(CASE, tmp_path)
    io = load_file(case / "io.safetensors")
    io["greedy.image"][0, 0, 0, 0] = torch.nan
    save_file(io, case / "io.safetensors")
    report = verify(case)
    assert [c.quantity for c in report.checks if not c.ok] == ["greedy.image"]
    assert math.isnan(next(c.error for c in report.checks if not c.ok))


def test_a_tensor_that_nothing_was_compared_with_is_no_pass(tmp_path: Path) -> None:
    case = copy_case(CASE, tmp_path)
    io = load_file(case / "io.safetensors")
    io["greedy.surprise"] = torch.zeros(1)
    save_file(io, case / "io.safetensors")
    report = verify(case)
    assert all(c.ok for c in report.checks)
    assert report.not_compared == ["greedy.surprise"]
    assert not report.ok
    edit_config(case, lambda c: c["runs"].pop("sampled"))
    assert "sampled.tokens.0" in verify(case).not_compared


def test_the_greedy_run_may_have_another_name(tmp_path: Path) -> None:
    case = copy_case(TEXT_CASE, tmp_path)
    io = load_file(case / "io.safetensors")
    save_file({k.replace("greedy.", "argmax."): v for k, v in io.items()}, case / "io.safetensors")
    edit_config(case, lambda c: c["runs"].update(argmax=c["runs"].pop("greedy")))
    assert "tf.logits" in {c.quantity for c in verify(case).checks}
    # The other run is greedy too and comes first now; its maps are not those of the pass.
    edit_config(case, lambda c: c["runs"].update(insertion=c["runs"].pop("insertion")))
    assert verify(case).ok


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    image = tmp_path / "p.png"
    result = run(app, ["verify", str(CASE), "--picture", str(image)])
    assert result.exit_code == 0
    assert "greedy.tokens" in result.output
    assert image.stat().st_size > 1000
    result = run(app, ["verify", str(CASE), "--mutate"])
    assert result.exit_code == 1
    assert "NOT EQUAL" in result.output


def test_what_the_cases_do_not_reach() -> None:
    """Numbers that no recorded model has: a map of zeros, another share of phi, a learned scale beyond its bound."""
    bits = BSQTokenizer(BSQConfig(code_dim=4, channels=32, multipliers=(1, 1)))
    scale = next(iter(Schedule.squares((2,))))
    assert not bits.quantize(torch.zeros(1, 4, 2, 2), scale).any(), "zero is no positive number"

    codes, schedule = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)), Schedule.squares((2,))
    shape = {"vocabulary": 16, "code_dim": 8, "channels": 32, "multipliers": (1, 1), "phis": 1}
    book = VQTokenizer(VQConfig(**shape, phi_ratio=0.25))
    h = codes.transpose(1, 2).unflatten(2, (2, 2))
    assert torch.allclose(book.upsample_codes(codes, scale, schedule), 0.75 * h + 0.25 * book.phi[0](h), atol=1e-6)

    attn = SelfAttention(8, 1, cosine=True)
    with torch.no_grad():
        attn.log_scale.fill_(10.0)
    q, _, _ = attn.split(torch.randn(1, 3, 3, 1, 8), None)
    assert torch.allclose(q.norm(dim=-1), torch.tensor(100.0))
