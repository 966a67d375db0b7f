"""Main loop of the portable MoE GEMMs for NVFP4, INT4 and, on some GPUs, MXFP8 weights.

All are multiplied as bf16, exactly. An NVFP4 code times its e4m3 scale has at most 6 significant
bits; the factor of a row multiplies the sum. INT4 codes without their zero points are integers of
5 bits; the scale of a group multiplies the group's sum. MXFP8 weights, and activations in MX
formats, are bf16 numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...device.mx_codec import decode, scale_value
from .loads import load_rows, load_scales

_SCALE_UP = tl.constexpr(2.0**110)
_ROW_UP = tl.constexpr(2.0**16)
"""Together 2^126: e2m1 bits in float32's place are the value times 2^-126. A scale times all of it
would overflow."""
_BF16_128 = tl.constexpr(0x4300)
"""Bits of 128 in bfloat16, whose last place is 1: an integer below 128 in its last bits adds to
it."""


@triton.jit
def unpack(packed):
    """Codes [rows, 2 * bytes] (int32) of [rows, bytes] uint8, the low nibble first."""
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    wide = packed.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, wide >> 4), (ROWS, 2 * BYTES))


@triton.jit
def load_activations(
    x, x_ptrs, x_scale_ptrs, block, k, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Activations [rows, BLOCK_K] as bf16; block scales are multiplied in, which is exact."""
    tile = load_rows(x_ptrs, x.mask, block, k, FORMAT, BLOCK_K, "")
    if FORMAT == "bf16":
        return tile
    else:
        ROWS: tl.constexpr = tile.shape[0]
        scale = scale_value(load_scales(x_scale_ptrs, x.mask, block, k, BLOCK_K, "").to(tl.int32))
        values = decode(unpack(tile) if FORMAT == "e2m1" else tile, FORMAT)
        blocks = tl.reshape(values, (ROWS, BLOCK_K // 32, 32)) * scale[:, :, None]
        return tl.reshape(blocks, (ROWS, BLOCK_K)).to(tl.bfloat16)


@triton.jit
def load_nvfp4(w_ptrs, scale_ptrs, mask, block, k, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """NVFP4 weights [rows, BLOCK_K] as bf16, without their row's factor, times 2^-16."""
    codes = unpack(load_rows(w_ptrs, mask, block, k, "e2m1", BLOCK_K, CACHE))
    W_ROWS: tl.constexpr = codes.shape[0]
    groups = block * 2 + tl.arange(0, BLOCK_K // 16)
    inside = mask[:, None] & (groups < k.total * 2)[None, :]
    scale = tl.load(
        scale_ptrs[:, None] + groups[None, :], other=0, mask=inside, cache_modifier=CACHE
    )
    scale = decode(scale, "e4m3") * _SCALE_UP  # [rows, BLOCK_K/16]
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    values = tl.reshape(bits.to(tl.float32, bitcast=True), (W_ROWS, BLOCK_K // 16, 16))
    return tl.reshape(values * scale[:, :, None], (W_ROWS, BLOCK_K)).to(tl.bfloat16)


@triton.jit
def load_mxfp8(w_ptrs, scale_ptrs, mask, block, k, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """MXFP8 weights (e4m3) [rows, BLOCK_K] as bf16."""
    codes = load_rows(w_ptrs, mask, block, k, "e4m3", BLOCK_K, CACHE)
    W_ROWS: tl.constexpr = codes.shape[0]
    scale = scale_value(load_scales(scale_ptrs, mask, block, k, BLOCK_K, CACHE).to(tl.int32))
    values = tl.reshape(decode(codes, "e4m3"), (W_ROWS, BLOCK_K // 32, 32)) * scale[:, :, None]
    return tl.reshape(values, (W_ROWS, BLOCK_K)).to(tl.bfloat16)


@triton.jit
def load_int4(
    w_ptrs,
    zero_ptrs,
    mask,
    block,
    k,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Integers [rows, BLOCK_K] as bf16: codes of one group of each row without its zero point."""
    codes = unpack(load_rows(w_ptrs, mask, block, k, "e2m1", BLOCK_K, CACHE))
    values = (codes | _BF16_128).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if zero_ptrs is None:
        return values - 136.0
    else:
        zero = tl.load(zero_ptrs + block * 32 // GROUP, mask=mask, other=0)
        return values - (zero.to(tl.float32) + 128.0).to(tl.bfloat16)[:, None]


@triton.constexpr_function
def int4_group(W_FORMAT):
    """Weights to a scale of an INT4 format; for others a multiple of every step."""
    return {"int4_g32": 32, "int4_g64": 64, "int4_g128": 128}.get(W_FORMAT, 256)


@triton.jit
def multiply_groups(
    x,
    w,
    w_rows,
    k,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CACHE: tl.constexpr,
):
    """``x @ w[expert, rows].T`` over a range of K, float32 [x rows, w rows].

    Args:
        x: Inputs. w: Weights. w_rows: WeightRows. k: KRange.
        W_FORMAT: "nvfp4", "mxfp8", "int4_g32", "int4_g64" or "int4_g128". BLOCK_K: of INT4 at most
            its group. CACHE: Triton's cache modifier for weights and their scales.
    """
    ROWS: tl.constexpr = x.rows.shape[0]
    W_ROWS: tl.constexpr = w_rows.rows.shape[0]
    GROUP: tl.constexpr = int4_group(W_FORMAT)
    tl.static_assert(GROUP % BLOCK_K == 0, "a step lies in one group")
    x_ptrs = x.ptr + x.rows.to(tl.int64) * x.stride
    x_scale_ptrs = (
        None if X_FORMAT == "bf16" else x.scale_ptr + x.rows.to(tl.int64) * x.scale_stride
    )
    row, expert = w_rows.rows.to(tl.int64), w_rows.expert.to(tl.int64)
    w_ptrs = w.ptr + expert * w.strides.stride_e + row * w.strides.stride_n
    scale_offsets = expert * w.strides.scale_stride_e + row * w.strides.scale_stride_n
    scale_ptrs = w.scale_ptr + scale_offsets
    zero_ptrs = None if w.zero_ptr is None else w.zero_ptr + scale_offsets
    acc = tl.zeros((W_ROWS, ROWS), tl.float32)
    for block in range(k.first, k.last, BLOCK_K // 32):
        x_tile = load_activations(x, x_ptrs, x_scale_ptrs, block, k, X_FORMAT, BLOCK_K)
        if W_FORMAT == "nvfp4":
            w_tile = load_nvfp4(w_ptrs, scale_ptrs, w_rows.mask, block, k, BLOCK_K, CACHE)
            acc = tl.dot(w_tile, x_tile.T, acc)
        elif W_FORMAT == "mxfp8":
            w_tile = load_mxfp8(w_ptrs, scale_ptrs, w_rows.mask, block, k, BLOCK_K, CACHE)
            acc = tl.dot(w_tile, x_tile.T, acc)
        else:
            w_tile = load_int4(w_ptrs, zero_ptrs, w_rows.mask, block, k, GROUP, BLOCK_K, CACHE)
            group = block * 32 // GROUP
            scale = tl.load(
                scale_ptrs + group, mask=w_rows.mask, other=0.0, cache_modifier=CACHE
            ).to(tl.float32)
            acc += tl.dot(w_tile, x_tile.T) * scale[:, None]
    if W_FORMAT == "nvfp4":
        factor = tl.full((W_ROWS,), _ROW_UP, tl.float32)
        if w.row_scale_ptr is not None:
            ptrs = w.row_scale_ptr + expert * w.num_rows + row
            factor *= tl.load(ptrs, mask=w_rows.mask, other=0.0)
        acc *= factor[:, None]
    acc = acc.T
    if x.row_scale_ptr is not None:
        acc *= tl.load(x.row_scale_ptr + x.rows, mask=x.mask, other=0.0)[:, None]
    return acc
