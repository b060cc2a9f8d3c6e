"""The trained model that comes with the package, and its vocabulary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nextscale import MODELS, NextscaleError, Pipeline, Truncate
from nextscale.checkpoints.int8 import Int8State, quantize_state
from nextscale.checkpoints.locate import ASSETS
from nextscale.cli import main
from nextscale.io.images import to_pil
from nextscale.text.words import END_TOKEN, Lexicon, split

SHORT = Truncate(6)  # 7 of 13 grids: under a second, coarse but the right image


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.from_pretrained(progress_bar=False)


@pytest.fixture(scope="module")
def lexicon(pipe: Pipeline) -> Lexicon:
    return pipe.text_encoder.lexicon


def names(lexicon: Lexicon, prompt: str) -> list[str]:
    tokens, unknown = lexicon.parse(prompt)
    assert tokens[-1] == END_TOKEN
    assert not unknown
    return [lexicon.entries[t - 1].name for t in tokens[:-1]]


def test_phrases_are_read_longest_first(lexicon: Lexicon) -> None:
    assert names(lexicon, "Two foxes, to the LEFT of a teddy-bear!") == ["two", "fox", "left of", "teddy bear"]
    assert names(lexicon, "a pair of scissors") == ["scissors"]
    assert names(lexicon, "a pair of aeroplanes on a grey background") == ["two", "airplane", "gray", "background"]
    assert names(lexicon, "a photo of a plane over the sea") == ["airplane", "above", "sea"]


def test_every_concept_is_understood_in_singular_and_plural(lexicon: Lexicon) -> None:
    objects = lexicon.of_kind("objects")
    assert len(objects) >= 250
    for entry in objects:
        for phrase in entry.phrases:
            assert names(lexicon, f"a {phrase}") == [entry.name], phrase


def test_a_vocabulary_says_nothing_twice(lexicon: Lexicon) -> None:
    config = json.loads((ASSETS / "clipart" / "config.json").read_text())
    words = config["text"]["words"]
    words["shapes"].append({"name": "Fox"})
    with pytest.raises(NextscaleError, match="'Fox' twice"):
        Lexicon(words)


def test_unknown_words_are_named_with_near_ones(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nextscale")  # a test of training may have asked for less
    rows = pipe.encode_prompt(["a purple elefant and a fox", "a purple and a fox"])
    assert "'elefant' (perhaps elephant" in caplog.text
    assert torch.equal(rows[0], rows[1])
    with pytest.raises(NextscaleError, match=r"nothing that this model can draw: 'qwertz'.*nextscale words"):
        pipe("qwertz", method=SHORT)
    with pytest.raises(NextscaleError, match="only filler words"):
        pipe("a picture of the", method=SHORT)
    with pytest.raises(NextscaleError, match="the prompt is empty"):
        pipe("  ")


def test_known_prompts_are_split_as_ever(lexicon: Lexicon) -> None:
    """The model was trained with these words."""

    def before(text: str) -> list[str]:
        return re.findall(r"[a-z0-9]+(?:'[a-z]+)?", text.lower().replace("-", " ").replace("’", "'"))

    phrases = [" ".join(phrase) for phrase in lexicon.phrases]
    phrases += [p for entry in lexicon.entries for p in entry.phrases]
    scenes = [ask["prompt"] for ask in json.loads((ASSETS / "scenes.json").read_text())["asks"]]
    for phrase in (*phrases, *scenes, *map(chr, range(128)), "It’s the dog's rock'n'roll_3x 2nd"):
        for text in (phrase, f"Two {phrase.upper()}s, (a {phrase})!"):
            assert split(text) == before(text)


@pytest.mark.parametrize(
    ("prompt", "words"),
    {
        "a fox and a 猫": ["猫"],
        "🦊": ["🦊"],
        "a fox 🦊🦊!": ["🦊🦊"],
        "一只fox。": ["一只"],
        "Лиса and a fox": ["лиса"],
        "a café, a cafe\u0301": ["café", "café"],
        "a fox\u030c": ["fox\u030c"],
        "٣ foxes, ½ fox, ① fox": ["٣", "½", "①"],
        "कुत्ता می\u200cخواهم": ["कुत्ता", "می\u200cخواهم"],
        "👨\u200d👩\u200d👧 👍🏽 🇩🇪 3\ufe0f\u20e3": ["👨\u200d👩\u200d👧", "👍🏽", "🇩🇪", "3\ufe0f\u20e3"],
        "a \U0001fae9 \ue000 \U000e1000 fox": ["\U0001fae9", "\ue000", "\U000e1000"],  # newer than Python, or nobody's
        "ｆｏｘ 𝐟𝐨𝐱 fo\u00adx \ufefffox FOX": [],
        "«a fox» – “a fox”… ¡a fox! 、。‖ + = € fox\u200bfox": [],
    }.items(),
    ids=ascii,
)
def test_words_of_every_script_are_named(prompt: str, words: list[str], lexicon: Lexicon) -> None:
    tokens, unknown = lexicon.parse(prompt)
    assert unknown == words
    drawn = {lexicon.entries[t - 1].name for t in tokens[:-1]} - {"and"}
    assert drawn == ({"fox"} if re.search(r"fox(?!\u030c)|ｆｏｘ", prompt) else set())


def test_words_of_every_script_reach_the_user(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nextscale")
    pipe.encode_prompt("a fox and a 猫")
    assert "left out, because the model does not know them: '猫'" in caplog.text
    check = pipe.text_encoder.check
    caplog.clear()
    check("a fox and a 猫")
    assert not caplog.text, "who only checks is told once"
    for prompt, words in {
        "🦊": "can draw: '🦊'",
        "¡…!": "can draw: no words",
        "a picture": "only filler words",
    }.items():
        with pytest.raises(NextscaleError, match=words):
            check(prompt)
    with pytest.raises(NextscaleError, match=r"'z{40}…';"):
        check("z" * 10_000)


def test_a_long_prompt_is_cut(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    (row,) = pipe.encode_prompt("a fox and a cat " * 125)
    assert len(row) == 48
    assert "is cut to the first 47" in caplog.text


def test_sizes_it_was_not_trained_for(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    out = pipe("a fox", aspect_ratio=0.5, pixel_budget="0.06M")
    assert "trained for 512x512" in caplog.text
    assert out.images[0].size == (176, 88)
    caplog.clear()
    pipe("a fox", method=SHORT)
    assert not caplog.text


def test_the_file_is_the_registered_model_and_small(pipe: Pipeline) -> None:
    spec = MODELS["clipart"]
    assert pipe.spec == spec
    assert pipe.tokenizer.config == spec.tokenizer
    assert pipe.tokenizer.stride == 8
    assert sum(p.stat().st_size for p in (ASSETS / "clipart").iterdir()) <= 30e6


def test_it_was_really_trained(pipe: Pipeline) -> None:
    """Colors and places follow the prompt."""
    prompts = ["a red heart on a yellow background", "a green circle to the left of a blue square"]
    heart, pair = (np.asarray(p, dtype=float) for p in pipe(prompts, seed=[0, 1], method=SHORT).images)

    def mean(image: np.ndarray, x: float, y: float) -> np.ndarray:
        x, y = int(512 * x), int(512 * y)
        return image[y - 12 : y + 12, x - 12 : x + 12].mean((0, 1))

    for spot, rgb in (((0.5, 0.5), (222, 41, 41)), ((0.06, 0.06), (252, 214, 44)), ((0.94, 0.94), (252, 214, 44))):
        assert np.abs(mean(heart, *spot) - rgb).max() < 30, spot
    for spot, rgb in (((0.27, 0.5), (52, 165, 72)), ((0.73, 0.5), (46, 104, 224)), ((0.5, 0.1), (255, 255, 255))):
        assert np.abs(mean(pair, *spot) - rgb).max() < 30, spot


def test_an_image_comes_back_from_the_tokenizer(pipe: Pipeline) -> None:
    """On a drawing that has nothing to do with training: flat areas, an edge, a gradient."""
    y, x = np.mgrid[0:512, 0:512]
    pixels = np.stack((np.where(x < 200, 40, 220), y / 2, np.full_like(x, 120)), axis=-1).astype(np.uint8)
    original = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.inference_mode():
        maps = pipe.tokenizer.encode(original, pipe.schedule()).maps
        back = [pipe.tokenizer.decode(m) for m in (maps[3], maps[-1])]
    coarse, fine = (-10 * ((b - original) / 2).square().mean().log10() for b in back)
    assert fine > 25
    assert fine > coarse + 3


def test_the_same_seed_gives_the_same_image_in_another_process(pipe: Pipeline, tmp_path: Path) -> None:
    mine = pipe("a fox", seed=3, method=SHORT)
    assert mine.images[0].tobytes() == pipe("a fox", seed=3, method=SHORT).images[0].tobytes()
    assert mine.images[0].tobytes() != pipe("a fox", seed=4, method=SHORT).images[0].tobytes()
    code = (
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from nextscale import Pipeline, Truncate\n"
        "Pipeline.from_pretrained()('a fox', seed=3, method=Truncate(6)).images[0].save('x.png')\n"
        "import sys; assert 'torch._dynamo' not in sys.modules, 'the compiler takes longer to load than the model'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert Image.open(tmp_path / "x.png").tobytes() == mine.images[0].tobytes()


def test_company_changes_nothing(pipe: Pipeline) -> None:
    alone = pipe.encode_prompt("a fox")[0]
    assert torch.equal(alone, pipe.encode_prompt(["two cats above a red heart in the snow", "a fox"])[1])


def test_eight_bits(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from nextscale.checkpoints.files import open_states

    generator = torch.Generator().manual_seed(0)
    state = {
        "matrix": torch.randn(96, 64, generator=generator) * torch.logspace(-3, 3, 96)[:, None],
        "conv": torch.randn(40, 16, 3, 3, generator=generator),
        "zeros": torch.zeros(80, 80),
        "small": torch.randn(8, 8, generator=generator),
        "vector": torch.randn(5000, generator=generator),
    }
    save_file(quantize_state(state), tmp_path / "packed.safetensors")
    opened = Int8State(open_states(tmp_path / "packed.safetensors")[0])
    assert set(opened.infos) == set(state)
    read = opened.tensors(list(state))
    for key in ("matrix", "conv", "zeros"):
        rows, wanted = read[key].flatten(1), state[key].flatten(1)
        step = wanted.abs().amax(1, keepdim=True) / 127
        assert ((rows - wanted).abs() <= step * 0.501 + 1e-12).all()
    for key in ("small", "vector"):
        assert torch.allclose(read[key].float(), state[key], rtol=1e-3)


def test_convert_and_load_again(pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nextscale", "convert", "clipart", str(tmp_path / "mine")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    again = Pipeline.from_pretrained(tmp_path / "mine", progress_bar=False)
    want, have = (p("a fox above a tree", seed=1, method=SHORT) for p in (pipe, again))
    assert all(torch.equal(a, b) for a, b in zip(want.tokens, have.tokens, strict=True))
    broken = json.loads((tmp_path / "mine" / "config.json").read_text())
    broken["text"]["words"].pop("shapes")
    (tmp_path / "mine" / "config.json").write_text(json.dumps(broken))
    with pytest.raises(NextscaleError, match="not a config of a converted model: it has no 'shapes'"):
        Pipeline.from_pretrained(tmp_path / "mine")


def run_cli(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["nextscale", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_line_needs_no_model(
    pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, previews = tmp_path / "fox.png", tmp_path / "previews"
    short = ("--method", "truncate", "--set", "k=6")
    assert run_cli(monkeypatch, "generate", "a fox", "--seed", 7, "--out", out, "--preview", previews, *short) == 0
    seen = []
    output = pipe("a fox", seed=7, method=SHORT, callback_on_scale_end=lambda e: seen.append(to_pil(e.decode())[0]))
    assert Image.open(out).tobytes() == output.images[0].tobytes()
    files = sorted(previews.iterdir())
    assert [f.name for f in files] == [f"scale-{i:02}.png" for i in range(1, 8)]
    assert all(Image.open(f).tobytes() == s.tobytes() for f, s in zip(files, seen, strict=True))
    assert "wrote" in capsys.readouterr().out
    assert run_cli(monkeypatch, "generate", "a fox", "--out", out, "--preview", out) == 2
    assert "cannot write into" in capsys.readouterr().err


def test_words_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(monkeypatch, "words") == 0
    text = capsys.readouterr().out
    assert "    airplane (airplanes, " in text
    assert "relations (5)" in text
    assert run_cli(monkeypatch, "words", "colours") == 0
    assert capsys.readouterr().out.startswith("colours (12)\n    red (crimson, scarlet)\n")
    assert run_cli(monkeypatch, "words", "verbs") == 2
    assert "unknown kind 'verbs'; allowed: objects" in capsys.readouterr().err
