"""Fill a model from a state dict of the official code, or of our own converted files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nextscale.checkpoints.family import count
from nextscale.checkpoints.files import StateFile
from nextscale.errors import NextscaleError, choices, first_line
from nextscale.io.devices import dtype_name

# Fields that count the modules of a list, and where these stand in a file.
_LISTS = {
    "depth": r"(?:blocks|layers)\.(\d+)\.",
    "diffusion_depth": r"residual\.blocks\.(\d+)\.",
    "multipliers": r"encoder\.down\.(\d+)\.",
    "residual_blocks": r"encoder\.down\.0\.block\.(\d+)\.",
    "phis": r"phi\.(\d+)\.",
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Progress = Callable[[int], None]  # called with the bytes of every chunk that was read


def build(
    cls: Callable[[Any], Any],
    config: Any,
    state: StateFile,
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Any:
    """Build a module from a file; `names` maps its keys to parameters, `dtype` is that of the matrix products.

    Every shape is checked before the first tensor is read.
    """
    module = outline(cls, config, state, names)
    wanted = {name: p.shape for name, p in module.named_parameters()}
    targets = {key: dtype if module.computes_in_dtype(name) else torch.float32 for key, name in names.items()}
    # Where nothing has to change, a parameter IS the mapped file (or the live tensor): no copy at all. But if some
    # tensors are converted, those that are not must leave the file too, or it would stay in memory beside them.
    copy = state.mapped and any(state.infos[key].dtype != target for key, target in targets.items())
    for chunk in state.chunks(list(names)):
        read = 0
        while chunk:  # emptied, so that its pages are gone before the next one is mapped
            key, tensor = chunk.popitem()
            name = names[key]
            _assign(module, name, tensor.view(wanted[name]).to(device, targets[key], copy=copy))
            read += state.infos[key].nbytes
            del tensor
        if progress:
            progress(read)
    return module


class Uninitialized(TorchFunctionMode):
    """A mode in which modules draw no initial numbers. On the meta device nothing comes of them, and to pretend to draw
    them torch loads its compiler, which takes longer than all of our own start."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def outline(cls: Callable[[Any], Any], config: Any, state: StateFile, names: Mapping[str, str]) -> Any:
    """Build the module without its numbers, into which the tensors of the file fit."""
    for field, pattern in _LISTS.items():  # before anything is made: a million blocks would take an hour
        said, found = getattr(config, field, None), count(names.values(), pattern)
        said = len(said) if isinstance(said, tuple) else said
        if said is not None and said != found:
            raise NextscaleError(f"{state.path} does not fit its config: {field} says {said}, its tensors {found}")
    try:
        with torch.device("meta"), Uninitialized():
            module = cls(config).eval().requires_grad_(False)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NextscaleError(
            f"{state.path} does not describe a network that can be made: {first_line(error)}"
        ) from None
    check(module, state, names)
    return module


def set_dtype(module: Any, dtype: torch.dtype) -> None:
    """Change the dtype of the matrix products of a loaded model, in place."""
    for name, parameter in list(module.named_parameters()):
        if module.computes_in_dtype(name):
            _assign(module, name, parameter.to(dtype))


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def check(module: nn.Module, state: StateFile, names: Mapping[str, str]) -> None:
    """Raise an error for missing, unexpected and misshaped tensors, and about those that hold no fractions."""
    wanted = {name: tuple(p.shape) for name, p in module.named_parameters()}
    theirs = {ours: key for key, ours in names.items()}
    problems = []
    if missing := [n for n in wanted if n not in theirs]:
        problems.append(f"lacks {_some(missing)}")
    if unexpected := [key for key, ours in names.items() if ours not in wanted]:
        problems.append(f"has the unknown {_some(unexpected)}")
    for name, shape in wanted.items():
        if name in theirs and not _fits(name, state.infos[theirs[name]].shape, shape):
            problems.append(f"has {theirs[name]!r} of shape {list(state.infos[theirs[name]].shape)}, not {list(shape)}")
            break
    if not problems:
        for key in names:
            info = state.infos[key]
            if info.form or info.dtype not in FLOATS:  # read as numbers these would make some image
                raise NextscaleError(
                    f"{state.file_of(key)} stores {key!r} as {info.form or dtype_name(info.dtype)}, "
                    f"but weights are plain tensors of {choices(map(dtype_name, FLOATS))}"
                )
    if problems:
        raise NextscaleError(f"{state.path} does not fit a {type(module).__name__} model: it {', and '.join(problems)}")


def _fits(name: str, have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    # Checkpoints trained with another attention kernel store the scale per head as (1, 1, H, 1).
    return have == want or (name.endswith("log_scale") and sorted(have) == sorted(want))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({choices(names[:3])}{more})"
