"""Kernels that finish a GEMM of the cdna4 backend after split-K: sum the splits, run the epilogue.

Partial sums are float32 [k_splits, rows, weight rows]; the splits are added in ascending order.
Stage 1 has weight rows in INTERLEAVED_16 order: 16 gates, 16 ups, and so on.

Grid: one dimension, a program for each tile of [BLOCK_M sorted rows, BLOCK_N outputs] that the plan
can need; programs without a tile return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....routing import TOKEN_MASK
from ...common.activation import gated_activation
from ...common.mx_codec import quantize_tile

_TOKEN_MASK = tl.constexpr(TOKEN_MASK)

RUN_TIME_VALUES = (
    "num_tokens",
    "num_experts",
    "num_n_blocks",
    "routing_block_m",
    "k_splits",
    "partial_rows",
    "p0",
    "p1",
)
"""Numbers that Triton must not specialise on, as in `decode`."""


@triton.jit
def _open_tile(num_valid_ptr, num_outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row block and first output of this program; the block is −1 without a tile."""
    num_tiles_n = tl.cdiv(num_outputs, BLOCK_N)
    block = tl.program_id(0) // num_tiles_n
    exists = block < tl.cdiv(tl.load(num_valid_ptr), BLOCK_M)
    return tl.where(exists, block, -1), tl.program_id(0) % num_tiles_n * BLOCK_N


@triton.jit
def _sum_splits(partial_ptr, k_splits, partial_rows, width, rows, columns, mask):
    """Sum of the splits, float32 [rows, columns]; 0 where masked."""
    total = tl.zeros(mask.shape, tl.float32)
    for split in range(k_splits):
        row = tl.cast(split, tl.int64) * partial_rows + rows
        pointers = partial_ptr + row[:, None] * width + columns[None, :]
        total += tl.load(pointers, mask=mask, other=0.0)
    return total


@triton.jit
def _store(ptr, values, rows, first, width, real):
    """Store values [rows, columns] to columns `first` and on of a matrix of `width` columns."""
    columns = first + tl.arange(0, values.shape[1])
    tl.store(
        ptr + rows.to(tl.int64)[:, None] * width + columns[None, :],
        values,
        mask=real[:, None] & (columns < width)[None, :],
    )


@triton.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_gate_up_finish_cdna4_kernel(
    out_ptr,
    out_scale_ptr,
    partial_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_n_blocks,
    routing_block_m,
    k_splits,
    partial_rows,
    p0,
    p1,
    ACTIVATION: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INF_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1: routing weight, bias and activation; store bfloat16 or an MX format."""
    num_features = num_n_blocks * 32
    block, first = _open_tile(num_valid_ptr, num_features, BLOCK_M, BLOCK_N)
    if block < 0:
        return
    expert = tl.load(block_expert_ids_ptr + block * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (tl.load(sorted_token_ids_ptr + rows) & _TOKEN_MASK) < num_tokens
    features = first + tl.arange(0, BLOCK_N)
    inside = features < num_features
    mask = real[:, None] & inside[None, :]
    gates = features // 16 * 32 + features % 16
    width = 2 * num_features
    gate = _sum_splits(partial_ptr, k_splits, partial_rows, width, rows, gates, mask)
    up = _sum_splits(partial_ptr, k_splits, partial_rows, width, rows, gates + 16, mask)
    if sorted_weights_ptr is not None:
        weight = tl.load(sorted_weights_ptr + rows)[:, None]
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * width
        gate += tl.load(bias_ptr + gates, mask=inside, other=0.0)[None, :]
        up += tl.load(bias_ptr + gates + 16, mask=inside, other=0.0)[None, :]
    values = gated_activation(gate, up, p0, p1, ACTIVATION).to(tl.bfloat16)
    if OUT_FORMAT == "bf16":
        _store(out_ptr, values, rows, first, num_features, real)
    else:
        PACK: tl.constexpr = 2 if OUT_FORMAT == "e2m1" else 1
        codes, scale = quantize_tile(values.to(tl.float32), OUT_FORMAT, EMAX, THRESHOLD, INF_BYTE)
        _store(out_ptr, codes, rows, first // PACK, num_features // PACK, real)
        _store(out_scale_ptr, scale, rows, first // 32, num_n_blocks, real)


@triton.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_down_finish_cdna4_kernel(
    out_ptr,
    partial_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_n_blocks,
    routing_block_m,
    k_splits,
    partial_rows,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 2: bias and routing weight; store by sorted row, or add to tokens (ATOMIC)."""
    num_outputs = num_n_blocks * 32
    block, first = _open_tile(num_valid_ptr, num_outputs, BLOCK_M, BLOCK_N)
    if block < 0:
        return
    expert = tl.load(block_expert_ids_ptr + block * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(sorted_token_ids_ptr + rows) & _TOKEN_MASK
    real = token < num_tokens
    outputs = first + tl.arange(0, BLOCK_N)
    inside = outputs < num_outputs
    mask = real[:, None] & inside[None, :]
    sums = _sum_splits(partial_ptr, k_splits, partial_rows, num_outputs, rows, outputs, mask)
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * num_outputs
        sums += tl.load(bias_ptr + outputs, mask=inside, other=0.0)[None, :]
    if sorted_weights_ptr is not None:
        sums *= tl.load(sorted_weights_ptr + rows)[:, None]
    if ATOMIC:
        pointers = out_ptr + token.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        tl.atomic_add(pointers, sums, mask=mask, sem="relaxed")
    else:
        _store(out_ptr, sums.to(out_ptr.dtype.element_ty), rows, first, num_outputs, real)
