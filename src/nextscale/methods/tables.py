"""Fixed ratios by relative scale, as data: FastVAR's, and the shares that our SparseVAR drops at tau 0.6, measured on
the embedded model. Both stand in for NOVA's scale linkage in its ablation."""

from __future__ import annotations

from fractions import Fraction

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods.package_data import stored, stored_names

Table = tuple[tuple[float, float], ...]  # relative scale t / T -> share of tokens dropped, in order

TABLES: dict[str, Table] = {
    "fastvar": ((10 / 13, 0.4), (11 / 13, 0.5), (12 / 13, 1.0), (1.0, 1.0)),  # Infinity, the last 4 of 13 scales
    "fastvar-hart": ((13 / 14, 0.5), (1.0, 0.75)),  # the last 2 of 14
}


def read_table(name: str) -> Table:
    """A table by name, a file that `nextscale calibrate shares` wrote, or written out: "11/13:0.5 12/13:0.7 1:0.9"."""
    if name in TABLES:
        return TABLES[name]
    if ":" in name and not name.endswith(".json"):
        return _written(name)
    path = stored("table", name)
    if path.suffix != ".json":
        have = (*TABLES, *stored_names("table"))
        raise NextscaleError(f"unknown scale table {name!r}; allowed: {choices(have)}, or a .json file")
    content = read_json(path, "a scale table")
    try:
        entries = tuple((float(buffer), float(ratio)) for buffer, ratio in content["entries"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise NextscaleError(f"{path} is not a scale table: {error}") from None
    return _checked(entries, str(path))


def _written(text: str) -> Table:
    try:
        pairs = [entry.split(":") for entry in text.split()]
        return _checked(tuple((float(Fraction(buffer)), float(ratio)) for buffer, ratio in pairs), repr(text))
    except (ValueError, ZeroDivisionError):
        raise NextscaleError(
            f"{text!r} is not a scale table; written out it reads '11/13:0.5 12/13:0.7 1:0.9'"
        ) from None


def _checked(entries: Table, where: str) -> Table:
    if not entries or any(not 0 < buffer <= 1 or not 0 <= ratio <= 1 for buffer, ratio in entries):
        raise NextscaleError(f"{where} is not a scale table: places lie in (0, 1] and ratios in [0, 1]")
    return tuple(sorted(entries))


def relative_ratio(table: Table, buffer: float) -> float:
    """The ratio of the entry nearest to a relative scale; 0 before the first one."""
    output = table[1][0] - table[0][0] if len(table) > 1 else 0.1
    if buffer < table[0][0] - output / 2:
        return 0.0
    return min(table, key=lambda entry: abs(entry[0] - buffer))[1]
