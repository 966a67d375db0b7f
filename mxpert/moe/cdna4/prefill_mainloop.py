"""Main loop of the prefill kernel: a tile of ``x @ w.T`` on scaled MFMA.

A step is 128 elements of the contracted dimension. In its memory phase a wave starts the copies of
a later step and reads its operands from LDS; in its compute phase it multiplies them.

LDS that a copy fills is free: both groups have passed the barrier after their last read of it. The
loop begins with a memory phase, so that its own instructions are not in the way of MFMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4 import NUM_WARPS, end_compute, end_memory, enter_phases, leave_phases, opaque
from ...device.cdna4_operands import loads_per_unit
from ...device.compat import aggregate, reinterpret
from .prefill_tiles import (
    fragment_copy_layout,
    linear_in_lds,
    mfma_layout,
    mfma_rows,
    row_copy_layout,
    row_scale_dwords,
    row_scales_in_lds,
    rows_in_lds,
    scale_copy_layout,
    warps_n,
    wave_rows,
    wave_units,
    weight_scale_dwords,
    weight_scales_in_lds,
    weights_in_lds,
)

# ---- Global memory to LDS in the prefill kernels: what a tile reads, and when it copies that.
#
# All copies are direct (buffer_load … lds): no register holds the data. A wave copies 1 KiB an
# instruction, or 256 bytes of scales. LDS of a 256 × 256 tile, in bytes:
#
#     rows            e4m3, e5m2: 3 buffers of 1 step; e2m1: 2 buffers of 2 steps; 32 KiB each
#     weights         e4m3, e5m2: 3 buffers of 1 step; e2m1: 2 of even and 2 of odd steps; 16
#     KiB each. MXFP8 weights: 3 buffers of 1 step of 32 KiB, beside 128 rows at most
#     scales          2 buffers of 2 steps, 2 KiB each, for rows and for weights
#
# A copy must not leave out a wave, because waits count each wave's own copies.

async_copy = gl.amd.cdna4.async_copy


@aggregate
class Variant:
    """Constants that select the code: rows of a tile, element formats of the sorted rows, weights.

    STREAM: weights are read once, so that they need no cache.
    """

    BLOCK_M: gl.constexpr
    FORMAT: gl.constexpr
    STREAM: gl.constexpr
    W_FORMAT: gl.constexpr


@aggregate
class Source:
    """Global memory that a tile reads. Pointers are to the tile's first byte, offsets int32.

    rows: uint8 codes. row_offset: of the tile's rows, [BLOCK_M]. row_bytes: bytes of a row.
    weights, weight_offset: of the fragments of a step, [16] (MXFP8: halves, [32]). row_scales and
    weight_scales: units [64 rows][step][256 bytes]. row_scale_offset, weight_scale_offset: of each
    unit that is copied. steps: of the contracted dimension. num_blocks: its MX blocks; the last
    step may have fewer than four.
    """

    rows: gl.tensor
    row_offset: gl.tensor
    row_bytes: gl.tensor
    weights: gl.tensor
    weight_offset: gl.tensor
    row_scales: gl.tensor
    row_scale_offset: gl.tensor
    weight_scales: gl.tensor
    weight_scale_offset: gl.tensor
    steps: gl.tensor
    num_blocks: gl.tensor


@aggregate
class Buffers:
    """LDS of the rows, the weights, and the scales.

    With e2m1 rows weights of even and of odd steps have each an allocation, because copies of one
    step to different allocations need no barrier between them.
    """

    rows: gl.shared_memory_descriptor
    weights: gl.tuple
    row_scales: gl.shared_memory_descriptor
    weight_scales: gl.shared_memory_descriptor


@aggregate
class Ring:
    """A step, and the slot of its buffers of rows and weights."""

    step: gl.tensor
    slot: gl.tensor

    @gluon.jit
    def advance(self, FORMAT: gl.constexpr, ODD: gl.constexpr):
        """The next step. ODD: the last bit of this one."""
        slot = self.slot
        if FORMAT != "e2m1":
            slot = gl.where(slot == 2, 0, slot + 1)
        elif ODD == 1:
            slot = 1 - slot
        return Ring(step=self.step + 1, slot=slot)


@gluon.constexpr_function
def steps_per_buffer(FORMAT):
    """Steps in the 128 bytes of a row that one LDS buffer holds."""
    return 2 if FORMAT == "e2m1" else 1


@gluon.constexpr_function
def steps_ahead(FORMAT):
    """Steps in LDS: a step is copied at most that many steps before its MFMA."""
    return 4 if FORMAT == "e2m1" else 3


@gluon.jit
def make_buffers(variant):
    """Allocate the LDS of a tile."""
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    SLOTS: gl.constexpr = steps_ahead(variant.FORMAT) // PER_BUFFER
    LINEAR: gl.constexpr = linear_in_lds()
    UNITS: gl.constexpr = copied_units(gl.num_warps())
    LOADS: gl.constexpr = 4 * loads_per_unit(variant.W_FORMAT)
    weights = ()
    for _ in gl.static_range(PER_BUFFER):
        weights += (gl.allocate_shared_memory(gl.uint8, [SLOTS, LOADS, 1024], LINEAR),)
    return Buffers(
        rows=gl.allocate_shared_memory(gl.uint8, [SLOTS, variant.BLOCK_M, 128], LINEAR),
        weights=weights,
        row_scales=gl.allocate_shared_memory(gl.uint8, [2, UNITS, 512], LINEAR),
        weight_scales=gl.allocate_shared_memory(gl.uint8, [2, 4, 512], LINEAR),
    )


@gluon.jit
def copied_rows(BLOCK_M: gl.constexpr):
    """The tile's rows in the order of their copies, int32 [BLOCK_M]."""
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    return gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def offsets_of_weights(first_unit, num_units, steps, LAYOUT: gl.constexpr, LOADS: gl.constexpr):
    """Offsets of a step's fragments, for copies in LAYOUT: LOADS of 1 KiB of each of four units.

    Units past the last repeat it.
    """
    fragment = gl.arange(0, 4 * LOADS, gl.SliceLayout(1, LAYOUT))
    unit = gl.minimum(first_unit + fragment // LOADS, num_units - 1) - first_unit
    return unit * (steps * (LOADS * 1024)) + fragment % LOADS * 1024


@gluon.constexpr_function
def copied_units(WARPS):
    """Units whose scales one instruction of every wave copies.

    The rows of a tile may have fewer: their last unit is copied again.
    """
    return WARPS // 2


@gluon.jit
def offsets_of_scales(UNITS: gl.constexpr, first_unit, num_units, steps):
    """Offsets [UNITS] of the units' scales. Units past the last one repeat it."""
    LAYOUT: gl.constexpr = scale_copy_layout(gl.num_warps())
    index = gl.arange(0, UNITS, gl.SliceLayout(1, LAYOUT))
    unit = gl.minimum(first_unit + index, num_units - 1) - first_unit
    return unit * (steps * 256)


@gluon.jit
def past_end(outside):
    """What to add to byte offsets that are outside, so that direct copies write zeros for them.

    It makes an address that does not exist. A masked copy would write nothing.
    """
    return gl.where(outside, -(1 << 31), 0)


@gluon.jit
def copy_rows(source, slots, slot, first):
    """Copy 128 bytes of each row to LDS, from byte `first` on, swizzled as `rows_in_lds` says.

    Bytes past the end of a row are zeros.
    """
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    row = gl.arange(0, slots.shape[1], gl.SliceLayout(1, LAYOUT))
    byte = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    place = byte[None, :] ^ (row // 2 % 8 * 16)[:, None]
    outside = past_end(first >= source.row_bytes - place // 16 * 16)
    offsets = (source.row_offset[:, None] + place) + first + outside
    # The compiler cannot see that each thread's 16 offsets follow each other.
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.buffer_load_to_shared(slots.index(slot), source.rows, offsets)


@gluon.jit
def _copy_weights(source, buffers, variant, slot, step, ODD: gl.constexpr):
    """Copy the weights of `step` to LDS; steps past the last one repeat it. ODD: its last bit.

    Codes that pad the depth are read if they are e2m1: they are finite, and their rows and scales
    are zeros. Those of e4m3 may be NaN and become zeros.
    """
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    LOADS: gl.constexpr = loads_per_unit(variant.W_FORMAT)
    INDEX: gl.constexpr = ODD if steps_per_buffer(variant.FORMAT) == 2 else 0
    byte = gl.arange(0, 1024, gl.SliceLayout(0, LAYOUT))
    first = gl.minimum(step, source.steps - 1) * (LOADS * 1024)
    offsets = source.weight_offset[:, None] + first + byte[None, :]
    if LOADS == 8:
        half = gl.arange(0, 4 * LOADS, gl.SliceLayout(1, LAYOUT)) % 2
        block = half[:, None] * 2 + byte[None, :] // 512
        offsets += past_end(step * 4 >= source.num_blocks - block)
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    slots = buffers.weights[INDEX]
    copy_streamed(slots.index(slot), source.weights, offsets, variant.STREAM)


@gluon.jit
def copy_streamed(target, memory, offsets, STREAM: gl.constexpr):
    """Start a direct copy; with STREAM its lines are the first to leave the caches."""
    CACHE: gl.constexpr = ".cg" if STREAM else ""
    async_copy.buffer_load_to_shared(target, memory, offsets, cache_modifier=CACHE)


@gluon.jit
def _copy_scales(scales, unit_offset, slots, step, outside, STREAM: gl.constexpr):
    """Start copies of the scales of an even step and the next one. outside: of `past_end`."""
    LAYOUT: gl.constexpr = scale_copy_layout(gl.num_warps())
    byte = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))
    offsets = (unit_offset[:, None] + byte[None, :]) + step * 256 + outside
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 4]), [1, 4])
    copy_streamed(slots.index((step >> 1) & 1), scales, offsets, STREAM)


@gluon.jit
def _copy_all_scales(source, buffers, variant, step):
    """Copy the scales of an even step and the next one.

    Those of the weights past the last block are zeros: they may be NaN. Those of the rows are read
    past the last step; `arrange_scales` makes room for it.
    """
    LAYOUT: gl.constexpr = scale_copy_layout(gl.num_warps())
    block = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT)) // 64
    outside = past_end(step * 64 >= (source.num_blocks - block) * 16)[None, :]
    weights = source.weight_scales
    rows, of_rows, of_weights = source.row_scales, buffers.row_scales, buffers.weight_scales
    _copy_scales(rows, source.row_scale_offset, of_rows, step, 0, False)
    _copy_scales(
        weights, source.weight_scale_offset, of_weights, step, outside, STREAM=variant.STREAM
    )


@gluon.jit
def copy_ahead(source, buffers, variant, ring, ODD: gl.constexpr):
    """Start the copies that a step starts, as one group. ring: the step, ODD: its last bit.

    Its operands are in registers, so that their LDS is free. e4m3 and e5m2 copy rows and weights of
    the step three later. With e2m1 the slot of rows is free in its second step alone; even steps
    copy the weights of two steps, 3 and 4 steps later, so that all steps copy about as much. Scales
    of two steps are read one step early, so their slot is free at the second one.
    """
    AHEAD: gl.constexpr = steps_ahead(variant.FORMAT)
    later = ring.step + AHEAD
    if variant.FORMAT != "e2m1":
        copy_rows(source, buffers.rows, ring.slot, later * 128)
        _copy_weights(source, buffers, variant, ring.slot, later, 0)
    elif ODD == 0:
        _copy_weights(source, buffers, variant, 1 - ring.slot, later - 1, 1)
        _copy_weights(source, buffers, variant, ring.slot, later, 0)
    else:
        copy_rows(source, buffers.rows, ring.slot, (later - 1) * 64)
    if ODD == 1:
        _copy_all_scales(source, buffers, variant, later - (1 + AHEAD) % 2)
    async_copy.commit_group()


@gluon.jit
def copy_first(source, buffers, variant):
    """Start the copies that precede the main loop; return the `Ring` of step −1."""
    AHEAD: gl.constexpr = steps_ahead(variant.FORMAT)
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    for step in gl.static_range(AHEAD - 1):
        if step == 0 and variant.FORMAT == "e2m1":  # no step before 0, to copy weights for
            _copy_weights(source, buffers, variant, 0, 0, 0)
            async_copy.commit_group()
        else:
            ring = Ring(step=step - AHEAD, slot=step // PER_BUFFER)
            copy_ahead(source, buffers, variant, ring, (step + AHEAD) % 2)
    return Ring(step=-1, slot=(AHEAD - 1) // PER_BUFFER)


cdna4 = gl.amd.cdna4


@aggregate
class Fragments:
    """Operands of one step in registers: rows, weights, and scales as dwords."""

    rows: gl.tensor
    row_scales: gl.tensor
    weights: gl.tensor
    weight_scales: gl.tensor


@gluon.constexpr_function
def element_type(FORMAT):
    """Type of rows or weights in LDS."""
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
    """Fragments of the weights in a step, [64 bytes, 256], of e4m3 [128, 256]."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    INDEX: gl.constexpr = ODD if steps_per_buffer(variant.FORMAT) == 2 else 0
    weights = buffers.weights[INDEX].index(slot)
    BYTES: gl.constexpr = 16 * loads_per_unit(variant.W_FORMAT)
    LDS: gl.constexpr = weights_in_lds(BLOCK_M, variant.FORMAT, BYTES)
    weights = reinterpret(weights, element_type(variant.W_FORMAT), [BYTES, 256], LDS)
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
        variant.W_FORMAT,
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
