"""Host side of ACTIVATE_ROWS and COMBINE_ROWS on Triton, forward and backward."""

from __future__ import annotations

import functools

import torch
import triton
from triton.runtime.jit import JITFunction

from ...core.kernel import UntunedKernel
from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import Config, Op, RowsProblem, kernel_parameters
from ...device.targets import refuse_cpu
from ...formats.spec import FLOAT_DTYPES
from .inputs import ActivateBackwardInputs, ActivateInputs, CombineBackwardInputs, CombineInputs
from .triton_kernels import (
    _activate_rows_backward_kernel,
    _activate_rows_kernel,
    _combine_rows_backward_kernel,
    _combine_rows_kernel,
)

ACTIVATION_TILE = (4, 512)
"""Rows and columns per program of four warps: sixteen values a thread, two loads of 16 bytes."""

COMBINE_BLOCK = 1024
COMBINE_WARPS = 2
"""Columns and warps per program: sixteen columns a thread on 32-lane warps, eight on 64-lane ones;
each access has 16 bytes."""


class _Rows(UntunedKernel):
    """Base class of the four kernels."""

    def unsupported(self, problem: RowsProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.dtype not in FLOAT_DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}; convert it to one"
        return refuse_cpu(problem.target)


class _ActivateRows(_Rows):
    """ACTIVATE_ROWS: ``act(gate, up)``."""

    op = Op.ACTIVATE_ROWS

    def launch(self, problem: RowsProblem, config: Config, inputs: ActivateInputs) -> torch.Tensor:
        gate_up = inputs.gate_up
        out = gate_up.new_empty(problem.num_rows, problem.width)
        if out.numel():
            _activate(_activate_rows_kernel, problem)(out_ptr=out, gate_up_ptr=gate_up)
        return out


class _ActivateRowsBackward(_Rows):
    """ACTIVATE_ROWS_BACKWARD: gradients of gate and up."""

    op = Op.ACTIVATE_ROWS_BACKWARD

    def launch(
        self, problem: RowsProblem, config: Config, inputs: ActivateBackwardInputs
    ) -> torch.Tensor:
        grad, gate_up = inputs.grad, inputs.gate_up
        out = torch.empty_like(gate_up)
        if out.numel():
            _activate(_activate_rows_backward_kernel, problem)(
                out_ptr=out, grad_ptr=grad, gate_up_ptr=gate_up
            )
        return out


class _CombineRows(_Rows):
    """COMBINE_ROWS: weighted sum of the rows of each token."""

    op = Op.COMBINE_ROWS

    def launch(self, problem: RowsProblem, config: Config, inputs: CombineInputs) -> torch.Tensor:
        rows, row_ids, weights = inputs.rows, inputs.row_ids, inputs.weights
        out = rows.new_empty((row_ids.shape[0], problem.width), dtype=inputs.out_dtype)
        if out.numel():
            programs = row_ids.shape[0] * triton.cdiv(problem.width, COMBINE_BLOCK)
            _combine(_combine_rows_kernel, programs, problem)(
                out_ptr=out, rows_ptr=rows, row_ids_ptr=row_ids, weights_ptr=weights
            )
        return out


class _CombineRowsBackward(_Rows):
    """COMBINE_ROWS_BACKWARD: gradients of the rows and of the routing weights."""

    op = Op.COMBINE_ROWS_BACKWARD

    def launch(
        self, problem: RowsProblem, config: Config, inputs: CombineBackwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, row_ids, weights = inputs.rows, inputs.row_ids, inputs.weights
        by_row, by_weight = torch.empty_like(rows), torch.empty_like(weights)
        if row_ids.numel():
            _combine(_combine_rows_backward_kernel, row_ids.numel(), problem)(
                by_row_ptr=by_row,
                by_weight_ptr=by_weight,
                grad_ptr=inputs.grad,
                rows_ptr=rows,
                row_ids_ptr=row_ids,
                weights_ptr=weights,
            )
        return by_row, by_weight


@functools.lru_cache(CACHED_LAUNCHES)
def _activate(kernel: JITFunction, problem: RowsProblem) -> Launch:
    block_r, block_n = ACTIVATION_TILE
    grid = (triton.cdiv(problem.num_rows, block_r) * triton.cdiv(problem.width, block_n),)
    if problem.activation is None:
        raise ValueError("activate_rows: activation — need one of mxpert's, got None")
    return Launch(
        kernel,
        grid,
        num_rows=problem.num_rows,
        width=problem.width,
        **kernel_parameters(problem.activation),
        ACTIVATION=problem.activation.name,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        num_warps=4,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _combine(kernel: JITFunction, num_programs: int, problem: RowsProblem) -> Launch:
    return Launch(
        kernel,
        (num_programs,),
        num_rows=problem.num_rows,
        top_k=problem.top_k,
        width=problem.width,
        BLOCK_N=COMBINE_BLOCK,
        num_warps=COMBINE_WARPS,
    )


ACTIVATE_ROWS = _ActivateRows()
ACTIVATE_ROWS_BACKWARD = _ActivateRowsBackward()
COMBINE_ROWS = _CombineRows()
COMBINE_ROWS_BACKWARD = _CombineRowsBackward()
