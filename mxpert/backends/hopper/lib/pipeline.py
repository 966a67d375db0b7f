"""Position in a ring of pipeline stages, which a producer fills and consumers empty."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """Return the stage after `slot`, and the phase of its mbarriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase
