"""Exports, read as the official scorers read them. The readers are written from their rules (docs/benchmarks.md)."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nextscale.errors import NextscaleError
from nextscale.pipeline import Pipeline
from nextscale.research.export.plan import ExportPlan
from nextscale.research.export.run import export
from nextscale.testing import tiny_infinity, tiny_var

TEXTS = ["a fox", "two red hearts", "a tree left of a house"]
SMALL = {"pixel_budget": "0.06M"}


class Encoder:
    """Features that depend on the words alone."""

    source = "made up"
    nbytes = 0

    def encode(self, prompts: list[str]) -> list[torch.Tensor]:
        seeds = [torch.Generator().manual_seed(sum(p.encode())) for p in prompts]
        return [torch.randn(len(p.split()), 128, generator=s) for p, s in zip(prompts, seeds, strict=True)]

    def to(self, device: object) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and a busy machine makes threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text_pipe() -> Pipeline:
    pipe = tiny_infinity()
    pipe.text_encoder = Encoder()
    return pipe


@pytest.fixture(scope="module")
def label_pipe() -> Pipeline:
    return tiny_var()


def pixels(image: Image.Image) -> bytes:
    return image.convert("RGB").tobytes()


def drawn(pipe: Pipeline, prompt: str | int, seed: int, **options: object) -> Image.Image:
    return pipe(prompt, seed=seed, **options).images[0]


def write_prompts(benchmark: str, folder: Path) -> Path:
    """The official file, with few prompts."""
    if benchmark == "geneval":
        path = folder / "evaluation_metadata.jsonl"
        records = [{"tag": "single_object", "include": [{"class": "fox", "count": 1}], "prompt": p} for p in TEXTS]
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    elif benchmark == "dpg":
        path = folder / "prompts"
        path.mkdir()
        for name, prompt in zip(("12", "COCOval2014000000000074", "whoops3"), TEXTS, strict=True):
            (path / f"{name}.txt").write_text(prompt)
    elif benchmark == "mjhq":
        path = folder / "meta_data.json"
        ids = ("0a1b", "2c3d", "4e5f")
        records = {i: {"category": c, "prompt": p} for i, c, p in zip(ids, ("art", "logo", "art"), TEXTS, strict=True)}
        path.write_text(json.dumps(records))
    elif benchmark == "imagereward":
        path = folder / "benchmark-prompts.json"
        path.write_text(json.dumps([{"id": f"00569{i}-0057", "prompt": p} for i, p in enumerate(TEXTS)]))
    elif benchmark == "hpsv2":
        path = folder / "benchmark"
        path.mkdir()
        for style in ("anime", "concept-art", "paintings", "photo", "drawbench"):
            (path / f"{style}.json").write_text(json.dumps([f"{p} {style}" for p in TEXTS[:2]]))
    else:
        path = folder / "labels.txt"
        path.write_text("7\n0\n3\n")
    return path


def test_geneval(text_pipe: Pipeline, tmp_path: Path) -> None:
    plan = ExportPlan.read("geneval", write_prompts("geneval", tmp_path), seed=5)
    done = export(text_pipe, plan, tmp_path / "out", **SMALL)
    seen = Counter()
    for folder in (tmp_path / "out" / "images").iterdir():
        if not folder.is_dir() or not folder.name.isdigit():
            continue
        metadata = json.loads((folder / "metadata.jsonl").read_text())  # one object, not several lines
        for file in (folder / "samples").iterdir():
            if file.is_file() and re.match(r"\d+\.png", file.name):
                want = drawn(text_pipe, metadata["prompt"], 5 + int(file.stem), **SMALL)
                assert pixels(Image.open(file)) == pixels(want)
                assert metadata["tag"] == "single_object"
                seen[metadata["prompt"]] += 1
    assert seen == dict.fromkeys(TEXTS, 4)
    assert sorted(p.name for p in (tmp_path / "out" / "images").iterdir()) == ["00000", "00001", "00002"]
    assert (done.made, done.missing) == (12, 0)
    assert shlex.split(done.commands[0])[2] == str(tmp_path / "out" / "images")
    record = tmp_path / "out" / "images" / "00001" / "metadata.jsonl"
    before = record.read_text()
    record.unlink()  # without it the scorer stops
    assert export(text_pipe, plan, tmp_path / "out", resume=True, **SMALL).made == 0
    assert record.read_text() == before == plan.prompts.read_text().splitlines(keepends=True)[1]


@pytest.mark.parametrize("tiles", [1, 4])
def test_dpg(text_pipe: Pipeline, tmp_path: Path, tiles: int) -> None:
    prompts = write_prompts("dpg", tmp_path)
    plan = ExportPlan.read("dpg", prompts, images=tiles)
    done = export(text_pipe, plan, tmp_path / "out", batch=3, **SMALL)
    command = shlex.split(done.commands[0])
    assert command[0] == f"PIC_NUM={tiles}"
    root, side = Path(command[-2]), int(command[-1])
    texts = {file.stem: file.read_text() for file in prompts.iterdir()}
    seen = []
    for file in root.iterdir():  # everything in the folder is taken for an image
        key = file.name.split(".")[0]
        grid = Image.open(file)
        assert grid.size == ((side, side) if tiles == 1 else (2 * side, 2 * side))
        corners = [(0, 0), (side, 0), (0, side), (side, side)][:tiles]
        for k, (x, y) in enumerate(corners):
            tile = grid.crop((x, y, x + side, y + side))
            want = np.asarray(drawn(text_pipe, texts[key], k, **SMALL), dtype=int)
            assert np.abs(np.asarray(tile, dtype=int) - want).max() <= 1  # rounding: batches of another size
        seen.append(key)
    assert sorted(seen) == sorted(texts)
    assert len({pixels(grid.crop((x, y, x + side, y + side))) for x, y in corners}) == tiles


def test_dpg_csv_names_the_same_images(tmp_path: Path) -> None:
    folder = write_prompts("dpg", tmp_path)
    with (tmp_path / "dpg_bench.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["item_id", "text", "keywords", "proposition_id"])
        for prompt in sorted(folder.iterdir(), reverse=True):
            rows.writerows([[prompt.stem, prompt.read_text(), "", question] for question in (1, 2)])
    a, b = (ExportPlan.read("dpg", path).image_files for path in (folder, tmp_path / "dpg_bench.csv"))
    assert a == b


def test_mjhq(text_pipe: Pipeline, tmp_path: Path) -> None:
    prompts = write_prompts("mjhq", tmp_path)
    export(text_pipe, ExportPlan.read("mjhq", prompts), tmp_path / "out", **SMALL)
    records = json.loads(prompts.read_text())
    root = tmp_path / "out" / "images"
    found = sorted(p for ending in ("png", "jpg", "webp", "npy") for p in root.glob(f"**/*.{ending}"))  # as clean-fid
    assert {str(p.relative_to(root)) for p in found} == {f"{r['category']}/{i}.png" for i, r in records.items()}
    for i, (key, record) in enumerate(records.items()):
        file = root / record["category"] / f"{key}.png"
        assert pixels(Image.open(file)) == pixels(drawn(text_pipe, record["prompt"], i, **SMALL))


def test_imagereward(text_pipe: Pipeline, tmp_path: Path) -> None:
    prompts = write_prompts("imagereward", tmp_path)
    done = export(text_pipe, ExportPlan.read("imagereward", prompts), tmp_path / "out", **SMALL)
    words = shlex.split(done.commands[0])
    option = {name: words[words.index(f"--{name}") + 1] for name in ("img_dir", "model", "prompts_path")}
    records = json.loads(Path(option["prompts_path"]).read_text())
    folder = Path(option["img_dir"]) / option["model"]
    each = len(list(folder.iterdir())) // len(records)  # so it counts
    assert each == 10
    for record in records:
        files = [folder / f"{record['id']}_{k}.png" for k in range(each)]
        assert len({pixels(Image.open(f)) for f in files}) == each
        assert pixels(Image.open(files[9])) == pixels(drawn(text_pipe, record["prompt"], 9, **SMALL))


def test_hpsv2(text_pipe: Pipeline, tmp_path: Path) -> None:
    prompts = write_prompts("hpsv2", tmp_path)
    done = export(text_pipe, ExportPlan.read("hpsv2", prompts), tmp_path / "out", **SMALL)
    assert "hps_version='v2.1'" in shlex.split(done.commands[0])[2]
    root = tmp_path / "out" / "images"
    styles = sorted(p.name for p in root.iterdir())  # every name is taken for a style that has its list of prompts
    assert styles == ["anime", "concept-art", "paintings", "photo"]
    for style in styles:
        for i, prompt in enumerate(json.loads((prompts / f"{style}.json").read_text())):
            image = Image.open(root / style / f"{i:05d}.jpg")
            assert image.format == "JPEG"
            assert max(max(table) for table in image.quantization.values()) <= 12  # 95 or better
            want = np.asarray(drawn(text_pipe, prompt, i, **SMALL), dtype=float)
            assert np.abs(np.asarray(image, dtype=float) - want).mean() < 8  # noise is the worst for JPEG
    assert len(list(root.rglob("*.*"))) == 8


def test_imagenet(label_pipe: Pipeline, tmp_path: Path) -> None:
    plan = ExportPlan.read("imagenet", write_prompts("imagenet", tmp_path), images=2)
    done = export(label_pipe, plan, tmp_path / "out")
    root = tmp_path / "out" / "images"
    files = sorted(root.glob("*.png"))
    packed = np.stack([np.asarray(Image.open(f)).astype(np.uint8) for f in files])
    assert packed.shape == (6, 16, 16, 3)
    assert [int(f.stem) % 1000 for f in files] == [0, 3, 7, 0, 3, 7], "classes are mixed in any run of files"
    values = {"guidance_scale": 1.5, "top_k": 900, "top_p": 0.96}  # what VAR's README says for this benchmark
    assert pixels(Image.open(root / "01003.png")) == pixels(drawn(label_pipe, 3, 1003, **values))
    assert done.commands[1].endswith(f"{root}.npz")
    whole = ExportPlan.read("imagenet", None).image_files
    assert len(whole) == 50_000 == len({p.path for p in whole}) == len({p.seeds for p in whole})
    assert Counter(p.prompt for p in whole) == dict.fromkeys(range(1000), 50)


EXPECTED = {
    "geneval": "expected evaluation_metadata.jsonl with one JSON object per line",
    "dpg": "expected the folder dpg_bench/prompts with a .txt file per prompt, or dpg_bench.csv",
    "mjhq": "expected meta_data.json",
    "imagereward": "expected benchmark-prompts.json, a list of",
    "hpsv2": "expected a folder with anime.json, concept-art.json, paintings.json, photo.json",
    "imagenet": "expected a text file with one class number per line",
}
WRONG = [
    ("geneval", '{"prompt": "a fox"}\n', "line 1 has no 'tag'"),
    ("geneval", '{"tag": "x", "prompt": "a fox"}\n', "line 1 has no list 'include'"),
    ("geneval", '{"tag": "x", "include": [], "prompt": 3}\n', "line 1 has no 'prompt' of text"),
    ("mjhq", '[{"id": "1", "prompt": "a fox"}]', "not one JSON object"),
    ("mjhq", '{"1": {"prompt": "a fox"}}', "1 has no 'category'"),
    ("mjhq", '{"../x": {"category": "art", "prompt": "a fox"}}', "cannot name an image"),
    ("mjhq", '{"x": {"category": "..", "prompt": "a fox"}}', "cannot name an image"),
    ("mjhq", "{}", "holds no prompt"),
    ("imagereward", '{"1": {"category": "art", "prompt": "a fox"}}', "not a JSON list"),
    ("imagereward", '[{"id": "1"}]', "1 has no 'prompt'"),
    ("imagereward", '[{"id": "1", "prompt": "a"}, {"id": "1", "prompt": "b"}]', "twice: 1"),
    ("imagenet", "1\n1\n", "twice: 1"),
    ("imagenet", "", "holds no prompt"),
]


@pytest.mark.parametrize(("benchmark", "content", "words"), WRONG)
def test_wrong_prompt_files(benchmark: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(NextscaleError) as error:
        ExportPlan.read(benchmark, tmp_path / "file")
    assert words in str(error.value)
    assert EXPECTED[benchmark] in str(error.value)


@pytest.mark.parametrize("benchmark", EXPECTED)
def test_every_benchmark_says_what_it_expects(benchmark: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a fox\na tree\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00PNG")
    (tmp_path / "empty").mkdir()
    for name in ("prompts.txt", "binary", "empty"):
        with pytest.raises(NextscaleError, match=re.escape(EXPECTED[benchmark])):
            ExportPlan.read(benchmark, tmp_path / name)
    with pytest.raises(NextscaleError, match="cannot be read: No such file"):
        ExportPlan.read(benchmark, tmp_path / "nowhere")
    if benchmark != "imagenet":
        with pytest.raises(NextscaleError, match="needs its prompts"):
            ExportPlan.read(benchmark, None)


def test_wrong_prompt_folders(tmp_path: Path) -> None:
    styles = write_prompts("hpsv2", tmp_path)
    assert len(ExportPlan.read("hpsv2", styles / "photo.json").image_files) == 2
    (styles / "photo.json").unlink()
    with pytest.raises(NextscaleError, match=r"lacks photo\.json"):
        ExportPlan.read("hpsv2", styles)
    (styles / "photo.json").write_text('["a fox", 3]')
    with pytest.raises(NextscaleError, match=r"photo\.json, entry 2 is not a prompt but 3"):
        ExportPlan.read("hpsv2", styles)
    folder = write_prompts("dpg", tmp_path)
    (folder / "all.txt").write_text("a fox\na tree\n")
    with pytest.raises(NextscaleError, match=r"all\.txt holds several lines"):
        ExportPlan.read("dpg", folder)
    (folder / "all.txt").rename(folder / "a.b.txt")
    (folder / "a.b.txt").write_text("a fox")
    with pytest.raises(NextscaleError, match="cannot name an image"):
        ExportPlan.read("dpg", folder)
    (tmp_path / "x.csv").write_text("id,prompt\n1,a fox\n")
    with pytest.raises(NextscaleError, match="line 2 has no 'item_id'"):
        ExportPlan.read("dpg", tmp_path / "x.csv")


def test_numbers_that_a_scorer_does_not_take(tmp_path: Path) -> None:
    for benchmark, images in (("dpg", 3), ("mjhq", 2), ("hpsv2", 4), ("geneval", 0)):
        folder = tmp_path / benchmark
        folder.mkdir()
        with pytest.raises(NextscaleError, match=f"images per prompt, not {images}"):
            ExportPlan.read(benchmark, write_prompts(benchmark, folder), images=images)
    with pytest.raises(NextscaleError, match="unknown benchmark 'coco'; allowed: geneval, dpg"):
        ExportPlan.read("coco", tmp_path)


def test_models_that_do_not_fit(text_pipe: Pipeline, label_pipe: Pipeline, tmp_path: Path) -> None:
    texts, labels = (ExportPlan.read(b, write_prompts(b, tmp_path)) for b in ("geneval", "imagenet"))
    for pipe, plan, words in (
        (label_pipe, texts, "are texts, but tiny-var takes class labels"),
        (text_pipe, labels, "are class labels, but tiny-infinity takes texts"),
        (
            label_pipe,
            ExportPlan.read("imagenet", None),
            "class 10: .* from 0 to 9, not 10 .989 more of 1000",
        ),
    ):
        with pytest.raises(NextscaleError, match=words):
            export(pipe, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Prompts that cannot be drawn


class Picky(Encoder):
    """Knows few words, as the embedded model does."""

    def check(self, prompt: str) -> None:
        if "fox" not in prompt:
            raise NextscaleError(f"cannot draw {prompt!r}")


@pytest.fixture
def picky() -> Pipeline:
    pipe = tiny_infinity()
    pipe.text_encoder = Picky()
    return pipe


BAD = ["a fox", "a cat", " ", "two foxes", "a dog"]


def write_bad(benchmark: str, folder: Path) -> tuple[Path, list[str]]:
    """A file whose second, third and fifth prompt cannot be drawn, and where these stand."""
    if benchmark == "geneval":
        path = folder / "m.jsonl"
        lines = [json.dumps({"tag": "x", "include": [], "prompt": p}) for p in BAD]
        path.write_text("\r\n".join(lines))
        return path, [f"m.jsonl, line {i}" for i in (2, 3, 5)]
    if benchmark == "dpg":
        path = folder / "p.csv"
        rows = ["item_id,text", *(f'{i},"{p}"' for i, p in enumerate(BAD))]
        path.write_text("\n".join(rows))
        return path, [f"p.csv, line {i}" for i in (3, 4, 6)]
    path = folder / "p.json"
    if benchmark == "mjhq":
        path.write_text(json.dumps({f"x{i}": {"category": "art", "prompt": p} for i, p in enumerate(BAD)}))
        return path, [f"p.json, x{i}" for i in (1, 2, 4)]
    if benchmark == "imagereward":
        path.write_text(json.dumps([{"id": f"x{i}", "prompt": p} for i, p in enumerate(BAD)]))
        return path, [f"p.json, entry {i}" for i in (2, 3, 5)]
    path = folder / "photo.json"
    path.write_text(json.dumps(BAD))
    return path, [f"photo.json, entry {i}" for i in (2, 3, 5)]


@pytest.mark.parametrize("benchmark", ["geneval", "dpg", "mjhq", "imagereward", "hpsv2"])
def test_bad_prompts_are_named_before_the_first_image(
    benchmark: str, picky: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, places = write_bad(benchmark, tmp_path)
    with pytest.raises(NextscaleError, match=f"^{places[1]}: the prompt is empty; --skip-bad leaves such prompts out$"):
        ExportPlan.read(benchmark, path)
    path.write_text(path.read_text().replace('" "', '"a hen"'))
    plan = ExportPlan.read(benchmark, path)
    monkeypatch.setattr(Pipeline, "__call__", lambda *args, **options: pytest.fail("an image was made"))
    with pytest.raises(NextscaleError) as caught:
        export(picky, plan, tmp_path / "out", **SMALL)
    assert str(caught.value).startswith(f"{places[0]}: cannot draw 'a cat' (2 more of 5 prompts")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("benchmark", ["geneval", "dpg", "mjhq", "imagereward", "hpsv2"])
def test_bad_prompts_are_skipped_and_listed(benchmark: str, picky: Pipeline, tmp_path: Path) -> None:
    path, places = write_bad(benchmark, tmp_path)
    images = None if benchmark in ("mjhq", "hpsv2") else 1
    done = export(picky, ExportPlan.read(benchmark, path, images, skip_bad=True), tmp_path / "out", **SMALL)
    assert (done.made, done.skipped, done.missing) == (2, 3, 0)
    output = json.loads(done.manifest.read_text())["skipped"]
    assert output["count"] == 3
    assert {(e["where"], e["prompt"], e["reason"]) for e in output["prompts"]} == {
        (places[0], "a cat", "cannot draw 'a cat'"),
        (places[1], " ", "the prompt is empty"),
        (places[2], "a dog", "cannot draw 'a dog'"),
    }
    # The others have the names and seeds that they would have had.
    made = sorted(str(p.relative_to(tmp_path / "out" / "images")) for p in (tmp_path / "out").rglob("*.??g"))
    text = path.read_text()
    path.write_text(text.replace("a cat", "a fox").replace('" "', '"a fox"').replace("a dog", "a fox"))
    export(picky, ExportPlan.read(benchmark, path, images), tmp_path / "whole", **SMALL)
    for name in made:
        assert (tmp_path / "out" / "images" / name).read_bytes() == (tmp_path / "whole" / "images" / name).read_bytes()


def test_no_prompt_is_left(picky: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"id": "1", "prompt": "a cat"}, {"id": "2", "prompt": ""}]')
    plan = ExportPlan.read("imagereward", tmp_path / "p.json", skip_bad=True)
    with pytest.raises(NextscaleError, match=r"p\.json, entry 1: cannot draw 'a cat'; no prompt is left"):
        export(picky, plan, tmp_path / "out", **SMALL)


def test_class_numbers_are_named_with_their_line(label_pipe: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    for text, words in {
        "1\n2\n1000\n": "labels.txt, line 3: '1000' is no class number from 0 to 999",
        "1 2\r\n-3": "labels.txt, line 2: '-3' is no class number",
        "1\nfox\n2.5": "labels.txt, line 2: 'fox' is no class number from 0 to 999 \\(1 more of 3",
        "9" * 5000: "labels.txt, line 1: '9{40}' is no class number",
        "٣": "labels.txt, line 1: '٣' is no class number",
    }.items():
        path.write_text(text)
        with pytest.raises(NextscaleError, match=words):
            ExportPlan.read("imagenet", path)
    path.write_text("3\n1 12 2\nfox\n")
    with pytest.raises(NextscaleError, match=r"labels\.txt, line 2: a class label .* from 0 to 9, not 12; --skip"):
        export(
            label_pipe, replace(ExportPlan.read("imagenet", path, 1, skip_bad=True), skip_bad=False), tmp_path / "out"
        )
    done = export(label_pipe, ExportPlan.read("imagenet", path, 1, skip_bad=True), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out" / "images").iterdir()) == ["00001.png", "00002.png", "00003.png"]
    assert [e["prompt"] for e in json.loads(done.manifest.read_text())["skipped"]["prompts"]] == ["fox", "12"]


def test_one_id_with_two_texts(tmp_path: Path) -> None:
    for benchmark, name, text, words in (
        (
            "dpg",
            "p.csv",
            "item_id,text\n1,a fox\n1,a fox\n1,a cat\n",
            "id '1' has another text in line 4 than in p.csv, line 2",
        ),
        ("mjhq", "p.json", '{"1": {"category": "a", "prompt": "a"}, "1": {}}', "the key '1' twice"),
        ("imagereward", "p.json", '[{"id": "1", "prompt": "a"}, {"id": "1", "prompt": "b"}]', "twice: 1"),
        ("mjhq", "p.json", json.dumps({"x" * 250: {"category": "a", "prompt": "a"}}), "cannot name an image"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(NextscaleError, match=words):
            ExportPlan.read(benchmark, tmp_path / name)


def test_the_manifest_names_the_text_encoder(text_pipe: Pipeline, tmp_path: Path) -> None:
    plan = ExportPlan.read("mjhq", write_prompts("mjhq", tmp_path))
    done = export(text_pipe, plan, tmp_path / "out", **SMALL)
    assert json.loads(done.manifest.read_text())["settings"]["text_encoder"] == "made up"
    other = tiny_infinity()
    other.text_encoder = Picky()
    other.text_encoder.source = "another"
    with pytest.raises(NextscaleError, match='text_encoder is "made up" there and "another" now'):
        export(other, replace(plan, skip_bad=True), tmp_path / "out", resume=True, **SMALL)
