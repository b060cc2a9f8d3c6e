"""What 8 bits per weight cost: losses and reconstruction of the shipped file beside those of the run it came from.

python -m training.storage --run training/runs/latest      # a few minutes on a CPU
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nextscale.checkpoints.locate import ASSETS
from nextscale.models.registry import EMBEDDED
from nextscale.research.evaluate.psnr import psnr
from training import store
from training.common import arguments, device, grids, make_painter, quantize, read_config
from training.painter import Painter
from training.scenes import Scenes, batch_of, read_vocabulary
from training.train_transformer import Trainer


@torch.no_grad()
def measure(source: Path, config: dict[str, Any], painter: Painter, scenes: int) -> tuple[torch.Tensor, float]:
    """Nats per bit of every grid, without flips, and the tokenizer's PSNR, on scenes that training never drew."""
    trainer = Trainer(config, painter.device)
    store.load_into(source, backbone=trainer.backbone, text=trainer.text, tokenizer=trainer.tokenizer)
    vocabulary, rng = read_vocabulary(), np.random.default_rng(10**6 + 2)
    drawn = [Scenes(vocabulary).draw(rng) for _ in range(scenes)]
    losses, qualities = [], []
    for i in range(0, scenes, 4):
        batch = batch_of(drawn[i : i + 4], vocabulary, trainer.lexicon)
        images = painter.paint(batch)
        features = trainer.tokenizer.encode_features(images)
        losses.append(trainer.losses(features, batch, config["grids"]))
        schedule = grids(config["grids"])
        total = quantize(trainer.tokenizer, features, schedule, schedule).total
        qualities.append(psnr(trainer.tokenizer.decode(total), images))
    return torch.stack(losses).mean(0), float(torch.cat(qualities).mean())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shipped", type=Path, default=ASSETS / EMBEDDED.name)
    parser.add_argument("--scenes", type=int, default=32)
    options = parser.parse_args()
    config = read_config(options.config, options.smoke)
    config["transformer"].update(flipped=0.0, text_dropout=0.0)
    painter = make_painter(options.sprites, config, device(), options.smoke)
    for name, source in (("run", options.run), ("shipped", options.shipped)):
        losses, quality = measure(source, config, painter, options.scenes)
        each = " ".join(f"{x:.4f}" for x in losses.tolist())
        print(f"{name:<8} psnr {quality:.2f} dB, nats per bit {losses.mean():.4f}: {each}", flush=True)


if __name__ == "__main__":
    main()
