"""Decoding of operands with wide blocks to bfloat16, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mxpert.core.problem import GroupedProblem, Op
from mxpert.core.target import detect_target
from mxpert.formats import MXTensor, ScaleRule, ScaleSpan, dequantize_blocks, quantize_blocks
from mxpert.grouped.hopper_wide_operands import decode_if_wide
from mxpert.testing.numerics import assert_exact
from support.poison import nan_filled_scratch

COUNTS = {
    "first": (1, 0),
    "second": (-3, 2),
    "both": (5, 7),
    "alone": (1, None),
    "neither": (0, -4),
    "not_alone": (None, 0),
}
"""Counts of wide blocks of both operands, None for an operand without one."""


def operand(shape: tuple[int, ...], fmt: str, count: int | None) -> MXTensor:
    """Operand with blocks of many magnitudes, a block of NaN and one of zeros."""
    generator = torch.Generator().manual_seed(len(shape))
    exponents = torch.randint(-60, 60, (*shape[:-1], shape[-1] // 32), generator=generator)
    x = torch.randn(shape, generator=generator) * exponents.float().exp2().repeat_interleave(32, -1)
    rows = x.view(-1, shape[-1])
    rows[0, :32], rows[-1, 5] = 0, torch.nan
    tensor = quantize_blocks(x, fmt, -1, ScaleRule.RCEIL)
    if count is None:
        return tensor
    return replace(
        tensor, scale_span=ScaleSpan.AUTO, wide_blocks=torch.tensor([count], dtype=torch.int32)
    )


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", [((300, 96), (3, 40, 96)), ((1, 32), (2, 8, 32))], ids=str)
def test_values_are_exact_or_untouched(
    sizes: tuple[tuple[int, ...], tuple[int, ...]], counts: str
) -> None:
    """The target has one SM, so each of its programs has several tiles, or none."""
    first, second = (
        operand(size, fmt, count)
        for size, fmt, count in zip(
            sizes, ("mxfp8_e5m2", "mxfp8_e4m3"), COUNTS[counts], strict=True
        )
    )
    target = replace(detect_target("cpu"), num_sms=1)
    (rows, k), (groups, n, _) = sizes
    problem = GroupedProblem(
        Op.GROUPED_GEMM,
        target,
        rows,
        groups,
        n,
        k,
        first.format.name,
        second.format.name,
        trans_b=True,
        out_dtype=torch.bfloat16,
    )
    with nan_filled_scratch():
        copies = decode_if_wide(first, second, problem)
    wide = any(count is not None and count > 0 for count in COUNTS[counts])
    for copy, tensor in zip(copies, (first, second), strict=True):
        if wide:
            assert_exact(copy, dequantize_blocks(tensor, torch.bfloat16), "values")
        else:
            assert copy.isnan().all(), "nothing is written"
