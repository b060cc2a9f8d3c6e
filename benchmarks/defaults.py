"""Images that users get who choose nothing but a method: twelve prompts, six of them with a full background.

    python benchmarks/defaults.py [METHOD ...] [--device cuda] [--sheet defaults.jpg]

A method is written as on the command line ("nova" is the preset measured on the model), or as a class with its
defaults ("NOVA()"). For each: images that the recognizer passes, the mean SSIM to the plain images on white and on full
backgrounds, the share of FLOPs, and the time, side by side with the plain run. Fails if a method that is not listed in
`EXCEPTIONS` passes fewer than 11 images, or has a mean SSIM below 0.87 on either.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from nextscale import Output, Pipeline
from nextscale.io.images import to_pil
from nextscale.io.progress import bar
from nextscale.methods import METHODS, Method
from nextscale.methods.naming import parse_method
from nextscale.research.evaluate.recognizer import load_recognizer
from nextscale.research.evaluate.scenes import first_per_task, read_scene_prompts
from nextscale.research.evaluate.ssim import ssim

BACKGROUNDS = ("in a meadow", "on a beach", "in the snow", "at night", "in the sea", "at sunset")
LEAST_PASSED, LEAST_SSIM = 11, 0.87
# By their nature.
EXCEPTIONS = {
    "random_selection": "is a control: any cells",
    "FastVAR()": "has the constants of Infinity-2B, and copies states from one scale to the next, which suits no bits",
    "SparseVAR()": "has the constants of Infinity-2B; they are relative to the largest change, which is another here",
    "ToProVAR()": "has placeholders: the paper publishes no constants, `nextscale calibrate` finds them",
}


def method_of(name: str, model: str) -> Method | None:
    if not name.endswith("()"):
        return parse_method(name, model)
    return {cls.__name__: cls for cls in METHODS.values()}[name.removesuffix("()")]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["auto", "nova", "NOVA()", "taper", "ld_pruning", "fastvar", "sparsevar", "toprovar", "skipvar"]
    usual += ["truncate", "drop_guidance"]
    parser.add_argument("methods", nargs="*", default=usual)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sheet", help="a file for the images of all methods")
    options = parser.parse_args()
    pipe = Pipeline.from_pretrained(device=options.device, progress_bar=False)
    recognizer = load_recognizer(pipe.device)
    scenes = first_per_task(read_scene_prompts(), 2)
    prompts = [f"{s.prompt} {BACKGROUNDS[n // 2]}" if n % 2 else s.prompt for n, s in enumerate(scenes)]
    methods = {"none": None, **{name: method_of(name, pipe.spec.name) for name in options.methods}}
    outputs: dict[str, list[Output]] = {name: [] for name in methods}
    seconds: dict[str, float] = dict.fromkeys(methods, 0.0)
    with bar("images", len(prompts) * len(methods), None) as advance:
        for seed, prompt in enumerate(prompts):
            for name, method in methods.items():
                begun = time.perf_counter()
                outputs[name].append(pipe(prompt, seed=seed, method=method, output_type="pt"))
                seconds[name] += time.perf_counter() - begun
                advance(1)
    failed = []
    print(f"{pipe.spec.name}, {options.device}: {len(prompts)} prompts")
    print(f"{'method':18} passed  SSIM white   full  FLOPs  seconds an image")
    for name, made in outputs.items():
        images = torch.cat([out.images for out in made])
        passed = sum(s.passes(found) for s, found in zip(scenes, recognizer.detect(images * 2 - 1), strict=True))
        alike = ssim(images, torch.cat([out.images for out in outputs["none"]]), span=1.0).tolist()
        white, full = statistics.mean(alike[::2]), statistics.mean(alike[1::2])
        entries = [out.trace.image(0) for out in made]
        flops = statistics.mean(entry["flops"] / entry["flops_full"] for entry in entries)
        good = passed >= LEAST_PASSED and min(white, full) >= LEAST_SSIM
        failed += [] if good or name in EXCEPTIONS else [name]
        print(
            f"{name:18} {passed:>6}  {white:10.3f} {full:6.3f}  {flops:5.1%}  {seconds[name] / len(prompts):.1f}",
            end="",
        )
        print("" if good or name not in EXCEPTIONS else f"   {EXCEPTIONS[name]}")
    if options.sheet:
        draw(outputs, options.sheet)
    if failed:
        raise SystemExit(f"too far from the plain images: {', '.join(failed)}")


def draw(outputs: dict[str, list[Output]], path: str) -> None:
    from matplotlib.figure import Figure

    columns = len(outputs["none"])
    figure = Figure(figsize=(1.3 * columns, 1.35 * len(outputs)), layout="constrained")
    for row, (name, made) in zip(figure.subplots(len(outputs), columns, squeeze=False), outputs.items(), strict=True):
        for axes, out in zip(row, made, strict=True):
            axes.imshow(to_pil(out.images * 2 - 1)[0].resize((192, 192)))
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=8)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
