"""A layer's call from its problem."""

from __future__ import annotations

from typing import Any

import torch

import mxpert
from mxpert import MoEWeights
from mxpert.core.registry import Explanation
from mxpert.testing.problems import MoEInputs


def run_layer(
    inputs: MoEInputs, *, weights: MoEWeights | None = None, **options: Any
) -> torch.Tensor:
    """`mxpert.fused_moe` of a problem; `weights` and an activation may stand in for its own."""
    options = {"activation": inputs.activation} | options
    return mxpert.fused_moe(*_operands(inputs, weights), **options)


def explain_layer(
    inputs: MoEInputs, *, weights: MoEWeights | None = None, **options: Any
) -> Explanation:
    """`mxpert.explain` of that call."""
    options = {"activation": inputs.activation} | options
    return mxpert.explain(mxpert.fused_moe, *_operands(inputs, weights), **options)


def _operands(inputs: MoEInputs, weights: MoEWeights | None) -> tuple[Any, ...]:
    weights = inputs.weights if weights is None else weights
    return inputs.x, weights, inputs.topk_weights, inputs.topk_ids
