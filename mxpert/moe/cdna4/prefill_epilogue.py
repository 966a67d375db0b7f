"""Epilogues of the prefill kernel: bias, routing weight, activation, requantisation, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.activation import gated_activation
from ...device.compat import aggregate
from ...device.mx_codec import e8m0_scale, encode, inverse_scale, magnitude_bits
from ...routing import plan as routing
from .prefill_layouts import mfma_rows, warps_m, warps_n, wave_rows, wave_units

cdna4 = gl.amd.cdna4

TOKEN_MASK = gl.constexpr(routing.TOKEN_MASK)
"""Bits of a sorted_token_id that hold the token."""
_NAN = gl.constexpr(255)


@aggregate
class Output:
    """Where a tile's outputs go.

    out: [P, columns]: bf16, or codes of an MX format (FORMAT, with scale [P, columns / 32]), or in
    stage 2 the options' type; float32 [T, columns] if ATOMIC. p0, p1: of the ACTIVATION, which is
    "" in stage 2. EMAX, THRESHOLD: of the scale rule.
    """

    out: gl.tensor
    scale: gl.tensor
    columns: gl.tensor
    p0: gl.tensor
    p1: gl.tensor
    FORMAT: gl.constexpr
    ACTIVATION: gl.constexpr
    ATOMIC: gl.constexpr
    EMAX: gl.constexpr
    THRESHOLD: gl.constexpr


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
    if mfma_rows(FORMAT) == 32:  # half, row, fragment, wave, unit, row of the fragment
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
    values = gated_activation(gate, up, output.p0, output.p1, output.ACTIVATION)
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
    offsets = (rows.index - first)[:, None] * blocks + block[None, :]
    mask = rows.real[:, None] & (block < blocks)[None, :]
    cdna4.buffer_store(byte.to(gl.uint8), output.scale + start, offsets, mask=mask)
