"""`nextscale analyze` as a user meets it, and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support import files
from support.files import VAR_CASE

from nextscale.cli import main


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Page(HTMLParser):
    """Fails on tags that do not close, and collects what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.images += tag == "img" and str(found["src"]).startswith("data:image/png;base64,") and bool(found["alt"])
        self.links += [str(v) for k, v in attrs if k in ("href", "src")]
        self.ids.add(found.get("id") or "")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def command(*args: object) -> int:
        monkeypatch.setattr(sys, "argv", ["nextscale", "analyze", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return command


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    return files.flat(folder, VAR_CASE, "mine.pth")


def test_the_command(weights: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "out" / "page.html"
    (tmp_path / "labels.txt").write_text("birds\t4\nbirds\t7\n")
    given = ("--weights", weights, "--prompts", tmp_path / "labels.txt", "--device", "cpu", "--out", out)
    assert run("4", *given, "--figures", "entropy,change", "--report", page) == 0
    assert "entropy.png and entropy.json" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        "change.npz",
        "change.png",
        "entropy.json",
        "entropy.png",
        "page.html",
    ]
    assert json.loads((out / "entropy.json").read_text())["prompts"] == [4, 7]
    content = page.read_text()
    seen = Page()
    seen.feed(content)
    assert not seen.open
    assert seen.images == 2
    assert all(link.startswith(("#", "data:")) for link in seen.links)  # no other file, no network
    assert {link[1:] for link in seen.links if link.startswith("#")} <= seen.ids
    assert "NOVA, Figure 4b" in content
    assert "2 of labels.txt" in content


def test_restored_codes_and_seeds(weights: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = ("--weights", weights, "--device", "cpu", "--out", out, "--seeds", "2", "--report", out / "page.html")
    assert run("4", *given, "--figures", "restored,entropy") == 0
    printed = capsys.readouterr().out
    assert "restored=before" in printed
    assert "Shares of equal codes" in printed
    assert "restored.png and restored.json" in printed
    data = json.loads((out / "restored.json").read_text())
    assert data["seeds"] == json.loads((out / "entropy.json").read_text())["seeds"] == [0, 1]
    assert "this prompt, 2 seeds each" in (out / "page.html").read_text()
    assert run("4", *given, "--figures", "entropy", "--seeds", "0") == 2


@pytest.mark.parametrize("name", ["restored", "shares"])
def test_a_figure_alone_is_drawn_for_an_example(
    name: str, weights: Path, tmp_path: Path, run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--weights", weights, "--device", "cpu", "--out", tmp_path / "out") == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [f"{name}.json", f"{name}.png"]
    assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["prompts"] == [0]
    assert ("restored=before" in capsys.readouterr().out) == (name == "restored")
    assert run(name, "--weights", weights, "--out", tmp_path / "out", "--figures", "entropy") == 2, "a prompt"


def test_bad_commands(
    weights: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = ("--out", tmp_path / "out")

    def said(*args: object) -> str:
        assert run(*args) == 2
        return capsys.readouterr().err

    assert "unknown figure 'magic'; allowed: memory, flops" in said("a fox", *out, "--figures", "entropy,magic")
    assert "unknown method 'magic'" in said("a fox", *out, "--methods", "magic")
    assert "cannot write into" in said("a fox", "--out", tmp_path / "file")
    assert "cannot write" in said("a fox", "--out", tmp_path / "file" / "out")
    assert "is a folder" in said("a fox", *out, "--report", tmp_path)
    assert "takes a class number, not the text 'a fox'" in said("a fox", *out, "--weights", weights)
    assert "needs a schedule" in said("4", *out, "--weights", weights, "--methods", "nova:t_est=20")
    assert "cannot be read" in said("4", *out, "--weights", weights, "--prompts", tmp_path / "none.txt")
    given = (*out, "--weights", weights, "--figures", "entropy")
    (tmp_path / "far.txt").write_text("4\n12345\n")
    assert "not 12345" in said("4", *given, "--prompts", tmp_path / "far.txt")
    assert "“qwertz”: the prompt names nothing" in said("qwertz", *out)
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "nextscale[plot]" in said("a fox", *out)
