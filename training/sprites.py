"""Render the clip-art sprites that the training images are composed of.

The icon sets of `sources.json` are fetched by name and version with npm, and every concept of `concepts.json` is drawn
in every style as a 384 x 384 WebP with transparency, `OUT/<style>/<name with - for spaces>.webp`:

    pip install resvg_py pillow numpy
    python -m training.sprites --out training/data/sprites

Images that are there already are kept; delete the folder to draw them again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import multiprocessing
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
SIZE = 384  # pixels of a sprite's side
FILL = 0.96  # share of that side which the content's longer side takes
RENDER = 1024  # pixels of the drawing before it is cropped and made smaller
OPAQUE = 8  # alpha above this counts as content
PROCESSES = 2

Job = tuple[str, str, Path]  # what it is called in messages, its SVG, the file to write


def fetch(source: dict[str, str], cache: Path) -> dict[str, Any]:
    """The icon set of one source, from its npm package: downloaded once into `cache`, then read from there."""
    package, version = source["package"], source["version"]
    archive = cache / f"{package.lstrip('@').replace('/', '-')}-{version}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            sys.exit("npm was not found; install Node.js, which brings it, and run this again.")
        cache.mkdir(parents=True, exist_ok=True)
        print(f"fetching {package}@{version}", flush=True)
        command = [npm, "pack", "--silent", "--pack-destination", str(cache.resolve()), f"{package}@{version}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode or not archive.is_file():
            sys.exit(f"npm could not fetch {package}@{version}.")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != source["sha256"]:
        sys.exit(f"{archive} is not the {package}@{version} of sources.json; delete the file and run this again.")
    with tarfile.open(archive) as tar:
        member = tar.extractfile("package/icons.json")
        assert member is not None
        icons: dict[str, Any] = json.load(member)
    return icons


def icon_svg(icon_set: dict[str, Any], name: str) -> str | None:
    """One icon as an SVG document, or None where the set has no icon of that name."""
    changes: dict[str, Any] = {}
    while (alias := icon_set.get("aliases", {}).get(name)) is not None:
        changes = {**alias, **changes}
        name = alias["parent"]
    if name not in icon_set["icons"] or changes.keys() & {"hFlip", "vFlip", "rotate"}:
        return None  # flipped and turned aliases are not needed here
    icon = {"left": 0, "top": 0, "width": 16, "height": 16, **icon_set, **icon_set["icons"][name], **changes}
    box = " ".join(str(icon[key]) for key in ("left", "top", "width", "height"))
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{box}" width="{icon["width"]}" height="{icon["height"]}">{icon["body"]}</svg>'


def draw(svg: str) -> Image.Image:
    """The SVG cropped to its content, centered on a transparent square."""
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=svg, width=RENDER, skip_system_fonts=True)
    image = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    opaque = np.asarray(image)[..., 3] > OPAQUE
    rows, columns = np.flatnonzero(opaque.any(1)), np.flatnonzero(opaque.any(0))
    if not len(rows):
        raise ValueError("nothing was drawn")
    image = image.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
    scale = FILL * SIZE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    canvas = Image.new("RGBA", (SIZE, SIZE))
    canvas.paste(image.resize((width, height), Image.Resampling.LANCZOS), ((SIZE - width) // 2, (SIZE - height) // 2))
    return canvas


def write(job: Job) -> str | None:
    """Draw one sprite into its file; a sentence where that failed."""
    label, svg, path = job
    try:
        image = draw(svg)
    except ValueError as error:
        return f"{label} could not be drawn: {error}."
    part = path.with_suffix(".part")
    image.save(part, format="WEBP", quality=82, alpha_quality=80, method=6)
    part.replace(path)
    return None


def jobs(out: Path, cache: Path) -> list[Job]:
    """Every sprite of the list, whether drawn already or not."""
    concepts = json.loads((HERE / "concepts.json").read_text(encoding="utf-8"))
    found: list[Job] = []
    for style, source in json.loads((HERE / "sources.json").read_text(encoding="utf-8")).items():
        icon_set = fetch(source, cache)
        for concept in concepts:
            icon = concept["icons"][style]
            svg = icon_svg(icon_set, icon)
            if svg is None:
                sys.exit(f"{source['package']}@{source['version']} has no icon {icon!r} for {concept['name']!r}.")
            path = out / style / f"{concept['name'].replace(' ', '-')}.webp"
            found.append((f"{style} {concept['name']!r}", svg, path))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the clip-art sprites of training/concepts.json.")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "sprites", help="folder for the sprites")
    parser.add_argument("--packages", type=Path, default=HERE / "data" / "packages", help="folder for npm packages")
    options = parser.parse_args()
    if importlib.util.find_spec("resvg_py") is None:
        sys.exit("resvg_py is not installed; run `pip install resvg_py` and then this again.")

    started = time.monotonic()
    every = jobs(options.out, options.packages)
    todo = [job for job in every if not job[2].is_file()]
    print(f"{len(every)} sprites, {len(every) - len(todo)} there already", flush=True)
    for folder in {job[2].parent for job in todo}:
        folder.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(PROCESSES) as pool:
        for done, failure in enumerate(pool.imap_unordered(write, todo, chunksize=4), 1):
            if failure:
                sys.exit(failure)
            if done % 100 == 0 or done == len(todo):
                print(f"{done}/{len(todo)} drawn, {time.monotonic() - started:.0f} s", flush=True)
    total = sum(job[2].stat().st_size for job in every)
    print(f"{len(every)} sprites in {options.out}, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
