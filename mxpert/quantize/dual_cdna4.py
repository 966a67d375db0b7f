"""QUANTIZE_DUAL on gfx950."""

from __future__ import annotations

from typing import Any

import torch

from ..core.problem import DualProblem
from ..device.cdna4_operands import empty_operand
from ..formats.spec import MXFormat
from ..formats.tensor import MXTensor
from .dual_cdna4_kernel import COLUMNS, NUM_WARPS, ROWS, _quantize_dual_cdna4_kernel
from .dual_host import QuantizeDual


class _QuantizeDual(QuantizeDual):
    """One tile for every shape. MFMA of gfx950 read one scale for each block of 32."""

    backend = "cdna4"
    kernel = _quantize_dual_cdna4_kernel
    tile = (ROWS.value, COLUMNS.value)

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], format: MXFormat) -> MXTensor:
        """An uninitialised MXTensor as the grouped GEMM reads it in place."""
        return empty_operand(like, shape, format)

    def pitches(self, row: MXTensor, column: MXTensor) -> dict[str, int]:
        """Distances of rows of codes and of planes of scales, in bytes."""
        return {
            "row_pitch": row.qdata.stride(-2),
            "row_scale_pitch": row.scale.stride(-1),
            "column_pitch": column.qdata.stride(-2),
            "column_scale_pitch": column.scale.stride(-1),
        }

    def constants(self, block_g: int) -> dict[str, Any]:
        """Launch options."""
        return {"num_warps": NUM_WARPS.value}

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "gfx950":
            return f"needs gfx950, not {problem.target.arch}"
        return super().unsupported(problem)


QUANTIZE_DUAL = _QuantizeDual()
