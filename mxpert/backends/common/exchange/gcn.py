"""Inline assembly of the exchange on AMD: the clock."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def real_time():
    """Ticks of 10 ns since an arbitrary start, int64.

    Triton's own function waits for the wrong counter: the result of a scalar instruction is there
    when lgkmcnt is 0.
    """
    return tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
        "=s",
        [],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
