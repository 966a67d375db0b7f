"""Position in a ring of pipeline stages, which a producer fills and consumers empty."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import aggregate


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """Return the stage after `slot`, and the phase of its mbarriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@aggregate
class PipelineState:
    """Position of a producer or of a consumer in a ring of STAGES pipeline stages.

    stage: int32, index of the stage. phase: int32, parity to wait for at the stage's mbarriers.
    """

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self):
        """Return the position of the next stage."""
        stage, phase = next_slot(self.stage, self.phase, self.STAGES)
        return PipelineState(stage, phase, self.STAGES)


@gluon.jit
def producer_start(STAGES: gl.constexpr):
    """A producer's first position: waits of phase 1 pass at once, since all stages are free."""
    return PipelineState(0, 1, STAGES)


@gluon.jit
def consumer_start(STAGES: gl.constexpr):
    """A consumer's first position: waits of phase 0 pass after the producer's first loads."""
    return PipelineState(0, 0, STAGES)
