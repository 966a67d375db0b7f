"""The reference layer against the token-by-token float64 oracle, option by option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, ScaleRule
from mxpert.core.problem import GELU, ClampedSiLU, ReferenceConfig, ReLU2, SiLU, SiTUv2, SwiGLU
from mxpert.formats import quantize_blocks
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    relative_l2,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.poison import PLANTED_ERRORS, nan_filled_scratch, poison_weights
from tests.moe.oracle import moe_layer

MX_FORMATS = ("mxfp8", "mxfp4")
FORMATS = ("bf16", *MX_FORMATS, "fp8_token")
ACTIVATIONS = (
    SiLU(),
    SwiGLU(),
    SwiGLU(alpha=1.3, limit=1.0),
    ClampedSiLU(0.5),
    SiTUv2(),
    SiTUv2(beta=0.7, beta_up=1.1),
    GELU(),
    GELU("tanh"),
    SwiGLU(limit=None, beta=0.25),
    ReLU2(),
)
SHAPE = MoEShape(96, 64, 5, 3, SwiGLU(), GateUpOrder.INTERLEAVED, has_bias=True)
# Two float64 sums in different orders; their codes agree unless a value lies within 1e-13 of a tie.
FLOAT64_TOLERANCE = 1e-12


@pytest.fixture
def float64():
    with mxpert.override(backend="reference", config=ReferenceConfig(torch.float64)):
        yield


@pytest.fixture(autouse=True)
def reference():
    with mxpert.override(backend="reference"):
        yield


def run(inputs: MoEInputs, **options) -> torch.Tensor:
    return mxpert.fused_moe(
        inputs.x,
        inputs.weights,
        inputs.topk_weights,
        inputs.topk_ids,
        activation=options.pop("activation", inputs.activation),
        **options,
    )


def oracle(inputs: MoEInputs, **options) -> torch.Tensor:
    return moe_layer(
        inputs.x,
        inputs.weights,
        inputs.topk_weights,
        inputs.topk_ids,
        activation=options.pop("activation", inputs.activation),
        **options,
    )


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("order", GateUpOrder, ids=lambda order: order.name.lower())
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_layer_equals_the_oracle(activation, order, activation_format, float64) -> None:
    shape = replace(SHAPE, gate_up_order=order, activation=activation)
    inputs = random_moe_problem(shape, 7)
    options = {"activation": activation, "activation_format": activation_format}
    assert_close_relative(
        run(inputs, out_dtype=torch.float64, **options),
        oracle(inputs, **options),
        FLOAT64_TOLERANCE,
        "fused_moe",
    )


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name.lower())
@pytest.mark.parametrize("activation_format", MX_FORMATS)
@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("on_input", [False, True], ids=("weight_on_output", "weight_on_input"))
def test_options_equal_the_oracle(on_input, combine, activation_format, rule, float64) -> None:
    inputs = random_moe_problem(SHAPE, 5, seed=3)
    options = {
        "activation_format": activation_format,
        "scale_rule": rule,
        "apply_router_weight_on_input": on_input,
    }
    assert_close_relative(
        run(inputs, combine=combine, out_dtype=torch.float64, **options),
        oracle(inputs, **options),
        FLOAT64_TOLERANCE,
        "fused_moe",
    )


@pytest.mark.parametrize("routing", Routing, ids=lambda routing: routing.value)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 1), (7, 7), (6, 4), (33, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_routings_equal_the_oracle(tokens, experts, top_k, routing, float64) -> None:
    shape = replace(SHAPE, num_experts=experts, top_k=top_k, has_bias=experts % 2 == 0)
    inputs = random_moe_problem(shape, tokens, routing=routing)
    result = run(inputs, out_dtype=torch.float64)
    assert result.shape == (tokens, 96)
    assert_close_relative(result, oracle(inputs), FLOAT64_TOLERANCE, "fused_moe")


def test_expert_map_skips_foreign_negative_and_out_of_range_ids(float64) -> None:
    inputs = random_moe_problem(replace(SHAPE, num_experts=3), 9)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, -1], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-2, 9, (9, 3), dtype=torch.int32, generator=generator)
    inputs = replace(inputs, topk_ids=ids)
    assert_close_relative(
        run(inputs, expert_map=expert_map, out_dtype=torch.float64),
        oracle(inputs, expert_map=expert_map),
        FLOAT64_TOLERANCE,
        "expert_map",
    )


def test_tokens_beyond_num_local_tokens_are_zero_and_never_read(float64) -> None:
    inputs = random_moe_problem(SHAPE, 8)
    expected = oracle(inputs)
    inputs.x[5:] = float("nan")
    result = run(
        inputs, num_local_tokens=torch.tensor([5], dtype=torch.int32), out_dtype=torch.float64
    )
    assert_close_relative(result[:5], expected[:5], FLOAT64_TOLERANCE, "local tokens")
    assert_exact(result[5:], torch.zeros_like(result[5:]), "foreign tokens")


@pytest.mark.parametrize("activation_format", MX_FORMATS)
def test_quantised_x_equals_bfloat16_x(activation_format) -> None:
    inputs = random_moe_problem(SHAPE, 6)
    quantised = quantize_blocks(inputs.x, activation_format, -1, ScaleRule.EVEN)
    results = [
        run(replace(inputs, x=x), activation_format=activation_format, scale_rule=ScaleRule.EVEN)
        for x in (inputs.x, quantised)
    ]
    assert_exact(*results, "fused_moe")


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("block", [1, 8, 64])
@pytest.mark.parametrize("combine", Combine, ids=lambda c: c.value)
def test_stages_ignore_padding_and_equal_the_oracle(
    combine, block, activation_format, float64
) -> None:
    inputs = random_moe_problem(SHAPE, 5)
    plan = mxpert.make_routing_plan(
        inputs.topk_weights, inputs.topk_ids, num_experts=5, routing_block_m=block
    )
    h = mxpert.moe_gate_up(
        inputs.x, inputs.weights, plan, activation=SwiGLU(), activation_format=activation_format
    )
    padding = (plan.sorted_token_ids >> 24) == 3
    if isinstance(h, torch.Tensor):
        h[padding] = float("nan")
    else:
        h.scale[padding] = 255
    y = mxpert.moe_down(
        h,
        inputs.weights,
        plan,
        activation_format=activation_format,
        combine=combine,
        out_dtype=torch.float64,
    )
    if combine is Combine.FLAT:
        assert y.shape == (plan.capacity, 96)
        y = y[plan.slot_rows.long()].sum(dim=1)
    assert_close_relative(
        y, oracle(inputs, activation_format=activation_format), FLOAT64_TOLERANCE, "stages"
    )


def test_blocks_without_an_expert_and_past_the_end_are_not_computed(float64) -> None:
    inputs = random_moe_problem(replace(SHAPE, top_k=1), 6)
    plan = mxpert.make_routing_plan(
        inputs.topk_weights, inputs.topk_ids, num_experts=5, routing_block_m=2
    )
    blocks = plan.block_expert_ids.clone()
    blocks[0] = -1
    used = plan.num_valid - torch.tensor([2, 0], dtype=torch.int32)
    cut = replace(plan, block_expert_ids=blocks, num_valid=used)
    h, full = (
        mxpert.moe_gate_up(inputs.x, inputs.weights, p, activation=SiLU()) for p in (cut, plan)
    )
    end = int(used[0])
    assert not h[:2].any()
    assert not h[end:].any()
    assert full[end:].any()
    assert_exact(h[2:end], full[2:end], "rows in use")


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("activation_format", FORMATS)
def test_float32_with_bfloat16_output_meets_the_gate(activation_format, combine) -> None:
    shape = replace(SHAPE, hidden_size=512, intermediate_size=256)
    inputs = random_moe_problem(shape, 64, routing=Routing.ZIPF)
    actual = run(inputs, activation_format=activation_format, combine=combine)
    with mxpert.override(backend="reference", config=ReferenceConfig(torch.float64)):
        expected = run(inputs, activation_format=activation_format, out_dtype=torch.float64)
    top_k = 3 if combine is Combine.REDUCE else 1
    tolerance = end_to_end_tolerance(
        activation_format, torch.bfloat16, 512, 256, top_k=top_k, numel=actual.numel()
    )
    error = assert_close_relative(actual, expected, tolerance, "fused_moe")
    assert error > tolerance / 10  # a tolerance ten times the error would hide mistakes
    wrong = run(
        inputs, activation_format=activation_format, combine=combine, out_dtype=torch.float32
    )
    assert relative_l2(wrong, expected) < error  # bfloat16 output is what costs most


@pytest.mark.parametrize("activation_format", MX_FORMATS)
def test_stage_one_codes_meet_the_flip_tolerance(activation_format) -> None:
    inputs = random_moe_problem(replace(SHAPE, hidden_size=512, intermediate_size=256), 64)
    plan = mxpert.make_routing_plan(
        inputs.topk_weights, inputs.topk_ids, num_experts=5, routing_block_m=16
    )
    results = []
    for accumulate in (torch.float32, torch.float64):
        with mxpert.override(backend="reference", config=ReferenceConfig(accumulate)):
            results.append(
                mxpert.moe_gate_up(
                    inputs.x,
                    inputs.weights,
                    plan,
                    activation=SiLU(),
                    activation_format=activation_format,
                )
            )
    tolerance = stage_tolerance(activation_format, None, 512, numel=64 * 3 * 256)
    assert_close_relative(*results, tolerance, "moe_gate_up")


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("scale", [254, 255], ids=("huge", "nan"))
def test_storage_outside_the_logical_shape_is_not_read(scale, activation_format) -> None:
    inputs = random_moe_problem(SHAPE, 9)
    poisoned = replace(inputs, weights=poison_weights(inputs.weights, scale=scale))
    with nan_filled_scratch():
        actual = run(poisoned, activation_format=activation_format)
    assert_exact(actual, run(inputs, activation_format=activation_format), "poisoned storage")


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("name", sorted(PLANTED_ERRORS))
def test_a_planted_error_fails_the_gate(name, activation_format) -> None:
    inputs = random_moe_problem(SHAPE, 16)
    expected = oracle(inputs, activation_format=activation_format)
    tolerance = end_to_end_tolerance(
        activation_format, torch.bfloat16, 96, 64, top_k=3, numel=expected.numel()
    )
    actual = run(inputs, activation_format=activation_format)
    assert_close_relative(actual, expected, tolerance, "sound layer")
    wrong = run(PLANTED_ERRORS[name](inputs), activation_format=activation_format)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close_relative(wrong, expected, tolerance, name)


def test_nan_scales_reach_the_output() -> None:
    inputs = random_moe_problem(SHAPE, 2)
    inputs.weights.down_proj.scale[:] = 255
    assert run(inputs).isnan().all()


def test_fused_flat_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="make_routing_plan"):
        run(random_moe_problem(SHAPE, 2), combine=Combine.FLAT)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_router_change_no_bit(weights_dtype, ids_dtype) -> None:
    inputs = random_moe_problem(SHAPE, 9)
    narrow = inputs.topk_weights.to(weights_dtype)
    ids = inputs.topk_ids.clone()
    ids[0, 0], ids[1, 1] = -1, SHAPE.num_experts
    want = run(replace(inputs, topk_weights=narrow.float(), topk_ids=ids))
    assert_exact(
        run(replace(inputs, topk_weights=narrow, topk_ids=ids.to(ids_dtype))), want, "fused_moe"
    )


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 7])
def test_out_is_written_and_returned(tokens, out_dtype, combine) -> None:
    inputs = random_moe_problem(SHAPE, tokens)
    want = run(inputs, combine=combine, out_dtype=out_dtype)
    out = torch.full_like(want, torch.nan)
    assert run(inputs, combine=combine, out_dtype=out_dtype, out=out) is out
    assert_exact(out, want, "fused_moe")


def test_out_may_be_the_input() -> None:
    inputs = random_moe_problem(SHAPE, 7)
    want = run(inputs)
    x = inputs.x.clone()
    run(replace(inputs, x=x), out=x)
    assert_exact(x, want, "fused_moe")


@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("exact", [True, False], ids=["powers_of_two", "any_weights"])
def test_when_x_may_be_scaled_before_it_is_quantised(activation_format, exact, float64) -> None:
    """Codes are those of x if the weight is a power of two: only the scale of a block moves.

    Any other weight moves values across the borders of codes. Both results then stand within the
    rounding of x, so kernels multiply the GEMM's float32 result, which rounds nothing.
    """
    shape = replace(SHAPE, top_k=1, has_bias=False)
    inputs = random_moe_problem(shape, 33, seed=5)
    generator = torch.Generator().manual_seed(6)
    weights = torch.rand(33, 1, generator=generator) + 0.25
    if exact:
        weights = torch.exp2(torch.randint(-6, 3, (33, 1), generator=generator).float())
    inputs = replace(inputs, topk_weights=weights)
    scaled = replace(
        inputs, x=(inputs.x * weights).bfloat16(), topk_weights=torch.ones_like(weights)
    )
    options = dict(activation_format=activation_format, out_dtype=torch.float64)
    after = run(inputs, apply_router_weight_on_input=True, **options)
    before = run(scaled, **options)
    assert torch.equal(after, before) == exact
