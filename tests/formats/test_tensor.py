"""Tensors and weights move, copy and count as torch.Tensor does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import mxpert
from mxpert.formats.tensor import Aggregate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEShape, random_moe_problem

WEIGHTS = random_moe_problem(MoEShape(64, 32, 4, 2, has_bias=True), 5).weights
PLAN = mxpert.make_routing_plan(
    torch.ones(3, 2), torch.tensor([[0, 1], [2, 3], [1, 0]]), num_experts=4, routing_block_m=16
)
OBJECTS: dict[str, Any] = {
    "MXTensor": WEIGHTS.down_proj,
    "AUTO": mxpert.quantize_dual(torch.randn(32, 64), scale_span="auto")[0],
    "weights": WEIGHTS,
    "prepared": WEIGHTS.prepare(device="cpu", layout="hopper_fragment"),
    "plan": PLAN,
}


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors_in(each)]
    if not isinstance(value, Aggregate):
        return []
    return [each for f in fields(value) for each in tensors_in(getattr(value, f.name))]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OBJECTS)
def test_copies_share_no_memory_and_views_share_all(name: str) -> None:
    value = OBJECTS[name]
    mine = tensors_in(value)
    assert len(mine) >= 2
    for method, is_shared in (("clone", False), ("detach", True), ("cpu", True)):
        made = getattr(value, method)()
        assert type(made) is type(value)
        for one, other in zip(mine, tensors_in(made), strict=True):
            assert torch.equal(one, other)
            assert (one.data_ptr() == other.data_ptr()) is is_shared or one.numel() == 0
    moved = value.to("meta")
    assert {each.device.type for each in tensors_in(moved)} == {"meta"}
    assert moved.device.type == "meta"


def test_weights_that_were_copied_compute_the_same() -> None:
    layer = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
    routed = layer.topk_weights, layer.topk_ids
    for weights in (layer.weights, layer.weights.prepare(device="cpu")):
        y = [
            mxpert.fused_moe(layer.x, each, *routed, activation="silu")
            for each in (weights, weights.clone(), weights.detach())
        ]
        assert_exact(y[1], y[0], "clone")
        assert_exact(y[2], y[0], "detach")


@pytest.mark.parametrize("name", ["MXTensor", "weights"])
def test_cuda_names_what_is_missing(name: str) -> None:
    kind = type(OBJECTS[name]).__name__
    if torch.cuda.is_available():
        assert OBJECTS[name].cuda().device.type == "cuda"
    with pytest.raises(ValueError, match=rf"^{kind}\.cuda: device — need a GPU of this machine"):
        OBJECTS[name].cuda(99)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_a_tensor_counts_values(format: Any) -> None:
    dense = torch.randn(3, 4, 64)
    q = mxpert.quantize(dense, format)
    assert (q.ndim, q.numel(), q.shape) == (dense.ndim, dense.numel(), dense.shape)
    packed = WEIGHTS.prepare(device="cpu", layout="hopper_fragment").down_proj
    assert (packed.ndim, packed.numel()) == (3, 4 * 64 * 32)


@pytest.mark.parametrize(
    "layout", ["row_major", "hopper_fragment", "hopper_fragment_fp8", "cdna4_fragment"]
)
def test_weights_dequantise_prepared_or_not(layout: Any) -> None:
    assert (WEIGHTS.ndim, WEIGHTS.numel()) == (3, 3 * 4 * 64 * 32)
    assert WEIGHTS.dtype == torch.float4_e2m1fn_x2
    gate_up, down = WEIGHTS.prepare(device="cpu", layout=layout).dequantize(torch.float64)
    assert_exact(gate_up, WEIGHTS.gate_up_proj.dequantize(torch.float64), "gate_up")
    assert_exact(down, WEIGHTS.down_proj.dequantize(torch.float64), "down")
    again = mxpert.quantize_weights(gate_up.float(), down.float(), gate_up_order="concatenated")
    assert_exact(again.dequantize()[0], gate_up.float(), "quantised again")
