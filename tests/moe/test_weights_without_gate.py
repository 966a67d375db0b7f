"""Experts without a gate: their weights, what is refused, and which kernels serve them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, MoEWeights, ReLU2, UnsupportedError
from mxpert.core.target import on_device
from mxpert.distributed import ExpertParallel
from mxpert.formats.tensor import Layout
from mxpert.modules import PreparedExperts, quantize_weights, requantize_
from mxpert.moe.local_weights import take_experts
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.devices import DEVICES
from support.layers import plan_of

E, H, F, K = 4, 64, 96, 2
SHAPE = MoEShape(H, F, E, K, ReLU2(), has_bias=True)


@pytest.fixture
def layer() -> MoEInputs:
    return random_moe_problem(SHAPE, 7)


def run(layer: MoEInputs, weights: MoEWeights | None = None, **options: Any) -> torch.Tensor:
    routed = weights or layer.weights, layer.topk_weights, layer.topk_ids
    return mxpert.fused_moe(layer.x, *routed, **{"activation": "relu2"} | options)


def dense() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(E, F, H), torch.randn(E, H, F)


def test_no_order_stands_for_no_gate(layer: MoEInputs) -> None:
    weights = quantize_weights(*dense(), gate_up_order=None)
    assert not weights.has_gate
    assert not layer.weights.has_gate
    assert tuple(weights.gate_up_proj.shape) == (E, F, H)
    assert tuple(layer.weights.gate_up_bias.shape) == (E, F)
    assert random_moe_problem(replace(SHAPE, activation=mxpert.SiLU()), 1).weights.has_gate


def test_files_and_states_give_the_weights_back(layer: MoEInputs, tmp_path: Path) -> None:
    file = tmp_path / "layer.safetensors"
    layer.weights.save(file)
    torch.save(layer.weights.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = run(layer)
    other = random_moe_problem(SHAPE, 1, seed=5).weights
    other.load_state_dict(layer.weights.state_dict())
    for found in (MoEWeights.load(file), MoEWeights.from_state_dict(state), other):
        assert found.gate_up_order is None
        assert_exact(run(layer, found), expected, "fused_moe")
    del state["_extra_state"]["gate_up_order"]
    with pytest.raises(ValueError, match="gate_up_order — need a fact"):
        MoEWeights.from_state_dict(state)


def test_new_values_go_into_the_same_memory() -> None:
    up, down = dense()
    weights = quantize_weights(*dense(), gate_up_order=None).prepare(device="cpu")
    place = weights.gate_up_proj.qdata.data_ptr()
    requantize_(weights, up, down)
    assert weights.gate_up_proj.qdata.data_ptr() == place
    wanted = quantize_weights(up, down, gate_up_order=None)
    assert_exact(weights.gate_up_proj, wanted.gate_up_proj, "up_proj")


def test_a_module_publishes_and_loads_up_proj(layer: MoEInputs) -> None:
    experts = PreparedExperts(layer.weights, "relu2").eval()
    other = PreparedExperts(random_moe_problem(SHAPE, 1, seed=5).weights, ReLU2()).eval()
    assert "up_proj_bias" in experts.state_dict()
    other.load_state_dict(experts.state_dict())
    call = layer.x, layer.topk_weights, layer.topk_ids
    assert_exact(other(*call), experts(*call), "experts")
    moe = mxpert.MoE(layer.weights, torch.randn(E, H), top_k=K, activation="relu2").eval()
    assert moe(layer.x).isfinite().all()


def test_ranks_share_the_experts(layer: MoEInputs) -> None:
    """The experts of one rank, and a layer of one rank, have the bits of the whole."""
    ranks = ExpertParallel(num_experts=E, top_k=K, hidden_size=H, max_tokens=16)
    assert_exact(run(layer, expert_parallel=ranks), run(layer), "one rank")
    local = take_experts(layer.weights, [2, 0])
    assert not local.has_gate
    expert_map = torch.tensor([1, -1, 0, -1], dtype=torch.int32)
    ids = layer.topk_ids.clone()
    ids[(ids == 1) | (ids == 3)] = -1
    kept = run(replace(layer, topk_ids=ids), out_dtype=torch.float32)
    found = run(layer, local, expert_map=expert_map, out_dtype=torch.float32)
    assert_exact(found, kept, "two experts", ignore_zero_sign=True)


def test_gate_and_activation_that_do_not_fit_are_refused(layer: MoEInputs) -> None:
    gated = random_moe_problem(replace(SHAPE, activation=mxpert.SiLU()), 7)
    plan = plan_of(layer, 16)
    with pytest.raises(ValueError, match=r"fused_moe: activation — need ReLU2\(\), .*got SiLU"):
        run(layer, activation="silu")
    with pytest.raises(ValueError, match=r"fused_moe: activation — need one that joins.*F, H\]"):
        run(gated)
    with pytest.raises(ValueError, match="moe_gate_up: activation — need one that joins"):
        mxpert.moe_gate_up(gated.x, gated.weights, plan, activation="relu2")
    with pytest.raises(ValueError, match=r"PreparedExperts: activation — need ReLU2"):
        PreparedExperts(layer.weights, "gelu")


def test_weights_that_do_not_fit_are_refused(layer: MoEInputs) -> None:
    up, down = layer.weights.gate_up_proj, layer.weights.down_proj
    with pytest.raises(ValueError, match=r"need \[E, 2F, H\].*have gate_up_order=None"):
        MoEWeights(up, down, gate_up_order=GateUpOrder.CONCATENATED)
    with pytest.raises(TypeError, match="gate_up_order — need"):
        MoEWeights(mxpert.quantize(torch.randn(E, 2 * F, H), "mxfp4"), down)
    with pytest.raises(TypeError, match="gate_up_order — need"):
        quantize_weights(torch.randn(E, 2 * F, H), dense()[1], gate_up_order=None)
    with pytest.raises(ValueError, match="prepare: layout — need ROW_MAJOR for experts without"):
        layer.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_native_backends_leave_the_layer_to_the_portable_one(layer: MoEInputs, arch: str) -> None:
    """And they serve the gated activations themselves, which share their weights' layout."""
    gated = random_moe_problem(replace(SHAPE, activation=mxpert.GELU()), 7)
    native = {"sm_90": "hopper", "gfx950": "cdna4"}[arch]
    with on_device(DEVICES[arch]):
        prepared = layer.weights.prepare(device="cpu")
        assert prepared.layout is Layout.ROW_MAJOR
        why = mxpert.explain(
            mxpert.fused_moe,
            layer.x,
            prepared,
            layer.topk_weights,
            layer.topk_ids,
            activation="relu2",
        )
        assert why.resolution.kernel.backend == "triton"
        assert "experts without a gate run on portable kernels" in str(why)
        for activation in ("gelu", "gelu_tanh", mxpert.SwiGLU(limit=None, beta=0.0)):
            why = mxpert.explain(
                mxpert.fused_moe,
                gated.x,
                gated.weights.prepare(device="cpu"),
                gated.topk_weights,
                gated.topk_ids,
                activation=activation,
            )
            assert why.resolution.kernel.backend == native


def test_training_refuses_it_by_name() -> None:
    from mxpert.training import MXMoE

    with pytest.raises(UnsupportedError, match=r"MXMoE: activation — need one that joins.*ReLU2"):
        MXMoE(H, F, E, K, activation=ReLU2())
