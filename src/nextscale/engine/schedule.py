"""Which grids are generated, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nextscale.errors import NextscaleError, choices
from nextscale.io.arguments import read_choice, read_count, read_number

Grid = tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """One step of generation: a grid of h x w tokens that are predicted together."""

    index: int  # from 0
    h: int
    w: int
    start: int  # number of tokens in all earlier scales

    @property
    def grid(self) -> Grid:
        return self.h, self.w

    @property
    def tokens(self) -> int:
        return self.h * self.w

    def __str__(self) -> str:
        return f"{self.h}x{self.w}"


@dataclass(frozen=True)
class Schedule:
    """The list of grids of one image, smallest first."""

    grids: tuple[Grid, ...]
    frame: Grid  # the grid in whose cells positions are measured; a shorter schedule keeps its row's frame
    aspect_ratio: float = 1.0  # height / width, the row of the table
    pixel_budget: str | None = None  # the prefix of the row

    def __post_init__(self) -> None:
        if not self.grids or any(h < 1 or w < 1 for h, w in self.grids):
            raise NextscaleError(f"a schedule needs grids of at least 1x1, not {list(self.grids)}")

    @classmethod
    def squares(cls, sides: Sequence[int]) -> Schedule:
        return cls(tuple((s, s) for s in sides), frame=(sides[-1], sides[-1]))

    def __iter__(self) -> Iterator[Scale]:
        start = 0
        for index, (h, w) in enumerate(self.grids):
            yield Scale(index, h, w, start)
            start += h * w

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def last(self) -> Grid:
        return self.grids[-1]

    @property
    def tokens(self) -> int:
        return sum(h * w for h, w in self.grids)


@dataclass(frozen=True)
class Size:
    """What a user says about the size of an image; None = not said."""

    height: int | None = None  # pixels
    width: int | None = None
    aspect_ratio: float | None = None  # height / width
    pixel_budget: str | None = None

    def __post_init__(self) -> None:
        # As Python's own numbers: they may have come from any library.
        for name in ("height", "width"):
            if (side := getattr(self, name)) is not None:
                object.__setattr__(self, name, read_count(side, f"{name} (in pixels)", least=1))
        if self.aspect_ratio is not None:
            ratio = read_number(self.aspect_ratio, "aspect_ratio", "a height/width ratio, e.g. 1.5")
            object.__setattr__(self, "aspect_ratio", ratio)
        if self.pixel_budget is not None:
            read_choice(self.pixel_budget, "pixel budget", PIXEL_BUDGETS)


def only_square(sides: Sequence[int], size: Size, stride: int) -> Schedule:
    """The schedule of a model that knows one size; asking for another is an error."""
    side = sides[-1] * stride
    asked = (side if size.height is None else size.height, side if size.width is None else size.width)
    if asked != (side, side) or size.aspect_ratio not in (None, 1) or size.pixel_budget is not None:
        raise NextscaleError(f"this model makes images of {side}x{side} only")
    return Schedule.squares(sides)


# Infinity's table: one row per height/width ratio, in cells of 16 pixels (8 for the embedded model).
_ROWS: dict[float, str] = {
    1.0: "1x1 2x2 4x4 6x6 8x8 12x12 16x16 20x20 24x24 32x32 40x40 48x48 64x64",
    1.25: "1x1 2x2 3x3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56",
    1.333: "1x1 2x2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54",
    1.5: "1x1 2x2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52",
    1.75: "1x1 2x2 3x3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48",
    2.0: "1x1 2x2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45",
    2.5: "1x1 2x2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40",
    3.0: "1x1 2x2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37",
}
PIXEL_BUDGETS = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13, "4M": 15}
EXTENDED = "4M"  # ours: one and a half and twice the table's last grid, for which no model was trained


def _table() -> dict[float, tuple[Grid, ...]]:
    table: dict[float, tuple[Grid, ...]] = {}
    for ratio, row in _ROWS.items():
        grids = [tuple(int(n) for n in grid.split("x")) for grid in row.split()]
        table[ratio] = tuple((h, w) for h, w in grids)
        if ratio != 1.0:  # lying images: the same row turned, its key truncated as in the official table
            table[int(1000 / ratio) / 1000] = tuple((w, h) for h, w in grids)
    return table


INFINITY_GRIDS = _table()


def _extended(row: tuple[Grid, ...]) -> tuple[Grid, ...]:
    h, w = row[-1]
    return (*row, (3 * h // 2, 3 * w // 2), (2 * h, 2 * w))


def infinity_schedule(aspect_ratio: float = 1.0, pixel_budget: str = "1M") -> Schedule:
    """The schedule of a height/width ratio (within 2 % of a row of the table) and a pixel budget."""
    read_choice(pixel_budget, "pixel budget", PIXEL_BUDGETS)
    if not 0 < aspect_ratio < 100:
        raise NextscaleError(
            f"aspect_ratio {aspect_ratio:g} is not a height/width ratio; allowed: {choices(sorted(INFINITY_GRIDS))}"
        )
    key = min(INFINITY_GRIDS, key=lambda k: abs(aspect_ratio - k))
    if abs(aspect_ratio / key - 1) > 0.02:
        raise NextscaleError(
            f"aspect_ratio {aspect_ratio:g} (height/width) is not supported; allowed: {choices(sorted(INFINITY_GRIDS))}"
        )
    row = INFINITY_GRIDS[key]
    grids = _extended(row)[: PIXEL_BUDGETS[pixel_budget]]
    return Schedule(grids, frame=row[-1], aspect_ratio=key, pixel_budget=pixel_budget)


def is_far(schedule: Schedule, pixel_budget: str | None) -> bool:
    """Whether images have more than twice, or less than half, the pixels of a budget at the same aspect ratio."""
    if schedule.pixel_budget is None or pixel_budget is None:
        return False
    h, w = infinity_schedule(schedule.aspect_ratio, pixel_budget).last
    return not 0.5 <= schedule.last[0] * schedule.last[1] / (h * w) <= 2


def infinity_schedule_for_size(height: int, width: int, pixels_per_cell: int) -> Schedule:
    """The schedule whose last grid is exactly this size."""
    sizes = {}
    for ratio, row in INFINITY_GRIDS.items():
        for budget, n in PIXEL_BUDGETS.items():
            h, w = _extended(row)[n - 1]
            sizes[h * pixels_per_cell, w * pixels_per_cell] = (ratio, budget)
    if (height, width) not in sizes:
        near = sorted(sizes, key=lambda s: abs(s[0] - height) + abs(s[1] - width))[:4]
        raise NextscaleError(
            f"height {height} x width {width} is not a size of the schedule table; "
            f"the nearest are {choices(f'{h}x{w}' for h, w in near)} (height x width)"
        )
    ratio, budget = sizes[height, width]
    return infinity_schedule(ratio, budget)
