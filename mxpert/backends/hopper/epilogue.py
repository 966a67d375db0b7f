"""Epilogues of the Hopper GEMMs: factors, bias, activation, routing weight, masked stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import feature_layout, gate_and_up, row_pair_layout, row_pairs

ACTIVATION_KINDS = {"silu": 1, "swiglu": 2, "clamped_silu": 3, "situ_v2": 4}
"""EPILOGUE values of stage 1; 0 is stage 2 (plain rows)."""

_TOKEN_MASK = gl.constexpr((1 << 24) - 1)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@gluon.jit
def activate(gate, up, first, second, KIND: gl.constexpr):
    """The gated activation; formulas in `mxpert.problem`, parameters at run time."""
    if KIND == 1:
        return gate * _sigmoid(gate) * up
    elif KIND == 2:
        gate = gl.minimum(gate, second)
        up = gl.minimum(gl.maximum(up, -second), second)
        return gate * _sigmoid(first * gate) * (up + 1.0)
    elif KIND == 3:
        gate = gl.minimum(gate, first)
        up = gl.minimum(gl.maximum(up, -first), first)
        return gate * _sigmoid(gate) * up
    else:
        gl.static_assert(KIND == 4, "unknown activation")
        return first * _tanh(gate / first) * _sigmoid(gate) * second * _tanh(up / second)


@gluon.jit
def _row_factor(reference):
    """2^(reference - 127 - 6) from its bits; layouts are packed only where reference >= 7."""
    return ((reference.to(gl.int32) - 6) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_rows(pointer, rows, limit, HAS: gl.constexpr):
    """Per-row values (bias), zero past the end or where there is none."""
    if HAS:
        return gl.load(pointer + rows, mask=rows < limit, other=0.0)
    else:
        return gl.zeros(rows.shape, gl.float32, rows.type.layout)


@gluon.jit
def store_rows(accumulator, out, reference, bias, x_scale, routed_weights, sorted_token_ids,
               expert, first_row, first_output, num_tokens, num_outputs, padded_outputs,
               HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr, STORE: gl.constexpr):
    """Stage 2: ``weight * (accumulator * factors + bias)`` into rows [P, H]; padding is dropped.

    accumulator [ROWS, TOKENS] in fragment order; STORE: the layout that stores, or None.
    """
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    LAYOUT: gl.constexpr = row_pair_layout(ROWS // 16, TOKENS)
    value = row_pairs(accumulator, LAYOUT)
    row = first_output + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    token_row = first_row + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    factor = _row_factor(gl.load(reference + expert * padded_outputs + row))
    shift = _load_rows(bias + expert * num_outputs, row, num_outputs, HAS_BIAS)
    valid = (gl.load(sorted_token_ids + token_row) & _TOKEN_MASK) < num_tokens
    scale = gl.load(x_scale + token_row, mask=valid, other=0.0)
    value = value * factor[:, None] * scale[None, :] + shift[:, None]
    if WEIGHTED:
        value = value * gl.load(routed_weights + token_row, mask=valid, other=0.0)[None, :]
    _store(value, out, sorted_token_ids, first_row, first_output, num_tokens, num_outputs, STORE)


@gluon.jit
def store_features(accumulator, out, reference, bias, x_scale, routed_weights, sorted_token_ids,
                   expert, first_row, first_output, num_tokens, num_outputs, padded_outputs,
                   param_first, param_second, HAS_BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
                   KIND: gl.constexpr, STORE: gl.constexpr):
    """Stage 1: activation of interleaved gate and up rows into the intermediate [P, F] (bf16).

    accumulator [ROWS, TOKENS]; outputs count features, two weight rows each.
    """
    ROWS: gl.constexpr = accumulator.shape[0]
    TOKENS: gl.constexpr = accumulator.shape[1]
    LAYOUT: gl.constexpr = feature_layout(ROWS // 16, TOKENS)
    gate, up = gate_and_up(accumulator, LAYOUT)
    feature = first_output + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, LAYOUT))
    token_row = first_row + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    row = reference + expert * padded_outputs + 2 * feature
    gate_factor = _row_factor(gl.load(row))
    up_factor = _row_factor(gl.load(row + 1))
    bias += expert * num_outputs * 2
    gate_bias = _load_rows(bias, 2 * feature, 2 * num_outputs, HAS_BIAS)
    up_bias = _load_rows(bias, 2 * feature + 1, 2 * num_outputs, HAS_BIAS)
    valid = (gl.load(sorted_token_ids + token_row) & _TOKEN_MASK) < num_tokens
    scale = gl.load(x_scale + token_row, mask=valid, other=0.0)
    if WEIGHTED:
        scale = scale * gl.load(routed_weights + token_row, mask=valid, other=0.0)
    gate = gate * gate_factor[:, None] * scale[None, :] + gate_bias[:, None]
    up = up * up_factor[:, None] * scale[None, :] + up_bias[:, None]
    value = activate(gate, up, param_first, param_second, KIND)
    _store(value, out, sorted_token_ids, first_row, first_output, num_tokens, num_outputs, STORE)


@gluon.jit
def _store(value, out, sorted_token_ids, first_row, first_output, num_tokens, num_outputs,
           STORE: gl.constexpr):
    """value [OUTPUTS, TOKENS] → out[row, output], rows of real tokens only."""
    OUTPUTS: gl.constexpr = value.shape[0]
    TOKENS: gl.constexpr = value.shape[1]
    value = value.to(out.dtype.element_ty)
    if STORE is not None:
        value = gl.convert_layout(value, STORE)
    LAYOUT: gl.constexpr = value.type.layout
    output = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    token_row = first_row + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    valid = (gl.load(sorted_token_ids + token_row) & _TOKEN_MASK) < num_tokens
    pointer = out + token_row.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(pointer, value, mask=valid[None, :] & (output < num_outputs)[:, None])
