"""Dual quantisation: rowwise and columnwise MXFP8 copies of a tensor from one read.

A CTA quantises a tile of 128 positions × 128 columns. A warp has 32 positions, so MX blocks of rows
(1 × 32) and of columns (32 × 1) lie inside a warp. TMA loads the whole tile at once as 32-bit
words (source.py). Then the CTA quantises stage by stage, first rowwise (rowwise.py), then
columnwise (columnwise.py), from the same shared memory (layouts.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .dual_hopper_columnwise import ColumnCopy, column_side
from .dual_hopper_layouts import MX_BLOCK, TILE_BLOCKS, row_words_layout
from .dual_hopper_rowwise import row_side
from .dual_hopper_scales import allocate_exchanged, scales_of_tile
from .dual_hopper_source import allocate_tile, tile_source
from .dual_hopper_values import Quantizer


@gluon.jit(
    do_not_specialize=["num_blocks", "blocks_per_matrix", "num_k_blocks"],
    do_not_specialize_on_alignment=["table"],
)
def _quantize_dual_hopper_kernel(
    row,
    row_scale,
    column,
    column_scale,
    x_desc,
    table,
    num_blocks,
    blocks_per_matrix,
    num_k_blocks,
    FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    DTYPE: gl.constexpr,
    CHOOSE: gl.constexpr,
    ENCODE: gl.constexpr,
    MARK_ROWS: gl.constexpr,
    MARK_COLUMNS: gl.constexpr,
    ROW_ALIGNMENT: gl.constexpr,
    WIDE_COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Quantise x [rows, K] to codes [rows, K] and, transposed, [matrices, K, 32 blocks_per_matrix].

    Grid: one CTA per tile, ⌈num_blocks / 4⌉ × ⌈num_k_blocks / 4⌉; tiles of a row are adjacent.

    x is passed as int32 words of values of DTYPE. CHOOSE: find and store the scale of each block.
    ENCODE: store codes, with the scales just found, or without CHOOSE with the scales in memory.
    MARK_ROWS, MARK_COLUMNS: store scale byte 0 for blocks of zeros and for no others, as the
    kernels that choose the scales of spans expect. ROW_ALIGNMENT (1, 2, 4) divides the number of
    scales per row. WIDE_COLUMNS: 4 divides the number of scales per column.
    """
    gl.static_assert(num_warps == TILE_BLOCKS, "a warp has one block of positions")
    HALVES: gl.constexpr = 1 if DTYPE == "fp32" else 2  # values a word, and blocks a stage's row
    STAGES: gl.constexpr = TILE_BLOCKS // HALVES
    quantizer = Quantizer(DTYPE, FORMAT, EMAX, THRESHOLD, CHOOSE, ENCODE)
    tiles_k = gl.cdiv(num_k_blocks, TILE_BLOCKS)
    first_block = gl.program_id(0) // tiles_k * TILE_BLOCKS
    first_k_block = gl.program_id(0) % tiles_k * TILE_BLOCKS
    k_blocks = gl.minimum(num_k_blocks - first_k_block, TILE_BLOCKS)
    stages = gl.cdiv(k_blocks, HALVES)
    gl.assume(stages > 0)
    copy = ColumnCopy(num_blocks, blocks_per_matrix, num_k_blocks * MX_BLOCK)
    loads, tile = allocate_tile(x_desc, STAGES)
    exchanged = allocate_exchanged()
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    source = tile_source(first_block, table, num_blocks)
    source.start_loads(x_desc, loads, ready, first_k_block * (MX_BLOCK // HALVES), STAGES)
    rowwise = row_side(
        row,
        row_scale,
        source,
        first_k_block,
        num_k_blocks,
        BLOCKS=HALVES,
        ALIGNMENT=ROW_ALIGNMENT,
        MARK=MARK_ROWS,
    )
    columnwise = column_side(
        column, copy, first_block, first_k_block, STEPS=HALVES, MARK=MARK_COLUMNS
    )
    column_scales = scales_of_tile(
        column_scale, copy, first_block, first_k_block, exchanged, STEPS=HALVES, WIDE=WIDE_COLUMNS
    )
    if CHOOSE:
        row_bytes = rowwise.no_scales()
        column_bytes = columnwise.no_scales()
    else:
        row_bytes = rowwise.load_scales(k_blocks)
        column_bytes = column_scales.load()
    mbarrier.wait(ready, 0)
    if table is not None:
        source.clear_rows(tile, stages, row_words_layout(HALVES))
    for stage in range(stages):
        row_bytes = rowwise.quantize(tile, stage, row_bytes, quantizer)
        column_bytes = columnwise.quantize(tile, stage, column_bytes, quantizer)
    if CHOOSE:
        rowwise.store_scales(row_bytes, k_blocks)
        column_scales.store(column_bytes, source.counts, MARK_COLUMNS and table is not None)
