"""Main loop of the prefill kernels: a tile of ``x @ w.T`` on scaled MFMA, software-pipelined.

A step is 128 elements of the contracted dimension. While the MFMA of a step run on registers, the
wave reads the next step's fragments from LDS and starts direct copies from global memory to LDS
for a later step. Nothing of this is in the MFMA's way: LDS reads have a step's time, copies two
(e4m3, e5m2) or one and a half (e2m1).

LDS (BLOCK_M = 256; bytes):

    rows            e4m3, e5m2: 3 buffers of 1 step; e2m1: 2 buffers of 2 steps; 32 KiB each
    weights         3 or 4 buffers of 1 step, 16 KiB each
    scales          2 buffers of 2 steps, 2 KiB each, for rows and for weights

A buffer is filled again after the barrier that follows its last read. `wait_group` is that
barrier: it waits for this wave's copies, then for all waves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.compat import aggregate, reinterpret
from ..lib.fences import scheduling_fence
from .prefill_layouts import (
    fragment_copy_layout,
    linear_in_lds,
    mfma_layout,
    num_slices,
    row_copy_layout,
    rows_in_lds,
    scale_copy_layout,
    scale_dwords,
    scales_in_lds,
    warps_m,
    warps_n,
    weights_in_lds,
)

cdna4 = gl.amd.cdna4
async_copy = gl.amd.cdna4.async_copy


@aggregate
class Variant:
    """What selects the code: rows of a tile, element format of the sorted rows."""

    BLOCK_M: gl.constexpr
    FORMAT: gl.constexpr


@aggregate
class Source:
    """Global memory that a tile reads. Pointers are to the tile's first byte, offsets int32.

    rows: uint8 codes. row_offset: [BLOCK_M], of each copied row. row_bytes: bytes of a row.
    weights, weight_offset [16]: the tile's fragments in one step. row_scales, weight_scales: units
    [64 rows][step][256]; row_scale_offset [BLOCK_M / 64], weight_scale_offset [4]: of each unit.
    steps: steps of the contracted dimension.
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


@aggregate
class Buffers:
    """LDS: see the module."""

    rows: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    row_scales: gl.shared_memory_descriptor
    weight_scales: gl.shared_memory_descriptor


@aggregate
class Fragments:
    """Operands of one step in registers. `weights` has one value a slice; scales are dwords."""

    rows: gl.tensor
    row_scales: gl.tensor
    weights: gl.tuple
    weight_scales: gl.tensor


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
def element_type(FORMAT):
    """Type of the sorted rows in LDS."""
    return {"e2m1": gl.uint8, "e4m3": gl.float8e4nv, "e5m2": gl.float8e5}[FORMAT]


@gluon.constexpr_function
def num_slots(FORMAT):
    """Steps of weights in LDS: a step is copied that many steps before its MFMA."""
    return 4 if FORMAT == "e2m1" else 3


@gluon.constexpr_function
def operand_layout(BLOCK_M, INDEX):
    """Fragments of the rows (INDEX 0) or of the weights (1)."""
    return gl.DotOperandLayout(INDEX, mfma_layout(BLOCK_M), 16)


@gluon.constexpr_function
def scale_layout(BLOCK_M, INDEX, ROWS):
    """Scales [ROWS, 4] of one step for the MFMA."""
    return cdna4.get_mfma_scale_layout(operand_layout(BLOCK_M, INDEX), [ROWS, 4])


@gluon.jit
def make_buffers(variant):
    """Allocate the LDS of a tile."""
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    ROW_SLOTS: gl.constexpr = SLOTS // steps_per_buffer(variant.FORMAT)
    LINEAR: gl.constexpr = linear_in_lds()
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    return Buffers(
        rows=gl.allocate_shared_memory(gl.uint8, [ROW_SLOTS, BLOCK_M, 128], LINEAR),
        weights=gl.allocate_shared_memory(gl.uint8, [SLOTS, 16, 1024], LINEAR),
        row_scales=gl.allocate_shared_memory(gl.uint8, [2, BLOCK_M // 64, 512], LINEAR),
        weight_scales=gl.allocate_shared_memory(gl.uint8, [2, 4, 512], LINEAR),
    )


@gluon.jit
def row_places(BLOCK_M: gl.constexpr):
    """The tile's rows in the order of the direct copies, int32 [BLOCK_M]."""
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    return gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def offsets_of_weights(first_unit, num_units, steps):
    """Offsets [16] of the tile's fragments of one step. Units past the last one repeat it."""
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    fragment = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    unit = gl.minimum(first_unit + fragment // 4, num_units - 1) - first_unit
    return unit * (steps * 4096) + fragment % 4 * 1024


@gluon.jit
def offsets_of_scales(UNITS: gl.constexpr, first_unit, num_units, steps):
    """Offsets [UNITS] of the units' scales. Units past the last one repeat it."""
    LAYOUT: gl.constexpr = scale_copy_layout(gl.num_warps())
    index = gl.arange(0, UNITS, gl.SliceLayout(1, LAYOUT))
    unit = gl.minimum(first_unit + index, num_units - 1) - first_unit
    return unit * (steps * 256)


@gluon.jit
def _copy_rows(source, slots, variant, slot, buffer):
    """Copy the sorted rows' buffer number `buffer` to LDS, swizzled as `rows_in_lds` says.

    Bytes past the end of a row repeat its last 16: their weights are zeros.
    """
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    row = gl.arange(0, variant.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    byte = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    chunk = (byte // 16)[None, :] ^ (row // 2 % 8)[:, None]
    first = gl.minimum(chunk * 16 + buffer * 128, source.row_bytes - 16)
    offsets = source.row_offset[:, None] + first + (byte % 16)[None, :]
    # The compiler cannot see that each thread's 16 offsets follow each other.
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])
    async_copy.buffer_load_to_shared(slots.index(slot), source.rows, offsets)


@gluon.jit
def _copy_weights(source, slots, slot, step):
    """Copy the weights of `step` to LDS; steps past the last one repeat it."""
    LAYOUT: gl.constexpr = fragment_copy_layout(gl.num_warps())
    byte = gl.arange(0, 1024, gl.SliceLayout(0, LAYOUT))
    offsets = source.weight_offset[:, None] + byte[None, :]
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
    async_copy.buffer_load_to_shared(slots.index(pair % 2), scales, offsets)


@gluon.jit
def _copy_all_scales(source, buffers, pair):
    """Start copies of the scales of rows and weights in two steps."""
    steps = source.steps
    _copy_scales(source.row_scales, source.row_scale_offset, buffers.row_scales, pair, steps)
    _copy_scales(
        source.weight_scales, source.weight_scale_offset, buffers.weight_scales, pair, steps
    )


@gluon.jit
def _read_rows(buffers, variant, slot, ODD: gl.constexpr):
    """Fragments [BLOCK_M, 128 elements] of the sorted rows in a step; ODD: its last bit."""
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    TYPE: gl.constexpr = element_type(variant.FORMAT)
    rows = buffers.rows.index(slot // PER_BUFFER)
    tile = reinterpret(rows, TYPE, [BLOCK_M, 128], rows_in_lds(BLOCK_M))
    if PER_BUFFER == 2:
        tile = tile.slice(64 * ODD, 64, dim=1)
    return async_copy.load_shared_relaxed(tile, operand_layout(BLOCK_M, 0))


@gluon.jit
def _read_weights(buffers, variant, slot, SLICE: gl.constexpr):
    """Fragments of one slice of the weights in a step, [64 bytes, 256 / SLICES]."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    ROWS: gl.constexpr = 256 // num_slices(BLOCK_M)
    weights = buffers.weights.index(slot)
    tile = reinterpret(weights, gl.uint8, [64, 256], weights_in_lds(BLOCK_M))
    part = tile.slice(SLICE * ROWS, ROWS, dim=1)
    return async_copy.load_shared_relaxed(part, operand_layout(BLOCK_M, 1))


@gluon.jit
def _read_row_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the sorted rows in a step: one dword a lane, [BLOCK_M / 4, 4] int32."""
    WAVES: gl.constexpr = warps_m(variant.BLOCK_M)
    OTHERS: gl.constexpr = warps_n(variant.BLOCK_M)
    slot = buffers.row_scales.index(pair % 2)
    dwords = reinterpret(slot, gl.int32, [16 * WAVES, 8], scales_in_lds(WAVES, 4))
    return async_copy.load_shared_relaxed(
        dwords.slice(4 * ODD, 4, dim=1), scale_dwords(WAVES, 4, OTHERS, False)
    )


@gluon.jit
def _read_weight_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the weights in a step: two or one dwords a lane, [64, 4] int32."""
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M)
    OTHERS: gl.constexpr = warps_m(variant.BLOCK_M)
    FRAGMENTS: gl.constexpr = 16 // WAVES
    slot = buffers.weight_scales.index(pair % 2)
    dwords = reinterpret(slot, gl.int32, [64, 8], scales_in_lds(WAVES, FRAGMENTS))
    return async_copy.load_shared_relaxed(
        dwords.slice(4 * ODD, 4, dim=1), scale_dwords(WAVES, FRAGMENTS, OTHERS, True)
    )


@gluon.jit
def _scales_of_rows(dwords, variant):
    """Bytes [BLOCK_M, 4] from the dwords of `_read_row_scales`; no data moves."""
    ROWS: gl.constexpr = variant.BLOCK_M
    LAYOUT: gl.constexpr = scale_layout(ROWS, 0, ROWS)
    low = gl.join(dwords.to(gl.uint8), (dwords >> 8).to(gl.uint8))
    high = gl.join((dwords >> 16).to(gl.uint8), (dwords >> 24).to(gl.uint8))
    fragments = gl.permute(gl.join(low, high), (3, 2, 0, 1))  # [2, 2, BLOCK_M / 4, 4]
    return gl.convert_layout(gl.reshape(fragments, (ROWS, 4)), LAYOUT)


@gluon.jit
def _scales_of_slice(dwords, variant, INDEX: gl.constexpr):
    """Bytes [256 / SLICES, 4] of two fragments from the dwords of `_read_weight_scales`."""
    SLICES: gl.constexpr = num_slices(variant.BLOCK_M)
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, 1, 256 // SLICES)
    if SLICES == 4:  # the dwords of a wave's first or last four fragments
        first, second = gl.split(gl.permute(gl.reshape(dwords, (2, 32, 4)), (1, 2, 0)))
        dwords = first if INDEX < 2 else second
    SHIFT: gl.constexpr = 16 * (INDEX % 2)
    pair = gl.join((dwords >> SHIFT).to(gl.uint8), (dwords >> (SHIFT + 8)).to(gl.uint8))
    fragments = gl.permute(pair, (2, 0, 1))
    return gl.convert_layout(gl.reshape(fragments, (256 // SLICES, 4)), LAYOUT)


@gluon.jit
def _start(source, buffers, variant):
    """Start the copies that precede step 0, one group a step as in `_advance`; read step 0."""
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    for step in gl.static_range(SLOTS):
        if step % 2 == 0:
            _copy_all_scales(source, buffers, step // 2)
        if step % PER_BUFFER == 0:
            buffer = step // PER_BUFFER
            _copy_rows(source, buffers.rows, variant, buffer, buffer)
        _copy_weights(source, buffers.weights, step, step)
        async_copy.commit_group()
    async_copy.wait_group(SLOTS - 1)
    weights = ()
    for index in gl.static_range(num_slices(variant.BLOCK_M)):
        weights += (_read_weights(buffers, variant, 0, index),)
    return Fragments(
        rows=_read_rows(buffers, variant, 0, 0),
        row_scales=_read_row_scales(buffers, variant, 0, 0),
        weights=weights,
        weight_scales=_read_weight_scales(buffers, variant, 0, 0),
    )


@gluon.jit
def _copy_part(source, buffers, variant, ring, ODD: gl.constexpr, PART: gl.constexpr):
    """Start one quarter of the copies of the step SLOTS after ring.step, whose last bit is ODD.

    LDS of a step is free when its operands are in registers: its weights' slot at the step
    itself, the slot of its rows if the step is its last. Scales of a pair are read one step early,
    so their slot is free at the pair's second step.
    """
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    step = ring.step + SLOTS
    if PART == 0 and (PER_BUFFER == 1 or ODD == 1):
        buffer = step // PER_BUFFER
        _copy_rows(source, buffers.rows, variant, ring.slot // PER_BUFFER, buffer)
    if PART == 2:
        _copy_weights(source, buffers.weights, ring.slot, step)
    if PART == 3:
        if ODD == 1:
            _copy_all_scales(source, buffers, step // 2)
        async_copy.commit_group()


@gluon.jit
def _multiply_slice(accumulator, fragments, variant, INDEX: gl.constexpr):
    """Add one slice of a step, [BLOCK_M, 256 / SLICES]: eight MFMA a wave."""
    return cdna4.mfma_scaled(
        fragments.rows,
        _scales_of_rows(fragments.row_scales, variant),
        variant.FORMAT,
        fragments.weights[INDEX],
        _scales_of_slice(fragments.weight_scales, variant, INDEX),
        "e2m1",
        acc=accumulator,
    )


@gluon.jit
def _advance(sums, fragments, source, buffers, variant, ring, ODD: gl.constexpr):
    """Multiply the operands of a step; read those of the next, start copies of a later one."""
    SLICES: gl.constexpr = num_slices(variant.BLOCK_M)
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    # The next step's copies have landed in every wave: those of the groups that may be pending are
    # of later steps.
    async_copy.wait_group(SLOTS - 2 if ODD == 0 else 1)
    following = ring.advance(SLOTS)
    rows = _read_rows(buffers, variant, following.slot, 1 - ODD)
    row_scales = _read_row_scales(buffers, variant, following.step // 2, 1 - ODD)
    weight_scales = _read_weight_scales(buffers, variant, following.step // 2, 1 - ODD)
    results, weights = (), ()
    for index in gl.static_range(SLICES):
        results += (_multiply_slice(sums[index], fragments, variant, index),)
        scheduling_fence()
        weights += (_read_weights(buffers, variant, following.slot, index),)
        for part in gl.static_range(4 // SLICES):
            _copy_part(source, buffers, variant, ring, ODD, index * (4 // SLICES) + part)
    fragments = Fragments(
        rows=rows, row_scales=row_scales, weights=weights, weight_scales=weight_scales
    )
    return results, fragments, following


@gluon.jit
def multiply_tile(source, buffers, variant):
    """``rows @ weights.T``: one float32 value [BLOCK_M, 256 / SLICES] a slice."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    SLICES: gl.constexpr = num_slices(BLOCK_M)
    sums = ()
    for _ in gl.static_range(SLICES):
        sums += (gl.zeros((BLOCK_M, 256 // SLICES), gl.float32, mfma_layout(BLOCK_M)),)
    fragments = _start(source, buffers, variant)
    ring = Ring(step=0, slot=0)
    for _ in range(source.steps // 2):
        sums, fragments, ring = _advance(sums, fragments, source, buffers, variant, ring, 0)
        sums, fragments, ring = _advance(sums, fragments, source, buffers, variant, ring, 1)
    if source.steps % 2 == 1:
        last = ()
        for index in gl.static_range(SLICES):
            last += (_multiply_slice(sums[index], fragments, variant, index),)
        sums = last
    async_copy.wait_group(0)
    return sums
