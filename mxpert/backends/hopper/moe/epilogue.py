"""Epilogues of the Hopper MoE GEMMs: scales, bias, activation, routing weight, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...common.activation import gated_activation
from ...common.compat import async_store, barrier
from .weight_fragments import feature_layout, gate_and_up, row_pair_layout, row_pairs

ROWS = "rows"
"""KIND of stage 2's epilogue, which has no activation; in stage 1 KIND is the activation's name."""

_TOKEN_MASK = gl.constexpr((1 << 24) - 1)


@gluon.jit
def _row_factor(reference):
    """2^(reference - 127 - 6) as float32; HOPPER_FRAGMENT weights always have reference >= 7."""
    return ((reference.to(gl.int32) - 6) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_rows(pointer, rows, limit, HAS: gl.constexpr):
    """Load a bias value per row; 0 past the end or without a bias."""
    if HAS:
        return gl.load(pointer + rows, mask=rows < limit, other=0.0)
    else:
        LAYOUT: gl.constexpr = rows.type.layout
        return gl.zeros([rows.shape[0]], gl.float32, LAYOUT)


@gluon.constexpr_function
def output_layout(WARPS, TOKENS, KIND):
    """Register layout of the epilogue's outputs: row pairs (KIND "rows") or gated features."""
    return row_pair_layout(WARPS, TOKENS) if KIND == "rows" else feature_layout(WARPS, TOKENS)


@gluon.jit
def output_terms(
    reference,
    bias,
    expert,
    first_output,
    num_outputs,
    padded_rows,
    OUTPUTS: gl.constexpr,
    LAYOUT: gl.constexpr,
    KIND: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Load row references and biases of a tile's outputs (KIND "rows"), or of its gate and up rows.

    Raw values are returned; `finish` computes with them, so that nothing waits for the loads here.
    """
    output = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    reference += expert * padded_rows
    inside = output < num_outputs
    if KIND == "rows":
        rows = gl.load(reference + output, mask=inside, other=127)
        shift = _load_rows(bias + expert * num_outputs, output, num_outputs, HAS_BIAS)
        return rows, rows, shift, shift
    else:
        bias += expert * num_outputs * 2
        gate = 2 * output
        return (
            gl.load(reference + gate, mask=inside, other=127),
            gl.load(reference + gate + 1, mask=inside, other=127),
            _load_rows(bias, gate, 2 * num_outputs, HAS_BIAS),
            _load_rows(bias, gate + 1, 2 * num_outputs, HAS_BIAS),
        )


@gluon.constexpr_function
def one_each():
    """1-D layout of a tile's rows with one row per thread of a warpgroup."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def spread(tokens, LAYOUT: gl.constexpr):
    """Convert row terms from `one_each` to the layout that `finish` uses."""
    scale, weight = tokens
    ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    return gl.convert_layout(scale, ROWS), gl.convert_layout(weight, ROWS)


@gluon.jit
def token_terms(
    x_scale,
    routed_weights,
    first_row,
    TOKENS: gl.constexpr,
    LAYOUT: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    """Load scales and routing weights of a tile's sorted rows, in the 1-D LAYOUT.

    Values of padding rows are undefined.
    """
    row = first_row + gl.arange(0, TOKENS, layout=LAYOUT)
    scale = gl.load(x_scale + row)
    weight = gl.load(routed_weights + row) if WEIGHTED else scale
    return scale, weight


@gluon.jit
def row_ids(sorted_token_ids, first_row, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the sorted_token_ids of a tile's rows, in the 1-D LAYOUT."""
    return gl.load(sorted_token_ids + first_row + gl.arange(0, TOKENS, layout=LAYOUT))


@gluon.jit
def is_real(ids, num_tokens):
    """Mask of the sorted rows that belong to a token, not to padding."""
    return (ids & _TOKEN_MASK) < num_tokens


@gluon.jit
def finish(
    accumulator,
    outputs,
    tokens,
    first,
    second,
    LAYOUT: gl.constexpr,
    KIND: gl.constexpr,
    WEIGHTED: gl.constexpr,
):
    """Compute the outputs [OUTPUTS, TOKENS] in `LAYOUT` from the accumulator in fragment order.

    KIND "rows": ``weight * (sum * factors + bias)``. Otherwise the activation KIND of gate and
    up, whose inputs the routing weight multiplies.
    """
    gate_reference, up_reference, gate_bias, up_bias = outputs
    scale, weight = tokens
    gate_factor = _row_factor(gate_reference)
    up_factor = _row_factor(up_reference)
    if KIND == "rows":
        value = row_pairs(accumulator, LAYOUT)
        value = value * gate_factor[:, None] * scale[None, :] + gate_bias[:, None]
        if WEIGHTED:
            value = value * weight[None, :]
        return value
    else:
        gate, up = gate_and_up(accumulator, LAYOUT)
        if WEIGHTED:
            scale = scale * weight
        gate = gate * gate_factor[:, None] * scale[None, :] + gate_bias[:, None]
        up = up * up_factor[:, None] * scale[None, :] + up_bias[:, None]
        return gated_activation(gate, up, first, second, KIND)


@gluon.jit
def store_outputs(value, real, out, first_row, first_output, num_outputs):
    """Store value [OUTPUTS, TOKENS] to out[row, output] for rows that are `real`."""
    LAYOUT: gl.constexpr = value.type.layout
    output = first_output + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointer = out + row.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(
        pointer,
        value.to(out.dtype.element_ty),
        mask=real[None, :] & (output < num_outputs)[:, None],
    )


@gluon.jit
def _token_halves(value):
    """Split a value [OUTPUTS, TOKENS] into the first and the second half of the tokens."""
    OUTPUTS: gl.constexpr = value.shape[0]
    TOKENS: gl.constexpr = value.shape[1]
    return value.reshape([OUTPUTS, 2, TOKENS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _copy_out(value, out_desc, staging, first_row, first_output, PIECE: gl.constexpr):
    """Start the TMA store of value [OUTPUTS, rows of a piece] as piece number PIECE of a tile."""
    PIECES: gl.constexpr = staging.shape[0]
    if PIECE == 0 or PIECE >= PIECES:  # wait until TMA has read the previous data of this buffer
        tma.store_wait(0 if PIECE == 0 else PIECES - 1)
        barrier()  # only the thread that starts the copies can wait for them
    rows = staging.index(PIECE % PIECES)
    rows.store(value.to(out_desc.dtype).permute((1, 0)))
    fence_async_shared()
    async_store(out_desc, [first_row, first_output], rows)


@gluon.jit
def copy_outputs(value, out_desc, staging, first_row, first_output, PIECE: gl.constexpr):
    """Store value [OUTPUTS, TOKENS] to rows of `out` from first_row on, by TMA through `staging`.

    A piece holds the rows of one copy. PIECE: number of pieces of the same tile stored before.
    Padding rows are written, too. TMA clips outputs past the last one.
    """
    ROWS: gl.constexpr = staging.shape[1]
    COPIES: gl.constexpr = value.shape[1] // ROWS
    if COPIES == 1:
        _copy_out(value, out_desc, staging, first_row, first_output, PIECE)
    else:
        left, right = _token_halves(value)
        if COPIES == 2:
            _copy_out(left, out_desc, staging, first_row, first_output, PIECE)
            _copy_out(right, out_desc, staging, first_row + ROWS, first_output, PIECE + 1)
        else:
            gl.static_assert(COPIES == 4, "values of up to four pieces")
            first, second = _token_halves(left)
            third, fourth = _token_halves(right)
            _copy_out(first, out_desc, staging, first_row, first_output, PIECE)
            _copy_out(second, out_desc, staging, first_row + ROWS, first_output, PIECE + 1)
            _copy_out(third, out_desc, staging, first_row + 2 * ROWS, first_output, PIECE + 2)
            _copy_out(fourth, out_desc, staging, first_row + 3 * ROWS, first_output, PIECE + 3)
