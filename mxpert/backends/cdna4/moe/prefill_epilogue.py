"""Epilogues of the prefill kernel: bias, routing weight, activation, requantisation, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.activation import gated_activation
from ...common.compat import aggregate
from ...common.mx_codec import e8m0_scale, encode, inverse_scale, magnitude_bits
from .prefill_layouts import (
    column_of_part,
    mfma_layout,
    mfma_rows,
    row_of_half,
    warps_n,
    weight_parts,
)

cdna4 = gl.amd.cdna4

_TOKEN_MASK = gl.constexpr((1 << 24) - 1)
"""Bits of a sorted_token_id that hold the token."""
_NAN = gl.constexpr(255)


@aggregate
class Output:
    """Where a tile's outputs go.

    out: [P, columns]: bf16, or codes of an MX format (FORMAT, with scale [P, columns / 32]), or in
    stage 2 the options' type; float32 [T, columns] if ATOMIC. p0, p1: of the ACTIVATION, which is
    "" in stage 2. EMAX, THRESHOLD, INF_BYTE: of the scale rule.
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
    INF_BYTE: gl.constexpr


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
    """Rows of half a tile, [BLOCK_M / 2] each: sorted row, token, whether it is no padding."""

    index: gl.tensor
    token: gl.tensor
    real: gl.tensor


@gluon.jit
def _rows(terms, tile_m, variant, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    BLOCK_M: gl.constexpr = variant.BLOCK_M
    place = gl.arange(0, BLOCK_M // 2, LAYOUT)
    place = row_of_half(place, BLOCK_M, variant.FORMAT, HALF)
    index = tile_m * BLOCK_M + place
    token = gl.load(terms.sorted_token_ids + index) & _TOKEN_MASK
    return Rows(index=index, token=token, real=token < terms.num_tokens)


@gluon.jit
def halves(total, variant):
    """Split the sums of a part, [BLOCK_M, 256 / parts], into those of each half of the rows.

    Half h of part p is quadrant 2 p + h. Epilogues need fewer registers for a quadrant at a time.
    """
    LAYOUT: gl.constexpr = mfma_layout(variant.BLOCK_M, variant.FORMAT)
    COLUMNS: gl.constexpr = total.shape[1]
    total = gl.permute(gl.reshape(total, (2, variant.BLOCK_M // 2, COLUMNS)), (1, 2, 0))
    first, second = gl.split(total)
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def _scale_rows(total, rows, terms, ACTIVATION: gl.constexpr):
    """Multiply by the rows' scales and, ahead of an activation, by their routing weights."""
    if terms.HAS_ROW_SCALE:
        scaled = rows.token if ACTIVATION != "" else rows.index
        total = total * gl.load(terms.row_scale + scaled, mask=rows.real, other=0.0)[:, None]
    if terms.HAS_WEIGHTS and ACTIVATION != "":
        total = total * gl.load(terms.weights + rows.index, mask=rows.real, other=0.0)[:, None]
    return total


@gluon.jit
def store_outputs(total, terms, output, tile_m, tile_n, variant, Q: gl.constexpr):
    """Stage 2: store ``weight * (sum + bias)`` of quadrant Q by sorted row, or add it by token."""
    LAYOUT: gl.constexpr = mfma_layout(variant.BLOCK_M, variant.FORMAT)
    rows = _rows(terms, tile_m, variant, Q % 2, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    column = tile_n * 256 + column_of_part(column, variant.BLOCK_M, variant.FORMAT, Q // 2)
    inside = column < output.columns
    total = _scale_rows(total, rows, terms, "")
    if terms.HAS_BIAS:
        total = total + gl.load(terms.bias + column, mask=inside, other=0.0)[None, :]
    if terms.HAS_WEIGHTS:
        total = total * gl.load(terms.weights + rows.index, mask=rows.real, other=0.0)[:, None]
    mask = rows.real[:, None] & inside[None, :]
    if output.ATOMIC:
        offsets = rows.token[:, None] * output.columns + column[None, :]
        cdna4.buffer_atomic_add(output.out, offsets, total, mask=mask, sem="relaxed")
    else:
        first = tile_m * variant.BLOCK_M
        out = output.out + first.to(gl.int64) * output.columns
        offsets = (rows.index - first)[:, None] * output.columns + column[None, :]
        cdna4.buffer_store(total.to(output.out.dtype.element_ty), out, offsets, mask=mask)


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
def _features(total, variant):
    """Gate and up of a quadrant [BLOCK_M / 2, 256 / parts], in blocks [BLOCK_M / 2, waves, 32].

    A unit of 64 weight rows has 16 gates, 16 ups, 16 gates, 16 ups: one of each fragment of a
    wave. So each thread has the gate and the up of its features.
    """
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M)
    ROWS: gl.constexpr = variant.BLOCK_M // 2
    if mfma_rows(variant.FORMAT) == 32:  # pair, wave, gate or up, feature
        split = gl.permute(gl.reshape(total, (ROWS, 2, WAVES, 2, 16)), (0, 2, 1, 4, 3))
    else:  # pair, gate or up, wave, feature
        split = gl.permute(gl.reshape(total, (ROWS, 2, 2, WAVES, 16)), (0, 3, 1, 4, 2))
    return gl.split(gl.reshape(split, (ROWS, WAVES, 32, 2)))


@gluon.jit
def _blocks(tile_n, BLOCK_M: gl.constexpr, PART: gl.constexpr, LAYOUT: gl.constexpr):
    """Number of each wave's block of 32 features within a row."""
    wave = gl.arange(0, warps_n(BLOCK_M), LAYOUT)
    return tile_n * 4 + wave * weight_parts(BLOCK_M) + PART


@gluon.jit
def store_features(total, terms, output, tile_m, tile_n, variant, Q: gl.constexpr):
    """Stage 1: apply routing weight, bias and activation to quadrant Q; store bf16 or MX rows."""
    FLAT: gl.constexpr = gl.SliceLayout(1, mfma_layout(variant.BLOCK_M, variant.FORMAT))
    total = _scale_rows(total, _rows(terms, tile_m, variant, Q % 2, FLAT), terms, output.ACTIVATION)
    gate, up = _features(total, variant)
    LAYOUT: gl.constexpr = gate.type.layout
    block = _blocks(tile_n, variant.BLOCK_M, Q // 2, _waves_of(LAYOUT))[None, :, None]
    feature = block * 32 + gl.arange(0, 32, _places_of(LAYOUT))[None, None, :]
    inside = feature < output.columns  # [1, waves, 32]
    if terms.HAS_BIAS:
        gate_row = feature // 16 * 32 + feature % 16
        gate = gate + gl.load(terms.bias + gate_row, mask=inside, other=0.0)
        up = up + gl.load(terms.bias + gate_row + 16, mask=inside, other=0.0)
    values = gated_activation(gate, up, output.p0, output.p1, output.ACTIVATION)
    # Always round to bf16: stage 1 with MX output equals bf16 stage 1 followed by `quantize`.
    values = values.to(gl.bfloat16)
    if output.FORMAT == "bf16":
        rows = _rows(terms, tile_m, variant, Q % 2, _rows_of(LAYOUT))
        first = tile_m * variant.BLOCK_M
        offsets = (rows.index - first)[:, None, None] * output.columns + feature
        out = output.out + first.to(gl.int64) * output.columns
        cdna4.buffer_store(values, out, offsets, mask=rows.real[:, None, None] & inside)
    else:
        _store_mx(values.to(gl.float32), terms, output, tile_m, tile_n, variant, Q)


@gluon.jit
def _store_mx(values, terms, output, tile_m, tile_n, variant, Q: gl.constexpr):
    """Quantise blocks of 32 features, [BLOCK_M / 2, waves, 32]; store codes and scales."""
    WAVES: gl.constexpr = warps_n(variant.BLOCK_M)
    BYTES: gl.constexpr = 16 if output.FORMAT == "e2m1" else 32
    amax = gl.max(magnitude_bits(values), axis=2)
    byte = e8m0_scale(amax, output.EMAX, output.THRESHOLD, output.INF_BYTE)
    wide = gl.expand_dims(byte, 2)  # [BLOCK_M / 2, waves, 1]
    codes = encode(values * inverse_scale(wide), wide == _NAN, output.FORMAT)
    if output.FORMAT == "e2m1":
        low, high = gl.split(gl.reshape(codes, (variant.BLOCK_M // 2, WAVES, 16, 2)))
        codes = low + (high << 4)
    LAYOUT: gl.constexpr = codes.type.layout
    rows = _rows(terms, tile_m, variant, Q % 2, _rows_of(LAYOUT))
    block = _blocks(tile_n, variant.BLOCK_M, Q // 2, _waves_of(LAYOUT))
    first, blocks = tile_m * variant.BLOCK_M, output.columns // 32
    start = first.to(gl.int64) * blocks
    index = (rows.index - first)[:, None, None] * blocks + block[None, :, None]
    mask = rows.real[:, None, None] & (block < blocks)[None, :, None]
    offsets = index * BYTES + gl.arange(0, BYTES, _places_of(LAYOUT))[None, None, :]
    cdna4.buffer_store(codes.to(gl.uint8), output.out + start * BYTES, offsets, mask=mask)
    FLAT: gl.constexpr = byte.type.layout  # [BLOCK_M / 2, waves]
    rows = _rows(terms, tile_m, variant, Q % 2, gl.SliceLayout(1, FLAT))
    block = _blocks(tile_n, variant.BLOCK_M, Q // 2, gl.SliceLayout(0, FLAT))
    offsets = (rows.index - first)[:, None] * blocks + block[None, :]
    mask = rows.real[:, None] & (block < blocks)[None, :]
    cdna4.buffer_store(byte.to(gl.uint8), output.scale + start, offsets, mask=mask)
