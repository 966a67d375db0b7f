"""The Hopper kernels on a Hopper GPU: every tile at every token count, options, graphs, repeats.

The float64 reference runs on the GPU on identically quantised operands, once per problem: a token's
result does not depend on the others, so that smaller batches are compared with its first rows.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, GemmConfig, MoEWeights, ReferenceConfig
from mxpert.dispatch import detect_target
from mxpert.formats import MXTensor, dequantize_blocks, pack_codes, unpack_codes
from mxpert.formats.tensor import Layout
from mxpert.problem import (
    ACTIVATION_FORMATS,
    ClampedSiLU,
    MoEOptions,
    MoEProblem,
    Op,
    SiLU,
    SiTUv2,
    SwiGLU,
)
from mxpert.routing import RoutingPlan
from mxpert.testing.exact import exact_moe_problem
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    STAGE_GATE,
    accumulation_error,
    assert_close_relative,
    assert_exact,
    requantisation_error,
    stage_tolerance,
)
from mxpert.testing.poison import nan_filled_scratch
from mxpert.testing.problems import MODEL_SHAPES, MoEInputs, MoEShape, Routing, random_moe_problem

heuristics = pytest.importorskip("mxpert.backends.hopper.heuristics", reason="needs Gluon")

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 7, 17, 33, 65, 129, 300, 777, 2049)
FLOAT64 = ReferenceConfig(torch.float64)
PROMOTED = 256
"""FP8 tensor cores sum this many products with 14 bits, then add to float32."""
TENSOR_CORE_BITS = 14
NOISE = 2 * accumulation_error(PROMOTED, significant_bits=TENSOR_CORE_BITS, terms_per_rounding=32)
"""Relative error of the activation's output before it is rounded (an instruction adds 32 products;
the activation at most doubles relative errors)."""
FEW = 1 << 14
"""Intermediate values below which single flips decide."""

SMALL = MoEShape(hidden_size=704, intermediate_size=384, num_experts=9, top_k=3)
"""Odd numbers of row units (11) and of depth units (3), depths that are no whole units (5.5)."""

CASES: dict[str, tuple[MoEShape, bool]] = {
    "gpt_oss": (replace(SMALL, activation=SwiGLU(), gate_up_order=GateUpOrder.INTERLEAVED,
                        has_bias=True), False),
    "deepseek": (replace(SMALL, activation=SiLU()), False),
    "clamped_on_input": (replace(SMALL, activation=ClampedSiLU(), has_bias=True,
                                 gate_up_order=GateUpOrder.INTERLEAVED_16), True),
    "situ": (replace(SMALL, activation=SiTUv2(), gate_up_order=GateUpOrder.INTERLEAVED), False),
}
"""Layers that cover activations, orders, biases and both places of the routing weight."""

cases = pytest.mark.parametrize("case", CASES)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)


def tiles_of(a_format: str) -> dict[str, GemmConfig]:
    """Every tile that the dispatcher can choose for a format, by name."""
    target = replace(detect_target("cpu"), kind="cuda", arch="sm_90")
    problem = MoEProblem(Op.FUSED_MOE, target, 64, 4, 32, 2880, 2880,
                         MoEOptions(activation_format=a_format), Layout.HOPPER_FRAGMENT)
    configs = dict.fromkeys(c.gate_up for c in heuristics.layer_configs(problem))
    return {f"{'prefill' if heuristics.is_prefill(c) else 'decode'}{c.block_m}": c
            for c in configs}


TILES = [(a_format, name) for a_format in ACTIVATION_FORMATS for name in tiles_of(a_format)]
tiles = pytest.mark.parametrize("a_format, tile", TILES, ids=["-".join(t) for t in TILES])


@pytest.fixture(autouse=True)
def hopper_only(device: torch.device) -> Iterator[None]:
    """The Hopper kernels answer, or nobody; scratch and outputs start as NaN."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    with mxpert.override(backend="hopper"), nan_filled_scratch():
        yield


def prepared(weights: MoEWeights) -> MoEWeights:
    result = weights.prepare(device=weights.device)
    assert result.layout is Layout.HOPPER_FRAGMENT
    return result


def first_tokens(inputs: MoEInputs, count: int) -> MoEInputs:
    return replace(inputs, x=inputs.x[:count], topk_ids=inputs.topk_ids[:count],
                   topk_weights=inputs.topk_weights[:count])


def run(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    return mxpert.fused_moe(inputs.x, inputs.weights, inputs.topk_ids, inputs.topk_weights,
                            activation=inputs.activation, activation_format=a_format, **options)


def reference(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    """float64 [T, H] of ROW_MAJOR weights."""
    with mxpert.override(backend="reference", config=FLOAT64):
        return run(inputs, a_format, out_dtype=torch.float64, **options)


def intermediate_tolerance(a_format: str, numel: int) -> float:
    """Relative L2 of stage 1's output: rounding, and codes that accumulator noise pushes over a
    boundary.

    The gate holds where flips average out. A single flip of an e2m1 code is half of a value: among
    a thousand values that alone is above the gate, and over many the FP8 accumulator's 14 bits
    flip more than a float32 accumulator's, so that mxfp4 is held to the derivation itself.
    """
    if a_format == "bf16":
        return stage_tolerance(a_format, torch.bfloat16, PROMOTED, numel=numel,
                               accumulator_bits=TENSOR_CORE_BITS)
    derived = requantisation_error(a_format, NOISE, numel)
    return derived if a_format == "mxfp4" or numel < FEW else min(END_TO_END_GATE, derived)


def layer_tolerance(a_format: str, out_dtype: torch.dtype, inputs: MoEInputs,
                    num_tokens: int) -> float:
    """Stage 2's rounding and the flips of the intermediate, which arrive with their relative size
    (twice that where the rows of a token cancel)."""
    top_k, weights = inputs.topk_ids.shape[1], inputs.weights
    numel = num_tokens * top_k * weights.intermediate_size
    stage_two = stage_tolerance(a_format, out_dtype, PROMOTED, top_k=top_k, cancellation=2.0,
                                numel=num_tokens * weights.hidden_size,
                                accumulator_bits=TENSOR_CORE_BITS)
    flips = requantisation_error(None if a_format == "bf16" else a_format, NOISE, numel)
    derived = math.hypot(stage_two, 2 * flips)
    return derived if a_format == "mxfp4" or numel < FEW else min(END_TO_END_GATE, derived)


class Case:
    """A problem, its prepared weights and its reference."""

    def __init__(self, inputs: MoEInputs, a_format: str, **options: Any) -> None:
        self.inputs, self.a_format, self.options = inputs, a_format, options
        self.prepared = replace(inputs, weights=prepared(inputs.weights))
        self.expected = reference(inputs, a_format, **options)

    def check(self, num_tokens: int, what: str, *, out_dtype: torch.dtype = torch.bfloat16,
              combine: Combine = Combine.REDUCE) -> None:
        y = run(first_tokens(self.prepared, num_tokens), self.a_format, out_dtype=out_dtype,
                combine=combine, **self.options)
        assert y.dtype == out_dtype
        tolerance = layer_tolerance(self.a_format, out_dtype, self.inputs, num_tokens)
        assert_close_relative(y, self.expected[:num_tokens], tolerance, f"{what}, T = {num_tokens}")


@functools.cache
def layer(case: str, a_format: str, device: torch.device) -> Case:
    shape, on_input = CASES[case]
    inputs = random_moe_problem(shape, max(TOKENS), device=device)
    return Case(inputs, a_format, apply_router_weight_on_input=on_input)


# --- numbers ------------------------------------------------------------------------------------


@cases
@tiles
def test_every_tile_at_every_token_count(
    a_format: str, tile: str, case: str, device: torch.device,
) -> None:
    problem = layer(case, a_format, device)
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        for num_tokens in TOKENS:
            problem.check(num_tokens, tile)


@cases
@formats
def test_the_chosen_tile_at_every_token_count(
    a_format: str, case: str, device: torch.device,
) -> None:
    """What the dispatcher takes by itself, and that it takes this backend."""
    problem = layer(case, a_format, device)
    for num_tokens in TOKENS:
        with mxpert.override():
            tokens = first_tokens(problem.prepared, num_tokens)
            chosen = mxpert.explain(mxpert.fused_moe, tokens.x, tokens.weights, tokens.topk_ids,
                                    tokens.topk_weights, activation=tokens.activation,
                                    activation_format=a_format)
            assert "backend: hopper" in str(chosen)
            problem.check(num_tokens, str(chosen))


@pytest.mark.parametrize("combine", [Combine.REDUCE, Combine.ATOMIC], ids=lambda c: c.value)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", ["decode16", "prefill64"])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
def test_output_dtypes_and_combines(
    a_format: str, tile: str, out_dtype: torch.dtype, combine: Combine, device: torch.device,
) -> None:
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        for num_tokens in (7, 300):
            layer("gpt_oss", a_format, device).check(num_tokens, tile, out_dtype=out_dtype,
                                                     combine=combine)


SHAPES = [(2048, 384), (2880, 2880), (4096, 1536), (5120, 704), (2048, 1408), (7168, 512)]


@pytest.mark.parametrize("hidden, inner", SHAPES, ids=[f"H{h}_F{f}" for h, f in SHAPES])
@formats
def test_shapes_never_tuned(a_format: str, hidden: int, inner: int, device: torch.device) -> None:
    shape = MoEShape(hidden, inner, 4, 2, SwiGLU(), GateUpOrder.INTERLEAVED, True)
    problem = Case(random_moe_problem(shape, 777, device=device), a_format)
    for num_tokens in (1, 33, 777):
        problem.check(num_tokens, "shape")


def half_to_one(inputs: MoEInputs) -> MoEInputs:
    """Every other token has expert 2 in its first slot."""
    ids = inputs.topk_ids.clone()
    tokens = ids[::2]
    swap = tokens == 2  # ids stay distinct
    tokens[swap] = tokens[:, :1].expand_as(tokens)[swap]
    tokens[:, 0] = 2
    return replace(inputs, topk_ids=ids)


@pytest.mark.parametrize("num_tokens", [17, 300, 2049])
@pytest.mark.parametrize("routing", [*Routing, "half_to_one"],
                         ids=lambda r: getattr(r, "value", r))
@formats
def test_routing(
    a_format: str, routing: Routing | str, num_tokens: int, device: torch.device,
) -> None:
    """Skewed, with empty experts, everything to the same experts."""
    kind = routing if isinstance(routing, Routing) else Routing.UNIFORM
    inputs = random_moe_problem(SMALL, num_tokens, routing=kind, device=device)
    if routing == "half_to_one":
        inputs = half_to_one(inputs)
        assert (inputs.topk_ids == 2).any(1).float().mean() >= 0.5
    Case(inputs, a_format).check(num_tokens, str(routing))


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
@pytest.mark.parametrize("tile", ["decode8", "prefill64"])
@formats
def test_expert_map_and_local_tokens(
    a_format: str, tile: str, num_local: int, device: torch.device,
) -> None:
    """Foreign, negative and absurd ids; a map with −1; a token count on the device."""
    inputs = random_moe_problem(SMALL, 333, device=device)
    generator = torch.Generator(device).manual_seed(4)
    ids = torch.randint(-3, 40, (333, 3), generator=generator, device=device).int()
    ids[0] = torch.tensor([(1 << 31) - 1, -(1 << 31), 5], device=device)
    expert_map = torch.randint(-9, 9, (32,), generator=generator, device=device).int()
    options = dict(expert_map=expert_map, num_local_tokens=torch.tensor(
        [num_local], dtype=torch.int32, device=device))
    problem = Case(replace(inputs, topk_ids=ids), a_format, **options)
    with mxpert.override(config=tiles_of(a_format)[tile], backend="hopper"):
        problem.check(333, "expert map")
        y = run(problem.prepared, a_format, **options)
    assert not y[min(num_local, 333):].any()
    assert_exact(y == 0, problem.expected == 0, "tokens without experts")


# --- stages -------------------------------------------------------------------------------------


def make_plan(inputs: MoEInputs, unit: int) -> RoutingPlan:
    with mxpert.override():  # this backend has no kernel for it
        return mxpert.make_routing_plan(inputs.topk_ids, inputs.topk_weights,
                                        routing_block_m=unit,
                                        num_experts=inputs.weights.num_experts)


def take(h: torch.Tensor | MXTensor, rows: torch.Tensor) -> torch.Tensor | MXTensor:
    if isinstance(h, MXTensor):
        return replace(h, qdata=h.qdata[rows], scale=h.scale[rows])
    return h[rows]


@pytest.mark.parametrize("unit", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("case", ["gpt_oss", "clamped_on_input"])
@formats
def test_stages(a_format: str, case: str, unit: int, device: torch.device) -> None:
    """Each stage against the reference of that stage, for every tile that divides the unit."""
    problem = layer(case, a_format, device)
    on_input = CASES[case][1]
    for name, config in tiles_of(a_format).items():
        if unit % config.block_m:
            continue
        for num_tokens in (5, 333):
            check_stages(first_tokens(problem.prepared, num_tokens), problem.inputs.weights,
                         a_format, unit, config, on_input, f"{name}, T = {num_tokens}")


def check_stages(inputs: MoEInputs, row_major: MoEWeights, a_format: str, unit: int,
                 config: GemmConfig, on_input: bool, what: str) -> None:
    plan = make_plan(inputs, unit)
    places = plan.slot_rows.flatten().long()
    stage_one = dict(activation=inputs.activation, activation_format=a_format,
                     apply_router_weight_on_input=on_input)
    stage_two = dict(combine=Combine.FLAT, apply_router_weight_on_input=on_input)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected_h = mxpert.moe_gate_up(inputs.x, row_major, plan, **stage_one)
    with mxpert.override(backend="hopper", config=config):
        h = mxpert.moe_gate_up(inputs.x, inputs.weights, plan, **stage_one)
        y = mxpert.moe_down(h, inputs.weights, plan, **stage_two)
        summed = mxpert.moe_down(h, inputs.weights, plan, apply_router_weight_on_input=on_input,
                                 out_dtype=torch.float32)
    numel = len(places) * row_major.intermediate_size
    assert_close_relative(take(h, places), take(expected_h, places),
                          intermediate_tolerance(a_format, numel), f"stage 1, {what}")
    with mxpert.override(backend="reference", config=FLOAT64):
        rows = mxpert.moe_down(h, row_major, plan, out_dtype=torch.float64, **stage_two)[places]
    assert_close_relative(
        y[places], rows, stage_tolerance(a_format, torch.bfloat16, PROMOTED, numel=rows.numel(),
                                         accumulator_bits=TENSOR_CORE_BITS), f"stage 2, {what}")
    assert_close_relative(summed, rows.unflatten(0, (-1, plan.top_k)).sum(1), STAGE_GATE,
                          f"stage 2 summed, {what}")


# --- exact arithmetic ---------------------------------------------------------------------------


def largest_window(x: torch.Tensor, weights: MXTensor) -> float:
    """The most that 256 products of any row can sum to, in units of the smallest product."""
    w = dequantize_blocks(weights, torch.float64).abs()
    x = x.double().abs()
    unit = x[x > 0].min() * w[w > 0].min()
    windows = torch.nn.functional.pad(w, (0, -w.shape[-1] % PROMOTED)).unflatten(
        -1, (-1, PROMOTED)).sum(-1)
    return (x.max() * windows.max() / unit).item()


@tiles
def test_exact_problem_is_bit_identical(a_format: str, tile: str, device: torch.device) -> None:
    """All three formats are exact here, FP8 tensor cores included.

    x holds integers up to 4, h a few powers of two: both are e4m3 numbers under one scale per row,
    so the low parts are zero, and no 32-block is rebased out of e4m3's range. Tensor cores align
    the products of an instruction and the accumulator to the largest one and keep 13 bits below
    it: nothing is lost while 256 products, after which the sum goes to float32, cannot exceed 2^13
    units. That is asserted; float32 does the rest exactly.
    """
    for seed, (shape, on_input) in enumerate(CASES.values()):
        inputs = exact_moe_problem(shape, 333, seed=seed, device=device,
                                   apply_router_weight_on_input=on_input)
        assert largest_window(inputs.x, inputs.weights.gate_up_proj) <= 2**13
        options = dict(apply_router_weight_on_input=on_input)
        with mxpert.override(backend="reference", config=FLOAT64):
            expected = run(inputs, a_format, **options)
        packed = replace(inputs, weights=prepared(inputs.weights))
        with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
            for num_tokens in (3, 333):
                assert_exact(run(first_tokens(packed, num_tokens), a_format, **options),
                             expected[:num_tokens], tile, ignore_zero_sign=True)


@pytest.mark.parametrize("tile", ["decode8", "prefill64"])
@formats
def test_zero_blocks_under_any_scale(a_format: str, tile: str, device: torch.device) -> None:
    """A block of zeros may carry any scale byte; the layer must not see which."""
    inputs = random_moe_problem(SMALL, 33, device=device)
    plain, odd = [], []
    for part in (inputs.weights.gate_up_proj, inputs.weights.down_proj):
        codes = unpack_codes(part.qdata).unflatten(-1, (-1, 32))
        codes[..., ::3, :] &= 8
        qdata = pack_codes(codes.flatten(-2))
        scale = part.scale.clone()
        scale[..., ::3] = torch.arange(scale[..., ::3].numel(), device=device).reshape(
            scale[..., ::3].shape) % 255
        plain.append(replace(part, qdata=qdata))
        odd.append(replace(part, qdata=qdata, scale=scale))
    with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
        results = [run(replace(inputs, weights=prepared(MoEWeights(
            *parts, gate_up_order=inputs.weights.gate_up_order))), a_format)
            for parts in (plain, odd)]
    assert_exact(results[1], results[0], "zero blocks", ignore_zero_sign=True)


# --- faults stay where they are -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("tile", ["decode8", "prefill64"])
@cases
@formats
def test_a_bad_token_spoils_itself_alone(
    a_format: str, case: str, tile: str, bad: float, device: torch.device,
) -> None:
    clean = first_tokens(layer(case, a_format, device).prepared, 65)
    x = clean.x.clone()
    x[7, 100] = bad
    options = dict(apply_router_weight_on_input=CASES[case][1])
    with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
        expected = run(clean, a_format, **options)
        y = run(replace(clean, x=x), a_format, **options)
    others = torch.arange(65, device=device) != 7
    assert_exact(y[others], expected[others], "other tokens")
    if math.isnan(bad):  # an infinity may end in the limit of an activation
        assert y[7].isnan().all(), "a NaN must not turn into plausible numbers"


def test_wide_range_rows_fall_back(device: torch.device) -> None:
    """Weights that do not fold keep their layout, and another backend serves them."""
    inputs = random_moe_problem(SMALL, 65, device=device)
    part = inputs.weights.gate_up_proj
    codes, scale = unpack_codes(part.qdata), part.scale.clone()
    codes[3, 11, 32:64] = 3
    scale[3, 11, 1] = 60
    wide = replace(inputs, weights=replace(inputs.weights, gate_up_proj=replace(
        part, qdata=pack_codes(codes), scale=scale)))
    weights = wide.weights.prepare(device=device)
    assert weights.layout is Layout.ROW_MAJOR
    assert weights.fold_certificates is not None
    assert [c.total_outside for c in weights.fold_certificates] == [1, 0]
    packed = replace(wide, weights=weights)
    with pytest.raises(mxpert.UnsupportedError, match="HOPPER_FRAGMENT"):
        run(packed, "bf16")
    expected = reference(wide, "bf16")
    with mxpert.override():
        chosen = mxpert.explain(mxpert.fused_moe, packed.x, weights, packed.topk_ids,
                                packed.topk_weights, activation=packed.activation)
        assert "backend: triton" in str(chosen)
        assert_close_relative(run(packed, "bf16"), expected, END_TO_END_GATE, "fallback")


# --- determinism, graphs, compilation -----------------------------------------------------------


@tiles
def test_repeats_are_bit_identical(a_format: str, tile: str, device: torch.device) -> None:
    inputs = first_tokens(layer("gpt_oss", a_format, device).prepared, 300)
    with mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]):
        first = run(inputs, a_format, out_dtype=torch.float32)
        for _ in range(10):
            assert_exact(run(inputs, a_format, out_dtype=torch.float32), first, tile)


@pytest.mark.parametrize("num_tokens", [1, 33, 777])
@formats
def test_graph_replay_equals_eager(a_format: str, num_tokens: int, device: torch.device) -> None:
    """Captured once, replayed with other tokens and other routing."""
    weights = layer("gpt_oss", a_format, device).prepared.weights
    shape = CASES["gpt_oss"][0]
    batches = [random_moe_problem(shape, num_tokens, seed=seed, routing=routing, device=device)
               for seed, routing in enumerate((Routing.UNIFORM, Routing.ZIPF, Routing.ONE_EXPERT))]
    static = replace(batches[0], weights=weights, x=batches[0].x.clone(),
                     topk_ids=batches[0].topk_ids.clone(),
                     topk_weights=batches[0].topk_weights.clone())
    run(static, a_format)  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static, a_format)
    for batch in batches[1:] + batches[:1]:
        for name in ("x", "topk_ids", "topk_weights"):
            getattr(static, name).copy_(getattr(batch, name))
        captured.fill_(float("nan"))
        graph.replay()
        assert_exact(captured, run(replace(batch, weights=weights), a_format), "replay")


@pytest.mark.parametrize("num_tokens", [1, 777])
@formats
def test_no_host_synchronisation(a_format: str, num_tokens: int, device: torch.device) -> None:
    inputs = first_tokens(layer("gpt_oss", a_format, device).prepared, num_tokens)
    run(inputs, a_format)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, a_format)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("a_format", ["bf16", "mxfp8"])
def test_torch_compile_equals_eager(a_format: str, device: torch.device) -> None:
    inputs = first_tokens(layer("gpt_oss", a_format, device).prepared, 33)

    weights, ids, topk_weights = inputs.weights, inputs.topk_ids, inputs.topk_weights
    activation = inputs.activation

    def step(x: torch.Tensor) -> torch.Tensor:
        return mxpert.fused_moe(x * 2, weights, ids, topk_weights, activation=activation,
                                activation_format=a_format) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert_exact(compiled(inputs.x), step(inputs.x), "compiled")


# --- preparation --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_prepare_round_trip(case: str, device: torch.device) -> None:
    weights = layer(case, "bf16", device).inputs.weights
    back = prepared(weights).unprepare()
    for name in ("gate_up_proj", "down_proj"):
        assert_exact(getattr(back, name), getattr(weights, name), name)
    if weights.gate_up_bias is not None:
        assert back.gate_up_bias is not None
        assert_exact(back.gate_up_bias, weights.gate_up_bias, "bias")
    assert back.gate_up_order is weights.gate_up_order


def test_a_large_layer_is_prepared_in_two_seconds(device: torch.device) -> None:
    if torch.cuda.mem_get_info(device)[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    weights = random_moe_problem(MODEL_SHAPES["gpt-oss-120b"], 1, device=device).weights
    with nan_filled_scratch():
        prepared(replace(weights, gate_up_proj=weights.gate_up_proj[:2],
                         down_proj=weights.down_proj[:2], gate_up_bias=None, down_bias=None))
    torch.use_deterministic_algorithms(False)  # no filling of scratch while the clock runs
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = weights.prepare(device=device)
    torch.cuda.synchronize(device)
    assert time.perf_counter() - start < 2.0
    assert result.layout is Layout.HOPPER_FRAGMENT
    assert result.nbytes <= 1.03 * weights.nbytes
