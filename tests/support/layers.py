"""A layer's call from its problem."""

from __future__ import annotations

from typing import Any

import torch

import mxpert
from mxpert.explain import Explanation
from mxpert.testing.problems import MoEInputs


def run_layer(inputs: MoEInputs, **options: Any) -> torch.Tensor:
    """`mxpert.fused_moe` of a problem, with its activation unless `options` name one."""
    return mxpert.fused_moe(*_operands(inputs), **{"activation": inputs.activation} | options)


def explain_layer(inputs: MoEInputs, **options: Any) -> Explanation:
    """`mxpert.explain` of that call."""
    options = {"activation": inputs.activation} | options
    return mxpert.explain(mxpert.fused_moe, *_operands(inputs), **options)


def _operands(inputs: MoEInputs) -> tuple[Any, ...]:
    return inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids
