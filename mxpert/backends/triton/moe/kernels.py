"""Device code of the two MoE GEMMs and of the kernels that finish them after split-K.

`tl.dot_scaled` multiplies MXFP4 weights natively on gfx950 and Blackwell. On Hopper it converts
them to bf16 in registers before wgmma. Tokens are the N dimension of wgmma, so a tile can have as
few as 16 rows. With MX activations the weight tile is therefore the left operand, and the
accumulator is transposed at the end. With bf16 activations the weight tile is the right operand:
Triton 3.6 transposes that product itself, and keeps the token loads asynchronous only in this form.

Every size is a run-time value. Widths are passed as counts of 32-element blocks and multiplied by
32 here, which tells the compiler their divisibility without one binary per value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import finish_down, finish_gate_up, gate_up_row

GEMM_SCALARS = (
    "num_tokens",
    "num_experts",
    "num_k_blocks",
    "num_n_blocks",
    "routing_block_m",
    "split_k",
    "k_blocks_per_split",
    "partial_rows",
    "x_scale_stride",
    "weight_scale_stride_e",
    "weight_scale_stride_n",
)
"""Integers that Triton must not specialise on: they may be 1 or odd, which would compile one binary
per model."""


@triton.jit
def schedule(num_valid_ptr, num_tiles_n, split_k, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Return row block, column tile and split of this program; the row block is −1 if it has none.

    The splits of a tile have neighbouring program ids. GROUP_M row blocks of the same column tile
    run together and share its weights in L2.
    """
    split = tl.program_id(0) % split_k
    tile = tl.program_id(0) // split_k
    num_tiles_m = tl.cdiv(tl.load(num_valid_ptr), BLOCK_M)
    group = tile // (GROUP_M * num_tiles_n)
    group_size = tl.maximum(tl.minimum(num_tiles_m - group * GROUP_M, GROUP_M), 1)
    place = tile % (GROUP_M * num_tiles_n)
    tile_m = tl.where(tile < num_tiles_m * num_tiles_n, group * GROUP_M + place % group_size, -1)
    return tile_m, place // group_size, split


@triton.jit
def open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M: tl.constexpr):
    """Sorted rows, their tokens and a mask of the valid (non-padding) ones, [BLOCK_M] each."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.load(sorted_token_ids_ptr + rows) & 0xFFFFFF
    return rows, tokens, tokens < num_tokens


@triton.jit
def load_scales(row_ptrs, row_mask, k_block, num_k_blocks, BLOCK_K: tl.constexpr):
    """Load E8M0 scales, [rows, BLOCK_K/32] uint8; 0 outside the matrix."""
    blocks = k_block + tl.arange(0, BLOCK_K // 32)
    return tl.load(
        row_ptrs[:, None] + blocks[None, :],
        other=0,
        mask=row_mask[:, None] & (blocks < num_k_blocks)[None, :],
    )


@triton.jit
def load_rows(
    row_ptrs, row_mask, k_block, num_k_blocks, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Load codes or bf16 values, [rows, BLOCK_K] (e2m1: [rows, BLOCK_K/2] uint8, two codes a byte).

    Elements outside the matrix are 0.
    """
    PER_BLOCK: tl.constexpr = 16 if FORMAT == "e2m1" else 32
    k = k_block * PER_BLOCK + tl.arange(0, BLOCK_K // 32 * PER_BLOCK)
    return tl.load(
        row_ptrs[:, None] + k[None, :],
        other=0,
        mask=row_mask[:, None] & (k < num_k_blocks * PER_BLOCK)[None, :],
    )


@triton.jit
def multiply_tile(
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    x_rows,
    x_mask,
    expert,
    weight_rows,
    weight_mask,
    x_stride,
    x_scale_stride,
    weight_stride_e,
    weight_stride_n,
    weight_scale_stride_e,
    weight_scale_stride_n,
    first_block,
    last_block,
    num_k_blocks,
    X_FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """``x[x_rows] @ w[expert, weight_rows].T`` over blocks `first_block` to `last_block` of K.

    Returns float32 [rows, weight rows]. Masked rows are not read and count as zeros.
    x_row_scale_ptr: one more factor for each row of x, or None.
    """
    tl.static_assert(BLOCK_K % 32 == 0, "BLOCK_K must hold whole blocks of 32")
    ROWS: tl.constexpr = x_rows.shape[0]
    WEIGHT_ROWS: tl.constexpr = weight_rows.shape[0]
    x_ptrs = x_ptr + x_rows.to(tl.int64) * x_stride
    weight_rows = weight_rows.to(tl.int64)
    w_ptrs = weight_ptr + expert.to(tl.int64) * weight_stride_e + weight_rows * weight_stride_n
    w_scale_ptrs = (
        weight_scale_ptr
        + expert.to(tl.int64) * weight_scale_stride_e
        + weight_rows * weight_scale_stride_n
    )
    STEP: tl.constexpr = BLOCK_K // 32
    # On NVIDIA scales are too narrow for asynchronous copies, so the pipeliner would load them in
    # the step that uses them. They are loaded one step ahead here. On AMD the pipeliner does that.
    AHEAD: tl.constexpr = STEP if PREFETCH_SCALES else 0
    w_scale = load_scales(w_scale_ptrs, weight_mask, first_block, num_k_blocks, BLOCK_K)
    if X_FORMAT == "bf16":
        acc = tl.zeros((ROWS, WEIGHT_ROWS), tl.float32)
        for k_block in range(first_block, last_block, STEP):
            # x [ROWS, BLOCK_K] bf16; w [WEIGHT_ROWS, BLOCK_K/2] uint8, two e2m1 codes a byte;
            # w_scale [WEIGHT_ROWS, STEP] uint8 E8M0
            x = load_rows(x_ptrs, x_mask, k_block, num_k_blocks, "bf16", BLOCK_K)
            w = load_rows(w_ptrs, weight_mask, k_block, num_k_blocks, "e2m1", BLOCK_K)
            next_w_scale = load_scales(
                w_scale_ptrs, weight_mask, k_block + AHEAD, num_k_blocks, BLOCK_K
            )
            acc = tl.dot_scaled(
                x, None, "bf16", w.T, w_scale if PREFETCH_SCALES else next_w_scale, "e2m1", acc
            )
            w_scale = next_w_scale
        return acc
    else:
        x_scale_ptrs = x_scale_ptr + x_rows.to(tl.int64) * x_scale_stride
        x_scale = load_scales(x_scale_ptrs, x_mask, first_block, num_k_blocks, BLOCK_K)
        acc = tl.zeros((WEIGHT_ROWS, ROWS), tl.float32)
        for k_block in range(first_block, last_block, STEP):
            # x [ROWS, BLOCK_K] uint8 codes (e2m1: BLOCK_K/2, two a byte), x_scale [ROWS, STEP];
            # w [WEIGHT_ROWS, BLOCK_K/2] uint8, two e2m1 codes a byte, w_scale [WEIGHT_ROWS, STEP]
            x = load_rows(x_ptrs, x_mask, k_block, num_k_blocks, X_FORMAT, BLOCK_K)
            w = load_rows(w_ptrs, weight_mask, k_block, num_k_blocks, "e2m1", BLOCK_K)
            next_x_scale = load_scales(x_scale_ptrs, x_mask, k_block + AHEAD, num_k_blocks, BLOCK_K)
            next_w_scale = load_scales(
                w_scale_ptrs, weight_mask, k_block + AHEAD, num_k_blocks, BLOCK_K
            )
            acc = tl.dot_scaled(
                w,
                w_scale if PREFETCH_SCALES else next_w_scale,
                "e2m1",
                x.T,
                x_scale if PREFETCH_SCALES else next_x_scale,
                X_FORMAT,
                acc,
            )
            x_scale, w_scale = next_x_scale, next_w_scale
        acc = acc.T
        if x_row_scale_ptr is not None:
            acc *= tl.load(x_row_scale_ptr + x_rows, mask=x_mask, other=0.0)[:, None]
        return acc


@triton.jit
def split_gate_up(acc):
    """Split [BLOCK_M, 2 * BLOCK_N], gates left of ups, into gate and up tiles [BLOCK_M, BLOCK_N].

    In Hopper's accumulator layout with four warps, gate and up of a feature are in the same thread:
    no data moves.
    """
    ROWS: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def store_partial(
    partial_ptr, acc, split, partial_rows, rows, row_mask, columns, column_mask, width
):
    """Store the float32 accumulators of one split into scratch [split_k, partial_rows, width]."""
    offsets = (split.to(tl.int64) * partial_rows + rows)[:, None] * width + columns[None, :]
    tl.store(partial_ptr + offsets, acc, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def sum_partials(
    partial_ptr,
    split_k,
    partial_rows,
    rows,
    row_mask,
    columns,
    column_mask,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the splits in ascending order, float32 [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    mask = row_mask[:, None] & column_mask[None, :]
    for split in range(split_k):
        first_row = tl.cast(split, tl.int64) * partial_rows
        offsets = (first_row + rows)[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    return total


@triton.jit(
    do_not_specialize=(*GEMM_SCALARS, "gate_up_group", "p0", "p1"),
    do_not_specialize_on_alignment=("x_scale_ptr", "weight_scale_ptr"),
)
def _moe_gate_up_kernel(
    h_ptr,
    h_scale_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
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
    x_stride,
    x_scale_stride,
    weight_stride_e,
    weight_stride_n,
    weight_scale_stride_e,
    weight_scale_stride_n,
    X_FORMAT: tl.constexpr,
    H_FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INF_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """Stage 1: gather tokens, multiply gate and up, then run the epilogue `finish_gate_up`.

    With split-K (partial_ptr is given) store float32 partial sums instead of the epilogue.
    """
    num_features = num_n_blocks * 32
    tile_m, tile_n, split = schedule(
        num_valid_ptr, tl.cdiv(num_features, BLOCK_N), split_k, BLOCK_M, GROUP_M
    )
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(row_mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    # One weight tile: BLOCK_N gate rows, then the BLOCK_N up rows of the same features.
    place = tl.arange(0, 2 * BLOCK_N)
    both = tile_n * BLOCK_N + place % BLOCK_N
    weight_rows = gate_up_row(both, gate_up_group) + place // BLOCK_N * gate_up_group
    first = split * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, num_k_blocks)
    acc = multiply_tile(
        x_ptr,
        x_scale_ptr,
        x_row_scale_ptr,
        weight_ptr,
        weight_scale_ptr,
        tokens,
        row_mask,
        expert,
        weight_rows,
        both < num_features,
        x_stride,
        x_scale_stride,
        weight_stride_e,
        weight_stride_n,
        weight_scale_stride_e,
        weight_scale_stride_n,
        first,
        last,
        num_k_blocks,
        X_FORMAT,
        BLOCK_K,
        PREFETCH_SCALES,
    )
    gate, up = split_gate_up(acc)  # [BLOCK_M, BLOCK_N] each
    features = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    feature_mask = features < num_features
    if partial_ptr is not None:
        store_partial(
            partial_ptr,
            gate,
            split,
            partial_rows,
            rows,
            row_mask,
            features,
            feature_mask,
            2 * num_features,
        )
        store_partial(
            partial_ptr + num_features,
            up,
            split,
            partial_rows,
            rows,
            row_mask,
            features,
            feature_mask,
            2 * num_features,
        )
    else:
        finish_gate_up(
            h_ptr,
            h_scale_ptr,
            gate,
            up,
            bias_ptr,
            sorted_weights_ptr,
            expert,
            rows,
            row_mask,
            tile_n * BLOCK_N,
            num_features,
            gate_up_group,
            p0,
            p1,
            ACTIVATION,
            H_FORMAT,
            EMAX,
            THRESHOLD,
            INF_BYTE,
        )


@triton.jit(
    do_not_specialize=(
        "num_tokens",
        "num_experts",
        "num_n_blocks",
        "gate_up_group",
        "routing_block_m",
        "split_k",
        "partial_rows",
        "p0",
        "p1",
    )
)
def _moe_gate_up_finish_kernel(
    h_ptr,
    h_scale_ptr,
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
    H_FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    INF_BYTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1 after split-K: sum the splits in order, then run `finish_gate_up`."""
    num_features = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, tl.cdiv(num_features, BLOCK_N), 1, BLOCK_M, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, _tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    features = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = sum_partials(
        partial_ptr,
        split_k,
        partial_rows,
        rows,
        row_mask,
        features,
        features < num_features,
        2 * num_features,
        BLOCK_M,
        BLOCK_N,
    )
    up = sum_partials(
        partial_ptr + num_features,
        split_k,
        partial_rows,
        rows,
        row_mask,
        features,
        features < num_features,
        2 * num_features,
        BLOCK_M,
        BLOCK_N,
    )
    finish_gate_up(
        h_ptr,
        h_scale_ptr,
        gate,
        up,
        bias_ptr,
        sorted_weights_ptr,
        expert,
        rows,
        row_mask,
        tile_n * BLOCK_N,
        num_features,
        gate_up_group,
        p0,
        p1,
        ACTIVATION,
        H_FORMAT,
        EMAX,
        THRESHOLD,
        INF_BYTE,
    )


@triton.jit(
    do_not_specialize=GEMM_SCALARS,
    do_not_specialize_on_alignment=("x_scale_ptr", "weight_scale_ptr"),
)
def _moe_down_kernel(
    out_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    x_row_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
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
    weight_stride_e,
    weight_stride_n,
    weight_scale_stride_e,
    weight_scale_stride_n,
    X_FORMAT: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """Stage 2: multiply sorted rows by the down projection, then run the epilogue `finish_down`.

    With split-K (partial_ptr is given) store float32 partial sums instead of the epilogue.
    """
    num_columns = num_n_blocks * 32
    tile_m, tile_n, split = schedule(
        num_valid_ptr, tl.cdiv(num_columns, BLOCK_N), split_k, BLOCK_M, GROUP_M
    )
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(row_mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < num_columns
    first = split * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, num_k_blocks)
    acc = multiply_tile(
        x_ptr,
        x_scale_ptr,
        x_row_scale_ptr,
        weight_ptr,
        weight_scale_ptr,
        rows,
        row_mask,
        expert,
        columns,
        column_mask,
        x_stride,
        x_scale_stride,
        weight_stride_e,
        weight_stride_n,
        weight_scale_stride_e,
        weight_scale_stride_n,
        first,
        last,
        num_k_blocks,
        X_FORMAT,
        BLOCK_K,
        PREFETCH_SCALES,
    )
    if partial_ptr is not None:
        store_partial(
            partial_ptr, acc, split, partial_rows, rows, row_mask, columns, column_mask, num_columns
        )
    else:
        finish_down(
            out_ptr,
            acc,
            bias_ptr,
            sorted_weights_ptr,
            expert,
            rows,
            tokens,
            row_mask,
            tile_n * BLOCK_N,
            num_columns,
            ATOMIC,
        )


@triton.jit(
    do_not_specialize=(
        "num_tokens",
        "num_experts",
        "num_n_blocks",
        "routing_block_m",
        "split_k",
        "partial_rows",
    )
)
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
    """Stage 2 after split-K: sum the splits in order, then run `finish_down`."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, tl.cdiv(num_columns, BLOCK_N), 1, BLOCK_M, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    values = sum_partials(
        partial_ptr,
        split_k,
        partial_rows,
        rows,
        row_mask,
        columns,
        columns < num_columns,
        num_columns,
        BLOCK_M,
        BLOCK_N,
    )
    finish_down(
        out_ptr,
        values,
        bias_ptr,
        sorted_weights_ptr,
        expert,
        rows,
        tokens,
        row_mask,
        tile_n * BLOCK_N,
        num_columns,
        ATOMIC,
    )
