"""QUANTIZE_DUAL on gfx950."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.problem import DualProblem
from ..device.cdna4_operands import empty_operand
from ..device.compat import aggregate
from ..device.groups import clamp_rows
from ..device.mx_codec import e8m0_scale, encode, inverse_scale, magnitude_bits
from ..formats.spec import MXFormat
from ..formats.tensor import MXTensor
from .dual_host import QuantizeDual

# ---- Device code of dual quantisation on gfx950.
#
# A workgroup of four waves quantises 64 positions x 128 columns. The tile is read once, with whole
# lines, and kept in LDS. Each lane then reads whole blocks of 32 values: one of a row for the
# rowwise copy, one of a column for the columnwise copy. Maxima need no exchange between lanes, and
# codes are stored in runs of 32 bytes without a transposition.

NUM_WARPS = gl.constexpr(4)
ROWS, COLUMNS = gl.constexpr(64), gl.constexpr(128)
"""Positions and columns of a tile."""

_BLOCK = gl.constexpr(32)
_BYTE_NAN = gl.constexpr(255)

_ROW = gl.constexpr(gl.BlockedLayout([1, 32], [16, 4], [4, 1], [1, 0]))
"""One block of a row a lane."""

_COLUMN = gl.constexpr(gl.BlockedLayout([32, 1], [2, 32], [1, 4], [0, 1]))
"""One block of a column a lane."""


@gluon.constexpr_function
def _load_layout(bits):
    """Loads of 16 bytes a lane, 256 or 512 bytes a row."""
    values = 128 // bits
    lanes = min(64, COLUMNS.value // values)
    return gl.BlockedLayout([1, values], [64 // lanes, lanes], [NUM_WARPS.value, 1], [1, 0])


@gluon.constexpr_function
def _shared_layout(bits):
    """Rows with 16 bytes of padding: four rows of blocks touch different banks."""
    return gl.PaddedSharedLayout.with_identity_for(
        [[COLUMNS.value, 128 // bits]], [ROWS.value, COLUMNS.value], [1, 0]
    )


@aggregate
class Source:
    """Source rows of a tile's two blocks of positions, int32 scalars of each block.

    first: row of the first position. stop: end of its group's rows. grouped: 1 if the rows belong
    to a group; others count as zeros.
    """

    first_0: gl.tensor
    first_1: gl.tensor
    stop_0: gl.tensor
    stop_1: gl.tensor
    grouped_0: gl.tensor
    grouped_1: gl.tensor

    @gluon.jit
    def rows(self, position):
        """Row at each position, whether there is one, and whether it counts."""
        upper = position < _BLOCK
        row = gl.where(upper, self.first_0, self.first_1) + position % _BLOCK
        present = row < gl.where(upper, self.stop_0, self.stop_1)
        return row, present, present & (gl.where(upper, self.grouped_0, self.grouped_1) > 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find(block, begins, ends, starts, stops, index, num_groups):
    """First row, end row and whether the block is in a group. No row if no group has the block."""
    chosen = (begins <= block) & (block < ends)
    first = gl.sum(gl.where(chosen, starts + (block - begins) * _BLOCK, 0), 0)
    stop = gl.sum(gl.where(chosen, stops, 0), 0)
    grouped = gl.sum(gl.where(chosen & (index < num_groups), 1, 0), 0)
    return first, stop, grouped


@gluon.jit
def tile_source(block, group_offsets, num_rows, num_groups, BLOCK_G: gl.constexpr):
    """`Source` of positions 32 block … 32 block + 63 of the columnwise copy.

    Rows without a group have positions after the last group; the columnwise copy has zeros there.
    """
    if group_offsets is None:
        first = block * _BLOCK
        return Source(
            first_0=first,
            first_1=first + _BLOCK,
            stop_0=num_rows,
            stop_1=num_rows,
            grouped_0=1,
            grouped_1=1,
        )
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([(BLOCK_G + 63) // 64], [64], [NUM_WARPS], [0])
        index = gl.arange(0, BLOCK_G, LAYOUT)
        starts = gl.load(group_offsets + index, mask=index <= num_groups, other=0)
        stops = gl.load(group_offsets + index + 1, mask=index < num_groups, other=0)
        starts = clamp_rows(starts, num_rows)
        stops = gl.where(index == num_groups, num_rows, clamp_rows(stops, num_rows))
        sizes = (gl.maximum(stops - starts, 0) + _BLOCK - 1) // _BLOCK
        ends = gl.associative_scan(sizes, 0, _add)
        begins = ends - sizes
        first_0, stop_0, grouped_0 = _find(block, begins, ends, starts, stops, index, num_groups)
        first_1, stop_1, grouped_1 = _find(
            block + 1, begins, ends, starts, stops, index, num_groups
        )
        return Source(
            first_0=first_0,
            first_1=first_1,
            stop_0=stop_0,
            stop_1=stop_1,
            grouped_0=grouped_0,
            grouped_1=grouped_1,
        )


@gluon.jit
def _quantize(blocks, AXIS: gl.constexpr, quantizer):
    """Codes (uint8) of blocks of float32 values along an axis, and their scale bytes (int32)."""
    byte = e8m0_scale(gl.max(magnitude_bits(blocks), AXIS), quantizer.EMAX, quantizer.THRESHOLD)
    wide = gl.expand_dims(byte, AXIS)
    codes = encode(blocks * inverse_scale(wide), wide == _BYTE_NAN, quantizer.FORMAT)
    return codes.to(gl.uint8), byte


@aggregate
class Quantizer:
    """Format of the codes, and the scale rule as in `scale_rule_constants`."""

    FORMAT: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr


@aggregate
class RowCopy:
    """Rowwise copy: pointers to codes and scales, and num_k_blocks of a row.

    Rows of codes are `pitch` bytes apart. Plane j of scales has the bytes of block j of all rows;
    planes are scale_pitch bytes apart.
    """

    codes: gl.tensor
    scale: gl.tensor
    pitch: gl.tensor
    scale_pitch: gl.tensor
    num_k_blocks: gl.tensor

    @gluon.jit
    def store(self, memory, source, first_row, first_k_block, quantizer):
        """Quantise the rows of the tile in LDS; the copy's rows count from `first_row`."""
        values = memory.load(_ROW).to(gl.float32)  # [64, 128]
        blocks = gl.reshape(values, [ROWS, COLUMNS // _BLOCK, _BLOCK])
        codes, byte = _quantize(blocks, 2, quantizer)
        codes = gl.convert_layout(gl.reshape(codes, [ROWS, COLUMNS]), _ROW)
        row, present, _ = source.rows(gl.arange(0, ROWS, gl.SliceLayout(1, _ROW)))
        k = first_k_block * _BLOCK + gl.arange(0, COLUMNS, gl.SliceLayout(0, _ROW))
        target = (first_row + row)[:, None] * self.pitch + k[None, :]
        target = gl.max_contiguous(gl.multiple_of(target, [1, 16]), [1, 32])
        mask = present[:, None] & (k // _BLOCK < self.num_k_blocks)[None, :]
        gl.store(self.codes + target, codes, mask=mask)
        LAYOUT: gl.constexpr = byte.type.layout
        row, present, _ = source.rows(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)))
        k_block = first_k_block + gl.arange(0, COLUMNS // _BLOCK, gl.SliceLayout(0, LAYOUT))
        target = (first_row + row)[:, None] + k_block.to(gl.int64)[None, :] * self.scale_pitch
        mask = present[:, None] & (k_block < self.num_k_blocks)[None, :]
        gl.store(self.scale + target, byte.to(gl.uint8), mask=mask)


@aggregate
class ColumnCopy:
    """Columnwise copy: as `RowCopy`; num_blocks of a row, and `width` rows a matrix."""

    codes: gl.tensor
    scale: gl.tensor
    pitch: gl.tensor
    scale_pitch: gl.tensor
    num_blocks: gl.tensor
    width: gl.tensor

    @gluon.jit
    def store(self, memory, first_column, first_block, first_k, quantizer):
        """Quantise the columns of the tile in LDS; the copy's rows count from `first_column`."""
        values = memory.load(_COLUMN).to(gl.float32)  # [64, 128]
        blocks = gl.reshape(values, [ROWS // _BLOCK, _BLOCK, COLUMNS])
        codes, byte = _quantize(blocks, 1, quantizer)
        codes = gl.convert_layout(gl.reshape(codes, [ROWS, COLUMNS]), _COLUMN)
        place = first_block * _BLOCK + gl.arange(0, ROWS, gl.SliceLayout(1, _COLUMN))
        k = first_k + gl.arange(0, COLUMNS, gl.SliceLayout(0, _COLUMN))
        target = (first_column + k)[None, :] * self.pitch + place[:, None]
        target = gl.max_contiguous(gl.multiple_of(target, [16, 1]), [32, 1])
        mask = (place // _BLOCK < self.num_blocks)[:, None] & (k < self.width)[None, :]
        gl.store(self.codes + target, codes, mask=mask)
        LAYOUT: gl.constexpr = byte.type.layout
        block = first_block + gl.arange(0, ROWS // _BLOCK, gl.SliceLayout(1, LAYOUT))
        k = first_k + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        target = (first_column + k)[None, :] + block.to(gl.int64)[:, None] * self.scale_pitch
        mask = (block < self.num_blocks)[:, None] & (k < self.width)[None, :]
        gl.store(self.scale + target, byte.to(gl.uint8), mask=mask)


@gluon.jit(
    do_not_specialize=[
        *("num_rows", "num_groups", "num_k_blocks", "num_column_blocks"),
        *("row_pitch", "row_scale_pitch", "column_pitch", "column_scale_pitch"),
    ],
    do_not_specialize_on_alignment=["row_scale", "column_scale", "group_offsets"],
)
def _quantize_dual_cdna4_kernel(
    row,
    row_scale,
    column,
    column_scale,
    x,
    group_offsets,
    num_rows,
    num_groups,
    num_k_blocks,
    num_column_blocks,
    x_stride_batch,
    x_stride_row,
    row_pitch,
    row_scale_pitch,
    column_pitch,
    column_scale_pitch,
    FORMAT: gl.constexpr,
    EMAX: gl.constexpr,
    THRESHOLD: gl.constexpr,
    BLOCK_G: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Quantise x [batch, num_rows, K] to codes [batch, num_rows, K] and, transposed, [batch, K, P].

    K = 32 num_k_blocks, P = 32 num_column_blocks. P equals num_rows, or with group offsets (batch
    1) the padded capacity. Rows of x are dense. Pitches: of `RowCopy` and `ColumnCopy`.
    Grid: (batch · tiles of P · tiles of K,), one tile per workgroup; tiles of the same rows are
    neighbours.
    """
    gl.static_assert(num_warps == NUM_WARPS)
    BITS: gl.constexpr = x.dtype.element_ty.primitive_bitwidth
    LOAD: gl.constexpr = _load_layout(BITS)
    quantizer = Quantizer(FORMAT=FORMAT, EMAX=EMAX, THRESHOLD=THRESHOLD)
    width = num_k_blocks * _BLOCK
    tiles_k = gl.cdiv(width, COLUMNS)
    tiles_p = gl.cdiv(num_column_blocks, ROWS // _BLOCK)
    first_block = gl.program_id(0) // tiles_k % tiles_p * (ROWS // _BLOCK)
    first_k = gl.program_id(0) % tiles_k * COLUMNS
    batch = (gl.program_id(0) // (tiles_k * tiles_p)).to(gl.int64)
    source = tile_source(first_block, group_offsets, num_rows, num_groups, BLOCK_G)
    rows, _, counts = source.rows(gl.arange(0, ROWS, gl.SliceLayout(1, LOAD)))
    k = first_k + gl.arange(0, COLUMNS, gl.SliceLayout(0, LOAD))
    offsets = rows.to(gl.int64)[:, None] * x_stride_row + k[None, :]
    mask = counts[:, None] & (k // _BLOCK < num_k_blocks)[None, :]
    values = gl.load(x + batch * x_stride_batch + offsets, mask=mask, other=0.0)  # [64, 128]
    memory = gl.allocate_shared_memory(
        x.dtype.element_ty, [ROWS, COLUMNS], _shared_layout(BITS), values
    )
    rowwise = RowCopy(
        codes=row,
        scale=row_scale,
        pitch=row_pitch,
        scale_pitch=row_scale_pitch,
        num_k_blocks=num_k_blocks,
    )
    rowwise.store(memory, source, batch * num_rows, first_k // _BLOCK, quantizer)
    columnwise = ColumnCopy(
        codes=column,
        scale=column_scale,
        pitch=column_pitch,
        scale_pitch=column_scale_pitch,
        num_blocks=num_column_blocks,
        width=width,
    )
    columnwise.store(memory, batch * width, first_block, first_k, quantizer)


class _QuantizeDual(QuantizeDual):
    """One tile for every shape. MFMA of gfx950 read one scale for each block of 32."""

    backend = "cdna4"
    kernel = _quantize_dual_cdna4_kernel
    tile = (ROWS.value, COLUMNS.value)

    def empty(self, like: torch.Tensor, shape: tuple[int, ...], format: MXFormat) -> MXTensor:
        """An uninitialised MXTensor as the grouped GEMM reads it in place."""
        return empty_operand(like, shape, format)

    def pitches(self, row: MXTensor, column: MXTensor) -> dict[str, int]:
        """Distances of rows of codes and of planes of scales, in bytes."""
        return {
            "row_pitch": row.qdata.stride(-2),
            "row_scale_pitch": row.scale.stride(-1),
            "column_pitch": column.qdata.stride(-2),
            "column_scale_pitch": column.scale.stride(-1),
        }

    def constants(self, block_g: int) -> dict[str, Any]:
        """Launch options."""
        return {"num_warps": NUM_WARPS.value}

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "gfx950":
            return f"needs gfx950, not {problem.target.arch}"
        return super().unsupported(problem)


QUANTIZE_DUAL = _QuantizeDual()
