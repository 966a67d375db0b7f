"""Hopper GEMMs that read FP8 copies of weights, on a GPU: against float64, and against decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine, MoEWeights
from mxpert.formats import FP8_TOKEN, MXTensor
from mxpert.testing.numerics import (
    FP8_SUM_BITS,
    FP8_SUM_TERMS,
    assert_close_relative,
    assert_exact,
    effective_numel,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, Routing, random_moe_problem
from support.exact import exact_moe_problem
from support.hopper import intermediate_tolerance, layer_tolerance
from support.layers import explain_layer, plan_of, take
from support.poison import poison_prepared
from support.races import fp8_tiles
from tests.moe.hopper.problems import (
    CASES,
    FLOAT64,
    SMALL,
    TOKENS,
    Case,
    cases,
    first_tokens,
    layer,
    prepared,
    run,
    tiles_of,
)

pytestmark = pytest.mark.usefixtures("only_hopper", "nan_scratch")

layouts = pytest.importorskip("mxpert.moe.hopper.layout", reason="needs Gluon")

FORMATS = ("mxfp8", "mxfp4", FP8_TOKEN)
"""All activations whose rows are one e4m3 part."""
TILES = fp8_tiles()
AS_WIDE = {
    "fp8_narrow": "narrow",
    "fp8_triple": "narrow",
    "fp8_middle": "middle",
    "fp8_wide": "wide",
}
"""A tile that decodes, for each."""

formats = pytest.mark.parametrize("a_format", FORMATS)
tiles = pytest.mark.parametrize("tile", TILES)


@functools.cache
def of_case(case: str, a_format: str, device: torch.device) -> MoEInputs:
    """The inputs of `layer` with an FP8 copy, poisoned where it pads the weights."""
    inputs = layer(case, a_format, device).inputs
    weights = prepared(inputs.weights, keep_fp8=True)
    for part in weights.mx_projections:
        poison_prepared(part)
    return replace(inputs, weights=weights)


def check(inputs: MoEInputs, case: str, a_format: str, num_tokens: int, what: str) -> torch.Tensor:
    problem = layer(case, a_format, inputs.x.device)
    y = run(first_tokens(inputs, num_tokens), a_format, **problem.options)
    bound = layer_tolerance(a_format, torch.bfloat16, inputs, num_tokens)
    assert_close_relative(y, problem.expected[:num_tokens], bound, f"{what}, T = {num_tokens}")
    return y


@cases
@tiles
@formats
def test_every_tile_at_every_token_count(
    a_format: str, tile: str, case: str, device: torch.device
) -> None:
    """With poisoned padding; repeats give the same bits."""
    inputs = of_case(case, a_format, device)
    with mxpert.override(config=TILES[tile], backend="hopper"):
        for num_tokens in TOKENS:
            y = check(inputs, case, a_format, num_tokens, tile)
            for _ in range(2):
                again = run(
                    first_tokens(inputs, num_tokens),
                    a_format,
                    apply_router_weight_on_input=CASES[case][1],
                )
                assert_exact(again, y, f"{tile}, T = {num_tokens}")


@cases
@tiles
@formats
def test_a_layer_has_the_bits_of_decoding(
    a_format: str, tile: str, case: str, device: torch.device
) -> None:
    """The same products in the same order, promoted at the same places."""
    problem, copied = layer(case, a_format, device), of_case(case, a_format, device)
    for num_tokens in (33, 777, 2049):
        results = []
        for inputs, config in (
            (copied, TILES[tile]),
            (problem.prepared, tiles_of(a_format)[AS_WIDE[tile]]),
        ):
            with mxpert.override(config=config, backend="hopper"):
                results.append(run(first_tokens(inputs, num_tokens), a_format, **problem.options))
        assert_exact(*results, f"{tile}, T = {num_tokens}")


@tiles
@formats
def test_stages(a_format: str, tile: str, device: torch.device) -> None:
    """Each stage against its reference, in plans whose blocks hold one tile block or two."""
    case, config = "gpt_oss", TILES[tile]
    row_major, inputs = (
        layer(case, a_format, device).inputs.weights,
        of_case(case, a_format, device),
    )
    for unit in (config.routing_block_m, 2 * config.routing_block_m):
        tokens = first_tokens(inputs, 333)
        with mxpert.override():
            plan = plan_of(tokens, unit)
        places = plan.slot_rows.flatten().long()
        options = dict(activation=inputs.activation, activation_format=a_format)
        second = dict(combine=Combine.FLAT, activation_format=a_format)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected_h = mxpert.moe_gate_up(tokens.x, row_major, plan, **options)
        with mxpert.override(backend="hopper", config=config):
            h = mxpert.moe_gate_up(tokens.x, inputs.weights, plan, **options)
            y = mxpert.moe_down(h, inputs.weights, plan, **second)
        numel = len(places) * row_major.intermediate_size
        bound = intermediate_tolerance(a_format, numel)
        assert_close_relative(take(h, places), take(expected_h, places), bound, f"stage 1, {unit}")
        with mxpert.override(backend="reference", config=FLOAT64):
            found = mxpert.moe_down(h, row_major, plan, out_dtype=torch.float64, **second)
        expected = found[places]
        bound = stage_tolerance(
            a_format,
            torch.bfloat16,
            FP8_SUM_TERMS,
            numel=effective_numel(expected),
            accumulator_bits=FP8_SUM_BITS,
        )
        assert_close_relative(y[places], expected, bound, f"stage 2, {unit}")


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@tiles
def test_output_dtypes(tile: str, out_dtype: torch.dtype, device: torch.device) -> None:
    inputs = of_case("gpt_oss", "mxfp8", device)
    expected = layer("gpt_oss", "mxfp8", device).expected[:300]
    with mxpert.override(config=TILES[tile], backend="hopper"):
        y = run(first_tokens(inputs, 300), "mxfp8", out_dtype=out_dtype)
    bound = layer_tolerance("mxfp8", out_dtype, inputs, 300)
    assert_close_relative(y, expected, bound, tile)


ROWS_OF_EXPERTS = (1, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 192, 193, 255, 256, 257, 0)
"""Rows per expert around every width of every tile."""


@tiles
def test_every_width_of_a_tile(tile: str, device: torch.device) -> None:
    shape = MoEShape(704, 384, len(ROWS_OF_EXPERTS), 1)
    inputs = random_moe_problem(shape, sum(ROWS_OF_EXPERTS), device=device)
    experts = torch.arange(len(ROWS_OF_EXPERTS), device=device)
    ids = experts.repeat_interleave(torch.tensor(ROWS_OF_EXPERTS, device=device))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = replace(inputs, topk_ids=ids[order, None].to(inputs.topk_ids.dtype))
    problem = Case(inputs, "mxfp8")
    copied = replace(inputs, weights=prepared(inputs.weights, keep_fp8=True))
    with mxpert.override(config=TILES[tile], backend="hopper"):
        y = run(copied, "mxfp8")
    bound = layer_tolerance("mxfp8", torch.bfloat16, inputs, len(ids))
    assert_close_relative(y, problem.expected, bound, tile)


SHAPES = [(64, 64), (128, 192), (2880, 2880), (7168, 512), (2048, 1408)]


@pytest.mark.parametrize("hidden, inner", SHAPES, ids=[f"H{h}_F{f}" for h, f in SHAPES])
@tiles
def test_shapes(tile: str, hidden: int, inner: int, device: torch.device) -> None:
    """Odd and even numbers of depth units, from one on, and of row units."""
    inputs = random_moe_problem(MoEShape(hidden, inner, 4, 2), 777, device=device)
    expected = Case(inputs, "mxfp8").expected
    copied = replace(inputs, weights=prepared(inputs.weights, keep_fp8=True))
    with mxpert.override(config=TILES[tile], backend="hopper"):
        y = run(copied, "mxfp8")
    assert_close_relative(y, expected, layer_tolerance("mxfp8", torch.bfloat16, inputs, 777), tile)


@pytest.mark.parametrize("routing", Routing, ids=lambda r: r.value)
@formats
def test_routing(a_format: str, routing: Routing, device: torch.device) -> None:
    """The heuristic's tile with skewed routing, empty experts, and all tokens to the same ones."""
    inputs = random_moe_problem(SMALL, 4096, routing=routing, device=device)
    copied = replace(inputs, weights=prepared(inputs.weights, keep_fp8=True))
    with mxpert.override():
        assert "kernel=prefill_fp8" in str(explain_layer(copied, activation_format=a_format))
        y = run(copied, a_format)
    bound = layer_tolerance(a_format, torch.bfloat16, inputs, 4096)
    assert_close_relative(y, Case(inputs, a_format).expected, bound, routing.value)


@tiles
@pytest.mark.parametrize("a_format", ["mxfp8", "mxfp4"])
def test_exact_problem_is_bit_identical(a_format: str, tile: str, device: torch.device) -> None:
    """See the test of the same name in test_kernels_gpu.py."""
    for seed, (shape, on_input) in enumerate(CASES.values()):
        options = dict(apply_router_weight_on_input=on_input)
        inputs = exact_moe_problem(shape, 333, seed=seed, device=device, **options)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = run(inputs, a_format, **options)
        copied = replace(inputs, weights=prepared(inputs.weights, keep_fp8=True))
        with mxpert.override(backend="hopper", config=TILES[tile]):
            y = run(copied, a_format, **options)
        assert_exact(y, expected, tile, ignore_zero_sign=True)


def changed(weights: MoEWeights, plant: Callable[[torch.Tensor], torch.Tensor]) -> MoEWeights:
    """The weights with another FP8 copy."""
    gate_up, down = (
        replace(part, fp8_codes=plant(part.fp8_codes)) for part in weights.mx_projections
    )
    return replace(weights, gate_up_proj=gate_up, down_proj=down)


PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fragment_rows_swapped": lambda copy: copy.roll(8 * 128, -1),
    "depth_permuted": lambda copy: copy.roll(4, -1),
    "another_unit": lambda copy: copy.roll(1, 2),
    "another_expert": lambda copy: copy.roll(1, 0),
    "signs": lambda copy: copy & 0x7F,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_the_comparison_catches_planted_errors(
    plant: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """So the copy is what the kernel reads; below its limit the same layer does not read it."""
    inputs = layer("deepseek", "mxfp8", device).inputs
    wrong = changed(prepared(inputs.weights, keep_fp8=True), plant)
    with mxpert.override(config=TILES["fp8_wide"], backend="hopper"), pytest.raises(AssertionError):
        check(replace(inputs, weights=wrong), "deepseek", "mxfp8", 777, "planted")
    with mxpert.override():
        check(replace(inputs, weights=wrong), "deepseek", "mxfp8", 33, "the 4-bit weights")
        bf16 = layer("deepseek", "bf16", device)
        check(replace(bf16.inputs, weights=wrong), "deepseek", "bf16", 2049, "bfloat16 rows")


def test_the_gpu_makes_the_bits_of_the_cpu(device: torch.device) -> None:
    weights = layer("gpt_oss", "mxfp8", device).inputs.weights
    mine = weights.prepare(device=device, keep_fp8=True)
    theirs = weights.to("cpu").prepare(device="cpu", layout="hopper_fragment", keep_fp8=True)
    for one, other in zip(mine.mx_projections, theirs.mx_projections, strict=True):
        assert isinstance(one, MXTensor)
        for name in ("qdata", "scale", "reference", "fp8_codes"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name)), name


def test_a_graph_replays_the_layer_with_another_routing(device: torch.device) -> None:
    inputs = first_tokens(of_case("deepseek", "mxfp8", device), 777)
    others = random_moe_problem(CASES["deepseek"][0], 777, seed=5, device=device)
    with mxpert.override(config=TILES["fp8_wide"], backend="hopper"):
        ids = inputs.topk_ids.clone()
        captured = replace(inputs, topk_ids=ids)
        run(captured, "mxfp8")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(captured, "mxfp8")
        for routing in (inputs.topk_ids, others.topk_ids, inputs.topk_ids):
            ids.copy_(routing)
            y.zero_()
            graph.replay()
            assert_exact(y, run(replace(inputs, topk_ids=routing), "mxfp8"), "graph")
