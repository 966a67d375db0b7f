"""REDUCE: sum the rows of each token in slot order."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ...problem import Target
from ..dependent import follow_options, maybe_follow_previous
from ..launch import CACHED_LAUNCHES, Launch

BLOCK_N = 512
"""Columns of one program: one 16-byte access a thread for 2-byte rows at two warps."""

NUM_WARPS = 2


@triton.jit(do_not_specialize=["top_k", "num_blocks", "num_tiles_n"])
def _moe_combine_kernel(
    out_ptr, rows_ptr, slot_rows_ptr, top_k, num_blocks, num_tiles_n, BLOCK_N: tl.constexpr,
    FOLLOW: tl.constexpr,
):
    """``out[t] = Σ_slot rows[slot_rows[t, slot]]`` in float32; slots at -1 are absent."""
    maybe_follow_previous(FOLLOW)
    token = (tl.program_id(0) // num_tiles_n).to(tl.int64)
    columns = tl.program_id(0) % num_tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    num_columns = num_blocks * 32
    column_mask = columns < num_columns
    total = tl.zeros((BLOCK_N,), tl.float32)
    for slot in range(top_k):
        row = tl.load(slot_rows_ptr + token * top_k + slot)
        offsets = row.to(tl.int64) * num_columns + columns
        total += tl.load(rows_ptr + offsets, mask=column_mask & (row >= 0),
                         other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty),
             mask=column_mask)


def combine_rows(rows: torch.Tensor, slot_rows: torch.Tensor, target: Target) -> torch.Tensor:
    """Sum ``rows`` [P, H] by ``slot_rows`` int32 [T, k] into [T, H] of the same dtype."""
    num_tokens, top_k = slot_rows.shape
    width = rows.shape[1]
    out = rows.new_empty((num_tokens, width))
    _launch(num_tokens, top_k, width, target)(out_ptr=out, rows_ptr=rows, slot_rows_ptr=slot_rows)
    return out


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(num_tokens: int, top_k: int, width: int, target: Target) -> Launch:
    tiles = triton.cdiv(width, BLOCK_N)
    return Launch(_moe_combine_kernel, (num_tokens * tiles,), top_k=top_k, num_blocks=width // 32,
                  num_tiles_n=tiles, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS, **follow_options(target))
