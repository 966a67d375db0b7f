"""mxpert.MoE on a GPU: prepared there, the same numbers, the same state dict."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert.modules import quantize_weights
from mxpert.testing.numerics import assert_exact, cosine


def test_moving_prepares_the_experts_and_changes_no_bit_of_the_state() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = quantize_weights(
        torch.randn(8, 512, 256, generator=generator) / 16,
        torch.randn(8, 256, 256, generator=generator) / 16,
        gate_up_order=mxpert.GateUpOrder.CONCATENATED,
        gate_up_bias=torch.randn(8, 512),
        down_bias=torch.randn(8, 256),
    )
    moe = mxpert.MoE(weights, torch.randn(8, 256, generator=generator), top_k=2).eval()
    x = torch.randn(3, 40, 256, generator=generator)
    expected, state = moe(x), {name: part.clone() for name, part in moe.state_dict().items()}
    moe = moe.to("cuda")
    assert moe.experts.weights.device.type == "cuda"
    assert cosine(moe(x.cuda()).cpu(), expected) > 0.9999
    for name, part in moe.state_dict().items():
        assert_exact(part.cpu(), state[name], name)
    other = mxpert.MoE(weights, moe.router.weight.cpu(), top_k=2).to("cuda").eval()
    other.load_state_dict(state)
    assert_exact(other(x.cuda()), moe(x.cuda()), "y")
    assert_exact(moe.to("cpu")(x), expected, "back")
    with pytest.raises(TypeError, match=r"MoE: weights — need MoEWeights"):
        mxpert.MoE(None, moe.router.weight, top_k=2)  # type: ignore[arg-type]
