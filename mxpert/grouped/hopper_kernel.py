"""Grouped GEMM on wgmma: MXFP8 operands with few scales per row, or bf16.

A persistent CTA, one per SM, computes tiles of 128 × 256. The reduction axis is contiguous in both
operands, except in a bf16 b of shape [G, K, N].

Roles:
    consumer 0, consumer 1: a warpgroup each (4 warps, 240 registers a thread), rows 0 … 63 and
        64 … 127 of the tile. They run wgmma, scale and store. The epilogue of one overlaps the
        wgmma of the other.
    producer: 1 warp, 24 registers. It starts the TMA loads of both operands.
    Each role finds its tiles itself (`TileScheduler`); nothing but operands passes between them.

Barriers: two mbarriers a stage, whose phases flip when the ring wraps.
    ready: 1 arrival, the producer's expect, and the bytes of both tiles; both consumers wait.
    free: 2 arrivals, one of each consumer; the producer waits. The first wait passes at once.

Pipeline:
    STAGES stages of 128 bytes a row: a [128, depth] and b [256, depth], with depth 128 fp8 or
    64 bf16 values; 48 KiB a stage. The ring runs on from tile to tile. A consumer has one staging
    buffer [64, 128] ([64, 64] for float32) for its stores.

Timeline:
    producer:  for each tile, each stage: wait free → expect ready → load a, load b
    consumer:  for each tile: load scales → for each stage: wait ready → wgmma → release
               → scale → staging → TMA store, which ends during the next tile

`SUMS` says where sums are kept, and how the scales of a are applied (see mainloop.py):

IN_TENSOR_CORE: one scale per row (per row and group in wgrad). The epilogue multiplies the sums by
    the scales of both operands. Also bf16, which has no scales.
PROMOTED: as IN_TENSOR_CORE, but sums are promoted to float32 every 256 values.
SCALED: a has one scale per 128 values; every 128 values the sums are scaled and promoted to
    float32. b has one scale per row.

In wgrad the reduction of a group ends at any multiple of 32, so the last stage of a group may be
partly used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..device.compat import aggregate, async_load, async_store, barrier
from ..device.groups import load_offset
from ..device.hopper import consumer_start, producer_start
from ..formats.spec import MX_BLOCK_SIZE
from .hopper_wide_operands import is_wide

# ---- Tile scheduler of the persistent grouped GEMM.
#
# The kernel reads group bounds on the device; the host computes only an upper bound of the number
# of tiles. Tiles are numbered group by group. Within a group, bands of `BAND` row tiles of the same
# column tile run together and share its operand in L2.
#
# All warps of a CTA locate their tiles themselves, from the same numbers. Without WGRAD the search
# for the tile's group starts at the group of the previous tile, which `TileCursor` holds.

MX_BLOCK = gl.constexpr(MX_BLOCK_SIZE)
"""Values that share an MX scale; groups of wgrad's reduction start at multiples of it."""


@aggregate
class TileCursor:
    """Group of the latest tile, number of the group's first tile and of the tile after its last."""

    group: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor


@aggregate
class Tile:
    """Source and target of an output tile; all fields are int32 scalars.

    The tile multiplies k_start … k_end of rows a_row … of a and rows b_row … of b (of matrix
    `group`, columns column …, if b is [G, K, N]). The sums go to rows out_row … out_row_end of the
    output, from `column` on. out_row_end is 0 past the last tile.
    """

    group: gl.tensor
    a_row: gl.tensor
    b_row: gl.tensor
    k_start: gl.tensor
    k_end: gl.tensor
    out_row: gl.tensor
    out_row_end: gl.tensor
    column: gl.tensor


@gluon.jit
def _in_band(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Row tile and column tile of tile number `tile` of a group of row_tiles × column_tiles."""
    band = tile // (BAND * column_tiles)
    inside = tile - band * BAND * column_tiles
    height = gl.maximum(gl.minimum(BAND, row_tiles - band * BAND), 1)
    return band * BAND + inside % height, inside // height


@aggregate
class TileScheduler:
    """Group offsets, sizes of the problem, and the tile's shape.

    offsets: pointer to int32 or int64 [num_groups + 1]. num_rows: rows of all groups (of the
    reduction in WGRAD). num_n, num_k: columns of the output, depth of the reduction. num_outer:
    rows of each output matrix (WGRAD). num_tiles: upper bound of the number of tiles.
    """

    offsets: gl.tensor
    num_groups: gl.tensor
    num_rows: gl.tensor
    column_tiles: gl.tensor
    num_n: gl.tensor
    num_k: gl.tensor
    row_tiles: gl.tensor
    num_outer: gl.tensor
    num_tiles: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BAND: gl.constexpr
    WGRAD: gl.constexpr

    @gluon.jit
    def start(self):
        """The cursor before the first tile, on the rows ahead of the first group."""
        if self.WGRAD:
            return TileCursor(group=-1, first_tile=0, end_tile=0)
        else:
            before = load_offset(self.offsets, 0, self.num_rows)
            tiles = gl.cdiv(before, self.BLOCK_M) * self.column_tiles
            return TileCursor(group=-1, first_tile=0, end_tile=tiles)

    @gluon.jit
    def locate(self, tile, cursor):
        """Return the cursor for the next call, and the `Tile` with number `tile`."""
        if self.WGRAD:
            return self._locate_in_weights(tile, cursor)
        else:
            return self._locate_in_rows(tile, cursor)

    @gluon.jit
    def _group_bounds(self, group):
        """First row and end row of a group; −1 and `num_groups` stand for rows without a group."""
        start = load_offset(self.offsets, gl.maximum(group, 0), self.num_rows)
        start = gl.where(group < 0, 0, start)
        end = self.num_rows
        if group < self.num_groups:
            end = gl.maximum(load_offset(self.offsets, group + 1, self.num_rows), start)
        return start, end

    @gluon.jit
    def _locate_in_weights(self, tile, cursor):
        """wgrad: groups divide the reduction, and each has its own output matrix."""
        group = tile // (self.row_tiles * self.column_tiles)
        row_tile, column_tile = _in_band(
            tile - group * self.row_tiles * self.column_tiles,
            self.row_tiles,
            self.column_tiles,
            self.BAND,
        )
        start, end = self._group_bounds(group)
        start = start // MX_BLOCK * MX_BLOCK
        end = end // MX_BLOCK * MX_BLOCK
        a_row = row_tile * self.BLOCK_M
        column = column_tile * self.BLOCK_N
        return cursor, Tile(
            group=group,
            a_row=a_row,
            b_row=column,
            k_start=start,
            k_end=end,
            out_row=group * self.num_outer + a_row,
            out_row_end=(group + 1) * self.num_outer,
            column=column,
        )

    @gluon.jit
    def _locate_in_rows(self, tile, cursor):
        """Groups of rows of a; each has its own matrix of b. Rows without a group become zeros."""
        group = cursor.group
        first_tile = cursor.first_tile
        end_tile = cursor.end_tile
        start, end = self._group_bounds(group)
        while (tile >= end_tile) & (group < self.num_groups):
            group += 1
            first_tile = end_tile
            start, end = self._group_bounds(group)
            end_tile += gl.cdiv(end - start, self.BLOCK_M) * self.column_tiles
        row_tile, column_tile = _in_band(
            tile - first_tile, gl.cdiv(end - start, self.BLOCK_M), self.column_tiles, self.BAND
        )
        row = start + row_tile * self.BLOCK_M
        row_end = gl.where(tile < end_tile, end, 0)
        column = column_tile * self.BLOCK_N
        is_grouped = (group >= 0) & (group < self.num_groups)  # other rows become zeros
        depth = gl.where(is_grouped & (row_end > 0), self.num_k, 0)
        return TileCursor(group=group, first_tile=first_tile, end_tile=end_tile), Tile(
            group=group,
            a_row=row,
            b_row=group * self.num_n + column,
            k_start=0,
            k_end=depth,
            out_row=row,
            out_row_end=row_end,
            column=column,
        )


# ---- Operand pipeline of the grouped GEMM: stages in shared memory and their mbarriers.

STAGE_ROW_BYTES = gl.constexpr(128)
"""Bytes of a stage's row: the widest TMA swizzle, 128 fp8 or 64 bf16 values."""

CONSUMERS = gl.constexpr(2)
CONSUMER_ROWS = gl.constexpr(64)
"""Consumer warpgroups of a CTA, and the rows of the tile that each computes (wgmma's M)."""


@gluon.constexpr_function
def _clear_layout(BYTES):
    """Layout of [rows, 32] values of `BYTES` bytes each, 16 bytes a thread."""
    return gl.BlockedLayout([1, 16 // BYTES], [16 // BYTES, 2 * BYTES], [4, 1], [1, 0])


@gluon.jit
def _clear_from(stage, first):
    """Clear MX blocks of stage [rows, depth] from block `first` on; they are the next group's."""
    BYTES: gl.constexpr = stage.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = stage.shape[0]
    zeros = gl.zeros((ROWS, MX_BLOCK), gl.float32, _clear_layout(BYTES)).to(stage.dtype)
    for block in gl.static_range(1, stage.shape[1] // MX_BLOCK):
        if block >= first:
            stage.slice(block * MX_BLOCK, MX_BLOCK, 1).store(zeros)


@aggregate
class Pipeline:
    """Ring of stages with a tile of each operand, filled by TMA and read by wgmma.

    a: [STAGES, BLOCK_M, depth]. b: [STAGES, BLOCK_N, depth], or [STAGES, 1, depth, BLOCK_N] for b
    of shape [G, K, N]. ready: one arrival a stage, by TMA. free: one arrival of each consumer.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, state, tile, k, a_desc, b_desc):
        """Wait until the stage is free, then start the loads of values k … of both operands."""
        mbarrier.wait(self.free.index(state.stage), state.phase)
        ready = self.ready.index(state.stage)
        mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        async_load(a_desc, [tile.a_row, k], ready, self.a.index(state.stage))
        if self.b.rank == 3:
            async_load(b_desc, [tile.b_row, k], ready, self.b.index(state.stage))
        else:
            async_load(b_desc, [tile.group, k, tile.column], ready, self.b.index(state.stage))

    @gluon.jit
    def wait(self, state, remaining, CONSUMER: gl.constexpr, WGRAD: gl.constexpr):
        """Wait for a stage, of which the first `remaining` values belong to the group."""
        mbarrier.wait(self.ready.index(state.stage), state.phase)
        # Without WGRAD the tensor ends there, and TMA fills the rest with zeros.
        if WGRAD and remaining < self.a.shape[2]:
            # Both consumers clear the shared operand b, each before its wgmma; both write zeros.
            a = self.a.index(state.stage).slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS, 0)
            _clear_from(a, remaining // MX_BLOCK)
            _clear_from(self.b.index(state.stage), remaining // MX_BLOCK)
            fence_async_shared()  # wgmma reads through the async proxy

    @gluon.jit
    def operands(self, state, CONSUMER: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
        """Views of a stage: a consumer's rows of a [64, depth], columns of b [depth, COLUMNS]."""
        a = self.a.index(state.stage).slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS, 0)
        b = self.b.index(state.stage)
        if b.rank == 3:
            b = b.reshape([b.shape[1], b.shape[2]]).slice(FIRST, COLUMNS, 1)
        else:
            b = b.slice(FIRST, COLUMNS, 0).permute((1, 0))
        return a, b

    @gluon.jit
    def release(self, stage):
        """Tell the producer that this consumer has read a stage."""
        mbarrier.arrive(self.free.index(stage), count=1)


@gluon.jit
def allocate_pipeline(a_desc, b_desc, STAGES: gl.constexpr):
    """Allocate a `Pipeline` for the tiles of both TMA descriptors."""
    gl.static_assert(STAGES >= 2, "a consumer may hold two stages at once")
    A_ROW: gl.constexpr = a_desc.block_type.shape[1] * a_desc.dtype.primitive_bitwidth
    gl.static_assert(A_ROW == 8 * STAGE_ROW_BYTES)
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Pipeline(a, b, ready, free)


# ---- Epilogue of the grouped GEMM: scales, rounding, stores of full and ragged tiles.

HALF_COLUMNS = gl.constexpr(128)
"""Columns that a consumer scales and stores at once: half of a tile."""

_SCALE_ONE = gl.constexpr(127)
"""The E8M0 byte of 1.0."""


@gluon.jit
def scale_value(byte):
    """E8M0 bytes 1 to 254 as float32; operands with one scale per row have no other bytes."""
    return (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _one_column_per_thread():
    """Layout of 128 columns over a warpgroup."""
    return gl.BlockedLayout([1], [32], [4], [0])


@aggregate
class Scales:
    """Scales of both operands: pointers to E8M0 bytes (None for bf16), and bytes per row."""

    a: gl.tensor | gl.constexpr
    b: gl.tensor | gl.constexpr
    a_pitch: gl.tensor
    b_pitch: gl.tensor

    @gluon.jit
    def of_tile(self, tile, num_n, CONSUMER: gl.constexpr):
        """Return the `TileScales` of a consumer's rows and of the tile's columns."""
        first_block = tile.k_start // MX_BLOCK
        a_row = tile.a_row + CONSUMER * CONSUMER_ROWS
        a_first = a_row.to(gl.int64) * self.a_pitch + first_block
        is_multiplied = tile.k_end > tile.k_start
        a = self.a + gl.where(is_multiplied, a_first, 0)
        b_first = tile.b_row.to(gl.int64) * self.b_pitch + first_block
        b = self.b + gl.where(is_multiplied, b_first, 0)
        num_rows = tile.out_row_end - tile.out_row - CONSUMER * CONSUMER_ROWS
        return TileScales(
            a=a,
            b=b,
            a_pitch=self.a_pitch,
            b_pitch=self.b_pitch,
            num_rows=gl.where(is_multiplied, num_rows, 1),
            num_columns=gl.where(is_multiplied, num_n - tile.column, 1),
        )


@aggregate
class TileScales:
    """Scales of a consumer's rows of a tile, and of the tile's columns.

    a, b: pointers to the scales of the first row and of the first column. num_rows may be negative:
    all rows then belong to the other consumer. If the reduction is empty there may be no scales;
    the pointers then address the first scale, which is not used.
    """

    a: gl.tensor
    b: gl.tensor
    a_pitch: gl.tensor
    b_pitch: gl.tensor
    num_rows: gl.tensor
    num_columns: gl.tensor

    @gluon.jit
    def row_pointers(self, LAYOUT: gl.constexpr):
        """Pointers to the first scale of each row, [64]; rows past the end repeat the last."""
        rows = gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
        return self.a + gl.minimum(rows, self.num_rows - 1) * self.a_pitch

    @gluon.jit
    def _column_pointers(self, columns):
        """Pointers to the scales of columns; columns past the end repeat the last."""
        return self.b + gl.minimum(columns, self.num_columns - 1) * self.b_pitch

    @gluon.jit
    def load(self, is_multiplied, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
        """Load scale bytes of 64 rows and of each half of the columns, ahead of their use.

        If the reduction is empty, return 127: the loaded bytes are arbitrary then, NaN included.
        """
        rows = self.row_pointers(LAYOUT)
        columns = gl.arange(0, HALF_COLUMNS, _one_column_per_thread())
        by_row = gl.load(rows)
        left = gl.load(self._column_pointers(columns))
        right = left
        if HALVES == 2:
            right = gl.load(self._column_pointers(columns + HALF_COLUMNS))
        return (
            gl.where(is_multiplied, by_row, _SCALE_ONE),
            gl.where(is_multiplied, left, _SCALE_ONE),
            gl.where(is_multiplied, right, _SCALE_ONE),
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


@aggregate
class Output:
    """Target of a consumer: pointer and TMA descriptor of [rows, num_n], and its staging memory.

    staging: [64, 128] values, or [64, 64] for float32. ACCUMULATE adds the sums to the output.
    """

    pointer: gl.tensor
    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    num_n: gl.tensor
    ACCUMULATE: gl.constexpr

    @gluon.jit
    def store(self, sums, row, row_end, column):
        """Store sums [64, 128] at (row, column), in subtiles of the staging memory's shape."""
        values = sums.to(self.pointer.dtype.element_ty)
        SUBTILE: gl.constexpr = self.staging.shape[1]
        if SUBTILE == HALF_COLUMNS:
            self._store_subtile(values, row, row_end, column)
        else:
            gl.static_assert(2 * SUBTILE == HALF_COLUMNS)
            left, right = values.reshape([64, 2, 64]).permute((0, 2, 1)).split()
            self._store_subtile(left, row, row_end, column)
            if column + SUBTILE < self.num_n:
                self._store_subtile(right, row, row_end, column + SUBTILE)

    @gluon.jit
    def _store_subtile(self, values, row, row_end, column):
        """Store values [64, columns] through shared memory.

        Full tiles use TMA, which clips the last columns. Ragged tiles and ACCUMULATE use masked
        accesses: TMA would overwrite the next group's rows.
        """
        COLUMNS: gl.constexpr = values.shape[1]
        LAYOUT: gl.constexpr = _coalesced(COLUMNS, self.pointer.dtype.element_ty.primitive_bitwidth)
        tma.store_wait(0)
        barrier()  # only the thread that starts the copies can wait for them
        self.staging.store(values)
        if (not self.ACCUMULATE) & (row + CONSUMER_ROWS <= row_end):
            fence_async_shared()
            async_store(self.desc, [row, column], self.staging)
        else:
            rows = row + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
            columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
            offsets = gl.expand_dims(rows.to(gl.int64) * self.num_n, 1) + gl.expand_dims(columns, 0)
            mask = gl.expand_dims(rows < row_end, 1) & gl.expand_dims(columns < self.num_n, 0)
            result = self.staging.load(LAYOUT)
            if self.ACCUMULATE:
                result += gl.load(self.pointer + offsets, mask=mask, other=0.0)
            gl.store(self.pointer + offsets, result, mask=mask)


# ---- Main loop of a consumer of the grouped GEMM: wgmma, scaling, and promotion to float32.
#
# The tensor core adds fp8 products with about 14 bits. Sums that are promoted are added in float32
# from there on. `SUMS` names where the sums of a tile [64, 128 or 256] are kept:
#
# IN_TENSOR_CORE: in the wgmma accumulator, all columns at once. One wgmma stays in flight, so
# the
#     stage before the current one is released.
# PROMOTED: in float32 registers, two halves of 128 columns. The products of two stages are
# summed in
#     one wgmma accumulator, first for the left half and then, in the same registers, for the
#     right.
# SCALED: as PROMOTED after every stage; the products are multiplied by the rows' scales
# first.

IN_TENSOR_CORE = gl.constexpr("in_tensor_core")
PROMOTED = gl.constexpr("promoted")
SCALED = gl.constexpr("scaled")


@gluon.constexpr_function
def sums_layout(COLUMNS, DEPTH):
    """Wgmma accumulator [64, COLUMNS]; an instruction covers a quarter of a stage's depth."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH // 4])


@aggregate
class MainLoop:
    """Compile-time choices of a main loop.

    SUMS, WGRAD: as in the kernel. CONSUMER (0, 1): which rows of the tile. HALVES (1, 2): width of
    the tile in 128 columns. DEPTH: values of a stage.
    """

    SUMS: gl.constexpr
    WGRAD: gl.constexpr
    CONSUMER: gl.constexpr
    HALVES: gl.constexpr
    DEPTH: gl.constexpr


@aggregate
class Sums:
    """Sums of a tile while they are computed, float32.

    left, right: [64, 128]; IN_TENSOR_CORE has all columns in `left`, and `right` is not used.
    partial: [64, 128] products of the latest step. scale_bytes: [64] uint8, the rows' scales in the
    next stage if SCALED, else None.
    """

    left: gl.tensor
    right: gl.tensor
    partial: gl.tensor
    scale_bytes: gl.tensor | gl.constexpr


@gluon.jit
def _multiply(
    pipe, state, sums, loop, FIRST: gl.constexpr, COLUMNS: gl.constexpr, USE_ACC: gl.constexpr
):
    """Start the wgmma of a stage into sums [64, COLUMNS], for the columns from FIRST on."""
    a, b = pipe.operands(state, CONSUMER=loop.CONSUMER, FIRST=FIRST, COLUMNS=COLUMNS)
    return warpgroup_mma(a, b, sums, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _multiply_half(pipe, state, sums, loop, HALF: gl.constexpr, USE_ACC: gl.constexpr):
    """Start the wgmma of a stage into sums [64, 128] of the left (0) or right (1) half."""
    return _multiply(
        pipe, state, sums, loop, FIRST=HALF * HALF_COLUMNS, COLUMNS=HALF_COLUMNS, USE_ACC=USE_ACC
    )


@gluon.jit
def _release_previous(pipe, state):
    """Release the stage before `state`'s."""
    pipe.release(gl.where(state.stage == 0, state.STAGES, state.stage) - 1)


@gluon.jit
def _step_in_tensor_core(pipe, state, sums, k, depth, loop):
    """Multiply the stage that starts at value k; return the sums and the next pipeline state."""
    COLUMNS: gl.constexpr = loop.HALVES * HALF_COLUMNS
    pipe.wait(state, depth - k, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
    total = _multiply(pipe, state, sums.left, loop, FIRST=0, COLUMNS=COLUMNS, USE_ACC=True)
    total = warpgroup_mma_wait(1, deps=(total,))  # the previous stage's wgmma has ended
    if k > 0:
        _release_previous(pipe, state)
    return Sums(total, sums.right, sums.partial, sums.scale_bytes), state.advance()


@gluon.jit
def _step_promoted(pipe, state, sums, scale_ptrs, k, depth, loop, STAGES: gl.constexpr):
    """Multiply STAGES (1, 2) stages from value k on, and add their sums in float32.

    The first wgmma of a half does not add its accumulator, which holds the old partial sums: zeros
    in their place would take more registers.
    """
    left = sums.left
    right = sums.right
    scale_bytes = sums.scale_bytes
    last = state
    if STAGES == 2:
        last = state.advance()
    pipe.wait(state, depth - k, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
    partial = _multiply_half(pipe, state, sums.partial, loop, HALF=0, USE_ACC=False)
    if STAGES == 2:
        pipe.wait(last, depth - k - loop.DEPTH, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
        partial = _multiply_half(pipe, last, partial, loop, HALF=0, USE_ACC=True)
    if loop.SUMS == SCALED:  # while wgmma runs: convert this stage's scales, load the next ones
        scale = gl.expand_dims(scale_value(scale_bytes), 1)
        last_k = (depth - 1) // loop.DEPTH * loop.DEPTH
        scale_bytes = gl.load(scale_ptrs + gl.minimum(k + loop.DEPTH, last_k) // MX_BLOCK)
    partial = warpgroup_mma_wait(0, deps=(partial,))
    left += partial * scale if loop.SUMS == SCALED else partial
    if loop.HALVES == 2:
        partial = _multiply_half(pipe, state, partial, loop, HALF=1, USE_ACC=False)
        if STAGES == 2:
            partial = _multiply_half(pipe, last, partial, loop, HALF=1, USE_ACC=True)
        partial = warpgroup_mma_wait(0, deps=(partial,))
    pipe.release(state.stage)
    if STAGES == 2:
        pipe.release(last.stage)
    if loop.HALVES == 2:  # after the release: the producer need not wait for these additions
        right += partial * scale if loop.SUMS == SCALED else partial
    return Sums(left, right, partial, scale_bytes), last.advance()


@gluon.jit
def _start_sums(scale_ptrs, loop):
    """Zeros, and the scales of the first stage."""
    KEPT: gl.constexpr = loop.SUMS == IN_TENSOR_CORE
    COLUMNS: gl.constexpr = loop.HALVES * HALF_COLUMNS if KEPT else HALF_COLUMNS
    zeros = gl.zeros((CONSUMER_ROWS, COLUMNS), gl.float32, sums_layout(COLUMNS, loop.DEPTH))
    return Sums(zeros, zeros, zeros, gl.load(scale_ptrs) if loop.SUMS == SCALED else None)


@gluon.jit
def _halves(total, LAYOUT: gl.constexpr):
    """Split sums [64, 256] into two of [64, 128]; every thread keeps its registers."""
    left, right = total.reshape([64, 2, 128]).permute((0, 2, 1)).split()
    return (
        gl.convert_layout(left, LAYOUT, assert_trivial=True),
        gl.convert_layout(right, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def accumulate(pipe, state, depth, scales, loop):
    """Sum the products of a tile over `depth` values.

    scales: the tile's `TileScales`, used if SCALED. Returns the left and the right half of the sums
    [64, 128] (twice the left half if HALVES is 1), and the pipeline state after the tile.
    """
    gl.static_assert(loop.DEPTH == 128 or loop.SUMS == IN_TENSOR_CORE, "only fp8 is promoted")
    HALF: gl.constexpr = sums_layout(HALF_COLUMNS, loop.DEPTH)
    STAGES: gl.constexpr = 2 if loop.SUMS == PROMOTED else 1  # stages a step
    scale_ptrs = None
    if loop.SUMS == SCALED:
        scale_ptrs = scales.row_pointers(HALF)
    sums = _start_sums(scale_ptrs, loop)
    end = depth
    if STAGES == 2:  # an odd last stage has a step of its own
        end = gl.cdiv(depth, loop.DEPTH) // STAGES * (STAGES * loop.DEPTH)
    for k in range(0, end, STAGES * loop.DEPTH):
        if loop.SUMS == IN_TENSOR_CORE:
            sums, state = _step_in_tensor_core(pipe, state, sums, k, depth, loop)
        else:
            sums, state = _step_promoted(pipe, state, sums, scale_ptrs, k, depth, loop, STAGES)
    if STAGES == 2 and end < depth:
        sums, state = _step_promoted(pipe, state, sums, scale_ptrs, end, depth, loop, STAGES=1)
    left = sums.left
    right = sums.right
    if loop.SUMS == IN_TENSOR_CORE:
        left = warpgroup_mma_wait(0, deps=(left,))
        if depth > 0:
            _release_previous(pipe, state)
        right = left
        if loop.HALVES == 2:
            left, right = _halves(left, HALF)
    return left, right, state


CONSUMER_WARPS = gl.constexpr(4)
PRODUCER_WARPS = gl.constexpr(1)
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class PartitionArgs:
    """Arguments that all roles of the kernel get."""

    pipe: Pipeline
    scales: Scales
    scheduler: TileScheduler
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    STAGES: gl.constexpr
    SUMS: gl.constexpr


@gluon.jit
def _produce(args):
    """Producer: load the operands of the CTA's tiles."""
    DEPTH: gl.constexpr = args.a_desc.block_type.shape[1]
    scheduler = args.scheduler
    state = producer_start(args.STAGES)
    cursor = scheduler.start()
    for number in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        cursor, tile = scheduler.locate(number, cursor)
        for k in range(tile.k_start, tile.k_end, DEPTH):
            args.pipe.load(state, tile, k, args.a_desc, args.b_desc)
            state = state.advance()


@gluon.jit
def _compute_tile(args, output, tile, state, CONSUMER: gl.constexpr, HALVES: gl.constexpr):
    """Multiply, scale and store HALVES × 128 columns of a tile; return the next pipeline state."""
    DEPTH: gl.constexpr = args.a_desc.block_type.shape[1]
    HAS_SCALES: gl.constexpr = args.scales.a is not None
    HALF: gl.constexpr = sums_layout(HALF_COLUMNS, DEPTH)
    ROW_SCALED: gl.constexpr = args.SUMS != SCALED  # else the main loop applies the rows' scales
    row = tile.out_row + CONSUMER * CONSUMER_ROWS
    scales = args.scales
    if HAS_SCALES:
        scales = scales.of_tile(tile, args.scheduler.num_n, CONSUMER)
        by_row, by_left, by_right = scales.load(tile.k_end > tile.k_start, HALVES, HALF)
    loop = MainLoop(
        SUMS=args.SUMS, WGRAD=args.scheduler.WGRAD, CONSUMER=CONSUMER, HALVES=HALVES, DEPTH=DEPTH
    )
    left, right, state = accumulate(args.pipe, state, tile.k_end - tile.k_start, scales, loop)
    if HAS_SCALES:
        left = apply_scales(left, by_row, by_left, HALF, ROW_SCALED)
    output.store(left, row, tile.out_row_end, tile.column)
    if HALVES == 2:
        if HAS_SCALES:
            right = apply_scales(right, by_row, by_right, HALF, ROW_SCALED)
        output.store(right, row, tile.out_row_end, tile.column + HALF_COLUMNS)
    return state


@gluon.jit
def _consume(args, output, CONSUMER: gl.constexpr):
    """Consumer: compute 64 rows of each of the CTA's tiles."""
    scheduler = args.scheduler
    state = consumer_start(args.STAGES)
    cursor = scheduler.start()
    for number in range(gl.program_id(0), scheduler.num_tiles, gl.num_programs(0)):
        cursor, tile = scheduler.locate(number, cursor)
        if tile.out_row_end > 0:
            if tile.column + HALF_COLUMNS < scheduler.num_n:
                state = _compute_tile(args, output, tile, state, CONSUMER, HALVES=2)
            else:
                state = _compute_tile(args, output, tile, state, CONSUMER, HALVES=1)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_groups",
        "num_rows",
        "num_n",
        "num_k",
        "num_outer",
        "a_pitch",
        "b_pitch",
    ]
)
def _grouped_gemm_hopper_kernel(
    out,
    out_desc,
    a_desc,
    b_desc,
    a_scale,
    b_scale,
    a_wide,
    b_wide,
    offsets,
    num_groups,
    num_rows,
    num_outer,
    num_n,
    num_k,
    a_pitch,
    b_pitch,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    WGRAD: gl.constexpr,
    SUMS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    IF_WIDE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[r] = a[r] b[g].T for rows r of group g, [num_rows, num_n]; zeros in rows without a group.

    WGRAD: out[g] = a_g b_g.T, [num_groups, num_outer, num_n], summed over the group's part of the
    reduction; group offsets are multiples of 32. a_pitch, b_pitch: bytes of scales per row.
    a_wide, b_wide [1]: counts of wide blocks, or None. If there is a count, the kernel computes
    only if one is above 0 (IF_WIDE), or only if none is (without IF_WIDE).
    """
    gl.static_assert(BLOCK_M == CONSUMERS * CONSUMER_ROWS)
    gl.static_assert(BLOCK_N == 2 * HALF_COLUMNS)
    gl.static_assert(num_warps == CONSUMER_WARPS)
    pipe = allocate_pipeline(a_desc, b_desc, STAGES)
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout
    )
    num_n = num_n // 8 * 8  # tells the compiler that 8 divides it: masked accesses of 16 bytes
    column_tiles = gl.cdiv(num_n, BLOCK_N)
    row_tiles = gl.cdiv(num_outer, BLOCK_M)
    if WGRAD:
        num_tiles = num_groups * row_tiles * column_tiles
    else:  # upper bound: each group, and the rows before and after all, may have a ragged tile
        num_tiles = (num_rows // BLOCK_M + num_groups + 2) * column_tiles
    if (a_wide is not None) | (b_wide is not None):
        num_tiles = gl.where(is_wide(a_wide, b_wide) == IF_WIDE, num_tiles, 0)
    args = PartitionArgs(
        pipe=pipe,
        scales=Scales(a_scale, b_scale, a_pitch, b_pitch),
        scheduler=TileScheduler(
            offsets=offsets,
            num_groups=num_groups,
            num_rows=num_rows,
            column_tiles=column_tiles,
            num_n=num_n,
            num_k=num_k,
            row_tiles=row_tiles,
            num_outer=num_outer,
            num_tiles=num_tiles,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BAND=BAND,
            WGRAD=WGRAD,
        ),
        a_desc=a_desc,
        b_desc=b_desc,
        STAGES=STAGES,
        SUMS=SUMS,
    )
    output0 = Output(out, out_desc, staging.index(0), num_n, ACCUMULATE)
    output1 = Output(out, out_desc, staging.index(1), num_n, ACCUMULATE)
    gl.warp_specialize(
        [(_consume, (args, output0, 0)), (_consume, (args, output1, 1)), (_produce, (args,))],
        [CONSUMER_WARPS, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
