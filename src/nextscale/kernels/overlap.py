"""A kernel that is started while the one before it ends, and waits inside for its results (Hopper and newer).

Blocks of small kernels take as long to be started as to work. What is said before `wait_for_inputs` may read weights,
which no kernel writes, and nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


def early() -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_inputs`."""
    return {"EARLY": True, "launch_pdl": True} if _able() else {"EARLY": False}


@functools.cache
def _able() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Whoever is started after this kernel may start as well."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(place):
    """Bring lines of memory into the cache that all blocks share."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )
