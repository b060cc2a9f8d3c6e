"""`pipe.estimate` against the peak that a CUDA device really saw, for the published sizes with random weights.

    python benchmarks/memory.py [MODEL ...]

One warm-up run, then the measured one; guided, text of 64 tokens. Seconds are of the measured run, eager, and belong
to this table's machine: they are here so that memory and time are read together.
"""

from __future__ import annotations

import sys

import torch

from nextscale.checkpoints.families import FAMILIES
from nextscale.checkpoints.load import set_dtype
from nextscale.engine.memory import GIB
from nextscale.models.registry import MODELS
from nextscale.pipeline import Pipeline

RUNS = (  # model, images, dtype
    ("var-d16", 1, "bfloat16"),
    ("var-d16", 16, "bfloat16"),
    ("var-d30", 8, "float32"),
    ("var-d36", 4, "bfloat16"),
    ("infinity-125m", 8, "bfloat16"),
    ("infinity-2b", 1, "bfloat16"),
    ("infinity-2b", 4, "bfloat16"),
    ("infinity-2b", 1, "float32"),
    ("infinity-8b-512", 4, "bfloat16"),
    ("infinity-8b", 1, "bfloat16"),
    ("infinity-8b", 2, "bfloat16"),
)


def random_pipeline(name: str, dtype: str, device: str = "cuda") -> Pipeline:
    spec = MODELS[name]
    modules = []
    family = FAMILIES[spec.family]
    for cls, config in ((family.module, spec.backbone), (FAMILIES[str(family.tokenizer)].module, spec.tokenizer)):
        with torch.device("meta"):
            module = cls(config).eval().requires_grad_(False)
        set_dtype(module, getattr(torch, dtype))
        module = module.to_empty(device=device)
        for p in module.parameters():
            p.normal_(std=0.02)
        modules.append(module)
    return Pipeline(modules[0], modules[1], spec, progress_bar=False)


def measure(name: str, images: int, dtype: str) -> str:
    pipe = random_pipeline(name, dtype)
    if pipe.backbone.prompts == "label":
        ask = {"prompt": list(range(images))}
    else:
        ask = {"prompt_embeds": [torch.randn(64, pipe.backbone.config.text_dim, device="cuda") for _ in range(images)]}
    options = {"output_type": "pt", "seed": 0, **ask}
    pipe(**options)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = pipe(**options).trace.seconds
    peak = torch.cuda.max_memory_allocated()
    e = pipe.estimate(batch=images)
    size = pipe.schedule().last[0] * pipe.tokenizer.stride
    numbers = (e.weights, e.kv_cache, e.blocks, e.decoder, e.total, peak)
    return (
        f"{name:<16} {size:>4} px  {images:>2}  {dtype:<8} {'  '.join(f'{n / GIB:6.2f}' for n in numbers)}  "
        f"{e.total / peak:5.2f}  {seconds['transformer']:6.2f} + {seconds['decode']:.2f}"
    )


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GiB; guided; one warm-up run")
    print(
        "model             size     n  dtype     weights      kv  blocks decoder   total    peak  ratio  "
        "seconds (scales + decode)"
    )
    for run in RUNS:
        if len(sys.argv) == 1 or run[0] in sys.argv[1:]:
            print(measure(*run), flush=True)
            torch.cuda.empty_cache()
