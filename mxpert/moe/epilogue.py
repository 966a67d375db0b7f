"""Epilogues of an MoE stage in portable Triton: bias, routing weight, activation, codes, stores.

The GEMM kernels and the kernels that finish a split-K GEMM call the same epilogue. Tiles and the
number of splits therefore do not change its arithmetic. Tiles are [BLOCK_M rows, BLOCK_N columns].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.activation import gated_activation, relu_squared
from ..device.mx_codec import quantize_tile
from .tiles import gate_up_row


class GatedActivation(NamedTuple):
    """Name and parameters of an activation, as `gated_activation` takes them."""

    name: tl.constexpr
    p0: tl.tensor
    p1: tl.tensor
    p2: tl.tensor | None


class GateUpBias(NamedTuple):
    """Float32 biases [E, 2F] or None, the expert, and the rows between a gate and its up row."""

    ptr: tl.tensor | None
    expert: tl.tensor
    group: tl.tensor | tl.constexpr


class Output(NamedTuple):
    """A contiguous matrix [P, N] to store: bf16, or codes and scales of an MX format.

    `format` is "bf16" or an element format. `emax` and `threshold` are the constants of
    its scale rule (`scale_rule_constants`).
    """

    ptr: tl.tensor
    scale_ptr: tl.tensor | None
    format: tl.constexpr
    emax: tl.constexpr
    threshold: tl.constexpr


@triton.jit
def store_quantized(out, values, rows, columns):
    """Quantise a float32 tile; store codes [P, N] (e2m1: [P, N/2]) and scales [P, N/32]."""
    BLOCK_N: tl.constexpr = values.shape[1]
    PACK: tl.constexpr = 2 if out.format == "e2m1" else 1
    # codes [BLOCK_M, BLOCK_N/PACK] uint8, scale [BLOCK_M, BLOCK_N/32] uint8 E8M0
    codes, scale = quantize_tile(values, out.format, out.emax, out.threshold)
    row = rows.index.to(tl.int64)[:, None]
    column = (columns.first // PACK + tl.arange(0, BLOCK_N // PACK))[None, :]
    width = columns.total // PACK
    tl.store(out.ptr + row * width + column, codes, mask=rows.mask[:, None] & (column < width))
    column = (columns.first // 32 + tl.arange(0, BLOCK_N // 32))[None, :]
    width = columns.total // 32
    tl.store(
        out.scale_ptr + row * width + column, scale, mask=rows.mask[:, None] & (column < width)
    )


@triton.jit
def gate_up_epilogue(out, activation, bias, sorted_weights_ptr, both, rows, features):
    """Apply routing weight and bias (if given) and the activation; store bf16 or an MX format.

    Args:
        out: Output. activation: GatedActivation. bias: GateUpBias.
        both: gate and up, float32 [BLOCK_M, BLOCK_N]. rows: Rows. features: Columns.
    """
    gate, up = both
    if sorted_weights_ptr is not None:
        weight = tl.load(sorted_weights_ptr + rows.index, mask=rows.mask, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if bias.ptr is not None:
        gate_rows = gate_up_row(features.index, bias.group)
        gate_ptrs = bias.ptr + bias.expert.to(tl.int64) * (2 * features.total) + gate_rows
        gate += tl.load(gate_ptrs, mask=features.mask, other=0.0)[None, :]
        up += tl.load(gate_ptrs + bias.group, mask=features.mask, other=0.0)[None, :]
    values = gated_activation(
        gate, up, activation.p0, activation.p1, activation.p2, activation.name
    )
    _store_features(out, values, rows, features)


@triton.jit
def up_epilogue(out, bias_ptr, expert, sorted_weights_ptr, up, rows, features):
    """Apply routing weight and bias (if given) and ReLU2; store bf16 or an MX format.

    Args:
        out: Output. bias_ptr: float32 [E, F] or None. up: float32 [BLOCK_M, BLOCK_N].
        rows: Rows. features: Columns.
    """
    if sorted_weights_ptr is not None:
        up *= tl.load(sorted_weights_ptr + rows.index, mask=rows.mask, other=0.0)[:, None]
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * features.total
        up += tl.load(bias_ptr + features.index, mask=features.mask, other=0.0)[None, :]
    _store_features(out, relu_squared(up), rows, features)


@triton.jit
def _store_features(out, values, rows, features):
    """Round float32 values to bf16 and store them so, or in an MX format."""
    # Always round to bf16: stage 1 with MX output equals bf16 stage 1 followed by `quantize`.
    values = values.to(tl.bfloat16)
    if out.format == "bf16":
        offsets = rows.index.to(tl.int64)[:, None] * features.total + features.index[None, :]
        tl.store(out.ptr + offsets, values, mask=rows.mask[:, None] & features.mask[None, :])
    else:
        store_quantized(out, values.to(tl.float32), rows, features)


@triton.jit
def down_epilogue(
    out_ptr, acc, rows, columns, bias_ptr, expert, sorted_weights_ptr, ATOMIC: tl.constexpr
):
    """Store ``weight * (acc + bias)`` by sorted row, or add it to float32 tokens (ATOMIC).

    Args:
        out_ptr: contiguous [P, N], or [T, N] if ATOMIC. acc: float32 [BLOCK_M, BLOCK_N].
        rows: Rows. columns: Columns. bias_ptr: float32 [E, N] or None.
    """
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * columns.total
        acc += tl.load(bias_ptr + columns.index, mask=columns.mask, other=0.0)[None, :]
    if sorted_weights_ptr is not None:
        acc *= tl.load(sorted_weights_ptr + rows.index, mask=rows.mask, other=0.0)[:, None]
    target_rows = rows.token if ATOMIC else rows.index
    offsets = target_rows.to(tl.int64)[:, None] * columns.total + columns.index[None, :]
    mask = rows.mask[:, None] & columns.mask[None, :]
    if ATOMIC:
        tl.atomic_add(out_ptr + offsets, acc, mask=mask, sem="relaxed")
    else:
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
