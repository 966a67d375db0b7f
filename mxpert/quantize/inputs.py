"""Inputs of quantize, dequantize and quantize_dual."""

from __future__ import annotations

import torch

from ..core.kernel import op_inputs
from ..formats.tensor import MXTensor


@op_inputs
class QuantizeInputs:
    """Inputs of QUANTIZE: x of any shape and strides; seed int64 [1] of stochastic rounding."""

    x: torch.Tensor
    seed: torch.Tensor | None = None


@op_inputs
class DequantizeInputs:
    """Inputs of DEQUANTIZE."""

    tensor: MXTensor


@op_inputs
class DualInputs:
    """Inputs of QUANTIZE_DUAL.

    Args:
        x: [M, K] or weights [G, N, K], of any strides.
        group_offsets: int32 or int64 [G + 1] of the groups of rows, or None.
        seed: int64 [1] of stochastic rounding, or None.
    """

    x: torch.Tensor
    group_offsets: torch.Tensor | None = None
    seed: torch.Tensor | None = None
