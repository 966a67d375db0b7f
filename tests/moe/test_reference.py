"""The reference layer in float64 against the token-by-token oracle, and what only it promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine
from mxpert.core.problem import ReferenceConfig, SiLU, SwiGLU
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    end_to_end_tolerance,
    is_exact,
    relative_l2,
)
from mxpert.testing.problems import MoEShape, Routing, random_moe_problem
from support.exact import exact_moe_problem
from support.layers import plan_of, run_layer
from tests.conformance.cases import moe as cases
from tests.conformance.cases.moe_case import MoECase

FLOAT64 = ReferenceConfig(torch.float64)
SHAPE = MoEShape(96, 64, 5, 3, SwiGLU(), has_bias=True)
LARGE = replace(SHAPE, hidden_size=512, intermediate_size=256)
# Two float64 sums in different orders; their codes agree unless a value lies within 1e-13 of a tie.
FLOAT64_TOLERANCE = 1e-12
LAYERS = {
    f"{name}-{tokens}": replace(
        case,
        exact=False,
        combine=Combine.REDUCE if case.combine is Combine.FLAT else case.combine,
        sizes=replace(case.sizes, tokens=tokens),
    )
    for group in (cases.STAGES, cases.ROUTED)
    for name, case in group.items()
    for tokens in (1, 19)
    if not case.stray_ids or tokens > 1
}


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with mxpert.override(backend="reference"):
        yield


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_float64_has_the_oracles_values(case: MoECase) -> None:
    inputs = case.inputs()
    with mxpert.override(backend="reference", config=FLOAT64):
        y = replace(case, out_dtype=torch.float64).run(inputs)
    expected = case.expected(inputs).y.sum(1)
    assert_close_relative(y, expected, FLOAT64_TOLERANCE, "fused_moe")


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("case", cases.STAGES.values(), ids=cases.STAGES)
def test_float64_stages_have_the_oracles_values(case: MoECase, unit: int) -> None:
    case = replace(case, sizes=replace(case.sizes, tokens=7), out_dtype=torch.float64)
    inputs = case.inputs()
    with mxpert.override(backend="reference", config=FLOAT64):
        _, y = case.run_stages(inputs, case.expected(inputs), unit)
    expected = case.expected(inputs).y
    wanted = expected.flatten(0, 1) if case.combine is Combine.FLAT else expected.sum(1)
    assert_close_relative(y, wanted, FLOAT64_TOLERANCE, "stages")


def test_blocks_without_an_expert_and_past_the_end_are_not_computed() -> None:
    inputs = random_moe_problem(replace(SHAPE, top_k=1), 6)
    plan = plan_of(inputs, 2)
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
@pytest.mark.parametrize("activation_format", cases.FORMATS)
def test_float32_with_bfloat16_output_meets_the_gate(
    activation_format: str, combine: Combine
) -> None:
    inputs = random_moe_problem(LARGE, 64, routing=Routing.ZIPF)
    options = {"activation_format": activation_format, "combine": combine}
    actual = run_layer(inputs, **options)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = run_layer(inputs, out_dtype=torch.float64, **options)
    top_k = 3 if combine is Combine.REDUCE else 1
    tolerance = end_to_end_tolerance(
        activation_format, torch.bfloat16, 512, 256, top_k=top_k, numel=actual.numel()
    )
    error = assert_close_relative(actual, expected, tolerance, "fused_moe")
    assert error > tolerance / 10  # a tolerance ten times the error would hide mistakes
    wrong = run_layer(inputs, out_dtype=torch.float32, **options)
    assert relative_l2(wrong, expected) < error  # bfloat16 output is what costs most


def test_nan_scales_reach_the_output() -> None:
    inputs = random_moe_problem(SHAPE, 2)
    inputs.weights.down_proj.scale[:] = 255
    assert run_layer(inputs).isnan().all()


def test_fused_flat_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="make_routing_plan"):
        run_layer(random_moe_problem(SHAPE, 2), combine=Combine.FLAT)


# ---- exact problems -------------------------------------------------------------------------


def test_the_largest_top_k_stays_exact() -> None:
    inputs = exact_moe_problem(MoEShape(64, 64, 12, 12, SwiGLU(), has_bias=True), 40)
    y = run_layer(inputs, out_dtype=torch.float32)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = run_layer(inputs, out_dtype=torch.float64)
    assert_exact(y.double(), expected, "top_k = 12", ignore_zero_sign=True)
    with pytest.raises(ValueError, match="at most 12"):
        exact_moe_problem(MoEShape(64, 64, 13, 13), 1)


def test_one_wrong_code_changes_bits() -> None:
    """Dense pairs cancel, so that a single wrong code anywhere in a used row shows."""
    inputs = exact_moe_problem(MoEShape(160, 96, 5, 5), 11)
    expected = run_layer(inputs)
    for projection in (inputs.weights.gate_up_proj, inputs.weights.down_proj):
        projection.qdata[2, 17, 33] ^= 0x01
        assert not is_exact(run_layer(inputs), expected, ignore_zero_sign=True)
        projection.qdata[2, 17, 33] ^= 0x01
