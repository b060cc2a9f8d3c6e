"""From files to a model that is ready to run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nextscale.checkpoints.families import FAMILIES, WORDS, backbones, family_of, infer_config, rename
from nextscale.checkpoints.family import Family
from nextscale.checkpoints.files import StateFile, open_states
from nextscale.checkpoints.int8 import dequantized
from nextscale.checkpoints.load import Progress, build, outline
from nextscale.checkpoints.locate import ModelFiles
from nextscale.engine.schedule import PIXEL_BUDGETS
from nextscale.errors import NextscaleError, choices
from nextscale.models.base import Backbone
from nextscale.models.registry import MODELS, PUBLISHED_TOKENIZERS, Defaults, ModelSpec, published
from nextscale.text.words import Lexicon, WordEncoder, WordsConfig
from nextscale.tokenizers.base import ImageTokenizer

logger = logging.getLogger(__name__)

TEXT_FAMILIES = ("infinity", "hart")  # families that read prompts
FORMAT_VERSION = 1  # of converted files


@dataclass(frozen=True)
class Part:
    """A module that can be built: its class, its configuration and its tensors."""

    family: Family
    config: Any
    state: StateFile
    names: dict[str, str]  # key in the file -> our parameter

    @property
    def nbytes(self) -> int:
        return sum(self.state.infos[key].nbytes for key in self.names)

    def outline(self) -> Any:
        """The module without its numbers."""
        return outline(self.family.module, self.config, self.state, self.names)

    def build(self, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None) -> Any:
        return build(self.family.module, self.config, self.state, self.names, dtype, device, progress)


@dataclass(frozen=True)
class Blueprint:
    """A whole model, every shape known and no tensor read yet."""

    spec: ModelSpec
    backbone: Part
    tokenizer: Part
    text: Part | None = None  # a text encoder that was trained with them
    words: dict[str, Any] | None = None  # its vocabulary

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by their prefix in a converted file."""
        found = {"backbone": self.backbone, "tokenizer": self.tokenizer, "text": self.text}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(file for part in self.parts.values() for file in part.state.files))

    def build(
        self, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None
    ) -> tuple[Backbone, ImageTokenizer]:
        return self.backbone.build(dtype, device, progress), self.tokenizer.build(dtype, device, progress)

    def build_text(self, device: torch.device | str) -> WordEncoder | None:
        if self.text is None or self.words is None:
            return None
        return WordEncoder(Lexicon(self.words), self.text.build(torch.float32, device))


def read(files: ModelFiles) -> Blueprint:
    if files.converted is not None:
        return _converted(files.weights, files.converted)
    states = open_states(files.weights)
    backbone = official_part(states, backbones())
    want = (str(backbone.family.tokenizer),)
    if len(files.tokenizers) == 1:
        return assemble(backbone, official_part(open_states(files.tokenizers[0]), want), files.spec, files.weights)
    for candidate in (*map(open_states, files.tokenizers), states):  # the first that fits
        with contextlib.suppress(NextscaleError):
            return assemble(backbone, official_part(candidate, want), files.spec, files.weights)
    beside = (
        f"none of {choices(p.name for p in files.tokenizers)} fits" if files.tokenizers else "none was found beside it"
    )
    raise NextscaleError(
        f"{files.weights} holds no tokenizer, and {beside}; pass vae= with the file of the tokenizer, "
        f"e.g. {choices(_tokenizer_names(backbone, files.spec))}"
    )


def _tokenizer_names(backbone: Part, spec: ModelSpec | None) -> list[str]:
    specs = [s for s in published() if s.family == backbone.family.name] if spec is None else [spec]
    return list(dict.fromkeys(s.tokenizer_files[0] for s in specs))


def official_part(states: list[StateFile], families: tuple[str, ...], config: Any = None) -> Part:
    """A module with the official weights; unless given, its configuration is inferred from their shapes."""
    family, state = _pick(states, families)
    names = rename(family, state.infos)
    return Part(family, infer_config(family, state, names) if config is None else config, state, names)


def _pick(states: list[StateFile], families: tuple[str, ...]) -> tuple[Family, StateFile]:
    """The state dict of one of these families among those that a file holds."""
    found = [(family_of(state.infos), state) for state in states]
    for family, state in found:
        if family is not None and family.name in families:
            return family, state
    have = [family.title if family else "a state dict of no known model" for family, _ in found]
    want = " or ".join(FAMILIES[name].title for name in families)
    raise NextscaleError(f"{states[0].path} holds {' and '.join(dict.fromkeys(have))}, but {want} is needed")


def assemble(backbone: Part, tokenizer: Part, spec: ModelSpec | None, source: Path | str) -> Blueprint:
    """Check that the two belong together, and find out which published model they are."""
    if backbone.family.name == "infinity":
        tokenizer = _with_patchify(backbone, tokenizer)
    _require_pair(backbone, tokenizer)
    if spec is not None and spec.backbone != backbone.config:
        known = [s.name for s in MODELS.values() if s.backbone == backbone.config]
        c = backbone.config
        what = choices(known) if known else f"{backbone.family.title} of depth {c.depth} and width {c.width}"
        raise NextscaleError(f"{source} holds {what}, not {spec.name}")
    found = spec or spec_of(backbone.config, tokenizer.config, str(source))
    _check_published_pair(backbone.state.path, tokenizer.state.path, found)
    return Blueprint(found, backbone, tokenizer)


def _check_published_pair(weights: Path, tokenizer: Path, spec: ModelSpec) -> None:
    """Raise an error for the tokenizer of another model.

    Some have equal names and shapes inside and other codes, so only their file's name tells them apart.
    The published weights draw nonsense with any but their own. Weights that somebody trained further may go with
    another, and nothing in them tells with which.
    """
    known = spec.tokenizer_files and tokenizer.name in PUBLISHED_TOKENIZERS
    if not known or tokenizer.name in spec.tokenizer_files:
        return
    wanted = spec.tokenizer_files[0]
    if weights.name == spec.weights.rstrip("/"):
        raise NextscaleError(
            f"{tokenizer} is not the tokenizer of {spec.name}, though its shapes fit: pass vae= with {wanted}"
        )
    logger.warning(
        "%s was published with the tokenizer %s; with %s images are right only if %s was trained with it",
        spec.name,
        wanted,
        tokenizer.name,
        weights.name,
    )


def _with_patchify(backbone: Part, tokenizer: Part) -> Part:
    config = dataclasses.replace(tokenizer.config, patchify=backbone.config.bits == 4 * tokenizer.config.code_dim)
    return dataclasses.replace(tokenizer, config=config)


def _require_pair(backbone: Part, tokenizer: Part) -> None:
    """Raise an error unless the tokenizer decodes what the transformer predicts."""
    b, t, path = backbone.config, tokenizer.config, tokenizer.state.path
    if backbone.family.name == "infinity":
        if b.bits != t.code_dim * (4 if t.patchify else 1):
            raise NextscaleError(
                f"the transformer predicts {b.bits} bits per token, which does not fit the {t.code_dim} channels of "
                f"the tokenizer {path} (nor 4 x {t.code_dim} with 2 x 2 cells per token)"
            )
    elif t.hybrid != (backbone.family.name == "hart"):
        raise NextscaleError(f"the tokenizer {path} has hybrid = {t.hybrid}, which is true of HART's and of no other")
    elif (b.vocabulary, b.code_dim) != (t.vocabulary, t.code_dim):
        raise NextscaleError(
            f"the transformer predicts {b.vocabulary} codes of width {b.code_dim}, but the tokenizer {path} has "
            f"{t.vocabulary} of width {t.code_dim}"
        )


def spec_of(backbone: Any, tokenizer: Any, source: str) -> ModelSpec:
    """The published model with this configuration, or a description of an unpublished one."""
    if spec := next((s for s in MODELS.values() if s.backbone == backbone), None):
        return spec
    family = [s for s in published() if type(s.backbone) is type(backbone)]
    like = min(family, key=lambda s: abs(s.backbone.width - backbone.width))
    return dataclasses.replace(
        like,
        name=Path(source).stem,
        backbone=backbone,
        tokenizer=tokenizer,
        repo="",
        weights="",
        tokenizer_files=(),
        notes="",
    )


def describe(blueprint: Blueprint) -> dict[str, Any]:
    """The config.json of a converted model."""
    spec = blueprint.spec
    return {
        "family": blueprint.backbone.family.name,
        "model": spec.name,
        "backbone": dataclasses.asdict(blueprint.backbone.config),
        "tokenizer": dataclasses.asdict(blueprint.tokenizer.config),
        "defaults": dataclasses.asdict(spec.defaults),
        "pixel_budget": spec.pixel_budget,
        "text_encoder": spec.text_encoder,
        "text": blueprint.text and {"config": dataclasses.asdict(blueprint.text.config), "words": blueprint.words},
    }


def _converted(weights: Path, config: dict[str, Any]) -> Blueprint:
    where = weights.with_name("config.json")
    if config.get("version") != FORMAT_VERSION:
        raise NextscaleError(f"{where} has version {config.get('version')!r}; this nextscale reads {FORMAT_VERSION}")
    try:
        if config["family"] not in backbones():
            raise NextscaleError(f"family = {config['family']!r} is not one of {choices(backbones())}")
        family = FAMILIES[config["family"]]
        families = {"backbone": family, "tokenizer": FAMILIES[str(family.tokenizer)]}
        configs = {part: of.config(**_tuples(config[part])) for part, of in families.items()}
        text, words = config.get("text"), None
        if text:
            families["text"], configs["text"] = WORDS, WordsConfig(**_tuples(text["config"]))
            words = text["words"]
            if len(Lexicon(words)) > configs["text"].tokens:
                raise NextscaleError(f"{len(Lexicon(words))} words are more than {configs['text'].tokens} tokens")
        fields = {"name": config["model"], **{name: config[name] for name in ("pixel_budget", "text_encoder")}}
        if config["family"] not in TEXT_FAMILIES and (text or fields["text_encoder"]):
            raise NextscaleError(f"a model of the family {config['family']} reads class labels, not text")
        for name, value in fields.items():
            if not isinstance(value, str) and (value is not None or name == "name"):
                raise NextscaleError(f"{name} = {value!r} is not a text")
        if fields["pixel_budget"] not in (None, *PIXEL_BUDGETS):
            raise NextscaleError(f"pixel_budget = {fields['pixel_budget']!r} is not one of {choices(PIXEL_BUDGETS)}")
        spec = spec_of(configs["backbone"], configs["tokenizer"], config["model"])
        spec = dataclasses.replace(spec, **fields, defaults=Defaults(**_tuples(config["defaults"])))
    except KeyError as error:
        raise NextscaleError(f"{where} is not a config of a converted model: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise NextscaleError(f"{where} is not a config of a converted model: {error}") from None
    state = dequantized(open_states(weights)[0])
    parts = {}
    for prefix, of in families.items():
        names = {key: key.removeprefix(f"{prefix}.") for key in state.infos if key.startswith(f"{prefix}.")}
        parts[prefix] = Part(of, configs[prefix], state, names)
    _require_pair(parts["backbone"], parts["tokenizer"])
    return Blueprint(spec, **parts, words=words)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
