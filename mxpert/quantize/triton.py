"""QUANTIZE and DEQUANTIZE on Triton: every format, scale rule and axis, in one pass over memory."""

from __future__ import annotations

import functools
import math

import torch
import triton

from ..core.kernel import UntunedKernel
from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import Config, Op, QuantizeProblem
from ..device.mx_codec import (
    _dequantize_columns_kernel,
    _dequantize_rows_kernel,
    _quantize_columns_kernel,
    _quantize_rows_kernel,
    _quantize_squares_kernel,
    scale_rule_constants,
)
from ..device.targets import refuse_without
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, MXFormat, ScaleRule, ScaleSpan
from ..formats.tensor import MXTensor
from .inputs import DequantizeInputs, QuantizeInputs

_TILE = 4096  # values per program: 32 a thread with 4 warps, two to eight 16-byte loads in flight
_MAX_ROW_COLUMNS = 1024  # values of one row per program, where rows are strided
_SQUARE_COLUMNS = 128  # columns per program with 32 × 32 squares: four of them
_MAX_COLUMNS = 256  # columns per program across rows: a 16-byte load for each lane of a warp
_STOCHASTIC_COLUMNS = 64  # the same with random numbers, whose generator takes registers


class _AnyShape(UntunedKernel):
    """Base class of both kernels."""

    def unsupported(self, problem: QuantizeProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        if problem.dtype not in FLOAT_DTYPES:
            return (
                f"reads and writes float32, bfloat16 or float16, not {problem.dtype}; "
                "convert it to one of them"
            )
        return refuse_without(problem.target, "conversions to the OCP fp8 types")


class Quantize(_AnyShape):
    """x → MXTensor, bit-exact to `mxpert.formats.codec.quantize_blocks`."""

    op = Op.QUANTIZE

    def launch(self, problem: QuantizeProblem, config: Config, inputs: QuantizeInputs) -> MXTensor:
        x, fmt, axis = inputs.x, problem.format, problem.axis
        codes_shape, scale_shape = _code_shapes(problem)
        qdata = x.new_empty(codes_shape, dtype=torch.uint8)
        scale = x.new_empty(scale_shape, dtype=torch.uint8)
        if x.numel() > 0:
            inner = math.prod(problem.shape[axis:][1:])  # elements between neighbours on the axis
            if problem.scale_span is ScaleSpan.SQUARE:
                rows = x.contiguous()
                launch = _quantize_squares(fmt, problem.scale_rule, problem.shape, axis)
            elif inner == 1:
                rows, num_rows, width, stride = _dense_rows(x)
                launch = _quantize_rows(fmt, problem.scale_rule, num_rows, width, stride)
            else:
                rows = x.contiguous()
                most = _STOCHASTIC_COLUMNS if problem.stochastic else _MAX_COLUMNS
                launch = _quantize_columns(fmt, problem.scale_rule, x.numel(), inner, most)
            launch(qdata_ptr=qdata, scale_ptr=scale, x_ptr=rows, seed_ptr=inputs.seed)
        return MXTensor.unchecked(qdata, scale, fmt, axis, problem.scale_span)


@functools.lru_cache(CACHED_LAUNCHES)
def _code_shapes(problem: QuantizeProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales."""
    axis = problem.axis + len(problem.shape)
    before, size, after = problem.shape[:axis], problem.shape[axis], problem.shape[axis + 1 :]
    return (
        (*before, size // problem.format.codes_per_byte, *after),
        (*before, size // problem.format.block_size, *after),
    )


def _dense_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """View x as rows of blocks along its last dimension: (tensor, rows, width, row stride).

    Contiguous memory of any shape is viewed as one block per row. Dense rows with a larger stride
    are read in place. Other tensors are copied first.
    """
    if not x.is_contiguous():
        rows = x.flatten(0, -2) if x.dim() > 1 and x.stride(-1) == 1 else x.contiguous()
        if not rows.is_contiguous():
            return rows, rows.shape[0], rows.shape[1], rows.stride(0)
        x = rows
    return x, x.numel() // MX_BLOCK_SIZE, MX_BLOCK_SIZE, MX_BLOCK_SIZE


@functools.lru_cache(CACHED_LAUNCHES)
def _quantize_rows(
    fmt: MXFormat, rule: ScaleRule, num_rows: int, width: int, stride: int
) -> Launch:
    block_columns = min(_MAX_ROW_COLUMNS, triton.next_power_of_2(width))
    block_rows = _TILE // block_columns
    return Launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, block_rows) * triton.cdiv(width, block_columns),),
        num_rows=num_rows,
        num_blocks=width // MX_BLOCK_SIZE,
        row_stride=stride,
        FORMAT=fmt.element.name,
        **scale_rule_constants(fmt, rule),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _quantize_columns(fmt: MXFormat, rule: ScaleRule, numel: int, inner: int, most: int) -> Launch:
    grid, block_columns = _column_tiles(numel, inner, most)
    return Launch(
        _quantize_columns_kernel,
        grid,
        num_columns=inner,
        FORMAT=fmt.element.name,
        **scale_rule_constants(fmt, rule),
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _quantize_squares(fmt: MXFormat, rule: ScaleRule, shape: tuple[int, ...], axis: int) -> Launch:
    *leading, num_rows, num_columns = shape
    row_tiles, column_tiles = (
        triton.cdiv(size, tile)
        for size, tile in ((num_rows, MX_BLOCK_SIZE), (num_columns, _SQUARE_COLUMNS))
    )
    return Launch(
        _quantize_squares_kernel,
        (math.prod(leading) * row_tiles * column_tiles,),
        num_rows=num_rows,
        num_units=num_columns // MX_BLOCK_SIZE if axis == -1 else num_columns,
        FORMAT=fmt.element.name,
        **scale_rule_constants(fmt, rule),
        AXIS=axis + 2,
        BLOCK_COLUMNS=_SQUARE_COLUMNS,
        num_warps=4,
    )


def _column_tiles(numel: int, num_columns: int, most: int = _MAX_COLUMNS) -> tuple[tuple[int], int]:
    """Grid and tile width of the column kernels, for contiguous rows of `num_columns`."""
    block_columns = min(most, max(16, triton.next_power_of_2(num_columns)))
    block_rows = numel // (MX_BLOCK_SIZE * num_columns)
    return (block_rows * triton.cdiv(num_columns, block_columns),), block_columns


class Dequantize(_AnyShape):
    """MXTensor → tensor of `problem.dtype`, bit-exact to `formats.codec.dequantize_blocks`."""

    op = Op.DEQUANTIZE

    def launch(
        self, problem: QuantizeProblem, config: Config, inputs: DequantizeInputs
    ) -> torch.Tensor:
        tensor = inputs.tensor
        out = torch.empty(tensor.shape, dtype=problem.dtype, device=tensor.device)
        if out.numel() > 0:
            inner = math.prod(out.shape[tensor.axis :][1:])
            _dequantize(tensor.format.element.name, out.numel(), inner)(
                out_ptr=out,
                qdata_ptr=tensor.qdata.contiguous(),
                scale_ptr=tensor.scale.contiguous(),
            )
        return out


@functools.lru_cache(CACHED_LAUNCHES)
def _dequantize(element: str, numel: int, inner: int) -> Launch:
    if inner == 1:
        num_blocks, block = numel // MX_BLOCK_SIZE, _TILE // MX_BLOCK_SIZE
        return Launch(
            _dequantize_rows_kernel,
            (triton.cdiv(num_blocks, block),),
            num_blocks=num_blocks,
            FORMAT=element,
            BLOCK=block,
            num_warps=4,
        )
    grid, block_columns = _column_tiles(numel, inner)
    return Launch(
        _dequantize_columns_kernel,
        grid,
        num_columns=inner,
        FORMAT=element,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
    )


QUANTIZE = Quantize()
DEQUANTIZE = Dequantize()
