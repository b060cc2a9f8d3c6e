"""How the embedded model is made: data, the forward pass of training, and every stage as a smoke run."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nextscale import Pipeline
from nextscale.models.text_conditioning import TextCondition
from nextscale.research.evaluate.recognizer import Detection, load_recognizer
from nextscale.research.evaluate.scenes import BACKGROUNDS, FROZEN, TASKS, ScenePrompt, read_scene_prompts
from nextscale.testing import randomize
from nextscale.text.words import Lexicon, WordEncoder

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `training` is not part of the package

from training import common, grader, scenes  # noqa: E402
from training.painter import Painter, stand_ins  # noqa: E402
from training.prompts import FIXED  # noqa: E402
from training.scene_prompts import ScenePromptSampler, captions, frozen  # noqa: E402
from training.train_transformer import Trainer  # noqa: E402


@pytest.fixture(scope="module")
def vocabulary() -> dict:
    return scenes.read_vocabulary()


@pytest.fixture(scope="module")
def lexicon(vocabulary: dict) -> Lexicon:
    return Lexicon(scenes.words_of(vocabulary))


def test_the_shipped_vocabulary_is_this_one(vocabulary: dict) -> None:
    config = json.loads((ROOT / "src/nextscale/assets/clipart/config.json").read_text())
    assert config["text"]["words"] == scenes.words_of(vocabulary)


def test_captions_can_be_read_and_describe_the_scene(vocabulary: dict, lexicon: Lexicon) -> None:
    rng = np.random.default_rng(5)
    maker = scenes.Scenes(vocabulary)
    drawn = [maker.draw(rng) for _ in range(500)]
    batch = scenes.batch_of(drawn, vocabulary, lexicon)
    for scene, tokens, length in zip(drawn, batch.tokens, batch.lengths, strict=True):
        said = {lexicon.entries[t - 1].name for t in tokens[: length - 1].tolist()}
        for item in scene.items:
            thing = vocabulary["objects" if item.color is None else "shapes"][item.index]["name"]
            assert thing in said, scene.caption
            assert item.count == 1 or ("one", "two", "three", "four")[item.count - 1] in said, scene.caption
            if item.color is not None and item.named:
                assert maker.colors[item.color] in said
        assert scene.style == 0 or scenes.STYLES[scene.style] in said, scene.caption
        assert len(scene.places) == sum(item.count for item in scene.items) <= scenes.SLOTS
        objects = [item.index for item in scene.items if item.color is None]
        assert not any(scenes.held_out(a, b) for i, a in enumerate(objects) for b in objects[i + 1 :])


def test_places_follow_the_relation() -> None:
    (x1, y1, _), (x2, y2, _) = scenes.layout("left of", [1, 1])
    assert x1 < 0.5 < x2
    assert y1 == y2
    (x1, y1, _), (x2, y2, _) = scenes.layout("below", [1, 1])
    assert y2 < 0.5 < y1
    assert x1 == x2
    for relation in (None, "left of", "right of", "above", "below"):
        for counts in ([1, 1], [2, 1], [1, 3], [2, 2]):
            spots = scenes.layout(relation, counts)
            assert len(spots) == sum(counts)
            for x, y, size in spots:
                assert size / 2 - 0.03 < min(x, y, 1 - x, 1 - y), (relation, counts)


def test_held_out_pairs(vocabulary: dict) -> None:
    n = len(vocabulary["objects"])
    share = np.mean([scenes.held_out(a, b) for a in range(n) for b in range(a)])
    assert 0.03 < share < 0.05
    unseen = scenes.Scenes(vocabulary, unseen=True)
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (item.index for item in unseen.draw(rng, "pair").items if item.color is None)
        assert scenes.held_out(a, b)


def test_the_painter_puts_the_right_color_at_the_right_place(vocabulary: dict, lexicon: Lexicon) -> None:
    maker = scenes.Scenes(vocabulary)
    square = [s["name"] for s in vocabulary["shapes"]].index("square")
    colors = [c["rgb"] for c in vocabulary["colours"]]
    red, blue, white = (maker.colors.index(c) for c in ("red", "blue", "white"))
    items = (scenes.Item(square, 1, red), scenes.Item(square, 1, blue))
    places = ((0.25, 0.5, 0.3), (0.75, 0.25, 0.2))
    scene = scenes.Scene("pair", items, 0, "plain", (white, white), places, "a red square and a blue square")
    batch = scenes.batch_of([scene], vocabulary, lexicon)
    image = Painter(stand_ins(vocabulary), "cpu", 128).paint(batch)[0].add(1).mul(127.5)
    for (x, y), color in (((32, 64), red), ((96, 32), blue), ((96, 100), white), ((5, 5), white)):
        assert torch.allclose(image[:, y, x], torch.tensor(colors[color]).float(), atol=1.5), (x, y)


def test_training_computes_what_the_package_computes(vocabulary: dict) -> None:
    """Teacher-forced logits of the trainer, padded text and grouped attention, against the package's own."""
    config = common.read_config(common.HERE / "config.json", smoke=True)
    config["transformer"]["text_dropout"] = 0.0
    trainer = Trainer(config, torch.device("cpu"))
    for seed, module in enumerate((trainer.backbone, trainer.text, trainer.tokenizer)):
        randomize(module, seed)
    rng = np.random.default_rng(0)
    drawn = [scenes.Scenes(vocabulary).draw(rng) for _ in range(3)]
    schedule = common.grids(7)
    features = torch.randn(3, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    made = common.quantize(trainer.tokenizer, features, schedule, schedule, torch.full((3, 7), 0.2))
    with torch.no_grad():
        ours = trainer.logits(made.inputs, scenes.batch_of(drawn, vocabulary, trainer.lexicon), schedule)
        texts = WordEncoder(trainer.lexicon, trainer.text).encode([s.caption for s in drawn])
        state = trainer.backbone.conditioning(TextCondition(texts), schedule, guided=False)
        theirs = trainer.backbone.teacher_forced(state, made.inputs, schedule)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_labels_repair_flipped_bits() -> None:
    config = common.read_config(common.HERE / "config.json", smoke=True)
    trainer = Trainer(config, torch.device("cpu"))
    schedule = common.grids(7)
    features = 0.3 * torch.randn(2, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    plain = common.quantize(trainer.tokenizer, features, schedule, schedule)
    encoded = trainer.tokenizer.quantize(features, next(iter(schedule)))
    assert torch.equal(plain.labels[0], encoded)
    flips = torch.zeros(2, 7)
    flips[:, 0] = 1.0  # every bit of the first scale is written wrongly, so the second must undo it
    wrong = common.quantize(trainer.tokenizer, features, schedule, schedule, flips)
    assert torch.equal(wrong.labels[0], plain.labels[0])
    assert (wrong.labels[1] == plain.labels[0]).float().mean() > 0.9
    assert all(a.shape == b.shape for a, b in zip(plain.labels, wrong.labels, strict=True))


def test_the_fixed_prompts_are_understood(lexicon: Lexicon) -> None:
    assert len(FIXED) == 48
    assert not [prompt for prompt in FIXED if lexicon.parse(prompt)[1]]


def test_every_stage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer, three stages, export, load, and on from the exported file: a minute on two cores."""

    def run(module: str, *args: object) -> None:
        options = ["--smoke", "--sprites", tmp_path / "none", "--seconds", 1.5, *args]
        monkeypatch.setattr(sys, "argv", [module, *map(str, options)])
        importlib.import_module(f"training.{module}").main()

    first = tmp_path / "first"
    run("train_tokenizer", "--run", first)
    for stage in ("objects", "details", "finish"):
        run("train_transformer", "--run", first, "--stage", stage)
        assert (first / f"{stage}.png").exists()
    run("export", "--run", first, "--out", tmp_path / "model")
    pipe = Pipeline.from_pretrained(tmp_path / "model", progress_bar=False)
    assert pipe("a fox", pixel_budget="0.06M").images[0].size == (128, 128)
    second = tmp_path / "second"
    run("train_transformer", "--run", second, "--stage", "objects", "--init", tmp_path / "model")
    log = (second / "transformer.log").read_text()
    first_log = (first / "transformer.log").read_text()
    start, again = (float(text.splitlines()[0].split()[-1]) for text in (first_log, log))
    assert again < start  # what the exported weights know is not lost
    with pytest.raises(SystemExit):
        run("train_transformer", "--run", tmp_path / "third", "--stage", "objects")


def test_the_frozen_questions_are_these(vocabulary: dict) -> None:
    assert all(frozen(vocabulary, name) == read_scene_prompts(name) for name in FROZEN)
    assert captions(vocabulary) == (ROOT / "benchmarks" / "prompts.txt").read_text().splitlines()


def test_near_misses_are_wrong(vocabulary: dict) -> None:
    """A perfect look at the spoilt scene fails the question, and one at the right scene passes."""
    scene_prompts, rng, drawer = (
        ScenePromptSampler(vocabulary, seed=1),
        np.random.default_rng(0),
        scenes.Scenes(vocabulary),
    )

    def look(scene_prompt: ScenePrompt) -> list[Detection]:
        scene = grader.scene_of(scene_prompt, drawer, rng)
        behind = scene.background, scene.colors[0] == drawer.white
        assert (behind == ("plain", True)) == (scene_prompt.background == "white"), scene_prompt
        shapes = vocabulary["shapes"]
        return [
            Detection(vocabulary["objects"][item.index]["name"], "red", x, y, 1.0, 1.0)
            if item.color is None
            else Detection(shapes[item.index]["name"], drawer.colors[item.color], x, y, 1.0, 1.0)
            for item, (x, y, _) in scene.copies
        ]

    for task, background in itertools.product(TASKS, BACKGROUNDS):
        for scene_prompt in scene_prompts.make(task, 30, background):
            assert scene_prompt.passes(look(scene_prompt)), scene_prompt
            assert not scene_prompt.passes(look(grader.spoilt(scene_prompt, scene_prompts, rng))), scene_prompt


def test_the_grading_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "nextscale")  # these commands change it for their process; now it is put back

    def run(module: str, *args: object) -> None:
        monkeypatch.setattr(sys, "argv", [module, "--smoke", *map(str, args)])
        importlib.import_module(f"training.{module}").main()

    run("recognizer", "--run", tmp_path, "--sprites", tmp_path / "none", "--seconds", 1.5)
    made = tmp_path / "recognizer"
    run("grader", "--recognizer", made, "--sprites", tmp_path / "none")
    run("evaluate", "--run", tmp_path)
    run("entropy", "--run", tmp_path)
    assert load_recognizer(folder=made).classes == load_recognizer().classes
    assert set(json.loads((tmp_path / "evaluation.json").read_text())["tasks"]) == set(TASKS)
    assert len(json.loads((tmp_path / "entropy.json").read_text())["scales"]) == 10
