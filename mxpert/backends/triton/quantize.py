"""QUANTIZE and DEQUANTIZE on Triton: every format, scale rule and axis, in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from ...formats.spec import MX_BLOCK_SIZE
from ...formats.tensor import MXTensor
from ...problem import Config, Op, QuantizeProblem
from .heuristics import compute_capability
from .quantize_kernels import (
    _dequantize_columns_kernel,
    _dequantize_rows_kernel,
    _quantize_columns_kernel,
    _quantize_rows_kernel,
    scale_rule_constants,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 4096  # values per program: 32 a thread with 4 warps, two to eight 16-byte loads in flight
_MAX_ROW_COLUMNS = 1024  # values of one row per program, where rows are strided
_MAX_COLUMNS = 256  # columns per program across rows: a 16-byte load for each lane of a warp


class _Spec:
    """What both operations share: they serve any shape and have nothing to tune."""

    op: Op
    backend = "triton"

    def unsupported(self, problem: QuantizeProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        target = problem.target
        if target.kind == "cpu" and not isinstance(_quantize_rows_kernel, InterpretedFunction):
            return "runs on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
        if target.kind == "hip" and target.arch != "gfx950":
            return f"needs conversions to the OCP fp8 types (gfx950), got {target.arch}"
        if target.kind == "cuda" and compute_capability(target) < 90:
            return f"needs sm_90 or later, got {target.arch}"
        if problem.dtype not in DTYPES:
            return f"reads and writes float32, bfloat16 or float16, not {problem.dtype}"
        return None

    def configs(self, problem: QuantizeProblem) -> Iterable[Config]:
        return (None,)

    def heuristic(self, problem: QuantizeProblem) -> Config:
        return None


class Quantize(_Spec):
    """x → MXTensor, bit-exact to `mxpert.formats.codec.quantize_blocks`."""

    op = Op.QUANTIZE

    def launch(self, problem: QuantizeProblem, config: Config, *, x: torch.Tensor) -> MXTensor:
        fmt, axis = problem.format, problem.axis
        codes_shape, scale_shape = list(x.shape), list(x.shape)
        codes_shape[axis] //= fmt.codes_per_byte
        scale_shape[axis] //= fmt.block_size
        qdata = torch.empty(codes_shape, dtype=torch.uint8, device=x.device)
        scale = torch.empty(scale_shape, dtype=torch.uint8, device=x.device)
        constants = scale_rule_constants(fmt, problem.scale_rule)
        if x.numel() > 0:
            inner = math.prod(x.shape[axis:][1:])  # elements between neighbours along the axis
            with torch.cuda.device_of(x):  # Triton launches on the current device
                if inner == 1:
                    _quantize_rows(qdata, scale, x, fmt.element.name, constants)
                else:
                    grid, block_columns = _column_tiles(x.numel(), inner)
                    _quantize_columns_kernel[grid](
                        qdata_ptr=qdata, scale_ptr=scale, x_ptr=x.contiguous(), num_columns=inner,
                        FORMAT=fmt.element.name, **constants, BLOCK_COLUMNS=block_columns,
                        num_warps=4)
        return MXTensor(qdata, scale, fmt, axis)


def _quantize_rows(
    qdata: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, element: str,
    constants: dict[str, int],
) -> None:
    """Blocks along the innermost dimension; dense rows with any stride are read in place."""
    rows = x.flatten(0, -2) if x.dim() > 1 and x.stride(-1) == 1 else x  # a view where it can be
    if rows.dim() == 1 or rows.stride(-1) != 1 or rows.is_contiguous():
        # Contiguous memory is a sequence of blocks: one block a row, whatever the shape.
        rows = rows.contiguous().view(-1, MX_BLOCK_SIZE)
    num_rows, width = rows.shape
    block_columns = min(_MAX_ROW_COLUMNS, triton.next_power_of_2(width))
    block_rows = _TILE // block_columns
    grid = (triton.cdiv(num_rows, block_rows) * triton.cdiv(width, block_columns),)
    _quantize_rows_kernel[grid](
        qdata_ptr=qdata, scale_ptr=scale, x_ptr=rows, num_rows=num_rows,
        num_blocks=width // MX_BLOCK_SIZE, row_stride=rows.stride(0), FORMAT=element,
        **constants, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=4)


def _column_tiles(numel: int, num_columns: int) -> tuple[tuple[int], int]:
    """Grid and tile width of the kernels that work across contiguous rows of `num_columns`."""
    block_columns = min(_MAX_COLUMNS, max(16, triton.next_power_of_2(num_columns)))
    block_rows = numel // (MX_BLOCK_SIZE * num_columns)
    return (block_rows * triton.cdiv(num_columns, block_columns),), block_columns


class Dequantize(_Spec):
    """MXTensor → tensor of `problem.dtype`, bit-exact to `formats.codec.dequantize_blocks`."""

    op = Op.DEQUANTIZE

    def launch(self, problem: QuantizeProblem, config: Config, *, tensor: MXTensor) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=problem.dtype, device=tensor.device)
        operands = {"out_ptr": out, "qdata_ptr": tensor.qdata.contiguous(),
                    "scale_ptr": tensor.scale.contiguous()}
        element = tensor.format.element.name
        if out.numel() == 0:
            return out
        inner = math.prod(out.shape[tensor.axis:][1:])
        with torch.cuda.device_of(out):
            if inner == 1:
                num_blocks = out.numel() // MX_BLOCK_SIZE
                block = _TILE // MX_BLOCK_SIZE
                _dequantize_rows_kernel[(triton.cdiv(num_blocks, block),)](
                    **operands, num_blocks=num_blocks, FORMAT=element, BLOCK=block, num_warps=4)
            else:
                grid, block_columns = _column_tiles(out.numel(), inner)
                _dequantize_columns_kernel[grid](
                    **operands, num_columns=inner, FORMAT=element, BLOCK_COLUMNS=block_columns,
                    num_warps=4)
        return out


QUANTIZE = Quantize()
DEQUANTIZE = Dequantize()
