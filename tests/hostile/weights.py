"""Files of weights that are damaged, of another kind, or meant to do harm."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hostile.sandbox import Sandbox, kind


def broken(box: Sandbox, content: bytes, model: str = "labels") -> list[str]:
    folder = box.model(model)
    (folder / "model.safetensors").write_bytes(content)
    return box.generate("--weights", str(folder), words=model == "words")


def original(box: Sandbox, model: str = "labels") -> bytes:
    return (box.models / model / "model.safetensors").read_bytes()


def header_of(content: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@kind("weights")
def cut_off(box: Sandbox) -> list[str]:
    content = original(box)
    return broken(box, content[: box.rng.randrange(len(content))])


@kind("weights")
def flipped_bits(box: Sandbox) -> list[str]:
    content = bytearray(original(box))
    for _ in range(box.rng.randint(1, 20)):
        content[box.rng.randrange(6000)] ^= 1 << box.rng.randrange(8)  # most of them in the header
    return broken(box, bytes(content))


@kind("weights")
def lengths_of_the_header(box: Sandbox) -> list[str]:
    return broken(box, box.rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + original(box)[8:])


@kind("weights")
def other_dtypes(box: Sandbox) -> list[str]:
    header, body = header_of(original(box))
    name = box.rng.choice([k for k in header if k != "__metadata__"])
    header[name]["dtype"] = box.choose("I32", "U32", "F64", "I64", "U8", "F8_E4M3", "C64", "X", "f32", "")
    return broken(box, with_header(header, body))


@kind("weights")
def all_dtypes(box: Sandbox) -> list[str]:
    header, body = header_of(original(box))
    other = box.choose("I32", "U32")
    for name in header:
        if name != "__metadata__":
            header[name]["dtype"] = other
    return broken(box, with_header(header, body))


@kind("weights")
def shapes_and_offsets(box: Sandbox) -> list[str]:
    header, body = header_of(original(box))
    name = box.rng.choice([k for k in header if k != "__metadata__"])
    part = box.choose("shape", "data_offsets")
    header[name][part] = box.rng.choice(
        ([], [0], [-1, 4], [2**62, 4], [0, 2**40], [8, 4], "x", None, [1.5], header[name][part][::-1])
    )
    return broken(box, with_header(header, body))


@kind("weights")
def tensors_missing_or_too_many(box: Sandbox) -> list[str]:
    state = load_file(box.models / "labels" / "model.safetensors")
    name = box.rng.choice(list(state))
    if box.rng.random() < 0.5:
        del state[name]
    else:
        state[name + box.choose("x", ".weight", "/../x")] = torch.zeros(3)
    folder = box.model("labels")
    save_file(state, folder / "model.safetensors")
    return box.generate("--weights", str(folder))


@kind("weights")
def shapes_that_do_not_fit(box: Sandbox) -> list[str]:
    state = load_file(box.models / "labels" / "model.safetensors")
    name = box.rng.choice(list(state))
    state[name] = box.rng.choice((state[name].flatten()[:-1].clone(), state[name][None].clone(), torch.zeros(0)))
    folder = box.model("labels")
    save_file(state, folder / "model.safetensors")
    return box.generate("--weights", str(folder))


@kind("weights")
def numbers_that_are_not_finite(box: Sandbox) -> list[str]:
    state = load_file(box.models / "labels" / "model.safetensors")
    name = box.rng.choice([k for k in state if not k.startswith("tokenizer.encoder")])
    state[name].view(-1)[box.rng.randrange(state[name].numel())] = float(box.choose("nan", "inf", "-inf", "1e38"))
    folder = box.model("labels")
    save_file(state, folder / "model.safetensors")
    return box.generate("--weights", str(folder))


@kind("weights")
def files_of_other_kinds(box: Sandbox) -> list[str]:
    suffix = box.choose(".pth", ".safetensors", ".bin", ".ckpt", ".pt", ".txt", "")
    content = box.rng.choice(
        (b"", b"x", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n", b"\x80\x05.", b"{}", b"\0" * 64, original(box))
    )
    return box.generate("--weights", box.write(f"model{suffix}", content))


def saved(box: Sandbox, content: object, **options: object) -> str:
    path = box.folder / f"model{box.choose('.pth', '.bin', '.ckpt')}"
    torch.save(content, path, **options)
    return str(path)


def official(box: Sandbox) -> dict:
    """Keys by which a VAR is recognized."""
    return {
        "class_emb.weight": torch.zeros(11, 32),
        "word_embed.weight": torch.zeros(32, 8),
        "pos_start": torch.zeros(1, 1, 32),
    }


@kind("weights")
def odd_tensors(box: Sandbox) -> list[str]:
    state = official(box)
    state[box.rng.choice(list(state))] = box.rng.choice((
        torch.zeros(2, 2).to_sparse(), torch.tensor(1.0), torch.empty(2, 2, device="meta"),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.complex64), torch.zeros(0),
        torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    ))  # fmt: skip
    return box.generate("--weights", saved(box, state))


@kind("weights")
def odd_state_dicts(box: Sandbox) -> list[str]:
    content = box.rng.choice((
        {1: torch.zeros(2)}, {None: torch.zeros(2), "class_emb.weight": torch.zeros(2)}, [], torch.zeros(3), "x",
        {"trainer": 5}, {"trainer": {"var_wo_ddp": None}}, {"vae": {"x": torch.zeros(1)}},
        {("a", "b"): torch.zeros(1)}, {**official(box), 3: torch.zeros(1)},
    ))  # fmt: skip
    return box.generate("--weights", saved(box, content))


class Harm:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def harms(marker: Path) -> list[object]:
    import builtins
    import os
    import subprocess

    touch = f"open({str(marker)!r}, 'w').close()"
    return [
        Harm(os.system, f"touch {marker}"),
        Harm(builtins.exec, touch),
        Harm(builtins.eval, touch),
        Harm(subprocess.Popen, ["touch", str(marker)]),
        Harm(builtins.open, str(marker), "w"),
        Harm(os.makedirs, str(marker)),
        Harm(builtins.__import__, "antigravity"),
    ]


@kind("weights")
def pickles_that_do_harm(box: Sandbox) -> list[str]:
    state = {**official(box), "x": box.rng.choice(harms(box.marker))}
    return box.generate("--weights", saved(box, state, _use_new_zipfile_serialization=box.rng.random() < 0.5))


@kind("weights")
def plain_pickles(box: Sandbox) -> list[str]:
    content = pickle.dumps(box.rng.choice(harms(box.marker)), protocol=box.rng.randrange(6))
    return box.generate("--weights", box.write("model.pth", content))


@kind("weights")
def pickles_inside_of_models(box: Sandbox) -> list[str]:
    """Where a tokenizer or safetensors is expected."""
    content = pickle.dumps(box.rng.choice(harms(box.marker)), protocol=2)
    if box.rng.random() < 0.5:
        return broken(box, content)
    return box.generate("--vae", box.write("vae.pth", content), "--weights", saved(box, official(box)))


@kind("weights")
def archives(box: Sandbox) -> list[str]:
    buffer = io.BytesIO()
    name = box.choose("archive/data.pkl", "../../data.pkl", "/data.pkl", "archive/data/0")
    if box.rng.random() < 0.5:
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr(name, pickle.dumps(box.rng.choice(harms(box.marker))))
    else:
        with tarfile.open(fileobj=buffer, mode="w") as file:
            file.addfile(tarfile.TarInfo(name))
    return box.generate("--weights", box.write("model.pth", buffer.getvalue()))


@kind("weights")
def indexes_of_shards(box: Sandbox) -> list[str]:
    where = box.choose("../secret.safetensors", "/etc/passwd", "missing.safetensors", "", ".", "a/b.safetensors")
    maps = ({"x": where}, {"class_emb.weight": where}, {}, [], {"x": 1}, {"x": None}, {"x": [where]})
    index = json.dumps(box.rng.choice(({"weight_map": box.rng.choice(maps)}, {}, [], {"weight_map": "x"})))
    content = box.rng.choice((index, index[:-1], "[" * 100_000))
    box.write("shards/model.safetensors.index.json", content)
    return box.generate("--weights", str(box.folder / "shards"))


@kind("weights")
def folders_without_a_model(box: Sandbox) -> list[str]:
    folder = box.folder / "folder"
    folder.mkdir()
    for name in box.rng.sample(
        ("config.json", "model.safetensors", "var_d16.pth", "llm", "tokenizer", "ema_model.bin"), 3
    ):
        (folder / name).write_bytes(b"") if box.rng.random() < 0.6 else (folder / name).mkdir()
    return box.generate("--weights", str(folder))


@kind("weights")
def conversions_of_damaged_files(box: Sandbox) -> list[str]:
    content = original(box)
    folder = box.model("labels")
    (folder / "model.safetensors").write_bytes(content[: box.rng.randrange(len(content))])
    return ["convert", str(folder), "out"]
