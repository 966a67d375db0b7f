"""The reference layer against transformers' own MoE modules, with the dequantised weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import mxpert
from mxpert import GateUpOrder
from mxpert.core.problem import ReferenceConfig, SiLU, SwiGLU
from mxpert.testing.noise import sqnr_floor_db
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    cosine,
    relative_l2,
    sqnr_db,
)
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.layers import run_layer

GPT_OSS = MoEShape(256, 192, 6, 3, SwiGLU(), GateUpOrder.INTERLEAVED, has_bias=True)
MIXTRAL = MoEShape(256, 192, 6, 2, SiLU(), GateUpOrder.CONCATENATED)


@pytest.fixture(autouse=True)
def float64():
    with mxpert.override(backend="reference", config=ReferenceConfig(torch.float64)):
        yield


def gpt_oss_layer(inputs: MoEInputs, dtype: torch.dtype) -> GptOssMLP:
    """transformers' layer with random router and our expert weights, dequantised and transposed."""
    weights = inputs.weights
    layer = GptOssMLP(
        GptOssConfig(
            hidden_size=weights.hidden_size,
            intermediate_size=weights.intermediate_size,
            num_local_experts=weights.num_experts,
            num_experts_per_tok=inputs.topk_ids.shape[1],
        )
    )
    generator = torch.Generator().manual_seed(5)
    experts = layer.experts
    with torch.no_grad():
        experts.gate_up_proj.copy_(mxpert.dequantize(weights.gate_up_proj).transpose(1, 2))
        experts.down_proj.copy_(mxpert.dequantize(weights.down_proj).transpose(1, 2))
        experts.gate_up_proj_bias.copy_(weights.gate_up_bias)
        experts.down_proj_bias.copy_(weights.down_bias)
        layer.router.weight.normal_(generator=generator)
        layer.router.bias.normal_(generator=generator)
    return layer.to(dtype).requires_grad_(False)


def test_gpt_oss_layer_in_float64_differs_by_the_intermediate_rounding_alone() -> None:
    inputs = random_moe_problem(GPT_OSS, 24)
    layer = gpt_oss_layer(inputs, torch.float64)
    theirs = layer(inputs.x.double()[None])[0][0]
    logits = layer.router(inputs.x.double())[0]
    topk_weights, topk_ids = mxpert.route_topk(logits.float(), top_k=3)
    ours = mxpert.fused_moe(
        inputs.x,
        inputs.weights,
        topk_weights,
        topk_ids,
        activation=SwiGLU(),
        out_dtype=torch.float64,
    )
    # bfloat16 h costs rounding_rms(8) = 1.7e-3, float32 routing weights 1e-7.
    assert 5e-4 < relative_l2(ours, theirs) < 2.1e-3


@pytest.mark.parametrize("activation_format", ["bf16", "mxfp8", "mxfp4", "fp8_token"])
def test_gpt_oss_layer_keeps_the_sqnr_floor(activation_format) -> None:
    inputs = random_moe_problem(GPT_OSS, 64)
    layer = gpt_oss_layer(inputs, torch.float64)
    theirs = layer.experts(inputs.x.double(), inputs.topk_ids.long(), inputs.topk_weights.double())
    ours = run_layer(inputs, activation=SwiGLU(), activation_format=activation_format)
    found, floor = sqnr_db(ours, theirs), sqnr_floor_db(activation_format)
    assert floor <= found <= floor + 6, f"{found:.2f} dB against a floor of {floor:.2f} dB"


def test_gpt_oss_layer_in_bfloat16() -> None:
    inputs = random_moe_problem(GPT_OSS, 64)
    layer = gpt_oss_layer(inputs, torch.bfloat16)
    # Weights of 4 bits and a power-of-two scale survive bfloat16; transformers' sums do not.
    theirs = layer.experts(inputs.x, inputs.topk_ids.long(), inputs.topk_weights.bfloat16())
    ours = run_layer(inputs, activation=SwiGLU())
    assert cosine(ours, theirs) >= 0.9999


def test_mixtral_experts() -> None:
    inputs = random_moe_problem(MIXTRAL, 40)
    theirs = MixtralExperts(
        MixtralConfig(
            hidden_size=256, intermediate_size=192, num_local_experts=6, num_experts_per_tok=2
        )
    )
    with torch.no_grad():
        theirs.gate_up_proj.copy_(mxpert.dequantize(inputs.weights.gate_up_proj))
        theirs.down_proj.copy_(mxpert.dequantize(inputs.weights.down_proj))
    expected = theirs.double()(
        inputs.x.double(), inputs.topk_ids.long(), inputs.topk_weights.double()
    )
    actual = run_layer(inputs, activation=SiLU(), out_dtype=torch.float64)
    assert 5e-4 < relative_l2(actual, expected) < 2.1e-3  # bfloat16 h alone
    wrong = replace(inputs.weights, gate_up_order=GateUpOrder.INTERLEAVED)
    other = run_layer(inputs, weights=wrong, activation=SiLU(), out_dtype=torch.float64)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close_relative(other, expected, 0.5, "wrong order")


@pytest.mark.parametrize("order", GateUpOrder, ids=lambda order: order.name.lower())
def test_the_order_of_rows_changes_nothing_once_declared(order) -> None:
    inputs = random_moe_problem(replace(GPT_OSS, gate_up_order=GateUpOrder.CONCATENATED), 16)
    weights, rows = inputs.weights, torch.empty(2 * 192, dtype=torch.int64)
    for part, place in enumerate(mxpert.moe.weights.gate_up_rows(order, 192)):
        rows[place] = torch.arange(192) + 192 * part
    moved = replace(
        weights,
        gate_up_order=order,
        gate_up_bias=weights.gate_up_bias[:, rows].contiguous(),
        gate_up_proj=replace(
            weights.gate_up_proj,
            qdata=weights.gate_up_proj.qdata[:, rows],
            scale=weights.gate_up_proj.scale[:, rows],
        ),
    )
    results = [run_layer(inputs, weights=w, activation=SwiGLU()) for w in (weights, moved)]
    assert_exact(*results, "fused_moe")
