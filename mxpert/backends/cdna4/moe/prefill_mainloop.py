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
from ..lib.gcn import as_one_register
from ..lib.phases import NUM_WARPS, end_compute, end_memory, enter_phases, leave_phases
from .prefill_copies import Ring, copy_ahead, copy_first, steps_per_buffer
from .prefill_layouts import (
    mfma_layout,
    mfma_rows,
    row_scale_dwords,
    row_scales_in_lds,
    rows_in_lds,
    warps_n,
    wave_rows,
    weight_scale_dwords,
    weight_scales_in_lds,
    weights_in_lds,
)

cdna4 = gl.amd.cdna4
async_copy = gl.amd.cdna4.async_copy


@aggregate
class Scales:
    """Scales of the rows and of the weights in two steps, as dwords in registers."""

    rows: gl.tensor
    weights: gl.tensor


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
def _read_scales(buffers, variant, pair):
    """`Scales` of a pair of steps; see `row_scale_dwords` and `weight_scale_dwords`."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    FORMAT: gl.constexpr = variant.FORMAT
    UNITS: gl.constexpr = BLOCK_M // 64
    ROWS: gl.constexpr = mfma_rows(FORMAT)
    rows = buffers.row_scales.index(pair & 1).slice(0, UNITS, dim=0)
    ROWS_IN_LDS: gl.constexpr = row_scales_in_lds(UNITS, FORMAT)
    rows = reinterpret(rows, gl.int32, [UNITS, ROWS, 128 // ROWS], ROWS_IN_LDS)
    ROW_DWORDS: gl.constexpr = row_scale_dwords(BLOCK_M, FORMAT, 2)
    rows = async_copy.load_shared_relaxed(rows, gl.SliceLayout(1, ROW_DWORDS))
    WAVES: gl.constexpr = warps_n(BLOCK_M, FORMAT)
    WEIGHTS_IN_LDS: gl.constexpr = weight_scales_in_lds(BLOCK_M, FORMAT)
    weights = buffers.weight_scales.index(pair & 1)
    weights = reinterpret(weights, gl.int32, [WAVES, 4 // WAVES, 16, 8], WEIGHTS_IN_LDS)
    WEIGHT_DWORDS: gl.constexpr = weight_scale_dwords(BLOCK_M, FORMAT)
    weights = async_copy.load_shared_relaxed(weights, WEIGHT_DWORDS)
    return Scales(rows=gl.expand_dims(rows, 1), weights=weights)


@gluon.jit
def _of_step(dwords, ODD: gl.constexpr):
    """Dwords [..., blocks] of one of two steps, from [..., 2 · blocks]."""
    A: gl.constexpr = dwords.shape[0]
    B: gl.constexpr = dwords.shape[1]
    C: gl.constexpr = dwords.shape[2]
    D: gl.constexpr = dwords.shape[3]
    even, odd = gl.split(gl.permute(gl.reshape(dwords, (A, B, C, 2, D // 2)), (0, 1, 2, 4, 3)))
    return as_one_register(odd if ODD else even)


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
    """Bytes [BLOCK_M, 4] of a step from its dwords."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    LAYOUT: gl.constexpr = scale_layout(BLOCK_M, variant.FORMAT, 0, BLOCK_M)
    if wave_rows(BLOCK_M, variant.FORMAT) == 32:  # a wave owns half of each dword
        ONE_STEP: gl.constexpr = row_scale_dwords(BLOCK_M, variant.FORMAT, 1)
        half = gl.arange(0, 2, _halves_of(ONE_STEP))
        dwords = gl.convert_layout(dwords, ONE_STEP) >> (16 * half)[None, :, None, None]
        parts = gl.join(dwords, dwords >> 8).to(gl.uint8)  # [unit, half, row, block % 2, block / 2]
        fragments = gl.permute(parts, (0, 1, 2, 4, 3))
    elif mfma_rows(variant.FORMAT) == 32:  # [wave, 1, row, block % 2, MFMA, block / 2]
        fragments = gl.permute(_bytes_of(dwords), (4, 0, 1, 2, 5, 3))
    else:  # [wave, 1, row, block, fragment / 2, fragment % 2]
        fragments = gl.permute(_bytes_of(dwords), (4, 5, 0, 1, 2, 3))
    return gl.convert_layout(gl.reshape(fragments, (BLOCK_M, 4)), LAYOUT)


@gluon.jit
def _scales_of_weights(dwords, variant):
    """Bytes [256, 4] of a step from its dwords."""
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, variant.FORMAT, 1, 256)
    parts = _bytes_of(dwords)  # [wave, unit, row, block, fragment / 2, fragment % 2]
    if mfma_rows(variant.FORMAT) == 32:
        fragments = gl.permute(parts, (4, 5, 0, 1, 2, 3))
    else:
        fragments = gl.permute(parts, (1, 4, 5, 0, 2, 3))
    return gl.convert_layout(gl.reshape(fragments, (256, 4)), LAYOUT)


@gluon.jit
def _multiply(sums, rows, weights, scales, variant, ODD: gl.constexpr):
    """Add the products of a step. ODD: its last bit."""
    row_scales = _scales_of_rows(_of_step(scales.rows, ODD), variant)
    weight_scales = _scales_of_weights(_of_step(scales.weights, ODD), variant)
    return cdna4.mfma_scaled(
        rows, row_scales, variant.FORMAT, weights, weight_scales, "e2m1", acc=sums
    )


@gluon.jit
def multiply_tile(source, buffers, variant):
    """``rows @ weights.T``, float32 [BLOCK_M, 256] in `mfma_layout`.

    Each wait leaves the last group of copies under way; those of the next step have landed.
    """
    FORMAT: gl.constexpr = variant.FORMAT
    LAYOUT: gl.constexpr = mfma_layout(variant.BLOCK_M, FORMAT)
    sums = gl.zeros((variant.BLOCK_M, 256), gl.float32, LAYOUT)
    ring = copy_first(source, buffers, variant)
    async_copy.wait_group(1)
    if gl.num_warps() == NUM_WARPS:
        enter_phases()
    for _ in range(source.steps // 2):
        copy_ahead(source, buffers, variant, ring, 1)
        ring = ring.advance(FORMAT, 1)
        weights = _read_weights(buffers, variant, ring.slot, 0)
        rows = _read_rows(buffers, variant, ring.slot, 0)
        scales = _read_scales(buffers, variant, ring.step >> 1)
        end_memory(1)
        sums = _multiply(sums, rows, weights, scales, variant, 0)
        end_compute(2)
        copy_ahead(source, buffers, variant, ring, 0)
        ring = ring.advance(FORMAT, 0)
        weights = _read_weights(buffers, variant, ring.slot, 1)
        rows = _read_rows(buffers, variant, ring.slot, 1)
        end_memory(1)
        sums = _multiply(sums, rows, weights, scales, variant, 1)
        end_compute(2)
    if source.steps % 2 == 1:
        ring = ring.advance(FORMAT, 1)
        weights = _read_weights(buffers, variant, ring.slot, 0)
        rows = _read_rows(buffers, variant, ring.slot, 0)
        scales = _read_scales(buffers, variant, ring.step >> 1)
        end_memory(0)
        sums = _multiply(sums, rows, weights, scales, variant, 0)
    if gl.num_warps() == NUM_WARPS:
        leave_phases()
    async_copy.wait_group(0)
    return sums
