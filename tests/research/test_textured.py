"""The data and the training of the next embedded model: textured scenes, and runs that go on on another machine."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nextscale import Pipeline
from nextscale.checkpoints.int8 import quantize_state
from nextscale.models.text_conditioning import TextCondition
from nextscale.testing import randomize
from nextscale.text.words import Lexicon, WordEncoder

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `training` is not part of the package

from training import common, store  # noqa: E402
from training import scenes as former  # noqa: E402
from training.textured import scenes  # noqa: E402
from training.textured.painter import Bank, Painter, recolored, stand_ins  # noqa: E402
from training.textured.prompts import FIXED  # noqa: E402
from training.train_transformer import Trainer, build  # noqa: E402

CONFIG = ROOT / "training/textured/config.json"
RATIOS = [float(r) for r in common.read_config(CONFIG, smoke=False)["transformer"]["scenes"]["ratios"]]


@pytest.fixture(scope="module")
def vocabulary() -> dict:
    return scenes.read_vocabulary()


@pytest.fixture(scope="module")
def lexicon(vocabulary: dict) -> Lexicon:
    return Lexicon(scenes.words_of(vocabulary))


@pytest.fixture(scope="module")
def drawn(vocabulary: dict) -> list[scenes.Scene]:
    rng, maker = np.random.default_rng(5), scenes.Scenes(vocabulary)
    return [maker.draw(rng, ratio=RATIOS[i % len(RATIOS)]) for i in range(600)]


def one(vocabulary: dict, *items: scenes.Item, background: str = "plain", relation: str | None = None) -> scenes.Scene:
    maker = scenes.Scenes(vocabulary)
    task = "single" if len(items) == 1 else "groups"
    return scenes.Scene(task, relation, items, 0, background, (maker.white, maker.white), "a fox")


def test_what_the_former_model_knows_is_known(lexicon: Lexicon) -> None:
    before = Lexicon(former.words_of(former.read_vocabulary()))
    assert not [phrase for phrase in before.phrases if lexicon.parse(" ".join(phrase))[1]]
    assert not [prompt for prompt in FIXED if lexicon.parse(prompt)[1]]
    assert len(FIXED) == 48


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("the letter A", "letter A"),
        ("a letter and a book", "envelope and book"),
        ("two letters B", "two letter B"),
        ("7 foxes and the number seven", "seven fox and number 7"),
        ("a golden key on a wooden table", "golden key wooden table"),
        ("a wooden star in the woods", "wooden star forest"),
        ("a star made of gold", "star golden"),
        ("a striped cup on a red striped background", "striped cup red striped background"),
        ("a wine glass", "wine glass"),
        ("two pairs of glasses in the clouds", "two glasses cloud"),
    ],
)
def test_phrases(lexicon: Lexicon, prompt: str, names: str) -> None:
    tokens, unknown = lexicon.parse(prompt)
    assert not unknown
    assert " ".join(lexicon.entries[t - 1].name for t in tokens[:-1]) == names


def test_captions_describe_the_scene(vocabulary: dict, lexicon: Lexicon, drawn: list[scenes.Scene]) -> None:
    maker = scenes.Scenes(vocabulary)
    for scene in drawn:
        tokens, unknown = lexicon.parse(scene.caption)
        said = {lexicon.entries[t - 1].name for t in tokens[:-1]}
        assert not unknown
        wanted = {scene.background} if scene.background in maker.places else set()
        for item in scene.items:
            wanted.add(maker.thing(item)["name"])
            wanted |= {scenes.COUNTS[item.count - 1]} if item.count > 1 else set()
            wanted |= {item.size} if item.size else set()
            wanted |= {maker.colors[item.color]} if item.color is not None and item.named else set()
            wanted |= {vocabulary["materials"][item.material]["name"]} if item.material is not None else set()
        assert wanted <= said, scene.caption
        assert len(scene.spots) == sum(item.count for item in scene.items) <= scenes.SLOTS
        objects = [item.index for item in scene.items if item.kind == "objects"]
        assert not any(scenes.held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :])


def test_nothing_touches_and_everything_is_inside(drawn: list[scenes.Scene]) -> None:
    for scene in drawn:
        width, height = scenes.canvas(scene.ratio)
        for i, (item, a) in enumerate(scene.copies):
            assert a.size / 2 + 0.02 < min(a.x, a.y, width - a.x, height - a.y), scene
            for b in scene.spots[:i]:
                assert max(abs(a.x - b.x), abs(a.y - b.y)) > (a.size + b.size) / 2, scene
            if item.size in ("tiny", "small"):
                low, high = scenes.SIZES[item.size]
                assert 0.999 * low <= a.size <= high
            assert not (a.mirrored and item.kind == "letters")


def test_relations_hold(drawn: list[scenes.Scene]) -> None:
    seen = set()
    for scene in drawn:
        if scene.relation in scenes.RELATIONS:
            first, second = ([s for i, s in scene.copies if i is item] for item in scene.items)
            along = [s.x if scene.relation in ("left of", "right of") else s.y for s in (*first, *second)]
            before, after = along[: len(first)], along[len(first) :]
            if scene.relation in ("right of", "below"):
                before, after = after, before
            assert max(before) < min(after), scene
            seen.add(scene.relation)
    assert seen == set(scenes.RELATIONS)


def test_the_painter_puts_things_where_they_belong(vocabulary: dict, lexicon: Lexicon) -> None:
    maker = scenes.Scenes(vocabulary)
    square = [s["name"] for s in vocabulary["shapes"]].index("square")
    rgb = [torch.tensor(c["rgb"]).float() for c in vocabulary["colours"]]
    red, blue = (maker.colors.index(c) for c in ("red", "blue"))
    items = (scenes.Item("shapes", square, 1, red), scenes.Item("shapes", square, 1, blue))
    scene = replace(
        one(vocabulary, *items, relation="left of"),
        ratio=0.571,
        spots=(scenes.Spot(0.25, 0.5, 0.3), scenes.Spot(1.0, 0.25, 0.2)),
        chance=(0.5,) * 8,
    )
    painter = Painter(stand_ins(vocabulary), "cpu", 128, variants=1)
    image = painter.paint(scenes.batch_of([scene], vocabulary, lexicon))[0].add(1).mul(127.5)
    assert image.shape[1:] == painter.size(0.571) == (96, 168)
    for (x, y), color in (((32, 64), red), ((128, 32), blue), ((80, 80), maker.white), ((3, 3), maker.white)):
        assert torch.allclose(image[:, y, x], rgb[color], atol=1.5), (x, y)


def test_seeds_and_captions_decide_what_they_should(vocabulary: dict, lexicon: Lexicon) -> None:
    """Drawn again a scene looks otherwise; the same scene looks the same; a material and a shadow can be seen."""
    maker, rng = scenes.Scenes(vocabulary), np.random.default_rng(1)
    shapes = [s["name"] for s in vocabulary["shapes"]]
    wooden = [m["name"] for m in vocabulary["materials"]].index("wooden")
    star = scenes.Item("shapes", shapes.index("star"), 3, maker.colors.index("green"))
    scene = maker.arranged(rng, one(vocabulary, star))
    again = maker.arranged(rng, scene)
    wood = replace(scene, items=(replace(star, color=None, material=wooden),))
    table = replace(scene, background="wooden table")
    bare = replace(table, items=(), spots=())
    painter = Painter(stand_ins(vocabulary), "cpu", 128, variants=1)

    def paint(*some: scenes.Scene) -> torch.Tensor:
        return painter.paint(scenes.batch_of(list(some), vocabulary, lexicon))

    first, second, third, fourth, fifth = paint(scene, again, wood, table, bare)
    assert torch.equal(paint(scene)[0], first)
    assert (first - second).abs().mean() * 127.5 > 12
    inside = first[0] < -0.58  # of the green stars
    assert first[:, inside].std(1).max() < 0.01
    assert third[:, inside].std(1).min() > 0.05
    shaded = (fifth - fourth).mean(0)[first.amin(0) > 0.999]  # the table around the stars
    assert shaded.min() > -0.01
    assert shaded.max() > 0.1


def test_a_recolored_thing_keeps_its_lights_and_darks() -> None:
    sprite = torch.full((1, 4, 8, 8), 0.4)
    sprite[:, :, :4] *= 0.5  # half of it shows half, in the same color
    sprite[:, :3, :, 6:] *= 0.25
    sprite[:, :3, :, :2] *= 2
    made = recolored(sprite, torch.tensor([[0.9, 0.2, 0.1]]))
    assert torch.equal(made[:, 3], sprite[:, 3])
    red, green, _ = (made[0, :3] / made[0, 3:]).unbind()
    assert (red[:, 3:5] > 0.7).all()
    assert (red[:, 6:] < 0.5).all()
    assert (green[:, :2] > green[:, 3:4] + 0.3).all()


def test_every_letter_is_another_token(vocabulary: dict, lexicon: Lexicon) -> None:
    letters = [entry["name"] for entry in vocabulary["letters"]]
    assert len(letters) == 36
    assert len({tuple(lexicon.parse(name)[0]) for name in letters}) == 36


def test_the_model_fits_into_the_package() -> None:
    backbone, text, tokenizer, _ = build(common.read_config(CONFIG, smoke=False))
    state = {f"{i}.{k}": p.detach() for i, m in enumerate((backbone, text, tokenizer)) for k, p in m.named_parameters()}
    assert sum(tensor.nbytes for tensor in quantize_state(state).values()) < 26.9e6


def batch_and_features(trainer: Trainer, vocabulary: dict, ratio: float) -> tuple[scenes.Batch, torch.Tensor]:
    rng, maker = np.random.default_rng(0), scenes.Scenes(vocabulary)
    batch = scenes.batch_of([maker.draw(rng, ratio=ratio) for _ in range(3)], vocabulary, trainer.lexicon)
    h, w = common.grids(7, ratio).last
    return batch, torch.randn(3, 16, h, w, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ratio", RATIOS)
def test_training_computes_what_the_package_computes(vocabulary: dict, ratio: float) -> None:
    config = common.read_config(CONFIG, smoke=True)
    config["transformer"]["text_dropout"] = 0.0
    trainer = Trainer(config, torch.device("cpu"))
    for seed, module in enumerate((trainer.backbone, trainer.text, trainer.tokenizer)):
        randomize(module, seed)
    batch, features = batch_and_features(trainer, vocabulary, ratio)
    schedule = common.grids(7, ratio)
    made = common.quantize(trainer.tokenizer, features, schedule, schedule, torch.full((3, 7), 0.2))
    with torch.no_grad():
        ours = trainer.logits(made.inputs, batch, schedule)
        texts = WordEncoder(trainer.lexicon, trainer.text).encode([s.caption for s in batch.scenes])
        state = trainer.backbone.conditioning(TextCondition(texts), schedule, guided=False)
        theirs = trainer.backbone.teacher_forced(state, made.inputs, schedule)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_going_on_elsewhere_is_going_on(vocabulary: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after saving equal those of a run that resumes, to the last bit; files stay small."""
    monkeypatch.setattr(store, "LARGEST", 200_000)
    config = common.read_config(CONFIG, smoke=True)

    def steps(trainer: Trainer, count: int) -> list[torch.Tensor]:
        torch.manual_seed(count)
        batch, features = batch_and_features(trainer, vocabulary, 0.75)
        return [trainer.step(features, batch, 7, 0.3) for _ in range(count)]

    torch.manual_seed(3)
    first = Trainer(config, torch.device("cpu"))
    steps(first, 2)
    first.training.elapsed = 77.0
    before = [p.detach().clone() for p in first.backbone.parameters()]
    first.training.save(tmp_path)
    files = store.files_of(tmp_path, "state")
    assert len(files) > 2
    assert all(file.stat().st_size < 250_000 for file in files)
    for p, was in zip(first.backbone.parameters(), before, strict=True):
        assert torch.allclose(p, was, rtol=1e-3, atol=1e-6)
    after = steps(first, 3)
    second = Trainer(config, torch.device("cpu"))
    second.training.load(tmp_path)
    assert (second.training.steps, second.training.elapsed) == (2, 77.0)
    for a, b in zip(after, steps(second, 3), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, first.training.average.slow, second.training.average.slow))
    third = steps(Trainer(config, torch.device("cpu")), 3)
    assert not torch.equal(after[0], third[0])


def test_every_stage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer in two runs, the transformer in three, on another machine after the first; export and load."""

    def run(module: str, *args: object, seconds: float = 0.3) -> None:
        options = ["--config", CONFIG, "--smoke", "--sprites", tmp_path / "none", *args]
        options += [] if module == "export" else ["--seconds", seconds]
        monkeypatch.setattr(sys, "argv", [module, *map(str, options)])
        importlib.import_module(f"training.{module}").main()

    first, second = tmp_path / "first", tmp_path / "second"
    run("textured.speed")
    run("train_tokenizer", "--run", first)
    run("train_tokenizer", "--run", first, "--resume", first / "tokenizer-state")
    log = (first / "tokenizer.log").read_text()
    assert "textured: psnr" in log
    assert "ratio 0.75: psnr" in log
    run("train_transformer", "--run", first, "--stage", "objects")
    (first / "state").rename(tmp_path / "carried")
    arguments = ("--run", second, "--init", first, "--resume", tmp_path / "carried")
    run("train_transformer", *arguments, "--stage", "finish")
    assert (second / "finish-0.75.png").exists()
    run("export", "--run", second, "--out", tmp_path / "model")
    pipe = Pipeline.from_pretrained(tmp_path / "model", progress_bar=False)
    image = pipe("a wooden star", pixel_budget="0.06M", aspect_ratio=0.75).images[0]
    assert image.size == (160, 120)
    assert math.isclose(image.width / image.height, 4 / 3)


def test_textures_are_drawn_once_and_renewed_one_by_one() -> None:
    asked: list[tuple[str, int]] = []

    def draw(name: str, count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
        asked.append((name, count))
        return torch.rand(count, 3, height, width, generator=generator)

    bank = Bank(draw, 30, torch.Generator().manual_seed(0))
    first = bank("sand", 8, 8).clone()
    assert torch.equal(bank("sand", 8, 8), first)
    assert asked == [("sand", 24), ("sand", 6)]
    assert bank("sand", 8, 16).shape == (10, 3, 8, 16)
    for _ in range(2 * 15):
        bank.renew()
    changed = (bank("sand", 8, 8) != first).flatten(1).any(1)
    assert int(changed.sum()) > 20
    assert bank("sand", 8, 8).shape == first.shape
