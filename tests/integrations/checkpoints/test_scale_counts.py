"""Scales are counted by exponent; zeros and what is no number are counted apart."""

from __future__ import annotations

import pytest
import torch

from mxpert.formats.spec import MXFP4, MXFP8_E4M3
from mxpert.formats.tensor import MXTensor
from mxpert.formats.weight_tensor import WeightTensor
from mxpert.integrations.checkpoints.expert_matrices import Exact
from mxpert.integrations.checkpoints.scale_counts import exponent_of, scale_counts

ONES = torch.full((1, 64), 0x11, dtype=torch.uint8)
NAN, INF = float("nan"), float("inf")


def row(*numbers: float, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.tensor([numbers], dtype=dtype)


CASES: dict[str, tuple[Exact, dict[int, int], int, int]] = {
    # name: matrix, blocks by exponent, blocks of zeros, scales that are no number
    "mxfp4": (MXTensor(ONES, row(0, 127, 255, 254), MXFP4), {-127: 1, 0: 1, 127: 1}, 0, 1),
    "mxfp8": (
        MXTensor(ONES.repeat(1, 2), row(126, 126, 255, 128), MXFP8_E4M3),
        {-1: 2, 1: 1},
        0,
        1,
    ),
    # e4m3's 0, 2^-9, 448 and NaN, times 1.5
    "nvfp4": (
        WeightTensor(
            ONES[:, :32], row(0x00, 0x01, 0x7E, 0x7F), "nvfp4", row_scale=torch.tensor([1.5])
        ),
        {-9: 1, 9: 1},
        1,
        1,
    ),
    "int4": (
        WeightTensor(ONES, row(0.0, -0.75, NAN, INF, dtype=torch.float32), "int4_g32"),
        {-1: 1},
        1,
        2,
    ),
    "int4 of zeros": (
        WeightTensor(
            ONES, row(1, 1, 1, 1, dtype=torch.float16), "int4_g32", zero_point=row(1, 0, 1, 2)
        ),
        {0: 2},
        2,
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scales_are_counted(case: str) -> None:
    matrix, exponents, zero, nan = CASES[case]
    found = scale_counts(matrix)
    assert (found.blocks, found.zero_blocks, found.nan_scales) == (4, zero, nan)
    counted = {exponent_of(each): int(found.counts[each]) for each in found.counts.nonzero()}
    assert counted == exponents
