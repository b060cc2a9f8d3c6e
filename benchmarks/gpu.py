"""Time, memory and where it goes, on a CUDA GPU, at the true shapes with random weights.

    python benchmarks/gpu.py [--models infinity-2b,infinity-8b] [--runtimes eager,graphs] [--batches 1,4,8]
                             [--decisions recorded | fixed] [--ratios none "nova:t*=7,spread=0.15"]
                             [--size 1M] [--quantize fp8]
                             [--json FILE] [--plot PNG] [--profile LINES]
    python benchmarks/gpu.py --from FILE... --plot PNG      # only draws what was measured before

Guided, 40 text tokens, bfloat16, decode included, text encoder not counted. `warm_up` comes first, which knows nothing
of the decisions; every call has another prompt, seed and decision. Printed are the median and the 95th percentile of
the wall time of a call, and of one more call the times of its scales by CUDA events.
Memory is what torch holds of the device, caches emptied before: what graphs keep to themselves is in it. `cold` is the
time from the start of this process to its first picture.

With random weights entropies mean nothing, so decisions are given (benchmarks/decisions.py): `nova:recorded` plays
those of the model that comes with the package, another one in every call; `nova:recorded=N` the N-th of them again and
again; `nova:t*=7,spread=0.15` one that drops NOVA's share of a scale after scale 7, a layer's being (1 + 0.15) and
(1 - 0.15) times that in turn. `--decisions recorded` and `fixed` stand for the first and the last. Probe, selection and
restoration are switched on and paid for. With `,cache=zero` behind it holes stay as they are, as in NOVA(cache="zero");
`,probe=previous` looks at the scale before instead of the layer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decisions import T_EST, Recorded, alternating, read_decisions, varied
from memory import random_pipeline
from nextscale.estimate import GIB
from nextscale.methods import NOVA
from nextscale.models.quantize import to_fp8
from nextscale.pipeline import Pipeline
from nextscale.run import Run
from nextscale.runtime import make_executor
from nextscale.runtime.eager import Eager
from nextscale.schedule import Scale, Schedule

TEXT = 40  # tokens of the prompt
DECISIONS = {"recorded": "nova:recorded", "fixed": "nova:t*=7,spread=0.15"}
BANDWIDTH, ARITHMETIC = 4.3e12, 790e12  # bytes and bf16 operations per second that an H200 was seen to reach


def read_ratios(text: str, depth: int) -> NOVA | None:
    """`none`, `nova:recorded`, `nova:recorded=N` or `nova:t*=7,spread=0.15`; behind it perhaps fields of NOVA."""
    if text == "none":
        return None
    fields = dict([*part.split("="), ""][:2] for part in text.removeprefix("nova:").split(","))
    options: dict[str, Any] = {"cache": fields.get("cache", "residual"), "probe": fields.get("probe", "auto")}
    if "recorded" not in fields:
        star = int(fields.get("t*", 7))
        decision = alternating(star, float(fields.get("spread", 0.15)), depth)
        return Recorded(t_est=star - 1, source=itertools.repeat(decision), **options)
    decisions = read_decisions()
    source = itertools.repeat(decisions[int(fields["recorded"])]) if fields["recorded"] else varied(decisions)
    return Recorded(t_est=T_EST - 1, source=source, **options)  # t* may be shifted to T_EST


def floor(pipe: Pipeline, scale: Scale, rows: int, share: float) -> float:
    """Seconds that a scale takes at least: its weights are read once, its kept tokens are computed."""
    b = pipe.backbone
    tokens, keys = scale.tokens * share, scale.start + scale.tokens
    flops = b.depth * sum(b.flops(p, int(tokens), TEXT if p == "cross" else keys) for p in b.parts)
    weights = sum(p.nbytes for p in b.blocks.parameters())
    return max(weights / BANDWIDTH, rows * (flops + b.head_flops(scale.tokens)) / ARITHMETIC)


def decode_alone(pipe: Pipeline, images: int, schedule: Schedule, repeats: int = 5) -> float:
    """Milliseconds, by CUDA events."""
    features = torch.randn_like(pipe.tokenizer.blank(images, schedule)) * 0.2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time is a warm-up
        begin.record()
        for _ in range(repeats):
            pipe.executor.decode(pipe.tokenizer, features)
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def age_of_process() -> float:
    """Seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def marked(executor: Eager, opened: Any) -> Iterator[None]:
    """The event is recorded when a call's state is there."""
    real = executor.open

    def open_and_record(*given: Any) -> Run:
        run = real(*given)
        opened.record()
        return run

    executor.open = open_and_record  # type: ignore[method-assign]
    try:
        yield
    finally:
        executor.open = real  # type: ignore[method-assign]


def profile(call: Any, lines: int) -> tuple[int, float, float]:
    """The kernels of one call by the time they take; how many nodes ran, their milliseconds, and those between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        call()
        torch.cuda.synchronize()
    found = [e for e in watched.key_averages() if e.self_device_time_total and not e.key.startswith("aten::")]
    total, nodes = sum(e.self_device_time_total for e in found) / 1e3, sum(e.count for e in found)
    for e in sorted(found, key=lambda e: -e.self_device_time_total)[:lines]:
        print(f"  {e.self_device_time_total / 1e3:>9.2f} ms {e.count:>6} x  {e.key[:100]}")
    ran = sorted((e.time_range.start, e.time_range.end) for e in watched.events() if e.device_type.name == "CUDA")
    ends = itertools.accumulate((end for _, end in ran), max)
    idle = sum(max(start - end, 0) for (start, _), end in zip(ran[1:], ends, strict=False))
    return nodes, total, idle / 1e3


def measure(
    pipe: Pipeline, images: int, method: NOVA | None, repeats: int, size: str = "1M", lines: int = 0
) -> dict[str, Any]:
    width = pipe.backbone.config.text_dim
    sized = {} if pipe.backbone.family == "hart" else {"pixel_budget": size}
    call: dict[str, Any] = {"output_type": "pt", "method": method, **sized}
    schedule = pipe.schedule(**sized)
    texts = ([torch.randn(TEXT, width, device="cuda") for _ in range(images)] for _ in itertools.count())
    began = time.perf_counter()
    pipe.warm_up([sized], [method], [images], text_tokens=TEXT)
    pipe(**call, prompt_embeds=next(texts), seed=0)
    torch.cuda.synchronize()
    first, cold = time.perf_counter() - began, age_of_process()
    for seed in range(2):
        pipe(**call, prompt_embeds=next(texts), seed=seed)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    captured = pipe.captured
    seconds = []
    for seed in range(repeats):
        embeds = next(texts)
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = pipe(**call, prompt_embeds=embeds, seed=seed)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    call["prompt_embeds"] = embeds
    # An eager run's caching allocator holds more than it needs; memory of graphs is not called allocated.
    graphs = pipe.executor.name == "graphs"
    peak = torch.cuda.max_memory_reserved() if graphs else torch.cuda.max_memory_allocated()
    captured = pipe.captured - captured
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(schedule) + 2)]
    marks = iter(events[2:])
    pipe.warm_up([sized], [method], [images], text_tokens=TEXT, callbacks=True)  # such calls are captured by themselves
    pipe(**call, seed=0, callback_on_scale_end=lambda end: None)
    events[0].record()
    with marked(pipe.executor, events[1]):
        made = pipe(**call, seed=0, callback_on_scale_end=lambda end: next(marks).record())
    torch.cuda.synchronize()
    text, *scales = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    trace = made.trace.to_dict()["images"][0]
    shares = [sum(x["kept"] for x in e["layers"]) / (len(e["layers"]) * e["tokens"]) for e in trace["scales"]]
    least = [floor(pipe, s, 2 * images, share) for s, share in zip(schedule, shares, strict=True)]
    whole = statistics.median(seconds)
    nodes, kernels, idle = profile(lambda: pipe(**call, seed=0), lines)
    flops = images * trace["flops"]
    decode = decode_alone(pipe, images, schedule)
    weights = sum(p.nbytes for p in (*pipe.backbone.blocks.parameters(), *pipe.backbone.blocks.buffers()))
    return {
        "ms": 1e3 * whole,
        "mean_ms": 1e3 * statistics.mean(seconds),
        "p95_ms": 1e3 * sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
        "decode_ms": decode,
        "captures": captured,  # of scales, during the calls that were timed
        "kernels_ms": kernels,
        "idle_ms": idle,  # between kernels
        "nodes_per_layer": nodes / len(schedule) / pipe.backbone.depth,  # with all that a scale does besides
        # Weights that were read, once a scale, over the time of the scales: the least that was moved.
        "tb_per_second": weights * len(schedule) / (whole - decode / 1e3) / 1e12,
        "text_ms": text,  # until the text's keys and values and all modulations are known, the host's part included
        "scales_ms": scales,
        "floor_ms": 1e3 * sum(least),
        "tokens": trace["row_tokens_computed"] / trace["row_tokens_full"],
        "images_per_second": images / whole,
        "peak_gib": peak / GIB,
        "tflops": flops / whole / 1e12,
        "first_call_s": first,
        "cold_s": cold,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of every scale, one panel per model and batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    styles = {"eager": "--", "compiled": ":", "graphs": "-"}
    ratios = dict.fromkeys(["none", *(r["ratios"] for r in rows)])
    looks = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "d"), ("#E69F00", "v"))
    of_ratios = dict(zip(ratios, itertools.cycle(looks), strict=False))
    panels = list(dict.fromkeys((r["model"], r["images"]) for r in rows))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4), layout="constrained", squeeze=False, sharey=True
    )
    for axis, (model, images) in zip(axes[0], panels, strict=True):
        for row in rows:
            if (row["model"], row["images"]) == (model, images):
                colour, marker = of_ratios[row["ratios"]]
                what = "nothing dropped" if row["ratios"] == "none" else row["ratios"]
                label = f"{row['runtime']}, {what}: {row['ms']:.0f} ms"
                scales = range(1, len(row["scales_ms"]) + 1)
                look = {"color": colour, "marker": marker, "ls": styles[row["runtime"]], "ms": 4, "lw": 1.4}
                axis.plot(scales, row["scales_ms"], label=label, **look)
        axis.set(xlabel="scale", yscale="log", title=f"{model}, batch {images}", xticks=list(scales))
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    axes[0][0].set_ylabel("milliseconds")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="infinity-2b,infinity-8b")
    parser.add_argument("--runtimes", default="eager,graphs")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--decisions", choices=DECISIONS, nargs="+", default=list(DECISIONS))
    parser.add_argument("--ratios", nargs="+", help="instead of those of --decisions, and of a plain run")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--size", default="1M", help="pixel budget: 1M, or 4M for 2048 x 2048")
    parser.add_argument("--quantize", choices=["fp8"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="also the kernels that take most time")
    parser.add_argument("--from", type=Path, nargs="+", dest="before", help="files of --json; nothing is measured")
    options = parser.parse_args()
    if options.before:
        plot([row for path in options.before for row in json.loads(path.read_text())], options.plot)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{where}, bfloat16, guided, {TEXT} text tokens, decode included")
    print(
        f"{'model':<12} {'ratios':<22} {'runtime':<8} {'n':>2} {'ms':>8} {'p95':>8} {'decode':>7} {'floor':>7} "
        f"{'tokens':>7} {'img/s':>6} {'GiB':>6} {'TFLOP/s':>8} {'TB/s':>5} {'nodes':>6} {'first s':>8}"
    )
    rows = []
    for name in options.models.split(","):
        pipe = random_pipeline(name, "bfloat16")
        if options.quantize:
            to_fp8(pipe.backbone, pipe.tokenizer)
            name += " fp8"
        for runtime in options.runtimes.split(","):
            for images in map(int, options.batches.split(",")):
                for ratios in options.ratios or ["none", *(DECISIONS[d] for d in options.decisions)]:
                    pipe.executor = make_executor(runtime, pipe.device)
                    gc.collect()
                    torch.cuda.empty_cache()
                    found = measure(
                        pipe,
                        images,
                        read_ratios(ratios, pipe.backbone.depth),
                        options.repeats,
                        options.size,
                        options.profile,
                    )
                    if rows:
                        del found["cold_s"]  # the process is not young any more
                    rows.append({"model": name, "ratios": ratios, "runtime": runtime, "images": images, **found})
                    print(
                        f"{name:<12} {ratios:<22} {runtime:<8} {images:>2} {found['ms']:>8.1f} {found['p95_ms']:>8.1f} "
                        f"{found['decode_ms']:>7.1f} {found['floor_ms']:>7.1f} {found['tokens']:>7.1%} "
                        f"{found['images_per_second']:>6.1f} {found['peak_gib']:>6.2f} {found['tflops']:>8.0f} "
                        f"{found['tb_per_second']:>5.2f} {found['nodes_per_layer']:>6.1f} "
                        f"{found['first_call_s']:>8.1f}",
                        flush=True,
                    )
                    if len(rows) == 1:
                        print(f"  cold start, process to first picture: {found['cold_s']:.1f} s")
                    print(f"  kernels: {found['kernels_ms']:.1f} ms, between them {found['idle_ms']:.1f} ms")
                    print(f"  mean {found['mean_ms']:.1f} ms, {found['captures']} scales captured while it was timed")
                    print(
                        f"  text {found['text_ms']:.2f} ms; scales, ms: "
                        + " ".join(f"{t:.2f}" for t in found["scales_ms"]),
                        flush=True,
                    )
                    if options.json:
                        options.json.write_text(json.dumps(rows, indent=1))
        del pipe
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
