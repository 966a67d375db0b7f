"""MoE problems of the Hopper GPU tests: layers with float64 reference, tiles, tolerances.

The reference runs on the GPU on the same quantised operands, once per problem. A token's result
does not depend on other tokens, so smaller batches are compared with its first rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, MoEWeights
from mxpert.configs import ReferenceConfig
from mxpert.core.problem import ACTIVATION_FORMATS, ClampedSiLU, SiLU, SiTUv2, SwiGLU
from mxpert.formats.tensor import Layout
from mxpert.testing.numerics import assert_close_relative
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.hopper import layer_tolerance
from support.layers import run_layer
from support.races import hopper_tiles

heuristics = pytest.importorskip("mxpert.moe.hopper.config", reason="needs Gluon")

TOKENS = (1, 2, 7, 17, 33, 65, 129, 300, 777, 2049)
FLOAT64 = ReferenceConfig(torch.float64)

SMALL = MoEShape(hidden_size=704, intermediate_size=384, num_experts=9, top_k=3)
"""Odd numbers of row units (11) and depth units (3), and a depth of 5.5 units."""

CASES: dict[str, tuple[MoEShape, bool]] = {
    "gpt_oss": (
        replace(SMALL, activation=SwiGLU(), gate_up_order=GateUpOrder.INTERLEAVED, has_bias=True),
        False,
    ),
    "deepseek": (replace(SMALL, activation=SiLU()), False),
    "clamped_on_input": (
        replace(
            SMALL, activation=ClampedSiLU(), has_bias=True, gate_up_order=GateUpOrder.INTERLEAVED_16
        ),
        True,
    ),
    "situ": (replace(SMALL, activation=SiTUv2(), gate_up_order=GateUpOrder.INTERLEAVED), False),
}
"""Layers for all activations, gate/up orders, biases, and both places of the routing weight."""

tiles_of = hopper_tiles
TILES = [(a_format, name) for a_format in ACTIVATION_FORMATS for name in tiles_of(a_format)]

cases = pytest.mark.parametrize("case", CASES)
formats = pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
tiles = pytest.mark.parametrize("a_format, tile", TILES, ids=["-".join(t) for t in TILES])


def prepared(weights: MoEWeights, *, keep_fp8: bool = False) -> MoEWeights:
    result = weights.prepare(device=weights.device, keep_fp8=keep_fp8)
    layout = Layout.HOPPER_FRAGMENT_FP8 if keep_fp8 else Layout.HOPPER_FRAGMENT
    assert result.layout is layout
    return result


def first_tokens(inputs: MoEInputs, count: int) -> MoEInputs:
    return replace(
        inputs,
        x=inputs.x[:count],
        topk_ids=inputs.topk_ids[:count],
        topk_weights=inputs.topk_weights[:count],
    )


def run(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    return run_layer(inputs, activation_format=a_format, **options)


def reference(inputs: MoEInputs, a_format: str, **options: Any) -> torch.Tensor:
    """Reference result [T, H] in float64, from ROW_MAJOR weights."""
    with mxpert.override(backend="reference", config=FLOAT64):
        return run(inputs, a_format, out_dtype=torch.float64, **options)


class Case:
    """A problem, its prepared weights and its reference."""

    def __init__(self, inputs: MoEInputs, a_format: str, **options: Any) -> None:
        self.inputs, self.a_format, self.options = inputs, a_format, options
        self.prepared = replace(inputs, weights=prepared(inputs.weights))
        self.expected = reference(inputs, a_format, **options)

    def check(
        self,
        num_tokens: int,
        what: str,
        *,
        out_dtype: torch.dtype = torch.bfloat16,
        combine: Combine = Combine.REDUCE,
    ) -> None:
        y = run(
            first_tokens(self.prepared, num_tokens),
            self.a_format,
            out_dtype=out_dtype,
            combine=combine,
            **self.options,
        )
        assert y.dtype == out_dtype
        tolerance = layer_tolerance(self.a_format, out_dtype, self.inputs, num_tokens)
        assert_close_relative(y, self.expected[:num_tokens], tolerance, f"{what}, T = {num_tokens}")


@functools.cache
def layer(case: str, a_format: str, device: torch.device) -> Case:
    shape, on_input = CASES[case]
    inputs = random_moe_problem(shape, max(TOKENS), device=device)
    return Case(inputs, a_format, apply_router_weight_on_input=on_input)
