"""Global memory to LDS in the prefill kernels: what a tile reads, and when it copies that.

All copies are direct (buffer_load … lds): no register holds the data. A wave copies 1 KiB an
instruction, or 256 bytes of scales. LDS of a 256 × 256 tile, in bytes:

    rows            e4m3, e5m2: 3 buffers of 1 step; e2m1: 2 buffers of 2 steps; 32 KiB each
    weights         3 or 4 buffers of 1 step, 16 KiB each
    scales          2 buffers of 2 steps, 2 KiB each, for rows and for weights

A copy must not leave out a wave, because waits count each wave's own copies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.compat import aggregate
from .prefill_layouts import (
    fragment_copy_layout,
    linear_in_lds,
    row_copy_layout,
    scale_copy_layout,
    weight_parts,
)

async_copy = gl.amd.cdna4.async_copy


@aggregate
class Variant:
    """What selects the code: rows of a tile, element format of the sorted rows."""

    BLOCK_M: gl.constexpr
    FORMAT: gl.constexpr


@aggregate
class Source:
    """Global memory that a tile reads. Pointers are to the tile's first byte, offsets int32.

    rows: uint8 codes. row_offset: of the tile's rows, [BLOCK_M]. row_bytes: bytes of a row.
    weights, weight_offset: of the fragments of each part in one step. row_scales and weight_scales:
    units [64 rows][step][256 bytes]. row_scale_offset, weight_scale_offset: of each unit that is
    copied. steps: of the contracted dimension.
    """

    rows: gl.tensor
    row_offset: gl.tensor
    row_bytes: gl.tensor
    weights: gl.tensor
    weight_offset: gl.tuple
    row_scales: gl.tensor
    row_scale_offset: gl.tensor
    weight_scales: gl.tensor
    weight_scale_offset: gl.tensor
    steps: gl.tensor


@aggregate
class Buffers:
    """LDS of the rows, of each part of the weights, and of the scales.

    The weights of e2m1 rows have the parts of even steps, then those of odd steps. Copies of one
    step to different allocations need no barrier between them.
    """

    rows: gl.shared_memory_descriptor
    weights: gl.tuple
    row_scales: gl.shared_memory_descriptor
    weight_scales: gl.shared_memory_descriptor


@aggregate
class Ring:
    """A step, and its slot: the step modulo the slots of the weights.

    The rows' slot is `slot` divided by the steps of a buffer.
    """

    step: gl.tensor
    slot: gl.tensor

    @gluon.jit
    def advance(self, SLOTS: gl.constexpr):
        """The next step."""
        slot = self.slot + 1
        return Ring(step=self.step + 1, slot=gl.where(slot == SLOTS, 0, slot))


@gluon.constexpr_function
def steps_per_buffer(FORMAT):
    """Steps in the 128 bytes of a row that one LDS buffer holds."""
    return 2 if FORMAT == "e2m1" else 1


@gluon.constexpr_function
def num_slots(FORMAT):
    """Steps of weights in LDS: a step is copied that many steps before its MFMA."""
    return 4 if FORMAT == "e2m1" else 3


@gluon.constexpr_function
def weight_buffer(BLOCK_M, FORMAT, ODD, PART):
    """Which of `Buffers.weights` holds a part of an even or odd step."""
    return ODD * weight_parts(BLOCK_M) + PART if FORMAT == "e2m1" else PART


@gluon.jit
def make_buffers(variant):
    """Allocate the LDS of a tile."""
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    ROW_SLOTS: gl.constexpr = SLOTS // steps_per_buffer(variant.FORMAT)
    LINEAR: gl.constexpr = linear_in_lds()
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    PARTS: gl.constexpr = weight_parts(BLOCK_M)
    UNITS: gl.constexpr = copied_units(gl.num_warps())
    weights = ()
    for _ in gl.static_range(steps_per_buffer(variant.FORMAT) * PARTS):
        weights += (gl.allocate_shared_memory(gl.uint8, [ROW_SLOTS, 16 // PARTS, 1024], LINEAR),)
    return Buffers(
        rows=gl.allocate_shared_memory(gl.uint8, [ROW_SLOTS, BLOCK_M, 128], LINEAR),
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
def offsets_of_weights(first_unit, num_units, steps, BLOCK_M: gl.constexpr):
    """Offsets of each part's fragments in one step. Units past the last one repeat it."""
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    PARTS: gl.constexpr = weight_parts(BLOCK_M)
    fragment = gl.arange(0, 16 // PARTS, gl.SliceLayout(1, LAYOUT))
    offsets = ()
    for part in gl.static_range(PARTS):
        unit = first_unit + fragment // 4 * PARTS + part
        unit = gl.minimum(unit, num_units - 1) - first_unit
        offset = unit * (steps * 4096) + fragment % 4 * 1024
        offsets += (offset,)  # type: ignore[assignment]
    return offsets


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
def _copy_rows(source, slots, slot, buffer):
    """Copy buffer number `buffer` of the rows to LDS, swizzled as `rows_in_lds` says.

    Bytes past the end of a row repeat its last 16: their weights are zeros.
    """
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    row = gl.arange(0, slots.shape[1], gl.SliceLayout(1, LAYOUT))
    byte = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    chunk = (byte // 16)[None, :] ^ (row // 2 % 8)[:, None]
    first = gl.minimum(chunk * 16 + buffer * 128, source.row_bytes - 16)
    offsets = source.row_offset[:, None] + first + (byte % 16)[None, :]
    # The compiler cannot see that each thread's 16 offsets follow each other.
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.buffer_load_to_shared(slots.index(slot), source.rows, offsets)


@gluon.jit
def _copy_weights(source, slots, slot, step, PART: gl.constexpr):
    """Copy a part of the weights of `step` to LDS; steps past the last one repeat it."""
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    byte = gl.arange(0, 1024, gl.SliceLayout(0, LAYOUT))
    offsets = source.weight_offset[PART][:, None] + byte[None, :]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    weights = source.weights + gl.minimum(step, source.steps - 1) * 4096
    async_copy.buffer_load_to_shared(slots.index(slot), weights, offsets)


@gluon.jit
def _copy_scales(scales, unit_offset, slots, pair, steps):
    """Start copies of the scales of steps 2 · pair and 2 · pair + 1; those past the end repeat."""
    LAYOUT: gl.constexpr = scale_copy_layout(gl.num_warps())
    byte = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))
    first = gl.minimum(byte // 4 * 4 + pair * 512, steps * 256 - 4)
    offsets = unit_offset[:, None] + (first + byte % 4)[None, :]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 4]), [1, 4])
    async_copy.buffer_load_to_shared(slots.index(pair & 1), scales, offsets)


@gluon.jit
def _copy_all_weights(source, buffers, variant, ring, ODD: gl.constexpr, EARLIER: gl.constexpr):
    """Copy all parts of the weights of the step SLOTS − EARLIER after `ring`."""
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    SHIFT: gl.constexpr = steps_per_buffer(variant.FORMAT) - 1
    PARITY: gl.constexpr = ODD ^ EARLIER
    slot = (ring.slot - 1 & SLOTS - 1 if EARLIER else ring.slot) >> SHIFT
    for part in gl.static_range(weight_parts(variant.BLOCK_M)):
        slots = buffers.weights[weight_buffer(variant.BLOCK_M, variant.FORMAT, PARITY, part)]
        _copy_weights(source, slots, slot, ring.step + (SLOTS - EARLIER), part)


@gluon.jit
def _copy_all_scales(source, buffers, variant, ring):
    """Copy the scales of two steps, the first of them SLOTS or SLOTS − 1 after `ring`."""
    pair, steps = ring.step + num_slots(variant.FORMAT) >> 1, source.steps
    _copy_scales(source.row_scales, source.row_scale_offset, buffers.row_scales, pair, steps)
    _copy_scales(
        source.weight_scales, source.weight_scale_offset, buffers.weight_scales, pair, steps
    )


@gluon.jit
def copy_ahead(source, buffers, variant, ring, ODD: gl.constexpr):
    """Start the copies that a step starts, as one group. ring: the step, ODD: its last bit.

    Its operands are in registers, so that their LDS is free. e4m3 and e5m2 copy rows and weights of
    the step SLOTS later. With e2m1 the slot of rows is free in its second step alone; even steps
    copy the weights of two steps, 3 and 4 steps later, so that all steps copy about as much. Scales
    of two steps are read one step early, so their slot is free at the second one.
    """
    if variant.FORMAT == "e2m1" and ODD == 0:
        _copy_all_weights(source, buffers, variant, ring, ODD, EARLIER=1)
    if variant.FORMAT != "e2m1" or ODD == 1:
        SHIFT: gl.constexpr = steps_per_buffer(variant.FORMAT) - 1
        buffer = ring.step + num_slots(variant.FORMAT) >> SHIFT
        _copy_rows(source, buffers.rows, ring.slot >> SHIFT, buffer)
    if variant.FORMAT != "e2m1" or ODD == 0:
        _copy_all_weights(source, buffers, variant, ring, ODD, EARLIER=0)
    if ODD == 1:
        _copy_all_scales(source, buffers, variant, ring)
    async_copy.commit_group()


@gluon.jit
def copy_first(source, buffers, variant):
    """Start the copies that precede step 0, as if there were SLOTS steps before it."""
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    for slot in gl.static_range(SLOTS):
        ring = Ring(step=slot - SLOTS, slot=slot)
        if slot == 0 and variant.FORMAT == "e2m1":  # no step before 0, to copy weights for
            _copy_all_weights(source, buffers, variant, ring, 0, EARLIER=0)
            async_copy.commit_group()
        else:
            copy_ahead(source, buffers, variant, ring, (slot + SLOTS) % 2)
