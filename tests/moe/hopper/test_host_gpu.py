"""The Hopper backend on a GPU: bad values stay local, fallback, graphs, repeats, preparation."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.core.launch import record_launches
from mxpert.core.target import detect_target
from mxpert.formats import pack_codes, unpack_codes
from mxpert.formats.tensor import Layout
from mxpert.testing.numerics import END_TO_END_GATE, assert_close_relative, assert_exact
from mxpert.testing.problems import MODEL_SHAPES, Routing, random_moe_problem
from support.launches import through_triton
from support.layers import explain_layer
from support.poison import nan_filled_scratch
from tests.moe.hopper.problems import (
    CASES,
    SMALL,
    cases,
    first_tokens,
    formats,
    layer,
    prepared,
    reference,
    run,
    tiles,
    tiles_of,
)

pytestmark = pytest.mark.usefixtures("only_hopper", "nan_scratch")


# --- faults stay where they are -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("tile", ["decode8", "middle"])
@cases
@formats
def test_a_bad_token_spoils_itself_alone(
    a_format: str, case: str, tile: str, bad: float, device: torch.device
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
    assert y[7].isnan().all(), "NaN and infinity must not turn into plausible numbers"


def test_wide_range_rows_fall_back(device: torch.device) -> None:
    """Weights that cannot be folded keep ROW_MAJOR layout, and another backend serves them."""
    inputs = random_moe_problem(SMALL, 65, device=device)
    part = inputs.weights.gate_up_proj
    codes, scale = unpack_codes(part.qdata), part.scale.clone()
    codes[3, 11, 32:64] = 3
    scale[3, 11, 1] = 60
    wide = replace(
        inputs,
        weights=replace(
            inputs.weights, gate_up_proj=replace(part, qdata=pack_codes(codes), scale=scale)
        ),
    )
    weights = wide.weights.prepare(device=device)
    assert weights.layout is Layout.ROW_MAJOR
    assert weights.fold_certificates is not None
    assert [c.total_outside for c in weights.fold_certificates] == [1, 0]
    packed = replace(wide, weights=weights)
    with pytest.raises(mxpert.UnsupportedError, match="HOPPER_FRAGMENT"):
        run(packed, "bf16")
    expected = reference(wide, "bf16")
    with mxpert.override():
        chosen = explain_layer(packed, weights=weights)
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


@tiles
def test_a_gemm_can_be_repeated_alone(a_format: str, tile: str, device: torch.device) -> None:
    """The GEMM resets the counter of its tile scheduler to 0 at the end."""
    inputs = layer("gpt_oss", a_format, device).prepared
    with (
        mxpert.override(backend="hopper", config=tiles_of(a_format)[tile]),
        through_triton(),
        record_launches() as records,
    ):
        run(inputs, a_format)
    launched = [each for each in records if each.launch.kernel.__name__.startswith("_moe_gemm_")]
    assert len(launched) == 2
    for made, tensors, _ in launched:
        out = tensors["out" if "out" in tensors else "out_desc"]
        first = out.clone()
        assert int(tensors["tile_counter"]) == 0
        for _ in range(3):
            out.fill_(float("nan"))
            made(**tensors)
            same = (out == first) | out.isnan()  # padding rows are unwritten or arbitrary
            assert int(tensors["tile_counter"]) == 0
            assert same.all()
            assert (out.isnan() <= first.isnan()).all()


@pytest.mark.parametrize("num_tokens", [1, 33, 777])
@formats
def test_graph_replay_equals_eager(a_format: str, num_tokens: int, device: torch.device) -> None:
    """A graph is captured once and replayed with other tokens and other routing."""
    weights = layer("gpt_oss", a_format, device).prepared.weights
    shape = CASES["gpt_oss"][0]
    batches = [
        random_moe_problem(shape, num_tokens, seed=seed, routing=routing, device=device)
        for seed, routing in enumerate((Routing.UNIFORM, Routing.ZIPF, Routing.ONE_EXPERT))
    ]
    static = replace(
        batches[0],
        weights=weights,
        x=batches[0].x.clone(),
        topk_ids=batches[0].topk_ids.clone(),
        topk_weights=batches[0].topk_weights.clone(),
    )
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
        return (
            mxpert.fused_moe(
                x * 2, weights, topk_weights, ids, activation=activation, activation_format=a_format
            )
            + 1
        )

    compiled = torch.compile(step, fullgraph=True)
    assert_exact(compiled(inputs.x), step(inputs.x), "compiled")


@pytest.mark.parametrize("num_tokens", [1, 65, 2049])
@formats
def test_fewer_sms_give_the_same_bits(a_format: str, num_tokens: int, device: torch.device) -> None:
    """One, half of and all SMs, in decode and prefill; the grids keep to them."""
    inputs = first_tokens(layer("gpt_oss", a_format, device).prepared, num_tokens)
    most = detect_target(device).num_sms
    expected = run(inputs, a_format, num_sms=most)
    for limit in (1, most // 2, most):
        with record_launches() as records:
            actual = run(inputs, a_format, num_sms=limit)
        assert_exact(actual, expected, f"{limit} SMs")
        gemms = [each.launch for each in records if "_gemm_" in each.launch.kernel.__name__]
        assert len(gemms) == 2
        if limit < most:
            assert {each.grid for each in gemms} == {(limit,)}


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
        prepared(
            replace(
                weights,
                gate_up_proj=weights.gate_up_proj[:2],
                down_proj=weights.down_proj[:2],
                gate_up_bias=None,
                down_bias=None,
            )
        )
    torch.use_deterministic_algorithms(False)  # do not time the filling of scratch
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    result = weights.prepare(device=device)
    torch.cuda.synchronize(device)
    assert time.perf_counter() - start < 2.0
    # Scratch beside the result, for gate and up of one expert (2/3 of its weights): eight tensors
    # with one byte a code; two such bytes are one byte of packed weights.
    unpacked = 8 * 2 * (2 / 3) / weights.num_experts
    assert torch.cuda.max_memory_allocated(device) - before < (1.03 + unpacked) * weights.nbytes
    assert result.layout is Layout.HOPPER_FRAGMENT
    assert result.nbytes <= 1.03 * weights.nbytes
