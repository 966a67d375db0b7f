"""Hopper (sm_90): FP4 weights decoded into FP8 wgmma fragments, TMA, warp roles."""

from .moe import DOWN, FUSED_MOE, GATE_UP

KERNELS = (GATE_UP, DOWN, FUSED_MOE)

__all__ = ["KERNELS"]
