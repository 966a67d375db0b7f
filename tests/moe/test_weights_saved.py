"""Files of torch.save by versions whose modules had other names."""

from __future__ import annotations

import io
from pathlib import Path

import torch

import mxpert
from mxpert import GateUpOrder, MoEWeights
from mxpert.formats import TokenRows
from mxpert.formats.tensor import Layout


def test_a_file_of_an_earlier_version_loads() -> None:
    """It names mxpert.weights and mxpert.routing; version 0.1 also mxpert.weights.GateUpOrder."""
    path = Path(__file__).parent / "saved/before_the_tree.pt"
    loaded = torch.load(path, weights_only=True)
    weights, plan = loaded["published"], loaded["plan"]
    assert type(weights) is MoEWeights
    assert weights.gate_up_order is GateUpOrder.CONCATENATED
    assert weights.layout is Layout.ROW_MAJOR
    assert loaded["order"] is GateUpOrder.INTERLEAVED
    assert torch.equal(weights.gate_up_proj.dequantize(), torch.ones(1, 128, 32))
    ones, expert = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    expected = mxpert.make_routing_plan(ones, expert, num_experts=1, routing_block_m=8)
    assert type(plan) is mxpert.RoutingPlan
    assert torch.equal(plan.sorted_token_ids, expected.sorted_token_ids)
    assert type(loaded["tokens"]) is TokenRows
    older = path.read_bytes().replace(b"cmxpert.formats.gate_up\n", b"cmxpert.weights\n")
    again = torch.load(io.BytesIO(older), weights_only=True)
    assert again["order"] is GateUpOrder.INTERLEAVED
