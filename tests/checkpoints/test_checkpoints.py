"""Official files in, converted files out, and what is said about files that cannot be used."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import files
from support.files import CASE_2B, CASE_8B, VAR_CASE, recorded_tokens
from support.pipelines import ask

from nextscale import Pipeline
from nextscale.checkpoints import files as files_module
from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.convert import convert
from nextscale.errors import NextscaleError


def test_flat_pth_with_the_tokenizer_beside_it(tmp_path: Path) -> None:
    weights = files.flat(tmp_path, VAR_CASE, "finetuned.pth")
    files.tokenizer(tmp_path, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    pipe = Pipeline.from_pretrained(weights)
    assert recorded_tokens(VAR_CASE, pipe)
    assert pipe.spec.name == "finetuned"


def test_training_checkpoint_holds_both(tmp_path: Path) -> None:
    assert recorded_tokens(VAR_CASE, Pipeline.from_pretrained(files.training(tmp_path, VAR_CASE)))


def test_training_checkpoint_of_infinity(tmp_path: Path) -> None:
    vae = files.tokenizer(tmp_path, CASE_2B, "infinity_vae_d16.pth")
    assert recorded_tokens(CASE_2B, Pipeline.from_pretrained(files.training(tmp_path, CASE_2B), vae=vae))


@pytest.mark.parametrize("inner", [True, False])
def test_infinity_tokenizer_with_and_without_inner_names(tmp_path: Path, inner: bool) -> None:
    vae = files.tokenizer(tmp_path, CASE_2B, "some_vae.pth", inner=inner)
    pipe = Pipeline.from_pretrained(files.flat(tmp_path, CASE_2B), vae=vae)
    assert recorded_tokens(CASE_2B, pipe)


def test_sharded_folder_with_patchify(tmp_path: Path) -> None:
    folder = files.shards(tmp_path / "infinity_8b_weights", CASE_8B)
    vae = files.tokenizer(tmp_path, CASE_8B, "vae.pth")
    # A folder of that name promises the published size, and this one is tiny.
    with pytest.raises(NextscaleError, match="not infinity-8b"):
        Pipeline.from_pretrained(folder, vae=vae)
    pipe = Pipeline.from_pretrained(folder.rename(tmp_path / "mine"), vae=vae)
    assert pipe.tokenizer.config.patchify
    assert recorded_tokens(CASE_8B, pipe)


def test_single_safetensors_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_file(files.state(CASE_2B), tmp_path / "m" / "model.safetensors")
    vae = files.tokenizer(tmp_path, CASE_2B, "v.pth")
    for source in (tmp_path / "m", tmp_path / "m" / "model.safetensors"):
        assert recorded_tokens(CASE_2B, Pipeline.from_pretrained(source, vae=vae))


def test_attention_scales_of_the_other_kernel(tmp_path: Path) -> None:
    content = files.state(CASE_2B)
    content = {k: v.transpose(1, 2).contiguous() if k.endswith("1H11") else v for k, v in content.items()}
    torch.save(content, tmp_path / "m.pth")
    vae = files.tokenizer(tmp_path, CASE_2B, "v.pth")
    assert recorded_tokens(CASE_2B, Pipeline.from_pretrained(tmp_path / "m.pth", vae=vae))


def test_unchunked_blocks(tmp_path: Path) -> None:
    import re

    def flat(key: str) -> str:
        return re.sub(r"block_chunks\.(\d+)\.module\.(\d+)", lambda m: f"blocks.{int(m[1]) * 2 + int(m[2])}", key)

    torch.save({flat(k): v for k, v in files.state(CASE_2B).items()}, tmp_path / "m.pth")
    vae = files.tokenizer(tmp_path, CASE_2B, "v.pth")
    assert recorded_tokens(CASE_2B, Pipeline.from_pretrained(tmp_path / "m.pth", vae=vae))


def test_a_local_copy_of_the_official_repository_asks_which_model(tmp_path: Path) -> None:
    files.flat(tmp_path, VAR_CASE, "var_d16.pth")
    files.flat(tmp_path, VAR_CASE, "var_d20.pth")
    files.tokenizer(tmp_path, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    with pytest.raises(NextscaleError, match="several models; choose model= from var-d16, var-d20"):
        Pipeline.from_pretrained(tmp_path)
    with pytest.raises(NextscaleError, match="depth 4 and width 64, not var-d20"):
        Pipeline.from_pretrained(tmp_path, model="var-d20")


def test_chunks_lose_no_tensor(tmp_path: Path, monkeypatch) -> None:
    """The tensor at the boundary of two chunks, too; test files are smaller than one chunk of a real one."""
    size = 100_000
    monkeypatch.setattr(files_module, "CHUNK_BYTES", size)
    weights = files.flat(tmp_path, VAR_CASE)
    vae = files.tokenizer(tmp_path, VAR_CASE, "v.pth", nested=False)
    plan = pretrained.read(locate.locate(weights, None, vae, locate.Hub()))
    state, keys = plan.backbone.state, list(plan.backbone.names)
    chunks = list(state.chunks(keys))
    assert len(chunks) > 3
    assert [key for chunk in chunks for key in chunk] == keys
    assert all(len(c) == 1 or sum(t.nbytes for t in c.values()) <= size for c in chunks)
    seen: list[int] = []
    pipe = Pipeline(*plan.build(torch.float32, "cpu", seen.append), plan.spec)
    assert sum(seen) == plan.nbytes
    assert recorded_tokens(VAR_CASE, pipe)


def mapped_files() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}


def test_a_converted_file_leaves_memory(tmp_path: Path) -> None:
    """Where some tensors change their dtype, those that do not are copied too: else all of the file stays mapped."""
    weights, vae = files.flat(tmp_path, CASE_2B), files.tokenizer(tmp_path, CASE_2B, "v.pth")
    pipe = Pipeline.from_pretrained(weights, vae=vae, dtype="bfloat16")
    assert pipe.backbone.level_embed.weight.dtype == torch.float32, "one that did not change"
    assert str(weights) not in mapped_files()
    same = Pipeline.from_pretrained(weights, vae=vae)
    assert str(weights) in mapped_files()
    del same


def test_weights_are_mapped_not_copied(tmp_path: Path) -> None:
    weights = files.flat(tmp_path, VAR_CASE)
    vae = files.tokenizer(tmp_path, VAR_CASE, "v.pth", nested=False)
    pipe = Pipeline.from_pretrained(weights, vae=vae)
    mapped = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("model.pth")
    ]
    assert mapped
    del pipe


def test_half_precision_keeps_what_must_stay_float32(tmp_path: Path) -> None:
    weights, vae = files.flat(tmp_path, CASE_2B), files.tokenizer(tmp_path, CASE_2B, "v.pth")
    pipe = Pipeline.from_pretrained(weights, vae=vae, dtype="bfloat16")
    dtypes = {name: p.dtype for name, p in pipe.backbone.named_parameters()}
    assert dtypes["blocks.0.attn.qkv.weight"] == torch.bfloat16
    for name in ("blocks.0.attn.log_scale", "head_linear.weight", "level_embed.weight", "shared_modulation.1.weight"):
        assert dtypes[name] == torch.float32
    io = load_file(CASE_2B / "io.safetensors")
    text = [io["sampled.text_features"]]
    out = pipe(prompt_embeds=text, pixel_budget="0.06M", seed=0, output_type="pt")
    assert out.images.isfinite().all()
    again = Pipeline.from_pretrained(weights, vae=vae, torch_dtype=torch.bfloat16, device_map="cpu")
    assert torch.equal(out.images, again(prompt_embeds=text, pixel_budget="0.06M", seed=0, output_type="pt").images)
    moved = Pipeline.from_pretrained(weights, vae=vae).to(dtype="bfloat16")
    assert {n: p.dtype for n, p in moved.backbone.named_parameters()} == dtypes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [VAR_CASE, CASE_8B], ids=lambda c: c.name)
def test_convert_round_trip(tmp_path: Path, case: Path, dtype: str) -> None:
    weights = files.flat(tmp_path, case, "mine.pth")
    vae = files.tokenizer(tmp_path, case, "v.pth", nested=case != VAR_CASE)
    plan = pretrained.read(locate.locate(weights, None, vae, locate.Hub()))
    folder = convert(plan, tmp_path / "new" / "converted", getattr(torch, dtype))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["converted"]
    with safe_open(folder / "model.safetensors", "pt") as f:
        for key in f.keys():  # noqa: SIM118
            assert f.get_tensor(key).isfinite().all()
    pipe = Pipeline.from_pretrained(folder, dtype=dtype)
    straight = Pipeline.from_pretrained(weights, vae=vae, dtype=dtype)
    assert pipe.spec == straight.spec
    for ours, theirs in ((pipe.backbone, straight.backbone), (pipe.tokenizer, straight.tokenizer)):
        a, b = ours.state_dict(), theirs.state_dict()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
    if dtype == "float32":
        assert recorded_tokens(case, pipe)
    with pytest.raises(NextscaleError, match="exists already"):
        convert(plan, folder, torch.float32)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    plan = pretrained.read(locate.locate(files.training(tmp_path, VAR_CASE), None, None, locate.Hub()))

    def fail(step: int) -> None:
        raise OSError("disk full")

    with pytest.raises(NextscaleError, match=r"cannot write .*: disk full"):
        convert(plan, tmp_path / "out" / "c", torch.float32, fail)
    assert list((tmp_path / "out").iterdir()) == []


# Files that cannot be used


def refused(match: str, source: Path | str, **options) -> None:
    with pytest.raises(NextscaleError, match=match) as caught:
        Pipeline.from_pretrained(source, **options)
    assert "\n" not in str(caught.value)


class Evil:
    def __init__(self, folder: Path) -> None:
        self.trace = folder / "nextscale-was-here"

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_bad_files(tmp_path: Path) -> None:
    weights = files.flat(tmp_path, VAR_CASE)
    vae = files.tokenizer(tmp_path, VAR_CASE, "v.pth", nested=False)
    vae_2b = files.tokenizer(tmp_path, CASE_2B, "v2.pth")
    vae_8b = files.tokenizer(tmp_path, CASE_8B, "v8.pth")
    weights_2b = files.flat(tmp_path, CASE_2B, "m2.pth")

    refused("does not exist", tmp_path / "nothing.pth")
    refused("does not exist", "./nothing")
    refused("unknown model 'var-d17'; allowed: clipart, var-d16, ", "var-d17")
    refused("unknown model 'nonsense'; allowed", weights, model="nonsense")
    refused("contradict", "var-d16", model="var-d20")
    refused("no tokenizer, and none was found beside it; pass vae=", weights)
    refused("the tokenizer file .* does not exist", weights, vae="nowhere.pth")
    # wrong family
    refused("holds a VQ tokenizer .*, but a VAR transformer or an Infinity transformer or a HART", vae)
    refused("holds a BSQ tokenizer .*, but a VQ tokenizer", weights, vae=vae_2b)
    refused("holds a VAR transformer, but a BSQ tokenizer", weights_2b, vae=weights)
    refused("16 bits per token, which does not fit the 6 channels", weights_2b, vae=vae_8b)
    # damaged
    for name, size in (("cut.pth", 5000), ("half.pth", weights.stat().st_size // 2), ("empty.pth", 0)):
        (tmp_path / name).write_bytes(weights.read_bytes()[:size])
        refused("damaged or incomplete", tmp_path / name)
    (tmp_path / "text.pth").write_text("not a checkpoint")
    refused("damaged or incomplete", tmp_path / "text.pth")
    (tmp_path / "model.txt").write_text("x")
    refused("not a checkpoint file; allowed: .pth", tmp_path / "model.txt")
    # code
    torch.save({"model": Evil(tmp_path)}, tmp_path / "evil.pth")
    refused("more than tensors in it .posix.system.; it was not run", tmp_path / "evil.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"a": Evil(tmp_path)}, protocol=2))
    refused("more than tensors", tmp_path / "old.pth")
    assert not (tmp_path / "nextscale-was-here").exists()
    # not what it should hold
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    refused("holds no state dict", tmp_path / "none.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    refused("holds no state dict", tmp_path / "list.pth")
    torch.save({"a": torch.zeros(3)}, tmp_path / "other.pth")
    refused("a state dict of no known model", tmp_path / "other.pth")
    content = files.state(VAR_CASE)
    del content["head.bias"]
    content["blocks.0.extra"] = torch.zeros(1)
    torch.save(content, tmp_path / "incomplete.pth")
    refused(
        r"lacks 1 tensor \(head_linear.bias\), and has the unknown 1 tensor \(blocks.0.extra\)",
        tmp_path / "incomplete.pth",
        vae=vae,
    )
    content = files.state(VAR_CASE)
    content["blocks.1.ffn.fc1.bias"] = torch.zeros(7)
    torch.save(content, tmp_path / "shape.pth")
    refused(r"'blocks.1.ffn.fc1.bias' of shape \[7\], not \[256\]", tmp_path / "shape.pth", vae=vae)
    refused("dtype 'int8' is not supported; allowed: float32", weights, vae=vae, dtype="int8")
    refused("unknown device 'gpu'", weights, vae=vae, device="gpu")


def test_bad_shards(tmp_path: Path) -> None:
    vae = files.tokenizer(tmp_path, CASE_2B, "v.pth")
    folder = files.shards(tmp_path / "s", CASE_2B)
    second = folder / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    refused("model-00002-of-00003.safetensors is not a readable safetensors file", folder, vae=vae)
    second.write_bytes(struct.pack("<Q", 2**40) + whole[8:])
    refused("is not a readable safetensors file", folder, vae=vae)
    second.unlink()
    refused("lacks 1 of its shards: model-00002-of-00003.safetensors", folder, vae=vae)
    save_file({"x": torch.zeros(1)}, second)
    refused("lacks the tensor", folder, vae=vae)
    (folder / "model.safetensors.index.json").write_text("{")
    refused("index.json is not readable JSON", folder, vae=vae)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    refused("not a shard index", folder, vae=vae)
    (tmp_path / "empty").mkdir()
    refused("holds no model", tmp_path / "empty")
    config = tmp_path / "conv" / "config.json"
    config.parent.mkdir()
    config.write_text('{"format": "nextscale", "family": "var"}')
    refused("has version None; this nextscale reads 1", config.parent)
    config.write_text('{"format": "nextscale", "version": 1, "family": "var", "backbone": 3, "tokenizer": {}}')
    refused("not a config of a converted model", config.parent)
    (folder / "model.safetensors.index.json").write_bytes(b"\xff\xfe\x00")
    refused("index.json is not readable JSON", folder, vae=vae)


def test_the_tokenizer_that_fits_is_chosen(tmp_path: Path) -> None:
    weights = files.flat(tmp_path, CASE_2B, "mine.pth")
    files.tokenizer(tmp_path, CASE_8B, "infinity_vae_d56_f8_14_patchify.pth")
    files.tokenizer(tmp_path, CASE_2B, "infinity_vae_d16.pth")
    assert recorded_tokens(CASE_2B, Pipeline.from_pretrained(weights))
    (tmp_path / "infinity_vae_d16.pth").rename(tmp_path / "infinity_vae_d24.pth")
    files.tokenizer(tmp_path, CASE_8B, "infinity_vae_d32reg.pth")
    refused("none of infinity_vae_d32reg.pth, infinity_vae_d56_f8_14_patchify.pth fits", weights)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_bare_pickles_is_named(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "x.pth").write_bytes(pickle.dumps({"a": Evil(tmp_path)}, protocol=protocol))
    refused("more than tensors in it", tmp_path / "x.pth")
    assert not (tmp_path / "nextscale-was-here").exists()


def test_arguments_that_contradict_a_converted_folder(tmp_path: Path) -> None:
    plan = pretrained.read(locate.locate(files.training(tmp_path, VAR_CASE), None, None, locate.Hub()))
    folder = convert(plan, tmp_path / "c", torch.float32)
    refused("has its tokenizer inside", folder, vae="x.pth")
    refused("holds ar-ckpt-last, not var-d16", folder, model="var-d16")
    config = json.loads((folder / "config.json").read_text())
    config["backbone"]["depth"] = "4"
    (folder / "config.json").write_text(json.dumps(config))
    refused("depth = .4. is not a whole number from 1 to 256", folder)
    with pytest.raises(NextscaleError, match="cannot write"):
        convert(plan, Path("/proc/nowhere/x"), torch.float32)


def test_any_pipe_survives_a_round_trip(any_pipe, tmp_path: Path) -> None:
    """Our own state dict is what a converted file holds."""
    parts = (("backbone", any_pipe.backbone), ("tokenizer", any_pipe.tokenizer))
    content = {f"{prefix}.{k}": v.contiguous() for prefix, module in parts for k, v in module.state_dict().items()}
    family = any_pipe.backbone.family
    config = {"format": "nextscale", "version": 1, "family": family, "model": "mine", "pixel_budget": None}
    import dataclasses

    config |= {"backbone": dataclasses.asdict(any_pipe.backbone.config), "text_encoder": None}
    config |= {"tokenizer": dataclasses.asdict(any_pipe.tokenizer.config)}
    config |= {"defaults": dataclasses.asdict(any_pipe.spec.defaults)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(content, tmp_path / "model.safetensors")
    again = Pipeline.from_pretrained(tmp_path)
    a, b = ask(any_pipe), ask(again)
    assert all(torch.equal(x, y) for x, y in zip(a.tokens, b.tokens, strict=True))
