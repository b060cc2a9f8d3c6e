"""The command line as a user meets it: files, exit codes, one sentence on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support import files
from support.commands import run
from support.files import CASE_2B, VAR_CASE
from support.pipelines import DATA


@pytest.fixture(scope="module")
def var_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    files.flat(folder, VAR_CASE, "mine.pth")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    return folder


def test_generate(var_files: Path, tmp_path: Path) -> None:
    options = ("--weights", var_files / "mine.pth", "--seed", 3, "--device", "cpu")
    done = run("generate", "4", *options, "--out", tmp_path / "a" / "one.png", "--trace", tmp_path / "t.json")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    image = Image.open(tmp_path / "a" / "one.png")
    assert image.size == (64, 64)
    assert json.loads((tmp_path / "t.json").read_text())["images"][0]["label"] == 4
    done = run("generate", "4", *options, "--out", tmp_path / "two.png", "--images", 2, "--quiet")
    assert done.stdout == ""
    assert Image.open(tmp_path / "two-0.png").tobytes() == image.tobytes()
    assert Image.open(tmp_path / "two-1.png").tobytes() != image.tobytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "t.json", "two-0.png", "two-1.png"]


def test_convert_then_generate(var_files: Path, tmp_path: Path, monkeypatch) -> None:
    done = run("convert", var_files / "mine.pth", tmp_path / "converted", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "mine, bfloat16" in done.stdout
    monkeypatch.chdir(tmp_path)
    done = run("generate", "0", "--weights", tmp_path / "converted", "--out", "x.webp")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.webp").exists()


def test_generate_with_a_method(var_files: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    options = ("--weights", var_files / "mine.pth", "--out", tmp_path / "a.png", "--trace", trace)
    done = run(
        "generate", "4", *options, "--method", "nova", "--preset", "paper", "--set", "t_est=2", "--set", "probe=lens"
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(trace.read_text())
    assert output["method"]["name"] == "nova"
    assert output["method"]["fields"]["t_est"] == 2
    assert output["method"]["fields"]["probe"] == "lens"
    assert "nova: " in done.stdout
    assert "alpha = 0.5" in run("methods").stdout


def test_models_and_env() -> None:
    listed = run("models").stdout
    for name in ("var-d16", "var-d36", "infinity-125m", "infinity-2b", "infinity-8b", "infinity-8b-512"):
        assert name in listed
    assert "infinity_vae_d56_f8_14_patchify.pth" in listed
    output = run("env").stdout
    assert all(word in output for word in ("torch", "devices", "cpu", "attention"))


def test_verify_exit_codes(tmp_path: Path) -> None:
    case = DATA / "infinity_like_8b"
    assert run("verify", case).returncode == 0
    assert run("verify", case, "--mutate").returncode == 1
    done = run("verify", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path} is no recorded case: it has no config.json\n"


def test_bad_input_is_one_sentence_and_exit_code_2(var_files: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = ("--weights", var_files / "mine.pth")
    cut = tmp_path / "cut.pth"
    cut.write_bytes((var_files / "mine.pth").read_bytes()[:9999])
    shards = files.shards(tmp_path / "shards", CASE_2B)
    (shards / "model-00003-of-00003.safetensors").unlink()
    before = sorted(tmp_path.rglob("*"))
    for words, args in {
        "names nothing that this model can draw": ("4x7",),
        "unknown runtime 'fast'; allowed: eager, compiled, graphs": ("a fox", "--runtime", "fast"),
        "unknown model 'var-d15'; allowed: clipart, var-d16": ("4", "--model", "var-d15"),
        "from 0 to 11": ("12", *weights),
        "class number, not the text 'fox'": ("fox", *weights),
        "64x64 only": ("4", *weights, "--aspect-ratio", 1.5),
        "damaged or incomplete": ("4", "--weights", cut),
        "lacks 1 of its shards": ("a fox", "--weights", shards),
        "holds a VQ tokenizer": ("4", "--weights", var_files / "vae_ch160v4096z32.pth"),
        "not var-d20": ("4", *weights, "--model", "var-d20"),
        "top_p must lie in": ("4", *weights, "--top-p", 3),
        "sees no CUDA device": ("4", *weights, "--device", "cuda"),
        "cannot write 'x.txt'": ("4", *weights, "--out", "x.txt"),
        "unknown method 'magic'; allowed: none, auto, nova": ("4", *weights, "--method", "magic"),
        "nova has no field 'beta'": ("4", *weights, "--method", "nova", "--set", "beta=1"),
        "alpha must lie in": ("4", *weights, "--method", "nova", "--set", "alpha=-1"),
        "not of the form field=value": ("4", *weights, "--method", "nova", "--set", "alpha"),
        "needs a schedule of at least 8": ("4", *weights, "--method", "nova", "--set", "t_est=6"),
        "is a folder": ("4", *weights, "--trace", "."),
        "cannot write": ("4", *weights, "--trace", "/proc/nowhere/t.json"),
        "this torch cannot use it": ("4", *weights, "--device", "xpu"),
        "holds no numbers": ("4", *weights, "--device", "meta"),
        "need --method": ("4", *weights, "--set", "alpha=1"),
    }.items():
        if words == "sees no CUDA device" and torch.cuda.is_available():
            continue
        done = run("generate", *args)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert run("convert", cut, tmp_path / "out").returncode == 2
    assert sorted(tmp_path.rglob("*")) == before, "nothing half-written stays behind"
