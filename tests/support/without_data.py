"""Operands on the meta device, from which the ahead-of-time tests record launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mxpert.core.problem import MoEOptions, MoEProblem, Op, Target
from mxpert.formats import MXFP4, MXFP8_E4M3, MXFormat, MXTensor
from mxpert.formats.tensor import Layout
from mxpert.formats.weight_tensor import WEIGHT_FORMATS, WeightLike, WeightTensor
from mxpert.moe.weights import GateUpOrder, MoEWeights
from mxpert.routing.plan import RoutingPlan, plan_capacity
from mxpert.testing.problems import MoEShape


def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def rows_of(num_rows: int, depth: int, format: MXFormat | None) -> torch.Tensor | MXTensor:
    """Rows of activations; bfloat16 without a format."""
    if format is None:
        return empty(num_rows, depth, dtype=torch.bfloat16)
    codes = empty(num_rows, depth // format.codes_per_byte)
    return MXTensor(codes, empty(num_rows, depth // 32), format)


def plain(experts: int, num_rows: int, depth: int) -> MXTensor:
    """A projection in row-major order."""
    codes = empty(experts, num_rows, depth // 2)
    return MXTensor(codes, empty(experts, num_rows, depth // 32), MXFP4)


def plain_in(format: str) -> Callable[[int, int, int], WeightLike]:
    """A maker of row-major projections; INT4 has zero points, NVFP4 factors of rows."""
    if format == MXFP4.name:
        return plain

    def projection(experts: int, num_rows: int, depth: int) -> WeightLike:
        if format == MXFP8_E4M3.name:
            codes = empty(experts, num_rows, depth)
            return MXTensor(codes, empty(experts, num_rows, depth // 32), MXFP8_E4M3)
        found, codes = WEIGHT_FORMATS[format], empty(experts, num_rows, depth // 2)
        blocks = experts, num_rows, depth // found.group_size
        if not found.is_integer:
            factors = empty(experts, num_rows, dtype=torch.float32)
            return WeightTensor(codes, empty(*blocks), found, row_scale=factors)
        return WeightTensor(codes, empty(*blocks, dtype=torch.bfloat16), found, empty(*blocks))

    return projection


def packed(experts: int, num_rows: int, depth: int) -> MXTensor:
    """A projection in the layout HOPPER_FRAGMENT."""
    units, steps = -(-num_rows // 64), -(-depth // 128)
    return MXTensor(
        empty(experts, units, steps, 4096),
        empty(experts, units, steps, 256),
        MXFP4,
        -1,
        Layout.HOPPER_FRAGMENT,
        empty(experts, units * 64),
        (experts, num_rows, depth),
    )


def packed_fp8(experts: int, num_rows: int, depth: int) -> MXTensor:
    """A projection in the layout HOPPER_FRAGMENT_FP8."""
    held = packed(experts, num_rows, depth)
    copy = empty(*held.qdata.shape[:3], 8192)
    return replace(held, layout=Layout.HOPPER_FRAGMENT_FP8, fp8_codes=copy)


def weights_of(
    problem: MoEProblem,
    projection: Callable[[int, int, int], WeightLike],
    has_bias: bool,
    order: GateUpOrder = GateUpOrder.INTERLEAVED,
) -> MoEWeights:
    """Weights whose projections are `plain` or `packed`, with a gate if the activation has one."""
    experts, hidden, inner = problem.num_experts, problem.hidden_size, problem.intermediate_size
    has_gate = problem.options.activation.is_gated
    rows = 2 * inner if has_gate else inner
    return MoEWeights(
        projection(experts, rows, hidden),
        projection(experts, hidden, inner),
        empty(experts, rows, dtype=torch.float32) if has_bias else None,
        empty(experts, hidden, dtype=torch.float32) if has_bias else None,
        order if has_gate else None,
    )


def plan_of(problem: MoEProblem, unit: int) -> RoutingPlan:
    experts, tokens = problem.num_experts, problem.num_tokens
    capacity = plan_capacity(tokens, problem.top_k, experts, unit)
    return RoutingPlan(
        empty(capacity, dtype=torch.int32),
        empty(capacity, dtype=torch.float32),
        empty(capacity // unit, dtype=torch.int32),
        empty(2, dtype=torch.int32),
        empty(tokens, problem.top_k, dtype=torch.int32),
        tokens,
        problem.top_k,
        experts,
        unit,
    )


def layer_of(
    shape: MoEShape, num_tokens: int, target: Target, layout: Layout, a_format: Any, **options: Any
) -> MoEProblem:
    """The problem of a layer."""
    return MoEProblem(
        Op.FUSED_MOE,
        target,
        num_tokens,
        shape.top_k,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        MoEOptions(shape.activation, a_format, **options),
        layout,
    )
