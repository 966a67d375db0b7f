"""Limits on the compiler's instruction scheduler."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _one_value_a_thread(WARPS):
    """Layout of one value in each thread."""
    return gl.BlockedLayout([1], [64], [WARPS], [0])


@gluon.jit
def scheduling_fence():
    """Keep every instruction on its side of this point; emits no instruction.

    LLVM schedules between boundaries, and an instruction that writes EXEC is one. The empty
    assembly says that it does. Triton 3.9 has `amd.hint.sched_barrier`, Triton 3.6 has nothing
    else.
    """
    LAYOUT: gl.constexpr = _one_value_a_thread(gl.num_warps())
    nothing = gl.full([64 * gl.num_warps()], 0, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        "", "=v,n,~{exec}", [nothing], dtype=gl.int32, is_pure=False, pack=1
    )
