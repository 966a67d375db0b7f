"""Portable parts of quantisation: the tile that epilogues call, and refusals."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from mxpert.core.problem import Op, QuantizeProblem, Target
from mxpert.device.mx_codec import quantize_tile, scale_rule_constants
from mxpert.formats import FORMATS, MXFP4, MXFormat, MXTensor, ScaleRule
from mxpert.quantize.triton import QUANTIZE
from support.quantize_cases import assert_quantizes_exactly, block_cases


@triton.jit
def _tile_kernel(
    qdata_ptr,
    scale_ptr,
    x_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    CODES_M: tl.constexpr,
    CODES_N: tl.constexpr,
    SCALE_M: tl.constexpr,
    SCALE_N: tl.constexpr,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    AXIS: tl.constexpr,
):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    codes, scale = quantize_tile(x, FORMAT, EMAX, THRESHOLD, AXIS)
    rows, columns = tl.arange(0, CODES_M)[:, None], tl.arange(0, CODES_N)[None, :]
    tl.store(qdata_ptr + rows * CODES_N + columns, codes)
    rows, columns = tl.arange(0, SCALE_M)[:, None], tl.arange(0, SCALE_N)[None, :]
    tl.store(scale_ptr + rows * SCALE_N + columns, scale)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_quantize_tile(fmt: MXFormat, rule: ScaleRule, axis: int) -> None:
    """`quantize_tile`, which epilogues call, along either axis of a tile."""
    x = block_cases((64, 128), axis - 2, torch.float32)
    shapes = {
        name: [size // (by if i == axis else 1) for i, size in enumerate(x.shape)]
        for name, by in (("CODES", fmt.codes_per_byte), ("SCALE", 32))
    }
    codes, scale = (torch.empty(shape, dtype=torch.uint8) for shape in shapes.values())
    _tile_kernel[(1,)](
        codes,
        scale,
        x,
        M=64,
        N=128,
        CODES_M=shapes["CODES"][0],
        CODES_N=shapes["CODES"][1],
        SCALE_M=shapes["SCALE"][0],
        SCALE_N=shapes["SCALE"][1],
        FORMAT=fmt.element.name,
        **scale_rule_constants(fmt, rule),
        AXIS=axis,
    )
    assert_quantizes_exactly(MXTensor(codes, scale, fmt, axis - 2), x, fmt, axis - 2, rule)


def test_unsupported_names_the_reason() -> None:
    def reason(kind: str, arch: str, dtype: torch.dtype = torch.float32) -> str | None:
        target = Target(kind, arch, arch, 1, 0)
        return QUANTIZE.unsupported(QuantizeProblem(Op.QUANTIZE, target, (32,), -1, dtype, MXFP4))

    for served in (("cuda", "sm_80"), ("cuda", "sm_90"), ("cuda", "sm_100"), ("hip", "gfx950")):
        assert reason(*served) is None
    assert "sm_80" in str(reason("cuda", "sm_75"))
    assert "gfx950" in str(reason("hip", "gfx942"))
    assert "float64" in str(reason("cuda", "sm_90", torch.float64))
