"""Hopper (sm_90): FP4 weights decoded into FP8 wgmma fragments, TMA, warp roles."""

from ..replay import replayed
from .dual import QUANTIZE_DUAL
from .grouped import GROUPED_GEMM, GROUPED_WGRAD
from .moe import DOWN, FUSED_MOE, GATE_UP

KERNELS = replayed(GATE_UP, DOWN, FUSED_MOE, QUANTIZE_DUAL, GROUPED_GEMM, GROUPED_WGRAD)

__all__ = ["KERNELS"]
