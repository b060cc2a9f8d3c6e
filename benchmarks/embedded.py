"""The embedded model: seconds and quality of every method beside the plain run, in one process.

    python benchmarks/embedded.py [--prompts 4] [--device cpu] [--threads 2] [--methods nova:balanced,truncate:2]
        [--json FILE]

Each method draws the same prompts with the same seeds as the plain run, at 512 x 512, batch 1, guided, after one
warm-up. PSNR (60 for equal images) and SSIM compare with the plain image: they say how much a method changed, not
how good it looks; `nextscale eval sweep methods` grades the images too. How fast it is on a GPU, in bfloat16 and as
graphs: `python benchmarks/gpu.py --models embedded --decisions own`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from nextscale import Pipeline, Truncate
from nextscale.io.writing import as_json, atomic_write
from nextscale.methods.naming import parse_methods
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim

PROMPTS = (
    "a fox",
    "two foxes above a blue heart",
    "a penguin in the snow",
    "a flat rocket at night",
    "a classic owl at night",
    "a green circle to the left of a red square",
    "three balloons on a blue background",
    "a train on a checkered gray background",
)
METHODS = (
    "nova:paper,nova:balanced,nova:faithful,nova:fast,nova:balanced;metric=random,fastvar:balanced,fastvar:fast,"
    "sparsevar:balanced,sparsevar:fast,toprovar:balanced,skipvar:balanced,skipvar:fast,drop_guidance:balanced,"
    "taper:0.07,taper:0.12,taper:0.25,taper:0.4,truncate:1,truncate:2,truncate:3"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS, help="separated by commas, as in `nextscale compare`")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    methods = parse_methods(options.methods)
    torch.set_num_threads(options.threads)
    pipe = Pipeline.from_pretrained(device=options.device, progress_bar=False)
    prompts = PROMPTS[: options.prompts]
    pipe(prompts[0], seed=0, method=Truncate(3))
    plain = [pipe(prompt, seed=seed, output_type="pt") for seed, prompt in enumerate(prompts)]
    base = sum(run.trace.seconds["total"] for run in plain)
    decode = sum(run.trace.seconds["decode"] for run in plain)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} CPU threads"
    print(f"{pipe.spec.name}, 512 x 512, float32, batch 1, {where}, {len(prompts)} prompts, torch {torch.__version__}")
    print(f"{'method':<36} {'seconds':>8} {'speed-up':>9} {'tokens':>7} {'PSNR':>6} {'SSIM':>6}")
    print(f"{'plain':<36} {base / len(prompts):>8.2f} {1:>8.2f}x {1:>7.1%} {'-':>6} {'-':>6}", flush=True)
    plain_row = {"method": "none", "seconds": base / len(prompts), "speed": 1.0, "tokens": 1.0}
    rows: list[dict[str, float | str]] = [plain_row]
    for name, method in methods.items():
        runs = [pipe(p, seed=seed, method=method, output_type="pt") for seed, p in enumerate(prompts)]
        seconds = sum(run.trace.seconds["total"] for run in runs)
        share = statistics.mean(run.trace.share() for run in runs)
        pairs = [(run.images, full.images) for run, full in zip(runs, plain, strict=True)]
        mean_psnr = statistics.mean(min(60.0, float(psnr(a, b, span=1.0))) for a, b in pairs)
        mean_ssim = statistics.mean(float(ssim(a, b, span=1.0).mean()) for a, b in pairs)
        each = seconds / len(prompts)
        rows.append({"method": name, "seconds": each, "speed": base / seconds, "tokens": share})
        rows[-1] |= {"psnr": mean_psnr, "ssim": mean_ssim}
        print(
            f"{name:<36} {each:>8.2f} {base / seconds:>8.2f}x {share:>7.1%} {mean_psnr:>6.1f} {mean_ssim:>6.3f}",
            flush=True,
        )
    print(f"decoding takes {decode / base:.1%} of the plain run")
    if options.json is not None:
        about = {"prompts": len(prompts), "threads": options.threads, "torch": torch.__version__, "rows": rows}
        with atomic_write(options.json) as file:
            file.write(as_json(about))


if __name__ == "__main__":
    main()
