"""MXMoE.to_inference: the same experts in MXFP4, the same choice of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxpert
from mxpert.distributed import ExpertParallel
from mxpert.testing.numerics import assert_close_relative, assert_exact, bf16_output_tolerance
from mxpert.training import MXFP8Recipe, MXMoE


def trained(**options: Any) -> MXMoE:
    """A layer after two steps."""
    torch.manual_seed(0)
    layer = MXMoE(64, 32, num_experts=5, top_k=2, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(12, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize("rule", ["rceil", "even"])
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "swiglu"}], ids=str)
def test_experts_are_those_of_quantize_weights(options: dict[str, Any], rule: Any) -> None:
    layer = trained(**options)
    serving = layer.to_inference(activation_format="mxfp8", scale_rule=rule)
    gate_up, down = layer.gate_up_proj, layer.down_proj
    weights = mxpert.quantize_weights(
        gate_up.weight,
        down.weight,
        gate_up_order="concatenated",
        gate_up_bias=gate_up.bias,
        down_bias=down.bias,
        scale_rule=rule,
    )
    expected = mxpert.MoE(weights, layer.router.detach(), top_k=2, activation=layer.activation)
    state = serving.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert_exact(state[name], value, name)
    assert serving.experts.activation == layer.activation
    assert serving.experts.activation_format == "mxfp8"
    assert not serving.training
    assert not any(each.requires_grad for each in serving.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_router_chooses_as_in_training(dtype: torch.dtype) -> None:
    """A plain layer with the experts' MXFP4 values computes the same, but for bf16 roundings."""
    layer = trained(dtype=dtype)
    serving = layer.to_inference()
    plain = MXMoE(64, 32, 5, 2, dtype=dtype, recipe=MXFP8Recipe(enabled=False))
    weights = mxpert.quantize_weights(
        layer.gate_up_proj.weight, layer.down_proj.weight, gate_up_order="concatenated"
    )
    with torch.no_grad():
        plain.router.copy_(layer.router)
        plain.gate_up_proj.weight.copy_(weights.gate_up_proj.dequantize())
        plain.down_proj.weight.copy_(weights.down_proj.dequantize())
        x = torch.randn(64, 64, dtype=torch.bfloat16)
        expected, found = plain(x), serving(x)
    # Either rounds the gate/up product, the activation, the down product and the sum to bfloat16.
    bound = 2 * 4 * bf16_output_tolerance(expected.numel())
    assert_close_relative(found, expected, bound, "y")
    with torch.no_grad():
        wrong = mxpert.MoE(weights, layer.router.flip(0).float(), top_k=2)(x)
    with pytest.raises(AssertionError):  # another router is told apart
        assert_close_relative(wrong, expected, bound, "y")


def test_the_copy_is_not_trained_on() -> None:
    layer = trained(dtype=torch.float32)
    serving = layer.to_inference()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    before = serving(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert_exact(serving(x), before, "y")


def test_a_rank_serves_its_own_experts() -> None:
    ranks = ExpertParallel(num_experts=4, top_k=2, hidden_size=64, max_tokens=16)
    layer = MXMoE(64, 32, 4, 2, expert_parallel=ranks)
    serving = layer.to_inference()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    alone = mxpert.MoE(serving.experts.weights, layer.router.detach(), top_k=2).eval()
    assert serving.experts.expert_parallel is ranks
    assert_exact(serving(x), alone(x), "y")


def test_what_cannot_be_served_is_refused() -> None:
    wide = MXMoE(64, 32, 4, 2, dtype=torch.float64, recipe=MXFP8Recipe(enabled=False))
    with pytest.raises(TypeError, match=r"MXMoE: router\.dtype — need"):
        wide.to_inference()
    with pytest.raises(ValueError, match="activation_format"):
        MXMoE(64, 32, 4, 2).to_inference(activation_format="a3w4")  # type: ignore[arg-type]
