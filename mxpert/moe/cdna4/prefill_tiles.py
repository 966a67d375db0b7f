"""Epilogues of the prefill kernel: bias, routing weight, activation, requantisation, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.activation import gated_activation
from ...device.compat import aggregate
from ...device.mx_codec import e8m0_scale, encode, inverse_scale, magnitude_bits
from ...routing import plan as routing

# ---- Register and LDS layouts of the prefill kernels.
#
# A tile is BLOCK_M sorted rows × 256 weight rows, four units of 64. WARPS_M × WARPS_N waves share
# it. A wave owns 64 or 32 consecutive sorted rows times one or two consecutive units:
#
#     BLOCK_M    e2m1: waves    each        e4m3, e5m2, bf16: waves    each
#     256        4 × 2          64 × 128    4 × 2                      64 × 128
#     128        4 × 2          32 × 128    2 × 4                      64 × 64
#     64         2 × 2          32 × 128    1 × 4 (not bf16)           64 × 64
#
# A fragment is 16 rows. An MFMA of e4m3 has one fragment of either side. An MFMA of e2m1 has two:
# of sorted rows two neighbours, of weight rows fragment f of both units. The four bytes of a dword
# of `CDNA4_FRAGMENT` scales are those of fragments 0 to 3, so its byte f is right for all lanes.
#
# The tensors of Triton number rows in the order of `AMDMFMALayout`: MFMA, wave, row of the MFMA.
# Memory has the rows of a wave one after the other. The layouts below map one to the other, so that
# no data moves. The epilogue takes quadrants: up to 32 sorted rows of each wave times a unit.


@gluon.constexpr_function
def warps_n(BLOCK_M, FORMAT):
    """Waves along the weight rows."""
    return 2 if BLOCK_M == 256 or FORMAT == "e2m1" else 4


@gluon.constexpr_function
def warps_m(BLOCK_M, FORMAT):
    """Waves along the sorted rows."""
    return (4 if BLOCK_M == 64 else 8) // warps_n(BLOCK_M, FORMAT)


@gluon.constexpr_function
def wave_rows(BLOCK_M, FORMAT):
    """Sorted rows of a wave."""
    return BLOCK_M // warps_m(BLOCK_M, FORMAT)


@gluon.constexpr_function
def wave_units(BLOCK_M, FORMAT):
    """Units of 64 weight rows of a wave."""
    return 4 // warps_n(BLOCK_M, FORMAT)


@gluon.constexpr_function
def mfma_rows(FORMAT):
    """Rows of an MFMA: 32 × 32 × 64 for e2m1, 32 × 32 × 16 for bf16, else 16 × 16 × 128.

    Each takes 32 cycles.

    While an MFMA reads its operands, no other wave of the SIMD can issue an LDS access. 16 × 16 ×
    128 of e2m1 takes 16 cycles, which leaves the other wave too little.
    """
    return 32 if FORMAT in ("e2m1", "bf16") else 16


@gluon.constexpr_function
def mfma_layout(BLOCK_M, FORMAT):
    """Accumulators: a lane holds groups of four neighbouring columns of one row."""
    rows = mfma_rows(FORMAT)
    return gl.amd.AMDMFMALayout(
        version=4,
        instr_shape=[rows, rows, 16 if FORMAT == "bf16" else 128 * 16 // rows],
        transposed=True,
        warps_per_cta=[warps_m(BLOCK_M, FORMAT), warps_n(BLOCK_M, FORMAT)],
    )


@gluon.constexpr_function
def _bits(value):
    """Powers of two below `value`, a power of two."""
    return [1 << k for k in range(value.bit_length() - 1)]


@gluon.constexpr_function
def _along(axis, values):
    """Bases of a 2-D layout that step along one axis."""
    return [[value, 0] if axis == 0 else [0, value] for value in values]


@gluon.constexpr_function
def rows_in_lds(BLOCK_M, FORMAT):
    """[BLOCK_M, 128] bytes of the sorted rows, those of a wave one after the other.

    With bf16 [BLOCK_M, 64] elements: chunk 4 h + 2 q + j of a row has what lanes of half h multiply
    in MFMA j of the phase q; see `prefill_bf16`.

    128 bytes are half of the 64 banks. Rows r and r + 2 share banks, so the 16-byte chunk c of row
    r is stored at chunk c ^ (r / 2 % 8): sixteen rows of one chunk fill the banks once.
    """
    inside, chunks = ([1, 2, 4, 8], [16, 32, 64])
    if FORMAT == "bf16":
        inside, chunks = ([1, 2, 4], [16, 32, 8])
    bytes_of_row = _along(1, inside + chunks)
    swizzled = [[1, 0], *([2 << bit, chunk] for bit, chunk in enumerate(chunks))]
    rows, waves = mfma_rows(FORMAT), warps_m(BLOCK_M, FORMAT)
    tiles = [rows * waves * bit for bit in _bits(wave_rows(BLOCK_M, FORMAT) // rows)]
    order = [bit for bit in _bits(rows) if bit == 16] + tiles + [rows * bit for bit in _bits(waves)]
    return gl.SharedLinearLayout(bytes_of_row + swizzled + _along(0, order))


@gluon.constexpr_function
def weights_in_lds(BLOCK_M, FORMAT, BYTES=64):
    """[BYTES, 256 weight rows]: units of fragments [chunk of 16 bytes][row][16 bytes].

    That is their order in memory.
    """
    chunks = [16 * bit for bit in _bits(BYTES // 16)]
    lane = _along(0, [1, 2, 4, 8]) + _along(1, [1, 2, 4, 8]) + _along(0, chunks)
    rows, waves = mfma_rows(FORMAT), warps_n(BLOCK_M, FORMAT)
    if rows == 32:  # MFMA (fragment), wave, unit, row
        fragments, units = [32 * waves * bit for bit in _bits(4)], [16]
    else:  # MFMA (unit, fragment), wave, row
        fragments = [16 * waves * bit for bit in _bits(4 * wave_units(BLOCK_M, FORMAT))]
        units = []
    own = [rows * bit for bit in _bits(waves)]
    return gl.SharedLinearLayout(lane + _along(1, fragments + units + own))


@gluon.constexpr_function
def row_scales_in_lds(UNITS, FORMAT):
    """[UNITS, rows of an MFMA, blocks] dwords of the rows' scales of two steps.

    A unit is 64 rows. With MFMA of 16 rows a dword has the scales of four fragments and a block is
    4 · step + block. With 32 rows it has [MFMA][block / 2] and a block is 2 · step + block % 2.
    """
    rows = mfma_rows(FORMAT)
    lane = [[0, bit, 0] for bit in _bits(rows)] + [[0, 0, bit] for bit in _bits(128 // rows)]
    return gl.SharedLinearLayout(lane + [[bit, 0, 0] for bit in _bits(UNITS)])


@gluon.constexpr_function
def row_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the rows' scales of a step, [units, 2, rows of an MFMA, blocks] dwords.

    Axis 1 is the half of a unit that a wave of 32 rows owns; both waves hold the same dwords. It
    is 1 where a wave owns 64 rows.
    """
    rows, waves = mfma_rows(FORMAT), warps_m(BLOCK_M, FORMAT)
    sharing = 64 // wave_rows(BLOCK_M, FORMAT)
    lane = [[0, 0, bit, 0] for bit in _bits(rows)] + [[0, 0, 0, b] for b in _bits(64 // rows)]
    half = [[0, bit, 0, 0] for bit in _bits(sharing)]
    own = [[bit, 0, 0, 0] for bit in _bits(waves // sharing)]
    others = [[0, 0, 0, 0] for _ in _bits(warps_n(BLOCK_M, FORMAT))]
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=lane,
        warp_bases=others + half + own,
        block_bases=[],
        shape=[waves // sharing, sharing, rows, 64 // rows],
    )


@gluon.constexpr_function
def weight_scales_in_lds(BLOCK_M, FORMAT):
    """[WARPS_N, units, 16, 8] dwords of the weights' scales of two steps: [step][block][row]."""
    rows = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    blocks = [[0, 0, 0, bit] for bit in (1, 2, 4)]
    units = [[0, bit, 0, 0] for bit in _bits(wave_units(BLOCK_M, FORMAT))]
    waves = [[bit, 0, 0, 0] for bit in _bits(warps_n(BLOCK_M, FORMAT))]
    return gl.SharedLinearLayout(rows + blocks + units + waves)


@gluon.constexpr_function
def weight_scale_dwords(BLOCK_M, FORMAT):
    """Registers of the weights' scales of a step, [WARPS_N, units, 16, 4] dwords."""
    wide = mfma_rows(FORMAT) == 32
    rows = [[0, 0, bit, 0] for bit in (1, 2, 4, 8)]
    blocks = [[0, 0, 0, 1], [0, 0, 0, 2]]
    units = [[0, bit, 0, 0] for bit in _bits(wave_units(BLOCK_M, FORMAT))]
    own = [[bit, 0, 0, 0] for bit in _bits(warps_n(BLOCK_M, FORMAT))]
    others = [[0, 0, 0, 0] for _ in _bits(warps_m(BLOCK_M, FORMAT))]
    return gl.DistributedLinearLayout(
        reg_bases=blocks[1:] if wide else units,
        lane_bases=rows + (units + blocks[:1] if wide else blocks),
        warp_bases=own + others,
        block_bases=[],
        shape=[warps_n(BLOCK_M, FORMAT), wave_units(BLOCK_M, FORMAT), 16, 4],
    )


@gluon.constexpr_function
def linear_in_lds():
    """Bytes in the order of a direct copy."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def row_copy_layout(WARPS):
    """Direct copies of sorted rows: eight lanes read the 128 bytes of a row, 16 bytes each."""
    return gl.BlockedLayout([1, 16], [8, 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def fragment_copy_layout(WARPS):
    """Direct copies of weights: a wave reads the 1024 bytes of a fragment."""
    return gl.BlockedLayout([1, 16], [1, 64], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def scale_copy_layout(WARPS):
    """Direct copies of scales: two waves read the 512 bytes of 64 rows, a dword a lane."""
    return gl.BlockedLayout([1, 4], [1, 64], [WARPS // 2, 2], [1, 0])


cdna4 = gl.amd.cdna4

TOKEN_MASK = gl.constexpr(routing.TOKEN_MASK)
"""Bits of a sorted_token_id that hold the token."""
_NAN = gl.constexpr(255)
_ONE = gl.constexpr(127)


@aggregate
class Output:
    """Where a tile's outputs go.

    out: [P, columns]: bf16, or codes of an MX format (FORMAT, with scale [P, columns / 32]), or in
    stage 2 the options' type; float32 [T, columns] if ATOMIC. p0, p1, p2: of the ACTIVATION, which
    is "" in stage 2. EMAX, THRESHOLD: of the scale rule. ARRANGED: scales are stored in the order
    of `arrange_scales`, for stage 2.
    """

    out: gl.tensor
    scale: gl.tensor
    columns: gl.tensor
    p0: gl.tensor
    p1: gl.tensor
    p2: gl.tensor | gl.constexpr
    FORMAT: gl.constexpr
    ACTIVATION: gl.constexpr
    ATOMIC: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr
    ARRANGED: gl.constexpr


@aggregate
class Terms:
    """What the epilogue reads: each a pointer, or 0 if there is none.

    sorted_token_ids: int32 [P]. bias: float32 of the tile's expert, one value a weight row.
    row_scale: float32 [T], or [P] in stage 2. weights: float32 [P], routing weights.
    """

    sorted_token_ids: gl.tensor
    bias: gl.tensor
    row_scale: gl.tensor
    weights: gl.tensor
    num_tokens: gl.tensor
    HAS_BIAS: gl.constexpr
    HAS_ROW_SCALE: gl.constexpr
    HAS_WEIGHTS: gl.constexpr


@aggregate
class Rows:
    """Sorted rows of a quadrant: index, token, whether it is no padding."""

    index: gl.tensor
    token: gl.tensor
    real: gl.tensor


@aggregate
class Quadrant:
    """Place of a quadrant: row block, weight tile, half of each wave's rows, unit of each wave."""

    tile_m: gl.tensor
    tile_n: gl.tensor
    BLOCK_M: gl.constexpr
    FORMAT: gl.constexpr
    HALF: gl.constexpr
    UNIT: gl.constexpr

    @gluon.jit
    def rows(self, terms, LAYOUT: gl.constexpr):
        """Its `Rows`, in the order of the sums: MFMA, wave, row of the MFMA."""
        WAVES: gl.constexpr = warps_m(self.BLOCK_M, self.FORMAT)
        MFMA: gl.constexpr = mfma_rows(self.FORMAT)
        row = gl.arange(0, 32 * WAVES, LAYOUT)
        own = self.HALF * 32 + row // (MFMA * WAVES) * MFMA + row % MFMA
        place = row // MFMA % WAVES * wave_rows(self.BLOCK_M, self.FORMAT) + own
        index = self.tile_m * self.BLOCK_M + place
        token = gl.load(terms.sorted_token_ids + index) & TOKEN_MASK
        return Rows(index=index, token=token, real=token < terms.num_tokens)

    @gluon.jit
    def units(self, LAYOUT: gl.constexpr):
        """Number of each wave's unit of 64 weight rows: in stage 1 of its 32 features."""
        wave = gl.arange(0, warps_n(self.BLOCK_M, self.FORMAT), LAYOUT)
        return self.tile_n * 4 + wave * wave_units(self.BLOCK_M, self.FORMAT) + self.UNIT


@gluon.jit
def sums_of(sums, quadrant):
    """Sums [32 · WARPS_M, WARPS_N, 64] of a quadrant.

    Epilogues need fewer registers for a quadrant at a time.
    """
    FORMAT: gl.constexpr = quadrant.FORMAT
    WAVES: gl.constexpr = warps_n(quadrant.BLOCK_M, FORMAT)
    UNITS: gl.constexpr = wave_units(quadrant.BLOCK_M, FORMAT)
    ROWS: gl.constexpr = 32 * warps_m(quadrant.BLOCK_M, FORMAT)
    HALVES: gl.constexpr = quadrant.BLOCK_M // ROWS
    if mfma_rows(FORMAT) == 32 and UNITS == 1:  # half, row, fragment % 2, wave, fragment / 2, row
        split = gl.reshape(sums, (HALVES, ROWS, 2, WAVES, 2, 16))
        split = gl.permute(split, (1, 3, 4, 2, 5, 0))
    elif mfma_rows(FORMAT) == 32:  # half, row, fragment, wave, unit, row of the fragment
        split = gl.reshape(sums, (HALVES, ROWS, 4, WAVES, UNITS, 16))
        split = gl.permute(split, (1, 3, 2, 5, 4, 0))
    else:  # half, row, unit, fragment, wave, row of the fragment
        split = gl.reshape(sums, (HALVES, ROWS, UNITS, 4, WAVES, 16))
        split = gl.permute(split, (1, 4, 3, 5, 2, 0))
    if HALVES == 2:
        split = _choose(split, quadrant.HALF)
    split = gl.reshape(split, (ROWS, WAVES, 64, UNITS))
    if UNITS == 2:
        return _choose(split, quadrant.UNIT)
    else:
        return gl.reshape(split, (ROWS, WAVES, 64))


@gluon.jit
def _choose(value, INDEX: gl.constexpr):
    """One of the two values along the last axis."""
    first, second = gl.split(value)
    return second if INDEX else first


@gluon.constexpr_function
def _rows_of(LAYOUT):
    """Layout of axis 0 of a 3-D layout."""
    return gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))


@gluon.constexpr_function
def _waves_of(LAYOUT):
    """Layout of its axis 1."""
    return gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))


@gluon.constexpr_function
def _places_of(LAYOUT):
    """Layout of its axis 2."""
    return gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _scale_rows(total, rows, terms, ACTIVATION: gl.constexpr):
    """Multiply by the rows' scales and, ahead of an activation, by their routing weights."""
    if terms.HAS_ROW_SCALE:
        scaled = rows.token if ACTIVATION != "" else rows.index
        scale = gl.load(terms.row_scale + scaled, mask=rows.real, other=0.0)
        total = total * scale[:, None, None]
    if terms.HAS_WEIGHTS and ACTIVATION != "":
        weight = gl.load(terms.weights + rows.index, mask=rows.real, other=0.0)
        total = total * weight[:, None, None]
    return total


@gluon.jit
def store_outputs(total, terms, output, quadrant):
    """Stage 2: store ``weight * (sum + bias)`` of a quadrant by sorted row, or add it by token."""
    LAYOUT: gl.constexpr = total.type.layout
    rows = quadrant.rows(terms, _rows_of(LAYOUT))
    unit = quadrant.units(_waves_of(LAYOUT))[None, :, None]
    column = unit * 64 + gl.arange(0, 64, _places_of(LAYOUT))[None, None, :]
    inside = column < output.columns  # [1, WARPS_N, 64]
    total = _scale_rows(total, rows, terms, "")
    if terms.HAS_BIAS:
        total = total + gl.load(terms.bias + column, mask=inside, other=0.0)
    if terms.HAS_WEIGHTS:
        weight = gl.load(terms.weights + rows.index, mask=rows.real, other=0.0)
        total = total * weight[:, None, None]
    mask = rows.real[:, None, None] & inside
    if output.ATOMIC:
        offsets = rows.token[:, None, None] * output.columns + column
        cdna4.buffer_atomic_add(output.out, offsets, total, mask=mask, sem="relaxed")
    else:
        first = quadrant.tile_m * quadrant.BLOCK_M
        out = output.out + first.to(gl.int64) * output.columns
        offsets = (rows.index - first)[:, None, None] * output.columns + column
        cdna4.buffer_store(total.to(output.out.dtype.element_ty), out, offsets, mask=mask)


@gluon.jit
def _features(total):
    """Gate and up [rows, WARPS_N, 32] of a quadrant.

    A unit of 64 weight rows has 16 gates, 16 ups, 16 gates, 16 ups: a fragment each. So each thread
    has the gate and the up of its features.
    """
    ROWS: gl.constexpr = total.shape[0]
    WAVES: gl.constexpr = total.shape[1]
    split = gl.permute(gl.reshape(total, (ROWS, WAVES, 2, 2, 16)), (0, 1, 2, 4, 3))
    return gl.split(gl.reshape(split, (ROWS, WAVES, 32, 2)))


@gluon.jit
def store_features(total, terms, output, quadrant):
    """Stage 1: apply routing weight, bias and activation to a quadrant; store bf16 or MX rows."""
    rows = quadrant.rows(terms, _rows_of(total.type.layout))
    gate, up = _features(_scale_rows(total, rows, terms, output.ACTIVATION))
    LAYOUT: gl.constexpr = gate.type.layout
    unit = quadrant.units(_waves_of(LAYOUT))[None, :, None]
    feature = unit * 32 + gl.arange(0, 32, _places_of(LAYOUT))[None, None, :]
    inside = feature < output.columns  # [1, WARPS_N, 32]
    if terms.HAS_BIAS:
        gate_row = feature // 16 * 32 + feature % 16
        gate = gate + gl.load(terms.bias + gate_row, mask=inside, other=0.0)
        up = up + gl.load(terms.bias + gate_row + 16, mask=inside, other=0.0)
    values = gated_activation(gate, up, output.p0, output.p1, output.p2, output.ACTIVATION)
    # Always round to bf16: stage 1 with MX output equals bf16 stage 1 followed by `quantize`.
    values = values.to(gl.bfloat16)
    if output.FORMAT == "bf16":
        rows = quadrant.rows(terms, _rows_of(LAYOUT))
        first = quadrant.tile_m * quadrant.BLOCK_M
        offsets = (rows.index - first)[:, None, None] * output.columns + feature
        out = output.out + first.to(gl.int64) * output.columns
        cdna4.buffer_store(values, out, offsets, mask=rows.real[:, None, None] & inside)
    else:
        _store_mx(values.to(gl.float32), terms, output, quadrant)


@gluon.jit
def _store_mx(values, terms, output, quadrant):
    """Quantise blocks of 32 features, [rows, WARPS_N, 32]; store codes and scales."""
    BYTES: gl.constexpr = 16 if output.FORMAT == "e2m1" else 32
    amax = gl.max(magnitude_bits(values), axis=2)
    byte = e8m0_scale(amax, output.EMAX, output.THRESHOLD)
    wide = gl.expand_dims(byte, 2)  # [rows, WARPS_N, 1]
    codes = encode(values * inverse_scale(wide), wide == _NAN, output.FORMAT)
    if output.FORMAT == "e2m1":
        low, high = gl.split(gl.reshape(codes, (values.shape[0], values.shape[1], 16, 2)))
        codes = low + (high << 4)
    LAYOUT: gl.constexpr = codes.type.layout
    rows = quadrant.rows(terms, _rows_of(LAYOUT))
    block = quadrant.units(_waves_of(LAYOUT))
    first, blocks = quadrant.tile_m * quadrant.BLOCK_M, output.columns // 32
    start = first.to(gl.int64) * blocks
    index = (rows.index - first)[:, None, None] * blocks + block[None, :, None]
    mask = rows.real[:, None, None] & (block < blocks)[None, :, None]
    offsets = index * BYTES + gl.arange(0, BYTES, _places_of(LAYOUT))[None, None, :]
    cdna4.buffer_store(codes.to(gl.uint8), output.out + start * BYTES, offsets, mask=mask)
    FLAT: gl.constexpr = byte.type.layout  # [rows, WARPS_N]
    rows = quadrant.rows(terms, gl.SliceLayout(1, FLAT))
    block = quadrant.units(gl.SliceLayout(0, FLAT))
    if output.ARRANGED:
        _store_arranged(byte, rows, block, output, first)
    else:
        offsets = (rows.index - first)[:, None] * blocks + block[None, :]
        mask = rows.real[:, None] & (block < blocks)[None, :]
        cdna4.buffer_store(byte.to(gl.uint8), output.scale + start, offsets, mask=mask)


@gluon.jit
def _store_arranged(byte, rows, block, output, first_row):
    """Store E8M0 bytes [rows, blocks] in the order of `arrange_scales`.

    The last unit of depth is whole: blocks past the last one get scales of 1, because an MFMA makes
    NaN of a NaN scale, though the codes are zeros there.
    """
    blocks = output.columns // 32
    units = gl.cdiv(blocks, 4)
    inside = block < blocks
    row = rows.index % 64
    if output.FORMAT == "e2m1":
        place = row % 32 * 4 + row // 32 * 2
        block_place = block % 2 * 128 + block % 4 // 2
    else:
        place = row % 16 * 4 + row // 16
        block_place = block % 4 * 64
    unit = (rows.index - first_row) // 64 * units
    offsets = (unit * 256 + place)[:, None] + (block // 4 * 256 + block_place)[None, :]
    start = output.scale + (first_row // 64).to(gl.int64) * units * 256
    mask = rows.real[:, None] & (block < units * 4)[None, :]
    byte = gl.where(inside[None, :], byte, _ONE)
    cdna4.buffer_store(byte.to(gl.uint8), start, offsets, mask=mask)
