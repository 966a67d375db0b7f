"""Device code of the two MoE GEMMs and of the kernels that finish them after split-K.

Weights are MXFP4 and expand inside `tl.dot_scaled`: natively where the chip multiplies MX formats
(gfx950, Blackwell), as bf16 in registers before wgmma on Hopper. There the tokens must be the N
dimension of the instruction, so that 16 rows are enough: with MX activations the weight tile is the
left operand and the accumulator is transposed; with bf16 activations it is the right one, because
Triton 3.6 transposes that product itself and keeps the token loads asynchronous only then.

Every size is a run-time value. Widths come as counts of 32-element blocks and are multiplied here,
so that the compiler knows their divisibility without a binary per value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import finish_down, finish_gate_up, gate_up_row

GEMM_SCALARS = (
    "num_tokens", "num_experts", "num_k_blocks", "num_n_blocks", "routing_block_m", "split_k",
    "k_blocks_per_split", "partial_rows", "x_scale_stride", "weight_scale_stride_e",
    "weight_scale_stride_n",
)
"""Integers that may be 1 or odd: specialising on them would compile a binary per model."""


@triton.jit
def schedule(num_valid_ptr, num_tiles_n, split_k, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Row block, column tile and split of this program; row block -1 past the rows in use.

    Splits of a tile are neighbours; GROUP_M row blocks share each column tile's weights in L2.
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
    """Sorted row, token and validity of each row of a row block (padding rows are not valid)."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.load(sorted_token_ids_ptr + rows) & 0xFFFFFF
    return rows, tokens, tokens < num_tokens


@triton.jit
def load_scales(row_ptrs, row_mask, k_block, num_k_blocks, BLOCK_K: tl.constexpr):
    """E8M0 scales [rows, BLOCK_K/32]."""
    blocks = k_block + tl.arange(0, BLOCK_K // 32)
    return tl.load(row_ptrs[:, None] + blocks[None, :], other=0,
                   mask=row_mask[:, None] & (blocks < num_k_blocks)[None, :])


@triton.jit
def load_rows(row_ptrs, row_mask, k_block, num_k_blocks, FORMAT: tl.constexpr,
              BLOCK_K: tl.constexpr):
    """Codes or bf16 values [rows, BLOCK_K] (e2m1: BLOCK_K/2 bytes); zero outside the matrix."""
    PER_BLOCK: tl.constexpr = 16 if FORMAT == "e2m1" else 32
    k = k_block * PER_BLOCK + tl.arange(0, BLOCK_K // 32 * PER_BLOCK)
    return tl.load(row_ptrs[:, None] + k[None, :], other=0,
                   mask=row_mask[:, None] & (k < num_k_blocks * PER_BLOCK)[None, :])


@triton.jit
def multiply_tile(
    x_ptr, x_scale_ptr, x_row_scale_ptr, weight_ptr, weight_scale_ptr, x_rows, x_mask, expert,
    weight_rows, weight_mask, x_stride, x_scale_stride, weight_stride_e, weight_stride_n,
    weight_scale_stride_e, weight_scale_stride_n, first_block, last_block, num_k_blocks,
    X_FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH_SCALES: tl.constexpr,
):
    """``x[x_rows] @ w[expert, weight_rows].T`` over some blocks of K, float32 [rows, weight rows].

    Rows that are masked read nothing and count as zeros. x_row_scale_ptr: a factor of each row of x
    beside its block scales, or None.
    """
    tl.static_assert(BLOCK_K % 32 == 0, "BLOCK_K must hold whole blocks of 32")
    ROWS: tl.constexpr = x_rows.shape[0]
    WEIGHT_ROWS: tl.constexpr = weight_rows.shape[0]
    x_ptrs = x_ptr + x_rows.to(tl.int64) * x_stride
    weight_rows = weight_rows.to(tl.int64)
    w_ptrs = weight_ptr + expert.to(tl.int64) * weight_stride_e + weight_rows * weight_stride_n
    w_scale_ptrs = (weight_scale_ptr + expert.to(tl.int64) * weight_scale_stride_e
                    + weight_rows * weight_scale_stride_n)
    STEP: tl.constexpr = BLOCK_K // 32
    # On NVIDIA scales are too narrow for asynchronous copies, and the pipeliner would wait for them
    # in the step that needs them: they are fetched one step ahead. On AMD it pipelines them itself.
    AHEAD: tl.constexpr = STEP if PREFETCH_SCALES else 0
    w_scale = load_scales(w_scale_ptrs, weight_mask, first_block, num_k_blocks, BLOCK_K)
    if X_FORMAT == "bf16":
        acc = tl.zeros((ROWS, WEIGHT_ROWS), tl.float32)
        for k_block in range(first_block, last_block, STEP):
            x = load_rows(x_ptrs, x_mask, k_block, num_k_blocks, "bf16", BLOCK_K)
            w = load_rows(w_ptrs, weight_mask, k_block, num_k_blocks, "e2m1", BLOCK_K)
            next_w_scale = load_scales(w_scale_ptrs, weight_mask, k_block + AHEAD, num_k_blocks,
                                       BLOCK_K)
            acc = tl.dot_scaled(x, None, "bf16", w.T,
                                w_scale if PREFETCH_SCALES else next_w_scale, "e2m1", acc)
            w_scale = next_w_scale
        return acc
    else:
        x_scale_ptrs = x_scale_ptr + x_rows.to(tl.int64) * x_scale_stride
        x_scale = load_scales(x_scale_ptrs, x_mask, first_block, num_k_blocks, BLOCK_K)
        acc = tl.zeros((WEIGHT_ROWS, ROWS), tl.float32)
        for k_block in range(first_block, last_block, STEP):
            x = load_rows(x_ptrs, x_mask, k_block, num_k_blocks, X_FORMAT, BLOCK_K)
            w = load_rows(w_ptrs, weight_mask, k_block, num_k_blocks, "e2m1", BLOCK_K)
            next_x_scale = load_scales(x_scale_ptrs, x_mask, k_block + AHEAD, num_k_blocks, BLOCK_K)
            next_w_scale = load_scales(w_scale_ptrs, weight_mask, k_block + AHEAD, num_k_blocks,
                                       BLOCK_K)
            acc = tl.dot_scaled(w, w_scale if PREFETCH_SCALES else next_w_scale, "e2m1", x.T,
                                x_scale if PREFETCH_SCALES else next_x_scale, X_FORMAT, acc)
            x_scale, w_scale = next_x_scale, next_w_scale
        acc = acc.T
        if x_row_scale_ptr is not None:
            acc *= tl.load(x_row_scale_ptr + x_rows, mask=x_mask, other=0.0)[:, None]
        return acc


@triton.jit
def split_gate_up(acc):
    """[BLOCK_M, 2 * BLOCK_N], gates left of ups, as two tiles; in Hopper's layout the two values
    of a feature lie in one thread, so that nothing moves with four warps."""
    ROWS: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def store_partial(partial_ptr, acc, split, partial_rows, rows, row_mask, columns, column_mask,
                  width):
    """Raw float32 accumulators into scratch [split_k, partial_rows, width]."""
    offsets = (split.to(tl.int64) * partial_rows + rows)[:, None] * width + columns[None, :]
    tl.store(partial_ptr + offsets, acc, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def sum_partials(
    partial_ptr, split_k, partial_rows, rows, row_mask, columns, column_mask, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Sum of the splits in their order, float32 [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    mask = row_mask[:, None] & column_mask[None, :]
    for split in range(split_k):
        first_row = tl.cast(split, tl.int64) * partial_rows
        offsets = (first_row + rows)[:, None] * width + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=(*GEMM_SCALARS, "gate_up_group", "p0", "p1"),
            do_not_specialize_on_alignment=("x_scale_ptr", "weight_scale_ptr"))
def _moe_gate_up_kernel(
    h_ptr, h_scale_ptr, partial_ptr,
    x_ptr, x_scale_ptr, x_row_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr,
    sorted_token_ids_ptr, sorted_weights_ptr, block_expert_ids_ptr, num_valid_ptr,
    num_tokens, num_experts, num_k_blocks, num_n_blocks, gate_up_group, routing_block_m,
    split_k, k_blocks_per_split, partial_rows, p0, p1,
    x_stride, x_scale_stride, weight_stride_e, weight_stride_n, weight_scale_stride_e,
    weight_scale_stride_n,
    X_FORMAT: tl.constexpr, H_FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr, INF_BYTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
):
    """Stage 1: gather, gate and up products, then `finish_gate_up` or raw sums."""
    num_features = num_n_blocks * 32
    tile_m, tile_n, split = schedule(num_valid_ptr, tl.cdiv(num_features, BLOCK_N), split_k,
                                     BLOCK_M, GROUP_M)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    if tl.max(row_mask.to(tl.int32), axis=0) == 0:  # a row block that is all padding
        return
    # One weight tile for both: BLOCK_N gate rows, then the BLOCK_N up rows of the same features.
    place = tl.arange(0, 2 * BLOCK_N)
    both = tile_n * BLOCK_N + place % BLOCK_N
    weight_rows = gate_up_row(both, gate_up_group) + place // BLOCK_N * gate_up_group
    first = split * k_blocks_per_split
    last = tl.minimum(first + k_blocks_per_split, num_k_blocks)
    acc = multiply_tile(
        x_ptr, x_scale_ptr, x_row_scale_ptr, weight_ptr, weight_scale_ptr, tokens, row_mask, expert,
        weight_rows, both < num_features, x_stride, x_scale_stride, weight_stride_e,
        weight_stride_n, weight_scale_stride_e, weight_scale_stride_n, first, last, num_k_blocks,
        X_FORMAT, BLOCK_K, PREFETCH_SCALES)
    gate, up = split_gate_up(acc)  # [BLOCK_M, BLOCK_N] each
    features = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    feature_mask = features < num_features
    if partial_ptr is not None:
        store_partial(partial_ptr, gate, split, partial_rows, rows, row_mask, features,
                      feature_mask, 2 * num_features)
        store_partial(partial_ptr + num_features, up, split, partial_rows, rows, row_mask,
                      features, feature_mask, 2 * num_features)
    else:
        finish_gate_up(h_ptr, h_scale_ptr, gate, up, bias_ptr, sorted_weights_ptr, expert, rows,
                       row_mask, tile_n * BLOCK_N, num_features, gate_up_group, p0, p1,
                       ACTIVATION, H_FORMAT, EMAX, THRESHOLD, INF_BYTE)


@triton.jit(do_not_specialize=(
    "num_tokens", "num_experts", "num_n_blocks", "gate_up_group", "routing_block_m", "split_k",
    "partial_rows", "p0", "p1"))
def _moe_gate_up_finish_kernel(
    h_ptr, h_scale_ptr,
    partial_ptr, bias_ptr, sorted_token_ids_ptr, sorted_weights_ptr, block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens, num_experts, num_n_blocks, gate_up_group, routing_block_m, split_k, partial_rows,
    p0, p1,
    H_FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr, INF_BYTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1 after split-K: sum the splits in order, then the same epilogue."""
    num_features = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, tl.cdiv(num_features, BLOCK_N), 1, BLOCK_M, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, _tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    features = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = sum_partials(partial_ptr, split_k, partial_rows, rows, row_mask, features,
                        features < num_features, 2 * num_features, BLOCK_M, BLOCK_N)
    up = sum_partials(partial_ptr + num_features, split_k, partial_rows, rows, row_mask, features,
                      features < num_features, 2 * num_features, BLOCK_M, BLOCK_N)
    finish_gate_up(h_ptr, h_scale_ptr, gate, up, bias_ptr, sorted_weights_ptr, expert, rows,
                   row_mask, tile_n * BLOCK_N, num_features, gate_up_group, p0, p1, ACTIVATION,
                   H_FORMAT, EMAX, THRESHOLD, INF_BYTE)


@triton.jit(do_not_specialize=GEMM_SCALARS,
            do_not_specialize_on_alignment=("x_scale_ptr", "weight_scale_ptr"))
def _moe_down_kernel(
    out_ptr, partial_ptr,
    x_ptr, x_scale_ptr, x_row_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr,
    sorted_token_ids_ptr, sorted_weights_ptr, block_expert_ids_ptr, num_valid_ptr,
    num_tokens, num_experts, num_k_blocks, num_n_blocks, routing_block_m,
    split_k, k_blocks_per_split, partial_rows,
    x_stride, x_scale_stride, weight_stride_e, weight_stride_n, weight_scale_stride_e,
    weight_scale_stride_n,
    X_FORMAT: tl.constexpr, ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PREFETCH_SCALES: tl.constexpr,
):
    """Stage 2: sorted rows times the down projection, then `finish_down` or raw sums."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, split = schedule(num_valid_ptr, tl.cdiv(num_columns, BLOCK_N), split_k,
                                     BLOCK_M, GROUP_M)
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
        x_ptr, x_scale_ptr, x_row_scale_ptr, weight_ptr, weight_scale_ptr, rows, row_mask, expert,
        columns, column_mask, x_stride, x_scale_stride, weight_stride_e, weight_stride_n,
        weight_scale_stride_e, weight_scale_stride_n, first, last, num_k_blocks, X_FORMAT,
        BLOCK_K, PREFETCH_SCALES)
    if partial_ptr is not None:
        store_partial(partial_ptr, acc, split, partial_rows, rows, row_mask, columns, column_mask,
                      num_columns)
    else:
        finish_down(out_ptr, acc, bias_ptr, sorted_weights_ptr, expert, rows, tokens, row_mask,
                    tile_n * BLOCK_N, num_columns, ATOMIC)


@triton.jit(do_not_specialize=(
    "num_tokens", "num_experts", "num_n_blocks", "routing_block_m", "split_k", "partial_rows"))
def _moe_down_finish_kernel(
    out_ptr,
    partial_ptr, bias_ptr, sorted_token_ids_ptr, sorted_weights_ptr, block_expert_ids_ptr,
    num_valid_ptr,
    num_tokens, num_experts, num_n_blocks, routing_block_m, split_k, partial_rows,
    ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Stage 2 after split-K: sum the splits in order, then the same epilogue."""
    num_columns = num_n_blocks * 32
    tile_m, tile_n, _ = schedule(num_valid_ptr, tl.cdiv(num_columns, BLOCK_N), 1, BLOCK_M, 1)
    if tile_m < 0:
        return
    expert = tl.load(block_expert_ids_ptr + tile_m * BLOCK_M // routing_block_m)
    if (expert < 0) | (expert >= num_experts):
        return
    rows, tokens, row_mask = open_rows(sorted_token_ids_ptr, tile_m, num_tokens, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    values = sum_partials(partial_ptr, split_k, partial_rows, rows, row_mask, columns,
                          columns < num_columns, num_columns, BLOCK_M, BLOCK_N)
    finish_down(out_ptr, values, bias_ptr, sorted_weights_ptr, expert, rows, tokens, row_mask,
                tile_n * BLOCK_N, num_columns, ATOMIC)
