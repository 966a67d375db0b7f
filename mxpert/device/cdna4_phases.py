"""Two wave groups that alternate: while one reads LDS and starts copies, the other runs MFMA.

A workgroup has eight waves, two on each SIMD. Waves 0 to 3 are the early group, waves 4 to 7 the
late one, so each SIMD has a wave of both. The program is a sequence of memory phases and compute
phases with a barrier after each. The late group runs one phase behind: it waits at one more
barrier before the first phase, and the early group at one more after the last.

    early:  memory 0 | compute 0 | memory 1  | compute 1 | …         | (waits)
    late:   (waits)  | memory 0  | compute 0 | memory 1  | compute 1 | …

The memory phase has the higher priority: its few instructions go ahead of the other group's MFMA,
which keep the matrix cores busy anyway.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from .cdna4_gcn import delay_half_of_waves, scheduling_fence, set_priority

NUM_WARPS = gl.constexpr(8)
"""Waves of a workgroup: two groups of four."""


@gluon.jit
def enter_phases():
    """Put the late group one phase behind; comes after a barrier of all waves."""
    delay_half_of_waves(True)


@gluon.jit
def leave_phases():
    """Let the early group wait until the late one has finished its last phase."""
    delay_half_of_waves(False)


@gluon.jit
def end_memory(COPIES: gl.constexpr):
    """End a memory phase: wait for this wave's LDS reads and for all but COPIES groups of copies.

    Triton places ``s_waitcnt lgkmcnt(0)`` and ``s_barrier`` after the wait.
    """
    async_copy.wait_group(COPIES)
    set_priority(0)


@gluon.jit
def end_compute(COPIES: gl.constexpr):
    """End a compute phase. COPIES: as in the memory phase before, so that nothing is waited for."""
    scheduling_fence()
    async_copy.wait_group(COPIES)
    set_priority(1)
