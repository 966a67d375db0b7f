"""Inline assembly of the exchange on AMD: completion of stores, and the clock."""

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
        "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def write_back():
    """Wait until all memory accesses of this wave are complete for every device.

    A barrier does not wait for stores of the other waves, and LLVM leaves out the wait behind the
    write-back of a release.
    """
    tl.inline_asm_elementwise(
        "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
        "=v,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
