"""Inputs of the grouped GEMMs.

`group_offsets` holds int32 or int64 [G + 1]; `mxpert.routing.plan.group_bounds` makes it safe.
"""

from __future__ import annotations

import torch

from ..core.kernel import op_inputs
from ..formats.tensor import Operand


@op_inputs
class GroupedGemmInputs:
    """Inputs of GROUPED_GEMM: a [M, K] and b [G, n, K] or [G, K, n], of any strides."""

    a: Operand
    b: Operand
    group_offsets: torch.Tensor


@op_inputs
class GroupedWgradInputs:
    """Inputs of GROUPED_WGRAD: grad [M, n] and a [M, K], or their columnwise copies.

    Args:
        accumulate_into: float32 [G, n, k], which the result is added to; None allocates.
    """

    grad: Operand
    a: Operand
    group_offsets: torch.Tensor
    accumulate_into: torch.Tensor | None = None
