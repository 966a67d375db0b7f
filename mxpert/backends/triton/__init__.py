"""Portable Triton kernels for Hopper, Blackwell and gfx950; tests also run them interpreted."""

from __future__ import annotations

from ...runtime.replay import replayed
from ..common.quantize import DEQUANTIZE, QUANTIZE
from ..common.routing.host import PLAN, TOPK
from .grouped.host import GROUPED_GEMM, GROUPED_WGRAD
from .moe.host import DOWN, FUSED_MOE, GATE_UP
from .quantize_dual.host import QUANTIZE_DUAL
from .training_rows.host import (
    ACTIVATE_ROWS,
    ACTIVATE_ROWS_BACKWARD,
    COMBINE_ROWS,
    COMBINE_ROWS_BACKWARD,
)

KERNELS = replayed(
    QUANTIZE,
    DEQUANTIZE,
    TOPK,
    PLAN,
    GATE_UP,
    DOWN,
    FUSED_MOE,
    QUANTIZE_DUAL,
    GROUPED_GEMM,
    GROUPED_WGRAD,
    ACTIVATE_ROWS,
    ACTIVATE_ROWS_BACKWARD,
    COMBINE_ROWS,
    COMBINE_ROWS_BACKWARD,
)

__all__ = ["KERNELS"]
