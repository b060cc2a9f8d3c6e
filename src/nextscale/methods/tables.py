"""Fixed ratios by relative scale, as data: FastVAR's, which also stand in for NOVA's scale linkage in its ablation."""

from __future__ import annotations

from nextscale.errors import NextscaleError, choices

# Relative scale t / T -> share of tokens dropped.
TABLES: dict[str, tuple[tuple[float, float], ...]] = {
    "fastvar": ((10 / 13, 0.4), (11 / 13, 0.5), (12 / 13, 1.0), (1.0, 1.0)),  # Infinity, the last 4 of 13 scales
    "fastvar-hart": ((13 / 14, 0.5), (1.0, 0.75)),  # the last 2 of 14
}


def relative_ratio(table: str, place: float) -> float:
    """The ratio of the entry nearest to a relative scale; 0 before the first one."""
    if table not in TABLES:
        raise NextscaleError(f"unknown scale table {table!r}; allowed: {choices(TABLES)}")
    entries = TABLES[table]
    step = entries[1][0] - entries[0][0]
    if place < entries[0][0] - step / 2:
        return 0.0
    return min(entries, key=lambda entry: abs(entry[0] - place))[1]
