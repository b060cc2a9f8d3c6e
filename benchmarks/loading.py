"""Peak memory while loading checkpoints of the real formats and sizes, measured in a fresh process.

    python benchmarks/loading.py [--large] [--keep FOLDER]

Writes random weights under the official file and key names (VAR-d16 as one `.pth`, a 16-layer Infinity as sharded
safetensors), loads each in a subprocess, reads every weight once, and prints the largest resident set beside the
size of the files. The promise is: at most the files + 1 GiB, in any dtype.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

MANIFESTS = Path(__file__).parents[1] / "tests" / "data" / "manifests.json.gz"
GIB = 2**30
CHILD = """
import sys, time, torch
from nextscale import Pipeline
start = time.perf_counter()
pipe = Pipeline.from_pretrained(sys.argv[1], vae=sys.argv[2], dtype=sys.argv[3], progress_bar=False)
seconds = time.perf_counter() - start
for module in (pipe.backbone, pipe.tokenizer):
    for p in module.parameters():
        p.sum().item()  # mapped pages count once they are read
status = open("/proc/self/status").read()
print(seconds, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def random_state(manifest: str) -> dict[str, torch.Tensor]:
    """Every key of a published checkpoint, with its shape and dtype."""
    keys = json.loads(gzip.decompress(MANIFESTS.read_bytes()))[manifest]
    return {key: torch.rand(shape).to(getattr(torch, dtype)) for key, (shape, dtype) in keys.items()}


def write_pth(folder: Path) -> tuple[Path, Path]:
    weights, vae = folder / "var_d16.pth", folder / "vae_ch160v4096z32.pth"
    torch.save(random_state("var_d16"), weights)
    torch.save(random_state("vae_ch160v4096z32"), vae)
    return weights, vae


def write_shards(folder: Path, shards: int = 4) -> tuple[Path, Path]:
    weights, vae = folder / "infinity_layer16_weights", folder / "infinity_vae_d32reg.pth"
    weights.mkdir()
    state, index = random_state("infinity_layer16"), {}
    keys = list(state)
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: state[key] for key in keys[i::shards]}
        save_file(part, weights / name)
        index |= dict.fromkeys(part, name)
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save({"vae": random_state("infinity_vae_d32")}, vae)
    return weights, vae


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size


def write_large(folder: Path) -> tuple[Path, Path]:
    weights, vae = folder / "infinity_2b_reg.pth", folder / "infinity_vae_d32reg.pth"
    torch.save(random_state("infinity_2b"), weights)
    torch.save({"vae": random_state("infinity_vae_d32")}, vae)
    return weights, vae


def measure(folder: Path, large: bool) -> bool:
    print(f"torch {torch.__version__}, CPU, one fresh process per line")
    print("format       dtype      files     peak RSS  over the files  allowed  load")
    fine = True
    writers = {"flat .pth": write_pth, "shards": write_shards}
    if large:
        writers = {"2B .pth": write_large}
    for name, write in writers.items():
        weights, vae = write(folder)
        size = size_of(weights) + size_of(vae)
        assert size > GIB
        for dtype in ("float32", "bfloat16"):
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(weights), str(vae), dtype], capture_output=True, text=True, check=True
            )
            seconds, peak = map(float, done.stdout.split())
            over = peak - size
            fine &= over <= GIB
            print(
                f"{name:<11}  {dtype:<8}  {size / GIB:5.2f} GiB  {peak / GIB:5.2f} GiB  {over / GIB:+9.2f} GiB  "
                f"+1.00 GiB  {seconds:4.1f} s"
            )
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="write the files here and leave them")
    parser.add_argument("--large", action="store_true", help="instead, Infinity-2B at its full 8.2 GiB")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        ok = measure(arguments.keep, arguments.large)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            ok = measure(Path(scratch), arguments.large)
    sys.exit(0 if ok else 1)
