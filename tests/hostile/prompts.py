"""Prompts, and files of prompts, that cannot be drawn or not be read."""

from __future__ import annotations

import json

from hostile.sandbox import Sandbox, kind


@kind("prompts")
def anything(box: Sandbox) -> list[str]:
    return box.generate(words=True, prompt=box.text(30))


@kind("prompts")
def nothing(box: Sandbox) -> list[str]:
    blank = ("", " ", "\n", "\t\t", "\u00a0", "\u200b", "\u3000", "\ufeff", "\x00", "...", "!?", "—", "the", "a a a")
    return box.generate(words=True, prompt=box.choose(*blank))


@kind("prompts")
def other_scripts(box: Sandbox) -> list[str]:
    words = (
        "猫",
        "лиса",
        "🦊",
        "ثعلب",
        "שועל",
        "ｆｏｘ",
        "fo\u0301x",
        "café",
        "👩‍👩‍👧‍👦",
        "🇨🇭",
        "ไก่",
        "한국어",
        "²",
        "½",
        "ﬁ",
    )
    return box.generate(words=True, prompt=" ".join(box.rng.choices((*words, "a fox"), k=box.rng.randint(1, 6))))


@kind("prompts")
def control_characters(box: Sandbox) -> list[str]:
    odd = ("\x1b[2J", "\x1b]0;title\x07", "\r", "\x08" * 50, "\u202e", "\x9b31m", "\ud83d", "\udcff", "\x7f")
    return box.generate(words=True, prompt=f"a{box.choose(*odd)}fox {box.choose(*odd)}zzz")


@kind("prompts")
def very_long(box: Sandbox) -> list[str]:
    piece = box.choose("fox ", "x", "🦊", "qwerty ", "a red ", "\u0301")
    return box.generate(words=True, prompt=piece * box.rng.choice((1_000, 30_000)))


@kind("prompts")
def contradictions(box: Sandbox) -> list[str]:
    words = ("red", "blue", "no", "not", "zero", "minus", "four", "nine", "17", "-3", "foxes", "above", "left of", ",")
    return box.generate(words=True, prompt=" ".join(box.rng.choices(words, k=box.rng.randint(1, 60))))


@kind("prompts")
def markup_and_formats(box: Sandbox) -> list[str]:
    odd = (
        "[bold]fox[/bold]",
        "[/]",
        "%s %d %n",
        "{0}",
        "<script>fox</script>",
        "fox; rm -rf /",
        "$(touch x)",
        "`touch x`",
        "fox\\",
    )
    return box.generate(words=True, prompt=box.choose(*odd))


@kind("prompts")
def classes(box: Sandbox) -> list[str]:
    return box.generate(
        prompt=box.choose(
            "-1", "10", "10000000000000000000000", "1.0", "fox", "", "٣", "0x1", " 3 ", "3,4", box.text(3)
        )
    )


@kind("prompts")
def negative_prompts(box: Sandbox) -> list[str]:
    return box.generate(f"--negative-prompt={box.text(8)}", words=box.rng.random() < 0.7)


def export(box: Sandbox, benchmark: str, name: str, content: bytes | str) -> list[str]:
    where = box.write(name, content)
    model = ["--weights", str(box.models / "words"), "--pixel-budget=0.06M", "--images=1", "--device=cpu"]
    return ["export", benchmark, "--prompts", where, "--out=out", *model]


def bad_record(box: Sandbox) -> dict:
    record = {"tag": "x", "include": [], "prompt": "a fox"}
    record[box.choose("tag", "include", "prompt")] = box.rng.choice(
        (None, "", " ", 5, [], {}, "🦊", "zzz", box.text(), float("nan"))
    )
    return record


@kind("prompts")
def metadata_lines(box: Sandbox) -> list[str]:
    lines = [json.dumps({"tag": "x", "include": [], "prompt": "a fox"}), json.dumps(bad_record(box))]
    lines.insert(box.rng.randrange(3), box.choose("", "{", "null", "[]", "5", '"x"', "[" * 100_000, "{}"))
    return export(box, "geneval", "meta.jsonl", "\n".join(lines))


@kind("prompts")
def encodings_of_files(box: Sandbox) -> list[str]:
    text = json.dumps(bad_record(box)) + "\n"
    ways = (
        text.encode("utf-16"),
        b"\xef\xbb\xbf" + text.encode(),
        text.replace("\n", "\r\n").encode(),
        b"\xff\xfe\xfd",
        b"\0" * 50,
        b"",
    )
    return export(box, "geneval", "meta.jsonl", box.rng.choice(ways))


@kind("prompts")
def ids_of_images(box: Sandbox) -> list[str]:
    odd = ("../../x", "/etc/x", "", ".", "a/b", "x" * 300, "a\0b", "CON", 5, None, "x", "a\nb")
    records = [
        {"id": box.rng.choice(odd), "prompt": "a fox"},
        {"id": "x", "prompt": box.choose("a fox", "a cat", "zzz")},
    ]
    return export(box, "imagereward", "benchmark-prompts.json", json.dumps(records))


@kind("prompts")
def objects_of_prompts(box: Sandbox) -> list[str]:
    odd = (
        {},
        [],
        {"a": 1},
        {"a": {"category": "../x", "prompt": "a fox"}},
        {"a": {"category": "c", "prompt": ""}},
        {"a": []},
        5,
    )
    return export(box, "mjhq", "meta_data.json", json.dumps(box.rng.choice(odd)))


@kind("prompts")
def tables_of_prompts(box: Sandbox) -> list[str]:
    head = box.choose("item_id,text", "item_id", "text", "", "item_id,text,item_id")
    rows = (f"x,{box.text(4)}", '"x', "x," + "y" * 200_000, "../x,a fox", ",", "x,a fox\nx,a cat")
    return export(box, "dpg", "dpg_bench.csv", f"{head}\n{box.rng.choice(rows)}\n")


@kind("prompts")
def prompts_of_scores(box: Sandbox) -> list[str]:
    box.write("pictures/a.png", b"x")
    content = box.choose("{}", "[]", '{"a.png": 5}', '{"b.png": "x"}', "[" * 100_000, "", "a\nb\nc", box.text())
    return ["score", "pictures", "--metrics=clip", "--prompts", box.write(box.choose("p.json", "p.txt"), content)]


@kind("prompts")
def lists_for_calibration(box: Sandbox) -> list[str]:
    lines = "\n".join(box.rng.choices(("a fox", "", "🦊", "zzz", "5", "a\x00b"), k=box.rng.choice((0, 3, 64))))
    model = ["--weights", str(box.models / "words"), "--device=cpu"]
    return ["calibrate", "toprovar", "--prompts", box.write("prompts.txt", lines), "--out=out.json", *model]
