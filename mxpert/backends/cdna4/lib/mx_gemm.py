"""Main loop of a tile with MXFP8 operands: two wave groups alternate between LDS and scaled MFMA.

A tile is BLOCK_M rows of a times 256 rows of b. Step k covers 128 values of the reduction; two
steps are a pair, whose scales are copied together. LDS holds two steps of codes and two pairs of
scales. Phases of step k (`phases` says how the wave groups alternate):

    memory 0:  read b and the top half of a; copy the bottom half of step k + 1
    compute 0: top sums += top half of a x b
    memory 1:  read the bottom half of a; copy b and the top half of step k + 2
    compute 1: bottom sums += bottom half of a x b

A memory phase overwrites what both groups have read: the late group finishes its previous memory
phase before the early one starts its next. Each phase waits for the copies that the next memory
phase reads; they were started four phases before.

Scales are uint16 [rows, 4]: row r of entry g holds those of values 32 g … 32 g + 31 of both steps,
the first in the low byte. A lane of kgroup g reads entry g of each of its rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ...common.compat import aggregate
from .gcn import opaque
from .lds import PLAIN, ROW_BYTES, SWIZZLED, copy_rows
from .phases import NUM_WARPS, end_compute, end_memory, enter_phases, leave_phases

BLOCK_N = gl.constexpr(256)
STEP = ROW_BYTES
"""Values of the reduction a step: one byte each."""

_GROUPS = gl.constexpr(4)
"""Scales of a row and step."""

MFMA = gl.constexpr(
    gl.amd.AMDMFMALayout(
        version=4, instr_shape=[16, 16, 128], transposed=True, warps_per_cta=[2, 4]
    )
)
"""Layout of the sums of half a tile. A lane has four consecutive columns of each 16 x 16 block."""

_A = gl.constexpr(gl.DotOperandLayout(0, MFMA.value, 16))
_B = gl.constexpr(gl.DotOperandLayout(1, MFMA.value, 16))

SCALE_COPY = gl.constexpr(gl.BlockedLayout([1, 2], [32, 2], [NUM_WARPS.value, 1], [1, 0]))
"""Layout of a copy of scales: one dword a lane, 256 rows an instruction of all waves."""

SCALE_ROWS = gl.constexpr(256)
"""Rows of scales in LDS, also of a in lower tiles. All waves must execute the same copies: a wave
waits for the number of copies that remain under way."""


@aggregate
class Buffers:
    """LDS of a tile's operands.

    a: uint8 [4, BLOCK_M / 2, 128], the top half of both steps, then the bottom half. b: uint8
    [2, 256, 128]. a_scale, b_scale: uint16 [2, 256, 4]. The reads of a take more addresses; they
    fit into the instructions' offsets of 16 bits because a comes first.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_scale: gl.shared_memory_descriptor
    b_scale: gl.shared_memory_descriptor


@gluon.jit
def allocate(BLOCK_M: gl.constexpr):
    """Allocate the `Buffers` of tiles with BLOCK_M rows."""
    HALF: gl.constexpr = BLOCK_M // 2
    return Buffers(
        a=gl.allocate_shared_memory(gl.uint8, [4, HALF, ROW_BYTES], SWIZZLED),
        b=gl.allocate_shared_memory(gl.uint8, [2, BLOCK_N, ROW_BYTES], SWIZZLED),
        a_scale=gl.allocate_shared_memory(gl.uint16, [2, SCALE_ROWS, _GROUPS], PLAIN),
        b_scale=gl.allocate_shared_memory(gl.uint16, [2, SCALE_ROWS, _GROUPS], PLAIN),
    )


@aggregate
class Operands:
    """Pointers to codes (uint8) and packed scales (uint16) of both operands."""

    a: gl.tensor
    a_scale: gl.tensor
    b: gl.tensor
    b_scale: gl.tensor


@aggregate
class Sources:
    """Where the operands of a tile lie in `Operands`.

    a_first, b_first: int64, the byte that the offsets of codes count from, at the first value of
    the reduction. a_scale_first, b_scale_first: int64, the entry that the offsets of scales count
    from, at the first pair. a_pitch, b_pitch: entries from a pair to the next. depth: length of the
    reduction. a_top, a_bottom, b_rows: of `lds.row_offsets`. a_scale_rows, b_scale_rows: of
    `scale_offsets`.
    """

    a_first: gl.tensor
    b_first: gl.tensor
    a_scale_first: gl.tensor
    b_scale_first: gl.tensor
    a_pitch: gl.tensor
    b_pitch: gl.tensor
    depth: gl.tensor
    a_top: gl.tensor
    a_bottom: gl.tensor
    b_rows: gl.tensor
    a_scale_rows: gl.tensor
    b_scale_rows: gl.tensor

    @gluon.jit
    def copy_codes_0(self, operands, buffers, slot, k):
        """Start copying b and the top half of a of the step at value k."""
        a = operands.a + (self.a_first + k)
        copy_rows(buffers.b, slot, operands.b + (self.b_first + k), self.b_rows, self.depth - k)
        copy_rows(buffers.a, slot, a, self.a_top, self.depth - k)

    @gluon.jit
    def copy_codes_1(self, operands, buffers, slot, k):
        """Start copying the bottom half of a of the step at value k."""
        a = operands.a + (self.a_first + k)
        copy_rows(buffers.a, 2 + slot, a, self.a_bottom, self.depth - k)

    @gluon.jit
    def copy_scales(self, operands, buffers, slot, pair):
        """Start copying the scales of a pair."""
        a = operands.a_scale + (self.a_scale_first + pair * self.a_pitch.to(gl.int64))
        b = operands.b_scale + (self.b_scale_first + pair * self.b_pitch.to(gl.int64))
        async_copy.buffer_load_to_shared(buffers.a_scale.index(slot), a, self.a_scale_rows)
        async_copy.buffer_load_to_shared(buffers.b_scale.index(slot), b, self.b_scale_rows)

    @gluon.jit
    def start(self, operands, buffers):
        """Start the copies that precede the main loop; no copy may be under way."""
        self.copy_codes_0(operands, buffers, 0, 0)
        self.copy_scales(operands, buffers, 0, 0)
        async_copy.commit_group()
        self.copy_codes_1(operands, buffers, 0, 0)
        async_copy.commit_group()
        self.copy_codes_0(operands, buffers, 1, STEP)
        async_copy.commit_group()


@gluon.jit
def scale_offsets(rows):
    """Offsets of the scales of `rows`, int32 [rows] in a slice of `SCALE_COPY`: [rows, 4]."""
    entry = gl.arange(0, _GROUPS, gl.SliceLayout(0, SCALE_COPY))
    offsets = rows[:, None] * _GROUPS + entry[None, :]
    return gl.max_contiguous(gl.multiple_of(offsets, [1, 2]), [1, 2])


@aggregate
class TileScales:
    """Scales of a lane's 16-row blocks of one operand half, both steps of a pair.

    first: int32 [rows / blocks, 4]: blocks 0 and 1. second: blocks 2 and 3 of four, else `first`.
    """

    first: gl.tensor
    second: gl.tensor
    BLOCKS: gl.constexpr

    @gluon.jit
    def of_step(self, STEP_OF_PAIR: gl.constexpr, LAYOUT: gl.constexpr):
        """Scale bytes [rows, 4] of step 0 or 1 of the pair."""
        LANES: gl.constexpr = self.first.shape[0]
        low = self.first >> (8 * STEP_OF_PAIR)
        if self.BLOCKS == 2:
            by_block = gl.permute(gl.join(low, low >> 16), [2, 0, 1])
        else:
            other = self.second >> (8 * STEP_OF_PAIR)
            both = gl.join(gl.join(low, other), gl.join(low >> 16, other >> 16))
            by_block = gl.permute(both, [2, 3, 0, 1])
        scale = gl.reshape(by_block.to(gl.uint8), [self.BLOCKS * LANES, _GROUPS])
        return gl.convert_layout(scale, LAYOUT)


@gluon.jit
def _read_scales(memory, LAYOUT: gl.constexpr, BLOCKS: gl.constexpr):
    """Read `TileScales` from LDS, uint16 [rows, 4]; a lane has BLOCKS blocks (2 or 4)."""
    LANES: gl.constexpr = memory.shape[0] // BLOCKS
    scale = async_copy.load_shared_relaxed(memory, LAYOUT)
    if BLOCKS == 2:
        even, odd = gl.split(gl.permute(gl.reshape(scale, [2, LANES, _GROUPS]), [1, 2, 0]))
        both = opaque(even.to(gl.int32) | (odd.to(gl.int32) << 16))
        return TileScales(first=both, second=both, BLOCKS=BLOCKS)
    else:
        gl.static_assert(BLOCKS == 4, "a lane has the scales of two or four blocks")
        by_block = gl.permute(gl.reshape(scale, [2, 2, LANES, _GROUPS]), [2, 3, 0, 1])
        even, odd = gl.split(by_block)
        first, second = gl.split(opaque(even.to(gl.int32) | (odd.to(gl.int32) << 16)))
        return TileScales(first=first, second=second, BLOCKS=BLOCKS)


@gluon.jit
def multiply(
    operands,
    buffers,
    sources,
    BLOCK_M: gl.constexpr,
    A_FORMAT: gl.constexpr,
    B_FORMAT: gl.constexpr,
):
    """Sums of the top and the bottom half of a tile, float32 [BLOCK_M / 2, 256] in `MFMA` each.

    `sources.start` has started the first copies. None is under way when the function returns, and
    all waves have read LDS.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    BLOCKS: gl.constexpr = HALF // 32
    COPIES: gl.constexpr = 2  # groups of copies that no wait needs to end
    A_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(_A, [HALF, _GROUPS])
    B_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(_B, [BLOCK_N, _GROUPS])
    top = gl.zeros((HALF, BLOCK_N), gl.float32, MFMA)
    bottom = gl.zeros((HALF, BLOCK_N), gl.float32, MFMA)
    pairs = gl.cdiv(sources.depth, 2 * STEP)
    async_copy.wait_group(COPIES)
    enter_phases()
    for pair in range(pairs):
        scales = buffers.a_scale.index(pair % 2)
        top_scale = _read_scales(scales.slice(0, HALF), A_SCALE, BLOCKS)
        bottom_scale = _read_scales(scales.slice(HALF, HALF), A_SCALE, BLOCKS)
        b_scale = _read_scales(buffers.b_scale.index(pair % 2), B_SCALE, 4)
        for slot in gl.static_range(2):
            k = (2 * pair + slot) * STEP
            a_top = async_copy.load_shared_relaxed(buffers.a.index(slot), _A)
            b = async_copy.load_shared_relaxed(buffers.b.index(slot).permute([1, 0]), _B)
            sources.copy_codes_1(operands, buffers, 1 - slot, k + STEP)
            async_copy.commit_group()
            end_memory(COPIES)
            top = cdna4.mfma_scaled(
                a_top,
                top_scale.of_step(slot, A_SCALE),
                A_FORMAT,
                b,
                b_scale.of_step(slot, B_SCALE),
                B_FORMAT,
                top,
            )
            end_compute(COPIES)
            a_bottom = async_copy.load_shared_relaxed(buffers.a.index(2 + slot), _A)
            sources.copy_codes_0(operands, buffers, slot, k + 2 * STEP)
            if slot == 0:
                following = gl.minimum(pair + 1, pairs - 1)
                sources.copy_scales(operands, buffers, (pair + 1) % 2, following)
            async_copy.commit_group()
            end_memory(COPIES)
            bottom = cdna4.mfma_scaled(
                a_bottom,
                bottom_scale.of_step(slot, A_SCALE),
                A_FORMAT,
                b,
                b_scale.of_step(slot, B_SCALE),
                B_FORMAT,
                bottom,
            )
            end_compute(COPIES)
    leave_phases()
    async_copy.wait_group(0)
    return top, bottom
