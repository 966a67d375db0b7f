"""Numerics of the Hopper MoE kernels on a GPU: every tile at every token count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights
from mxpert.configs import MoEConfig
from mxpert.core.problem import SwiGLU
from mxpert.formats import FP8_TOKEN, MXTensor, dequantize_blocks, pack_codes, unpack_codes
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.numerics import (
    FP8_SUM_BITS,
    FP8_SUM_TERMS,
    STAGE_GATE,
    assert_close_relative,
    assert_exact,
    effective_numel,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.exact import exact_moe_problem
from support.hopper import intermediate_tolerance
from support.layers import explain_layer, plan_of, take
from tests.moe.hopper.problems import (
    CASES,
    FLOAT64,
    SMALL,
    TOKENS,
    Case,
    cases,
    first_tokens,
    formats,
    layer,
    prepared,
    run,
    tiles,
    tiles_of,
)

pytestmark = pytest.mark.usefixtures("only_hopper", "nan_scratch")


# --- numbers ------------------------------------------------------------------------------------


@cases
@tiles
def test_every_tile_at_every_token_count(
    a_format: str, tile: str, case: str, device: torch.device
) -> None:
    problem = layer(case, a_format, device)
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        for num_tokens in TOKENS:
            problem.check(num_tokens, tile)


@cases
@formats
def test_the_chosen_tile_at_every_token_count(
    a_format: str, case: str, device: torch.device
) -> None:
    """The dispatcher chooses this backend; its choice of tile is correct at every token count."""
    problem = layer(case, a_format, device)
    for num_tokens in TOKENS:
        with mxpert.override():
            tokens = first_tokens(problem.prepared, num_tokens)
            chosen = explain_layer(tokens, activation_format=a_format)
            assert "backend: hopper" in str(chosen)
            problem.check(num_tokens, str(chosen))


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", ["decode16", "middle"])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
def test_output_dtypes_and_combines(
    a_format: str, tile: str, out_dtype: torch.dtype, combine: Combine, device: torch.device
) -> None:
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        for num_tokens in (7, 300):
            layer("gpt_oss", a_format, device).check(
                num_tokens, tile, out_dtype=out_dtype, combine=combine
            )


SHAPES = [(2048, 384), (2880, 2880), (4096, 1536), (5120, 704), (2048, 1408), (7168, 512)]


@pytest.mark.parametrize("hidden, inner", SHAPES, ids=[f"H{h}_F{f}" for h, f in SHAPES])
@formats
def test_shapes_never_tuned(a_format: str, hidden: int, inner: int, device: torch.device) -> None:
    shape = MoEShape(hidden, inner, 4, 2, SwiGLU(), GateUpOrder.INTERLEAVED, True)
    problem = Case(random_moe_problem(shape, 777, device=device), a_format)
    for num_tokens in (1, 33, 777):
        problem.check(num_tokens, "shape")


def half_to_one(inputs: MoEInputs) -> MoEInputs:
    """Route every second token to expert 2 in its first slot."""
    ids = inputs.topk_ids.clone()
    tokens = ids[::2]
    swap = tokens == 2  # ids stay distinct
    tokens[swap] = tokens[:, :1].expand_as(tokens)[swap]
    tokens[:, 0] = 2
    return replace(inputs, topk_ids=ids)


@pytest.mark.parametrize("num_tokens", [17, 300, 2049])
@pytest.mark.parametrize("routing", [*Routing, "half_to_one"], ids=lambda r: getattr(r, "value", r))
@formats
def test_routing(
    a_format: str, routing: Routing | str, num_tokens: int, device: torch.device
) -> None:
    """Skewed routing, empty experts, and all tokens to the same experts."""
    kind = routing if isinstance(routing, Routing) else Routing.UNIFORM
    inputs = random_moe_problem(SMALL, num_tokens, routing=kind, device=device)
    if routing == "half_to_one":
        inputs = half_to_one(inputs)
        assert (inputs.topk_ids == 2).any(1).float().mean() >= 0.5
    Case(inputs, a_format).check(num_tokens, str(routing))


ROWS_OF_EXPERTS = (1, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 40, 41, 49, 64, 65, 0, 97)
"""Rows per expert around every tile width, and around two blocks."""


@tiles
def test_every_width_of_a_tile(a_format: str, tile: str, device: torch.device) -> None:
    """A tile is as wide as its block's real rows: no row is missing, and padding is not touched."""
    shape = MoEShape(704, 384, len(ROWS_OF_EXPERTS), 1, SwiGLU(), GateUpOrder.INTERLEAVED, True)
    inputs = random_moe_problem(shape, sum(ROWS_OF_EXPERTS), device=device)
    experts = torch.arange(len(ROWS_OF_EXPERTS), device=device)
    ids = experts.repeat_interleave(torch.tensor(ROWS_OF_EXPERTS, device=device))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(device)
    problem = Case(replace(inputs, topk_ids=ids[order, None].to(inputs.topk_ids.dtype)), a_format)
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        problem.check(len(ids), tile)


@pytest.mark.parametrize("num_tokens", [1, 65, 777])
@formats
def test_one_expert_and_one_slot(a_format: str, num_tokens: int, device: torch.device) -> None:
    shape = MoEShape(512, 384, 1, 1)
    Case(random_moe_problem(shape, num_tokens, device=device), a_format).check(num_tokens, "E = 1")


@formats
def test_no_tokens(a_format: str, device: torch.device) -> None:
    y = run(first_tokens(layer("deepseek", a_format, device).prepared, 0), a_format)
    assert y.shape == (0, SMALL.hidden_size)


@pytest.mark.parametrize("num_local", [0, 100, 333, 5000])
@pytest.mark.parametrize("tile", ["decode8", "decode32", "middle"])
@formats
def test_expert_map_and_local_tokens(
    a_format: str, tile: str, num_local: int, device: torch.device
) -> None:
    """Foreign, negative and very large ids; a map with −1; a token count on the device."""
    inputs = random_moe_problem(SMALL, 333, device=device)
    generator = torch.Generator(device).manual_seed(4)
    ids = torch.randint(-3, 40, (333, 3), generator=generator, device=device).int()
    ids[0] = torch.tensor([(1 << 31) - 1, -(1 << 31), 5], device=device)
    expert_map = torch.randint(-9, 9, (32,), generator=generator, device=device).int()
    options = dict(
        expert_map=expert_map,
        num_local_tokens=torch.tensor([num_local], dtype=torch.int32, device=device),
    )
    problem = Case(replace(inputs, topk_ids=ids), a_format, **options)
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        problem.check(333, "expert map")
        y = run(problem.prepared, a_format, **options)
    assert not y[min(num_local, 333) :].any()
    assert_exact(y.any(1), problem.expected.any(1), "tokens without experts")


# --- stages -------------------------------------------------------------------------------------


def make_plan(inputs: MoEInputs, unit: int) -> RoutingPlan:
    with mxpert.override():  # this backend has no kernel for it
        return plan_of(inputs, unit)


@pytest.mark.parametrize("unit", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("case", ["gpt_oss", "clamped_on_input"])
@formats
def test_stages(a_format: str, case: str, unit: int, device: torch.device) -> None:
    """Each stage against its reference, for every tile whose block_m divides routing_block_m."""
    problem = layer(case, a_format, device)
    on_input = CASES[case][1]
    for name, config in tiles_of(a_format).items():
        if unit % config.routing_block_m:
            continue
        for num_tokens in (5, 333):
            check_stages(
                first_tokens(problem.prepared, num_tokens),
                problem.inputs.weights,
                a_format,
                unit,
                config,
                on_input,
                f"{name}, T = {num_tokens}",
            )


def check_stages(
    inputs: MoEInputs,
    row_major: MoEWeights,
    a_format: str,
    unit: int,
    config: MoEConfig,
    on_input: bool,
    what: str,
) -> None:
    plan = make_plan(inputs, unit)
    places = plan.slot_rows.flatten().long()
    stage_one = dict(
        activation=inputs.activation,
        activation_format=a_format,
        apply_router_weight_on_input=on_input,
    )
    rows = dict(activation_format=a_format, apply_router_weight_on_input=on_input)
    stage_two = dict(combine=Combine.FLAT, **rows)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected_h = mxpert.moe_gate_up(inputs.x, row_major, plan, **stage_one)
    with mxpert.override(backend="hopper", config=config):
        h = mxpert.moe_gate_up(inputs.x, inputs.weights, plan, **stage_one)
        summed = mxpert.moe_down(h, inputs.weights, plan, out_dtype=torch.float32, **rows)
    unsplit = replace(config, down=replace(config.down, k_splits=1))  # FLAT adds no splits
    with mxpert.override(backend="hopper", config=unsplit):
        y = mxpert.moe_down(h, inputs.weights, plan, **stage_two)
    numel = len(places) * row_major.intermediate_size
    assert_close_relative(
        take(h, places),
        take(expected_h, places),
        intermediate_tolerance(a_format, numel),
        f"stage 1, {what}",
    )
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = mxpert.moe_down(h, row_major, plan, out_dtype=torch.float64, **stage_two)[places]
    assert_close_relative(
        y[places],
        expected,
        stage_tolerance(
            a_format,
            torch.bfloat16,
            FP8_SUM_TERMS,
            numel=effective_numel(expected),
            accumulator_bits=FP8_SUM_BITS,
        ),
        f"stage 2, {what}",
    )
    assert_close_relative(
        summed,
        expected.unflatten(0, (-1, plan.top_k)).sum(1),
        STAGE_GATE,
        f"stage 2 summed, {what}",
    )


@pytest.mark.parametrize("num_tokens", [1, 33])
@cases
@tiles
def test_a_layer_equals_its_stages(
    a_format: str, tile: str, case: str, num_tokens: int, device: torch.device
) -> None:
    """A layer equals its separate stages bit for bit, although a layer quantises inside the row
    kernel, and after split-K never stores bfloat16 rows."""
    inputs = first_tokens(layer(case, a_format, device).prepared, num_tokens)
    config, on_input = tiles_of(a_format)[tile], CASES[case][1]
    plan = make_plan(inputs, config.routing_block_m)
    with mxpert.override(backend="hopper", config=config):
        h = mxpert.moe_gate_up(
            inputs.x,
            inputs.weights,
            plan,
            activation=inputs.activation,
            activation_format=a_format,
            apply_router_weight_on_input=on_input,
        )
        staged = mxpert.moe_down(
            h,
            inputs.weights,
            plan,
            activation_format=a_format,
            apply_router_weight_on_input=on_input,
        )
        y = run(inputs, a_format, apply_router_weight_on_input=on_input)
    assert_exact(y, staged, tile)


# --- exact arithmetic ---------------------------------------------------------------------------


def largest_window(x: torch.Tensor, weights: MXTensor) -> float:
    """Largest possible sum of 256 products of a row, in units of the smallest product."""
    w = dequantize_blocks(weights, torch.float64).abs()
    x = x.double().abs()
    unit = x[x > 0].min() * w[w > 0].min()
    windows = (
        torch.nn.functional.pad(w, (0, -w.shape[-1] % FP8_SUM_TERMS))
        .unflatten(-1, (-1, FP8_SUM_TERMS))
        .sum(-1)
    )
    return (x.max() * windows.max() / unit).item()


@tiles
def test_exact_problem_is_bit_identical(a_format: str, tile: str, device: torch.device) -> None:
    """Formats with power-of-two scales are exact here, FP8 tensor cores included.

    x holds integers up to 4, h a few powers of two. Both are e4m3 numbers under one scale per row:
    the low parts are zero, and no block of 32 is rebased out of e4m3's range. Tensor cores align
    the products of an instruction and the accumulator to the largest of them and keep 13 bits
    below it. Sums are promoted to float32 after 256 products, so nothing is lost if 256 products
    cannot exceed 2^13 units, which the test asserts. The float32 sums are exact.
    """
    if a_format == FP8_TOKEN:
        pytest.skip("its scales are no powers of two")
    for seed, (shape, on_input) in enumerate(CASES.values()):
        inputs = exact_moe_problem(
            shape, 333, seed=seed, device=device, apply_router_weight_on_input=on_input
        )
        assert largest_window(inputs.x, inputs.weights.gate_up_proj) <= 2**13
        options = dict(apply_router_weight_on_input=on_input)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = run(inputs, a_format, **options)
        packed = replace(inputs, weights=prepared(inputs.weights))
        with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
            for num_tokens in (3, 333):
                assert_exact(
                    run(first_tokens(packed, num_tokens), a_format, **options),
                    expected[:num_tokens],
                    tile,
                    ignore_zero_sign=True,
                )


@pytest.mark.parametrize("tile", ["decode8", "middle"])
@formats
def test_zero_blocks_under_any_scale(a_format: str, tile: str, device: torch.device) -> None:
    """A block of zeros may have any scale byte; the result must not depend on it."""
    inputs = random_moe_problem(SMALL, 33, device=device)
    plain, odd = [], []
    for part in (inputs.weights.gate_up_proj, inputs.weights.down_proj):
        codes = unpack_codes(part.qdata).unflatten(-1, (-1, 32))
        codes[..., ::3, :] &= 8
        qdata = pack_codes(codes.flatten(-2))
        scale = part.scale.clone()
        scale[..., ::3] = (
            torch.arange(scale[..., ::3].numel(), device=device).reshape(scale[..., ::3].shape)
            % 255
        )
        plain.append(replace(part, qdata=qdata))
        odd.append(replace(part, qdata=qdata, scale=scale))
    with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
        results = [
            run(
                replace(
                    inputs,
                    weights=prepared(
                        MoEWeights(*parts, gate_up_order=inputs.weights.gate_up_order)
                    ),
                ),
                a_format,
            )
            for parts in (plain, odd)
        ]
    assert_exact(results[1], results[0], "zero blocks", ignore_zero_sign=True)
