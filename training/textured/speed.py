"""How fast a machine paints and trains, and in how much memory: a minute's check before anything long is started.

python -m training.textured.speed --config training/textured/config.json
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from training.common import arguments, device, make_painter, part, read_config
from training.train_transformer import Trainer


def main() -> None:
    options = arguments(__doc__).parse_args()
    config, where = read_config(options.config, options.smoke), device()
    data, rng = part(config, "scenes"), np.random.default_rng(0)
    painter, trainer = make_painter(options.sprites, config, where, options.smoke), Trainer(config, where)
    maker = data.Scenes(data.read_vocabulary())

    def rate(what: str, images: int, work: Callable[[], object], first: int = 1, times: int = 3) -> None:
        for n in range(first + times):
            if n == first:
                read(where)
                started = time.perf_counter()
            work()
        peak = read(where)
        print(f"{what}: {images * times / (time.perf_counter() - started):.0f} images/s, {peak:.1f} GB", flush=True)

    for kind in {step["grids"]: step for stage in config["transformer"]["stages"] for step in stage["steps"]}.values():
        for ratio in (1.0, 0.75):
            size = kind["batch"] if ratio == 1 else kind["batch"] // 2
            drawn = [maker.draw(rng, ratio=ratio) for _ in range(size)]
            batch = data.batch_of(drawn, maker.vocabulary, trainer.lexicon)
            about = f"{kind['grids']} grids, ratio {ratio}, {size} at once"
            rate(f"{about}: painted", size, lambda batch=batch: painter.paint(batch))
            if ratio == 1:  # compiling takes half a minute for each shape: the log of a stage says how fast it is then
                continue
            step = (trainer.encoded(painter.paint(batch)), batch, kind["grids"], 0.0)
            rate(f"{about}: trained", size, lambda step=step: trainer.step(*step))


def read(where: torch.device) -> float:
    """Wait for the device; the most memory it held since the last time, in GB."""
    if where.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


if __name__ == "__main__":
    main()
