"""Main loop of the prefill kernel with bfloat16 rows: weights are decoded on the way to bf16 MFMA.

LDS holds the codes of the weights as they are, a quarter of the bytes of bfloat16 values. A wave
decodes its own fragments in its memory phase, with ``v_cvt_scalef32_pk_bf16_fp4``: they reach the
MFMA in registers, without another trip through LDS and without another barrier. A wave of the tiles
of 256 and 128 sorted rows decodes 16 pairs of codes for eight MFMA, which hide them.

A step is 64 elements of the contracted dimension: 128 bytes of a row and two of the four MX blocks
of a unit. LDS in bytes, of 256 rows:

    rows       3 buffers of 1 step, 32 KiB each
    weights    3 buffers of 1 step, 8 KiB each
    scales     2 buffers of 2 steps, 2 KiB each

A step of 256 rows has two pairs of phases of 32 elements, because the operands of 64 do not fit
into the registers beside the sums. In a phase lane ``32 h + i`` of a wave has block h of its row,
elements 16 q to 16 q + 15 in the phase q of two: a 32 × 32 × 16 MFMA takes eight of each lane.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.cdna4 import (
    NUM_WARPS,
    decode_e2m1,
    end_compute,
    end_memory,
    enter_phases,
    leave_phases,
    set_priority,
)
from ...device.compat import aggregate, reinterpret
from .prefill_mainloop import async_copy, copy_rows, copy_streamed, past_end
from .prefill_tiles import linear_in_lds, mfma_layout, rows_in_lds, warps_m, warps_n

SLOTS = gl.constexpr(3)
"""Buffers of rows and weights: a step is copied two steps before its first phase."""


@aggregate
class DenseSource:
    """Global memory that a tile reads. Pointers are to the tile's first byte, offsets int32.

    rows, row_offset, row_bytes: see `prefill_mainloop.Source`. weights, weight_offset: of the
    fragments of a unit of depth, [16]. scales, scale_offset: of each unit of 64 weight rows.
    num_blocks: MX blocks of the contracted dimension. STREAM: of `prefill_mainloop.Variant`.
    """

    rows: gl.tensor
    row_offset: gl.tensor
    row_bytes: gl.tensor
    weights: gl.tensor
    weight_offset: gl.tensor
    scales: gl.tensor
    scale_offset: gl.tensor
    num_blocks: gl.tensor
    STREAM: gl.constexpr


@aggregate
class DenseBuffers:
    """LDS of the rows, of the weights' codes and of their scales."""

    rows: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


@aggregate
class Place:
    """A step and the slot of its rows and weights."""

    step: gl.tensor
    slot: gl.tensor

    @gluon.jit
    def next(self):
        """The following step."""
        return Place(step=self.step + 1, slot=gl.where(self.slot == SLOTS - 1, 0, self.slot + 1))


@gluon.constexpr_function
def phases_of(BLOCK_M):
    """Pairs of phases of a step."""
    return 2 if BLOCK_M == 256 else 1


@gluon.constexpr_function
def half_fragment_copy_layout(WARPS):
    """Direct copies of weights: a wave reads two MX blocks of each row of two fragments."""
    return gl.BlockedLayout([1, 16], [2, 32], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def unit_scale_copy_layout(WARPS):
    """Direct copies of scales: a wave reads the 256 bytes of a unit, a dword a lane."""
    return gl.BlockedLayout([1, 4], [1, 64], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _operand_layout(BLOCK_M, INDEX):
    """Fragments of the rows (INDEX 0) or of the weights (1)."""
    return gl.DotOperandLayout(INDEX, mfma_layout(BLOCK_M, "bf16"), 8)


@gluon.constexpr_function
def _waves(BLOCK_M, own, rank):
    """Bases of the waves: `own` along the weight rows; those of other sorted rows hold the same."""
    return own + [[0] * rank] * (warps_m(BLOCK_M, "bf16").bit_length() - 1)


@gluon.constexpr_function
def _words_in_lds(BLOCK_M):
    """Words of codes [tiles of MFMA, WARPS_N, 64 lanes, 4] of a step, each eight elements.

    Lane 32 h + 16 g + r has block h of row r of a fragment. g is the unit in a wave of two units,
    whose tiles are the fragments; in a wave of one, tile t has the fragments t and t + 2, so that
    each lane has gates and ups of the same features.
    """
    words, rows = [[0, 0, 0, 1], [0, 0, 0, 2]], [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    g, h, tile, wave = [0, 0, 16, 0], [0, 0, 32, 0], [1, 0, 0, 0], [0, 1, 0, 0]
    if warps_n(BLOCK_M, "bf16") == 2:
        fragments = [tile, [2, 0, 0, 0], g, wave]
    else:
        fragments = [tile, g, wave, [0, 2, 0, 0]]
    return gl.SharedLinearLayout([*words, *rows, h, *fragments])


@gluon.constexpr_function
def _word_layout(BLOCK_M, WORDS):
    """Registers of those words, or of two of the four."""
    tiles = 8 // warps_n(BLOCK_M, "bf16")
    words = [[0, 0, 0, bit] for bit in (1, 2) if bit < WORDS]
    own = [[0, bit, 0, 0] for bit in (1, 2) if bit < warps_n(BLOCK_M, "bf16")]
    return gl.DistributedLinearLayout(
        reg_bases=words + [[bit, 0, 0, 0] for bit in (1, 2) if bit < tiles],
        lane_bases=[[0, 0, bit, 0] for bit in (1, 2, 4, 8, 16, 32)],
        warp_bases=_waves(BLOCK_M, own, 4),
        block_bases=[],
        shape=[tiles, warps_n(BLOCK_M, "bf16"), 64, WORDS],
    )


@gluon.constexpr_function
def _scales_in_lds(BLOCK_M):
    """Words of scales [WARPS_N, units of a wave, 16 rows, 4 blocks] of two steps.

    Without the axis of units where a wave has one.
    """
    if warps_n(BLOCK_M, "bf16") == 2:
        rows, blocks = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)], [[0, 0, 0, 1], [0, 0, 0, 2]]
        return gl.SharedLinearLayout([*rows, *blocks, [0, 1, 0, 0], [1, 0, 0, 0]])
    rows, blocks = [[0, bit, 0] for bit in (1, 2, 4, 8)], [[0, 0, 1], [0, 0, 2]]
    return gl.SharedLinearLayout([*rows, *blocks, [1, 0, 0], [2, 0, 0]])


@gluon.constexpr_function
def _scale_layout(BLOCK_M):
    """Registers of a step's scales [WARPS_N, 2, 16 rows, 2 blocks], a word a lane."""
    rows = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    own = [[bit, 0, 0, 0] for bit in (1, 2) if bit < warps_n(BLOCK_M, "bf16")]
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[*rows, [0, 1, 0, 0], [0, 0, 0, 1]],
        warp_bases=_waves(BLOCK_M, own, 4),
        block_bases=[],
        shape=[warps_n(BLOCK_M, "bf16"), 2, 16, 2],
    )


@gluon.jit
def make_dense_buffers(BLOCK_M: gl.constexpr):
    """Allocate the LDS of a tile."""
    LINEAR: gl.constexpr = linear_in_lds()
    return DenseBuffers(
        rows=gl.allocate_shared_memory(gl.uint8, [SLOTS, BLOCK_M, 128], LINEAR),
        weights=gl.allocate_shared_memory(gl.uint8, [SLOTS, 16, 512], LINEAR),
        scales=gl.allocate_shared_memory(gl.uint8, [2, gl.num_warps(), 256], LINEAR),
    )


@gluon.jit
def offsets_of_unit_scales(first_unit, num_units, depth_units):
    """Offsets of the units' scales, a unit a wave. Those past the last one repeat it."""
    LAYOUT: gl.constexpr = unit_scale_copy_layout(gl.num_warps())
    index = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LAYOUT)) % 4
    unit = gl.minimum(first_unit + index, num_units - 1) - first_unit
    return unit * (depth_units * 256)


@gluon.jit
def _copy_weights(source, slots, slot, step, ODD: gl.constexpr):
    """Copy the codes of `step` to LDS; zeros past the last block. ODD: its last bit."""
    LAYOUT: gl.constexpr = half_fragment_copy_layout(gl.num_warps())
    byte = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))
    outside = past_end(step * 2 >= source.num_blocks - byte // 256)
    offsets = (source.weight_offset[:, None] + (byte + 512 * ODD)[None, :]) + (step >> 1) * 4096
    offsets = gl.max_contiguous(gl.multiple_of(offsets + outside[None, :], [1, 16]), [1, 16])
    copy_streamed(slots.index(slot), source.weights, offsets, source.STREAM)


@gluon.jit
def _copy_scales(source, slots, unit):
    """Copy the scales of a unit of depth, two steps; zeros past the last block."""
    LAYOUT: gl.constexpr = unit_scale_copy_layout(gl.num_warps())
    byte = gl.arange(0, 256, gl.SliceLayout(0, LAYOUT))
    outside = past_end(unit * 4 >= source.num_blocks - byte // 64)
    offsets = (source.scale_offset[:, None] + byte[None, :]) + unit * 256 + outside[None, :]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 4]), [1, 4])
    copy_streamed(slots.index(unit & 1), source.scales, offsets, source.STREAM)


@gluon.jit
def _copy_ahead(
    source, buffers, done, ODD: gl.constexpr, PHASE: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Start the copies of a phase, as one group, for the step that is SLOTS after `done`.

    done: `Place` of a step that both wave groups have read, so that its slot is free. ODD: its
    last bit. Rows are copied in the first phase of a step, weights in the last one, with scales of
    two steps at a time.
    """
    later = done.step + SLOTS
    if PHASE == 0:
        copy_rows(source, buffers.rows, done.slot, later * 128)
    if phases_of(BLOCK_M) - 1 == PHASE:
        _copy_weights(source, buffers.weights, done.slot, later, 1 - ODD)
        if ODD == 1:
            _copy_scales(source, buffers.scales, later >> 1)
    async_copy.commit_group()


@gluon.jit
def _read_rows(buffers, slot, PHASE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Fragments [BLOCK_M, 64 or 32 elements] of the sorted rows in a phase."""
    WIDTH: gl.constexpr = 64 // phases_of(BLOCK_M)
    LDS: gl.constexpr = rows_in_lds(BLOCK_M, "bf16")
    tile = reinterpret(buffers.rows.index(slot), gl.bfloat16, [BLOCK_M, 64], LDS)
    return async_copy.load_shared_relaxed(
        tile.slice(WIDTH * PHASE, WIDTH, dim=1), _operand_layout(BLOCK_M, 0)
    )


@gluon.jit
def _read_words(buffers, slot, PHASE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Codes of a phase, uint32 [tiles, WARPS_N, 64, 4 or 2]; see `_words_in_lds`."""
    WAVES: gl.constexpr = warps_n(BLOCK_M, "bf16")
    WORDS: gl.constexpr = 4 // phases_of(BLOCK_M)
    LDS: gl.constexpr = _words_in_lds(BLOCK_M)
    words = reinterpret(buffers.weights.index(slot), gl.uint32, [8 // WAVES, WAVES, 64, 4], LDS)
    return async_copy.load_shared_relaxed(
        words.slice(WORDS * PHASE, WORDS, dim=3), _word_layout(BLOCK_M, WORDS)
    )


@gluon.jit
def _read_scales(buffers, unit, ODD: gl.constexpr, BLOCK_M: gl.constexpr):
    """Scales of a step, uint32 [WARPS_N, 2, 16, 2 blocks]: byte t is that of tile t.

    Axis 1 is the half of the 32 rows of an MFMA. In a tile of 128 rows both halves belong to one
    unit; the second one has fragments 2 and 3.
    """
    WAVES: gl.constexpr = warps_n(BLOCK_M, "bf16")
    LAYOUT: gl.constexpr = _scale_layout(BLOCK_M)
    LDS: gl.constexpr = _scales_in_lds(BLOCK_M)
    slot = buffers.scales.index(unit & 1).slice(0, 4, dim=0)
    if WAVES == 2:
        dwords = reinterpret(slot, gl.uint32, [2, 2, 16, 4], LDS).slice(2 * ODD, 2, dim=3)
        return async_copy.load_shared_relaxed(dwords, LAYOUT)
    else:
        dwords = reinterpret(slot, gl.uint32, [4, 16, 4], LDS).slice(2 * ODD, 2, dim=2)
        dwords = async_copy.load_shared_relaxed(dwords, gl.SliceLayout(1, LAYOUT))
        half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
        return gl.expand_dims(dwords, 1) >> (16 * half)[None, :, None, None]


@gluon.jit
def _factors(scales, BLOCK_M: gl.constexpr):
    """Float32 [tiles, WARPS_N, 64, 1] whose exponents are the scales; other bits do not count."""
    WAVES: gl.constexpr = warps_n(BLOCK_M, "bf16")
    TILES: gl.constexpr = 8 // WAVES
    if WAVES == 2:
        even, odd = gl.join(scales << 23, scales << 7), gl.join(scales << 15, scales >> 1)
    else:
        even, odd = scales << 23, scales << 15
    tiles = gl.join(even, odd).reshape(WAVES, 2, 16, 2, TILES).permute(4, 0, 3, 1, 2)
    return tiles.reshape(TILES, WAVES, 64, 1).to(gl.float32, bitcast=True)


@gluon.jit
def _decode(words, scales, BLOCK_M: gl.constexpr):
    """Codes of a phase times their scales: bfloat16 fragments [64 or 32 elements, 256].

    Four words of a thread are decoded at a time; two of each of two tiles, or all of one.
    """
    WAVES: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[3]
    JOINED: gl.constexpr = 4 // WORDS
    GROUPS: gl.constexpr = words.shape[0] // JOINED
    LAYOUT: gl.constexpr = words.type.layout
    factors = gl.convert_layout(_factors(scales, BLOCK_M), LAYOUT, assert_trivial=True)
    factors = factors.broadcast_to(words.shape)
    # The barrier and the LDS reads of the phase stand between this and the last MFMA.
    values = decode_e2m1(_four_words(words), _four_words(factors), False)
    values = values.reshape(GROUPS, WAVES, 2, 2, 16, JOINED, WORDS, 8)
    values = values.permute(6, 2, 7, 0, 5, 1, 3, 4).reshape(16 * WORDS, 256)
    return gl.convert_layout(values, _operand_layout(BLOCK_M, 1), assert_trivial=True)


@gluon.jit
def _four_words(words):
    """[tiles, WARPS_N, 64, WORDS] as [groups of tiles, WARPS_N, 64, 4]: tile, word."""
    WAVES: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[3]
    JOINED: gl.constexpr = 4 // WORDS
    GROUPS: gl.constexpr = words.shape[0] // JOINED
    split = words.reshape(GROUPS, JOINED, WAVES, 64, WORDS).permute(0, 2, 3, 1, 4)
    return split.reshape(GROUPS, WAVES, 64, 4)


@gluon.jit
def _advance(
    sums, source, buffers, done, ODD: gl.constexpr, COPY: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Read and multiply the operands of the step after `done`; return its `Place`.

    ODD: the last bit of that step. COPY: start copies of a later step.
    """
    PHASES: gl.constexpr = phases_of(BLOCK_M)
    place = done.next()
    for phase in gl.static_range(PHASES):
        words = _read_words(buffers, place.slot, phase, BLOCK_M)
        scales = _read_scales(buffers, place.step >> 1, ODD, BLOCK_M)
        rows = _read_rows(buffers, place.slot, phase, BLOCK_M)
        if COPY:
            _copy_ahead(source, buffers, done, 1 - ODD, phase, BLOCK_M)
        set_priority(0)
        weights = _decode(words, scales, BLOCK_M)
        # Copies of the next phase have landed, except for those that this step has started.
        end_memory((PHASES if phase == PHASES - 1 else PHASES + 1) if COPY else 0)
        sums = gl.amd.cdna4.mfma(rows, weights, sums)
        end_compute(PHASES + 1 if COPY else 0)
    return sums, place


@gluon.jit
def multiply_dense_tile(source, buffers, BLOCK_M: gl.constexpr):
    """``rows @ weights.T``, float32 [BLOCK_M, 256] in `mfma_layout`."""
    PHASES: gl.constexpr = phases_of(BLOCK_M)
    gl.static_assert(gl.num_warps() == NUM_WARPS)
    sums = gl.zeros((BLOCK_M, 256), gl.float32, mfma_layout(BLOCK_M, "bf16"))
    for step in gl.static_range(SLOTS - 1):
        for phase in gl.static_range(PHASES):
            none = Place(step=step - SLOTS, slot=step)
            _copy_ahead(source, buffers, none, (step + 1) % 2, phase, BLOCK_M)
    async_copy.wait_group(PHASES)
    enter_phases()
    done = Place(step=-1, slot=SLOTS - 1)
    steps = gl.cdiv(source.num_blocks, 2)
    for _ in range(steps // 2):
        for odd in gl.static_range(2):
            sums, done = _advance(sums, source, buffers, done, odd, True, BLOCK_M)
    if steps % 2 == 1:
        sums, done = _advance(sums, source, buffers, done, 0, False, BLOCK_M)
    leave_phases()
    async_copy.wait_group(0)
    return sums
