"""Kernels that finish an MoE GEMM after split-K: sum the splits, run the epilogue.

Partial sums are float32 [split_k, partial_rows, columns of the stage's weights]; the splits are
added in ascending order.

Grid: one dimension, a program for each tile of [BLOCK_M sorted rows, BLOCK_N outputs] that the plan
can need; programs without a tile return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import (
    GatedActivation,
    GateUpBias,
    Output,
    down_epilogue,
    gate_up_epilogue,
    up_epilogue,
)
from .tiles import Columns, Partials, gate_up_row, open_columns, open_rows, schedule, sum_partials

RUN_TIME_VALUES = (
    "num_tokens",
    "num_experts",
    "num_n_blocks",
    "gate_up_group",
    "routing_block_m",
    "split_k",
    "partial_rows",
    "p0",
    "p1",
    "p2",
)
"""Numbers that Triton must not specialise on: they may be 1 or odd, which would compile one binary
per model."""


@triton.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_gate_up_finish_kernel(
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
    gate_up_group,
    routing_block_m,
    split_k,
    partial_rows,
    p0,
    p1,
    p2,
    GATE_UP_GROUP: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1 after split-K: sum the splits in order, then run `gate_up_epilogue`.

    GATE_UP_GROUP: None if partial sums are all gates, then all ups. Otherwise they have the order
    of the weight rows, and this is `gate_up_group` as a constant.
    """
    num_features = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, num_features, 1, BLOCK_M, BLOCK_N, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    features = open_columns(tile_n, num_features, BLOCK_N)
    partials = Partials(partial_ptr, partial_rows, 2 * num_features)
    if GATE_UP_GROUP is None:
        group, gates, distance = gate_up_group, features, num_features
    else:
        group, distance = GATE_UP_GROUP, GATE_UP_GROUP
        index = gate_up_row(features.index, GATE_UP_GROUP)
        gates = Columns(features.first, index, features.mask, num_features)
    gate = sum_partials(partials, split_k, rows, gates)
    up = sum_partials(partials, split_k, rows, gates, distance)
    gate_up_epilogue(
        Output(out_ptr, out_scale_ptr, OUT_FORMAT, EMAX, THRESHOLD),
        GatedActivation(ACTIVATION, p0, p1, p2),
        GateUpBias(bias_ptr, expert, group),
        sorted_weights_ptr,
        (gate, up),
        rows,
        features,
    )


@triton.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_up_finish_kernel(
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
    split_k,
    partial_rows,
    OUT_FORMAT: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1 without a gate, after split-K: sum the splits in order, then run `up_epilogue`."""
    num_features = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, num_features, 1, BLOCK_M, BLOCK_N, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    features = open_columns(tile_n, num_features, BLOCK_N)
    up = sum_partials(Partials(partial_ptr, partial_rows, num_features), split_k, rows, features)
    up_epilogue(
        Output(out_ptr, out_scale_ptr, OUT_FORMAT, EMAX, THRESHOLD),
        bias_ptr,
        expert,
        sorted_weights_ptr,
        up,
        rows,
        features,
    )


@triton.jit(do_not_specialize=RUN_TIME_VALUES)
def _moe_down_finish_kernel(
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
    split_k,
    partial_rows,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 2 after split-K: sum the splits in order, then run `down_epilogue`."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, num_columns, 1, BLOCK_M, BLOCK_N, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    columns = open_columns(tile_n, num_columns, BLOCK_N)
    acc = sum_partials(Partials(partial_ptr, partial_rows, num_columns), split_k, rows, columns)
    down_epilogue(out_ptr, acc, rows, columns, bias_ptr, expert, sorted_weights_ptr, ATOMIC)
