"""Private words that the field has words for stay out of the source."""

from __future__ import annotations

import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
GONE = {
    *("MOST", "FEW", "OLDEST", "told", "shelf", "looks_away", "leaves_holes", "keep_highest", "length_place"),
    *("make_room", "Pieces", "Given", "whole_file"),
}


def test_old_names_are_gone() -> None:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        with tokenize.open(path) as file:
            tokens = [
                t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.NAME and t.string in GONE
            ]
        found += [f"{path.relative_to(ROOT)}:{t.start[0]} {t.string}" for t in tokens]
    assert not found, "\n".join(["use the field's word:", *found])


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            words = line.replace("(", " ").replace(":", " ").split()
            if line.startswith("class ") and not words[1].startswith("_"):
                places.setdefault(words[1], []).append(f"{path.relative_to(ROOT)}:{number} {words[1]}")
    twice = [place for found in places.values() if len(found) > 1 for place in found]
    assert not twice, "\n".join(["two meanings of one name:", *twice])
