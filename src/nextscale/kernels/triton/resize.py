"""The position of a cell of a new grid on the old one. Cells are squares, so centers are compared."""

from __future__ import annotations

from nextscale.kernels.dispatch import tl, triton


@triton.jit
def between(cell, h, w, width, by_row, by_column):
    """The four cells of the old grid whose centers lie around a cell's, and how far it is from the first of them."""
    r = tl.maximum((cell // width + 0.5) * by_row - 0.5, 0.0)
    c = tl.maximum((cell % width + 0.5) * by_column - 0.5, 0.0)
    r0, c0 = tl.minimum(r.to(tl.int32), h - 1), tl.minimum(c.to(tl.int32), w - 1)
    r1, c1 = tl.minimum(r0 + 1, h - 1), tl.minimum(c0 + 1, w - 1)
    return r0 * w + c0, r0 * w + c1, r1 * w + c0, r1 * w + c1, r - r0, c - c0


@triton.jit
def nearest(cell, h, w, width, by_row, by_column):
    """The cell of the old grid that a cell lies in."""
    r = tl.minimum((cell // width * by_row).to(tl.int32), h - 1)
    return r * w + tl.minimum((cell % width * by_column).to(tl.int32), w - 1)


@triton.jit
def interpolate(nw, ne, sw, se, fr, fc):
    """Interpolate between four cells, at this distance from the first of them."""
    return (1 - fr) * ((1 - fc) * nw + fc * ne) + fr * ((1 - fc) * sw + fc * se)
