"""What ToProVAR's attention entropy and its singular values cost: its Tables 5 and 6.

    python benchmarks/toprovar_cost.py [--model infinity-8b] [--run infinity-2b] [--runtime graphs] [--repeats 20]

Table 6: milliseconds of one layer over all scales of --model, and at one of them; two rows, random queries and keys.
  frequency    FastVAR's score of the tokens
  naive        attention entropy from the scores, a chunk of queries at a time, without the attention itself
  attention    without entropy, and `with entropy`: the kernel that accumulates it
  SVD          of the maps of attention entropy at the representative scale, of one layer and of all
Table 5: seconds of whole runs of --run, random weights, decode included: plain, FastVAR, and ToProVAR with its entropy
computed apart ("w/o FAE") and in the attention kernel ("w/ FAE"). With random weights entropies decide nothing, so
ToProVAR starts behind the representative scale and thins all layers alike, to about the published 30 % of the tokens.

On a machine without a GPU both tables are of torch's attention, where entropy is always computed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from attention_entropy import milliseconds as gpu_milliseconds
from memory import random_pipeline
from nextscale.engine.schedule import Schedule, infinity_schedule
from nextscale.kernels import flash_attention
from nextscale.kernels.sdpa import attention_entropy
from nextscale.methods import FastVAR, Method, ToProVAR
from nextscale.models.registry import MODELS
from nextscale.pipeline import Pipeline
from nextscale.runtime.registry import make_executor
from timed import timed

ROWS, TEXT = 2, 40
SHOWN = 10 / 13  # the scale of the second column
REPRESENTATIVE = ToProVAR().representative
THINNED = ToProVAR(scale_stage=False, layer_stage=False, a_max=0.8)


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    if device == "cuda":
        return gpu_milliseconds(run, repeats)
    return 1e3 * statistics.median(host_seconds(run) for _ in range(repeats))


def host_seconds(run: Callable[[], object]) -> float:
    """Of a call that ends on the host, or waits for the device."""
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def table_6(
    heads: int, width: int, depth: int, schedule: Schedule, device: str, repeats: int = 20
) -> dict[str, tuple[float | None, float]]:
    """Milliseconds over all scales (None: the operation is of one scale) and at one."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found: dict[str, list[float]] = {}
    for scale in schedule:
        n, s = scale.tokens, scale.start + scale.tokens
        # Cosine attention: unit vectors, and a learned factor of 10 that is part of the queries.
        q, k, v = (torch.randn(ROWS, heads, m, width, device=device) for m in (n, s, s))
        q, k = (torch.nn.functional.normalize(t, dim=-1).to(dtype) for t in (q, k))
        q, v, x = q * 10, v.to(dtype), torch.randn(ROWS, n, heads * width, device=device)
        runs = {
            "frequency": lambda x=x: (x - x.mean(dim=1, keepdim=True)).square().sum(-1),
            "naive": lambda q=q, k=k: attention_entropy(q, k, 1.0),
            "attention": lambda q=q, k=k, v=v: flash_attention.attend(q, k, v, 1.0),
            "with entropy": lambda q=q, k=k, v=v: flash_attention.attend(q, k, v, 1.0, return_entropy=True),
        }
        for name, run in runs.items():
            run()  # loads what it needs
            found.setdefault(name, []).append(milliseconds(run, device, repeats))
    shown = round(SHOWN * len(schedule)) - 1
    table: dict[str, tuple[float | None, float]] = {name: (sum(each), each[shown]) for name, each in found.items()}
    h, w = schedule.grids[round(REPRESENTATIVE * len(schedule)) - 1]
    maps = torch.rand(depth, h, w, device=device)
    for name, run in {
        "SVD, one layer": lambda: torch.linalg.svdvals(maps[0]),
        "SVD, all layers": lambda: torch.linalg.svdvals(maps),
        "SVD, all layers, one by one": lambda: [torch.linalg.svdvals(map_) for map_ in maps],
    }.items():
        run()
        # It waits for the device, so no graph can hold it: the wall clock.
        table[name] = None, 1e3 * statistics.median(host_seconds(run) for _ in range(repeats))
    return table


@contextlib.contextmanager
def entropy_apart() -> Iterator[None]:
    """Attention without its entropy, which is then computed from the scores."""
    fused = flash_attention.fused_attention

    def apart(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        length: Tensor | None = None,
        more: Tensor | None = None,
        return_entropy: bool = False,
        *rest: object,
    ) -> tuple[Tensor, Tensor | None]:
        out = fused(q, k, v, scale, length, more, False, *rest)[0]
        if not return_entropy:
            return out, None
        reference = {"supports": lambda q: False, "scaled_dot_product_attention": lambda q, *unused: q}
        with mock.patch.multiple(flash_attention, **reference):
            return out, flash_attention.attend(q, k, v, scale, length, more, True, *rest)[1]

    with mock.patch.object(flash_attention, "fused_attention", apart):
        yield


def table_5(pipe: Pipeline, runtime: str, repeats: int = 20) -> dict[str, tuple[float, float]]:
    """Seconds of a whole run (median), and the share of tokens computed."""
    setups: dict[str, tuple[Method | None, contextlib.AbstractContextManager[None]]] = {
        "plain": (None, contextlib.nullcontext()),
        "FastVAR": (FastVAR.preset("infinity"), contextlib.nullcontext()),
        "ToProVAR, entropy apart": (THINNED, entropy_apart()),
        "ToProVAR, entropy in the kernel": (THINNED, contextlib.nullcontext()),
    }
    config = pipe.backbone.config
    text = torch.randn(min(TEXT, config.text_length), config.text_dim, device=pipe.device)
    found = {}
    for name, (method, as_asked) in setups.items():
        with as_asked:
            pipe.executor = make_executor(runtime, pipe.device)  # what the setup before has captured is not ours
            call = {"prompt_embeds": [text], "method": method, "output_type": "pt"}
            for seed in range(3):  # compiles, captures
                pipe(seed=seed, **call)
            runs = [timed(pipe, seed=seed, **call) for seed in range(repeats)]
        found[name] = statistics.median(r.seconds for r in runs), statistics.mean(r.share for r in runs)
    return found


def show(name: str, six: dict[str, tuple[float | None, float]], run: str, five: dict[str, tuple[float, float]]) -> None:
    print(f"\nTable 6: milliseconds of one layer of {name}\n{'':<32}{'all scales':>12}{'one scale':>12}")
    for row, (everywhere, one) in six.items():
        print(f"{row:<32}{'' if everywhere is None else f'{everywhere:.3f}':>12}{one:>12.3f}")
    print(f"\nTable 5: seconds of a run of {run}\n{'':<32}{'seconds':>12}{'speed':>12}{'tokens':>12}")
    for row, (seconds, share) in five.items():
        print(f"{row:<32}{seconds:>12.4f}{five['plain'][0] / seconds:>11.2f}x{share:>12.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="infinity-8b")
    parser.add_argument("--run", default="infinity-2b")
    parser.add_argument("--runtime", default="graphs")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("at these shapes this benchmark needs a CUDA GPU; its test plays it on tiny ones")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS} rows, bfloat16, {options.runtime}")
    config = MODELS[options.model].backbone
    shape = config.heads, config.width // config.heads, config.depth
    six = table_6(*shape, infinity_schedule(1.0, "1M"), "cuda", options.repeats)
    five = table_5(random_pipeline(options.run, "bfloat16"), options.runtime, options.repeats)
    show(options.model, six, options.run, five)


if __name__ == "__main__":
    main()
