"""Configs and other JSON files that are not what they should be."""

from __future__ import annotations

import json
from typing import Any

from hostile.sandbox import Sandbox, kind

WRONG: tuple[Any, ...] = (
    None, True, "", "x", -1, 0, 1, 1.5, 10**6, 10**30, float("nan"), float("inf"), [],
    [0], [-1], ["x"], [1.5], {}, {"a": 1}
)  # fmt: skip


def paths(value: Any, before: tuple = ()) -> list[tuple]:
    """The way to every value inside a JSON document, but for the long vocabulary: some of it is enough."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    return [p for key, inner in items for p in ((*before, key), *paths(inner, (*before, key)))]


def changed(box: Sandbox, model: str, times: int = 1, under: str | None = None) -> list[str]:
    folder = box.model(model)
    config = json.loads((folder / "config.json").read_text())
    for _ in range(times):
        *way, last = box.rng.choice([p for p in paths(config) if under is None or p[0] == under])
        inner = config
        for key in way:
            inner = inner[key]
        if box.rng.random() < 0.15:
            del inner[last]
        else:
            inner[last] = box.rng.choice(WRONG)
    (folder / "config.json").write_text(json.dumps(config))
    return box.generate("--weights", str(folder), words=model == "words")


@kind("configs")
def one_value(box: Sandbox) -> list[str]:
    return changed(box, "labels")


@kind("configs")
def one_value_of_words(box: Sandbox) -> list[str]:
    return changed(box, "words")


@kind("configs")
def a_transformer(box: Sandbox) -> list[str]:
    return changed(box, box.choose("words", "labels"), under="backbone")


@kind("configs")
def a_tokenizer(box: Sandbox) -> list[str]:
    return changed(box, box.choose("words", "labels"), under="tokenizer")


@kind("configs")
def defaults(box: Sandbox) -> list[str]:
    return changed(box, box.choose("words", "labels"), under="defaults")


@kind("configs")
def a_vocabulary(box: Sandbox) -> list[str]:
    return changed(box, "words", under="text")


@kind("configs")
def several_values(box: Sandbox) -> list[str]:
    return changed(box, box.choose("words", "labels"), times=4)


@kind("configs")
def huge_models(box: Sandbox) -> list[str]:
    folder = box.model("labels")
    config = json.loads((folder / "config.json").read_text())
    config["backbone"][box.choose("depth", "width", "hidden", "classes", "vocabulary", "heads")] = (
        10 ** box.rng.randint(5, 12)
    )
    (folder / "config.json").write_text(json.dumps(config))
    return box.generate("--weights", str(folder))


@kind("configs")
def grids(box: Sandbox) -> list[str]:
    folder = box.model("labels")
    config = json.loads((folder / "config.json").read_text())
    config["backbone"]["sides"] = box.rng.choice(
        ([], [0], [4, 3, 2, 1], [1, 1.5], [1, -2], [10**6], ["1"], [[1]], 4, [1] * 5000)
    )
    (folder / "config.json").write_text(json.dumps(config))
    return box.generate("--weights", str(folder))


def spoiled(box: Sandbox, text: str) -> bytes:
    """A text that is not JSON any more, or not in UTF-8, or far too deep."""
    place = box.rng.randrange(len(text))
    ways = (
        lambda: text[:place].encode(),
        lambda: text.encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: bytes(box.rng.randrange(256) for _ in range(200)),
        lambda: b"",
        lambda: b"\0" * 100,
        lambda: (text[:place] + box.text(3) + text[place:]).encode("utf-8", "surrogatepass"),
        lambda: b"[" * 200_000,
        lambda: b'{"a":' * 100_000,
        lambda: b"[1e9999, -1e9999]",
        lambda: b"9" * 10_000,
    )
    return box.rng.choice(ways)()


@kind("configs")
def spoiled_texts(box: Sandbox) -> list[str]:
    folder = box.model(model := box.choose("words", "labels"))
    (folder / "config.json").write_bytes(spoiled(box, (folder / "config.json").read_text()))
    return box.generate("--weights", str(folder), words=model == "words")


@kind("configs")
def configs_that_are_no_files(box: Sandbox) -> list[str]:
    folder = box.model("labels")
    (folder / "config.json").unlink()
    way = box.rng.randrange(3)
    if way == 0:
        (folder / "config.json").mkdir()
    elif way == 1:
        (folder / "config.json").symlink_to(folder / "config.json")  # to itself
    return box.generate("--weights", str(folder))


@kind("configs")
def preset_files(box: Sandbox) -> list[str]:
    content = {"schema": 1, "name": "nova", "fields": {"alpha": 0.5, "t_est": 5}}
    if box.rng.random() < 0.5:
        return box.generate("--method=nova", "--preset", box.write("preset.json", spoiled(box, json.dumps(content))))
    *way, last = box.rng.choice(paths(content))
    inner: Any = content
    for key in way:
        inner = inner[key]
    inner[last] = box.rng.choice(WRONG)
    return box.generate("--method=nova", "--preset", box.write("preset.json", json.dumps(content)))


@kind("configs")
def sweeps(box: Sandbox) -> list[str]:
    content = spoiled(box, '{"schema": 1, "about": "x", "curves": {"a": ["nothing:1", "truncate:x"]}}')
    return ["eval", "sweep", box.write("sweep.json", content), "--quick"]


@kind("configs")
def search_spaces(box: Sandbox) -> list[str]:
    content = spoiled(box, '{"alpha": {"low": 1, "high": 0}}')
    return ["tune", "nova", "--preset=out.json", "--max-drop=ssim=0.1", "--space", box.write("space.json", content)]


@kind("configs")
def decisions(box: Sandbox) -> list[str]:
    return box.generate("--method=skipvar", f"--set=decision={box.write('decision.json', spoiled(box, '{}'))}")
