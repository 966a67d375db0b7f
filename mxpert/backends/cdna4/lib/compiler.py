"""What kernels tell the compiler and the hardware's scheduler."""

from __future__ import annotations

from typing import Any

from triton.backends.amd.compiler import HIPOptions
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WITHOUT_ACCUMULATOR_REGISTERS: dict[str, Any] = (
    {"llvm_fn_attrs": (("amdgpu-agpr-alloc", "0,0"),)}
    if "llvm_fn_attrs" in HIPOptions.__dataclass_fields__
    else {}
)
"""Launch options that keep the sums of MFMA in vector registers. Triton 3.9 would use accumulator
registers and copy operands and sums; Triton 3.6 does not, and has no such option."""


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
        "", "={exec},n", [nothing], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def delay_half_of_waves(SECOND: gl.constexpr):
    """One barrier for half of a workgroup's waves: the second half if SECOND, else the first.

    Called with SECOND it makes the second half lag one barrier behind the first, which therefore
    executes other code at the same time. The call without SECOND ends that. Each barrier between
    them is one that both halves reach at different places.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _one_value_a_thread(WARPS)
    thread = gl.arange(0, 64 * WARPS, LAYOUT)
    first_of_second = gl.full([64 * WARPS], 32 * WARPS, gl.int32, LAYOUT)
    COMPARE: gl.constexpr = "s_cmp_lt_u32" if SECOND else "s_cmp_ge_u32"
    gl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1\n"
        + COMPARE
        + " $0, $2\ns_cbranch_scc1 .Lnot_delayed${:uid}\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\n.Lnot_delayed${:uid}:",
        "=&s,v,n,~{scc}",
        [thread, first_of_second],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def set_priority(PRIORITY: gl.constexpr):
    """Priority of this wave among those of its SIMD, 0 to 3; also a scheduling fence."""
    LAYOUT: gl.constexpr = _one_value_a_thread(gl.num_warps())
    value = gl.full([64 * gl.num_warps()], PRIORITY, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        "s_setprio $1", "={exec},n", [value], dtype=gl.int64, is_pure=False, pack=1
    )
