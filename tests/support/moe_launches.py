"""Launches of the portable MoE stages on meta tensors, for the ahead-of-time tests."""

from __future__ import annotations

from typing import Any

from mxpert.core.problem import GemmConfig, MoEConfig, MoEProblem, OwnFormat
from mxpert.formats.tensor import Layout
from mxpert.moe.inputs import DownInputs, GateUpInputs
from mxpert.moe.triton import host as moe
from mxpert.testing.problems import MoEShape
from support.devices import DEVICES
from support.without_data import layer_of, plain_in, plan_of, rows_of, weights_of


def launch_stages(problem: MoEProblem, config: MoEConfig, shape: MoEShape) -> None:
    """Run both stages on meta tensors with a problem's sizes."""
    projection = plain_in(problem.weight_format)
    weights = weights_of(problem, projection, shape.has_bias, shape.gate_up_order)
    plan = plan_of(problem, config.routing_block_m)
    x = rows_of(problem.num_tokens, problem.hidden_size, problem.options.mx_format)
    first, second = config.gate_up, config.down
    assert isinstance(first, GemmConfig)  # for the type checker: of the portable backend
    assert isinstance(second, GemmConfig)  # for the type checker: of the portable backend
    num_rows = plan.max_blocks * plan.routing_block_m
    h = moe.GATE_UP.run(problem, first, GateUpInputs(x, weights, plan), num_rows)
    moe.DOWN.launch(problem, second, DownInputs(h, weights, plan))


def describe(
    target: str, a_format: OwnFormat, num_tokens: int, shape: MoEShape, **options: Any
) -> MoEProblem:
    return layer_of(shape, num_tokens, DEVICES[target], Layout.ROW_MAJOR, a_format, **options)
