"""Two wave groups that alternate: while one reads LDS and starts copies, the other runs MFMA.

A workgroup has eight waves, two on each SIMD. Waves 0 to 3 are the early group, waves 4 to 7 the
late one, so each SIMD has a wave of both. The program is a sequence of memory phases and compute
phases with a barrier after each. The late group runs one phase behind: it waits at one more
barrier before the first phase, and the early group at one more after the last.

    early:  memory 0 | compute 0 | memory 1  | compute 1 | …         | (waits)
    late:   (waits)  | memory 0  | compute 0 | memory 1  | compute 1 | …

A memory phase ends with `async_copy.wait_group`, after which Triton places ``s_waitcnt
lgkmcnt(0)`` and ``s_barrier``; `begin_compute` follows it. `end_compute` ends a compute phase.
Inline assembly holds the instructions that Gluon lacks. LLVM keeps such statements in order but
moves MFMA across them, so `hold` and `finish` tie operands and sums to their phase. Each statement
has a token, a tensor with one number a thread, which also tells the groups apart.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_WARPS = gl.constexpr(8)
"""Waves of a workgroup: two groups of four."""

_SKIP_UNLESS = (
    "v_readfirstlane_b32 vcc_lo, $1\n"
    "s_cmp_{}_u32 vcc_lo, 0x100\n"  # thread 256 is the first of the late group
    "s_cbranch_scc0 .Lphase_${{:uid}}\n"
    "s_barrier\n"
    ".Lphase_${{:uid}}:"
)
_LATE_WAITS = gl.constexpr(_SKIP_UNLESS.format("ge"))
_EARLY_WAITS = gl.constexpr(_SKIP_UNLESS.format("lt"))


@gluon.jit
def _statement(token, ASSEMBLY: gl.constexpr, CONSTRAINTS: gl.constexpr):
    return gl.inline_asm_elementwise(
        ASSEMBLY, CONSTRAINTS, [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def make_token():
    """The number of each thread: the token before the first statement."""
    return gl.arange(0, 64 * NUM_WARPS, gl.BlockedLayout([1], [64], [NUM_WARPS], [0]))


@gluon.jit
def enter_phases(token):
    """Put the late group one phase behind; comes after a barrier of all waves."""
    return _statement(token, _LATE_WAITS, "=v,0,~{vcc},~{scc}")


@gluon.jit
def leave_phases(token):
    """Let the early group wait until the late one has finished its last phase."""
    return _statement(token, _EARLY_WAITS, "=v,0,~{vcc},~{scc}")


@gluon.jit
def begin_compute(token):
    """Lower the wave's priority, so that the other group's memory instructions come first."""
    return _statement(token, "s_setprio 0", "=v,0")


@gluon.jit
def end_compute(token):
    """Wait for the other group, then raise the priority for the memory phase."""
    return _statement(token, "s_barrier\ns_setprio 1", "=v,0")


@gluon.jit
def hold(value):
    """Return int32 `value` unchanged; what uses it stays behind earlier statements."""
    return _statement(value, "", "=v,0")


@gluon.constexpr_function
def _reads(number):
    """Constraints of a statement with `number` inputs and half as many 32-bit outputs."""
    return ",".join(["=v"] * (number // 2) + ["v"] * number)


@gluon.jit
def finish(sums):
    """Keep the MFMA that produce `sums`, float32 [rows, columns], before later statements.

    The statement reads one number of each MFMA: a lane's tile has four columns.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    NUMBER: gl.constexpr = ROWS * COLUMNS // (4 * 64 * NUM_WARPS)
    even, _ = gl.split(gl.reshape(sums, [ROWS, COLUMNS // 2, 2]))
    first, _ = gl.split(gl.reshape(even, [ROWS, COLUMNS // 4, 2]))
    gl.inline_asm_elementwise(
        "", _reads(NUMBER), [first], dtype=gl.float16, is_pure=False, pack=NUMBER
    )
