"""A run's weights as the model that the package ships: 8 bits per number, with its configuration and vocabulary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from nextscale.checkpoints.int8 import quantize_state
from nextscale.checkpoints.locate import ASSETS, CONFIG_FILE, FORMAT_NAME, WEIGHTS_FILE
from nextscale.checkpoints.pretrained import FORMAT_VERSION
from nextscale.models.registry import EMBEDDED
from training import store
from training.common import arguments, part, read_config
from training.train_transformer import build


def export(source: Path, out: Path, config: dict[str, Any], half: bool) -> int:
    """Bytes written."""
    backbone, text, tokenizer, _ = build(config)
    parts: dict[str, nn.Module] = {"backbone": backbone, "tokenizer": tokenizer, "text": text}
    store.load_into(source, **parts)
    state = {f"{name}.{key}": p.detach() for name, m in parts.items() for key, p in m.named_parameters()}
    stored = {key: p.half() for key, p in state.items()} if half else quantize_state(state)
    scenes = part(config, "scenes")
    description = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "family": "infinity",
        "model": EMBEDDED.name,
        "backbone": dataclasses.asdict(backbone.config),
        "tokenizer": dataclasses.asdict(tokenizer.config),
        "defaults": dataclasses.asdict(EMBEDDED.defaults),
        "pixel_budget": EMBEDDED.pixel_budget,
        "text_encoder": None,
        "text": {"config": dataclasses.asdict(text.config), "words": scenes.words_of(scenes.read_vocabulary())},
        "dtype": "float16" if half else "int8",
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(description, separators=(",", ":"), ensure_ascii=False) + "\n")
    save_file({key: t.contiguous() for key, t in stored.items()}, out / WEIGHTS_FILE, {"format": "pt"})
    return sum((out / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS / EMBEDDED.name)
    parser.add_argument("--half", action="store_true", help="16 bits instead, to measure what 8 cost")
    options = parser.parse_args()
    size = export(options.run, options.out, read_config(options.config, options.smoke), options.half)
    print(f"wrote {options.out}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
