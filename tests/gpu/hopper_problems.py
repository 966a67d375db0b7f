"""Problems of the Hopper GPU tests: layers with their float64 reference, tiles, tolerances.

The reference runs on the GPU on identically quantised operands, once per problem: a token's result
does not depend on the others, so that smaller batches are compared with its first rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights, ReferenceConfig
from mxpert.formats.tensor import Layout
from mxpert.formats.token import FP8_TOKEN
from mxpert.problem import (
    ACTIVATION_FORMATS,
    ClampedSiLU,
    SiLU,
    SiTUv2,
    SwiGLU,
)
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    FP8_SUM_BITS,
    FP8_SUM_TERMS,
    INTERMEDIATE_NOISE,
    assert_close_relative,
    requantisation_error,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from mxpert.testing.races import hopper_tiles

heuristics = pytest.importorskip("mxpert.backends.hopper.heuristics", reason="needs Gluon")

TOKENS = (1, 2, 7, 17, 33, 65, 129, 300, 777, 2049)
FLOAT64 = ReferenceConfig(torch.float64)
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

tiles_of = hopper_tiles
TILES = [(a_format, name) for a_format in ACTIVATION_FORMATS for name in tiles_of(a_format)]

cases = pytest.mark.parametrize("case", CASES)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
tiles = pytest.mark.parametrize("a_format, tile", TILES, ids=["-".join(t) for t in TILES])


def require_hopper(device: torch.device) -> None:
    """Skip where these kernels cannot run."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")


def prepared(weights: MoEWeights) -> MoEWeights:
    result = weights.prepare(device=weights.device)
    assert result.layout is Layout.HOPPER_FRAGMENT
    return result


def first_tokens(inputs: MoEInputs, count: int) -> MoEInputs:
    return replace(inputs, x=inputs.x[:count], topk_ids=inputs.topk_ids[:count],
                   topk_weights=inputs.topk_weights[:count])


def run(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    return mxpert.fused_moe(inputs.x, inputs.weights, inputs.topk_weights, inputs.topk_ids,
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
    flip more than a float32 accumulator's, so that mxfp4 is held to the derivation itself. That of
    fp8_token is bfloat16.
    """
    if a_format in ("bf16", FP8_TOKEN):
        return stage_tolerance(a_format, torch.bfloat16, FP8_SUM_TERMS, numel=numel,
                               accumulator_bits=FP8_SUM_BITS)
    derived = requantisation_error(a_format, INTERMEDIATE_NOISE, numel)
    return derived if a_format == "mxfp4" or numel < FEW else min(END_TO_END_GATE, derived)


def layer_tolerance(a_format: str, out_dtype: torch.dtype, inputs: MoEInputs,
                    num_tokens: int) -> float:
    """Stage 2's rounding and the flips of the intermediate, which arrive with their relative size
    (twice that where the rows of a token cancel)."""
    top_k, weights = inputs.topk_ids.shape[1], inputs.weights
    numel = num_tokens * top_k * weights.intermediate_size
    stage_two = stage_tolerance(a_format, out_dtype, FP8_SUM_TERMS, top_k=top_k, cancellation=2.0,
                                numel=num_tokens * weights.hidden_size,
                                accumulator_bits=FP8_SUM_BITS)
    flips = requantisation_error(None if a_format == "bf16" else a_format, INTERMEDIATE_NOISE,
                                 numel, row=weights.intermediate_size)
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
