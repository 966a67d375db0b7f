"""Epilogues of the portable GEMMs: activation, requantisation to MX formats, stores, combine.

The GEMM kernels, the kernels that finish a split-K GEMM and Hopper's epilogues all call
`gated_activation`. Tiles and the number of splits therefore do not change the activation's
arithmetic. Tiles are [BLOCK_M rows, BLOCK_N columns].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...common.activation import gated_activation
from ...common.mx_codec import quantize_tile


@triton.jit
def store_quantized(
    qdata_ptr,
    scale_ptr,
    values,
    rows,
    row_mask,
    first_feature,
    num_features,
    FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INF_BYTE: tl.constexpr,
):
    """Quantise a tile; store codes [P, F] (e2m1: [P, F/2]) and scales [P, F/32], contiguous."""
    BLOCK_N: tl.constexpr = values.shape[1]
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    codes, scale = quantize_tile(values, FORMAT, EMAX, THRESHOLD, INF_BYTE)
    rows = rows.to(tl.int64)[:, None]
    columns = (first_feature // PACK + tl.arange(0, BLOCK_N // PACK))[None, :]
    tl.store(
        qdata_ptr + rows * (num_features // PACK) + columns,
        codes,
        mask=row_mask[:, None] & (columns < num_features // PACK),
    )
    columns = (first_feature // 32 + tl.arange(0, BLOCK_N // 32))[None, :]
    tl.store(
        scale_ptr + rows * (num_features // 32) + columns,
        scale,
        mask=row_mask[:, None] & (columns < num_features // 32),
    )


@triton.jit
def gate_up_row(feature, gate_up_group):
    """Weight row of a feature's gate; the up row is `gate_up_group` rows later in either order."""
    return feature // gate_up_group * (2 * gate_up_group) + feature % gate_up_group


@triton.jit
def finish_gate_up(
    h_ptr,
    h_scale_ptr,
    gate,
    up,
    bias_ptr,
    sorted_weights_ptr,
    expert,
    rows,
    row_mask,
    first_feature,
    num_features,
    gate_up_group,
    p0,
    p1,
    ACTIVATION: tl.constexpr,
    H_FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INF_BYTE: tl.constexpr,
):
    """Apply routing weight and bias (if given) and the activation; store bf16 or an MX format."""
    BLOCK_N: tl.constexpr = gate.shape[1]
    features = first_feature + tl.arange(0, BLOCK_N)
    feature_mask = features < num_features
    if sorted_weights_ptr is not None:
        weight = tl.load(sorted_weights_ptr + rows, mask=row_mask, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        gate_rows = gate_up_row(features, gate_up_group)
        bias_row_ptr = bias_ptr + expert.to(tl.int64) * (2 * num_features)
        gate += tl.load(bias_row_ptr + gate_rows, mask=feature_mask, other=0.0)[None, :]
        up += tl.load(bias_row_ptr + gate_rows + gate_up_group, mask=feature_mask, other=0.0)[
            None, :
        ]
    # Always round to bf16: stage 1 with MX output equals bf16 stage 1 followed by `quantize`.
    values = gated_activation(gate, up, p0, p1, ACTIVATION).to(tl.bfloat16)  # [BLOCK_M, BLOCK_N]
    if H_FORMAT == "bf16":
        offsets = rows.to(tl.int64)[:, None] * num_features + features[None, :]
        tl.store(h_ptr + offsets, values, mask=row_mask[:, None] & feature_mask[None, :])
    else:
        store_quantized(
            h_ptr,
            h_scale_ptr,
            values.to(tl.float32),
            rows,
            row_mask,
            first_feature,
            num_features,
            H_FORMAT,
            EMAX,
            THRESHOLD,
            INF_BYTE,
        )


@triton.jit
def finish_down(
    out_ptr,
    values,
    bias_ptr,
    sorted_weights_ptr,
    expert,
    rows,
    tokens,
    row_mask,
    first_column,
    num_columns,
    ATOMIC: tl.constexpr,
):
    """Store ``weight * (acc + bias)`` by sorted row, or add it to float32 tokens (ATOMIC)."""
    BLOCK_N: tl.constexpr = values.shape[1]
    columns = first_column + tl.arange(0, BLOCK_N)
    column_mask = columns < num_columns
    if bias_ptr is not None:
        bias_row_ptr = bias_ptr + expert.to(tl.int64) * num_columns
        values += tl.load(bias_row_ptr + columns, mask=column_mask, other=0.0)[None, :]
    if sorted_weights_ptr is not None:
        values *= tl.load(sorted_weights_ptr + rows, mask=row_mask, other=0.0)[:, None]
    target_rows = tokens if ATOMIC else rows
    offsets = target_rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    if ATOMIC:
        tl.atomic_add(out_ptr + offsets, values, mask=mask, sem="relaxed")
    else:
        tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty), mask=mask)
