"""Main loops of a tile with MXFP8 operands: two wave groups alternate between LDS and scaled MFMA.

A tile is 256 (high) or 128 (low) rows of a times 256 rows of b. Step k covers 128 values of the
reduction; two steps are a pair, whose scales are copied together. LDS holds two steps of codes of a
high tile, three of a low one, and two pairs of scales. Phases of step k (`phases` says how the wave
groups alternate) in a high tile:

    memory 0:  read b and the top half of a; copy the bottom half of step k + 1
    compute 0: top sums += top half of a x b
    memory 1:  read the bottom half of a; copy b and the top half of step k + 2
    compute 1: bottom sums += bottom half of a x b

and in a low one, which would wait for reads with two phases a step:

    memory:    read a and b; copy those of step k + 2
    compute:   sums += a x b

A memory phase overwrites what both groups have read: the late group finishes its previous memory
phase before the early one starts its next. Each phase waits for the copies that the next memory
phase reads; they were started four phases before.

Scales lie in planes: plane j holds a byte for each row, the scale of its values 32 j … 32 j + 31.
LDS rows of codes are permuted (`row_of`, `column_of`), so that the scales of a lane's four 16-row
blocks of one operand are the four bytes of a word, from which an MFMA selects one.

Without TRANS_B b lies across the reduction: a step has 128 rows of 256 columns, which transposing
reads (ds_read_b64_tr_b8) bring to the lanes. They keep neighbouring columns together, so that the
scales of a lane's four blocks are bytes of four words.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ..formats.spec import MX_BLOCK_SIZE
from .cdna4 import (
    NUM_WARPS,
    PLAIN,
    ROW_BYTES,
    SWIZZLED,
    copy_rows,
    end_compute,
    end_memory,
    enter_phases,
    leave_phases,
    opaque,
    scheduling_fence,
)
from .compat import FOLDS_TRANSPOSING_READS, aggregate, reinterpret

PART_ROWS = gl.constexpr(128)
"""Rows of a that a phase multiplies: half of a high tile, a whole low one."""

HIGH, LOW = gl.constexpr(256), gl.constexpr(128)
"""Choices for BLOCK_M."""

BLOCK_N = gl.constexpr(256)
STEP = ROW_BYTES
"""Values of the reduction a step: one byte each."""

MX_BLOCK = gl.constexpr(MX_BLOCK_SIZE)

_GROUPS = gl.constexpr(4)
"""Scales of a row and step."""

_PLANES = gl.constexpr(8)
"""Planes of scales of a pair."""

WORD_ROWS = gl.constexpr(4)
"""Rows of a plane in a word. Tiles begin at a multiple of it, planes are a multiple of it apart."""

MFMA = gl.constexpr(
    gl.amd.AMDMFMALayout(
        version=4, instr_shape=[16, 16, 128], transposed=True, warps_per_cta=[2, 4]
    )
)
"""Layout of the sums of a part. A lane has four consecutive columns of each 16 x 16 block."""

_A = gl.constexpr(gl.DotOperandLayout(0, MFMA.value, 16))
_B = gl.constexpr(gl.DotOperandLayout(1, MFMA.value, 16))

_QUARTER = gl.constexpr(gl.DotOperandLayout(1, MFMA.value, 8))
"""Fragments of a quarter: eight values of the reduction a lane."""

_COPY_ACROSS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 16], [NUM_WARPS.value, 1], [1, 0]))
"""Layout of a copy of b across the reduction: 16 bytes a lane, 4 rows a wave."""

_COLUMNS = gl.constexpr([[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [0, 128], [0, 16], [0, 32]])
"""Rows of b's fragments, for the bits of an output column without TRANS_B: the wave of a row of
four waves that has rows w, w + 4, … of 16 gets 64 consecutive columns."""

_ROWS_ACROSS = gl.constexpr([[1, 64], [2, 128], [4, 16]])
_ACROSS = gl.constexpr(
    gl.SharedLinearLayout(_COLUMNS.value + _ROWS_ACROSS.value + [[8, 32], [16, 0]])
)
"""LDS of a quarter of a step of b across the reduction, [32, 256]: chunk c of row r lies at place
``c ^ (r % 16)``, so that the 16 rows of a transposing read of half a wave touch all 64 banks.
Quarter 2 h + j of a step has the values 64 h + 16 q + 8 j + i, in row 8 q + i."""

_STEP_ACROSS = gl.constexpr(
    gl.SharedLinearLayout(
        _COLUMNS.value + _ROWS_ACROSS.value + [[16, 32], [32, 0], [8, 0], [64, 0]]
    )
)
"""The quarters as a step [128, 256]."""

_SCALES_ACROSS = gl.constexpr(gl.SharedLinearLayout(_COLUMNS.value + [[1, 0], [2, 0]]))
"""LDS of a step's scales of b without TRANS_B: planes of bytes."""

SCALE_COPY = gl.constexpr(gl.BlockedLayout([1, 1], [1, 64], [NUM_WARPS.value, 1], [1, 0]))
"""Layout of a copy of scales: a word a lane, a plane a wave."""

_A_LANES = gl.constexpr(32)
"""Lanes of both wave rows that hold different rows of a. Each reads a word."""

_SCALE_WORDS = gl.constexpr(64)
"""Words of a plane in LDS, also of a in lower tiles. All waves must execute the same copies: a wave
waits for the number of copies that remain under way."""


_SLOTS = gl.constexpr(3)
"""Steps of a low tile in LDS."""


@gluon.jit
def row_of(row, PART: gl.constexpr):
    """Row of a tile, for a row of the LDS copy of a part: 0 (top, or the only one) or 1 (bottom).

    MFMA gives wave row w of two the 16-row blocks w, w + 2, w + 4, w + 6. Lane l's rows in them are
    consecutive rows of the tile.
    """
    block, wave, lane = row // 32, row // 16 % 2, row % 16
    return PART * PART_ROWS + wave * 64 + lane * WORD_ROWS + block


@gluon.jit
def column_of(row):
    """Output column of a tile, for a row of b's tile in LDS.

    MFMA gives quarter q of a wave's lanes columns 4 q … 4 q + 3 of each 16-column block, and wave w
    of a row of four waves the blocks w, w + 4, w + 8, w + 12. Each lane gets 16 consecutive
    columns.
    """
    block, wave, lane = row // 64, row // 16 % 4, row % 16
    return wave * 64 + lane * WORD_ROWS + block


@aggregate
class Buffers:
    """LDS of a tile's operands.

    a: uint8 [4, 128, 128], the top half of both steps, then the bottom half; in low tiles
    [3, 128, 128], three steps. b: uint8 [2 or 3, 256, 128], or quarters of steps
    [4 x 2 or 3, 32, 256] without TRANS_B. a_scale, b_scale: int32 [2, 8, 64], a
    pair's planes. The reads of a take more addresses; they fit into the instructions' offsets of 16
    bits because a comes first.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_scale: gl.shared_memory_descriptor
    b_scale: gl.shared_memory_descriptor


@gluon.jit
def allocate(BLOCK_M: gl.constexpr, TRANS_B: gl.constexpr):
    """Allocate the `Buffers` of tiles with BLOCK_M rows."""
    PARTS: gl.constexpr = 4 if BLOCK_M == HIGH else _SLOTS
    STEPS: gl.constexpr = 2 if BLOCK_M == HIGH else _SLOTS
    B_SHAPE: gl.constexpr = [STEPS, BLOCK_N, ROW_BYTES] if TRANS_B else [4 * STEPS, 32, BLOCK_N]
    B_LAYOUT: gl.constexpr = SWIZZLED if TRANS_B else _ACROSS
    return Buffers(
        a=gl.allocate_shared_memory(gl.uint8, [PARTS, PART_ROWS, ROW_BYTES], SWIZZLED),
        b=gl.allocate_shared_memory(gl.uint8, B_SHAPE, B_LAYOUT),
        a_scale=gl.allocate_shared_memory(gl.int32, [2, _PLANES, _SCALE_WORDS], PLAIN),
        b_scale=gl.allocate_shared_memory(gl.int32, [2, _PLANES, _SCALE_WORDS], PLAIN),
    )


@aggregate
class Operands:
    """Pointers to codes (uint8) and to words of scales (int32) of both operands."""

    a: gl.tensor
    a_scale: gl.tensor
    b: gl.tensor
    b_scale: gl.tensor


@aggregate
class Sources:
    """Where the operands of a tile lie in `Operands`.

    a_first, b_first: int64, the byte that the offsets of codes count from, at the first value of
    the reduction. a_scale_first, b_scale_first: int64, the word that the offsets of scales count
    from, at the first plane. a_pitch, b_pitch: words from a plane to the next. depth: length of the
    reduction, of which the first `lead` values (less than a step) count as zeros. a_top, a_bottom,
    b_rows: of `lds.row_offsets` (a_bottom is unused in low tiles). a_scale_words, b_scale_words: of
    `scale_offsets`. TRANS_B: whether the reduction is contiguous in b; without it b_rows is of
    `offsets_across`, and b_step the bytes of a step.
    """

    a_first: gl.tensor
    b_first: gl.tensor
    a_scale_first: gl.tensor
    b_scale_first: gl.tensor
    a_pitch: gl.tensor
    b_pitch: gl.tensor
    lead: gl.tensor
    depth: gl.tensor
    a_top: gl.tensor
    a_bottom: gl.tensor
    b_rows: gl.tensor
    a_scale_words: gl.tensor
    b_scale_words: gl.tensor
    b_step: gl.tensor
    TRANS_B: gl.constexpr

    @gluon.jit
    def copy_codes_0(self, operands, buffers, slot, k, lead):
        """Start copying b and a's first part of the step at value k."""
        self.copy_b(operands, buffers, slot, k, lead)
        self.copy_a(operands, buffers, slot, k, lead)

    @gluon.jit
    def copy_b(self, operands, buffers, slot, k, lead):
        """Start copying b of the step at value k."""
        if self.TRANS_B:
            b = operands.b + (self.b_first + k)
            copy_rows(buffers.b, slot, b, self.b_rows, lead, self.depth - k)
        else:
            step = gl.to_tensor(k) // STEP
            b = operands.b + (self.b_first + step.to(gl.int64) * self.b_step)
            STEPS: gl.constexpr = buffers.b.shape[0] // 4
            target = reinterpret(buffers.b, gl.uint8, [STEPS, STEP, BLOCK_N], PLAIN).index(slot)
            row = gl.arange(0, STEP, gl.SliceLayout(1, _COPY_ACROSS))
            inside = _value_of(row) // MX_BLOCK < (self.depth - k) // MX_BLOCK
            async_copy.buffer_load_to_shared(target, b, self.b_rows, mask=inside[:, None])

    @gluon.jit
    def copy_a(self, operands, buffers, slot, k, lead):
        """Start copying a's first part of the step at value k."""
        a = operands.a + (self.a_first + k)
        copy_rows(buffers.a, slot, a, self.a_top, lead, self.depth - k)

    @gluon.jit
    def copy_codes_1(self, operands, buffers, slot, k, lead):
        """Start copying the bottom half of a of the step at value k."""
        a = operands.a + (self.a_first + k)
        copy_rows(buffers.a, 2 + slot, a, self.a_bottom, lead, self.depth - k)

    @gluon.jit
    def copy_scales(self, operands, buffers, slot, pair, lead):
        """Start copying the scales of a pair.

        Planes outside of the reduction become zeros: those of another group can hold NaN, and so
        would their products with codes of zero.
        """
        first = pair * _PLANES
        a = operands.a_scale + (self.a_scale_first + first * self.a_pitch.to(gl.int64))
        b = operands.b_scale + (self.b_scale_first + first * self.b_pitch.to(gl.int64))
        plane = gl.arange(0, _PLANES, gl.SliceLayout(1, SCALE_COPY))[:, None]
        inside = (plane >= lead // MX_BLOCK) & (plane < self.depth // MX_BLOCK - first)
        async_copy.buffer_load_to_shared(
            buffers.a_scale.index(slot), a, self.a_scale_words, mask=inside
        )
        async_copy.buffer_load_to_shared(
            buffers.b_scale.index(slot), b, self.b_scale_words, mask=inside
        )

    @gluon.jit
    def start(self, operands, buffers, BLOCK_M: gl.constexpr):
        """Start the copies that precede the main loop; no copy may be under way."""
        self.copy_codes_0(operands, buffers, 0, 0, self.lead)
        self.copy_scales(operands, buffers, 0, 0, self.lead)
        async_copy.commit_group()
        if BLOCK_M == HIGH:
            self.copy_codes_1(operands, buffers, 0, 0, self.lead)
            async_copy.commit_group()
        self.copy_codes_0(operands, buffers, 1, STEP, 0)
        async_copy.commit_group()


@gluon.jit
def _value_of(row):
    """Value of the reduction in each LDS row of a step of b without TRANS_B; see `_ACROSS`."""
    return row // 64 * 64 + row // 8 % 4 * 16 + row // 32 % 2 * 8 + row % 8


@gluon.jit
def offsets_across(width, pitch):
    """Byte offsets [128, 256] of a step of b whose rows are `pitch` bytes apart, int32.

    Chunks past column `width` repeat the last one; both are multiples of 16.
    """
    row = gl.arange(0, STEP, gl.SliceLayout(1, _COPY_ACROSS))[:, None]
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _COPY_ACROSS))[None, :]
    chunk = gl.minimum((column // 16) ^ (row % 16), width // 16 - 1)
    offsets = _value_of(row) * pitch + chunk * 16 + column % 16
    return gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])


@gluon.jit
def scale_offsets(words, pitch):
    """Offsets of `words` (int32, a slice of `SCALE_COPY`) of a pair's planes: int32 [8, 64]."""
    plane = gl.arange(0, _PLANES, gl.SliceLayout(1, SCALE_COPY))
    return plane[:, None] * pitch + words[None, :]


@gluon.jit
def _read_words(planes, FIRST: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr):
    """Read words [LANES, 4] from a step's planes in LDS [4, 64], from word FIRST on."""
    words = planes.slice(FIRST, LANES, 1).permute([1, 0])
    return opaque(async_copy.load_shared_relaxed(words, LAYOUT))


@gluon.jit
def _scales(words, LAYOUT: gl.constexpr):
    """Scale bytes [4 x lanes, 4] of words [lanes, 4], a byte for each of a lane's blocks."""
    even, odd = gl.join(words, words >> 16), gl.join(words >> 8, words >> 24)
    by_block = gl.permute(gl.join(even, odd), [2, 3, 0, 1]).to(gl.uint8)
    return gl.convert_layout(gl.reshape(by_block, [4 * words.shape[0], _GROUPS]), LAYOUT)


@gluon.constexpr_function
def _scale_layout(OPERAND, ROWS):
    """Scales [ROWS, 4] of one operand for the MFMA. Made when a kernel compiles, not on import."""
    return cdna4.get_mfma_scale_layout(OPERAND, [ROWS, _GROUPS.value])


@gluon.jit
def _b_scales(words):
    """Scales of b, from words of all its rows."""
    return _scales(words, _scale_layout(_B, BLOCK_N))


@gluon.jit
def _read_half(buffers, quarter):
    """Codes [64, 256] of half a step of b without TRANS_B, whose first quarter this is."""
    first = async_copy.load_shared_relaxed(buffers.b.index(quarter), _QUARTER)
    second = async_copy.load_shared_relaxed(buffers.b.index(quarter + 1), _QUARTER)
    # [4 q, 8 i, column, j] to [q, j, i, column]
    parts = gl.reshape(gl.join(first, second), [4, 8, BLOCK_N, 2])
    return gl.reshape(gl.permute(parts, [0, 3, 1, 2]), [64, BLOCK_N])


@gluon.jit
def _read_b(buffers, slot, TRANS_B: gl.constexpr):
    """Codes of b in a step."""
    if TRANS_B:
        return async_copy.load_shared_relaxed(buffers.b.index(slot).permute([1, 0]), _B)
    elif FOLDS_TRANSPOSING_READS:
        STEPS: gl.constexpr = buffers.b.shape[0] // 4
        steps = reinterpret(buffers.b, gl.uint8, [STEPS, STEP, BLOCK_N], _STEP_ACROSS)
        return async_copy.load_shared_relaxed(steps.index(slot), _B)
    else:
        first, second = _read_half(buffers, 4 * slot), _read_half(buffers, 4 * slot + 2)
        halves = gl.permute(gl.join(first, second), [2, 0, 1])
        return gl.convert_layout(gl.reshape(halves, [STEP, BLOCK_N]), _B, assert_trivial=True)


@gluon.jit
def _read_b_scales(planes, TRANS_B: gl.constexpr):
    """Scales of b from a step's planes in LDS: words if TRANS_B, else the MFMA's bytes."""
    if TRANS_B:
        return _read_words(planes, 0, _SCALE_WORDS, _scale_layout(_B, _SCALE_WORDS))
    else:
        bytes_of_step = reinterpret(planes, gl.uint8, [_GROUPS, BLOCK_N], _SCALES_ACROSS)
        return async_copy.load_shared_relaxed(
            bytes_of_step.permute([1, 0]), _scale_layout(_B, BLOCK_N)
        )


@gluon.jit
def _b_operand_scales(scales, TRANS_B: gl.constexpr):
    """Scales of b for the MFMA, from `_read_b_scales`."""
    if TRANS_B:
        return _b_scales(scales)
    else:
        return scales


@gluon.jit
def _multiply(sums, a, a_words, b, b_scale, A_FORMAT: gl.constexpr, B_FORMAT: gl.constexpr):
    """Add ``a x b`` to the sums of a part. a_words: words of a's scales."""
    a_scale = _scales(a_words, _scale_layout(_A, PART_ROWS))
    return cdna4.mfma_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, sums)


@gluon.jit
def _read_high(buffers, pair, SLOT: gl.constexpr, TRANS_B: gl.constexpr):
    """What memory phase 0 reads: words of a's scales (top, bottom), scales of b, top of a, b."""
    a_planes = buffers.a_scale.index(pair % 2).slice(SLOT * _GROUPS, _GROUPS)
    b_planes = buffers.b_scale.index(pair % 2).slice(SLOT * _GROUPS, _GROUPS)
    top_words = _read_words(a_planes, 0, _A_LANES, _scale_layout(_A, _A_LANES))
    bottom_words = _read_words(a_planes, _A_LANES, _A_LANES, _scale_layout(_A, _A_LANES))
    b_scale = _b_operand_scales(_read_b_scales(b_planes, TRANS_B), TRANS_B)
    a_top = async_copy.load_shared_relaxed(buffers.a.index(SLOT), _A)
    b = _read_b(buffers, SLOT, TRANS_B)
    return top_words, bottom_words, b_scale, a_top, b


@gluon.jit
def multiply_high(operands, buffers, sources, A_FORMAT: gl.constexpr, B_FORMAT: gl.constexpr):
    """Sums of the top and the bottom half of a high tile, float32 [128, 256] in `MFMA` each.

    `sources.start` has started the first copies. None is under way when the function returns, and
    all waves have read LDS. An odd last step copies nothing.
    """
    COPIES: gl.constexpr = 2  # groups of copies that no wait needs to end
    top = gl.zeros((PART_ROWS, BLOCK_N), gl.float32, MFMA)
    bottom = gl.zeros((PART_ROWS, BLOCK_N), gl.float32, MFMA)
    steps = gl.cdiv(sources.depth, STEP)
    pairs = steps // 2
    async_copy.wait_group(COPIES)
    enter_phases()
    for pair in range(pairs):
        for slot in gl.static_range(2):
            k = (2 * pair + slot) * STEP
            top_words, bottom_words, b_scale, a, b = _read_high(
                buffers, pair, slot, sources.TRANS_B
            )
            sources.copy_codes_1(operands, buffers, 1 - slot, k + STEP, 0)
            async_copy.commit_group()
            end_memory(COPIES)
            top = _multiply(top, a, top_words, b, b_scale, A_FORMAT, B_FORMAT)
            end_compute(COPIES)
            a = async_copy.load_shared_relaxed(buffers.a.index(2 + slot), _A)
            sources.copy_codes_0(operands, buffers, slot, k + 2 * STEP, 0)
            if slot == 0:
                sources.copy_scales(operands, buffers, (pair + 1) % 2, pair + 1, 0)
            async_copy.commit_group()
            end_memory(COPIES)
            bottom = _multiply(bottom, a, bottom_words, b, b_scale, A_FORMAT, B_FORMAT)
            end_compute(COPIES)
    if steps % 2 == 1:
        top_words, bottom_words, b_scale, a, b = _read_high(buffers, pairs, 0, sources.TRANS_B)
        end_memory(0)
        top = _multiply(top, a, top_words, b, b_scale, A_FORMAT, B_FORMAT)
        end_compute(0)
        a = async_copy.load_shared_relaxed(buffers.a.index(2), _A)
        end_memory(0)
        bottom = _multiply(bottom, a, bottom_words, b, b_scale, A_FORMAT, B_FORMAT)
        end_compute(0)
    leave_phases()
    async_copy.wait_group(0)
    return top, bottom


@gluon.jit
def _read_a_low(buffers, pair, slot, STEP_OF_PAIR: gl.constexpr, TRANS_B: gl.constexpr):
    """Words of the scales of a and b (`_read_b_scales`) in a step, and a."""
    a_planes = buffers.a_scale.index(pair % 2).slice(STEP_OF_PAIR * _GROUPS, _GROUPS)
    b_planes = buffers.b_scale.index(pair % 2).slice(STEP_OF_PAIR * _GROUPS, _GROUPS)
    a_words = _read_words(a_planes, 0, _A_LANES, _scale_layout(_A, _A_LANES))
    b_words = _read_b_scales(b_planes, TRANS_B)
    return a_words, b_words, async_copy.load_shared_relaxed(buffers.a.index(slot), _A)


@gluon.jit
def multiply_low(operands, buffers, sources, A_FORMAT: gl.constexpr, B_FORMAT: gl.constexpr):
    """Sums of a low tile, float32 [128, 256] in `MFMA`; otherwise as `multiply_high`.

    Reads and copies alternate, so that neither of their queues is full. Modelled for gfx950: 85 %
    of MFMA; 77 % with all reads first. Each buffer is copied to before it is read: with the slot
    unknown to the compiler, Triton 3.9 puts a barrier between a read and a later copy.
    """
    COPIES: gl.constexpr = 1
    TRANS_B: gl.constexpr = sources.TRANS_B
    sums = gl.zeros((PART_ROWS, BLOCK_N), gl.float32, MFMA)
    steps = gl.cdiv(sources.depth, STEP)
    pairs = steps // 2
    slot = 0
    free = _SLOTS - 1
    async_copy.wait_group(COPIES)
    enter_phases()
    for pair in range(pairs):
        for step in gl.static_range(2):
            k = (2 * pair + step + 2) * STEP
            sources.copy_a(operands, buffers, free, k, 0)
            scheduling_fence()
            a_words, b_words, a = _read_a_low(buffers, pair, slot, step, TRANS_B)
            scheduling_fence()
            sources.copy_b(operands, buffers, free, k, 0)
            scheduling_fence()
            b = _read_b(buffers, slot, TRANS_B)
            if step == 0:
                sources.copy_scales(operands, buffers, (pair + 1) % 2, pair + 1, 0)
            async_copy.commit_group()
            end_memory(COPIES)
            b_scale = _b_operand_scales(b_words, TRANS_B)
            sums = _multiply(sums, a, a_words, b, b_scale, A_FORMAT, B_FORMAT)
            end_compute(COPIES)
            free = slot
            slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    if steps % 2 == 1:
        a_words, b_words, a = _read_a_low(buffers, pairs, slot, 0, TRANS_B)
        b = _read_b(buffers, slot, TRANS_B)
        end_memory(0)
        b_scale = _b_operand_scales(b_words, TRANS_B)
        sums = _multiply(sums, a, a_words, b, b_scale, A_FORMAT, B_FORMAT)
        end_compute(0)
    leave_phases()
    async_copy.wait_group(0)
    return sums
