"""Main loop of the portable MoE GEMMs for MXFP4 and MXFP8 weights.

`tl.dot_scaled` multiplies MXFP4 weights natively on gfx950 and Blackwell. On Hopper it converts
them to bf16 in registers before wgmma. Tokens are the N dimension of wgmma, so a tile can have as
few as 16 rows. With MX activations the weight tile is therefore the left operand, and the
accumulator is transposed at the end. With bf16 activations the weight tile is the right operand:
Triton 3.6 transposes that product itself, and keeps the token loads asynchronous only in this form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...device.fp8 import decode_fp8, has_fp8_instructions
from ..tiles import gate_up_row
from .group_tiles import multiply_groups
from .loads import load_rows, load_scales


@triton.jit
def gate_up_rows(tile_n, gate_up_group, BLOCK_N: tl.constexpr):
    """Weight rows of a tile, BLOCK_N gates, then the ups of the same features; and the features."""
    lane = tl.arange(0, 2 * BLOCK_N)
    features = tile_n * BLOCK_N + lane % BLOCK_N
    rows = gate_up_row(features, gate_up_group) + lane // BLOCK_N * gate_up_group
    return rows, features


@triton.jit
def multiply(
    x,
    w,
    w_rows,
    k,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """``x @ w[expert, rows].T`` over a range of K, float32 [x rows, w rows], of any weight format.

    Args:
        W_FORMAT: "e2m1" or "e4m3" with E8M0 scales; else `multiply_groups` multiplies.
        STREAM: weights and their scales are the first to leave the caches (AMD: non-temporal).
    """
    CACHE: tl.constexpr = ".cg" if STREAM else ""
    if W_FORMAT == "e2m1" or W_FORMAT == "e4m3":
        return multiply_mx(
            x, w, w_rows, k, X_FORMAT, W_FORMAT, BLOCK_K, PREFETCH_SCALES, CACHE=CACHE
        )
    else:
        return multiply_groups(x, w, w_rows, k, X_FORMAT, W_FORMAT, BLOCK_K, CACHE)


@triton.jit
def multiply_mx(
    x,
    w,
    w_rows,
    k,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_SCALES: tl.constexpr,
    CACHE: tl.constexpr,
):
    """``x @ w[expert, rows].T`` over a range of K, float32 [x rows, w rows].

    Args:
        x: Inputs. w: Weights. w_rows: WeightRows. k: KRange.
        PREFETCH_SCALES: load scales one step before their use. On NVIDIA scales are too narrow for
            asynchronous copies, so the pipeliner would load them in the step that uses them. On AMD
            the pipeliner loads them ahead.
        CACHE: Triton's cache modifier for weights and their scales.
    """
    tl.static_assert(BLOCK_K % 32 == 0, "BLOCK_K must hold whole blocks of 32")
    IS_MX: tl.constexpr = X_FORMAT != "bf16"
    ROWS: tl.constexpr = x.rows.shape[0]
    W_ROWS: tl.constexpr = w_rows.rows.shape[0]
    STEP: tl.constexpr = BLOCK_K // 32
    AHEAD: tl.constexpr = STEP if PREFETCH_SCALES else 0
    BY_BITS: tl.constexpr = (X_FORMAT == "e4m3") and not has_fp8_instructions()
    DECODED: tl.constexpr = "bf16" if BY_BITS else X_FORMAT
    W_BY_BITS: tl.constexpr = (W_FORMAT == "e4m3") and not has_fp8_instructions()
    W_DECODED: tl.constexpr = "bf16" if W_BY_BITS else W_FORMAT
    x_ptrs = x.ptr + x.rows.to(tl.int64) * x.stride
    row, expert = w_rows.rows.to(tl.int64), w_rows.expert.to(tl.int64)
    w_ptrs = w.ptr + expert * w.strides.stride_e + row * w.strides.stride_n
    w_scale_ptrs = w.scale_ptr + expert * w.strides.scale_stride_e + row * w.strides.scale_stride_n
    w_scale = load_scales(w_scale_ptrs, w_rows.mask, k.first, k, BLOCK_K, CACHE)
    if IS_MX:
        x_scale_ptrs = x.scale_ptr + x.rows.to(tl.int64) * x.scale_stride
        x_scale = load_scales(x_scale_ptrs, x.mask, k.first, k, BLOCK_K, "")
    acc = tl.zeros((W_ROWS, ROWS) if IS_MX else (ROWS, W_ROWS), tl.float32)
    for block in range(k.first, k.last, STEP):
        # [ROWS, BLOCK_K] bf16 or uint8 codes; e2m1: [ROWS, BLOCK_K/2] uint8, two codes a byte
        x_tile = load_rows(x_ptrs, x.mask, block, k, X_FORMAT, BLOCK_K, "")
        # [W_ROWS, BLOCK_K/2] uint8, two e2m1 codes a byte; e4m3: [W_ROWS, BLOCK_K]
        w_tile = load_rows(w_ptrs, w_rows.mask, block, k, W_FORMAT, BLOCK_K, CACHE)
        if W_BY_BITS:
            w_tile = decode_fp8(w_tile, W_FORMAT)
        # uint8 E8M0 scales: [ROWS, STEP] of x, [W_ROWS, STEP] of w
        if IS_MX:
            next_x_scale = load_scales(x_scale_ptrs, x.mask, block + AHEAD, k, BLOCK_K, "")
        next_w_scale = load_scales(w_scale_ptrs, w_rows.mask, block + AHEAD, k, BLOCK_K, CACHE)
        w_scale = w_scale if PREFETCH_SCALES else next_w_scale
        if IS_MX:
            x_scale = x_scale if PREFETCH_SCALES else next_x_scale
            if BY_BITS:
                x_tile = decode_fp8(x_tile, X_FORMAT)
            acc = tl.dot_scaled(w_tile, w_scale, W_DECODED, x_tile.T, x_scale, DECODED, acc)
            x_scale = next_x_scale
        else:
            acc = tl.dot_scaled(x_tile, None, "bf16", w_tile.T, w_scale, W_DECODED, acc)
        w_scale = next_w_scale
    if IS_MX:
        acc = acc.T
        if x.row_scale_ptr is not None:
            acc *= tl.load(x.row_scale_ptr + x.rows, mask=x.mask, other=0.0)[:, None]
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
