"""The benchmarks, with the facts of docs/benchmarks.md as code."""

from __future__ import annotations

import csv
import io
import re
import shlex
from pathlib import Path
from typing import ClassVar

from nextscale.errors import NextscaleError, choices
from nextscale.research.export.base import ImageFile, Layout, PromptEntry
from nextscale.research.export.reading import content, field, file_name, load, load_line, one_line, prompt, text


class GenEval(Layout):
    name, title, images = "geneval", "GenEval", 4
    expects = "evaluation_metadata.jsonl with one JSON object per line that has 'tag', 'include' and 'prompt'"

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        entries = []
        for i, line in enumerate(content(files[0]).rstrip("\n").split("\n")):
            where = f"line {i + 1}"
            record = load_line(line, where)
            field(record, "tag", where)
            if not isinstance(record.get("include"), list):
                raise ValueError(f"{where} has no list 'include'")
            entries.append(
                PromptEntry(f"{i:05}", prompt(record, "prompt", where), i, f"{files[0].name}, {where}", line)
            )
        return entries

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        return [
            ImageFile(f"{e.name}/samples/{k:04}.png", e.prompt, (seed + k,), i, (f"{e.name}/metadata.jsonl", e.record))
            for i, e in enumerate(entries)
            for k in range(images)
        ]

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        results = _quoted(images.with_name("results.jsonl"))
        return [
            f"python evaluation/evaluate_images.py {_quoted(images)} --outfile {results} --model-path <detector>",
            f"python evaluation/summary_scores.py {results}",
        ]


class DPG(Layout):
    name, title, images, allowed, pattern = "dpg", "DPG-Bench", 4, (1, 4), "*.txt"
    expects = "the folder dpg_bench/prompts with a .txt file per prompt, or dpg_bench.csv with 'item_id' and 'text'"

    def find(self, path: Path | None) -> list[Path]:
        found = super().find(path)
        if path in found and found[0].suffix != ".csv":
            raise NextscaleError(f"{path} is no prompt file of {self.title}: expected {self.expects}")
        return found

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        found = self._rows(files[0]) if files[0].suffix == ".csv" else {f.stem: (one_line(f), f.name) for f in files}
        entries = []
        for i, name in enumerate(sorted(found)):
            asked, where = found[name]
            entries.append(PromptEntry(file_name(name, "a prompt"), asked, i, where))
        return entries

    def _rows(self, file: Path) -> dict[str, tuple[str, str]]:
        """Every id's text, and where it stands. Each question about an image has a row, with the same text."""
        found: dict[str, tuple[str, str]] = {}
        rows = csv.DictReader(io.StringIO(content(file), newline=""))
        try:
            for row in rows:
                where = f"line {rows.line_num}"
                name, asked = field(row, "item_id", where), prompt(row, "text", where)
                before = found.setdefault(name, (asked, f"{file.name}, {where}"))
                if before[0] != asked:
                    raise ValueError(f"the id {name!r:.60} has another text in {where} than in {before[1]}")
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
        return found

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        seeds = tuple(seed + k for k in range(images))
        return [ImageFile(f"{e.name}.png", e.prompt, seeds, i) for i, e in enumerate(entries)]

    def check_size(self, height: int, width: int) -> None:
        if height != width:
            raise NextscaleError(f"DPG-Bench cuts square tiles out of its grids, but the images are {height}x{width}")

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        return [f"PIC_NUM={count} bash dpg_bench/dist_eval.sh {_quoted(images)} {side}"]


class MJHQ(Layout):
    name, title, images, allowed = "mjhq", "MJHQ-30K", 1, (1,)
    expects = "meta_data.json, {image id: {'category', 'prompt'}}"
    seed_rule = "the picture of the i-th prompt (from 0) has seed + i"

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        records = load(files[0])
        if not isinstance(records, dict):
            raise ValueError("it is not one JSON object")
        entries = []
        for i, (key, record) in enumerate(records.items()):
            name = f"{file_name(field(record, 'category', key), key)}/{file_name(key, 'a prompt')}"
            entries.append(PromptEntry(name, prompt(record, "prompt", key), i, f"{files[0].name}, {key}"))
        return entries

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        return [ImageFile(f"{e.name}.png", e.prompt, (seed + e.number,), i) for i, e in enumerate(entries)]

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        score = f"from cleanfid import fid; print(fid.compute_fid('<folder mjhq30k_imgs>', {str(images)!r}))"
        return [f"python -c {shlex.quote(score)}"]


class ImageReward(Layout):
    name, title, images = "imagereward", "ImageReward", 10
    expects = "benchmark-prompts.json, a list of {'id', 'prompt'}"

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        records = load(files[0])
        if not isinstance(records, list):
            raise ValueError("it is not a JSON list")
        named = [(file_name(field(r, "id", f"entry {i + 1}"), f"entry {i + 1}"), r) for i, r in enumerate(records)]
        where = f"{files[0].name}, entry"
        return [
            PromptEntry(name, prompt(r, "prompt", name), i, f"{where} {i + 1}") for i, (name, r) in enumerate(named)
        ]

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        return [
            ImageFile(f"{e.name}_{k}.png", e.prompt, (seed + k,), i)
            for i, e in enumerate(entries)
            for k in range(images)
        ]

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        return [
            f"python test-benchmark.py --benchmark ImageReward-v1.0 --prompts_path {shlex.quote(prompts)} "
            f"--img_dir {_quoted(images.parent)} --model {images.name} --result_dir {_quoted(images.parent)}/results"
        ]


class HPSv2(Layout):
    name, title, images, allowed, pattern = "hpsv2", "HPSv2", 1, (1,), "*.json"
    styles: ClassVar[tuple[str, ...]] = ("anime", "concept-art", "paintings", "photo")
    expects = f"a folder with {', '.join(s + '.json' for s in styles)}, each a list of prompts, or one of these files"
    seed_rule = "the picture of the i-th prompt (from 0) of every style has seed + i"

    def find(self, path: Path | None) -> list[Path]:
        found = [f for f in super().find(path) if f.stem in self.styles]  # the published folder holds other lists too
        missing = [f"{s}.json" for s in self.styles if s not in {f.stem for f in found}]
        if missing and found != [path]:
            raise NextscaleError(
                f"{path} is no prompt folder of {self.title}: it lacks {choices(missing)}; expected {self.expects}"
            )
        return found

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        entries = []
        for file in files:
            prompts = load(file)
            if not isinstance(prompts, list):
                raise ValueError(f"{file.name} is not a JSON list")
            for i, p in enumerate(prompts):
                where = f"{file.name}, entry {i + 1}"
                entries.append(PromptEntry(f"{file.stem}/{i:05}", text(p, where), i, where))
        return entries

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        return [ImageFile(f"{e.name}.jpg", e.prompt, (seed + e.number,), i) for i, e in enumerate(entries)]

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        score = f"import hpsv2; hpsv2.evaluate({str(images)!r}, hps_version='v2.1')"
        return [f"python -c {shlex.quote(score)}"]


class ImageNet(Layout):
    name, title, images, prompts = "imagenet", "ImageNet", 50, "label"
    expects = "a text file with one class number per line (none: all of 0 to 999)"
    seed_rule = "the k-th picture of class c (both from 0) has the number n = 1000 k + c and seed + n"

    def find(self, path: Path | None) -> list[Path]:
        return [] if path is None else super().find(path)

    def parse(self, files: list[Path]) -> list[PromptEntry]:
        if not files:
            return [PromptEntry(str(label), label, label, f"class {label}") for label in range(1000)]
        lines = enumerate(content(files[0]).splitlines(), start=1)
        words = [(word, f"{files[0].name}, line {i}") for i, line in lines for word in line.split()]
        # What is no number keeps its text, and is found with all else that cannot be drawn.
        labels = [(int(word) if re.fullmatch("0*[0-9]{1,9}", word) else word, where) for word, where in words]
        return [
            PromptEntry(str(label), label, label if isinstance(label, int) else -1, where) for label, where in labels
        ]

    def problem(self, prompt: str | int) -> str | None:
        known = isinstance(prompt, int) and prompt <= 999
        return None if known else f"{str(prompt)[:40]!r} is no class number from 0 to 999"

    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]:
        """A round of all classes after the other: the Inception Score is taken of 5000 files in a row."""
        numbered = [(1000 * k + e.number, e.prompt) for k in range(images) for e in entries]
        return [ImageFile(f"{n:05}.png", label, (seed + n,), i) for i, (n, label) in enumerate(numbered)]

    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        pack = f"from utils.misc import create_npz_from_sample_folder as pack; pack({str(images)!r})"
        reference = "VIRTUAL_imagenet512.npz" if side == 512 else f"VIRTUAL_imagenet{side}_labeled.npz"
        return [f"python -c {shlex.quote(pack)}", f"python evaluator.py {reference} {_quoted(images)}.npz"]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


LAYOUTS: dict[str, Layout] = {b.name: b for b in (GenEval(), DPG(), MJHQ(), ImageReward(), HPSv2(), ImageNet())}


def get_layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise NextscaleError(f"unknown benchmark {name!r}; allowed: {choices(LAYOUTS)}")
    return LAYOUTS[name]
