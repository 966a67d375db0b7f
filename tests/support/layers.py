"""Calls of a layer and of its parts from a problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import mxpert
from mxpert import MoEWeights, MXTensor, RoutingPlan
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


def plan_of(inputs: MoEInputs, routing_block_m: int) -> RoutingPlan:
    """`mxpert.make_routing_plan` of a problem."""
    return mxpert.make_routing_plan(
        inputs.topk_weights,
        inputs.topk_ids,
        num_experts=inputs.weights.num_experts,
        routing_block_m=routing_block_m,
    )


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    """Rows of an intermediate; its scales are those of the rows."""
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


def _operands(inputs: MoEInputs, weights: MoEWeights | None) -> tuple[Any, ...]:
    weights = inputs.weights if weights is None else weights
    return inputs.x, weights, inputs.topk_weights, inputs.topk_ids
