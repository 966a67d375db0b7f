"""QUANTIZE_DUAL on gfx950."""

from __future__ import annotations

from typing import Any

from ....problem import DualProblem
from ...common.quantize_dual import QuantizeDual
from .kernel import COLUMNS, NUM_WARPS, ROWS, _quantize_dual_cdna4_kernel


class _QuantizeDual(QuantizeDual):
    """One tile for every shape. MFMA of gfx950 read one scale for each block of 32."""

    backend = "cdna4"
    kernel = _quantize_dual_cdna4_kernel
    tile = (ROWS.value, COLUMNS.value)

    def constants(self, block_g: int) -> dict[str, Any]:
        """Launch options."""
        return {"num_warps": NUM_WARPS.value}

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "gfx950":
            return f"needs gfx950, not {problem.target.arch}"
        return super().unsupported(problem)


QUANTIZE_DUAL = _QuantizeDual()
