"""gfx950 kernels (CDNA4): weights in matrix fragment order, scaled MFMA, written in Gluon."""

from ...runtime.replay import replayed
from .grouped.host import GROUPED_GEMM, GROUPED_WGRAD
from .moe.host import DOWN, FUSED_MOE, GATE_UP
from .quantize_dual.host import QUANTIZE_DUAL

KERNELS = replayed(GATE_UP, DOWN, FUSED_MOE, GROUPED_GEMM, GROUPED_WGRAD, QUANTIZE_DUAL)

__all__ = ["KERNELS"]
