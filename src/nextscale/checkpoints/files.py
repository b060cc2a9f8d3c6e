"""Tensor files as published: flat and training `.pth` pickles, safetensors files and sharded folders.

Files are mapped, not read: chunks of tensors are yielded, and the pages of a chunk leave memory with it.
So converting a checkpoint never holds it twice.
"""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nextscale.checkpoints.paths import present
from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json

CHUNK_BYTES = 256 * 2**20
SHARD_INDEX = "model.safetensors.index.json"
FOLDER_WEIGHTS = (
    "ema_model.bin",
    SHARD_INDEX,
    "model.safetensors",
    "pytorch_model.bin",
)  # what a folder of weights may hold
FILE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")

# Where a `.pth` file keeps its state dicts; the empty path is a flat one.
_NESTED = (("trainer", "var_wo_ddp"), ("trainer", "vae_local"), ("trainer", "gpt_fsdp"), ("vae",), ())


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str = ""  # of a tensor that cannot be read as it is stored

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateFile(ABC):
    """One state dict inside a file or folder."""

    mapped = True  # tensors are views of the file, and one of them keeps all pages of its chunk in memory

    def __init__(self, path: Path, infos: dict[str, TensorInfo]) -> None:
        self.path, self.infos = path, infos

    @property
    def files(self) -> tuple[Path, ...]:
        """The files on disk."""
        return (self.path,)

    def file_of(self, key: str) -> Path:
        """The file that stores a tensor."""
        return self.path

    @abstractmethod
    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors, mapped from the file."""

    def chunks(self, keys: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Yield all `keys`, a chunk at a time."""
        chunk: list[str] = []
        size = 0
        for key in keys:
            if chunk and size + self.infos[key].nbytes > CHUNK_BYTES:
                yield self.tensors(chunk)
                chunk, size = [], 0
            chunk.append(key)
            size += self.infos[key].nbytes
        if chunk:
            yield self.tensors(chunk)


class PickleState(StateFile):
    def __init__(self, path: Path, nested: tuple[str, ...], state: Mapping[str, Tensor]) -> None:
        self.nested = nested
        tensors = {key: t for key, t in state.items() if isinstance(t, Tensor)}
        if odd := [key for key in tensors if not isinstance(key, str)]:
            raise NextscaleError(f"{path} names a tensor {repr(odd[0])[:40]}, but names are texts")
        super().__init__(
            path,
            {key: TensorInfo(() if t.is_nested else tuple(t.shape), t.dtype, _form(t)) for key, t in tensors.items()},
        )

    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        state = _inside(load_pickle(self.path), self.nested)
        return {key: state[key] for key in keys}


def _form(tensor: Tensor) -> str:
    """Why the numbers cannot be used as they are stored; empty: they can."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "sparse"
    if tensor.is_meta:
        return "meta, without numbers"
    # A few bytes may claim to be a tensor of any size.
    return "repeated numbers" if tensor.nbytes > tensor.untyped_storage().nbytes() else ""


class SafetensorsState(StateFile):
    def __init__(self, path: Path, shards: Mapping[str, Path]) -> None:
        self.shards = dict(shards)  # key -> file
        infos: dict[str, TensorInfo] = {}
        for file in dict.fromkeys(self.shards.values()):
            with _open_safetensors(file) as f:
                for key in f.keys():  # noqa: SIM118 (not a dict)
                    view = f.get_slice(key)
                    dtype = str(view.get_dtype())
                    if dtype not in _DTYPES:
                        raise NextscaleError(f"{file} stores {key!r} as {dtype}, which is not known here")
                    infos[key] = TensorInfo(tuple(view.get_shape()), _DTYPES[dtype])
        missing = [key for key in self.shards if key not in infos]
        if missing:
            raise NextscaleError(
                f"{self.shards[missing[0]]} lacks the tensor {missing[0]!r} that the index of {path} places in it"
            )
        super().__init__(path, {key: infos[key] for key in self.shards})

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(self.shards.values()))

    def file_of(self, key: str) -> Path:
        return self.shards[key]

    def tensors(self, keys: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(self.shards[key] for key in keys):
            with _open_safetensors(file) as f:
                found.update({key: f.get_tensor(key) for key in keys if self.shards[key] == file})
        return found


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_states(path: Path) -> list[StateFile]:
    """The state dicts in a file, or the one that a sharded folder holds."""
    if not present(path):
        raise NextscaleError(f"{path} does not exist")
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():  # a pipe would be waited for
        raise NextscaleError(f"{path} is not a file")
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as f:
            keys = list(f.keys())
        return [SafetensorsState(path, dict.fromkeys(keys, path))]
    if path.suffix not in FILE_SUFFIXES:
        raise NextscaleError(f"{path} is not a checkpoint file; allowed: {choices(FILE_SUFFIXES)}, or a sharded folder")
    content = load_pickle(path)
    states: list[StateFile] = []
    for nested in _NESTED:
        state = _inside(content, nested)
        if isinstance(state, Mapping) and any(isinstance(v, Tensor) for v in state.values()):
            states.append(PickleState(path, nested, state))
    if not states:
        raise NextscaleError(
            f"{path} holds no state dict; expected tensors at the top level or under "
            f"{choices('.'.join(n) for n in _NESTED if n)}"
        )
    return states


def load_pickle(path: Path) -> Any:
    """A `.pth` file, mapped. Only tensors and plain containers: code in a pickle is refused, never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about other pickle protocols: an error says it better
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used with files saved with" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise _has_code(path, found.group(1)) from None
        _look_for_code(path)
        raise NextscaleError(f"{path} is not a readable checkpoint: the file is damaged or incomplete") from None
    except PermissionError:
        raise NextscaleError(f"{path} may not be read by this user") from None
    except Exception:  # whatever the unpickler stumbles over in a damaged file
        _look_for_code(path)
        raise NextscaleError(f"{path} is not a readable checkpoint: the file is damaged or incomplete") from None


def _has_code(path: Path, what: str) -> NextscaleError:
    return NextscaleError(
        f"{path} is a pickle with more than tensors in it ({what}); it was not run, only plain state dicts are read"
    )


def _look_for_code(path: Path) -> None:
    """Raise a better error if an unreadable bare pickle would have called functions."""
    called = []
    with contextlib.suppress(Exception):
        for opcode, argument, _ in pickletools.genops(path.read_bytes()[:CHUNK_BYTES]):
            if opcode.name in ("GLOBAL", "INST"):
                called.append(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                called.append("a function")
    if called:
        raise _has_code(path, called[0])


def _inside(content: Any, nested: tuple[str, ...]) -> Any:
    for name in nested:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise NextscaleError(f"the shard {path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise NextscaleError(f"{path} is not a readable safetensors file: {error}") from None


def holds_weights(folder: Path) -> bool:
    return any(present(folder / name) for name in FOLDER_WEIGHTS)


def _open_folder(path: Path) -> list[StateFile]:
    """Open the weights of a folder: averaged ones first, which the authors of HART run."""
    found = next((name for name in FOLDER_WEIGHTS if present(path / name)), None)
    if found is None:
        raise NextscaleError(f"{path} holds no weights; looked for {choices(FOLDER_WEIGHTS)}")
    return [_open_shards(path)] if found == SHARD_INDEX else open_states(path / found)


def _plain(name: str) -> str:
    """Check that this is a file of the same folder, and no path out of it."""
    if name != Path(name).name:
        raise ValueError(name)
    return name


def _open_shards(path: Path) -> SafetensorsState:
    index = path / SHARD_INDEX
    content = read_json(index, "readable JSON")
    try:
        shards = {key: path / _plain(name) for key, name in content["weight_map"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise NextscaleError(
            f"{index} is not a shard index: it needs a 'weight_map' of tensor names to files"
        ) from None
    missing = sorted({str(s.name) for s in shards.values() if not present(s)})
    if missing:
        raise NextscaleError(f"{path} lacks {len(missing)} of its shards: {choices(missing)}")
    return SafetensorsState(path, shards)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all plain tensors of a weights file from anywhere; code in it is never run."""
    state = open_states(path)[0]
    return state.tensors([key for key, info in state.infos.items() if not info.form])
