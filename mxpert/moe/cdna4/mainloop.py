"""Main loop of the decode kernel: stream weights through registers, activations through LDS."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4_operands import (
    STEPS,
    as_operand,
    as_scale_operand,
    as_x_operand,
    as_x_scale_operand,
    chunks_per_unit,
    code_layout,
    decode_operand,
    elements_per_chunk,
    items_per_lane,
    loads_per_unit,
    scale_layout,
    sum_layout,
    unit_x_scales,
    words_per_lane,
    x_layout,
    x_scale_layout,
)
from ...device.compat import aggregate, barrier, batched_mfma_scaled, buffer_load, reinterpret

_async_copy = gl.amd.cdna4.async_copy
UNIT_WORDS = gl.constexpr(64)
"""Words of scales of a unit of 64 x 128 weights."""


@gluon.constexpr_function
def unit_items(FORMAT, W_FORMAT):
    """Elements of codes of a unit: bytes, or words to decode."""
    return 64 * loads_per_unit(W_FORMAT) * items_per_lane(FORMAT)


@aggregate
class Shape:
    """Constants of the compiled kernel.

    FORMAT: of the activations, "bf16", "e4m3" or "e2m1". ROWS: activation rows of a tile. SLICES,
    WAVES: see `lib.fragments`. DEPTH: steps of weights in flight. ITERATIONS: iterations that a
    copy of activations lasts. STREAM: weights are read once, so that they need no cache. SCALED:
    activations have E8M0 scales. ALIGNED: their rows begin at words. W_FORMAT: of the weights,
    "e2m1" or "e4m3".
    """

    FORMAT: gl.constexpr
    ROWS: gl.constexpr
    SLICES: gl.constexpr
    WAVES: gl.constexpr
    DEPTH: gl.constexpr
    ITERATIONS: gl.constexpr
    STREAM: gl.constexpr
    SCALED: gl.constexpr
    ALIGNED: gl.constexpr
    W_FORMAT: gl.constexpr


@aggregate
class WeightStream:
    """Weights of a tile: base addresses, and offsets of each thread.

    code_blocks, scale_blocks: MX blocks of depth from the thread's own one on; 0 if its 64 rows do
    not exist, which the last tile of an expert may lack. num_blocks: those of the tile.
    """

    codes: gl.tensor
    scales: gl.tensor
    code_offsets: gl.tensor
    scale_offsets: gl.tensor
    code_blocks: gl.tensor
    scale_blocks: gl.tensor
    num_blocks: gl.tensor
    shape: Shape

    @gluon.jit
    def load(self, step):
        """Start loading the codes and scales of a step; past the last block they are zeros.

        What pads the depth of a unit is not read: an MFMA makes NaN of a NaN scale, though the
        activations are zeros there.
        """
        SLICES: gl.constexpr = self.shape.SLICES
        unit = step * SLICES
        ITEMS: gl.constexpr = unit_items(self.shape.FORMAT, self.shape.W_FORMAT)
        codes = self.codes + unit.to(gl.int64) * ITEMS
        scales = self.scales + unit.to(gl.int64) * UNIT_WORDS
        code_mask = unit * 4 < self.code_blocks
        scale_mask = unit * 4 < self.scale_blocks
        CACHE: gl.constexpr = ".cg" if self.shape.STREAM else ".ca"
        return Weights(
            codes=buffer_load(codes, self.code_offsets, code_mask, CACHE),
            scales=buffer_load(scales, self.scale_offsets, scale_mask, CACHE),
        )


@aggregate
class Weights:
    """Codes and scales of a step, as loaded."""

    codes: gl.tensor
    scales: gl.tensor


@gluon.constexpr_function
def _along(rank, axis, layout):
    """Layout of a vector along one axis of a tensor."""
    for place in reversed(range(rank)):
        if place != axis:
            layout = gl.SliceLayout(place, layout)
    return layout


@gluon.jit
def along(size: gl.constexpr, axis: gl.constexpr, rank: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, … size - 1 along an axis of a tensor of `rank` dimensions; 1 in the others."""
    values = gl.arange(0, size, _along(rank, axis, LAYOUT))
    for place in gl.static_range(rank):
        if place != axis:
            values = gl.expand_dims(values, place)
    return values


@aggregate
class Units:
    """Units of an expert's weights, rows and depth; `blocks` of the depth belong to the tile."""

    rows: gl.tensor
    depth: gl.tensor
    blocks: gl.tensor


@gluon.jit
def open_weights(codes, scales, first_unit, units, shape):
    """`WeightStream` of a tile.

    Args:
        codes, scales: addresses of the tile's first unit; codes uint8, or uint32 with bf16
            activations, scales uint32.
        first_unit: the tile's first unit of rows. units: Units.
    """
    SLICES: gl.constexpr = shape.SLICES
    WAVES: gl.constexpr = shape.WAVES
    ITEMS: gl.constexpr = items_per_lane(shape.FORMAT)
    LOADS: gl.constexpr = loads_per_unit(shape.W_FORMAT)
    WORDS: gl.constexpr = words_per_lane(shape.FORMAT, shape.W_FORMAT)
    CL: gl.constexpr = code_layout(SLICES, WAVES, shape.FORMAT, shape.W_FORMAT)
    SL: gl.constexpr = scale_layout(SLICES, WAVES, WORDS)
    fragment, wave = along(LOADS * WAVES, 1, 4, CL), along(WORDS * WAVES, 1, 3, SL)
    code_slice, scale_slice = along(SLICES, 0, 4, CL), along(SLICES, 0, 3, SL)
    code_lane, word = along(64, 2, 4, CL), along(64, 2, 3, SL)
    code_block = code_lane // 16
    if LOADS == 8:
        code_block = fragment % 2 * 2 + code_lane // 32
    if WORDS == 2:
        word = (wave % 2 * 2 + word // 32) * 16 + word % 16
        wave = wave // 2
    place = code_slice + fragment // LOADS * units.depth
    lane = fragment % LOADS * 64 + code_lane
    words = (scale_slice + wave * units.depth) * UNIT_WORDS + word
    code_blocks = units.blocks - code_slice * 4 - code_block
    scale_blocks = units.blocks - scale_slice * 4 - word // 16
    return WeightStream(
        codes=codes,
        scales=scales,
        code_offsets=(place * (64 * LOADS) + lane) * ITEMS + along(ITEMS, 3, 4, CL),
        scale_offsets=words,
        code_blocks=gl.where(first_unit + fragment // LOADS < units.rows, code_blocks, 0),
        scale_blocks=gl.where(first_unit + wave < units.rows, scale_blocks, 0),
        num_blocks=units.blocks,
        shape=shape,
    )


@aggregate
class ActivationCopies:
    """Activation rows of a tile and their buffers in LDS, two of each.

    rows: chunks of 16 bytes, [2, chunks of a copy, ROWS, 16 bytes]. scales: uint32 [2, slices and
    iterations of a copy, ROWS, STEPS], a byte for each MX block of a unit. x, x_scale: addresses of
    the tile's first depth. offsets, scale_offsets: of each thread's chunks and words of the first
    copy. num_blocks: MX blocks of depth from there on. scale_shift: first bit of each thread's
    scales in its word, 0 if rows begin at words.
    """

    rows: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    x: gl.tensor
    x_scale: gl.tensor
    offsets: gl.tensor
    scale_offsets: gl.tensor
    scale_shift: gl.tensor
    num_blocks: gl.tensor
    shape: Shape

    @gluon.jit
    def copy(self, copy):
        """Start copying rows straight to LDS; zeros past the last block."""
        FORMAT: gl.constexpr = self.shape.FORMAT
        CHUNKS: gl.constexpr = self.rows.shape[1]
        LAYOUT: gl.constexpr = self.offsets.type.layout
        PER_BLOCK: gl.constexpr = chunks_per_unit(FORMAT) // 4
        chunk = copy * CHUNKS + along(CHUNKS, 0, 3, LAYOUT)
        # An address of 2^31 or more is out of bounds: the copy writes zeros to LDS. A masked copy
        # would write nothing.
        outside = (chunk >= self.num_blocks * PER_BLOCK).to(gl.int32) * (1 << 30)
        if elements_per_chunk(FORMAT) == 16:
            outside += outside
        _async_copy.buffer_load_to_shared(
            self.rows.index(copy % 2),
            self.x + copy * (CHUNKS * elements_per_chunk(FORMAT)),
            self.offsets + outside,
        )
        _async_copy.commit_group()

    @gluon.jit
    def load_scales(self, copy):
        """Start loading the scales of a copy; `store_scales` waits for them.

        A unit's four bytes lie in one word, or in two if rows do not begin at words.
        """
        PARTS: gl.constexpr = self.scales.shape[1]
        x_scale = self.x_scale + copy * (PARTS * STEPS)
        left = self._blocks_left(copy)
        low = buffer_load(x_scale, self.scale_offsets, left > 0, ".ca")
        if self.shape.ALIGNED:
            return low
        else:
            spills = left * 8 > 32 - self.scale_shift
            return TwoWords(low, buffer_load(x_scale, self.scale_offsets + 1, spills, ".ca"))

    @gluon.jit
    def store_scales(self, copy, words):
        """Store what `load_scales` returned for this copy to LDS; zeros past the last block."""
        if not self.shape.ALIGNED:
            shift = self.scale_shift.to(gl.uint32)
            high = (words.high << 1) << (31 - shift)
            missing = 4 - gl.minimum(gl.maximum(self._blocks_left(copy), 1), 4)
            every = gl.full(missing.shape, 0xFFFFFFFF, gl.uint32, missing.type.layout)
            kept = every >> (8 * missing).to(gl.uint32)
            words = (words.low >> shift | high) & kept
        self.scales.index(copy % 2).store(words)

    @gluon.jit
    def _blocks_left(self, copy):
        """MX blocks of depth from each thread's unit of a copy on; 0 or less past the last one."""
        PARTS: gl.constexpr = self.scales.shape[1]
        WORDS: gl.constexpr = self.scale_offsets.type.layout
        unit = copy * (PARTS * STEPS) + _scale_units(PARTS, self.shape, WORDS)
        return self.num_blocks - unit * 4


@aggregate
class TwoWords:
    """The words that hold four bytes which begin inside of the first one."""

    low: gl.tensor
    high: gl.tensor


@gluon.jit
def _scale_units(PARTS: gl.constexpr, shape, LAYOUT: gl.constexpr):
    """Unit of depth, inside a copy, of each word [PARTS, ROWS, STEPS] of scales in LDS."""
    part = along(PARTS, 0, 3, LAYOUT)
    step = part // shape.SLICES * STEPS + along(STEPS, 2, 3, LAYOUT)
    return step * shape.SLICES + part % shape.SLICES


@gluon.jit
def open_activations(source, first_block, num_blocks, shape, num_warps: gl.constexpr):
    """`ActivationCopies` of a tile whose depth starts at `first_block`; starts the first copy.

    source: Activations.
    """
    FORMAT: gl.constexpr = shape.FORMAT
    ROWS: gl.constexpr = shape.ROWS
    WIDTH: gl.constexpr = elements_per_chunk(FORMAT)
    UNITS: gl.constexpr = shape.ITERATIONS * STEPS * shape.SLICES
    CHUNKS: gl.constexpr = UNITS * chunks_per_unit(FORMAT)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, 1, WIDTH], [64 // ROWS, ROWS, 1], [num_warps, 1, 1], [2, 1, 0]
    )
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 4], [num_warps, 1, 1], [2, 1, 0])
    PARTS: gl.constexpr = shape.ITERATIONS * shape.SLICES
    rows = gl.allocate_shared_memory(
        source.x.dtype.element_ty,
        [2, CHUNKS, ROWS, WIDTH],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )
    scales = gl.allocate_shared_memory(
        gl.uint32, [2, PARTS, ROWS, STEPS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    row = source.row_of(along(ROWS, 1, 3, COPY))
    chunk = along(CHUNKS, 0, 3, COPY) * WIDTH + along(WIDTH, 2, 3, COPY)
    scale_row = source.row_of(along(ROWS, 1, 3, WORDS)) * source.scale_stride
    scale_shift = scale_row % 4 * 8
    if not shape.ALIGNED:
        scale_row = scale_row // 4
    copies = ActivationCopies(
        rows=rows,
        scales=scales,
        x=source.x + first_block * (chunks_per_unit(FORMAT) // 4 * WIDTH),
        x_scale=source.x_scale + first_block // 4,
        offsets=row * source.row_width + chunk,
        scale_offsets=scale_row + _scale_units(PARTS, shape, WORDS),
        scale_shift=scale_shift,
        num_blocks=num_blocks,
        shape=shape,
    )
    copies.copy(0)
    return copies


@gluon.jit
def _multiply(sums, weights, x, x_scales, shape):
    """Add the products of one step to the sums."""
    LAYOUT: gl.constexpr = sums.type.layout
    if shape.FORMAT == "bf16":
        operand = decode_operand(weights.codes, weights.scales, LAYOUT, shape.W_FORMAT)
        return gl.amd.cdna4.mfma(operand, x, sums)
    else:
        operand = as_operand(weights.codes, LAYOUT, shape.W_FORMAT)
        scales = as_scale_operand(weights.scales)
        return batched_mfma_scaled(operand, scales, shape.W_FORMAT, x, x_scales, shape.FORMAT, sums)


@gluon.jit
def _replace(queue, place: gl.constexpr, weights):
    """The queue with other weights at a place."""
    return queue[:place] + (weights,) + queue[place + 1 :]


@gluon.jit
def accumulate(weights, activations, shape):
    """Sums of a tile over its depth, float32 [SLICES, 64 * WAVES, ROWS].

    weights: WeightStream. activations: ActivationCopies, whose first copy has started.
    """
    FORMAT: gl.constexpr = shape.FORMAT
    SLICES: gl.constexpr = shape.SLICES
    WAVES: gl.constexpr = shape.WAVES
    ROWS: gl.constexpr = shape.ROWS
    SUMS: gl.constexpr = sum_layout(SLICES, WAVES, FORMAT)
    X: gl.constexpr = x_layout(SLICES, WAVES, ROWS, FORMAT, shape.W_FORMAT)
    sums = gl.zeros((SLICES, 64 * WAVES, ROWS), gl.float32, SUMS)
    iterations = gl.cdiv(weights.num_blocks, 4 * STEPS * SLICES)
    # One view for each step of the two buffers, and for each iteration.
    x_steps = reinterpret(
        activations.rows,
        activations.x.dtype.element_ty,
        [2 * shape.ITERATIONS * STEPS, SLICES * chunks_per_unit(FORMAT), ROWS, X.shape[2]],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )
    x_scale_words = reinterpret(
        activations.scales,
        gl.uint32,
        [2 * shape.ITERATIONS, SLICES, ROWS, STEPS],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )
    queue = ()
    for step in gl.static_range(shape.DEPTH):
        queue += (weights.load(gl.to_tensor(step)),)
    if shape.SCALED:
        own_scales = activations.load_scales(0)
    x_scales = unit_x_scales(SLICES, WAVES, ROWS)
    for copy in range(gl.cdiv(iterations, shape.ITERATIONS)):
        if shape.SCALED:
            activations.store_scales(copy, own_scales)
        _async_copy.wait_group(0)
        barrier()
        activations.copy(copy + 1)
        if shape.SCALED:
            own_scales = activations.load_scales(copy + 1)
        first = copy * shape.ITERATIONS
        for iteration in range(first, gl.minimum(first + shape.ITERATIONS, iterations)):
            place = iteration % (2 * shape.ITERATIONS)
            if shape.SCALED:
                words = _async_copy.load_shared_relaxed(
                    x_scale_words.index(place), x_scale_layout(SLICES, WAVES, ROWS)
                )
            for step in gl.static_range(STEPS):
                x = _async_copy.load_shared_relaxed(x_steps.index(place * STEPS + step), X)
                if shape.SCALED:
                    x_scales = as_x_scale_operand(words, step, WAVES)
                x = as_x_operand(x, SLICES, SUMS, FORMAT, shape.W_FORMAT)
                sums = _multiply(sums, queue[step % shape.DEPTH], x, x_scales, shape)
                following = weights.load(iteration * STEPS + step + shape.DEPTH)
                queue = _replace(queue, step % shape.DEPTH, following)
    _async_copy.wait_group(0)
    return sums


@gluon.jit
def sum_slices(sums):
    """Sums of all slices, [64 * WAVES, ROWS]; waves add them through LDS."""
    return gl.sum(sums, axis=0)
