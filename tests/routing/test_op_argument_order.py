"""Routing weights stand before expert ids in every function, as `route_topk` returns them."""

from __future__ import annotations

import inspect

import pytest
import torch

import mxpert
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from mxpert.testing.validate import validate_routing
from support.routing import validate_routing_plan


def layer() -> MoEInputs:
    return random_moe_problem(MoEShape(64, 64, 4, 2), 5)


def test_fused_moe_takes_what_route_topk_returns():
    inputs = layer()
    routed = mxpert.route_topk(torch.randn(5, 4), top_k=2)
    given = mxpert.fused_moe(inputs.x, inputs.weights, *routed, activation=mxpert.SiLU())
    named = mxpert.fused_moe(
        inputs.x,
        inputs.weights,
        topk_ids=routed[1],
        topk_weights=routed[0],
        activation=mxpert.SiLU(),
    )
    assert torch.equal(given, named)
    plan = mxpert.make_routing_plan(*routed, num_experts=4, routing_block_m=8)
    validate_routing_plan(plan, *routed, num_experts=4)


@pytest.mark.parametrize(
    "function",
    [mxpert.fused_moe, mxpert.make_routing_plan, validate_routing, validate_routing_plan],
    ids=lambda function: function.__name__,
)
def test_weights_stand_directly_before_ids(function):
    names = list(inspect.signature(function).parameters)
    assert names.index("topk_ids") == names.index("topk_weights") + 1


@pytest.mark.parametrize("ids_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_floating_ids_are_reported_as_swapped_and_never_cast(ids_dtype):
    inputs, (weights, ids) = layer(), mxpert.route_topk(torch.randn(5, 4), top_k=2)
    floats = weights.to(ids_dtype)
    calls = (
        lambda: mxpert.fused_moe(inputs.x, inputs.weights, ids, floats, activation=mxpert.SiLU()),
        lambda: mxpert.make_routing_plan(ids, floats, num_experts=4, routing_block_m=8),
        lambda: validate_routing(ids, floats, num_experts=4),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"need int32.*looks swapped") as caught:
            call()
        assert ".to(" not in str(caught.value)
