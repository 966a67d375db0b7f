"""Triton quantise and dequantise kernels in the interpreter, byte for byte against the codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from mxpert.core.problem import Op, QuantizeProblem, Target
from mxpert.core.target import detect_target
from mxpert.device.mx_codec import quantize_tile, scale_rule_constants
from mxpert.formats import (
    FORMATS,
    MXFP4,
    MXFP8_E4M3,
    MXFormat,
    MXTensor,
    ScaleRule,
    dequantize_blocks,
    quantize_blocks,
)
from mxpert.quantize.inputs import DequantizeInputs, QuantizeInputs
from mxpert.quantize.triton import DEQUANTIZE, QUANTIZE
from support.quantize_cases import (
    assert_dequantizes_exactly,
    assert_quantizes_exactly,
    block_cases,
    every_bfloat16_amax,
    every_code_and_scale,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Shape and axis: blocks along rows, across rows, and in the middle; tails in every other dimension.
LAYOUTS = [
    ((77, 96), -1),
    ((3, 5, 320), -1),
    ((64, 133), -2),
    ((2, 96, 3, 7), -3),
    ((96,), -1),
    ((64, 1), -2),
]

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
layouts = pytest.mark.parametrize(
    "shape, axis", LAYOUTS, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else None
)


def quantize(x: torch.Tensor, fmt: MXFormat, axis: int, rule: ScaleRule) -> MXTensor:
    problem = QuantizeProblem(
        Op.QUANTIZE, detect_target("cpu"), tuple(x.shape), axis, x.dtype, fmt, rule
    )
    assert QUANTIZE.unsupported(problem) is None
    return QUANTIZE.launch(problem, QUANTIZE.heuristic(problem), QuantizeInputs(x=x))


def dequantize(tensor: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    problem = QuantizeProblem(
        Op.DEQUANTIZE, detect_target("cpu"), tuple(tensor.shape), tensor.axis, dtype, tensor.format
    )
    assert DEQUANTIZE.unsupported(problem) is None
    return DEQUANTIZE.launch(problem, None, DequantizeInputs(tensor=tensor))


@layouts
@dtypes
@pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.name)
@formats
def test_quantize(
    fmt: MXFormat, rule: ScaleRule, dtype: torch.dtype, shape: tuple[int, ...], axis: int
) -> None:
    x = block_cases(shape, axis, dtype)
    assert_quantizes_exactly(quantize(x, fmt, axis, rule), x, fmt, axis, rule)


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda r: r.name)
@formats
def test_quantize_bfloat16_amax(fmt: MXFormat, rule: ScaleRule) -> None:
    """Every mantissa of the block maximum at low, middle and high exponents (GPU tests: all)."""
    exponents = torch.cat([torch.arange(n, n + 12) for n in (0, 120, 244)])
    x = every_bfloat16_amax().view(2, 256, 128, 32)[:, exponents].reshape(-1, 32)
    assert_quantizes_exactly(quantize(x, fmt, -1, rule), x, fmt, -1, rule)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 32:352],  # dense rows with a larger stride
        lambda x: x[::3, :64],
        lambda x: x[:, ::2],  # rows that are not dense
        lambda x: x.T,
        lambda x: x[:1].expand(96, 384),
        lambda x: x.view(8, 12, 384)[:, :5, :96],  # leading strides that do not nest
        lambda x: x[3, ::3],
    ],
    ids=["columns", "rows", "every_other", "transposed", "expanded", "three_dims", "vector"],
)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3], ids=lambda f: f.name)
def test_quantize_strided(fmt: MXFormat, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Memory between the elements is NaN and must not be read."""
    base = block_cases((96, 384), -1, torch.bfloat16)
    unused = torch.ones(base.numel(), dtype=torch.bool)
    unused[view(torch.arange(base.numel()).view(96, 384)).flatten()] = False
    base[unused.view(96, 384)] = float("nan")
    x = view(base)
    assert_quantizes_exactly(quantize(x, fmt, -1, ScaleRule.RCEIL), x, fmt, -1, ScaleRule.RCEIL)


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
@formats
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


@pytest.mark.parametrize("shape, axis", [((0, 32), -1), ((32, 0), -2), ((4, 0), -1)], ids=str)
@formats
def test_empty(fmt: MXFormat, shape: tuple[int, ...], axis: int) -> None:
    quantized = quantize(torch.empty(shape), fmt, axis, ScaleRule.RCEIL)
    assert quantized.shape == shape
    assert dequantize(quantized, torch.float32).shape == shape


@dtypes
@pytest.mark.parametrize("axis", [-1, -2])
@formats
def test_dequantize_every_code_and_scale(fmt: MXFormat, axis: int, dtype: torch.dtype) -> None:
    tensor = every_code_and_scale(fmt, axis)
    assert_dequantizes_exactly(dequantize(tensor, dtype), tensor)


@layouts
@formats
def test_dequantize_shapes(fmt: MXFormat, shape: tuple[int, ...], axis: int) -> None:
    tensor = quantize(block_cases(shape, axis, torch.float32), fmt, axis, ScaleRule.FLOOR)
    assert_dequantizes_exactly(dequantize(tensor, torch.bfloat16), tensor)


def test_unsupported_names_the_reason() -> None:
    def reason(kind: str, arch: str, dtype: torch.dtype = torch.float32) -> str | None:
        target = Target(kind, arch, arch, 1, 0)
        return QUANTIZE.unsupported(QuantizeProblem(Op.QUANTIZE, target, (32,), -1, dtype, MXFP4))

    for served in (("cuda", "sm_80"), ("cuda", "sm_90"), ("cuda", "sm_100"), ("hip", "gfx950")):
        assert reason(*served) is None
    assert "sm_80" in str(reason("cuda", "sm_75"))
    assert "gfx950" in str(reason("hip", "gfx942"))
    assert "float64" in str(reason("cuda", "sm_90", torch.float64))


@pytest.mark.parametrize(
    "plant",
    [
        lambda q: replace(q, qdata=q.qdata << 4 | q.qdata >> 4),
        lambda q: replace(q, scale=q.scale.roll(1, dims=-1)),
        lambda q: replace(q, qdata=torch.where(q.qdata == 0x80, 0, q.qdata)),
        lambda q: replace(q, axis=-2, qdata=q.qdata.T, scale=q.scale.T),
    ],
    ids=["swapped_nibbles", "scale_off_by_one_block", "lost_sign_of_zero", "wrong_axis"],
)
def test_the_comparison_catches(plant: Callable[[MXTensor], MXTensor]) -> None:
    x = block_cases((128, 128), -1, torch.float32)
    quantized = quantize_blocks(x, MXFP4)
    assert_quantizes_exactly(quantized, x, MXFP4, -1, ScaleRule.RCEIL)
    with pytest.raises(AssertionError):
        assert_quantizes_exactly(plant(quantized), x, MXFP4, -1, ScaleRule.RCEIL)


@pytest.mark.parametrize(
    "plant",
    [
        lambda y: torch.where(y == 1.0, 1.5, y),
        lambda y: y.abs(),
        lambda y: y.nan_to_num(),
        lambda y: torch.where(y.abs() < 2.0**-126, 0.0, y),
    ],
    ids=["wrong_value", "lost_signs", "lost_nan", "flushed_subnormals"],
)
def test_the_comparison_of_values_catches(plant: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = every_code_and_scale(MXFP4, -1)
    values = dequantize_blocks(tensor)
    assert_dequantizes_exactly(values, tensor)
    with pytest.raises(AssertionError):
        assert_dequantizes_exactly(plant(values), tensor)
