"""Launches of the portable MoE stages on meta tensors, for the ahead-of-time tests."""

from __future__ import annotations

from typing import Any

import torch

from mxpert.core.problem import GemmConfig, MoEConfig, MoEOptions, MoEProblem, Op, OwnFormat
from mxpert.formats import MXFP4, MXTensor
from mxpert.formats.tensor import Layout
from mxpert.moe.inputs import DownInputs, GateUpInputs
from mxpert.moe.triton import host as moe
from mxpert.moe.weights import MoEWeights
from mxpert.routing.plan import RoutingPlan, plan_capacity
from mxpert.testing.problems import MoEShape
from support.devices import DEVICES


def launch_stages(problem: MoEProblem, config: MoEConfig, shape: MoEShape) -> None:
    """Run both stages on meta tensors with a problem's sizes."""
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def bias(width: int) -> torch.Tensor | None:
        return empty(experts, width, dtype=torch.float32) if shape.has_bias else None

    weights = MoEWeights(
        MXTensor(
            empty(experts, 2 * inner, hidden // 2), empty(experts, 2 * inner, hidden // 32), MXFP4
        ),
        MXTensor(empty(experts, hidden, inner // 2), empty(experts, hidden, inner // 32), MXFP4),
        bias(2 * inner),
        bias(hidden),
        shape.gate_up_order,
    )
    unit, tokens = config.routing_block_m, problem.num_tokens
    capacity = plan_capacity(tokens, shape.top_k, experts, unit)
    plan = RoutingPlan(
        empty(capacity, dtype=torch.int32),
        empty(capacity, dtype=torch.float32),
        empty(capacity // unit, dtype=torch.int32),
        empty(2, dtype=torch.int32),
        empty(tokens, shape.top_k, dtype=torch.int32),
        tokens,
        shape.top_k,
        experts,
        unit,
    )
    fmt = problem.options.mx_format
    x: torch.Tensor | MXTensor = empty(tokens, hidden, dtype=torch.bfloat16)
    if fmt is not None:
        x = MXTensor(empty(tokens, hidden // fmt.codes_per_byte), empty(tokens, hidden // 32), fmt)
    first, second = config.gate_up, config.down
    assert isinstance(first, GemmConfig)  # for the type checker: of the portable backend
    assert isinstance(second, GemmConfig)  # for the type checker: of the portable backend
    num_rows = plan.max_blocks * unit
    h = moe.GATE_UP.run(problem, first, GateUpInputs(x, weights, plan), num_rows)
    moe.DOWN.launch(problem, second, DownInputs(h, weights, plan))


def describe(
    target: str, a_format: OwnFormat, num_tokens: int, shape: MoEShape, **options: Any
) -> MoEProblem:
    return MoEProblem(
        Op.FUSED_MOE,
        DEVICES[target],
        num_tokens,
        shape.top_k,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        MoEOptions(shape.activation, a_format, **options),
        Layout.ROW_MAJOR,
    )
