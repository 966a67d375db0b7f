"""QUANTIZE_DUAL on Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..device.groups import group_extents
from ..device.mx_codec import quantize_tile, random_row_bits
from .dual_host import QuantizeDual

# ---- Device code of dual quantisation: rowwise and columnwise MX copies from one read of the data.


@triton.jit
def source_rows(
    first_block,
    group_offsets_ptr,
    num_rows,
    num_groups,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Source rows of BLOCK_ROWS positions in the padded columnwise copy, from `first_block` on.

    Returns three vectors [BLOCK_ROWS]: the row at each position, whether there is one, and whether
    it belongs to a group. Rows without a group are assigned to positions after the last group; the
    columnwise copy holds zeros there. There is always room: each group is padded by less than 32
    rows, and the copy has 32 positions per group more than there are rows.
    """
    BLOCKS: tl.constexpr = BLOCK_ROWS // 32
    starts, stops, sizes = group_extents(group_offsets_ptr, num_groups, num_rows, 32, BLOCK_G)
    ends = tl.cumsum(sizes, axis=0)
    begins = ends - sizes
    blocks = first_block + tl.arange(0, BLOCKS)[:, None]
    chosen = (begins[None, :] <= blocks) & (blocks < ends[None, :])  # [BLOCKS, BLOCK_G]
    first = tl.sum(tl.where(chosen, (starts - begins * 32)[None, :] + blocks * 32, 0), axis=1)
    stop = tl.sum(tl.where(chosen, stops[None, :], 0), axis=1)
    group = tl.sum(tl.where(chosen, tl.arange(0, BLOCK_G)[None, :], 0), axis=1)
    step = tl.arange(0, 32)[None, :]
    rows = first[:, None] + step
    present = rows < stop[:, None]  # stop is 0 for blocks without a group
    grouped = present & (group < num_groups)[:, None]
    return (
        tl.reshape(rows, (BLOCK_ROWS,)),
        tl.reshape(present, (BLOCK_ROWS,)),
        tl.reshape(grouped, (BLOCK_ROWS,)),
    )


@triton.jit(
    do_not_specialize=("num_rows", "num_groups", "num_k_blocks", "num_column_blocks"),
    do_not_specialize_on_alignment=("row_scale_ptr", "column_scale_ptr", "group_offsets_ptr"),
)
def _quantize_dual_kernel(
    row_ptr,
    row_scale_ptr,
    column_ptr,
    column_scale_ptr,
    x_ptr,
    group_offsets_ptr,
    seed_ptr,
    num_rows,
    num_groups,
    num_k_blocks,
    num_column_blocks,
    x_stride_batch,
    x_stride_row,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Quantise x [batch, num_rows, K] to codes [batch, num_rows, K] and, transposed, [batch, K, P].

    P = 32 · num_column_blocks. It equals num_rows, or with group offsets (batch 1) the padded
    capacity.

    Grid: (batch · tiles_p · tiles_k,), one [BLOCK_ROWS, BLOCK_COLUMNS] tile of x per program; tiles
    of the same rows are neighbours.
    """
    width, length = num_k_blocks * 32, num_column_blocks * 32
    tiles_k, tiles_p = tl.cdiv(width, BLOCK_COLUMNS), tl.cdiv(length, BLOCK_ROWS)
    tile_p = tl.program_id(0) // tiles_k % tiles_p
    batch = (tl.program_id(0) // (tiles_k * tiles_p)).to(tl.int64)
    first_k = tl.program_id(0) % tiles_k * BLOCK_COLUMNS
    k = first_k + tl.arange(0, BLOCK_COLUMNS)
    k_blocks = first_k // 32 + tl.arange(0, BLOCK_COLUMNS // 32)
    places = tile_p * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if group_offsets_ptr is None:
        rows, present = places, places < num_rows
        grouped = present
    else:
        rows, present, grouped = source_rows(
            tile_p * (BLOCK_ROWS // 32),
            group_offsets_ptr,
            num_rows,
            num_groups,
            BLOCK_ROWS,
            BLOCK_G,
        )
    x_ptrs = x_ptr + batch * x_stride_batch + rows.to(tl.int64) * x_stride_row
    values = tl.load(
        x_ptrs[:, None] + k[None, :], other=0.0, mask=grouped[:, None] & (k < width)[None, :]
    ).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    # rowwise: codes [BLOCK_ROWS, BLOCK_COLUMNS] uint8, scale [BLOCK_ROWS, BLOCK_COLUMNS/32] E8M0
    random = None
    if seed_ptr is not None:
        first = (batch * num_rows + rows) * width + first_k
        random = random_row_bits(seed_ptr, first, BLOCK_COLUMNS)
    codes, scale = quantize_tile(values, FORMAT, EMAX, THRESHOLD, random=random)
    out_rows = batch * num_rows + rows
    tl.store(
        row_ptr + out_rows[:, None] * width + k[None, :],
        codes,
        mask=present[:, None] & (k < width)[None, :],
    )
    tl.store(
        row_scale_ptr + out_rows[:, None] * num_k_blocks + k_blocks[None, :],
        scale,
        mask=present[:, None] & (k_blocks < num_k_blocks)[None, :],
    )
    # columnwise: scale [BLOCK_ROWS/32, BLOCK_COLUMNS]; codes and scales are stored transposed
    codes, scale = quantize_tile(values, FORMAT, EMAX, THRESHOLD, AXIS=0, random=random)
    out_columns = batch * width + k
    tl.store(
        column_ptr + out_columns[:, None] * length + places[None, :],
        codes.T,
        mask=(k < width)[:, None] & (places < length)[None, :],
    )
    blocks = tile_p * (BLOCK_ROWS // 32) + tl.arange(0, BLOCK_ROWS // 32)
    tl.store(
        column_scale_ptr + out_columns[:, None] * num_column_blocks + blocks[None, :],
        scale.T,
        mask=(k < width)[:, None] & (blocks < num_column_blocks)[None, :],
    )


class _QuantizeDual(QuantizeDual):
    """A tile has 64 rows: stores of 64 bytes (two sectors) in rows of the columnwise copy."""

    kernel = _quantize_dual_kernel
    tile = (64, 128)
    rounds_stochastically = True

    def constants(self, block_g: int) -> dict[str, Any]:
        """Tile and launch options. Many groups need more warps: a vector of them is held."""
        block_rows, block_columns = self.tile
        return {
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
            "num_warps": 4 if block_g <= 512 else 8,
        }


QUANTIZE_DUAL = _QuantizeDual()
