"""Device code of activation and combine in training; each kernel reads and writes memory once.

Torch operations would move every value through memory in float32 several times. The activation
kernel moves 6 bytes per value in bfloat16, its backward 10 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...device.activation import (
    approximate_gelu,
    clamp_above,
    clamp_both,
    erf_gelu,
    gated_activation,
    sigmoid,
    tanh,
)


@triton.jit
def _swish_derivatives(gate, factor, alpha):
    """Derivatives of ``g σ(αg) · factor`` by g and by factor."""
    s = sigmoid(alpha * gate)
    return s * (1.0 + alpha * gate * (1.0 - s)) * factor, gate * s


@triton.jit
def _derivatives(gate, up, p0, p1, p2, ACTIVATION: tl.constexpr):
    """Derivatives of `gated_activation` by gate and by up; 0 where the value is clamped."""
    if ACTIVATION == "silu":
        by_gate, by_up = _swish_derivatives(gate, up, 1.0)
    elif ACTIVATION == "swiglu":  # p0 alpha, p1 limit, p2 beta or None for 1
        if p2 is None:
            beta: tl.constexpr = 1.0
        else:
            beta = p2
        by_gate, by_up = _swish_derivatives(clamp_above(gate, p1), clamp_both(up, p1) + beta, p0)
        by_gate *= (gate <= p1).to(tl.float32)
        by_up *= (tl.abs(up) <= p1).to(tl.float32)
    elif ACTIVATION == "clamped_silu":  # p0 limit
        by_gate, by_up = _swish_derivatives(clamp_above(gate, p0), clamp_both(up, p0), 1.0)
        by_gate *= (gate <= p0).to(tl.float32)
        by_up *= (tl.abs(up) <= p0).to(tl.float32)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        by_gate = (0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) + gate * density) * up
        by_up = erf_gelu(gate)
    elif ACTIVATION == "gelu_tanh":
        x = clamp_both(gate, 32.0)  # beyond it the slope is 0 or 1, and squares may overflow
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        by_gate, by_up = slope * up, approximate_gelu(gate)
    else:
        tl.static_assert(ACTIVATION == "situ_v2", "an activation that this backend knows")
        # p0 beta, p1 beta_up
        t = tanh(gate / p0)
        s = sigmoid(gate)
        u = tanh(up / p1)
        gated = p0 * t * s
        by_gate = ((1.0 - t * t) * s + gated * (1.0 - s)) * p1 * u
        by_up = gated * (1.0 - u * u)
    return by_gate, by_up


@triton.jit
def _tile(num_rows, width, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows (64-bit), columns and mask of this program's tile."""
    tiles = tl.cdiv(width, BLOCK_N)
    rows = tl.program_id(0) // tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    return rows.to(tl.int64)[:, None], columns[None, :], mask


@triton.jit
def _activate_rows_kernel(
    out_ptr,
    gate_up_ptr,
    num_rows,
    width,
    p0,
    p1,
    p2,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out [R, F] = act(gate, up)`` of rows gate_up [R, 2F].

    Grid: (tiles of [R, F],), one [BLOCK_R, BLOCK_N] tile per program.
    """
    rows, columns, mask = _tile(num_rows, width, BLOCK_R, BLOCK_N)
    source = gate_up_ptr + rows * (2 * width) + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_N]
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    values = gated_activation(gate, up, p0, p1, p2, ACTIVATION)
    tl.store(out_ptr + rows * width + columns, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activate_rows_backward_kernel(
    out_ptr,
    grad_ptr,
    gate_up_ptr,
    num_rows,
    width,
    p0,
    p1,
    p2,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of gate and up, out [R, 2F], from the gradient of the activation [R, F].

    Grid: (tiles of [R, F],), as `_activate_rows_kernel`.
    """
    rows, columns, mask = _tile(num_rows, width, BLOCK_R, BLOCK_N)
    offsets = rows * (2 * width) + columns
    gate = tl.load(gate_up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + offsets + width, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + rows * width + columns, mask=mask, other=0.0).to(tl.float32)
    by_gate, by_up = _derivatives(gate, up, p0, p1, p2, ACTIVATION)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, (grad * by_gate).to(dtype), mask=mask)
    tl.store(out_ptr + offsets + width, (grad * by_up).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "top_k"])
def _combine_rows_kernel(
    out_ptr, rows_ptr, row_ids_ptr, weights_ptr, num_rows, top_k, width, BLOCK_N: tl.constexpr
):
    """``out[t] = Σ_slot weights[t, slot] · rows[row_ids[t, slot]]`` in float32, in slot order.

    Ids at or beyond num_rows add nothing.

    Grid: (tokens · column tiles,), one token and BLOCK_N columns per program.
    """
    tiles = tl.cdiv(width, BLOCK_N)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < width
    total = tl.zeros((BLOCK_N,), tl.float32)
    for slot in range(top_k):
        row = tl.load(row_ids_ptr + token * top_k + slot)
        present = mask & (row < num_rows)
        values = tl.load(rows_ptr + row * width + columns, mask=present, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            values *= tl.load(weights_ptr + token * top_k + slot)
        total += values
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "top_k"])
def _combine_rows_backward_kernel(
    by_row_ptr,
    by_weight_ptr,
    grad_ptr,
    rows_ptr,
    row_ids_ptr,
    weights_ptr,
    num_rows,
    top_k,
    width,
    BLOCK_N: tl.constexpr,
):
    """Gradients of the rows, ``weight · grad``, and of the routing weights, ``Σ grad · row``.

    The gradient of a weight whose id is at or beyond num_rows is 0.

    Grid: (tokens · top_k,), one (token, slot) per program, which reads its row once.
    """
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids_ptr + pair)
    weight = tl.load(weights_ptr + pair)
    grad_ptr += pair // top_k * width
    products = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, width, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        mask = (columns < width) & (row < num_rows)
        grad = tl.load(grad_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(rows_ptr + row * width + columns, mask=mask, other=0.0)
        products += grad * values.to(tl.float32)
        tl.store(
            by_row_ptr + row * width + columns,
            (weight * grad).to(by_row_ptr.dtype.element_ty),
            mask=mask,
        )
    tl.store(by_weight_ptr + pair, tl.sum(products, axis=0))
