"""Reference backend: plain torch on any device, the oracle for every other backend."""

from __future__ import annotations

from ...kernel_spec import AnyKernel
from .grouped import GROUPED_GEMM, GROUPED_WGRAD, QUANTIZE_DUAL
from .moe import DOWN, FUSED_MOE, GATE_UP
from .quantize import DEQUANTIZE, QUANTIZE
from .routing import PLAN, TOPK
from .training_rows import (
    ACTIVATE_ROWS,
    ACTIVATE_ROWS_BACKWARD,
    COMBINE_ROWS,
    COMBINE_ROWS_BACKWARD,
)

KERNELS: tuple[AnyKernel, ...] = (
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
