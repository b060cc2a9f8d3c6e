"""Time, memory and where it goes, on a CUDA GPU, at the true shapes with random weights.

    python benchmarks/gpu.py [--models infinity-2b,infinity-8b,hart-0.7b,embedded] [--runtimes eager,graphs]
                             [--batches 1,4,8] [--quantize none fp8] [--size 1M] [--repeats 20]
                             [--decisions recorded fixed own] [--ratios none "nova:t*=7,spread=0.15"]
                             [--brief] [--json FILE] [--plot PNG] [--profile LINES]
    python benchmarks/gpu.py --from FILE... --plot PNG      # only draws what was measured before

Guided, 40 text tokens, bfloat16, decode included, text encoder not counted. `warm_up` comes first, which knows nothing
of the decisions; every call has another prompt, seed and decision. Printed are the median, the mean and the 95th
percentile of the wall time of a call, the share of tokens that were computed (median and mean of these same calls), and
the times of calls that were reduced apart from those that never were. Of one more call: the times of its scales by CUDA
events, its kernels, decode alone. `--brief` leaves that out, for it takes as long as some dozen calls.
Memory is what torch holds of the device, caches emptied before: what graphs keep to themselves is in it. `cold` is the
time from the start of this process to its first image. With the first line of a model and runtime a fresh executor is
warmed up as well: how long that takes when all kernels are compiled.

With random weights entropies mean nothing, so decisions are given (benchmarks/decisions.py): `nova:recorded` plays
those of the model that comes with the package, another one for every image of every call; `nova:recorded=N` the N-th
of them again and again; `nova:t*=7,spread=0.15` one that drops NOVA's share of a scale after scale 7, a layer's being
(1 + 0.15) and (1 - 0.15) times that in turn. `--decisions recorded` and `fixed` stand for the first and the last.
Probe, selection and restoration are switched on and paid for. With `,cache=zero` behind it holes stay as they are, as
in NOVA(cache="zero"); `,probe=previous` looks at the scale before instead of the layer.

`embedded` is the model that comes with the package, with its weights and the 96 prompts of the recorded decisions:
there `--decisions own` (`nova:t_est=6`), or any method by its name in `--ratios`, decides by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decisions import T_EST, RecordedNOVA, alternating, prompts, read_decisions, vary
from memory import random_pipeline
from nextscale.engine.memory import GIB
from nextscale.engine.schedule import Scale, Schedule
from nextscale.engine.state import GenerationState
from nextscale.methods.base import Method
from nextscale.methods.naming import parse_method
from nextscale.methods.nova import NOVA
from nextscale.models.fp8 import to_fp8
from nextscale.pipeline import Pipeline
from nextscale.runtime.eager import Eager
from nextscale.runtime.registry import make_executor
from timed import empty_cache, format_times, summary, synchronize, timed

TEXT = 40  # tokens of the prompt
EMBEDDED = "embedded"
DECISIONS = {"recorded": "nova:recorded", "fixed": "nova:t*=7,spread=0.15", "own": f"nova:t_est={T_EST}"}
BANDWIDTH, ARITHMETIC = 4.3e12, 790e12  # bytes and bf16 operations per second that an H200 was seen to reach


def read_ratios(text: str, depth: int) -> Method | None:
    """`none`, `nova:recorded`, `nova:recorded=N` or `nova:t*=7,spread=0.15`, behind it perhaps fields of NOVA; anything
    else is a method that decides by itself."""
    fields = dict([*part.split("="), ""][:2] for part in text.removeprefix("nova:").split(","))
    if not fields.keys() & {"recorded", "t*", "spread"}:
        return parse_method(text)
    literal = dataclasses.asdict(NOVA.preset("literal"))
    base = literal if fields.get("rank", "layer") == "layer" else {}
    options: dict[str, Any] = {**base, **{name: fields[name] for name in ("cache", "probe", "rank") if name in fields}}
    options.pop("t_est", None)
    if "recorded" not in fields:
        star = int(fields.get("t*", 7))
        decision = alternating(star, float(fields.get("spread", 0.15)), depth)
        return RecordedNOVA(t_est=star - 1, source=itertools.repeat(decision), **options)
    decisions = read_decisions()
    source = itertools.repeat(decisions[int(fields["recorded"])]) if fields["recorded"] else vary(decisions)
    return RecordedNOVA(t_est=T_EST - 1, source=source, **options)  # t* may be shifted to T_EST


def pipeline(name: str, quantize: str, device: str = "cuda") -> Pipeline:
    if name == EMBEDDED:
        pipe = Pipeline.from_pretrained(dtype="bfloat16", device=device, progress_bar=False)
    else:
        pipe = random_pipeline(name, "bfloat16", device)
    if quantize == "fp8":
        to_fp8(pipe.backbone, pipe.tokenizer)
    return pipe


def text_features(pipe: Pipeline) -> Iterator[Tensor]:
    """Features of prompts, without end: those of the recorded decisions where there is an encoder, else any."""
    if pipe.text_encoder is not None:
        return itertools.cycle(pipe.encode_prompt(prompts()))
    config = pipe.backbone.config
    shape = min(TEXT, config.text_length), config.text_dim
    return (torch.randn(shape, device=pipe.device) for _ in itertools.count())


@dataclass
class CallSeries:
    """Calls of one shape, each with other prompts and seeds."""

    pipe: Pipeline
    images: int
    method: Method | None
    size: dict[str, Any]  # arguments of a call
    text_features: Iterator[Tensor]
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def warm_up(self, **options: Any) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.pipe.warm_up([self.size], [self.method], [self.images], text_tokens=TEXT, **options)
        synchronize(self.pipe.device)
        return time.perf_counter() - began

    def next(self) -> dict[str, Any]:
        """Arguments of another call."""
        embeds = list(itertools.islice(self.text_features, self.images))
        seed = next(self.seeds) * self.images  # the images of a call have seeds that follow each other
        return {"output_type": "pt", "method": self.method, "prompt_embeds": embeds, "seed": seed, **self.size}

    def warm_up_again(self) -> float:
        """Seconds of a fresh executor, when all kernels are compiled."""
        self.pipe.executor = type(self.pipe.executor)()
        empty_cache(self.pipe.device)
        return self.warm_up()


def min_seconds(pipe: Pipeline, scale: Scale, rows: int, share: float) -> float:
    """Bound the time of a scale from below: its weights are read once, its kept tokens are computed."""
    b = pipe.backbone
    tokens, keys = scale.tokens * share, scale.start + scale.tokens
    flops = b.depth * sum(b.flops(p, int(tokens), TEXT if p == "cross" else keys) for p in b.sublayers)
    weights = sum(p.nbytes for p in b.blocks.parameters())
    return max(weights / BANDWIDTH, rows * (flops + b.head_flops(scale.tokens)) / ARITHMETIC)


def decode_alone(pipe: Pipeline, images: int, schedule: Schedule, repeats: int = 5) -> float:
    """Milliseconds, by CUDA events."""
    features = torch.randn_like(pipe.tokenizer.empty_features(images, schedule)) * 0.2
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time is a warm-up
        begin.record()
        for _ in range(repeats):
            pipe.executor.decode(pipe.tokenizer, features)
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def process_age() -> float:
    """Seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def record_on_open(executor: Eager, opened: Any) -> Iterator[None]:
    """Record the event when a call has been opened."""
    real = executor.open

    def open_and_record(*given: Any) -> GenerationState:
        state = real(*given)
        opened.record()
        return state

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


def measure(asked: CallSeries, repeats: int) -> dict[str, Any]:
    pipe, cuda = asked.pipe, asked.pipe.device.type == "cuda"
    warm_up = asked.warm_up()
    pipe(**asked.next())
    synchronize(pipe.device)
    cold = process_age()
    for _ in range(2):
        pipe(**asked.next())
    empty_cache(pipe.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    captured, grown = pipe.captured, pipe.executor.grown
    calls = [timed(pipe, **asked.next()) for _ in range(repeats)]
    # An eager run's caching allocator holds more than it needs; memory of graphs is not called allocated.
    peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    found = summary(calls)
    return {
        **found,
        "grown": pipe.executor.grown - grown,  # times that the pages of KV caches became more
        "captures": pipe.captured - captured,  # of scales, during the calls that were timed
        "images_per_second": 1e3 * asked.images / found["ms"],
        "peak_gib": peaks[pipe.executor.name == "graphs"]() / GIB if cuda else 0.0,
        "tflops": sum(call.flops for call in calls) / sum(call.seconds for call in calls) / 1e12,
        "warm_up_s": warm_up,
        "cold_s": cold,
    }


def breakdown(asked: CallSeries, ms: float, lines: int) -> dict[str, Any]:
    """Say where the time of a call goes whose median takes so many `ms`."""
    pipe, images = asked.pipe, asked.images
    schedule, call = pipe.schedule(**asked.size), asked.next()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(schedule) + 2)]
    marks = iter(events[2:])
    asked.warm_up(callbacks=True)  # such calls are captured by themselves
    pipe(**call, callback_on_scale_end=lambda end: None)
    events[0].record()
    with record_on_open(pipe.executor, events[1]):
        made = pipe(**call, callback_on_scale_end=lambda end: next(marks).record())
    torch.cuda.synchronize()
    text, *scales = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    trace = made.trace.to_dict()["images"][0]
    shares = [sum(x["kept"] for x in e["layers"]) / (len(e["layers"]) * e["tokens"]) for e in trace["scales"]]
    least = [min_seconds(pipe, s, 2 * images, share) for s, share in zip(schedule, shares, strict=True)]
    nodes, kernels, idle = profile(lambda: pipe(**call), lines)
    decode = decode_alone(pipe, images, schedule)
    weights = sum(p.nbytes for p in (*pipe.backbone.blocks.parameters(), *pipe.backbone.blocks.buffers()))
    return {
        "decode_ms": decode,
        "kernels_ms": kernels,
        "idle_ms": idle,  # between kernels
        "nodes_per_layer": nodes / len(schedule) / pipe.backbone.depth,  # with all that a scale does besides
        # Weights that were read, once a scale, over the time of the scales: the least that was moved.
        "tb_per_second": weights * len(schedule) / (ms - decode) / 1e9,
        "text_ms": text,  # until the text's keys and values and all modulations are known, the host's part included
        "scales_ms": scales,
        "floor_ms": 1e3 * sum(least),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of every scale, one panel per model and batch; lines of --brief have none."""
    rows = [row for row in rows if "scales_ms" in row]
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
                color, marker = of_ratios[row["ratios"]]
                what = "nothing dropped" if row["ratios"] == "none" else row["ratios"]
                label = f"{row['runtime']}, {what}: {row['ms']:.0f} ms"
                scales = range(1, len(row["scales_ms"]) + 1)
                look = {"color": color, "marker": marker, "ls": styles[row["runtime"]], "ms": 4, "lw": 1.4}
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


def compiled_kernels() -> int:
    """That Triton has on disk: without any, the first warm-up compiles all it needs."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:<16} {row['ratios']:<22} {row['runtime']:<8} {row['images']:>2} {row['calls']:>5} "
        f"{row['ms']:>8.1f} {row['mean_ms']:>8.1f} {row['p95_ms']:>8.1f} {row['tokens']:>7.1%} "
        f"{row['mean_tokens']:>7.1%} {row['images_per_second']:>6.1f} {row['peak_gib']:>6.2f} {row['tflops']:>8.0f} "
        f"{row['captures']:>8} {row['warm_up_s']:>9.1f}"
    )
    if row["reduced"]:
        print(f"  reduced: {format_times(row['reduced'])}")
        print(f"  never reduced: {format_times(row['not_reduced']) if row['not_reduced'] else 'none'}")
    if row["grown"]:
        print(f"  pages of the KV cache were added {row['grown']} times")
    if "cold_s" in row:
        print(f"  cold start, process to first image: {row['cold_s']:.1f} s")
    if "warm_again_s" in row:
        print(f"  warm-up of a fresh executor, kernels compiled: {row['warm_again_s']:.1f} s")
    if "scales_ms" in row:
        print(
            f"  decode {row['decode_ms']:.1f} ms; at least {row['floor_ms']:.1f} ms; {row['tb_per_second']:.2f} TB/s; "
            f"{row['nodes_per_layer']:.1f} nodes a layer"
        )
        print(f"  kernels: {row['kernels_ms']:.1f} ms, between them {row['idle_ms']:.1f} ms")
        print(f"  text {row['text_ms']:.2f} ms; scales, ms: " + " ".join(f"{t:.2f}" for t in row["scales_ms"]))


def read_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="infinity-2b,infinity-8b")
    parser.add_argument("--runtimes", default="eager,graphs")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--decisions", choices=DECISIONS, nargs="+", default=["recorded", "fixed"])
    parser.add_argument("--ratios", nargs="+", help="instead of those of --decisions, and of a plain run")
    parser.add_argument("--repeats", type=int, default=20, help="calls that are timed")
    parser.add_argument("--size", default="1M", help="pixel budget: 1M, or 4M for 2048 x 2048")
    parser.add_argument("--quantize", choices=["none", "fp8"], nargs="+", default=["none"], help="one after the other")
    parser.add_argument("--brief", action="store_true", help="only calls as a user makes them: nothing of their scales")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="also the kernels that take most time")
    parser.add_argument("--from", type=Path, nargs="+", dest="before", help="files of --json; nothing is measured")
    options = parser.parse_args(given)
    options.ratios = options.ratios or ["none", *(DECISIONS[d] for d in options.decisions)]
    if options.brief and (options.plot or options.profile):
        parser.error("--brief knows nothing of scales and kernels: leave out --plot and --profile")
    return options


def rows(pipe: Pipeline, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One for every runtime, batch and method; the first of a runtime also warms up again."""
    size = {} if pipe.backbone.family == "hart" else {"pixel_budget": options.size}
    known, asks = (
        text_features(pipe),
        (options.runtimes.split(","), map(int, options.batches.split(",")), options.ratios),
    )
    warm = {"eager"}  # it keeps nothing between calls
    for runtime, images, ratios in itertools.product(*asks):
        pipe.executor = make_executor(runtime, pipe.device)
        empty_cache(pipe.device)
        asked = CallSeries(pipe, images, read_ratios(ratios, pipe.backbone.depth), size, known)
        found = {"ratios": ratios, "runtime": runtime, "images": images, **measure(asked, options.repeats)}
        if not options.brief:
            found.update(breakdown(asked, found["ms"], options.profile))
        if runtime not in warm:
            warm.add(runtime)
            found["warm_again_s"] = asked.warm_up_again()
        yield found


def main() -> None:
    options = read_options()
    if options.before:
        plot([row for path in options.before for row in json.loads(path.read_text())], options.plot)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{where}, bfloat16, guided, {TEXT} text tokens, decode included; {compiled_kernels()} kernels on disk")
    print(
        f"{'model':<16} {'ratios':<22} {'runtime':<8} {'n':>2} {'calls':>5} {'ms':>8} {'mean':>8} {'p95':>8} "
        f"{'tokens':>7} {'mean':>7} {'img/s':>6} {'GiB':>6} {'TFLOP/s':>8} {'captures':>8} {'warm-up s':>9}"
    )
    found: list[dict[str, Any]] = []
    for name, quantize in itertools.product(options.models.split(","), options.quantize):
        pipe = pipeline(name, quantize)
        for row in rows(pipe, options):
            if found:
                del row["cold_s"]  # the process is not young any more
            found.append({"model": name if quantize == "none" else f"{name} {quantize}", **row})
            show(found[-1])
            print(end="", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
        del pipe, row
        empty_cache(torch.device("cuda"))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
