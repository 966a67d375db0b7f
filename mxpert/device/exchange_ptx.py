"""Inline PTX of the exchange: loads with acquire semantics, and the clock."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_acquire(pointers):
    """Load int64 words: acquire, system scope."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l",
        [pointers],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def global_timer():
    """Nanoseconds since an arbitrary start, int64."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
