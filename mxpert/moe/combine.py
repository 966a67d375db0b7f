"""Combine.REDUCE: sum the rows of each token in slot order."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import Target
from ..device.pdl import BEFORE_WAIT, launch_dependents_and_wait, pdl_options

BLOCK_N = 512
"""Columns per program: one 16-byte access per thread for 2-byte rows with two warps."""

NUM_WARPS = 2

_SLOTS = tl.constexpr(4)
"""Slots whose loads are issued together."""


@triton.jit
def _rows_of_slots(slot_rows, first, top_k):
    """Rows of `_SLOTS` slots from `first` on, as a tuple of scalars; −1 past the last slot."""
    rows = ()
    for place in tl.static_range(_SLOTS):
        slot = first + place
        rows += (
            tl.load(slot_rows + slot, mask=slot < top_k, other=-1, cache_modifier=BEFORE_WAIT),
        )
    return rows


@triton.jit
def _add_rows(total, source, rows, columns, num_columns):
    """Total + Σ source[rows], in order. All loads are issued before the first addition."""
    values = ()
    for place in tl.static_range(_SLOTS):
        mask = (columns < num_columns) & (rows[place] >= 0)
        values += (
            tl.load(
                source + rows[place].to(tl.int64) * num_columns + columns, mask=mask, other=0.0
            ),
        )
    for place in tl.static_range(_SLOTS):
        total += values[place].to(tl.float32)
    return total


@triton.jit(do_not_specialize=["top_k", "num_blocks", "num_tiles_n"])
def _moe_combine_kernel(
    out_ptr,
    rows_ptr,
    slot_rows_ptr,
    top_k,
    num_blocks,
    num_tiles_n,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
    PLAN_BEFORE_WAIT: tl.constexpr,
):
    """``out[t] = Σ_slot rows[slot_rows[t, slot]]``, summed in float32; slots at −1 are skipped.

    Grid: (tokens · column tiles,), one token and BLOCK_N columns per program; the column tiles of a
    token are neighbours. PLAN_BEFORE_WAIT: read the plan before grid_dependency_wait. This is safe
    after a GEMM that waits for its predecessor before it calls launch_dependents.
    """
    token = (tl.program_id(0) // num_tiles_n).to(tl.int64)
    columns = tl.program_id(0) % num_tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    num_columns = num_blocks * 32
    slot_rows = slot_rows_ptr + token * top_k
    if not PLAN_BEFORE_WAIT:
        launch_dependents_and_wait(USE_PDL)
    rows = _rows_of_slots(slot_rows, 0, top_k)  # _SLOTS scalars
    if PLAN_BEFORE_WAIT:
        launch_dependents_and_wait(USE_PDL)
    total = tl.zeros((BLOCK_N,), tl.float32)
    total = _add_rows(total, rows_ptr, rows, columns, num_columns)
    for first in range(_SLOTS, top_k, _SLOTS):
        rows = _rows_of_slots(slot_rows, first, top_k)
        total = _add_rows(total, rows_ptr, rows, columns, num_columns)
    tl.store(
        out_ptr + token * num_columns + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=columns < num_columns,
    )


def combine_slots(
    rows: torch.Tensor,
    slot_rows: torch.Tensor,
    target: Target,
    *,
    plan_before_wait: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum ``rows`` [P, H] by ``slot_rows`` int32 [T, k] into [T, H] of the same dtype.

    plan_before_wait: the previous kernel is a GEMM that waits for its own predecessor before it
    launches this kernel, and `slot_rows` were written before that GEMM (see `common.pdl`).
    out: where the sums are stored; None allocates.
    """
    num_tokens, top_k = slot_rows.shape
    width = rows.shape[1]
    if out is None:
        out = rows.new_empty((num_tokens, width))
    _launch(num_tokens, top_k, width, target, plan_before_wait)(
        out_ptr=out, rows_ptr=rows, slot_rows_ptr=slot_rows
    )
    return out


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    num_tokens: int, top_k: int, width: int, target: Target, plan_before_wait: bool
) -> Launch:
    tiles = triton.cdiv(width, BLOCK_N)
    return Launch(
        _moe_combine_kernel,
        (num_tokens * tiles,),
        top_k=top_k,
        num_blocks=width // 32,
        num_tiles_n=tiles,
        BLOCK_N=BLOCK_N,
        PLAN_BEFORE_WAIT=plan_before_wait,
        num_warps=NUM_WARPS,
        **pdl_options(target),
    )
