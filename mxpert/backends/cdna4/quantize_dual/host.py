"""Host side of QUANTIZE_DUAL on gfx950; no synchronisation."""

from __future__ import annotations

import functools

import torch
import triton

from ....formats.spec import MX_BLOCK_SIZE, ScaleSpan
from ....formats.tensor import MXTensor
from ....problem import Config, DualProblem, Op
from ....routing import padded_capacity
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ...common.groups import group_block, refuse_groups
from ...common.kernel import UntunedKernel
from ...common.mx_codec import scale_rule_constants
from ...common.quantize import DTYPES
from .kernel import COLUMNS, NUM_WARPS, ROWS, _quantize_dual_cdna4_kernel


class _QuantizeDual(UntunedKernel):
    """x → rowwise and columnwise MX copies, bit-exact to `formats.codec.quantize_blocks`."""

    op = Op.QUANTIZE_DUAL
    backend = "cdna4"

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "gfx950":
            return f"needs gfx950, not {problem.target.arch}"
        if problem.dtype not in DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}"
        if {problem.row_span, problem.column_span} != {ScaleSpan.BLOCK}:
            return "writes one scale per block of 32 (ScaleSpan.BLOCK), as gfx950's MFMA read them"
        return refuse_groups(problem.target, problem.num_groups if problem.grouped_rows else 0)

    def launch(
        self,
        problem: DualProblem,
        config: Config,
        *,
        x: torch.Tensor,
        group_offsets: torch.Tensor | None,
    ) -> tuple[MXTensor, MXTensor]:
        """Return the rowwise copy (shape of x) and the columnwise copy.

        The columnwise copy is [K, M], [K, padded capacity] with group offsets, or [G, K, N].
        """
        if x.stride(-1) != 1:
            x = x.contiguous()  # dense rows are read in place at any row stride
        *leading, num_rows, width = x.shape
        num_groups = 0 if group_offsets is None else group_offsets.shape[0] - 1
        length = padded_capacity(num_rows, num_groups) if num_groups else num_rows
        row, column = (
            _allocate(problem, shape, x.device)
            for shape in ((*leading, num_rows, width), (*leading, width, length))
        )
        if row.qdata.numel() + column.qdata.numel() > 0:
            strides = x.stride(0) if leading else 0, x.stride(-2)
            _dual_launch(problem, length, strides)(
                row=row.qdata,
                row_scale=row.scale,
                column=column.qdata,
                column_scale=column.scale,
                x=x,
                group_offsets=group_offsets,
            )
        return row, column


@functools.lru_cache(CACHED_LAUNCHES)
def _dual_launch(problem: DualProblem, length: int, strides: tuple[int, int]) -> Launch:
    """Launch for columnwise copies of `length` positions a row; strides: matrix and row of x."""
    *leading, num_rows, width = problem.shape
    num_groups = problem.num_groups if problem.grouped_rows else 0
    batch = leading[0] if leading else 1
    tiles = triton.cdiv(length, ROWS.value) * triton.cdiv(width, COLUMNS.value)
    return Launch(
        _quantize_dual_cdna4_kernel,
        (batch * tiles,),
        num_rows=num_rows,
        num_groups=num_groups,
        num_k_blocks=width // MX_BLOCK_SIZE,
        num_column_blocks=length // MX_BLOCK_SIZE,
        x_stride_batch=strides[0],
        x_stride_row=strides[1],
        FORMAT=problem.format.element.name,
        **scale_rule_constants(problem.format, problem.scale_rule),
        BLOCK_G=group_block(num_groups),
        num_warps=NUM_WARPS.value,
    )


def _allocate(problem: DualProblem, shape: tuple[int, ...], device: torch.device) -> MXTensor:
    """An uninitialised MXTensor of this shape, quantised along its last axis."""
    scale_shape = (*shape[:-1], shape[-1] // MX_BLOCK_SIZE)
    qdata, scale = (
        torch.empty(size, dtype=torch.uint8, device=device) for size in (shape, scale_shape)
    )
    return MXTensor(qdata, scale, problem.format)


QUANTIZE_DUAL = _QuantizeDual()
