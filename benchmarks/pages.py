"""A KV cache in pages against one that lies side by side: attention, and the store of keys.

    python benchmarks/pages.py [--only packed | complete] [--entropy] [--json FILE]

The numbers of queries and keys of Infinity-2B's layers: two rows, 16 heads of 128 channels, bfloat16. Packed: the
scales that NOVA reduces, a mean over recorded decisions. Complete: scales that a prompt may keep all tokens of.
Microseconds of one layer, a median over replays of a CUDA graph whose caches take turns, so that none is found in the
L2 cache. Pages lie in any order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nextscale.cache.paged import PAGE_SIZE, PagedKVCache, PagePool
from nextscale.io.writing import atomic_write
from nextscale.kernels.kv_store import split_and_store
from nextscale.kernels.triton.flash_attention import fused_attention
from nextscale.methods.selection import Packed
from nextscale.runtime.cudagraph.memory_arena import MemoryArena
from ragged import CALLS, COLD, microseconds

ROWS, HEADS, WIDTH = 2, 16, 128


@dataclass(frozen=True)
class Case:
    """A layer of a scale: cells, those of them that a row keeps, keys that it has from scales before, and whether new
    keys lie apart because the scale is the last one."""

    cells: int
    queries: int
    keys: int
    ends: bool = False

    @property
    def complete(self) -> bool:
        return self.queries == self.cells

    @property
    def sets(self) -> int:
        """Caches that take turns."""
        return max(3, math.ceil(COLD / (4 * ROWS * HEADS * WIDTH * (self.keys + self.queries))))


PACKED = (
    Case(400, 200, 400),
    Case(576, 160, 620),
    Case(1024, 154, 780),
    Case(1600, 185, 930),
    Case(2304, 262, 1110),
    Case(4096, 444, 1370, ends=True),
)
COMPLETE = tuple(Case(n, n, keys) for n in (1024, 1600, 2304) for keys in (1000, 2500, 4100))


def cases(only: str | None) -> Sequence[Case]:
    return PACKED if only == "packed" else COMPLETE if only == "complete" else PACKED + COMPLETE


def chosen_of(case: Case, device: str) -> Packed | None:
    """As many random cells of every row."""
    if case.complete:
        return None
    mask = torch.zeros(ROWS, case.cells, dtype=torch.bool, device=device)
    for row in mask:
        row[torch.randperm(case.cells, device=device)[: case.queries]] = True
    return Packed.of_mask(mask)


class Layers:
    """Caches of one case, as many as take turns: side by side and in pages, both with the same older keys."""

    def __init__(self, case: Case, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.case, self.chosen = case, chosen_of(case, device)
        self.attn: Any = SimpleNamespace(log_scale=torch.zeros(1, HEADS, 1, 1, device=device), pairs=True)
        self.positions = torch.randn(1, case.cells, WIDTH // 2, 2, device=device)
        self.length = torch.full((ROWS,), case.keys, device=device)
        room, new = case.keys + case.queries, case.cells if case.complete else ROWS * case.cells  # for all of them
        random: Any = {"device": device, "dtype": dtype}
        self.qkv = torch.randn(ROWS if case.complete else 1, new, 3, HEADS, WIDTH, **random)
        self.tail = None
        if case.ends:
            k, v = torch.randn(2, ROWS, HEADS, case.cells, WIDTH, **random)
            self.tail = k, v
        self.slabs = [tuple(torch.randn(2, ROWS, HEADS, room, WIDTH, **random)) for _ in range(case.sets)]
        take = MemoryArena(self.length.device).allocator()
        pages = PagePool(case.sets, ROWS, (HEADS, PAGE_SIZE, WIDTH), room, dtype, self.length.device, take)
        self.pages = pages  # whose memory it is
        pages.grow(pages.free.numel() - len(pages.pages))
        pages.free.copy_(pages.free[torch.randperm(len(pages.free), device=device)])
        older = torch.randn(ROWS, case.keys, 3, HEADS, WIDTH, **random)
        caches = [PagedKVCache(pages, n, torch.zeros_like(self.length)) for n in range(case.sets)]
        for (k, v), cache in zip(self.slabs, caches, strict=True):
            cache.update(self.attn, older, None)
            split_and_store(self.attn, older, None, k, v, 0)
        # Calls are repeated: each layer always finds as many pages taken, and reports none of its own.
        each = ROWS * (-(-room // PAGE_SIZE) - -(-case.keys // PAGE_SIZE))
        taken = pages.taken[-1] + each * torch.arange(case.sets, dtype=torch.int32, device=device)
        nobody = torch.zeros_like(taken[0])
        self.paged = [
            (*c._first_page(), replace(c.pages, before=t, after=nobody)) for c, t in zip(caches, taken, strict=True)
        ]

    def store(self, n: int) -> Tensor:
        k, v = self.slabs[n]
        return split_and_store(self.attn, self.qkv, self.positions, k, v, self.length, self.chosen)

    def store_in_pages(self, n: int) -> Tensor:
        k, v, pages = self.paged[n]
        return split_and_store(self.attn, self.qkv, self.positions, k, v, self.length, self.chosen, pages)

    def attend(self, n: int, q: Tensor, more: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor | None]:
        k, v = self.slabs[n]
        known = q, k, v, 1.0, self.length, more, entropy, self.tail, None, self.chosen
        return fused_attention(*known, grown=self.chosen is not None)

    def attend_in_pages(self, n: int, q: Tensor, more: int | None, entropy: bool) -> tuple[Tensor, Tensor | None]:
        k, v, pages = self.paged[n]
        known = q, k, v, 1.0, self.length, more, entropy, self.tail, None, self.chosen
        return fused_attention(*known, grown=self.chosen is not None, pages=pages)


def off(found: Tensor, exact: Tensor, tokens: int) -> float:
    """Relative error of the output."""
    found, exact = found[:, :, :tokens].float(), exact[:, :, :tokens].float()
    return ((found - exact).norm() / exact.norm()).item()


def measure(case: Case, entropy: bool) -> dict[str, float]:
    layers = Layers(case)
    turns = list(itertools.islice(itertools.cycle(range(case.sets)), math.ceil(CALLS / case.sets) * case.sets))
    calls: dict[str, Callable[[int], object]] = {}
    if not case.ends:  # there, keys do not go to pages
        calls |= {"store": layers.store, "store in pages": layers.store_in_pages}
    queries = [layers.store(n) for n in range(case.sets)]
    for n in range(0 if case.ends else case.sets):
        layers.store_in_pages(n)
    more = case.queries if case.complete else None
    new_lengths = None if more is None else torch.full_like(layers.length, more)
    calls["attention"] = lambda n: layers.attend(n, queries[n], new_lengths, entropy)
    calls["attention in pages"] = lambda n: layers.attend_in_pages(n, queries[n], more, entropy)
    tokens = case.queries * (1 if case.complete else ROWS)
    both = (
        layers.attend(0, queries[0], new_lengths, entropy)[0],
        layers.attend_in_pages(0, queries[0], more, entropy)[0],
    )
    times = {name: microseconds([lambda n=n, call=call: call(n) for n in turns]) for name, call in calls.items()}
    return {**times, "off": off(both[1], both[0], tokens)}


def line(case: Case, found: dict[str, float]) -> str:
    cells = [f"{case.cells:>6} {case.queries:>8} {case.keys:>6}"]
    for name in ("attention", "store"):
        if name in found:
            a, b = found[name], found[f"{name} in pages"]
            cells.append(f"{a:>9.1f} {b:>9.1f} {b / a:>6.3f}")
    return " ".join(cells) + f"   off by {found['off']:.1e}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("packed", "complete"))
    parser.add_argument("--entropy", action="store_true", help="attention also returns the entropy of its weights")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = cases(options.only)
    print(f"{len(asked)} cases of {ROWS} rows, {HEADS} heads of {WIDTH}, pages of {PAGE_SIZE} tokens")
    if not torch.cuda.is_available():
        parser.error("the rest needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'cells':>6} {'queries':>8} {'keys':>6} {'attention':>9} {'in pages':>9} {'ratio':>6} {'store':>9}")
    found = []
    for case in asked:
        found.append(measure(case, options.entropy))
        print(line(case, found[-1]), flush=True)
    for name in ("attention", "store"):
        sums = [sum(f.get(key, 0.0) for f in found) for key in (name, f"{name} in pages")]
        print(f"{name}: {sums[0]:.0f} and {sums[1]:.0f} us together, ratio {sums[1] / max(sums[0], 1e-9):.3f}")
    if options.json is not None:
        known = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "entropy": options.entropy}
        content = {**known, "cases": [{**asdict(c), **f} for c, f in zip(asked, found, strict=True)]}
        with atomic_write(options.json) as file:
            file.write((json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
