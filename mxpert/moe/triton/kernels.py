"""The portable MoE GEMMs.

Grid: one dimension, a program for each split of each tile of [BLOCK_M sorted rows, BLOCK_N
columns]; `schedule` maps programs to tiles. The host launches as many programs as the plan can
need. Programs without a tile, and those whose rows are all padding, return at once. Programs write
disjoint tiles, except for the additions of ATOMIC.

With split-K (partial_ptr is given) a GEMM stores float32 partial sums instead of running its
epilogue, and a kernel of `common.moe.finish` sums them in order.

Every size is a run-time value. Widths are passed as counts of 32-element blocks and multiplied by
32 here, which tells the compiler their divisibility without one binary per value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..epilogue import (
    GatedActivation,
    GateUpBias,
    Output,
    down_epilogue,
    gate_up_epilogue,
    up_epilogue,
)
from ..tiles import Partials, open_columns, open_rows, schedule, store_gate_and_up, store_partial
from .loads import Inputs, WeightRows, Weights, WeightStrides, k_range
from .tiles import gate_up_rows, multiply, split_gate_up

RUN_TIME_VALUES = (
    "num_tokens",
    "num_experts",
    "num_k_blocks",
    "num_n_blocks",
    "gate_up_group",
    "routing_block_m",
    "split_k",
    "k_blocks_per_split",
    "partial_rows",
    "p0",
    "p1",
    "p2",
    "x_scale_stride",
    "w_scale_stride_e",
    "w_scale_stride_n",
)
"""Numbers that Triton must not specialise on: they may be 1 or odd, which would compile one binary
per model."""


@triton.jit(
    do_not_specialize=RUN_TIME_VALUES, do_not_specialize_on_alignment=("x_scale_ptr", "w_scale_ptr")
)
def _moe_gate_up_kernel(
    out_ptr,
    out_scale_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_row_scale_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_k_blocks,
    num_n_blocks,
    gate_up_group,
    routing_block_m,
    split_k,
    k_blocks_per_split,
    partial_rows,
    p0,
    p1,
    p2,
    x_stride,
    x_scale_stride,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Stage 1: gather tokens, multiply by gate and up weights, run `gate_up_epilogue`."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, split = schedule(num_valid_ptr, num_columns, split_k, BLOCK_M, BLOCK_N, GROUP_M)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(rows.mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    x = Inputs(x_ptr, x_scale_ptr, x_row_scale_ptr, x_stride, x_scale_stride, rows.token, rows.mask)
    strides = WeightStrides(w_stride_e, w_stride_n, w_scale_stride_e, w_scale_stride_n)
    w = Weights(w_ptr, w_scale_ptr, w_zero_ptr, w_row_scale_ptr, 2 * num_columns, strides)
    both_rows, both_features = gate_up_rows(tile_n, gate_up_group, BLOCK_N)  # [2 * BLOCK_N] each
    k = k_range(split, k_blocks_per_split, num_k_blocks)
    w_rows = WeightRows(expert, both_rows, both_features < num_columns)
    acc = multiply(x, w, w_rows, k, X_FORMAT, W_FORMAT, BLOCK_K, PREFETCH_SCALES, STREAM=STREAM)
    both = split_gate_up(acc)  # gate and up, [BLOCK_M, BLOCK_N] float32 each
    features = open_columns(tile_n, num_columns, BLOCK_N)
    if partial_ptr is not None:
        partials = Partials(partial_ptr, partial_rows, 2 * num_columns)
        store_gate_and_up(partials, both, split, rows, features, num_columns)
    else:
        gate_up_epilogue(
            Output(out_ptr, out_scale_ptr, OUT_FORMAT, EMAX, THRESHOLD),
            GatedActivation(ACTIVATION, p0, p1, p2),
            GateUpBias(bias_ptr, expert, gate_up_group),
            sorted_weights_ptr,
            both,
            rows,
            features,
        )


@triton.jit(
    do_not_specialize=RUN_TIME_VALUES, do_not_specialize_on_alignment=("x_scale_ptr", "w_scale_ptr")
)
def _moe_up_kernel(
    out_ptr,
    out_scale_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_row_scale_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_k_blocks,
    num_n_blocks,
    routing_block_m,
    split_k,
    k_blocks_per_split,
    partial_rows,
    x_stride,
    x_scale_stride,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Stage 1 without a gate: gather tokens, multiply by up weights, run `up_epilogue`."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, split = schedule(num_valid_ptr, num_columns, split_k, BLOCK_M, BLOCK_N, GROUP_M)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(rows.mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    features = open_columns(tile_n, num_columns, BLOCK_N)
    x = Inputs(x_ptr, x_scale_ptr, x_row_scale_ptr, x_stride, x_scale_stride, rows.token, rows.mask)
    strides = WeightStrides(w_stride_e, w_stride_n, w_scale_stride_e, w_scale_stride_n)
    w = Weights(w_ptr, w_scale_ptr, w_zero_ptr, w_row_scale_ptr, num_columns, strides)
    w_rows = WeightRows(expert, features.index, features.mask)
    k = k_range(split, k_blocks_per_split, num_k_blocks)
    up = multiply(x, w, w_rows, k, X_FORMAT, W_FORMAT, BLOCK_K, PREFETCH_SCALES, STREAM=STREAM)
    if partial_ptr is not None:
        store_partial(Partials(partial_ptr, partial_rows, num_columns), up, split, rows, features)
    else:
        up_epilogue(
            Output(out_ptr, out_scale_ptr, OUT_FORMAT, EMAX, THRESHOLD),
            bias_ptr,
            expert,
            sorted_weights_ptr,
            up,
            rows,
            features,
        )


@triton.jit(
    do_not_specialize=RUN_TIME_VALUES, do_not_specialize_on_alignment=("x_scale_ptr", "w_scale_ptr")
)
def _moe_down_kernel(
    out_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    w_ptr,
    w_scale_ptr,
    w_zero_ptr,
    w_row_scale_ptr,
    bias_ptr,
    sorted_token_ids_ptr,
    sorted_weights_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_experts,
    num_k_blocks,
    num_n_blocks,
    routing_block_m,
    split_k,
    k_blocks_per_split,
    partial_rows,
    x_stride,
    x_scale_stride,
    w_stride_e,
    w_stride_n,
    w_scale_stride_e,
    w_scale_stride_n,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Stage 2: multiply sorted rows by the down projection, then run `down_epilogue`."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, split = schedule(num_valid_ptr, num_columns, split_k, BLOCK_M, BLOCK_N, GROUP_M)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(rows.mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    columns = open_columns(tile_n, num_columns, BLOCK_N)
    x = Inputs(x_ptr, x_scale_ptr, x_row_scale_ptr, x_stride, x_scale_stride, rows.index, rows.mask)
    strides = WeightStrides(w_stride_e, w_stride_n, w_scale_stride_e, w_scale_stride_n)
    w = Weights(w_ptr, w_scale_ptr, w_zero_ptr, w_row_scale_ptr, num_columns, strides)
    w_rows = WeightRows(expert, columns.index, columns.mask)
    k = k_range(split, k_blocks_per_split, num_k_blocks)
    acc = multiply(x, w, w_rows, k, X_FORMAT, W_FORMAT, BLOCK_K, PREFETCH_SCALES, STREAM=STREAM)
    if partial_ptr is not None:
        store_partial(Partials(partial_ptr, partial_rows, num_columns), acc, split, rows, columns)
    else:
        down_epilogue(out_ptr, acc, rows, columns, bias_ptr, expert, sorted_weights_ptr, ATOMIC)
