"""The server under load: its throughput beside the pipeline's own, then open-loop arrivals.

    python benchmarks/serving.py throughput [--images 12]     # the server against calling the pipeline in a loop
    python benchmarks/serving.py load [--seconds 60] [--rates 0.5,1,2,10] [--plot serving.png]
    python benchmarks/serving.py load --rates 10 --seconds 300 --sizes 512x512 --methods default --previews 0
    python benchmarks/serving.py engine [--batch 1]                # no HTTP: the engine against the pipeline
    python benchmarks/serving.py engine --device cuda --runtime graphs --shapes infinity-2b --method nova:recorded
    python benchmarks/serving.py mixed --device cuda --runtime graphs [--shapes infinity-2b --method nova:recorded]

Each command starts a server of its own (`--url` uses another).
Every request has another prompt and another seed. `load` first measures the capacity for its own mix of sizes and
methods, with as many clients as images are computed at once; then requests arrive at random (Poisson) at multiples of
it, whether or not earlier ones were answered. A third of them streams previews of every scale. At the end some of the
accepted requests are repeated on the idle server: the image must be the same, byte by byte where batches have one
image, for an image in a batch may differ by rounding (docs/equality.md). It fails if a request ends otherwise than with
its image or a 429, if the server's counts are not those of its clients, and if memory grows after the first minute.

The generator runs on the same machine; its share of the CPU is printed.

`engine` measures the throughput of an engine that has something to do: groups of batches by the pipeline in a loop, and
by the engine, in turns. Beside it, on the idle engine: the time from a request to its image, and to its first preview.

`mixed` submits jobs to an engine without HTTP, after its warm-up: sizes, methods, guidance, numbers of images, texts
and previews in random order, some canceled. Nothing may be captured then, and every image must come.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import itertools
import json
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from nextscale.io.reading import read_json

PROMPTS = [
    ask["prompt"] for ask in read_json(Path(__file__).parents[1] / "src/nextscale/assets/scenes.json", "scenes")["asks"]
]
ACCEPTED = "answered"


@dataclass
class Answer:
    """What became of a request."""

    body: dict[str, Any]
    begun: float
    outcome: str = ""  # ACCEPTED, or the code of an error
    seconds: float = 0.0
    first_preview: float | None = None
    previews: int = 0
    image: bytes = b""
    retry_after: float | None = None  # of a refusal
    batch_seconds: float = 0.0  # of the batch that it was in, as the server says


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str] | None = None
    samples: list[tuple[float, float, int]] = field(default_factory=list)  # seconds, MiB, images that wait

    async def metrics(self, client: httpx.AsyncClient) -> dict[str, float]:
        text = (await client.get(f"{self.url}/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^([\w:]+(?:{.*?})?) (\S+)$", text, re.MULTILINE)}


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Iterator[Server]:
    if options.url:
        yield Server(options.url.rstrip("/"))
        return
    command = [sys.executable, "-m", "nextscale", "serve", "--port", "0", "--max-queue", str(options.max_queue)]
    command += [] if options.max_batch is None else ["--max-batch", str(options.max_batch)]
    command += itertools.chain.from_iterable(["--model", model] for model in options.model or ())
    command += ["--method", options.method, "--runtime", options.runtime]
    command += [] if options.warm is None else ["--warm", options.warm]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://\S+", line):
            server = Server(found[0].rstrip("/.,"), process)
            break
    else:
        raise SystemExit("the server did not start")
    while httpx.get(f"{server.url}/health").status_code != 200:
        time.sleep(0.1)
    yield server
    process.send_signal(signal.SIGTERM)
    print(f"the server ended with exit code {process.wait(60)}")


async def send(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    answer = Answer(body, time.monotonic())
    try:
        async with client.stream("POST", f"{url}/v1/images/generations", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                answer.outcome = f"{response.status_code} {error['code']}"
                answer.retry_after = float(response.headers.get("retry-after-ms", "nan")) / 1000
            elif body.get("stream"):
                await read_stream(response, answer)
            else:
                content = json.loads(await response.aread())
                read_image(answer, content["data"][0])
                answer.batch_seconds = content["nextscale"]["seconds"]
    except httpx.HTTPError as error:
        answer.outcome = type(error).__name__
    answer.seconds = time.monotonic() - answer.begun
    return answer


async def read_stream(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.outcome = f"stream {event['error']['code']}"
        elif event["type"] == "image_generation.completed":
            read_image(answer, event)
        else:
            answer.previews += 1
            answer.first_preview = answer.first_preview or time.monotonic() - answer.begun


def read_image(answer: Answer, data: dict[str, Any]) -> None:
    assert not answer.outcome, "answered twice"
    answer.outcome, answer.image = ACCEPTED, base64.b64decode(data["b64_json"])


class Mix:
    """Requests of all kinds, each with a prompt and a seed of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.random, self.seeds = random.Random(0), itertools.count(1000)
        self.sizes, self.methods, self.previews = options.sizes.split(","), options.methods, options.previews

    def __next__(self) -> dict[str, Any]:
        seed = next(self.seeds)
        body: dict[str, Any] = {"prompt": PROMPTS[seed * 7 % len(PROMPTS)], "seed": seed, "output_format": "jpeg"}
        body["size"] = self.random.choice(self.sizes)
        if (method := self.random.choice(self.methods.split(","))) != "default":
            body["method"] = method
        if self.random.random() < self.previews:
            body |= {"stream": True, "previews": "all"}
        return body


async def capacity(client: httpx.AsyncClient, server: Server, mix: Mix, images: int, at_once: int) -> float:
    """Requests a second that the server answers to clients that wait for each answer."""
    bodies = [next(mix) for _ in range(images)]
    begun = time.monotonic()

    async def one_after_another() -> None:
        while bodies:
            answer = await send(client, server.url, bodies.pop())
            assert answer.outcome == ACCEPTED, answer.outcome

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return images / (time.monotonic() - begun)


async def watch(client: httpx.AsyncClient, server: Server, begun: float) -> None:
    while True:
        found = await server.metrics(client)
        memory = found["process_resident_memory_bytes"] / 2**20
        server.samples.append((time.monotonic() - begun, memory, int(found["nextscale_queue_length"])))
        await asyncio.sleep(1)


async def open_loop(client: httpx.AsyncClient, server: Server, mix: Mix, rate: float, seconds: float) -> list[Answer]:
    """Send requests at random moments for some seconds; wait for all answers."""
    begun, arrivals, tasks = time.monotonic(), random.Random(1), list[asyncio.Task[Answer]]()
    server.samples.clear()
    watcher = asyncio.create_task(watch(client, server, begun))
    moment = arrivals.expovariate(rate)
    while moment < seconds:
        await asyncio.sleep(max(0.0, begun + moment - time.monotonic()))
        tasks.append(asyncio.create_task(send(client, server.url, next(mix))))
        moment += arrivals.expovariate(rate)
    answers = await asyncio.gather(*tasks)
    watcher.cancel()
    return list(answers)


def quantiles(values: list[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    at = [ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.95, 0.99)]
    return " / ".join(f"{v:.2f}" for v in (*at, ordered[-1]))


def report(name: str, server: Server, answers: list[Answer]) -> list[str]:
    """Print what happened; return what should not have."""
    outcomes = Counter(answer.outcome for answer in answers)
    done = [a for a in answers if a.outcome == ACCEPTED]
    streamed = [a.first_preview for a in done if a.first_preview is not None]
    refused = [a for a in answers if a.outcome.startswith("429")]
    memory = [mib for _, mib, _ in server.samples] or [0.0]
    minute, last = statistics.median(memory[:60]), statistics.median(memory[-60:])  # a sample a second
    print(f"\n{name}: {len(answers)} requests, " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items())))
    print(f"  seconds of accepted ones, p50 / p95 / p99 / max   {quantiles([a.seconds for a in done])}")
    print(f"  seconds to the first preview                      {quantiles(streamed)}")
    print(f"  refused with 429                                  {len(refused) / max(len(answers), 1):.1%}")
    if refused:
        hints = [a.retry_after for a in refused if a.retry_after is not None]
        print(f"  retry-after of those, seconds                     {quantiles(hints)}")
        print(f"  seconds until a refusal                           {quantiles([a.seconds for a in refused])}")
    print(f"  images that waited, mean / max                    {queue_line(server)}")
    print(f"  memory, MiB: minute 1 / last minute / most        {minute:.0f} / {last:.0f} / {max(memory):.0f}")
    faults = [f"{n} requests ended with {what!r}" for what, n in outcomes.items() if not expected(what)]
    if len(memory) > 150 and last > 1.03 * minute:
        faults.append(f"memory grew from {minute:.0f} to {last:.0f} MiB after the first minute")
    return faults


def expected(outcome: str) -> bool:
    return outcome == ACCEPTED or outcome.startswith("429")


def queue_line(server: Server) -> str:
    waiting = [images for _, _, images in server.samples] or [0]
    return f"{statistics.mean(waiting):.1f} / {max(waiting)}"


async def check_books(
    client: httpx.AsyncClient, server: Server, before: dict[str, float], answers: list[Answer]
) -> list[str]:
    """The server's own counts must be those of the clients."""
    after = await server.metrics(client)

    def grown(name: str) -> float:
        return sum(v for k, v in after.items() if k.startswith(name)) - sum(
            v for k, v in before.items() if k.startswith(name)
        )

    done, refused = (sum(a.outcome.startswith(w) for a in answers) for w in (ACCEPTED, "429"))
    finished, rejected = grown("nextscale_images_finished_total"), grown("nextscale_requests_rejected_total")
    print(f"  the server counts {finished:.0f} images and {rejected:.0f} refusals, its clients {done} and {refused}")
    return [] if (finished, rejected) == (done, refused) else ["the server's counts are not those of its clients"]


async def check_images(
    client: httpx.AsyncClient, server: Server, answers: list[Answer], number: int, alone: bool
) -> list[str]:
    """Ask again, alone: the images must be the same where they were alone before, too."""
    done = [a for a in answers if a.outcome == ACCEPTED]
    sample = random.Random(2).sample(done, min(number, len(done)))
    again = [await send(client, server.url, answer.body) for answer in sample]
    same = sum(a.image == b.image for a, b in zip(sample, again, strict=True))
    print(f"  {same} of {len(sample)} images are the same, byte by byte, when asked for alone")
    return [f"{len(sample) - same} repeated images differ"] if alone and same < len(sample) else []


async def load(options: argparse.Namespace) -> None:
    with serving(options) as server:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            mix = Mix(options)
            await capacity(client, server, mix, len(mix.methods.split(",")), 1)  # not counted
            rate = await capacity(client, server, mix, options.images, options.max_batch or 1)
            print(
                f"capacity: {rate:.3f} requests a second ({options.images} requests, {options.max_batch or 1} at once)"
            )
            print(
                f"sizes {options.sizes}, methods {options.methods}, {options.previews:.0%} with previews of every scale"
            )
            curves, faults = [], list[str]()
            for factor in map(float, options.rates.split(",")):
                before, cpu, begun = await server.metrics(client), time.process_time(), time.monotonic()
                answers = await open_loop(client, server, mix, factor * rate, options.seconds)
                faults += report(f"{factor:g} x capacity for {options.seconds:g} s", server, answers)
                share = (time.process_time() - cpu) / (time.monotonic() - begun)
                print(f"  the generator took {share:.1%} of a core")
                faults += await check_books(client, server, before, answers)
                alone = (options.max_batch or 1) == 1 and not options.url
                faults += await check_images(client, server, answers, options.repeat, alone)
                curves.append((factor, answers, list(server.samples)))
            if options.plot:
                plot(curves, options.plot)
    if faults:
        raise SystemExit("failed: " + "; ".join(faults))


def plot(curves: list[tuple[float, list[Answer], list[tuple[float, float, int]]]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    latency, previews, waiting, memory = figure.subplots(2, 2).flat
    for factor, answers, samples in curves:
        done = sorted(a.seconds for a in answers if a.outcome == ACCEPTED)
        first = sorted(a.first_preview for a in answers if a.first_preview is not None)
        refused = sum(a.outcome.startswith("429") for a in answers) / max(len(answers), 1)
        label = f"{factor:g} x capacity, {refused:.0%} refused"
        for axes, values in ((latency, done), (previews, first)):
            axes.plot(values, [(n + 1) / len(values) for n in range(len(values))], label=label)
        waiting.plot([t for t, _, _ in samples], [n for _, _, n in samples], label=label)
        memory.plot([t for t, _, _ in samples], [mib for _, mib, _ in samples], label=label)
    latency.set(title="accepted requests", xlabel="seconds until the image", ylabel="share")
    previews.set(title="requests with previews", xlabel="seconds until the first preview", ylabel="share")
    waiting.set(title="queue", xlabel="seconds", ylabel="images")
    memory.set(title="resident memory", xlabel="seconds", ylabel="MiB", ylim=(0, None))
    latency.legend(frameon=False)
    for axes in (latency, previews, waiting, memory):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


async def throughput(options: argparse.Namespace) -> None:
    """In turns: images of the server, and the same images of a pipeline that is called in a loop."""
    from nextscale import Pipeline

    with serving(options) as server:
        async with httpx.AsyncClient(timeout=None) as client:
            method = (await client.get(f"{server.url}/v1/methods")).json()["default"]
            pipe = Pipeline.from_pretrained(*options.model or (), device=options.device, progress_bar=False)
            pipe(PROMPTS[0], seed=0, method=method)
            await send(client, server.url, {"prompt": PROMPTS[0]})
            turns, ratios = 4, list[float]()
            for turn in range(turns):
                bodies = [
                    {"prompt": PROMPTS[(turn * options.images + n) * 7 % len(PROMPTS)], "seed": turn * 1000 + n}
                    for n in range(options.images // turns)
                ]
                begun = time.monotonic()
                for body in bodies:
                    pipe(body["prompt"], seed=body["seed"], method=method)
                loop = time.monotonic() - begun
                begun = time.monotonic()
                answers = await asyncio.gather(*(send(client, server.url, body) for body in bodies))
                served = time.monotonic() - begun
                assert all(a.outcome == ACCEPTED for a in answers)
                ratios.append(loop / served)
                print(f"{len(bodies)} images, {method}: loop {loop:.2f} s, server {served:.2f} s, {loop / served:.3f}")
            print(f"the server reaches {statistics.mean(ratios):.3f} of the loop's throughput")


class AnyFeatures:
    """A text encoder for models with random weights: its time is not counted. Words have 16 tokens each."""

    nbytes = 0

    def __init__(self, pipe: Any, longest: int) -> None:
        import torch

        config = pipe.backbone.config
        self.features = torch.randn(min(longest, config.text_length), config.text_dim, device=pipe.device)

    def encode(self, prompts: list[str]) -> list[Any]:
        return [self.features[: 16 * len(prompt.split())] for prompt in prompts]

    def to(self, device: Any) -> None: ...


def engine_pipeline(options: argparse.Namespace, text_tokens: int) -> tuple[Any, Any]:
    """The pipeline, and the method that requests ask for."""
    from nextscale import Pipeline
    from nextscale.runtime.registry import make_executor

    if not options.shapes:
        dtype = "bfloat16" if options.device == "cuda" else "float32"
        where = {"device": options.device, "dtype": dtype, "runtime": options.runtime}
        return Pipeline.from_pretrained(*options.model or (), progress_bar=False, **where), options.method
    import gpu

    pipe = gpu.pipeline(options.shapes, options.quantize, options.device)
    pipe.executor = make_executor(options.runtime, pipe.device)
    pipe.text_encoder = AnyFeatures(pipe, text_tokens)
    method = (
        options.method if options.method in ("auto", "none") else gpu.read_ratios(options.method, pipe.backbone.depth)
    )
    return pipe, method


def first_preview(served: Any, job: Any, scale: int = 1) -> float:
    """Seconds from a request to its first preview, of a scale or a later one, as a JPEG file; on an idle engine."""
    from PIL import Image

    from nextscale.serve.jobs import Finished, Preview

    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    begun = time.perf_counter()
    served.submit(job, events.put)
    while not isinstance(event := events.get(), Preview) or event.scale < scale:
        assert isinstance(event, Preview), "no preview came"
    Image.fromarray(event.pixels()).save(io.BytesIO(), "JPEG", quality=90)
    seconds = time.perf_counter() - begun
    while not isinstance(events.get(), Finished):
        pass
    return seconds


def engine(options: argparse.Namespace) -> None:
    """In turns, in one process: batches of the pipeline, and the same batches of the engine; no HTTP, no files."""
    from nextscale.serve.engine import Engine, Limits
    from nextscale.serve.jobs import ALL, ImageJob
    from nextscale.serve.served_model import ServedModel

    (pipe, asked), batch = engine_pipeline(options, 64), options.batch
    model = ServedModel(pipe, method=asked if isinstance(asked, str) else "none")
    method = model.method if isinstance(asked, str) else asked
    pipe.warm_up(methods=[method], batches=[1, batch], text_tokens=64, callbacks=True)
    model.warm_up_previews([1])
    served, numbers = Engine([model], Limits(max_batch=batch)), itertools.count()
    served.start(warm_up=False, wait=True)

    def new_job(images: int, previews: int | str = 0) -> ImageJob:
        number = next(numbers)
        seeds = tuple(range(number * batch, number * batch + images))
        return ImageJob(model.name, PROMPTS[number * 7 % len(PROMPTS)], seeds, method, previews=previews)

    served.generate(new_job(batch))
    first_preview(served, new_job(1, 3))
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    captured, seconds, shares = pipe.captured, list[float](), list[float]()
    for _ in range(max(options.images // options.group, 1)):
        jobs = [new_job(batch) for _ in range(options.group)]
        begun = time.perf_counter()
        for job in jobs:
            pipe([job.prompt] * batch, seed=list(job.seeds), method=method)
        seconds.append((time.perf_counter() - begun) / len(jobs))
        begun = time.perf_counter()
        for job in jobs:
            served.submit(job, events.put)
        for _ in range(len(jobs) * batch):
            events.get()
        shares.append(seconds[-1] * len(jobs) / (time.perf_counter() - begun))
    alone, firsts, every = list[float](), list[float](), list[float]()
    for _ in range(options.images):
        begun = time.perf_counter()
        served.generate(new_job(1))
        alone.append(time.perf_counter() - begun)
        firsts.append(first_preview(served, new_job(1, 3)))
        every.append(first_preview(served, new_job(1, ALL), scale=4))
    served.drain(10)
    print(f"{model.name}, {options.method}, {options.runtime}")
    print(f"  a batch of {batch} takes the pipeline, in a loop            {milliseconds(seconds)}")
    print(f"  throughput of the engine, as a share of that     {statistics.median(shares):.3f}")
    print(f"  idle engine, from a request to its image         {milliseconds(alone)}")
    print(f"  to the first of 3 previews, a JPEG file          {milliseconds(firsts)}")
    print(f"  to the preview of scale 4, of all scales' ones   {milliseconds(every)}")
    print(f"  captured after the warm-up                       {pipe.captured - captured} scales")


def milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms ({1000 * min(seconds):.1f} to {1000 * max(seconds):.1f})"


def mixed(options: argparse.Namespace) -> None:
    """Jobs of all kinds in random order: count what is captured after the warm-up."""
    from nextscale.serve.engine import Engine, Limits
    from nextscale.serve.jobs import ALL, Event, Finished, ImageJob, Preview
    from nextscale.serve.served_model import ServedModel

    pipe, asked = engine_pipeline(options, 128)
    model = ServedModel(pipe, method=asked if isinstance(asked, str) else "none")
    if options.warm:
        model.warm_sizes = [(int(w), int(h)) for w, h in (size.split("x") for size in options.warm.split(","))]
    limits = Limits(max_batch=options.max_batch or 4, max_queue=10**6)
    if not isinstance(asked, str):  # decisions of a benchmark, which no quality names
        batches = [n for n in (1, 2, 4, 8) if n <= limits.max_batch]
        pipe.warm_up([size[::-1] for size in model.warm_sizes], [asked], batches, callbacks=True)
    begun, served, chance = time.monotonic(), Engine([model], limits), random.Random(0)
    served.start(wait=True)
    print(f"the engine's warm-up took {time.monotonic() - begun:.1f} s")
    tickets, events, captured = [], list[Event](), pipe.captured
    begun = time.monotonic()
    for number in range(options.images):
        width, height = chance.choice(model.warm_sizes)
        methods = [model.method_of(quality, (width, height)) for quality in ("low", "auto", "max")]
        job = ImageJob(
            model.name,
            PROMPTS[number * 7 % len(PROMPTS)],
            tuple(range(1000 * number, 1000 * number + chance.randint(1, 3))),
            chance.choice(methods if isinstance(asked, str) else [asked, "none"]),
            height,
            width,
            negative_prompt=chance.choice([None, "a red fox"]),
            guidance_scale=chance.choice([None, 2.0, 3.0, 4.5]),
            previews=chance.choice([0, 2, ALL]),
        )
        tickets.append(served.submit(job, events.append))
        if chance.random() < 0.05:
            chance.choice(tickets).cancel()
    served.drain(600)
    seconds = time.monotonic() - begun
    finished, previews = (sum(isinstance(event, kind) for event in events) for kind in (Finished, Preview))
    canceled = sum(ticket.canceled for ticket in tickets)
    missing = sum(ticket.unfinished for ticket in tickets if not ticket.canceled)
    print(f"{model.name}: {len(tickets)} jobs of sizes {model.warm_sizes}, {canceled} canceled; {finished} images and")
    print(
        f"{previews} previews in {seconds:.1f} s, {1000 * seconds / finished:.1f} ms an image; {missing} images missing"
    )
    print(f"captured after the warm-up: {pipe.captured - captured} scales")
    if missing or pipe.captured != captured:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "load", "engine", "mixed"))
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--model", action="append")
    parser.add_argument("--method", default="auto", help="the server's default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", help="of `engine` and `mixed`: a model of benchmarks/gpu.py with random weights")
    parser.add_argument("--quantize", default="none", help="of `engine` with --shapes: fp8")
    parser.add_argument("--runtime", default="eager")
    parser.add_argument("--warm")
    parser.add_argument("--max-batch", type=int)
    parser.add_argument("--max-queue", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="of `engine`")
    parser.add_argument("--group", type=int, default=6, help="of `engine`: batches that wait at once")
    parser.add_argument("--images", type=int, default=12, help="to measure throughput or capacity; jobs of `mixed`")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rates", default="0.5,1,2,10")
    parser.add_argument("--sizes", default="512x512,256x256,384x384")
    parser.add_argument("--methods", default="default,nova:fast,truncate:3")
    parser.add_argument("--previews", type=float, default=1 / 3, help="the share of requests that ask for them")
    parser.add_argument("--repeat", type=int, default=3, help="images that are asked for again, alone")
    parser.add_argument("--plot")
    options = parser.parse_args()
    if options.what in ("engine", "mixed"):
        {"engine": engine, "mixed": mixed}[options.what](options)
    else:
        asyncio.run({"load": load, "throughput": throughput}[options.what](options))


if __name__ == "__main__":
    main()
