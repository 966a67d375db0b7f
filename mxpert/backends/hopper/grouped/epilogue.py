"""Epilogue of the grouped GEMM: scales, rounding, stores of full and ragged tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...common.compat import async_store, barrier


@gluon.jit
def scale_value(byte):
    """E8M0 bytes 1 to 254 as float32; operands with one scale per row have no other bytes."""
    return (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _one_each():
    """Layout of 128 columns with one column per thread of a warpgroup."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def load_scales(scales, multiplied, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """Load scale bytes of 64 rows and of each half of the columns, ahead of their use.

    If the reduction is empty, return 127: the loaded bytes are arbitrary then, NaN included.
    """
    a_bytes, b_bytes, a_pitch, b_pitch, num_rows, num_columns = scales
    rows = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), num_rows - 1)
    columns = gl.arange(0, 128, _one_each())
    by_row = gl.load(a_bytes + rows * a_pitch)
    left = gl.load(b_bytes + gl.minimum(columns, num_columns - 1) * b_pitch)
    right = left
    if HALVES == 2:
        right = gl.load(b_bytes + gl.minimum(columns + 128, num_columns - 1) * b_pitch)
    return (
        gl.where(multiplied, by_row, 127),
        gl.where(multiplied, left, 127),
        gl.where(multiplied, right, 127),
    )


@gluon.jit
def apply_scales(total, by_row, by_column, LAYOUT: gl.constexpr, ROW_SCALED: gl.constexpr):
    """Multiply [64, 128] sums by the scale of each column and, if ROW_SCALED, of each row."""
    factors = gl.convert_layout(scale_value(by_column), gl.SliceLayout(0, LAYOUT))
    if ROW_SCALED:
        total = total * gl.expand_dims(scale_value(by_row), 1)
    return total * gl.expand_dims(factors, 0)


@gluon.constexpr_function
def _coalesced(COLUMNS, BITS):
    """Layout of [64, COLUMNS] values for coalesced accesses of 16 bytes a thread."""
    vector = 128 // BITS
    return gl.BlockedLayout(
        [1, vector], [32 * vector // COLUMNS, COLUMNS // vector], [4, 1], [1, 0]
    )


@gluon.jit
def _store_piece(
    value, out, out_desc, staging, row, row_end, column, num_columns, ACCUMULATE: gl.constexpr
):
    """Store [64, columns] values through shared memory.

    Full tiles use TMA, which clips the last columns. Ragged tiles and ACCUMULATE (out += value) use
    masked accesses.
    """
    COLUMNS: gl.constexpr = value.shape[1]
    LAYOUT: gl.constexpr = _coalesced(COLUMNS, out.dtype.element_ty.primitive_bitwidth)
    tma.store_wait(0)
    barrier()  # only the thread that starts the copies can wait for them
    staging.store(value)
    if (not ACCUMULATE) & (row + 64 <= row_end):
        fence_async_shared()
        async_store(out_desc, [row, column], staging)
    else:
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        place = gl.expand_dims(rows.to(gl.int64) * num_columns, 1) + gl.expand_dims(columns, 0)
        mask = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(columns < num_columns, 0)
        result = staging.load(LAYOUT)
        if ACCUMULATE:
            result += gl.load(out + place, mask=mask, other=0.0)
        gl.store(out + place, result, mask=mask)


@gluon.jit
def store_tile(total, output, row, row_end, column, num_columns, ACCUMULATE: gl.constexpr):
    """Store [64, 128] sums to `out` at (row, column), in pieces of 128 or 64 columns."""
    out, out_desc, staging = output
    value = total.to(out.dtype.element_ty)
    if staging.shape[1] == 128:
        _store_piece(value, out, out_desc, staging, row, row_end, column, num_columns, ACCUMULATE)
    else:
        left, right = value.reshape([64, 2, 64]).permute((0, 2, 1)).split()
        _store_piece(left, out, out_desc, staging, row, row_end, column, num_columns, ACCUMULATE)
        if column + 64 < num_columns:
            _store_piece(
                right, out, out_desc, staging, row, row_end, column + 64, num_columns, ACCUMULATE
            )
