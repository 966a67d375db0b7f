"""Inputs of the passes between the grouped GEMMs of training."""

from __future__ import annotations

import torch

from ...core.kernel import op_inputs


@op_inputs
class ActivateInputs:
    """Inputs of ACTIVATE_ROWS: gate_up [R, 2F]."""

    gate_up: torch.Tensor


@op_inputs
class ActivateBackwardInputs:
    """Inputs of ACTIVATE_ROWS_BACKWARD: grad [R, F], gate_up [R, 2F]."""

    grad: torch.Tensor
    gate_up: torch.Tensor


@op_inputs
class CombineInputs:
    """Inputs of COMBINE_ROWS: rows [R, H], row_ids and weights (or None) [T, top_k]."""

    rows: torch.Tensor
    row_ids: torch.Tensor
    weights: torch.Tensor | None
    out_dtype: torch.dtype


@op_inputs
class CombineBackwardInputs:
    """Inputs of COMBINE_ROWS_BACKWARD: grad [T, H], and those of the forward pass."""

    grad: torch.Tensor
    rows: torch.Tensor
    row_ids: torch.Tensor
    weights: torch.Tensor
