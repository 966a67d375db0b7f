"""Hopper kernels (sm_90): TMA, warp specialisation, FP4 weights decoded to FP8 wgmma fragments."""

from ...runtime.replay import replayed
from .grouped.host import GROUPED_GEMM, GROUPED_WGRAD
from .moe.host import DOWN, FUSED_MOE, GATE_UP
from .quantize_dual.host import QUANTIZE_DUAL

KERNELS = replayed(GATE_UP, DOWN, FUSED_MOE, QUANTIZE_DUAL, GROUPED_GEMM, GROUPED_WGRAD)

__all__ = ["KERNELS"]
