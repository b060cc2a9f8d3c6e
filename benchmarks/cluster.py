"""Workers and replicas on Ray beside the same without it, on one machine. Needs pip install 'nextscale[ray]'.

    python benchmarks/cluster.py export [--images 200] [--rounds 1]    # 2 workers against 2 --shard processes
    python benchmarks/cluster.py serve [--requests 150] [--rounds 1]   # 2 replicas against 1, open loop

Every process has one thread, and the exit code is 1 where less comes out than `--at-least`. `export` makes the same
pictures both ways, one after the other, and compares all bytes; images a second are counted from the first file to the
last, and for the whole command with everything that starts it. Both are judged. `serve` plays one trace of random
arrivals at several rates against one replica, and then against two, and finds the rate at which the 95th percentile of
latency reaches the target: three times the seconds of a request that is alone. The generator runs on the same machine;
its share of a core is printed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from arrivals import ENVIRONMENT, Point, Server, add_model, poisson, replicas, search, sustained
from serving import PROMPTS


def export(options: argparse.Namespace) -> None:
    ratios: dict[str, list[float]] = {"whole command": [], "first to last image": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = itertools.islice(itertools.cycle(PROMPTS), options.images)
        records = [{"id": f"{n:05}", "prompt": prompt} for n, prompt in enumerate(prompts)]
        (folder / "prompts.json").write_text(json.dumps(records))
        for turn in range(options.rounds):
            sides = {"--shard": [["--shard", "1/2"], ["--shard", "2/2"]]}
            sides["--workers ray"] = [["--workers", "ray", "--replicas", "2", "--resources", "CPU=1"]]
            order = list(sides) if turn % 2 == 0 else list(reversed(sides))
            found = {side: run_export(folder, sides[side], options) for side in order}
            shards, ray = found["--shard"], found["--workers ray"]
            for side, (whole, steady, _) in found.items():
                print(f"{side}: {whole:.2f} images a second, {steady:.2f} from the first to the last", flush=True)
            assert shards[2] == ray[2], "the bytes differ"
            size = "x".join(map(str, Image.open(io.BytesIO(next(iter(ray[2].values())))).size))
            ratios["whole command"].append(ray[0] / shards[0])
            ratios["first to last image"].append(ray[1] / shards[1])
    print(f"{options.images} images of {size}, all bytes the same; Ray's throughput in those of two processes:")
    for what, values in ratios.items():
        print(f"  {what}: {statistics.mean(values):.3f} ({', '.join(f'{v:.3f}' for v in values)})")
    judge(min(map(statistics.mean, ratios.values())), options.at_least)


def judge(found: float, at_least: float) -> None:
    """End with the verdict."""
    passed = found >= at_least  # NaN does not
    print(f"{'passed' if passed else 'failed'}: asked was at least {at_least:g}")
    raise SystemExit(not passed)


def run_export(
    folder: Path, parts: list[list[str]], options: argparse.Namespace
) -> tuple[float, float, dict[str, bytes]]:
    """Images a second of the whole command, and from the first image to the last; and the images."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "nextscale", "export", "imagereward", "--prompts", str(folder / "prompts.json")]
    command += ["--images", "1", "--out", str(out), "--quiet", "--pixel-budget", options.pixel_budget]
    command += ["--method", options.method, "--device", "cpu"]
    begun = time.monotonic()
    # In sessions of their own, as Ray starts its workers: a busy machine shares its time out among sessions.
    processes = [subprocess.Popen([*command, *part], env=ENVIRONMENT, start_new_session=True) for part in parts]
    assert not any(process.wait() for process in processes)
    seconds = time.monotonic() - begun
    files = sorted((out / "images").iterdir())
    assert len(files) == options.images
    stamps = sorted(path.stat().st_mtime for path in files)
    # The first image of each of the two is the end of its start.
    steady = (len(files) - 2) / (stamps[-1] - stamps[1])
    return len(files) / seconds, steady, {path.name: path.read_bytes() for path in files}


def serve(options: argparse.Namespace) -> None:
    moments, gains, target = poisson(options.requests), [], options.target
    shares = [float(share) for share in options.shares.split(",")]
    for _ in range(options.rounds):
        rates = {}
        for number in (1, 2):
            with replicas(number, options) as server:
                idle = server.idle_seconds()
                target = target or 3 * idle
                print(f"a request alone takes {idle:.3f} s; the 95th percentile may take {target:.2f} s", flush=True)
                asked = [3 * share * number / target for share in shares]
                found = search(lambda rate, s=server, n=number: tell(s, n, moments, rate), asked, target)
            rates[number] = sustained(found, target)
        gains.append(rates[2] / rates[1])
        print(f"within the target: {rates[1]:.2f} and {rates[2]:.2f} requests a second, {gains[-1]:.2f} times")
    print(f"2 replicas answer {statistics.mean(gains):.2f} times the requests of 1 within {target:.2f} s at p95")
    judge(statistics.mean(gains), options.at_least)


def tell(server: Server, number: int, moments: list[float], rate: float) -> Point:
    """Measure at a rate, and print it."""
    found = server.point(moments, rate)
    print(
        f"{number} replicas, {found.rate:.2f} requests a second: p95 {found.p95:.2f} s, {found.refused} refused, "
        f"generator {found.generator:.1%} of a core",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    row = kinds.add_parser("export")
    row.set_defaults(run=export)
    row.add_argument("--images", type=int, default=200)
    row.add_argument("--pixel-budget", default="0.25M", help="0.25M: 256 x 256")
    row.add_argument("--method", default="none")
    row.add_argument("--rounds", type=int, default=1)
    row.add_argument("--at-least", type=float, default=0.9, help="of the throughput of two processes")
    row = kinds.add_parser("serve")
    row.set_defaults(run=serve)
    add_model(row)
    row.add_argument("--requests", type=int, default=150, help="of every run")
    row.add_argument("--shares", default="0.5,0.6,0.7,0.8,0.9", help="of a third of the target, per replica")
    row.add_argument("--target", type=float, help="seconds; default: three times those of a request alone")
    row.add_argument("--rounds", type=int, default=1)
    row.add_argument("--at-least", type=float, default=1.6, help="times the requests of one replica")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
