"""Main loop of the prefill kernel: a tile of ``x @ w.T`` on scaled MFMA.

A step is 128 elements of the contracted dimension. A wave multiplies the operands that it has in
registers, then reads those of the next step from LDS and starts the copies of a later one. The two
groups of waves do so in turns (ping-pong): while one multiplies, the other reads and copies.

Copies have more than one step's time. LDS that a copy fills is free: both groups have passed the
barrier after their last read of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.compat import aggregate, reinterpret
from ..lib.gcn import as_one_register, delay_half_of_waves, scheduling_fence, set_priority
from .prefill_copies import Ring, copy_ahead, copy_first, num_slots, steps_per_buffer, weight_buffer
from .prefill_layouts import (
    mfma_layout,
    mfma_rows,
    row_scale_dwords,
    rows_in_lds,
    scales_in_lds,
    warps_n,
    weight_parts,
    weight_scale_dwords,
    weight_scales_in_lds,
    weights_in_lds,
)

cdna4 = gl.amd.cdna4
async_copy = gl.amd.cdna4.async_copy


@aggregate
class Fragments:
    """Operands of one step in registers: rows, parts of the weights, and scales as dwords."""

    rows: gl.tensor
    row_scales: gl.tensor
    weights: gl.tuple
    weight_scales: gl.tensor


@gluon.constexpr_function
def element_type(FORMAT):
    """Type of the sorted rows in LDS."""
    return {"e2m1": gl.uint8, "e4m3": gl.float8e4nv, "e5m2": gl.float8e5}[FORMAT]


@gluon.constexpr_function
def operand_layout(BLOCK_M, FORMAT, INDEX):
    """Fragments of the rows (INDEX 0) or of the weights (1)."""
    return gl.DotOperandLayout(INDEX, mfma_layout(BLOCK_M, FORMAT), 16)


@gluon.constexpr_function
def scale_layout(BLOCK_M, FORMAT, INDEX, ROWS):
    """Scales [ROWS, 4] of one step for the MFMA."""
    return cdna4.get_mfma_scale_layout(operand_layout(BLOCK_M, FORMAT, INDEX), [ROWS, 4])


@gluon.jit
def _read_rows(buffers, variant, slot, ODD: gl.constexpr):
    """Fragments [BLOCK_M, 128 elements] of the sorted rows in a step; ODD: its last bit."""
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    TYPE: gl.constexpr = element_type(variant.FORMAT)
    rows = buffers.rows.index(slot >> PER_BUFFER - 1)
    tile = reinterpret(rows, TYPE, [BLOCK_M, 128], rows_in_lds(BLOCK_M, variant.FORMAT))
    if PER_BUFFER == 2:
        tile = tile.slice(64 * ODD, 64, dim=1)
    return async_copy.load_shared_relaxed(tile, operand_layout(BLOCK_M, variant.FORMAT, 0))


@gluon.jit
def _read_weights(buffers, variant, slot, ODD: gl.constexpr, PART: gl.constexpr):
    """Fragments of one part of the weights in a step, [64 bytes, 256 / parts]."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    INDEX: gl.constexpr = weight_buffer(BLOCK_M, variant.FORMAT, ODD, PART)
    ROWS: gl.constexpr = 256 // weight_parts(BLOCK_M)
    weights = buffers.weights[INDEX].index(slot >> steps_per_buffer(variant.FORMAT) - 1)
    part = reinterpret(weights, gl.uint8, [64, ROWS], weights_in_lds(BLOCK_M, variant.FORMAT))
    return async_copy.load_shared_relaxed(part, operand_layout(BLOCK_M, variant.FORMAT, 1))


@gluon.jit
def _read_row_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the sorted rows in a step, one dword a lane; see `row_scale_dwords`."""
    UNITS: gl.constexpr = variant.BLOCK_M // 64
    ROWS: gl.constexpr = mfma_rows(variant.FORMAT)
    slot = buffers.row_scales.index(pair & 1).slice(0, UNITS, dim=0)
    dwords = reinterpret(slot, gl.int32, [UNITS * ROWS, 128 // ROWS], scales_in_lds(UNITS, ROWS))
    return async_copy.load_shared_relaxed(
        dwords.slice(64 // ROWS * ODD, 64 // ROWS, dim=1),
        row_scale_dwords(variant.BLOCK_M, variant.FORMAT),
    )


@gluon.constexpr_function
def _first_axis(LAYOUT):
    """Layout of axis 0 of a 5-D layout."""
    return gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT))))


@gluon.jit
def _read_weight_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the weights in a step; see `weight_scale_dwords`.

    With MFMA of 32 rows a lane needs two bytes of each of two dwords: those of its row in two MFMA,
    at bytes 0 and 2 or, in the upper 16 rows, 1 and 3. They are packed into one dword, [block b of
    MFMA 0, block b + 2, block b of MFMA 1, block b + 2], of shape [2, WARPS_N, parts, 16, 2].
    """
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M)
    PARTS: gl.constexpr = weight_parts(variant.BLOCK_M)
    LAYOUT: gl.constexpr = weight_scale_dwords(variant.BLOCK_M, variant.FORMAT)
    slot = buffers.weight_scales.index(pair & 1)
    LDS: gl.constexpr = weight_scales_in_lds(variant.BLOCK_M)
    dwords = reinterpret(slot, gl.int32, [WAVES, PARTS, 16, 8], LDS).slice(4 * ODD, 4, dim=3)
    dwords = async_copy.load_shared_relaxed(dwords, gl.SliceLayout(0, LAYOUT))
    dwords = gl.expand_dims(dwords, 0)  # [1, WARPS_N, parts, 16, 4]
    if mfma_rows(variant.FORMAT) == 32:
        shift = 8 * gl.arange(0, 2, _first_axis(LAYOUT))
        dwords = dwords >> shift[:, None, None, None, None]  # [2, WARPS_N, parts, 16, 4]
        blocks = gl.permute(gl.reshape(dwords, (2, WAVES, PARTS, 16, 2, 2)), (0, 1, 2, 3, 5, 4))
        first, second = gl.split(blocks)
        dwords = first & 0x00FF00FF | (second & 0x00FF00FF) << 8
    return dwords


@gluon.jit
def _bytes_of(dwords):
    """Bytes [..., 2, 2] of dwords [...], in their order.

    The last dimension is joined last, so that a thread's bytes are in the order of the dword. Other
    orders Triton 3.9 would permute twice.
    """
    even, odd = gl.join(dwords, dwords >> 16), gl.join(dwords >> 8, dwords >> 24)
    return gl.join(even, odd).to(gl.uint8)


@gluon.jit
def _scales_of_rows(dwords, variant):
    """Bytes [BLOCK_M, 4] from the dwords of `_read_row_scales`."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    LAYOUT: gl.constexpr = scale_layout(BLOCK_M, variant.FORMAT, 0, BLOCK_M)
    parts = _bytes_of(dwords)
    if mfma_rows(variant.FORMAT) == 32:  # [MFMA, row, block / 2, block % 2]
        fragments = gl.permute(parts, (2, 0, 3, 1))
    else:  # [fragment / 2, fragment % 2, row, block]
        fragments = gl.permute(parts, (2, 3, 0, 1))
    return gl.convert_layout(gl.reshape(fragments, (BLOCK_M, 4)), LAYOUT)


@gluon.jit
def _scales_of_part(dwords, variant, PART: gl.constexpr):
    """Bytes [256 / parts, 4] of four fragments from the dwords of `_read_weight_scales`."""
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M)
    PARTS: gl.constexpr = weight_parts(variant.BLOCK_M)
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, variant.FORMAT, 1, 64 * WAVES)
    if PARTS == 2:
        first, second = gl.split(gl.permute(dwords, (0, 1, 3, 4, 2)))
        dwords = first if PART == 0 else second
    if mfma_rows(variant.FORMAT) == 32:
        dwords = gl.reshape(dwords, (2, WAVES, 16, 2))
    else:
        dwords = gl.reshape(dwords, (WAVES, 16, 4))
    parts = _bytes_of(dwords)
    if mfma_rows(variant.FORMAT) == 32:  # [MFMA, WARPS_N, half, row, block / 2, block % 2]
        fragments = gl.permute(parts, (4, 1, 0, 2, 5, 3))
    else:  # [fragment / 2, fragment % 2, WARPS_N, row, block]
        fragments = gl.permute(parts, (3, 4, 0, 1, 2))
    return gl.convert_layout(gl.reshape(fragments, (64 * WAVES, 4)), LAYOUT)


@gluon.jit
def _read(buffers, variant, ring, ODD: gl.constexpr):
    """Read the operands of a step whose last bit is ODD."""
    weights = ()
    for part in gl.static_range(weight_parts(variant.BLOCK_M)):
        fragments = _read_weights(buffers, variant, ring.slot, ODD, part)
        weights += (fragments,)  # type: ignore[assignment]
    return Fragments(
        rows=_read_rows(buffers, variant, ring.slot, ODD),
        row_scales=as_one_register(_read_row_scales(buffers, variant, ring.step >> 1, ODD)),
        weights=weights,
        weight_scales=as_one_register(_read_weight_scales(buffers, variant, ring.step >> 1, ODD)),
    )


@gluon.jit
def _multiply(sums, fragments, variant):
    """Add the products of a step: [BLOCK_M, 256 / parts] for each part."""
    row_scales = _scales_of_rows(fragments.row_scales, variant)
    results = ()
    for part in gl.static_range(weight_parts(variant.BLOCK_M)):
        scales = _scales_of_part(fragments.weight_scales, variant, part)
        weights = fragments.weights[part]
        results += (
            cdna4.mfma_scaled(
                fragments.rows, row_scales, variant.FORMAT, weights, scales, "e2m1", acc=sums[part]
            ),
        )
    return results


@gluon.jit
def _advance(sums, fragments, source, buffers, variant, ring, ODD: gl.constexpr):
    """Multiply the operands of a step; read those of the next, start copies of a later one."""
    sums = _multiply(sums, fragments, variant)
    scheduling_fence()
    async_copy.wait_group(2)  # the barrier between the stages
    set_priority(1)
    following = ring.advance(num_slots(variant.FORMAT))
    copy_ahead(source, buffers, variant, ring, ODD)
    fragments = _read(buffers, variant, following, 1 - ODD)
    # Copies of the step after the next have landed, except for those of the last group.
    async_copy.wait_group(1)
    set_priority(0)
    return sums, fragments


@gluon.jit
def multiply_tile(source, buffers, variant):
    """``rows @ weights.T``: one float32 value [BLOCK_M, 256 / parts] for each part."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    PARTS: gl.constexpr = weight_parts(BLOCK_M)
    sums = ()
    LAYOUT: gl.constexpr = mfma_layout(BLOCK_M, variant.FORMAT)
    for _ in gl.static_range(PARTS):
        sums += (gl.zeros((BLOCK_M, 256 // PARTS), gl.float32, LAYOUT),)
    copy_first(source, buffers, variant)
    async_copy.wait_group(1)
    fragments = _read(buffers, variant, Ring(step=0, slot=0), 0)
    if gl.num_warps() == 8:
        delay_half_of_waves(True)
    ring = Ring(step=0, slot=0)
    for _ in range(source.steps // 2):
        for odd in gl.static_range(2):
            sums, fragments = _advance(sums, fragments, source, buffers, variant, ring, odd)
            ring = ring.advance(num_slots(variant.FORMAT))
    if gl.num_warps() == 8:
        delay_half_of_waves(False)
    if source.steps % 2 == 1:
        sums = _multiply(sums, fragments, variant)
    async_copy.wait_group(0)
    return sums
