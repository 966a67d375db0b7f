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
from ..lib.compiler import delay_half_of_waves, scheduling_fence, set_priority
from .prefill_layouts import (
    fragment_copy_layout,
    linear_in_lds,
    mfma_layout,
    row_copy_layout,
    rows_in_lds,
    scale_copy_layout,
    scale_dwords,
    scales_in_lds,
    warps_m,
    warps_n,
    weight_parts,
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

    rows: uint8 codes. row_offset: of the rows of each half, [BLOCK_M / 2]. row_bytes: bytes of a
    row. weights, weight_offset: of the fragments of each part in one step. row_scales, weight_scales: units [64 rows][step][256]; row_scale_offset
    [BLOCK_M / 64], weight_scale_offset [4]: of each unit. steps: of the contracted dimension.
    """

    rows: gl.tensor
    row_offset: gl.tuple
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
    """LDS of each half of the rows, of each part of the weights, and of the scales.

    The weights of e2m1 rows have the parts of even steps, then those of odd steps. Copies of one
    step to different allocations need no barrier between them.
    """

    rows: gl.tuple
    weights: gl.tuple
    row_scales: gl.shared_memory_descriptor
    weight_scales: gl.shared_memory_descriptor


@aggregate
class Fragments:
    """Operands of one step in registers: two halves of the rows, parts of the weights, scales.

    Scales are dwords of four fragments.
    """

    rows: gl.tuple
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
    PARTS: gl.constexpr = weight_parts(BLOCK_M)
    UNITS: gl.constexpr = copied_units(gl.num_warps())
    rows, weights = (), ()
    for _ in gl.static_range(2):
        rows += (gl.allocate_shared_memory(gl.uint8, [ROW_SLOTS, BLOCK_M // 2, 128], LINEAR),)
    for _ in gl.static_range(steps_per_buffer(variant.FORMAT) * PARTS):
        weights += (
            gl.allocate_shared_memory(gl.uint8, [ROW_SLOTS, 16 // PARTS, 1024], LINEAR),
        )
    return Buffers(
        rows=rows,
        weights=weights,
        row_scales=gl.allocate_shared_memory(gl.uint8, [2, UNITS, 512], LINEAR),
        weight_scales=gl.allocate_shared_memory(gl.uint8, [2, 4, 512], LINEAR),
    )


@gluon.jit
def copied_rows(BLOCK_M: gl.constexpr, HALF: gl.constexpr):
    """The tile's rows of one half, in the order of its copies, int32 [BLOCK_M / 2]."""
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    place = gl.arange(0, BLOCK_M // 2, gl.SliceLayout(1, LAYOUT))
    return place // 32 * 64 + HALF * 32 + place % 32


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
        offsets += (unit * (steps * 4096) + fragment % 4 * 1024,)
    return offsets


@gluon.constexpr_function
def copied_units(WARPS):
    """Units whose scales one instruction of every wave copies.

    A copy must not leave out a wave, because waits count each wave's own copies. So those of the
    rows' scales repeat the last unit if the tile has fewer.
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
def _copy_rows(source, slots, slot, buffer, HALF: gl.constexpr):
    """Copy half of buffer number `buffer` of the rows to LDS, swizzled as `rows_in_lds` says.

    Bytes past the end of a row repeat its last 16: their weights are zeros.
    """
    LAYOUT: gl.constexpr = row_copy_layout(gl.num_warps())
    row = gl.arange(0, slots.shape[1], gl.SliceLayout(1, LAYOUT))
    byte = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    chunk = (byte // 16)[None, :] ^ (row // 2 % 8)[:, None]
    first = gl.minimum(chunk * 16 + buffer * 128, source.row_bytes - 16)
    offsets = source.row_offset[HALF][:, None] + first + (byte % 16)[None, :]
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
def _copy_row_scales(source, buffers, pair):
    slots, steps = buffers.row_scales, source.steps
    _copy_scales(source.row_scales, source.row_scale_offset, slots, pair, steps)


@gluon.jit
def _copy_weight_scales(source, buffers, pair):
    slots, steps = buffers.weight_scales, source.steps
    _copy_scales(source.weight_scales, source.weight_scale_offset, slots, pair, steps)


@gluon.jit
def _read_rows(buffers, variant, slot, ODD: gl.constexpr, HALF: gl.constexpr):
    """Fragments [BLOCK_M / 2, 128 elements] of the sorted rows in a step; ODD: its last bit."""
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    TYPE: gl.constexpr = element_type(variant.FORMAT)
    rows = buffers.rows[HALF].index(slot >> PER_BUFFER - 1)
    tile = reinterpret(rows, TYPE, [BLOCK_M // 2, 128], rows_in_lds(BLOCK_M))
    if PER_BUFFER == 2:
        tile = tile.slice(64 * ODD, 64, dim=1)
    return async_copy.load_shared_relaxed(tile, operand_layout(BLOCK_M, 0))


@gluon.constexpr_function
def weight_buffer(BLOCK_M, FORMAT, ODD, PART):
    """Which of `Buffers.weights` holds a part of an even or odd step."""
    return ODD * weight_parts(BLOCK_M) + PART if FORMAT == "e2m1" else PART


@gluon.jit
def _read_weights(buffers, variant, slot, ODD: gl.constexpr, PART: gl.constexpr):
    """Fragments of one part of the weights in a step, [64 bytes, 256 / parts]."""
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    INDEX: gl.constexpr = weight_buffer(BLOCK_M, variant.FORMAT, ODD, PART)
    ROWS: gl.constexpr = 256 // weight_parts(BLOCK_M)
    weights = buffers.weights[INDEX].index(slot >> steps_per_buffer(variant.FORMAT) - 1)
    part = reinterpret(weights, gl.uint8, [64, ROWS], weights_in_lds(BLOCK_M))
    return async_copy.load_shared_relaxed(part, operand_layout(BLOCK_M, 1))


@gluon.jit
def _read_row_scales(buffers, variant, pair, ODD: gl.constexpr):
    """Scales of the sorted rows in a step: one dword a lane, [BLOCK_M / 4, 4] int32."""
    WAVES: gl.constexpr = warps_m(variant.BLOCK_M)
    OTHERS: gl.constexpr = warps_n(variant.BLOCK_M)
    slot = buffers.row_scales.index(pair & 1).slice(0, variant.BLOCK_M // 64, dim=0)
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
    slot = buffers.weight_scales.index(pair & 1)
    dwords = reinterpret(slot, gl.int32, [64, 8], scales_in_lds(WAVES, FRAGMENTS))
    return async_copy.load_shared_relaxed(
        dwords.slice(4 * ODD, 4, dim=1), scale_dwords(WAVES, FRAGMENTS, OTHERS, True)
    )


@gluon.jit
def _scales_of_half(dwords, variant, HALF: gl.constexpr):
    """Bytes [BLOCK_M / 2, 4] of two fragments from the dwords of `_read_row_scales`."""
    ROWS: gl.constexpr = variant.BLOCK_M // 2
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, 0, ROWS)
    dwords = dwords >> (16 * HALF)
    pair = gl.join(dwords.to(gl.uint8), (dwords >> 8).to(gl.uint8))
    return gl.convert_layout(gl.reshape(gl.permute(pair, (2, 0, 1)), (ROWS, 4)), LAYOUT)


@gluon.jit
def _scales_of_part(dwords, variant, PART: gl.constexpr):
    """Bytes [256 / parts, 4] of four fragments from the dwords of `_read_weight_scales`."""
    ROWS: gl.constexpr = 256 // weight_parts(variant.BLOCK_M)
    LAYOUT: gl.constexpr = scale_layout(variant.BLOCK_M, 1, ROWS)
    if ROWS == 128:
        first, second = gl.split(gl.permute(gl.reshape(dwords, (2, 32, 4)), (1, 2, 0)))
        dwords = first if PART == 0 else second
    low = gl.join(dwords.to(gl.uint8), (dwords >> 8).to(gl.uint8))
    high = gl.join((dwords >> 16).to(gl.uint8), (dwords >> 24).to(gl.uint8))
    fragments = gl.permute(gl.join(low, high), (3, 2, 0, 1))  # [2, 2, ROWS / 4, 4]
    return gl.convert_layout(gl.reshape(fragments, (ROWS, 4)), LAYOUT)


@gluon.jit
def _read(buffers, variant, ring, ODD: gl.constexpr):
    """Read the operands of a step whose last bit is ODD."""
    weights = ()
    for part in gl.static_range(weight_parts(variant.BLOCK_M)):
        weights += (_read_weights(buffers, variant, ring.slot, ODD, part),)
    return Fragments(
        rows=(
            _read_rows(buffers, variant, ring.slot, ODD, 0),
            _read_rows(buffers, variant, ring.slot, ODD, 1),
        ),
        row_scales=_read_row_scales(buffers, variant, ring.step >> 1, ODD),
        weights=weights,
        weight_scales=_read_weight_scales(buffers, variant, ring.step >> 1, ODD),
    )


@gluon.jit
def _start(source, buffers, variant):
    """Start the copies that precede step 0, as if there were steps before it."""
    WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    FIRST: gl.constexpr = weight_parts(variant.BLOCK_M) if variant.FORMAT == "e2m1" else 0
    for slot in gl.static_range(SLOTS):
        ring = Ring(step=slot - SLOTS, slot=slot)
        for index in gl.static_range(
            num_copies(variant.BLOCK_M, variant.FORMAT, WARPS, (slot + SLOTS) % 2)
        ):
            # There is no step before 0, of which step -SLOTS would copy weights.
            if slot > 0 or index >= FIRST:
                _copy(source, buffers, variant, ring, (slot + SLOTS) % 2, index)
        async_copy.commit_group()


@gluon.constexpr_function
def copies_of_step(BLOCK_M, FORMAT, WARPS, ODD):
    """The copies that one step starts, as (what, half or part, instructions of a wave).

    LDS of a step is free once its operands are in registers. So e4m3 and e5m2 copy rows and weights
    of the step SLOTS later. With e2m1 the slot of rows is free in its second step alone: even steps
    copy weights of two steps, 3 and 4 steps later. Scales of a pair of steps are read one step
    early, so their slot is free at the pair's second step.
    """
    parts = weight_parts(BLOCK_M)
    rows = [("rows", half, BLOCK_M // (16 * WARPS)) for half in range(2)]
    weights = [("weights", part, 16 // (parts * WARPS)) for part in range(parts)]
    scales = [("row scales", 0, 1), ("weight scales", 0, 1)] if ODD else []
    if FORMAT != "e2m1":
        return rows + weights + scales
    earlier = [("earlier weights", part, size) for _, part, size in weights]
    return rows + scales if ODD else earlier + weights


@gluon.constexpr_function
def num_copies(BLOCK_M, FORMAT, WARPS, ODD):
    """How many copies a step starts."""
    return len(copies_of_step(BLOCK_M, FORMAT, WARPS, ODD))


@gluon.constexpr_function
def copy_kind(BLOCK_M, FORMAT, WARPS, ODD, INDEX):
    """What one of them copies."""
    kind, _, _ = copies_of_step(BLOCK_M, FORMAT, WARPS, ODD)[INDEX]
    return kind


@gluon.constexpr_function
def copy_piece(BLOCK_M, FORMAT, WARPS, ODD, INDEX):
    """Which half or part it copies."""
    _, piece, _ = copies_of_step(BLOCK_M, FORMAT, WARPS, ODD)[INDEX]
    return piece


@gluon.constexpr_function
def copy_quadrant(BLOCK_M, FORMAT, WARPS, ODD, INDEX):
    """Between the MFMA of which quadrant it starts: all have about as many instructions."""
    sizes = [size for _, _, size in copies_of_step(BLOCK_M, FORMAT, WARPS, ODD)]
    return sum(sizes[:INDEX]) * 2 * weight_parts(BLOCK_M) // sum(sizes)


@gluon.jit
def _copy(source, buffers, variant, ring, ODD: gl.constexpr, INDEX: gl.constexpr):
    """Start one of the `copies_of_step`; ring: the step that starts it, ODD: its last bit."""
    WARPS: gl.constexpr = gl.num_warps()
    KIND: gl.constexpr = copy_kind(variant.BLOCK_M, variant.FORMAT, WARPS, ODD, INDEX)
    PIECE: gl.constexpr = copy_piece(variant.BLOCK_M, variant.FORMAT, WARPS, ODD, INDEX)
    PER_BUFFER: gl.constexpr = steps_per_buffer(variant.FORMAT)
    SLOTS: gl.constexpr = num_slots(variant.FORMAT)
    EARLIER: gl.constexpr = 1 if KIND == "earlier weights" else 0
    BUFFER: gl.constexpr = weight_buffer(variant.BLOCK_M, variant.FORMAT, ODD ^ EARLIER, PIECE)
    step = ring.step + SLOTS - EARLIER
    slot = (ring.slot - 1 & SLOTS - 1 if EARLIER else ring.slot) >> PER_BUFFER - 1
    if KIND == "rows":
        _copy_rows(source, buffers.rows[PIECE], slot, step >> PER_BUFFER - 1, PIECE)
    elif KIND == "row scales":
        _copy_row_scales(source, buffers, step >> 1)
    elif KIND == "weight scales":
        _copy_weight_scales(source, buffers, step >> 1)
    else:
        _copy_weights(source, buffers.weights[BUFFER], slot, step, PIECE)


@gluon.jit
def _multiply_quadrant(total, fragments, variant, QUADRANT: gl.constexpr):
    """Add half of the rows times a part of the weights: eight MFMA a wave."""
    PART: gl.constexpr = QUADRANT // 2
    HALF: gl.constexpr = QUADRANT % 2
    return cdna4.mfma_scaled(
        fragments.rows[HALF],
        _scales_of_half(fragments.row_scales, variant, HALF),
        variant.FORMAT,
        fragments.weights[PART],
        _scales_of_part(fragments.weight_scales, variant, PART),
        "e2m1",
        acc=total,
    )


@gluon.jit
def _multiply(sums, fragments, variant):
    """Add the products of a step to all quadrants."""
    results = ()
    for quadrant in gl.static_range(2 * weight_parts(variant.BLOCK_M)):
        results += (_multiply_quadrant(sums[quadrant], fragments, variant, quadrant),)
    return results


@gluon.jit
def _advance(sums, fragments, source, buffers, variant, ring, ODD: gl.constexpr):
    """Multiply the operands of a step; read those of the next, start copies of a later one."""
    sums = _multiply(sums, fragments, variant)
    scheduling_fence()
    async_copy.wait_group(2)  # the barrier between the stages
    set_priority(1)
    following = ring.advance(num_slots(variant.FORMAT))
    for index in gl.static_range(num_copies(variant.BLOCK_M, variant.FORMAT, gl.num_warps(), ODD)):
        _copy(source, buffers, variant, ring, ODD, index)
    async_copy.commit_group()
    fragments = _read(buffers, variant, following, 1 - ODD)
    # Copies of the step after the next have landed, except for those of the last group.
    async_copy.wait_group(1)
    set_priority(0)
    return sums, fragments


@gluon.jit
def multiply_tile(source, buffers, variant):
    """``rows @ weights.T``: one float32 value [BLOCK_M / 2, 256 / parts] a quadrant.

    Quadrant 2 · part + half has one half of the rows and one part of the weights.
    """
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    PARTS: gl.constexpr = weight_parts(BLOCK_M)
    sums = ()
    for _ in gl.static_range(2 * PARTS):
        sums += (gl.zeros((BLOCK_M // 2, 256 // PARTS), gl.float32, mfma_layout(BLOCK_M)),)
    _start(source, buffers, variant)
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
