"""Weights, configs and paths that are wrong, odd or hostile: one sentence each, and nothing of them is run."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import files
from support.files import CASE_2B, VAR_CASE

from nextscale import Pipeline
from nextscale.checkpoints.files import read_tensors
from nextscale.checkpoints.int8 import quantize_state
from nextscale.errors import NextscaleError

BIAS = "blocks.1.ffn.fc1.bias"


def refused(match: str, source: Path | str, **options) -> None:
    with pytest.raises(NextscaleError, match=match) as caught:
        Pipeline.from_pretrained(source, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def var_files(tmp_path_factory) -> tuple[dict[str, torch.Tensor], Path]:
    """A VAR's state dict, and its tokenizer's file."""
    return files.state(VAR_CASE), files.tokenizer(tmp_path_factory.mktemp("vae"), VAR_CASE, "v.pth", nested=False)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.long(), "stores 'blocks.1.ffn.fc1.bias' as int64, but weights are plain tensors of float32"),
        (lambda t: t > 0, "stores 'blocks.1.ffn.fc1.bias' as bool"),
        (lambda t: (100 * t).to(torch.uint8), "as uint8"),
        (lambda t: t.to(torch.int8), "as int8"),
        (lambda t: t.to(torch.complex64), "as complex64"),
        (lambda t: t.to(torch.float8_e4m3fn), "as float8_e4m3fn"),
        (lambda t: t.to_sparse(), "as sparse"),
        (quantized, "as quantized"),
        (meta_of, "as meta, without numbers"),
        (lambda t: t[:1].clone().expand(t.shape), "as repeated numbers"),
        (lambda t: t[0].clone(), r"of shape \[\], not \[256\]"),
    ],
)
def test_tensors_that_are_no_weights(tmp_path: Path, var_files, change, match: str) -> None:
    state, vae = var_files
    torch.save({**state, BIAS: change(state[BIAS])}, tmp_path / "m.pth")
    refused(rf"m.pth .*{match}", tmp_path / "m.pth", vae=vae)


def test_integers_that_nobody_reads_are_left_alone(tmp_path: Path, var_files) -> None:
    state, vae = var_files
    assert state["lvl_1L"].dtype == torch.int64
    state = {**state, "attn_bias_for_masking": torch.zeros(3, dtype=torch.bool).to_sparse()}
    torch.save(state, tmp_path / "m.pth")
    assert Pipeline.from_pretrained(tmp_path / "m.pth", vae=vae).backbone.depth == 4


def test_every_width_of_floats_is_read(tmp_path: Path, var_files) -> None:
    state, vae = var_files
    wide = {key: t.double() if t.is_floating_point() else t for key, t in state.items()}
    torch.save(wide, tmp_path / "m.pth")
    pipe = Pipeline.from_pretrained(tmp_path / "m.pth", vae=vae)
    assert torch.equal(pipe.backbone.head_linear.bias, state["head.bias"])


@pytest.mark.parametrize("name", ["I32", "U32", "F8_E8M0", "XX"])
def test_relabeled_safetensors(tmp_path: Path, name: str) -> None:
    """One tensor's numbers of 32 bits under another label."""
    state = files.state(CASE_2B)
    save_file(state, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header["head.bias"]["dtype"] == "F32"
    header["head.bias"]["dtype"] = name
    if name == "F8_E8M0":
        header["head.bias"]["shape"] = [4 * header["head.bias"]["shape"][0]]
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    vae = files.tokenizer(tmp_path, CASE_2B, "v.pth")
    word = {"I32": "int32", "U32": "uint32", "F8_E8M0": "F8_E8M0, which is not known"}.get(name)
    match = f"model.safetensors stores 'head.bias' as {word}" if word else "not a readable safetensors file"
    refused(match, tmp_path / "model.safetensors", vae=vae)


def test_the_shard_of_a_wrong_tensor_is_named(tmp_path: Path) -> None:
    folder = files.shards(tmp_path / "s", CASE_2B)
    shard = folder / "model-00002-of-00003.safetensors"
    content = load_file(shard)
    key = next(k for k in content if k.endswith("weight"))
    save_file({**content, key: content[key].int()}, shard)
    refused(
        f"model-00002-of-00003.safetensors stores '{key}' as int32",
        folder,
        vae=files.tokenizer(tmp_path, CASE_2B, "v.pth"),
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({0: torch.zeros(2)}, "names a tensor 0, but names are texts"),
        ({("a", "b"): torch.zeros(2)}, "names are texts"),
        ({"a": torch.tensor(1.0)}, "no known model"),
        ({"trainer": {"var_wo_ddp": {None: torch.zeros(1)}}}, "names a tensor None"),
        (torch.zeros(3), "holds no state dict"),
    ],
)
def test_state_dicts_with_odd_names(tmp_path: Path, content, match: str) -> None:
    torch.save(content, tmp_path / "m.pth")
    refused(match, tmp_path / "m.pth")


def test_shapes_that_describe_no_model(tmp_path: Path, var_files) -> None:
    state, vae = var_files
    for key, value, match in (
        ("pos_start", torch.tensor(1.0), "tensors of other shapes than a VAR transformer"),
        ("lvl_embed.weight", torch.zeros(3), "(no known schedule|cannot be|other shapes|can be made|not fit)"),
        ("pos_start", torch.zeros(1, 1, 0), "width = 0 is not a whole number from 1"),
    ):
        torch.save({**state, key: value}, tmp_path / "m.pth")
        refused(match, tmp_path / "m.pth", vae=vae)


# Converted folders whose config was edited


@pytest.fixture(scope="module", params=["var", "infinity", "hart"])
def converted(request, tmp_path_factory) -> tuple[Path, dict]:
    pipe = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    content = {}
    for prefix, module in (("backbone", pipe.backbone), ("tokenizer", pipe.tokenizer)):
        content |= {f"{prefix}.{key}": value.contiguous() for key, value in module.state_dict().items()}
    save_file(content, folder / "model.safetensors")
    config = {"format": "nextscale", "version": 1, "family": request.param, "model": "mine", "pixel_budget": None}
    config |= {"backbone": dataclasses.asdict(pipe.backbone.config), "text_encoder": None, "text": None}
    config |= {"tokenizer": dataclasses.asdict(pipe.tokenizer.config)}
    config |= {"defaults": dataclasses.asdict(pipe.spec.defaults)}
    return folder, config


NUMBERS = (0, -2, 1.5, True, "4", None, [], {}, 10**6, 10**30, float("nan"), float("inf"))


def test_every_number_of_a_config(converted) -> None:
    """Nonsense in any field is refused at once, in one sentence that names the field or says what does not fit."""
    folder, config = converted
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    assert Pipeline.from_pretrained(folder).spec.name == "mine"
    fields = config["backbone"] | config["tokenizer"]
    allowed = {(name, "True") for name, value in fields.items() if value is True}
    told_by_nothing = {("eps", "0"), ("phi_ratio", "0"), ("normalized", "True"), ("round_cross_attention", "True")}
    allowed |= {(name, value) for name, value in told_by_nothing if name in fields}
    taken, said = set(), []
    for part in ("backbone", "tokenizer"):
        for field in config[part]:
            for value in NUMBERS:
                path.write_text(json.dumps({**config, part: {**config[part], field: value}}))
                try:
                    Pipeline.from_pretrained(folder)
                    taken.add((field, repr(value)))
                except NextscaleError as error:
                    said.append(str(error))
    assert not [text for text in said if "\n" in text]
    assert taken == allowed, taken


@pytest.mark.parametrize(
    ("part", "field", "value", "match"),
    [
        ("backbone", "heads", -2, "heads = -2 is not a whole number from 1 to 1048576"),
        ("backbone", "heads", 5, "width = 32 cannot be divided into heads = 5"),
        ("backbone", "depth", 10**6, "depth = 1000000 is not a whole number from 1 to 256"),
        ("backbone", "depth", 200, "depth says 200, its tensors 4"),
        ("backbone", "depth", True, "depth = True is not a whole number"),
        ("backbone", "eps", float("nan"), "NaN is not JSON"),
        ("backbone", "eps", "1e-6", "eps = '1e-6' is not a number"),
        ("tokenizer", "multipliers", [], r"multipliers = \[\] is not a list of 1 to 64 whole numbers"),
        ("tokenizer", "multipliers", [1, 0.5], r"multipliers = \[1, 0.5\] is not a list"),
        ("tokenizer", "channels", 33, "(does not describe a network|divisible)"),
        ("tokenizer", "code_dim", 5, "(bits per token|codes of width)"),
        ("defaults", "top_k", "x", "top_k = 'x' cannot be a default"),
        ("defaults", "guidance_scale", None, "guidance_scale = None cannot be a default"),
        ("defaults", "temperature", float("inf"), "Infinity is not JSON"),
        ("defaults", "smooth", 1, "smooth = 1 cannot be a default"),
        ("defaults", "other", 1, "other"),
    ],
)
def test_what_is_said_of_a_config(converted, part: str, field: str, value, match: str) -> None:
    folder, config = converted
    (folder / "config.json").write_text(json.dumps({**config, part: {**config[part], field: value}}))
    refused(match, folder)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("family", "vq", "family = 'vq' is not one of var, infinity, hart"),
        ("family", ["var"], "is not one of var, infinity, hart"),
        ("pixel_budget", "2M", "pixel_budget = '2M' is not one of 0.06M"),
        ("pixel_budget", 1, "pixel_budget = 1 is not a text"),
        ("model", None, "name = None is not a text"),
        ("text_encoder", 7, "text_encoder = 7 is not a text|reads class labels"),
        ("text", {"config": {"tokens": 3}}, "it has no 'words'|reads class labels"),
        ("defaults", [1], "not a config of a converted model"),
        ("backbone", None, "not a config of a converted model"),
    ],
)
def test_what_is_said_of_the_rest_of_a_config(converted, field: str, value, match: str) -> None:
    folder, config = converted
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    refused(match, folder)


def test_sides_of_a_schedule(converted) -> None:
    folder, config = converted
    if "sides" not in config["backbone"]:
        pytest.skip("its schedule is a table")
    for sides in ([], [1, 2.5], [1, -2], [1, 10**5], [1] * 65, "123", [[1]], [True]):
        (folder / "config.json").write_text(json.dumps({**config, "backbone": {**config["backbone"], "sides": sides}}))
        refused(r"sides = .* is not a list of 1 to 64 whole numbers from 1 to 1024", folder)


def test_deeply_nested_json(tmp_path: Path, converted) -> None:
    nested = "[" * 100_000 + "]" * 100_000
    folder, config = converted
    for text in (nested, '{"format": "nextscale", "version": ' + nested + "}"):
        (folder / "config.json").write_text(text)
        refused("config.json is not readable JSON: it is nested too deeply", folder)
    deep = {**config, "version": 1, "text": {"config": {"tokens": 3}, "words": "WORDS"}}
    (folder / "config.json").write_text(json.dumps(deep).replace('"WORDS"', "[" * 500 + "]" * 500))
    refused("not a config of a converted model", folder)
    shards = files.shards(tmp_path / "s", CASE_2B)
    (shards / "model.safetensors.index.json").write_text(nested)
    refused("index.json is not readable JSON: it is nested too deeply", shards)
    hart = files.hart(tmp_path / "hart")
    (hart / "llm" / "config.json").write_text(nested)
    refused("config.json is not readable JSON: it is nested too deeply", hart)


def test_packed_weights(tmp_path: Path, infinity) -> None:
    """Our own 8 bits are read, but only with a scale for every row."""
    folder, parts = tmp_path / "m", (("backbone", infinity.backbone), ("tokenizer", infinity.tokenizer))
    folder.mkdir()
    content = quantize_state(
        {f"{p}.{k}": v.contiguous() for p, module in parts for k, v in module.state_dict().items()}
    )
    key = next(k for k, t in content.items() if t.dtype == torch.int8)
    config = {"format": "nextscale", "version": 1, "family": "infinity", "model": "mine", "pixel_budget": None}
    config |= {"backbone": dataclasses.asdict(infinity.backbone.config), "text_encoder": None, "text": None}
    config |= {"tokenizer": dataclasses.asdict(infinity.tokenizer.config)}
    config |= {"defaults": dataclasses.asdict(infinity.spec.defaults)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(content, folder / "model.safetensors")
    read = Pipeline.from_pretrained(folder).backbone.state_dict()[key.removeprefix("backbone.")]
    want = infinity.backbone.state_dict()[key.removeprefix("backbone.")]
    assert read.dtype == torch.float32
    assert (read - want).abs().max() <= want.abs().max() / 127
    save_file({**content, key + ".scale": content[key + ".scale"][:1]}, folder / "model.safetensors")
    refused(f"model.safetensors has no scale for every row of '{key}'", folder)
    save_file({**content, key + ".scale": content[key + ".scale"].long()}, folder / "model.safetensors")
    refused("no scale for every row", folder)
    del content[key + ".scale"]
    save_file(content, folder / "model.safetensors")
    refused(f"stores '{key}' as int8", folder)


# Paths


def test_paths_that_the_system_refuses(tmp_path: Path, var_files) -> None:
    weights = tmp_path / "m.pth"
    torch.save(var_files[0], weights)
    long = "x" * 300
    refused("cannot be read: File name too long", f"{long}.pth")
    refused("cannot be read: File name too long", tmp_path / long)
    refused("cannot be read: File name too long", weights, vae=f"{long}.pth")
    refused("it holds a zero byte", "zero\0byte.pth")
    refused("does not exist", "~nobody-of-this-name/m.pth")
    refused("does not exist", weights / "inside" / "a-file.pth")
    (tmp_path / "loop.pth").symlink_to(tmp_path / "loop.pth")
    refused("cannot be read: Too many levels of symbolic links", tmp_path / "loop.pth")
    os.mkfifo(tmp_path / "pipe.pth")
    refused("pipe.pth is not a file", tmp_path / "pipe.pth")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "config.json")
    refused("config.json cannot be read: it is no regular file", tmp_path / "folder")


def test_a_text_encoder_for_a_model_of_classes(tmp_path: Path, var_files) -> None:
    torch.save(var_files[0], tmp_path / "m.pth")
    refused(
        "m reads class labels, not text: leave out text_encoder=",
        tmp_path / "m.pth",
        vae=var_files[1],
        text_encoder="t5",
    )


# Code


class Calls:
    """Calls something when it is unpickled."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class SetsState:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __setstate__(self, state) -> None:
        Path(state).touch()

    def __getstate__(self):
        return str(self.mark)


def old_tar(path: Path, payload: bytes) -> None:
    """The format of torch before 0.1.10."""
    with tarfile.open(path, "w") as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def zipped(path: Path, payload: bytes, prefix: str = "m/") -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{prefix}data.pkl", payload)
        archive.writestr(f"{prefix}version", "3\n")
        archive.writestr(f"{prefix}byteorder", "little")
        archive.writestr("../../was-here", "escaped")
        archive.writestr("/tmp/../was-here", "escaped")


def legacy(path: Path, payload: bytes) -> None:
    """Of torch 0.1.10 to 1.5: a magic number, a protocol, system info, then the content."""
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    path.write_bytes(magic + pickle.dumps({"little_endian": True}, 2) + payload)


def inner(mark: Path) -> io.BytesIO:
    """A file in a file, with code in it, that the outer one asks torch to load."""
    file = io.BytesIO()
    torch.save({"a": Calls(os.system, f"touch {mark}")}, file)
    return io.BytesIO(file.getvalue())


# Each makes a file, if it is run.
PAYLOADS = {
    "os.system": lambda mark: pickle.dumps({"a": Calls(os.system, f"touch {mark}")}, 2),
    "eval": lambda mark: pickle.dumps({"a": Calls(eval, f"open({str(mark)!r}, 'w')")}, 2),
    "exec": lambda mark: pickle.dumps({"a": Calls(exec, f"open({str(mark)!r}, 'w')")}, 2),
    "open": lambda mark: pickle.dumps({"a": Calls(open, str(mark), "w")}, 2),
    "torch.save": lambda mark: pickle.dumps({"a": Calls(torch.save, 1, str(mark))}, 2),
    "torch.load": lambda mark: pickle.dumps(
        {"a": Calls(functools.partial(torch.load, weights_only=False), inner(mark))}, 2
    ),
    "getattr": lambda mark: f"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'touch {mark}'\ntR.".encode(),
    "setstate": lambda mark: pickle.dumps({"a": SetsState(mark)}, 2),
    "GLOBAL": lambda mark: f"cos\nsystem\n(S'touch {mark}'\ntR.".encode(),
    "INST": lambda mark: f"(S'touch {mark}'\nios\nsystem\n.".encode(),
    "OBJ": lambda mark: f"(cos\nsystem\nS'touch {mark}'\no.".encode(),
    "STACK_GLOBAL": lambda mark: pickle.dumps({"a": Calls(os.system, f"touch {mark}")}, 5),
}
CONTAINERS = {
    "bare": lambda path, payload: path.write_bytes(payload),
    "legacy": legacy,
    "tar": old_tar,
    "zip": zipped,
    "zip with odd folder": lambda path, payload: zipped(path, payload, "../m/"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_weights_is_never_run(tmp_path: Path, payload: str, container: str) -> None:
    path = tmp_path / "deep" / "deeper" / "m.pth"
    path.parent.mkdir(parents=True)
    CONTAINERS[container](path, PAYLOADS[payload](tmp_path / "was-here"))
    for read in (Pipeline.from_pretrained, read_tensors):
        with pytest.raises(NextscaleError, match=r"(more than tensors in it|damaged or incomplete)") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path], "code was run, or a file written outside"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_payloads_would_work(tmp_path: Path, payload: str) -> None:
    """They are dangerous to the ordinary unpickler, so the test above can fail."""
    pickle.loads(PAYLOADS[payload](tmp_path / "was-here"))
    assert (tmp_path / "was-here").exists()


def test_plain_tensors_of_any_file(tmp_path: Path) -> None:
    content = {"a": torch.arange(3.0), "n": torch.arange(2)}
    torch.save(content, tmp_path / "m.pth")
    save_file(content, tmp_path / "m.safetensors")
    for name in ("m.pth", "m.safetensors"):
        read = read_tensors(tmp_path / name)
        assert all(torch.equal(read[key], value) for key, value in content.items())
        assert read.keys() == content.keys()
