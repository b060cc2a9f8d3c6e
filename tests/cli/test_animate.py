"""`nextscale generate --animate`: files as a viewer opens them, captions left aside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import files
from support.commands import run
from support.files import VAR_CASE

from nextscale import Pipeline, Truncate
from nextscale.io import animation
from nextscale.io.animation import SIDE, Film, Panel, Snapshot, save_animation


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("weights")
    files.flat(folder, VAR_CASE, "mine.pth")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    return "--weights", folder / "mine.pth", "--seed", 3, "--device", "cpu"


def frames(path: Path) -> list[np.ndarray]:
    with Image.open(path) as file:
        assert file.info["loop"] == 0, "forever"
        shown = []
        for index in range(file.n_frames):
            file.seek(index)
            shown.append(np.asarray(file.convert("RGB"), dtype=float))
        return shown


def times(path: Path) -> list[int]:
    found = []
    with Image.open(path) as file:
        for index in range(file.n_frames):
            file.seek(index)
            file.load()  # WebP knows a frame's time once it is decoded
            found.append(file.info["duration"])
    return found


def shown_image(frame: np.ndarray, place: int, size: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    left = animation.MARGIN + place * (SIDE + animation.GAP) + (SIDE - size[0]) // 2
    return frame[animation.HEAD : animation.HEAD + size[1], left : left + size[0]]


def by_hand(computed: np.ndarray, size: tuple[int, int] = (64, 64)) -> Panel:
    gray = Image.new("RGB", size, (200, 200, 200))
    snapshots = [Snapshot(gray, np.ones((1, 1)), 0.1), Snapshot(gray, computed, 0.5)]
    return Panel("by hand", snapshots, Image.new("RGB", size, (90, 160, 230)))


@pytest.mark.parametrize("ending", ["webp", "gif", "WEBP"])
def test_plain_and_method_side_by_side(options: tuple[object, ...], ending: str, tmp_path: Path) -> None:
    method = ("--method", "nova", "--preset", "paper", "--set", "t_est=2", "--set", "probe=lens")
    path = tmp_path / "new" / f"scales.{ending}"
    asked = ("generate", "4", *options, *method, "--out", tmp_path / "a.png")
    done = run(*asked, "--animate", path, "--beside-plain", "--preview", tmp_path / "scales")
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}" in done.stdout
    scales = len(list((tmp_path / "scales").iterdir()))
    shown = frames(path)
    assert len(shown) == scales + 1
    height, width = shown[0].shape[:2]
    assert (width, height) == (2 * animation.MARGIN + 2 * SIDE + animation.GAP, animation.HEAD + SIDE + animation.FOOT)
    assert times(path)[-1] == animation.FINISHED
    assert times(path)[:-1] == sorted(times(path)[:-1]), "tiny scales pass faster"
    assert times(path)[0] < times(path)[-2]
    # Both ends show what is written elsewhere; the plain run has the method's seed.
    alone = run("generate", "4", *options, "--out", tmp_path / "plain.png", "--quiet")
    assert alone.returncode == 0, alone.stderr
    for place, name in enumerate(("plain.png", "a.png")):
        large = Image.open(tmp_path / name).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        assert np.abs(shown_image(shown[-1], place) - np.asarray(large, dtype=float)).mean() < 12, name
    first = path.read_bytes()
    image = (tmp_path / "a.png").read_bytes()
    assert run(*asked, "--animate", path, "--beside-plain", "--quiet").stdout == ""
    assert path.read_bytes() == first
    assert run(*asked).returncode == 0
    assert (tmp_path / "a.png").read_bytes() == image, "watching changes nothing"


def test_alone(options: tuple[object, ...], tmp_path: Path) -> None:
    done = run("generate", "4", *options, "--out", tmp_path / "a.png", "--animate", tmp_path / "a.webp")
    assert done.returncode == 0, done.stderr
    assert frames(tmp_path / "a.webp")[0].shape[1] == 2 * animation.MARGIN + SIDE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.webp"]


def test_the_embedded_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    asked = ("a red star in the snow", "--method", "truncate:8", "--out", tmp_path / "a.png", "--animate", path)
    done = run("generate", *asked, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert len(frames(path)) == 14
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize("ending", ["webp", "gif"])
def test_cells_that_were_not_computed_are_darker(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    save_animation([by_hand(np.array([[1.0, 0.5], [0.0, 1.0]]))], path)
    before, after, finished = (shown_image(frame, 0).mean(axis=2) for frame in frames(path))
    half = SIDE // 2
    cells = [after[y : y + half, x : x + half][8:-8, 8:-8].mean() for y in (0, half) for x in (0, half)]
    assert np.abs(before - 200).mean() < 3
    assert cells[0] == pytest.approx(200, abs=6)
    assert cells[3] == pytest.approx(200, abs=6)
    assert cells[2] + 40 < cells[1] < cells[0] - 40
    assert cells[2] > 60, "the image is still seen"
    assert np.abs(finished - 160).mean() < 3, "nothing covers the finished image"


def test_a_scale_that_is_left_out_hides_nothing(var: Pipeline, tmp_path: Path) -> None:
    film = Film()
    output = var(3, seed=1, method=Truncate(2), callback_on_scale_end=film)
    panel = film.panel("truncate:2", output)
    ran = len(film.images)
    assert ran == len(panel.snapshots) - 2
    assert [snapshot.computed.any() for snapshot in panel.snapshots] == [True] * ran + [False] * 2
    assert panel.snapshots[-1].image.tobytes() == panel.finished.tobytes()
    assert panel.snapshots[-1].tokens == panel.snapshots[-3].tokens == output.trace.share()
    save_animation([panel], tmp_path / "a.webp")
    shown = frames(tmp_path / "a.webp")
    assert np.abs(shown_image(shown[-2], 0) - shown_image(shown[-1], 0)).mean() < 4


@pytest.mark.parametrize(("size", "inside"), [((40, 160), (128, 512)), ((900, 300), (512, 171)), ((2000, 1), (512, 1))])
def test_standing_and_lying_images_keep_their_shape(
    size: tuple[int, int], inside: tuple[int, int], tmp_path: Path
) -> None:
    save_animation([by_hand(np.ones((2, 3)), size)] * 2, tmp_path / "a.gif")
    finished = frames(tmp_path / "a.gif")[-1]
    assert finished.shape[0] == animation.HEAD + inside[1] + animation.FOOT
    for place in range(2):
        assert np.abs(shown_image(finished, place, inside) - (90, 160, 230)).mean() < 6
    assert np.abs(finished[animation.HEAD, animation.MARGIN - 1] - animation.GROUND).max() < 12


@pytest.mark.parametrize(
    ("computed", "words"),
    [
        ([[1, 1]], "100 % computed"),
        ([[0.5, 1]], "75 % computed, the rest darkened"),
        ([[0, 1]], "50 % computed, the rest darkened"),
        ([[0, 0]], "left out"),
    ],
)
def test_the_caption_says_how_much_was_computed(computed: list[list[float]], words: str) -> None:
    assert animation._described(np.array(computed)) == words


@pytest.mark.parametrize("title", ["", "a\nb", "猫\x1b[31m\ud800", "nova:" + "x" * 5000])
def test_any_name_can_stand_above(title: str, tmp_path: Path) -> None:
    panel = by_hand(np.zeros((2, 2)))
    save_animation([Panel(title, panel.snapshots, panel.finished)], tmp_path / "a.webp")
    assert len(frames(tmp_path / "a.webp")) == 3


def test_bad_input_is_one_sentence_and_nothing_is_written(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.webp").mkdir()
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("nextscale.pipeline.Pipeline.__call__", lambda *_, **__: pytest.fail("something was computed"))
    for words, args in {
        "cannot write the animation 'a.png'; allowed endings: .webp, .gif": ("--animate", "a.png"),
        "cannot write the animation 'a'; allowed endings: .webp, .gif": ("--animate", "a"),
        "--images must be 1 with it, not 3": ("--animate", "a.webp", "--images", 3),
        "folder.webp is a folder": ("--animate", "folder.webp"),
        "cannot write file/a.gif": ("--animate", "file/a.gif"),
        "cannot write /proc/nowhere/a.gif": ("--animate", "/proc/nowhere/a.gif"),
        "--animate and --out name the same file, a.webp": ("--animate", "a.webp", "--out", "a.webp"),
        "--animate and --trace name the same file, a.gif": ("--animate", "a.gif", "--trace", tmp_path / "a.gif"),
        "give --animate FILE.webp too": ("--beside-plain", "--method", "truncate:1"),
        "--beside-plain needs --method": ("--animate", "a.webp", "--beside-plain"),
        "would stand beside itself": ("--animate", "a.webp", "--beside-plain", "--method", "none"),
    }.items():
        done = run("generate", "4", *options, *args)
        assert (done.returncode, done.stdout) == (2, ""), (words, done.stderr)
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
