"""Operands of the portable MoE GEMMs, and their loads from memory."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Inputs(NamedTuple):
    """Activations: rows of the left matrix [N, K]; strides of its rows in elements.

    `ptr`: bf16 values or uint8 codes (e2m1: two a byte). `scale_ptr`: E8M0 scales [N, K/32], or
    None for bf16. `row_scale_ptr`: one more float32 factor for each row of MX activations [N], or
    None. `rows`: the rows to multiply; masked ones count as zeros.
    """

    ptr: tl.tensor
    scale_ptr: tl.tensor | None
    row_scale_ptr: tl.tensor | None
    stride: tl.tensor
    scale_stride: tl.tensor
    rows: tl.tensor
    mask: tl.tensor


class WeightStrides(NamedTuple):
    """Strides of codes and scales over experts and rows, in elements."""

    stride_e: tl.tensor
    stride_n: tl.tensor
    scale_stride_e: tl.tensor
    scale_stride_n: tl.tensor


class Weights(NamedTuple):
    """Weights of all experts.

    `ptr`: uint8 [E, N, K/2], two codes of 4 bits a byte, or e4m3 codes [E, N, K]. `scale_ptr`:
    [E, N, K/group]. `zero_ptr`: zero points like the scales, or None. `row_scale_ptr`: a factor for
    each row [E, N], or None. `num_rows`: N.
    """

    ptr: tl.tensor
    scale_ptr: tl.tensor
    zero_ptr: tl.tensor | None
    row_scale_ptr: tl.tensor | None
    num_rows: tl.tensor
    strides: WeightStrides


class WeightRows(NamedTuple):
    """Rows of one expert's weights to multiply; masked ones count as zeros."""

    expert: tl.tensor
    rows: tl.tensor
    mask: tl.tensor


class KRange(NamedTuple):
    """Blocks of 32 along K: a program's first and end block, and the number of all blocks."""

    first: tl.tensor
    last: tl.tensor
    total: tl.tensor


@triton.jit
def k_range(split, blocks_per_split, num_blocks):
    """`KRange` of one split of K."""
    first = split * blocks_per_split
    return KRange(first, tl.minimum(first + blocks_per_split, num_blocks), num_blocks)


@triton.jit
def load_scales(row_ptrs, row_mask, block, k, BLOCK_K: tl.constexpr, CACHE: tl.constexpr):
    """Load E8M0 scales, [rows, BLOCK_K/32] uint8; 0 outside the matrix.

    CACHE: Triton's cache modifier.
    """
    blocks = block + tl.arange(0, BLOCK_K // 32)
    return tl.load(
        row_ptrs[:, None] + blocks[None, :],
        other=0,
        mask=row_mask[:, None] & (blocks < k.total)[None, :],
        cache_modifier=CACHE,
    )


@triton.jit
def load_rows(
    row_ptrs, row_mask, block, k, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, CACHE: tl.constexpr
):
    """Load codes or bf16 values, [rows, BLOCK_K] (e2m1: [rows, BLOCK_K/2] uint8, two codes a byte).

    Elements outside the matrix are 0. CACHE: as in `load_scales`.
    """
    PER_BLOCK: tl.constexpr = 16 if FORMAT == "e2m1" else 32
    elements = block * PER_BLOCK + tl.arange(0, BLOCK_K // 32 * PER_BLOCK)
    return tl.load(
        row_ptrs[:, None] + elements[None, :],
        other=0,
        mask=row_mask[:, None] & (elements < k.total * PER_BLOCK)[None, :],
        cache_modifier=CACHE,
    )
