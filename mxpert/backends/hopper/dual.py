"""QUANTIZE_DUAL on Hopper: the table of blocks, the scales of spans, both copies; no host sync."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import triton

from ...formats.spans import FREE_BINADES, few_blocks
from ...formats.spec import MX_BLOCK_SIZE, ScaleSpan
from ...formats.tensor import MXTensor
from ...problem import Config, DualProblem, Op
from ...routing import padded_capacity
from ..launch import CACHED_LAUNCHES, Launch
from ..triton.grouped import MAX_GROUPS
from ..triton.quantize import DTYPES
from ..triton.quantize_kernels import scale_rule_constants
from .dual_kernel import _quantize_dual_hopper_kernel
from .span_kernels import (
    MAX_SPREAD_BLOCKS, SPREAD_ROWS, TABLE_BLOCKS, _block_table_kernel, _count_wide_blocks_kernel,
    _spread_scales_kernel,
)

_TILE_BLOCKS = 4
"""A tile is 4 × 4 blocks of 32: 128 places × 128 columns."""


class _QuantizeDual:
    """x → its row-wise and column-wise copies, bit-exact to `formats.spans.quantize_spans`.

    Spans longer than a block take two passes over x: the first chooses the scales.
    """

    op = Op.QUANTIZE_DUAL
    backend = "hopper"

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        if problem.target.arch != "sm_90":
            return f"needs sm_90, not {problem.target.arch}"
        if problem.dtype not in DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}"
        if problem.grouped_rows and problem.num_groups > MAX_GROUPS:
            return f"holds at most {MAX_GROUPS} groups, got {problem.num_groups}"
        return None

    def configs(self, problem: DualProblem) -> Iterator[Config]:
        """One tile serves every shape."""
        yield None

    def heuristic(self, problem: DualProblem) -> Config:
        return None

    def launch(
        self, problem: DualProblem, config: Config, *, x: torch.Tensor,
        group_offsets: torch.Tensor | None,
    ) -> tuple[MXTensor, MXTensor]:
        """Row copy of the shape of x; column copy [K, M], [K, padded capacity] or [G, K, N]."""
        *leading, num_rows, width = problem.shape
        length = padded_capacity(num_rows, problem.num_groups) if problem.grouped_rows else num_rows
        row = _allocate(problem, (*leading, num_rows, width), problem.row_span, x)
        column = _allocate(problem, (*leading, width, length), problem.column_span, x)
        if row.qdata.numel() == 0 and column.qdata.numel() == 0:
            return row, column
        rows = _dense_rows(x)
        matrices = leading[0] if leading else 1
        num_blocks = matrices * length // MX_BLOCK_SIZE
        table = starts = None
        if group_offsets is not None:
            table = x.new_empty((num_blocks, 2), dtype=torch.int32)
            starts = x.new_empty(problem.num_groups + 1, dtype=torch.int32)
            _table_launch(num_rows, problem.num_groups, num_blocks)(
                table_ptr=table, starts_ptr=starts, group_offsets_ptr=group_offsets)
        if x.dtype is torch.bfloat16:
            rows = rows.view(torch.int32)  # pairs of values
        tensors = dict(row=row.qdata, row_scale=row.scale, column=column.qdata,
                       column_scale=column.scale, x=rows, table=table)
        sizes = (num_blocks, length // MX_BLOCK_SIZE, width, rows.stride(0))
        if {problem.row_span, problem.column_span} == {ScaleSpan.BLOCK}:
            _quantize_launch(problem, *sizes, True, True)(**tensors)
        else:
            _quantize_launch(problem, *sizes, True, False)(**tensors)
            _choose_spans(row, None)
            _choose_spans(column, starts)
            _quantize_launch(problem, *sizes, False, True)(**tensors)
        return row, column


def _allocate(problem: DualProblem, shape: tuple[int, ...], span: ScaleSpan,
              x: torch.Tensor) -> MXTensor:
    """An MXTensor of this shape, quantised along its last axis, not yet written."""
    scale_shape = (*shape[:-1], shape[-1] // MX_BLOCK_SIZE)
    qdata, scale = (x.new_empty(size, dtype=torch.uint8) for size in (shape, scale_shape))
    count = None
    if span is ScaleSpan.AUTO:
        count = x.new_full((1,), -few_blocks(qdata.numel()), dtype=torch.int32)
    return MXTensor(qdata, scale, problem.format, scale_span=span, wide_blocks=count)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] whose rows are dense and begin at multiples of 16 bytes."""
    if x.dim() == 3:
        x = x.view(-1, x.shape[-1]) if x.is_contiguous() else x.reshape(-1, x.shape[-1])
    aligned = x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0
    return x if aligned and x.data_ptr() % 16 == 0 else x.clone(
        memory_format=torch.contiguous_format)


def _choose_spans(copy: MXTensor, starts: torch.Tensor | None) -> None:
    """One scale for each span of a copy whose blocks have theirs."""
    span = copy.scale_span
    if span is ScaleSpan.BLOCK:
        return
    scale = copy.scale.view(-1, copy.scale.shape[-1])
    sizes = (*scale.shape, 1 if starts is None else starts.shape[0] - 1)
    if copy.wide_blocks is not None:
        _count_launch(*sizes, FREE_BINADES[copy.format.element.name])(
            scale_ptr=scale, starts_ptr=starts, wide_ptr=copy.wide_blocks)
    _spread_launch(*sizes, span is not ScaleSpan.SPAN128)(
        scale_ptr=scale, starts_ptr=starts, wide_ptr=copy.wide_blocks)


@functools.lru_cache(CACHED_LAUNCHES)
def _table_launch(num_rows: int, num_groups: int, num_blocks: int) -> Launch:
    return Launch(_block_table_kernel, (triton.cdiv(num_blocks, TABLE_BLOCKS),), num_rows=num_rows,
                  num_groups=num_groups, num_blocks=num_blocks, BLOCKS=TABLE_BLOCKS,
                  BLOCK_G=max(32, triton.next_power_of_2(num_groups + 1)), num_warps=2)


@functools.lru_cache(CACHED_LAUNCHES)
def _count_launch(num_rows: int, pitch: int, segments: int, free: int) -> Launch:
    return _scales_launch(_count_wide_blocks_kernel, num_rows, pitch, segments, FREE=free)


@functools.lru_cache(CACHED_LAUNCHES)
def _spread_launch(num_rows: int, pitch: int, segments: int, whole: bool) -> Launch:
    return _scales_launch(_spread_scales_kernel, num_rows, pitch, segments, WHOLE=whole)


def _scales_launch(kernel: Any, num_rows: int, pitch: int, segments: int,
                   **constants: Any) -> Launch:
    """A kernel over the segments of scale rows, as wide as an average segment (four widths)."""
    average = max(32, triton.next_power_of_2(triton.cdiv(pitch, segments)))
    return Launch(kernel, (triton.cdiv(num_rows, SPREAD_ROWS) * segments,), num_rows=num_rows,
                  pitch=pitch, num_segments=segments, ROWS=SPREAD_ROWS,
                  BLOCKS=min(MAX_SPREAD_BLOCKS, average), num_warps=2, **constants)


@functools.lru_cache(CACHED_LAUNCHES)
def _quantize_launch(problem: DualProblem, num_blocks: int, blocks_per_matrix: int, width: int,
                     stride: int, choose: bool, encode: bool) -> Launch:
    num_k_blocks = width // MX_BLOCK_SIZE
    grid = triton.cdiv(num_blocks, _TILE_BLOCKS) * triton.cdiv(num_k_blocks, _TILE_BLOCKS)
    return Launch(
        _quantize_dual_hopper_kernel, (grid,), num_blocks=num_blocks,
        blocks_per_matrix=blocks_per_matrix, num_k_blocks=num_k_blocks,
        x_stride_row=stride, FORMAT=problem.format.element.name,
        **scale_rule_constants(problem.format, problem.scale_rule),
        PAIRS=problem.dtype is torch.bfloat16, CHOOSE=choose, ENCODE=encode,
        MARK_ROWS=choose and problem.row_span is not ScaleSpan.BLOCK,
        MARK_COLUMNS=choose and problem.column_span is not ScaleSpan.BLOCK,
        ROW_ALIGNMENT=math.gcd(num_k_blocks, _TILE_BLOCKS) if choose else 1,
        WIDE_COLUMNS=choose and blocks_per_matrix % _TILE_BLOCKS == 0, num_warps=4)


QUANTIZE_DUAL = _QuantizeDual()
