"""mxpert.MoE takes any strides, says what is wrong at construction, and packed weights unpack."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, MoEWeights
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.devices import DEVICES

INPUTS = random_moe_problem(MoEShape(96, 160, 3, 2, has_bias=True), 4)
ROUTER = torch.randn(3, 96)


def layer() -> mxpert.MoE:
    return mxpert.MoE(INPUTS.weights, ROUTER, top_k=2, activation=INPUTS.activation).eval()


@pytest.mark.parametrize(
    "x",
    [torch.randn(96, 5).T, torch.randn(96, 2, 3).permute(1, 2, 0), torch.randn(5, 192)[:, ::2]],
    ids=["2d", "3d", "step"],
)
def test_inputs_of_any_strides(x: torch.Tensor) -> None:
    moe, x = layer(), x.bfloat16()
    assert torch.equal(moe(x), moe(x.clone(memory_format=torch.contiguous_format)))


def test_what_is_no_tensor_is_named() -> None:
    moe = layer()
    state = moe.state_dict() | {"experts.gate_up_proj_blocks": None}
    with pytest.raises(RuntimeError, match=r"mismatch for experts\.gate_up_proj_blocks: NoneTy"):
        moe.load_state_dict(state)


def packed_without_history() -> MoEWeights:
    """Packed weights without what `prepare` notes beside the tensors."""
    weights = INPUTS.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    return MoEWeights(
        weights.gate_up_proj,
        weights.down_proj,
        weights.gate_up_bias,
        weights.down_bias,
        gate_up_order=GateUpOrder.INTERLEAVED,
    )


def test_packed_weights_need_no_certificates() -> None:
    moe = mxpert.MoE(packed_without_history(), ROUTER, top_k=2)
    assert moe.experts.weights.layout is Layout.HOPPER_FRAGMENT


def test_a_module_keeps_the_fp8_copy_of_its_weights() -> None:
    with on_device(DEVICES["sm_90"]):
        weights = INPUTS.weights.prepare(device="cpu", keep_fp8=True)
        moe = mxpert.MoE(weights, ROUTER, top_k=2)
        held = dict(moe.experts.named_buffers())
        assert held["gate_up_proj_fp8_codes"] is weights.gate_up_proj.fp8_codes
        moe.load_state_dict(moe.state_dict())
        again = moe.experts.weights
        assert again.layout is Layout.HOPPER_FRAGMENT_FP8
        assert again is not weights
        assert torch.equal(again.down_proj.fp8_codes, weights.down_proj.fp8_codes)


def test_packed_weights_without_a_source_order_unpack() -> None:
    weights = packed_without_history().unprepare()
    assert weights.gate_up_order is GateUpOrder.INTERLEAVED
    again = weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    assert torch.equal(again.gate_up_proj.qdata, packed_without_history().gate_up_proj.qdata)
    assert torch.equal(weights.down_proj.qdata, INPUTS.weights.down_proj.qdata)
