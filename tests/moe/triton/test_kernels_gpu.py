"""The MoE kernels on a GPU: model shapes, tiles, graphs, repeats.

The float64 oracle runs on the GPU, too, on a sample of tokens and on the experts of these tokens. A
token's result does not depend on other tokens in its blocks.

A layer is checked in three steps: stage 1 against the oracle value by value, stage 2 against the
oracle on the rows that stage 1 stored, and the fused layer against the sum of stage 2's rows bit by
bit. If the sample is large enough for flipped codes to average out, the whole layer must also meet
the end-to-end gate.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights
from mxpert.configs import GemmConfig, MoEConfig, ReferenceConfig
from mxpert.core.problem import ACTIVATION_FORMATS, ACTIVATIONS
from mxpert.formats import MXTensor
from mxpert.moe.triton import kernels as moe_kernels
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    STAGE_GATE,
    assert_close_relative,
    assert_exact,
    effective_numel,
    end_to_end_tolerance,
    stage_tolerance,
)
from mxpert.testing.problems import MODEL_SHAPES, MoEInputs, MoEShape, random_moe_problem
from support.exact import exact_moe_problem
from support.layers import explain_layer, plan_of, run_layer, take
from support.poison import nan_filled_scratch
from support.rounding import Rounded, assert_rounded, gate_up_oracle

TOKENS = (1, 3, 17, 128, 777, 4096)
SAMPLE = (0, 1, 2, 9, 16, 90, 127, 400, 776, 1500, 3000, 4095)
"""Tokens that are compared: the first and the last of every batch, and some between."""
ENOUGH = 7
"""Number of tokens of a model's shape (at least 100,000 values) from which flips average out."""
FLOAT64 = ReferenceConfig(torch.float64)
SMALL = MoEShape(hidden_size=704, intermediate_size=384, num_experts=9, top_k=3, has_bias=True)

EXACT_FORMATS = ("bf16", "mxfp8", "mxfp4")
"""Formats with power-of-two scales, in which an exact problem stays exact."""

formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)


@pytest.fixture(autouse=True)
def triton_only() -> Iterator[None]:
    """Only the Triton backend may serve calls; scratch and outputs start as NaN."""
    with mxpert.override(backend="triton"), nan_filled_scratch():
        yield


@pytest.fixture(autouse=True, scope="module")
def _free_models() -> Iterator[None]:
    """Free the cached model after this file's tests."""
    yield
    model_inputs.cache_clear()
    torch.cuda.empty_cache()


@functools.lru_cache(maxsize=1)
def model_inputs(name: str, device: torch.device) -> MoEInputs:
    """A model's largest batch; smaller batches are its first tokens. One model is cached."""
    model_inputs.cache_clear()  # the last one goes before the next one comes
    return random_moe_problem(name, max(TOKENS), device=device)


def choose(inputs: MoEInputs, tokens: slice | torch.Tensor) -> MoEInputs:
    return replace(
        inputs,
        x=inputs.x[tokens].contiguous(),
        topk_ids=inputs.topk_ids[tokens].contiguous(),
        topk_weights=inputs.topk_weights[tokens].contiguous(),
    )


def place(h: torch.Tensor | MXTensor, rows: torch.Tensor, size: int) -> torch.Tensor | MXTensor:
    """Place the rows of `h` at indices `rows` of `size` rows; other rows are zero."""
    if isinstance(h, MXTensor):
        return replace(h, qdata=place(h.qdata, rows, size), scale=place(h.scale, rows, size))
    placed = h.new_zeros((size, h.shape[1]))
    placed[rows] = h
    return placed


def join(parts: list[torch.Tensor | MXTensor]) -> torch.Tensor | MXTensor:
    first = parts[0]
    if isinstance(first, MXTensor):
        return replace(
            first,
            qdata=torch.cat([part.qdata for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
        )
    return torch.cat(parts)


def down_oracle(inputs: MoEInputs, h: torch.Tensor | MXTensor, a_format: str) -> torch.Tensor:
    """Stage 2's weighted rows by (token, slot) from `h` [T · k, F], float64 [T · k, H]."""
    with mxpert.override(backend="reference", config=FLOAT64):
        plan = plan_of(inputs, 1)
        places = plan.slot_rows.flatten().long()
        return mxpert.moe_down(
            place(h, places, plan.capacity),
            inputs.weights,
            plan,
            activation_format=a_format,
            combine=Combine.FLAT,
            out_dtype=torch.float64,
        )[places]


def run(
    inputs: MoEInputs,
    a_format: str,
    *,
    config: MoEConfig | None = None,
    combine: Combine = Combine.REDUCE,
) -> torch.Tensor:
    with mxpert.override(backend="triton", config=config):
        return run_layer(inputs, combine=combine, activation_format=a_format)


def chosen_config(inputs: MoEInputs, a_format: str) -> MoEConfig:
    """The config that the dispatcher chooses for the layer."""
    return explain_layer(inputs, activation_format=a_format).resolution.config


def run_stages(
    inputs: MoEInputs, a_format: str, config: MoEConfig
) -> tuple[torch.Tensor | MXTensor, torch.Tensor, RoutingPlan]:
    """Run both stages as the layer does; return stage 1's and stage 2's FLAT rows, sorted."""
    with mxpert.override(backend="triton", config=config):
        plan = plan_of(inputs, config.routing_block_m)
        h = mxpert.moe_gate_up(
            inputs.x, inputs.weights, plan, activation=inputs.activation, activation_format=a_format
        )
        flat = mxpert.moe_down(
            h, inputs.weights, plan, activation_format=a_format, combine=Combine.FLAT
        )
    return h, flat, plan


def summed(flat: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """REDUCE of FLAT rows: sum in float32 in slot order, then round."""
    total = torch.zeros((plan.num_tokens, flat.shape[1]), device=flat.device)
    for rows in plan.slot_rows.long().unbind(1):
        total += flat[rows].float()
    return total.to(flat.dtype)


def cancellation(rows: torch.Tensor, top_k: int) -> float:
    """``√Σ‖row‖² / ‖Σ row‖``, at least 1: size of the summands relative to the sum."""
    return max(1.0, (rows.norm() / rows.unflatten(0, (-1, top_k)).sum(1).norm()).item())


def check_stage_one(
    h: torch.Tensor | MXTensor,
    oracle: Rounded,
    a_format: str,
    hidden_size: int,
    what: str,
    *,
    gate: bool,
) -> None:
    """Check stage 1 value by value, and with `gate` (enough values) also in relative L2."""
    assert_rounded(h, oracle, f"{what}, stage 1")
    if gate:
        h_dtype = None if isinstance(h, MXTensor) else torch.bfloat16
        assert_close_relative(
            h,
            oracle.round(a_format),
            stage_tolerance(a_format, h_dtype, hidden_size, numel=oracle.values.numel()),
            f"{what}, stage 1",
        )


def check_stage_two(
    flat: torch.Tensor, expected: torch.Tensor, a_format: str, intermediate_size: int, what: str
) -> None:
    tolerance = stage_tolerance(
        a_format, flat.dtype, intermediate_size, numel=effective_numel(expected)
    )
    assert tolerance <= STAGE_GATE
    assert_close_relative(flat, expected, tolerance, f"{what}, stage 2")


def check_end_to_end(
    y: torch.Tensor, rows: torch.Tensor, a_format: str, weights: MoEWeights, what: str
) -> None:
    """Check a layer's output against the oracle's weighted rows [T · k, H]."""
    top_k = len(rows) // len(y)
    tolerance = end_to_end_tolerance(
        a_format,
        y.dtype,
        weights.hidden_size,
        weights.intermediate_size,
        top_k=top_k,
        numel=y.numel(),
        cancellation=cancellation(rows, top_k),
    )
    assert tolerance <= END_TO_END_GATE
    assert_close_relative(y, rows.unflatten(0, (-1, top_k)).sum(1), tolerance, f"{what}, layer")


@formats
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_model_shape(name: str, a_format: str, device: torch.device) -> None:
    """Runs every batch size; the oracle dequantises each expert once for all of them."""
    everything = model_inputs(name, device)
    weights, top_k = everything.weights, everything.topk_ids.shape[1]
    sample = choose(everything, torch.tensor(SAMPLE, device=device))
    oracle = gate_up_oracle(sample, a_format)
    hs, flats, layers, tokens = [], [], [], []
    for num_tokens in TOKENS:
        inputs, what = choose(everything, slice(num_tokens)), f"T = {num_tokens}"
        count = sum(token < num_tokens for token in SAMPLE)
        config = chosen_config(inputs, a_format)
        h, flat, plan = run_stages(inputs, a_format, config)
        y = run(inputs, a_format, config=config)
        assert y.isfinite().all()
        assert_exact(y, summed(flat, plan), f"{what}, layer from its stages")
        rows = plan.slot_rows[list(SAMPLE[:count])].flatten().long()
        part = Rounded(oracle.values[: count * top_k], oracle.slack[: count * top_k])
        check_stage_one(
            take(h, rows), part, a_format, weights.hidden_size, what, gate=count >= ENOUGH
        )
        hs.append(take(h, rows))
        flats.append(flat[rows])
        layers.append(y[list(SAMPLE[:count])])
        tokens.append(torch.arange(count, device=device))
    tokens.append(torch.arange(len(SAMPLE), device=device))
    repeated = choose(sample, torch.cat(tokens))
    *parts, exact = down_oracle(repeated, join([*hs, oracle.round(a_format)]), a_format).split(
        [len(index) * top_k for index in tokens]
    )
    for num_tokens, flat, y, expected in zip(TOKENS, flats, layers, parts, strict=True):
        what = f"T = {num_tokens}"
        check_stage_two(flat, expected, a_format, weights.intermediate_size, what)
        if len(y) >= ENOUGH:
            check_end_to_end(y, exact[: len(flat)], a_format, weights, what)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("combine", Combine, ids=lambda combine: combine.value)
def test_out_dtypes(combine: Combine, out_dtype: torch.dtype, device: torch.device) -> None:
    """Stage 2 alone: only its output's rounding and accumulation differ."""
    inputs = random_moe_problem(SMALL, 77, device=device)
    top_k, weights = SMALL.top_k, inputs.weights
    h, _, plan = run_stages(inputs, "bf16", chosen_config(inputs, "bf16"))
    rows = plan.slot_rows.flatten().long()
    expected = down_oracle(inputs, take(h, rows), "bf16")
    y = mxpert.moe_down(h, weights, plan, combine=combine, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    flat = combine is Combine.FLAT
    tolerance = stage_tolerance(
        "bf16",
        out_dtype,
        weights.intermediate_size,
        numel=77 * SMALL.hidden_size,
        top_k=top_k if combine is Combine.REDUCE else 1,
        cancellation=1.0 if flat else cancellation(expected, top_k),
    )
    assert_close_relative(
        y[rows] if flat else y,
        expected if flat else expected.unflatten(0, (-1, top_k)).sum(1),
        tolerance,
        "stage 2",
    )


TILES = {
    "small": MoEConfig(16, GemmConfig(16, 32, 64, 4, 2), GemmConfig(16, 64, 64, 4, 2)),
    "wide": MoEConfig(32, GemmConfig(32, 128, 128, 8, 3), GemmConfig(32, 256, 128, 8, 3)),
    "split_k": MoEConfig(
        32, GemmConfig(32, 64, 128, 8, 3, 4, 3), GemmConfig(16, 128, 128, 8, 4, 4, 2)
    ),
    "large": MoEConfig(128, GemmConfig(128, 64, 64, 8, 4, 8), GemmConfig(128, 128, 64, 8, 4, 8)),
    "deep": MoEConfig(64, GemmConfig(64, 64, 256, 8, 2), GemmConfig(64, 64, 256, 8, 2)),
    "small_in_large": MoEConfig(128, GemmConfig(16, 64, 128, 8), GemmConfig(64, 128, 128, 8)),
}
EXACT_CASES = [(tiles, list(ACTIVATIONS)[i % len(ACTIVATIONS)]) for i, tiles in enumerate(TILES)]
EXACT_CASES += [("heuristic", activation) for activation in ACTIVATIONS]


@pytest.mark.parametrize("a_format", EXACT_FORMATS)
@pytest.mark.parametrize("tiles, activation", EXACT_CASES)
def test_exact_problem_is_bit_identical(
    tiles: str, activation: str, a_format: str, device: torch.device
) -> None:
    """Every tile, every activation and every combine; activation code is the same in all tiles."""
    seed = list(ACTIVATIONS).index(activation)
    shape = replace(
        SMALL,
        activation=ACTIVATIONS[activation](),
        has_bias=seed % 2 == 0,
        gate_up_order=list(GateUpOrder)[seed % 3],
    )
    inputs = exact_moe_problem(shape, 333, seed=seed, device=device)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = run_layer(inputs, activation_format=a_format)
    for combine in (Combine.REDUCE, Combine.ATOMIC):
        for _ in range(20):  # repeats also find races, which change bits
            y = run(inputs, a_format, config=TILES.get(tiles), combine=combine)
            assert_exact(y, expected, f"{tiles}, {combine.value}", ignore_zero_sign=True)


@formats
def test_graph_replay_equals_eager(a_format: str, device: torch.device) -> None:
    """A graph is captured once and replayed with other tokens and routing; REDUCE is bit-exact."""
    shape = replace(MODEL_SHAPES["gpt-oss-20b"], num_experts=16)
    for num_tokens in (1, 17, 777):
        first, second = (
            random_moe_problem(shape, num_tokens, seed=seed, device=device) for seed in (0, 1)
        )
        second = replace(second, weights=first.weights)
        static = replace(
            first,
            x=first.x.clone(),
            topk_ids=first.topk_ids.clone(),
            topk_weights=first.topk_weights.clone(),
        )
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(static, a_format)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(static, a_format)
        for inputs in (second, first):
            for name in ("x", "topk_ids", "topk_weights"):
                getattr(static, name).copy_(getattr(inputs, name))
            graph.replay()
            assert_exact(captured, run(inputs, a_format), f"replay, T = {num_tokens}")


def test_weights_beyond_4_gib(device: torch.device) -> None:
    """The last expert of a tensor above 2^32 bytes gives the same result as a copy of it."""
    shape = MoEShape(4096, 2048, 600, 1)  # gate/up codes: 600 · 4096 · 2048 bytes = 4.7 GiB
    inputs = random_moe_problem(shape, 8, device=device)
    weights = inputs.weights
    assert weights.gate_up_proj.qdata.numel() > 2**32
    last = replace(
        weights, gate_up_proj=weights.gate_up_proj[-1:], down_proj=weights.down_proj[-1:]
    )
    ids = torch.zeros_like(inputs.topk_ids)
    # One config for both: fewer experts would get more K splits and another summation order.
    config = MoEConfig(16, GemmConfig(16, 64, 128, 8, 4), GemmConfig(16, 128, 128, 8, 4))
    alone, among = (
        run(replace(inputs, weights=w, topk_ids=i), "bf16", config=config)
        for w, i in ((last, ids), (weights, ids + 599))
    )
    assert_exact(among, alone, "last expert")


def test_compile_count_is_constant(device: torch.device) -> None:
    """After the first model, launches for other models compile nothing."""
    config = MoEConfig(16, GemmConfig(16, 64, 128, 8, 4), GemmConfig(16, 128, 128, 8, 4))
    kernels = (moe_kernels._moe_gate_up_kernel, moe_kernels._moe_down_kernel)
    counts = []
    token_counts = itertools.cycle((1, 2, 3, 5, 8, 16))
    for shape, num_tokens in zip(MODEL_SHAPES.values(), token_counts, strict=False):
        shape = replace(
            shape, num_experts=shape.top_k + 3, has_bias=False, activation=mxpert.SiLU()
        )
        run(random_moe_problem(shape, num_tokens, device=device), "bf16", config=config)
        counts.append(
            [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
        )
    assert counts == counts[:1] * len(counts)
