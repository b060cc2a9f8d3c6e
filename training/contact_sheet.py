"""The sheet of the README: the first 24 fixed prompts, prompt i with seed i, plain, as the shipped model draws them.

python -m training.contact_sheet --out docs/contact-sheet.jpg     # 8 minutes on two CPU cores
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from nextscale import Pipeline
from training.common import sheet
from training.prompts import FIXED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/contact-sheet.jpg"))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    pipe = Pipeline.from_pretrained(device="cuda" if cuda else "cpu", progress_bar=False)
    prompts, images = FIXED[:24], []
    for seed, prompt in enumerate(prompts):
        images += pipe(prompt, seed=seed).images
        print(f"{seed + 1} of {len(prompts)}: {prompt}", flush=True)
    sheet(images, prompts, 6, 224).save(options.out, quality=88)


if __name__ == "__main__":
    main()
