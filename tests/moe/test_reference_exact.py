"""Exact-arithmetic problems: float32 returns float64's bits, in every option and accumulation."""

from __future__ import annotations

import itertools

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, ScaleRule
from mxpert.core.problem import ClampedSiLU, ReferenceConfig, SiLU, SiTUv2, SwiGLU
from mxpert.testing.numerics import assert_exact, is_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from support.poison import PLANTED_ERRORS
from tests.moe.oracle import moe_layer

CASES = [
    (SiLU(), GateUpOrder.CONCATENATED, False),
    (SwiGLU(), GateUpOrder.INTERLEAVED, True),
    (ClampedSiLU(), GateUpOrder.INTERLEAVED_16, False),
    (SiTUv2(), GateUpOrder.CONCATENATED, True),
]
FORMATS = ("bf16", "mxfp8", "mxfp4")


def shape_of(case, top_k: int = 3) -> MoEShape:
    activation, order, has_bias = case
    return MoEShape(160, 96, 5, top_k, activation, order, has_bias)


def run(inputs: MoEInputs, accumulate: torch.dtype, **options) -> torch.Tensor:
    with mxpert.override(backend="reference", config=ReferenceConfig(accumulate)):
        return mxpert.fused_moe(
            inputs.x,
            inputs.weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            **options,
        )


@pytest.mark.parametrize("on_input", [False, True], ids=("weight_on_output", "weight_on_input"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_every_option_gives_the_float64_result(case, on_input) -> None:
    inputs = exact_moe_problem(shape_of(case), 11, apply_router_weight_on_input=on_input)
    expected = run(
        inputs, torch.float64, out_dtype=torch.float64, apply_router_weight_on_input=on_input
    )
    assert expected.count_nonzero() > expected.numel() / 2
    assert_exact(expected.bfloat16().double(), expected, "float64 result in bfloat16")
    rules = itertools.cycle(ScaleRule)
    for activation_format, combine in itertools.product(FORMATS, (Combine.REDUCE, Combine.ATOMIC)):
        rule = next(rules)
        actual = run(
            inputs,
            torch.float32,
            activation_format=activation_format,
            combine=combine,
            scale_rule=rule,
            apply_router_weight_on_input=on_input,
        )
        assert_exact(
            actual,
            expected.bfloat16(),
            f"{activation_format} {combine} {rule}",
            ignore_zero_sign=True,
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_the_oracle_agrees(case) -> None:
    inputs = exact_moe_problem(shape_of(case), 3, seed=2)
    expected = moe_layer(
        inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids, activation=inputs.activation
    )
    assert_exact(run(inputs, torch.float32), expected.bfloat16(), "oracle", ignore_zero_sign=True)


def test_the_largest_top_k_stays_exact() -> None:
    shape = MoEShape(64, 64, 12, 12, SwiGLU(), GateUpOrder.INTERLEAVED, has_bias=True)
    inputs = exact_moe_problem(shape, 40)
    expected = run(inputs, torch.float64, out_dtype=torch.float64)
    assert_exact(run(inputs, torch.float32).double(), expected, "top_k = 12", ignore_zero_sign=True)
    with pytest.raises(ValueError, match="at most 12"):
        exact_moe_problem(MoEShape(64, 64, 13, 13), 1)


@pytest.mark.parametrize("name", sorted(PLANTED_ERRORS))
def test_a_planted_error_changes_bits(name) -> None:
    inputs = exact_moe_problem(shape_of(CASES[1]), 11)
    wrong = run(PLANTED_ERRORS[name](inputs), torch.float32)
    assert not is_exact(wrong, run(inputs, torch.float32), ignore_zero_sign=True)


def test_one_wrong_code_changes_bits() -> None:
    """Dense pairs cancel, so that a single wrong code anywhere in a used row shows."""
    inputs = exact_moe_problem(shape_of(CASES[0], top_k=5), 11)
    expected = run(inputs, torch.float32)
    for projection in (inputs.weights.gate_up_proj, inputs.weights.down_proj):
        projection.qdata[2, 17, 33] ^= 0x01
        assert not is_exact(run(inputs, torch.float32), expected, ignore_zero_sign=True)
        projection.qdata[2, 17, 33] ^= 0x01
