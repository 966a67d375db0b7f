"""QUANTIZE_DUAL on Triton."""

from __future__ import annotations

from typing import Any

from .dual_host import QuantizeDual
from .dual_triton_kernel import _quantize_dual_kernel


class _QuantizeDual(QuantizeDual):
    """A tile has 64 rows: stores of 64 bytes (two sectors) in rows of the columnwise copy."""

    kernel = _quantize_dual_kernel
    tile = (64, 128)

    def constants(self, block_g: int) -> dict[str, Any]:
        """Tile and launch options. Many groups need more warps: a vector of them is held."""
        block_rows, block_columns = self.tile
        return {
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
            "num_warps": 4 if block_g <= 512 else 8,
        }


QUANTIZE_DUAL = _QuantizeDual()
