"""Where the files of a model are: a registry name, a local file or folder, or a repository on the hub."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextscale.checkpoints.files import FILE_SUFFIXES, SHARD_INDEX, holds_weights
from nextscale.checkpoints.paths import as_path, present
from nextscale.errors import NextscaleError, choices, first_line
from nextscale.io.network import UNREACHABLE, why_local
from nextscale.io.reading import read_json
from nextscale.models.registry import EMBEDDED, MODELS, ModelSpec, get_model, published

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT_NAME = "nextscale"
ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True)
class Hub:
    """The access to the hub."""

    revision: str | None = None
    token: str | bool | None = None
    local_files_only: bool = False

    @functools.cached_property
    def missing(self) -> str:
        """Why nothing can be downloaded; empty: it can."""
        return why_local(self.local_files_only)

    def fetch(self, repo: str, files: Sequence[str]) -> Path:
        """A local copy of the first of `files` that the repository has; a name ending in "/" is a folder."""
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        options: dict[str, Any] = {
            "revision": self.revision,
            "token": self.token,
            "local_files_only": bool(self.missing),
        }
        where = f"the hub repository {repo!r}"
        try:
            for name in files:
                try:
                    if name.endswith("/"):
                        folder = Path(snapshot_download(repo, allow_patterns=[f"{name}*"], **options)) / name
                        if holds_weights(folder):
                            return folder
                    else:
                        return Path(hf_hub_download(repo, name, **options))
                except EntryNotFoundError as error:
                    if isinstance(error, LocalEntryNotFoundError) and name == files[-1]:
                        raise
        except LocalEntryNotFoundError:
            reason = self.missing or UNREACHABLE
            raise NextscaleError(f"{files[0]} of {where} is not in the local cache, and {reason}") from None
        except GatedRepoError:
            raise NextscaleError(f"{where} is gated: accept its terms on the hub and pass token=") from None
        except RepositoryNotFoundError:
            raise NextscaleError(f"{where} does not exist, or is private and needs token=") from None
        except RevisionNotFoundError:
            raise NextscaleError(f"{where} has no revision {self.revision!r}") from None
        except HFValidationError:
            raise NextscaleError(
                f"{repo!r} is neither a model name, nor a local path, nor a hub repository like 'owner/name'; "
                f"model names: {choices(MODELS)}"
            ) from None
        except NextscaleError:
            raise
        except Exception as error:  # a network fails in many ways, and each client has its own names for them
            raise NextscaleError(f"{where} could not be read: {first_line(error)}") from None
        if self.missing:
            raise NextscaleError(f"{files[0]} of {where} is not in the local cache, and {self.missing}")
        raise NextscaleError(f"{where} has no {' or '.join(files)}")


@dataclass(frozen=True)
class ModelFiles:
    """The files that were found. `weights` and `tokenizer` may be the same file (a training checkpoint)."""

    spec: ModelSpec | None  # None: inferred from the shapes in the file
    weights: Path
    tokenizers: tuple[Path, ...]  # candidates; none: inside `weights`
    converted: dict[str, Any] | None = None  # the config of a file that `nextscale convert` wrote


def locate(source: str | Path, model: str | None, vae: str | Path | None, hub: Hub) -> ModelFiles:
    spec = None if model is None else get_model(model)
    path = as_path(source)
    if present(path):
        return _local(path, spec, vae, hub)
    name = str(source)
    if name in MODELS:
        if spec is not None and spec.name != name:
            raise NextscaleError(f"source {name!r} and model={model!r} contradict each other")
        if name == EMBEDDED.name:
            return _local(ASSETS / name, None, vae, hub)
        return _from_hub(MODELS[name].repo, MODELS[name], vae, hub)
    if isinstance(source, Path) or path.suffix in FILE_SUFFIXES or name.startswith((".", "/", "~")):
        raise NextscaleError(f"{source} does not exist")
    if "/" not in name:
        raise NextscaleError(
            f"unknown model {name!r}; allowed: {choices(MODELS)}, a local file or folder, or a hub repository"
        )
    return _from_hub(name, spec, vae, hub)


def _from_hub(repo: str, spec: ModelSpec | None, vae: str | Path | None, hub: Hub) -> ModelFiles:
    if spec is None:
        official = [s.name for s in published() if s.repo == repo]
        if official:
            raise NextscaleError(
                f"the hub repository {repo!r} holds several models; choose model= from {choices(official)}"
            )
        config = hub.fetch(repo, (CONFIG_FILE,))
        converted = read_converted(config)
        if converted is None:
            raise NextscaleError(
                f"the hub repository {repo!r} is neither one of the official ones "
                f"({choices(dict.fromkeys(s.repo for s in published()))}) nor written by 'nextscale convert'"
            )
        return _converted(hub.fetch(repo, (WEIGHTS_FILE,)), converted, spec, vae)
    weights = hub.fetch(repo, (spec.weights,))
    return ModelFiles(spec, weights, _tokenizers(vae, spec, [], hub) or (hub.fetch(repo, spec.tokenizer_files),))


def _local(path: Path, spec: ModelSpec | None, vae: str | Path | None, hub: Hub) -> ModelFiles:
    if path.is_dir():
        converted = read_converted(path / CONFIG_FILE)
        if converted is not None:
            return _converted(path / WEIGHTS_FILE, converted, spec, vae)
        if not holds_weights(path):
            guess, path = _in_repository(path, spec)
            spec = spec or _if_distinctive(guess)
    if spec is None:
        named = [s for s in published() if s.weights.rstrip("/") == path.name]
        spec = _if_distinctive(named[0]) if named else None
    return ModelFiles(spec, path, _tokenizers(vae, spec, [path.parent, path], hub))


def _if_distinctive(spec: ModelSpec) -> ModelSpec | None:
    """A model that was recognized by the name of its files; None if that could be the name of any model's."""
    return None if spec.weights == "llm/" else spec


def _converted(weights: Path, config: dict[str, Any], spec: ModelSpec | None, vae: str | Path | None) -> ModelFiles:
    if vae is not None:
        raise NextscaleError(
            f"{weights.parent} was written by 'nextscale convert' and has its tokenizer inside: leave out vae="
        )
    if spec is not None and config.get("model") != spec.name:
        raise NextscaleError(f"{weights.parent} holds {config.get('model')}, not {spec.name}")
    return ModelFiles(None, weights, (), config)


def _in_repository(folder: Path, spec: ModelSpec | None) -> tuple[ModelSpec, Path]:
    """Find the weights in a local copy of an official repository."""
    specs = published() if spec is None else (spec,)
    found = [s for s in specs if present(folder / s.weights)]
    if not found:
        wanted = choices(dict.fromkeys(s.weights for s in specs))
        raise NextscaleError(f"{folder} holds no model: looked for {SHARD_INDEX}, a converted {CONFIG_FILE}, {wanted}")
    if len(found) > 1:
        raise NextscaleError(f"{folder} holds several models; choose model= from {choices(s.name for s in found)}")
    return found[0], folder / found[0].weights


def _tokenizers(vae: str | Path | None, spec: ModelSpec | None, folders: list[Path], hub: Hub) -> tuple[Path, ...]:
    """Find the tokenizer's file: as given, or by its published name beside the weights."""
    if vae is not None:
        path = as_path(vae)
        if present(path):
            return (path,)
        if spec is not None and "/" in str(vae) and not path.suffix:
            return (hub.fetch(str(vae), spec.tokenizer_files),)
        raise NextscaleError(f"the tokenizer file {vae} does not exist")
    specs = published() if spec is None else (spec,)
    names = dict.fromkeys(name for s in specs for name in s.tokenizer_files)
    return tuple(folder / name for folder in folders for name in names if present(folder / name))


def read_converted(path: Path) -> dict[str, Any] | None:
    """Read the config that `nextscale convert` wrote; None if this is some other config, or none at all."""
    config = read_json(path, "readable JSON") if present(path) else None
    return config if isinstance(config, dict) and config.get("format") == FORMAT_NAME else None
