"""Tolerances of the Hopper MoE kernels, for tests and proofs that share them."""

from __future__ import annotations

import math

import torch

from mxpert.formats.token import FP8_TOKEN
from mxpert.testing.numerics import (
    END_TO_END_GATE,
    FP8_SUM_BITS,
    FP8_SUM_TERMS,
    INTERMEDIATE_NOISE,
    requantisation_error,
    stage_tolerance,
)
from mxpert.testing.problems import MoEInputs

FEW = 1 << 14
"""Intermediate values below which single flips decide."""


def intermediate_tolerance(a_format: str, numel: int) -> float:
    """Relative L2 of stage 1's output: rounding, and codes that accumulator noise pushes over a
    boundary.

    The gate holds where flips average out. A single flip of an e2m1 code is half of a value: among
    a thousand values that alone is above the gate, and over many the FP8 accumulator's 14 bits
    flip more than a float32 accumulator's. mxfp4 is therefore held to the derivation itself. The
    intermediate of fp8_token is bfloat16.
    """
    if a_format in ("bf16", FP8_TOKEN):
        return stage_tolerance(
            a_format, torch.bfloat16, FP8_SUM_TERMS, numel=numel, accumulator_bits=FP8_SUM_BITS
        )
    derived = requantisation_error(a_format, INTERMEDIATE_NOISE, numel)
    return derived if a_format == "mxfp4" or numel < FEW else min(END_TO_END_GATE, derived)


def down_tolerance(
    a_format: str, out_dtype: torch.dtype, inputs: MoEInputs, num_tokens: int
) -> float:
    """Relative L2 of stage 2 on a given intermediate; the rows of a token may cancel by half."""
    return stage_tolerance(
        a_format,
        out_dtype,
        FP8_SUM_TERMS,
        top_k=inputs.topk_ids.shape[1],
        cancellation=2.0,
        numel=num_tokens * inputs.weights.hidden_size,
        accumulator_bits=FP8_SUM_BITS,
    )


def layer_tolerance(
    a_format: str, out_dtype: torch.dtype, inputs: MoEInputs, num_tokens: int
) -> float:
    """Relative L2 of a layer: stage 2's rounding and the flips of the intermediate, which arrive
    with their relative size (twice that where the rows of a token cancel)."""
    inner = inputs.weights.intermediate_size
    numel = num_tokens * inputs.topk_ids.shape[1] * inner
    flips = requantisation_error(
        None if a_format == "bf16" else a_format, INTERMEDIATE_NOISE, numel, row=inner
    )
    derived = math.hypot(down_tolerance(a_format, out_dtype, inputs, num_tokens), 2 * flips)
    return derived if a_format == "mxfp4" or numel < FEW else min(END_TO_END_GATE, derived)
