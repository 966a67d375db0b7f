"""Main loop of the prefill kernel: a tile of ``x @ w.T`` on scaled MFMA.

A step is 128 elements of the contracted dimension. In its memory phase a wave starts the copies of
a later step and reads its operands from LDS; in its compute phase it multiplies them.

LDS that a copy fills is free: both groups have passed the barrier after their last read of it. The
loop begins with a memory phase, so that its own instructions are not in the way of MFMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4_gcn import opaque
from ...device.cdna4_phases import NUM_WARPS, end_compute, end_memory, enter_phases, leave_phases
from ...device.compat import aggregate, reinterpret
from .prefill_copies import copy_ahead, copy_first, steps_per_buffer
from .prefill_layouts import (
    mfma_layout,
    mfma_rows,
    row_scale_dwords,
    row_scales_in_lds,
    rows_in_lds,
    warps_n,
    wave_rows,
    wave_units,
    weight_scale_dwords,
    weight_scales_in_lds,
    weights_in_lds,
)

cdna4 = gl.amd.cdna4
async_copy = gl.amd.cdna4.async_copy


@aggregate
class Fragments:
    """Operands of one step in registers: rows, weights, and scales as dwords."""

    rows: gl.tensor
    row_scales: gl.tensor
    weights: gl.tensor
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
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    TYPE: gl.constexpr = element_type(variant.FORMAT)
    rows = buffers.rows.index(slot)
    tile = reinterpret(rows, TYPE, [BLOCK_M, 128], rows_in_lds(BLOCK_M, variant.FORMAT))
    if steps_per_buffer(variant.FORMAT) == 2:
        tile = tile.slice(64 * ODD, 64, dim=1)
    return async_copy.load_shared_relaxed(tile, operand_layout(BLOCK_M, variant.FORMAT, 0))


@gluon.jit
def _read_weights(buffers, variant, slot, ODD: gl.constexpr):
    """Fragments of the weights in a step, [64 bytes, 256]."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    INDEX: gl.constexpr = ODD if steps_per_buffer(variant.FORMAT) == 2 else 0
    weights = buffers.weights[INDEX].index(slot)
    weights = reinterpret(weights, gl.uint8, [64, 256], weights_in_lds(BLOCK_M, variant.FORMAT))
    return async_copy.load_shared_relaxed(weights, operand_layout(BLOCK_M, variant.FORMAT, 1))


@gluon.constexpr_function
def _halves_of(LAYOUT):
    """Layout of axis 1 of a 4-D layout."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))


@gluon.jit
def _read_row_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the sorted rows in a step, one dword a lane; see `row_scale_dwords`.

    A wave of 32 rows owns half of each dword; it gets its own in the lower half.
    """
    UNITS: gl.constexpr = variant.BLOCK_M // 64
    ROWS: gl.constexpr = mfma_rows(variant.FORMAT)
    LAYOUT: gl.constexpr = row_scale_dwords(variant.BLOCK_M, variant.FORMAT)
    LDS: gl.constexpr = row_scales_in_lds(UNITS, variant.FORMAT)
    slot = buffers.row_scales.index(pair & 1).slice(0, UNITS, dim=0)
    dwords = reinterpret(slot, gl.int32, [UNITS, ROWS, 128 // ROWS], LDS)
    dwords = dwords.slice(64 // ROWS * ODD, 64 // ROWS, dim=2)
    dwords = async_copy.load_shared_relaxed(dwords, gl.SliceLayout(1, LAYOUT))
    return gl.expand_dims(dwords, 1)


@gluon.jit
def _read_weight_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the weights in a step; see `weight_scale_dwords`."""
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M, variant.FORMAT)
    UNITS: gl.constexpr = wave_units(variant.BLOCK_M, variant.FORMAT)
    LDS: gl.constexpr = weight_scales_in_lds(variant.BLOCK_M, variant.FORMAT)
    slot = buffers.weight_scales.index(pair & 1)
    dwords = reinterpret(slot, gl.int32, [WAVES, UNITS, 16, 8], LDS).slice(4 * ODD, 4, dim=3)
    return async_copy.load_shared_relaxed(
        dwords, weight_scale_dwords(variant.BLOCK_M, variant.FORMAT)
    )


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
    if wave_rows(BLOCK_M, variant.FORMAT) == 32:
        SPLIT: gl.constexpr = row_scale_dwords(BLOCK_M, variant.FORMAT)
        half = gl.arange(0, 2, _halves_of(SPLIT))
        dwords = dwords >> (16 * half)[None, :, None, None]
        parts = gl.join(dwords, dwords >> 8).to(gl.uint8)  # [unit, half, row, block % 2, block / 2]
        fragments = gl.permute(parts, (0, 1, 2, 4, 3))
    elif mfma_rows(variant.FORMAT) == 32:  # [wave, 1, row, block % 2, MFMA, block / 2]
        fragments = gl.permute(_bytes_of(dwords), (4, 0, 1, 2, 5, 3))
    else:  # [wave, 1, row, block, fragment / 2, fragment % 2]
        fragments = gl.permute(_bytes_of(dwords), (4, 5, 0, 1, 2, 3))
    return gl.convert_layout(gl.reshape(fragments, (BLOCK_M, 4)), LAYOUT)


@gluon.jit
def _scales_of_weights(dwords, variant):
    """Bytes [256, 4] from the dwords of `_read_weight_scales`."""
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, variant.FORMAT, 1, 256)
    parts = _bytes_of(dwords)  # [wave, unit, row, block, fragment / 2, fragment % 2]
    if mfma_rows(variant.FORMAT) == 32:
        fragments = gl.permute(parts, (4, 5, 0, 1, 2, 3))
    else:
        fragments = gl.permute(parts, (1, 4, 5, 0, 2, 3))
    return gl.convert_layout(gl.reshape(fragments, (256, 4)), LAYOUT)


@gluon.jit
def _read(buffers, variant, ring, ODD: gl.constexpr):
    """Read the operands of a step whose last bit is ODD."""
    return Fragments(
        weights=_read_weights(buffers, variant, ring.slot, ODD),
        rows=_read_rows(buffers, variant, ring.slot, ODD),
        row_scales=_read_row_scales(buffers, variant, ring.step >> 1, ODD),
        weight_scales=_read_weight_scales(buffers, variant, ring.step >> 1, ODD),
    )


@gluon.jit
def _multiply(sums, fragments, variant):
    """Add the products of a step."""
    row_scales = _scales_of_rows(opaque(fragments.row_scales), variant)
    weight_scales = _scales_of_weights(opaque(fragments.weight_scales), variant)
    return cdna4.mfma_scaled(
        fragments.rows,
        row_scales,
        variant.FORMAT,
        fragments.weights,
        weight_scales,
        "e2m1",
        acc=sums,
    )


@gluon.jit
def _advance(sums, source, buffers, variant, ring, ODD: gl.constexpr):
    """Start copies of a later step; read and multiply the operands of the step after `ring`.

    ODD: the last bit of that step.
    """
    copy_ahead(source, buffers, variant, ring, 1 - ODD)
    ring = ring.advance(variant.FORMAT, 1 - ODD)
    fragments = _read(buffers, variant, ring, ODD)
    # Copies of the next step have landed, except for those of the last group.
    end_memory(1)
    sums = _multiply(sums, fragments, variant)
    end_compute(2)
    return sums, ring


@gluon.jit
def multiply_tile(source, buffers, variant):
    """``rows @ weights.T``, float32 [BLOCK_M, 256] in `mfma_layout`."""
    LAYOUT: gl.constexpr = mfma_layout(variant.BLOCK_M, variant.FORMAT)
    sums = gl.zeros((variant.BLOCK_M, 256), gl.float32, LAYOUT)
    ring = copy_first(source, buffers, variant)
    async_copy.wait_group(1)
    if gl.num_warps() == NUM_WARPS:
        enter_phases()
    for _ in range(source.steps // 2):
        for odd in gl.static_range(2):
            sums, ring = _advance(sums, source, buffers, variant, ring, odd)
    if source.steps % 2 == 1:
        fragments = _read(buffers, variant, ring.advance(variant.FORMAT, 1), 0)
        end_memory(0)
        sums = _multiply(sums, fragments, variant)
    if gl.num_warps() == NUM_WARPS:
        leave_phases()
    async_copy.wait_group(0)
    return sums
