"""What FP8 (e4m3) weights and activations cost in exactness, on the model that comes with the package or another one.

    python benchmarks/fp8.py [--images 24] [--device cuda] [--size 1M] [--weights FOLDER] [--model infinity-2b]

Both models see the same tokens at every scale (those that bfloat16 chose), so that differences do not add up:
  logits      root mean square of their difference over that of the logits
  agreement   tokens, and bits of them, that greedy decoding would choose alike
Then both draw on their own with the same random numbers: PSNR and SSIM of the images. float32 against bfloat16 is
printed beside it, as the measure of what bfloat16 itself costs. On a CPU the arithmetic is imitated.
  limit       inputs of linear layers that were too large for FP8, of a million: the weights tell how large they
              usually are, and what is more than 112 to 224 times as large is cut off

`decoder` compares images of the same maps, with all convolutions of the decoder's residual blocks in FP8. Few of
this small decoder's are wide enough for the kernel, so here they are imitated, too.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nextscale.io.devices import as_device
from nextscale.kernels.fp8 import MAX_FP8, FP8Layer
from nextscale.models.fp8 import round_convolutions, to_fp8
from nextscale.pipeline import Pipeline
from nextscale.research.evaluate.psnr import psnr
from nextscale.research.evaluate.ssim import ssim

PROMPTS = ("a fox", "a red boat on the sea", "a green tree under the moon", "two cats", "a yellow sun", "a blue car")


def compare(name: str, plain: Pipeline, other: Pipeline, images: int, size: str | None) -> None:
    prompts = prompts_for(plain, images)
    call = {"seed": list(range(images)), "pixel_budget": size}
    kept: dict[int, list[torch.Tensor]] = {}
    tokens = plain(prompts, **call, output_type="latent").tokens
    for n, pipe in enumerate((plain, other)):
        kept[n] = []
        pipe(
            prompts,
            **call,
            force_tokens=tokens,
            output_type="latent",
            callback_on_scale_end=lambda end, n=n: kept[n].append(end.logits.float().cpu()),
        )
    a, b = (torch.cat([t.flatten(1, -2) for t in kept[n]], dim=1) for n in (0, 1))  # [images, bits, 2]
    off = ((a - b).square().mean() / a.square().mean()).sqrt().item()
    same = a.argmax(-1) == b.argmax(-1)
    bits = math.prod(plain.backbone.token_shape)  # of a token; a codebook's index is one
    whole = same.unflatten(1, (-1, bits)).all(-1).float().mean().item()
    drawn = [pipe(prompts, **call, output_type="pt").images.float().cpu() for pipe in (plain, other)]
    print(
        f"{name:<22} logits {off:>6.2%}  bits {same.float().mean().item():>7.2%}  tokens {whole:>7.2%}  "
        f"PSNR {psnr(*drawn).mean().item():>5.1f} dB  SSIM {ssim(*drawn).mean().item():.3f}",
        flush=True,
    )


def prompts_for(pipe: Pipeline, images: int) -> list[str] | list[int]:
    if pipe.backbone.prompts == "label":
        return list(range(images))
    return [PROMPTS[i % len(PROMPTS)] for i in range(images)]


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """How many inputs of FP8 layers there were, and how many at the end of the range."""
    counts = {"all": 0, "limit": 0}
    plain = FP8Layer.rounded

    def rounded(layer: FP8Layer, x: torch.Tensor) -> torch.Tensor:
        y = plain(layer, x)
        counts["all"] += y.numel()
        counts["limit"] += int((y.float().abs() == MAX_FP8).sum())
        return y

    FP8Layer.rounded = rounded  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        FP8Layer.rounded = plain  # type: ignore[method-assign]


def compare_decoders(plain: Pipeline, images: int, size: str | None) -> None:
    prompts = prompts_for(plain, images)
    maps = plain(prompts, seed=list(range(images)), pixel_budget=size, output_type="latent").images
    small, exact = (copy.deepcopy(plain.tokenizer) for _ in range(2))
    round_convolutions(small.decoder, lambda conv: True)
    decoded = [t.decode(maps).float().cpu() for t in (plain.tokenizer, exact.float(), small)]
    for name, other in zip(("float32", "fp8"), decoded[1:], strict=True):
        print(
            f"{f'decoder, {name}':<22} PSNR {psnr(decoded[0], other).mean().item():>5.1f} dB  "
            f"SSIM {ssim(decoded[0], other).mean().item():.4f}",
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", help="pixel budget; the model's own unless given, which takes long on a CPU")
    parser.add_argument("--weights", help="a folder or file as Pipeline.from_pretrained takes it")
    parser.add_argument("--model", help="which model that is, where files leave a choice")
    options = parser.parse_args()
    device = as_device(options.device)
    source = {"model": options.model, "device": device, "progress_bar": False}
    place = [options.weights] if options.weights else []
    plain, exact = (Pipeline.from_pretrained(*place, dtype=dtype, **source) for dtype in ("bfloat16", "float32"))
    small = copy.copy(plain)
    small.backbone, small.tokenizer = copy.deepcopy(plain.backbone), copy.deepcopy(plain.tokenizer)
    to_fp8(small.backbone, small.tokenizer)
    before, after = (
        sum(t.nbytes for t in (*p.backbone.parameters(), *p.backbone.buffers())) / 2**20 for p in (plain, small)
    )
    print(f"{device}, torch {torch.__version__}, {options.images} images; weights {before:.0f} -> {after:.0f} MiB")
    compare("float32 vs bfloat16", plain, exact, options.images, options.size)
    with counting() as counts:
        compare("fp8 vs bfloat16", plain, small, options.images, options.size)
    print(f"{'':<22} limit {1e6 * counts['limit'] / counts['all']:.3g} of a million")
    compare_decoders(plain, options.images, options.size)


if __name__ == "__main__":
    main()
