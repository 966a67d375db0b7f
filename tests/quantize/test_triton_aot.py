"""The quantise and dequantise kernels compiled for each target: instructions and registers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mxpert.device.mx_codec import (
    _dequantize_columns_kernel,
    _dequantize_rows_kernel,
    _quantize_columns_kernel,
    _quantize_rows_kernel,
    _quantize_squares_kernel,
    scale_rule_constants,
)
from mxpert.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFormat, ScaleRule
from mxpert.quantize import triton
from support.aot import TARGETS, CompiledKernel, compile_for

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
targets = pytest.mark.parametrize("target", TARGETS)


def meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1 << 20, dtype=dtype, device="meta")


def arguments_of(fmt: MXFormat, dtype: torch.dtype, stochastic: bool) -> dict[str, Any]:
    """What the kernels have in common."""
    return {
        "qdata_ptr": meta(torch.uint8),
        "scale_ptr": meta(torch.uint8),
        "x_ptr": meta(dtype),
        "seed_ptr": meta(torch.int64) if stochastic else None,
        "FORMAT": fmt.element.name,
        **scale_rule_constants(fmt, ScaleRule.RCEIL),
    }


def quantize(
    target: str,
    fmt: MXFormat,
    dtype: torch.dtype,
    *,
    across_rows: bool,
    aligned: bool = True,
    stochastic: bool = False,
) -> CompiledKernel:
    arguments = arguments_of(fmt, dtype, stochastic)
    if across_rows:
        columns = triton._STOCHASTIC_COLUMNS if stochastic else triton._MAX_COLUMNS
        arguments |= {"num_columns": 2880 if aligned else 2881, "BLOCK_COLUMNS": columns}
        return compile_for(_quantize_columns_kernel, arguments, target=target)
    arguments |= {
        "num_rows": 777,
        "num_blocks": 1,
        "row_stride": 32 if aligned else 33,
        "BLOCK_ROWS": 128,
        "BLOCK_COLUMNS": 32,
    }
    return compile_for(_quantize_rows_kernel, arguments, target=target)


def cases_of(sides: tuple[str, str]) -> pytest.MarkDecorator:
    """Pairwise: each dtype with each target, format and side, and each three of these."""
    three = itertools.product(enumerate(TARGETS), enumerate(FORMATS.values()), enumerate(sides))
    return pytest.mark.parametrize(
        "target, fmt, dtype, side",
        [
            pytest.param(
                target,
                fmt,
                (torch.bfloat16, torch.float32)[(i + j + k) % 2],
                k,
                id=f"{target}-{fmt.name}-{name}",
            )
            for (i, target), (j, fmt), (k, name) in three
        ],
    )


@cases_of(("rows", "columns"))
def test_quantize(target: str, fmt: MXFormat, dtype: torch.dtype, side: int) -> None:
    across_rows = side == 1
    metrics = quantize(target, fmt, dtype, across_rows=across_rows).metrics
    assert metrics.spills == metrics.scratch == 0
    assert set(metrics.global_loads) == {128}
    # Enough warps to hide memory latency: 64 registers leave half of the warps of an NVIDIA chip,
    # 128 (32 rows of a block at once) a quarter, with twice the loads in flight a thread.
    assert metrics.registers <= (128 if across_rows else 64)


@cases_of(("rows", "columns"))
def test_quantize_stochastically(target: str, fmt: MXFormat, dtype: torch.dtype, side: int) -> None:
    """Ten rounds of Philox and no spills; limited by integer arithmetic, not by memory."""
    kernel = quantize(target, fmt, dtype, across_rows=side == 1, stochastic=True)
    assert kernel.metrics.spills == kernel.metrics.scratch == 0
    assert kernel.count(r"IMAD|IMUL|v_mul_(hi|lo)_u32|v_mad_u64_u32") >= 20


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@cases_of(("axis 0", "axis 1"))
def test_squares(
    target: str, fmt: MXFormat, dtype: torch.dtype, side: int, stochastic: bool
) -> None:
    arguments = arguments_of(fmt, dtype, stochastic) | {
        "num_rows": 2880,
        "num_units": 90 if side == 1 else 2880,
        "AXIS": side,
        "BLOCK_COLUMNS": 128,
    }
    metrics = compile_for(_quantize_squares_kernel, arguments, target=target).metrics
    assert metrics.spills == metrics.scratch == 0
    assert metrics.registers <= (256 if stochastic else 128)


@targets
def test_unaligned_rows_still_compile(target: str) -> None:
    metrics = quantize(target, MXFP4, torch.bfloat16, across_rows=True, aligned=False).metrics
    assert metrics.spills == 0
    assert max(metrics.global_loads) < 128


@pytest.mark.parametrize(
    "target, instruction",
    [
        ("sm_90", r"F2FP\.SATFINITE\.E4M3"),
        ("sm_100", r"F2FP\.SATFINITE\.E4M3"),
        ("gfx950", r"v_cvt_(scalef32_)?pk_fp8_f32"),
    ],
)
def test_float32_becomes_fp8_in_one_rounding(target: str, instruction: str) -> None:
    """The conversion does not go through float16, which would round twice."""
    kernel = quantize(target, MXFP8_E4M3, torch.float32, across_rows=False)
    assert kernel.count(instruction) > 0
    assert kernel.count(r"F2FP\.F16|v_cvt_(pkrtz_)?f16_f32") == 0


@pytest.mark.parametrize("across_rows", [False, True], ids=["rows", "columns"])
@formats
@targets
def test_dequantize(target: str, fmt: MXFormat, across_rows: bool) -> None:
    arguments = {
        "out_ptr": meta(torch.bfloat16),
        "qdata_ptr": meta(torch.uint8),
        "scale_ptr": meta(torch.uint8),
        "FORMAT": fmt.element.name,
    }
    if across_rows:
        kernel = compile_for(
            _dequantize_columns_kernel,
            {**arguments, "num_columns": 2880, "BLOCK_COLUMNS": 256},
            target=target,
        )
    else:
        kernel = compile_for(
            _dequantize_rows_kernel, {**arguments, "num_blocks": 777, "BLOCK": 128}, target=target
        )
    metrics = kernel.metrics
    assert metrics.spills == metrics.scratch == 0
    assert metrics.registers <= (128 if across_rows else 64)
    assert set(metrics.global_stores) == {128}
