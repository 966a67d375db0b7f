"""gfx950 kernels (CDNA4): weights in matrix fragment order, scaled MFMA, written in Gluon."""

from ...runtime.replay import replayed
from .moe.host import DOWN, FUSED_MOE, GATE_UP

KERNELS = replayed(GATE_UP, DOWN, FUSED_MOE)

__all__ = ["KERNELS"]
