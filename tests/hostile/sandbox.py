"""One case: a folder of its own, what is in it, and what may be done to it.

A kind of case is a function that writes bad files into a `Sandbox` and gives back the arguments of a command.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from nextscale.checkpoints.locate import ASSETS
from nextscale.models.infinity import Infinity, InfinityConfig
from nextscale.models.registry import EMBEDDED
from nextscale.models.var import VAR, VARConfig
from nextscale.testing import randomize
from nextscale.text.words import WordsConfig, WordTransformer
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer
from nextscale.tokenizers.vq import VQConfig, VQTokenizer

Kind = Callable[["Sandbox"], list[str]]
KINDS: dict[str, dict[str, Kind]] = {}  # by what is attacked, then by name


def kind(attacked: str) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        name = function.__name__.replace("_", " ").strip()
        assert name not in KINDS.setdefault(attacked, {}), name
        KINDS[attacked][name] = function
        return function

    return register


@dataclass
class Sandbox:
    rng: random.Random
    folder: Path  # the command runs in it
    models: Path  # what `write_models` wrote; cases copy from it
    marker: Path  # appears only if code from a file was executed
    made: list[str] = field(default_factory=list)  # outputs that the case asks for

    def choose(self, *values: object) -> str:
        return str(self.rng.choice(values))

    def write(self, name: str, content: bytes | str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return str(path)

    def model(self, name: str) -> Path:
        """A copy of a model's folder, to be broken."""
        copy = self.folder / name
        copy.mkdir()
        for file in (self.models / name).iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        return copy

    def generate(self, *options: str, words: bool = False, prompt: str | None = None) -> list[str]:
        """A command that would work, and quickly, without the options."""
        what = prompt if prompt is not None else "a red star" if words else "3"
        weights = [] if "--weights" in options else ["--weights", str(self.models / ("words" if words else "labels"))]
        size = ["--pixel-budget", "0.06M"] if words else []
        return ["generate", *weights, *size, *options, "--device", "cpu", "--", what]

    def text(self, length: int = 12) -> str:
        """Anything that a keyboard, a file or an enemy may give."""
        pieces = (
            "fox", "é", "猫", "🦊", "👩‍👧", "\u202e", "\u0301", "\x1b[31m", "\x07", "\n", "\t", "'", '"', "`", "$(id)",
            "%s", "{}", "[bold]", "\\", "../", "~", "-", "--", "0", "1e309", "nan", "=", ";", ":", "+", ",", "\ud800",
            " ",
        )  # fmt: skip
        return "".join(self.rng.choice(pieces) for _ in range(self.rng.randint(1, length)))


def write_models(folder: Path) -> None:
    """Tiny models in the format of `nextscale convert`: one reads class numbers, one the embedded model's words."""
    vocabulary = json.loads((ASSETS / EMBEDDED.name / "config.json").read_text())["text"]["words"]
    tokens = 1 + sum(len(entries) for name, entries in vocabulary.items() if name != "filler")
    infinity = InfinityConfig(
        depth=2, width=32, heads=2, bits=4, hidden=64, text_dim=32, text_length=48, levels=13, pool_heads=2
    )
    bits = BSQConfig(code_dim=4, channels=32, multipliers=(1, 1), residual_blocks=1)
    encoder = WordsConfig(tokens=tokens, width=32, depth=1, heads=2)
    modules = {"backbone": Infinity(infinity), "tokenizer": BSQTokenizer(bits), "text": WordTransformer(encoder)}
    text = {"config": vars(encoder), "words": vocabulary}
    _write(folder / "words", "infinity", modules, "0.06M", text)
    var = VARConfig(
        depth=2, width=32, heads=2, hidden=64, sides=(1, 2, 3, 4), classes=10, vocabulary=16, code_dim=8,
        shared_modulation=False, cosine_attention=True,
    )  # fmt: skip
    codes = VQConfig(vocabulary=16, code_dim=8, channels=32, multipliers=(1, 1), residual_blocks=1)
    _write(folder / "labels", "var", {"backbone": VAR(var), "tokenizer": VQTokenizer(codes)}, None, None)


def _write(
    folder: Path, family: str, modules: dict[str, torch.nn.Module], budget: str | None, text: dict | None
) -> None:
    folder.mkdir(parents=True)
    state = {}
    for seed, (name, module) in enumerate(modules.items()):
        randomize(module, seed)
        state |= {f"{name}.{key}": p.detach().clone() for key, p in module.named_parameters()}
    config = {
        "format": "nextscale",
        "version": 1,
        "family": family,
        "model": "tiny",
        "backbone": vars(modules["backbone"].config),
        "tokenizer": vars(modules["tokenizer"].config),
        "defaults": {"guidance_scale": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 0.0},
        "pixel_budget": budget,
        "text_encoder": None,
        "text": text,
        "dtype": "float32",
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
