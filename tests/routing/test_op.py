"""The routing ops as torch.library ops: fake implementations, torch.compile, explain."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import Scoring
from mxpert.core.describe import describe
from mxpert.core.problem import Op
from mxpert.core.registry import resolve

LOGITS = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
FIELDS = ("sorted_token_ids", "sorted_weights", "block_expert_ids", "num_valid", "slot_rows")


@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("bias", [None, torch.zeros(16)], ids=["no-bias", "bias"])
def test_route_topk_opcheck(tokens, bias):
    torch.library.opcheck(
        torch.ops.mxpert.route_topk,
        (Scoring.SIGMOID.value, 4, True, 4, 2, 2.5, "max", False, LOGITS[:tokens], bias),
    )


@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("local", [False, True], ids=["all-experts", "expert-map"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)], ids=str
)
def test_make_routing_plan_opcheck(tokens, local, dtypes):
    weights, ids = mxpert.route_topk(LOGITS[:tokens], 4)
    weights, ids = weights.to(dtypes[0]), ids.to(dtypes[1])
    expert_map = torch.arange(-4, 12, dtype=torch.int32) if local else None
    num_local = torch.tensor([7], dtype=torch.int32) if local else None
    torch.library.opcheck(
        torch.ops.mxpert.make_routing_plan,
        (16, 12 if local else 16, 8, weights, ids, expert_map, num_local),
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_both_ops_compile_into_one_graph(dynamic):
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, ids = mxpert.route_topk(logits, 4, scoring=Scoring.SIGMOID)
        plan = mxpert.make_routing_plan(weights, ids, num_experts=16, routing_block_m=8)
        return tuple(getattr(plan, field) for field in FIELDS)

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for logits in (LOGITS, LOGITS[:5]):
        for have, want in zip(compiled(logits), route(logits), strict=True):
            assert torch.equal(have, want)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16], ids=str)
def test_fake_tensors_carry_the_plan_shapes(weights_dtype, ids_dtype):
    def plan_of_zeros():
        weights, ids = (torch.zeros(12, 4, dtype=dtype) for dtype in (weights_dtype, ids_dtype))
        return mxpert.make_routing_plan(weights, ids, num_experts=16, routing_block_m=8)

    with torch._subclasses.FakeTensorMode():
        plan = plan_of_zeros()
    real = plan_of_zeros()
    for field in FIELDS:
        fake, tensor = getattr(plan, field), getattr(real, field)
        assert (fake.shape, fake.dtype) == (tensor.shape, tensor.dtype)


def test_problems_describe_the_arguments():
    topk = describe(mxpert.route_topk, LOGITS, 4, num_groups=4, top_groups=2, group_score="top2")
    assert (topk.op, topk.num_tokens, topk.top_k, topk.num_experts) == (Op.ROUTE_TOPK, 12, 4, 16)
    assert topk.options.num_groups == 4
    weights, ids = mxpert.route_topk(LOGITS, 4)
    plan = describe(
        mxpert.make_routing_plan,
        weights,
        ids,
        num_experts=16,
        routing_block_m=8,
        num_local_experts=4,
    )
    assert (plan.op, plan.num_experts, plan.num_local_experts) == (Op.ROUTING_PLAN, 16, 4)
    assert {hash(topk), hash(plan)}  # hashable: they key caches
    assert resolve(topk)[0].backend == resolve(plan)[0].backend == "reference"


def test_explain_names_the_backend():
    weights, ids = mxpert.route_topk(LOGITS, 4)
    assert "reference" in str(mxpert.explain(mxpert.route_topk, LOGITS, 4))
    assert "reference" in str(
        mxpert.explain(mxpert.make_routing_plan, weights, ids, num_experts=16, routing_block_m=8)
    )
