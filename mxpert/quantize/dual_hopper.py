"""Host side of QUANTIZE_DUAL on Hopper: block table, scales of spans, both copies; no host sync."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.runtime.jit import JITFunction

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import Config, DualProblem, Op
from ..device.groups import MAX_GROUPS
from ..device.hopper import rows_descriptor
from ..device.mx_codec import scale_rule_constants
from ..formats.spans import FREE_BINADES, most_wide_blocks
from ..formats.spec import FLOAT_DTYPES, LINE_SPANS, MX_BLOCK_SIZE, MXFormat, ScaleSpan
from ..formats.tensor import MXTensor
from ..routing.plan import padded_capacity
from .dual_hopper_kernel import _quantize_dual_hopper_kernel
from .dual_hopper_source import STAGE_WORDS, TILE, TILE_BLOCKS
from .dual_hopper_spans import (
    MAX_SPREAD_BLOCKS,
    SPREAD_ROWS,
    TABLE_BLOCKS,
    _block_table_kernel,
    _count_wide_blocks_kernel,
    _spread_scales_kernel,
    _start_counts_kernel,
)
from .dual_host import TO_NEAREST
from .inputs import DualInputs

_LOAD_OF_BLOCK, _LOAD_OF_TILE = (
    rows_descriptor(rows, STAGE_WORDS.value, torch.int32) for rows in (MX_BLOCK_SIZE, TILE.value)
)
"""TMA loads of a stage of x as int32. With groups, the rows of each block are loaded separately;
without groups, the rows of a tile are contiguous."""

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_REGISTERS = 128
"""Registers per thread, for four CTAs per SM. With 96 registers and five CTAs the kernel is 2 %
slower (H200)."""

AUTO = frozenset((ScaleSpan.AUTO,))
LONG = frozenset(LINE_SPANS) - {ScaleSpan.BLOCK}
"""AUTO: spans whose wide blocks are counted. LONG: spans in which several blocks share a scale."""


class _QuantizeDual:
    """x → rowwise and columnwise MX copies, bit-exact to `formats.spans.quantize_spans`.

    Spans longer than a block need two passes over x. The first pass finds the scales.
    """

    op = Op.QUANTIZE_DUAL
    backend = "hopper"

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernels cannot serve `problem`; None if they can."""
        if problem.target.arch != "sm_90":
            return f"needs sm_90, not {problem.target.arch}"
        if problem.dtype not in FLOAT_DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}"
        if problem.stochastic:
            return TO_NEAREST
        if problem.grouped_rows and problem.num_groups > MAX_GROUPS:
            return (
                f"holds at most {MAX_GROUPS} groups, got {problem.num_groups}; "
                "quantise fewer experts at a time"
            )
        return None

    def configs(self, problem: DualProblem) -> Iterator[Config]:
        """One tile serves every shape."""
        yield None

    def heuristic(self, problem: DualProblem) -> Config:
        return None

    def launch(
        self, problem: DualProblem, config: Config, inputs: DualInputs
    ) -> tuple[MXTensor, MXTensor]:
        """Return the rowwise copy (shape of x) and the columnwise copy.

        The columnwise copy is [K, M], [K, padded capacity] with group offsets, or [G, K, N].
        """
        plan, x = _plan(problem), inputs.x
        row, column = _allocate(plan.row, x), _allocate(plan.column, x)
        table = starts = None
        if plan.table is not None:
            table = x.new_empty((plan.num_blocks, 2), dtype=torch.int32)
            starts = x.new_empty(problem.num_groups + 1, dtype=torch.int32)
            plan.table(
                table_ptr=table,
                starts_ptr=starts,
                row_wide_ptr=row.wide_blocks,
                column_wide_ptr=column.wide_blocks,
                group_offsets_ptr=inputs.group_offsets,
            )
        elif plan.start is not None:
            plan.start(row_wide_ptr=row.wide_blocks, column_wide_ptr=column.wide_blocks)
        if plan.first is None:
            return row, column
        tensors = dict(
            row=row.qdata,
            row_scale=row.scale,
            column=column.qdata,
            column_scale=column.scale,
            x_desc=_words(x),
            table=table,
        )
        plan.first(**tensors)
        for launch, chosen in ((plan.count, AUTO), (plan.spread, LONG)):
            if launch is not None:
                launch(
                    **_scales_of("row", row, chosen),
                    **_scales_of("column", column, chosen),
                    starts_ptr=starts,
                )
        if plan.last is not None:
            plan.last(**tensors)
        return row, column


@dataclass(frozen=True)
class _Copy:
    """Shape, span and format of one copy. few: number of wide blocks that AUTO tolerates."""

    shape: tuple[int, ...]
    span: ScaleSpan
    format: MXFormat

    @functools.cached_property
    def scale_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // MX_BLOCK_SIZE)

    @property
    def few(self) -> int:
        return most_wide_blocks(math.prod(self.shape))


@dataclass(frozen=True)
class _Plan:
    """Sizes and launches of a dual quantisation; launches that are not needed are None.

    table: writes the block table of groups, and initialises the counts of wide blocks.
    start: initialises the counts if rows are not grouped.
    first: finds the scales of blocks; also writes codes if no span is longer than a block.
    count, spread: count wide blocks, and write the scales of longer spans.
    last: writes codes with the scales of longer spans.
    """

    row: _Copy
    column: _Copy
    num_blocks: int
    table: Launch | None = None
    start: Launch | None = None
    first: Launch | None = None
    count: Launch | None = None
    spread: Launch | None = None
    last: Launch | None = None


@functools.lru_cache(CACHED_LAUNCHES)
def _plan(problem: DualProblem) -> _Plan:
    *leading, num_rows, width = problem.shape
    length = padded_capacity(num_rows, problem.num_groups) if problem.grouped_rows else num_rows
    row = _Copy((*leading, num_rows, width), problem.row_span, problem.format)
    column = _Copy((*leading, width, length), problem.column_span, problem.format)
    num_blocks = math.prod(leading) * length // MX_BLOCK_SIZE
    spans = {row.span, column.span}
    counts = dict(row_few=row.few, column_few=column.few)
    launches: dict[str, Launch] = {}
    if problem.grouped_rows:
        launches["table"] = _table_launch(num_rows, problem.num_groups, num_blocks, counts)
    elif AUTO & spans:
        launches["start"] = Launch(_start_counts_kernel, (1,), **counts, num_warps=1)
    if math.prod(row.shape) + math.prod(column.shape) > 0:
        sizes = num_blocks, length // MX_BLOCK_SIZE, width
        one_pass = not LONG & spans
        launches["first"] = _quantize_launch(problem, *sizes, choose=True, encode=one_pass)
        if not one_pass:
            segments = problem.num_groups if problem.grouped_rows else 1
            launches |= _span_launches(problem, row, column, segments)
            launches["last"] = _quantize_launch(problem, *sizes, choose=False, encode=True)
    return _Plan(row, column, num_blocks, **launches)


def _span_launches(
    problem: DualProblem, row: _Copy, column: _Copy, segments: int
) -> dict[str, Launch]:
    """The launches `count` (if a span is AUTO) and `spread` of a plan."""
    launches: dict[str, Launch] = {}
    if AUTO & {row.span, column.span}:
        free = FREE_BINADES[problem.format.element.name]
        launches["count"] = _scales_launch(
            _count_wide_blocks_kernel, row, column, segments, AUTO, FREE=free
        )
    launches["spread"] = _scales_launch(
        _spread_scales_kernel,
        row,
        column,
        segments,
        LONG,
        ROW_WHOLE=row.span is not ScaleSpan.SPAN128,
        COLUMN_WHOLE=column.span is not ScaleSpan.SPAN128,
    )
    return launches


def _allocate(copy: _Copy, x: torch.Tensor) -> MXTensor:
    """An uninitialised MXTensor, quantised along its last axis."""
    wide = x.new_empty(1, dtype=torch.int32) if copy.span is ScaleSpan.AUTO else None
    return MXTensor.unchecked(
        x.new_empty(copy.shape, dtype=torch.uint8),
        x.new_empty(copy.scale_shape, dtype=torch.uint8),
        copy.format,
        scale_span=copy.span,
        wide_blocks=wide,
    )


def _words(x: torch.Tensor) -> torch.Tensor:
    """View x as int32 for TMA; copy it unless rows are dense, evenly spaced and 16-byte aligned."""
    if x.numel() == 0:  # a TMA descriptor cannot be empty, but the copies may have columns
        x = x.new_empty((1, x.shape[-1]))
    if (
        x.stride(-1) != 1
        or x.stride(-2) < x.shape[-1]
        or x.stride(-2) * x.element_size() % 16
        or x.data_ptr() % 16
        or (x.dim() > 2 and not x.is_contiguous())
    ):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def _scales_of(
    name: str, copy: MXTensor, spans: frozenset[ScaleSpan]
) -> dict[str, torch.Tensor | None]:
    """Scale and count arguments of a copy; None unless its span is one of `spans`."""
    chosen = copy.scale_span in spans
    return {
        f"{name}_scale_ptr": copy.scale if chosen else None,
        f"{name}_wide_ptr": copy.wide_blocks if chosen else None,
    }


def _table_launch(
    num_rows: int, num_groups: int, num_blocks: int, counts: dict[str, int]
) -> Launch:
    return Launch(
        _block_table_kernel,
        (triton.cdiv(num_blocks, TABLE_BLOCKS),),
        num_rows=num_rows,
        num_groups=num_groups,
        num_blocks=num_blocks,
        **counts,
        BLOCKS=TABLE_BLOCKS,
        BLOCK_G=max(32, triton.next_power_of_2(num_groups + 1)),
        num_warps=2,
    )


def _scales_launch(
    kernel: JITFunction,
    row: _Copy,
    column: _Copy,
    segments: int,
    spans: frozenset[ScaleSpan],
    **constants: int,
) -> Launch:
    """Launch of a kernel over the segments of scale rows of the copies with these spans.

    BLOCKS is the larger average segment length of both copies, rounded up to a power of two.
    """
    sizes: dict[str, int] = {}
    programs, average = [], 32
    for name, copy, parts in (("row", row, 1), ("column", column, segments)):
        *leading, pitch = copy.scale_shape
        num_rows, chosen = math.prod(leading), copy.span in spans
        sizes |= {f"{name}_rows": num_rows, f"{name}_pitch": pitch}
        programs.append(triton.cdiv(num_rows, SPREAD_ROWS) * parts if chosen else 0)
        average = max(average, triton.next_power_of_2(triton.cdiv(pitch, parts)) if chosen else 0)
    return Launch(
        kernel,
        (sum(programs),),
        **sizes,
        row_programs=programs[0],
        num_segments=segments,
        ROWS=SPREAD_ROWS,
        BLOCKS=min(MAX_SPREAD_BLOCKS, average),
        num_warps=2,
        **constants,
    )


def _quantize_launch(
    problem: DualProblem,
    num_blocks: int,
    blocks_per_matrix: int,
    width: int,
    *,
    choose: bool,
    encode: bool,
) -> Launch:
    num_k_blocks = width // MX_BLOCK_SIZE
    grid = triton.cdiv(num_blocks, TILE_BLOCKS.value) * triton.cdiv(num_k_blocks, TILE_BLOCKS.value)
    return Launch(
        _quantize_dual_hopper_kernel,
        (grid,),
        {"x_desc": _LOAD_OF_BLOCK if problem.grouped_rows else _LOAD_OF_TILE},
        num_blocks=num_blocks,
        blocks_per_matrix=blocks_per_matrix,
        num_k_blocks=num_k_blocks,
        FORMAT=problem.format.element.name,
        **scale_rule_constants(problem.format, problem.scale_rule),
        DTYPE=_DTYPE_NAMES[problem.dtype],
        CHOOSE=choose,
        ENCODE=encode,
        MARK_ROWS=choose and problem.row_span is not ScaleSpan.BLOCK,
        MARK_COLUMNS=choose and problem.column_span is not ScaleSpan.BLOCK,
        ROW_ALIGNMENT=math.gcd(num_k_blocks, TILE_BLOCKS.value),
        WIDE_COLUMNS=blocks_per_matrix % TILE_BLOCKS.value == 0,
        num_warps=TILE_BLOCKS.value,
        maxnreg=_REGISTERS,
    )


QUANTIZE_DUAL = _QuantizeDual()
