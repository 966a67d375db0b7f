"""The value-by-value check accepts float32 results of a layer and rejects other differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, ScaleRule
from mxpert.configs import ReferenceConfig
from mxpert.core.problem import ACTIVATION_FORMATS, ACTIVATIONS
from mxpert.formats import MXTensor, quantize_blocks
from mxpert.testing.numerics import is_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.layers import plan_of, take
from support.poison import PLANTED_ERRORS
from support.rounding import Rounded, assert_rounded, gate_up_oracle

SHAPE = MoEShape(hidden_size=512, intermediate_size=128, num_experts=5, top_k=2, has_bias=True)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)


def stage_one(
    inputs: MoEInputs,
    a_format: str,
    *,
    accumulate: torch.dtype = torch.float32,
    on_input: bool = False,
    rule: ScaleRule = ScaleRule.RCEIL,
) -> torch.Tensor | MXTensor:
    """Stage 1 of the reference backend by (token, slot)."""
    plan = plan_of(inputs, 16)
    rows = plan.slot_rows.flatten().long()
    with mxpert.override(backend="reference", config=ReferenceConfig(accumulate)):
        h = mxpert.moe_gate_up(
            inputs.x,
            inputs.weights,
            plan,
            activation=inputs.activation,
            activation_format=a_format,
            scale_rule=rule,
            apply_router_weight_on_input=on_input,
        )
    return take(h, rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", GateUpOrder, ids=lambda order: order.value)
@formats
def test_float32_passes_and_float64_is_the_oracle(a_format, order, activation) -> None:
    shape = replace(SHAPE, activation=ACTIVATIONS[activation](), gate_up_order=order)
    inputs = random_moe_problem(shape, 40)
    for on_input, rule in ((False, ScaleRule.RCEIL), (True, ScaleRule.FLOOR)):
        oracle = gate_up_oracle(
            inputs, a_format, apply_router_weight_on_input=on_input, scale_rule=rule
        )
        options = dict(on_input=on_input, rule=rule)
        assert_rounded(stage_one(inputs, a_format, **options), oracle, "float32", rule=rule)
        exact = stage_one(inputs, a_format, accumulate=torch.float64, **options)
        assert is_exact(exact, oracle.round(a_format, rule))


@pytest.mark.parametrize("error", [name for name in PLANTED_ERRORS if name != "double_weight"])
@formats
def test_planted_errors_are_caught(a_format, error) -> None:
    inputs = random_moe_problem(SHAPE, 3)
    planted = PLANTED_ERRORS[error](inputs)
    if error == "dropped_expert":  # its rows are uninitialised
        actual = gate_up_oracle(inputs, a_format).round(a_format)
        kept = planted.topk_ids.flatten() >= 0
        data = actual.qdata if isinstance(actual, MXTensor) else actual
        data[~kept] = 0
    else:
        actual = stage_one(planted, a_format)
    with pytest.raises(AssertionError, match=r"planted: (value|code|scale)\["):
        assert_rounded(actual, gate_up_oracle(inputs, a_format), "planted")


@formats
def test_one_code_beside_the_right_one_is_caught(a_format) -> None:
    """Changes the last bit of the values that are farthest from any rounding boundary."""
    oracle = gate_up_oracle(random_moe_problem(SHAPE, 1), a_format)
    actual = oracle.round(a_format)
    assert_rounded(actual, oracle, "itself")
    if isinstance(actual, MXTensor):
        actual.qdata[0, :32] ^= 1
    else:
        actual.view(torch.int16)[0, :32] ^= 1
    with pytest.raises(AssertionError, match=r"one bit: (value|code)\["):
        assert_rounded(actual, oracle, "one bit")


@pytest.mark.parametrize("step", [-1, 1])
def test_a_scale_beside_the_right_one_is_caught(step) -> None:
    oracle = gate_up_oracle(random_moe_problem(SHAPE, 1), "mxfp4")
    actual = oracle.round("mxfp4")
    actual.scale[1, 3] += step
    with pytest.raises(AssertionError, match=r"scale: scale\[1, 3\]"):
        assert_rounded(actual, oracle, "scale")


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_more_flips_than_noise_makes_are_caught(a_format) -> None:
    """Values at the edge of the slack pass one by one, but all of them together fail."""
    oracle = gate_up_oracle(random_moe_problem(SHAPE, 100), a_format, accumulation=1e-4)
    pushed = replace(oracle, values=oracle.values + 0.99 * oracle.slack)
    with pytest.raises(AssertionError, match=r"pushed: codes — need about \d+ that differ"):
        assert_rounded(pushed.round(a_format), oracle, "pushed")


def test_a_flip_at_a_tie_passes_whatever_share_of_the_norm_it_is() -> None:
    """A single value halfway between two e2m1 codes: relative L2 is 1/4, yet the code is right."""
    values = torch.zeros(1, 32, dtype=torch.float64)
    values[0, 0], values[0, 1] = 4.0, 2.5
    expected = Rounded(values, torch.full_like(values, 2.0**-6).masked_fill(values == 0, 0))
    for other in (2.5 - 2**-7, 2.5 + 2**-6):
        moved = values.clone()
        moved[0, 1] = other
        assert_rounded(quantize_blocks(moved.bfloat16(), "mxfp4"), expected, "tie")
    moved[0, 1] = 2.0 - 2**-2 - 2**-6  # two codes away
    with pytest.raises(AssertionError, match=r"far: code\[0, 1\]"):
        assert_rounded(quantize_blocks(moved.bfloat16(), "mxfp4"), expected, "far")


def test_not_a_number_never_passes() -> None:
    oracle = gate_up_oracle(random_moe_problem(SHAPE, 1), "bf16")
    actual = oracle.round("bf16")
    actual[0, 5] = float("nan")
    with pytest.raises(AssertionError, match=r"nan: value\[0, 5\]"):
        assert_rounded(actual, oracle, "nan")
    with pytest.raises(AssertionError, match=r"actual\.dtype"):
        assert_rounded(actual.float(), oracle, "dtype")
