"""What a figure was drawn from, as a file that it can be drawn from again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.io.writing import atomic_write

Data = dict[str, Any]  # values of JSON, arrays, and lists of arrays (a map per scale)


def store(data: Data, folder: Path, name: str) -> Path:
    """Write NAME.json, or NAME.npz if there are arrays; its entry `about` then holds the rest as JSON."""
    arrays: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, np.ndarray):
            arrays[key] = value
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            arrays |= {f"{key}.{i}": each for i, each in enumerate(value)}
    known = {key.partition(".")[0] for key in arrays}
    about = json.dumps({k: v for k, v in data.items() if k not in known}, indent=1, ensure_ascii=False)
    path = folder / f"{name}.{'npz' if arrays else 'json'}"
    with atomic_write(path) as file:
        if arrays:
            np.savez_compressed(file, about=np.array(about), **arrays)
        else:
            file.write((about + "\n").encode())
    return path


def load(path: Path) -> Data:
    """Read what `store` wrote."""
    if path.suffix == ".json":
        return dict(json.loads(path.read_text()))
    with np.load(path) as content:
        data: Data = json.loads(str(content["about"]))
        for key in content.files:
            name, dot, _ = key.partition(".")
            if dot:
                data.setdefault(name, []).append(content[key])
            elif key != "about":
                data[key] = content[key]
    return data


def to_half(values: Any) -> np.ndarray:
    """A map in half precision: enough for a color."""
    return np.asarray(values, dtype=np.float16)
