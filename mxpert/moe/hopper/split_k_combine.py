"""Stage 2 after split-K: sum the K splits, run the epilogue and combine, in one launch."""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEOptions
from ...device.compat import aggregate
from ...device.pdl import BEFORE_WAIT, PDL_LAUNCH, grid_dependency_wait, launch_dependents
from ...routing.plan import RoutingPlan

_BLOCK = 256
_NUM_WARPS = 2
_SLOTS = gl.constexpr(4)
"""Slots whose loads are issued together. One thread holds all of them and adds them in order."""


@aggregate
class SlotTerms:
    """What `_SLOTS` slots add to a token, except for the GEMM's sums.

    row: int32 [slots], −1 for absent slots. weight: float32 [slots], 0 for absent ones. bias:
    float32 [slots, columns].
    """

    row: gl.tensor
    weight: gl.tensor
    bias: gl.tensor


@gluon.jit
def _slot_terms(
    slot_rows,
    sorted_weights,
    bias,
    block_expert_ids,
    slot,
    top_k,
    routing_block_m,
    column,
    num_columns,
):
    """Load the SlotTerms of a token's slots `slot`; needs no sums of the GEMM."""
    row = gl.load(slot_rows + slot, mask=slot < top_k, other=-1, cache_modifier=BEFORE_WAIT)
    present = row >= 0
    weight = gl.where(present, 1.0, 0.0)
    if sorted_weights is not None:
        weight = gl.load(sorted_weights + row, mask=present, other=0.0, cache_modifier=BEFORE_WAIT)
    terms = gl.zeros_like(row[:, None] + column[None, :]).to(gl.float32)
    if bias is not None:
        expert = gl.load(
            block_expert_ids + row // routing_block_m,
            mask=present,
            other=0,
            cache_modifier=BEFORE_WAIT,
        )
        start = (expert.to(gl.int64) * num_columns)[:, None]
        terms = gl.load(
            bias + start + column[None, :],
            mask=present[:, None] & (column < num_columns)[None, :],
            other=0.0,
            cache_modifier=BEFORE_WAIT,
        )
    return SlotTerms(row, weight, terms)


@gluon.jit
def _add_slots(
    total, terms, parts, part_stride, k_splits, column, num_columns, DTYPE: gl.constexpr
):
    """Add ``round(weight * (Σ_parts + bias))`` of `_SLOTS` slots to total, in slot order."""
    start = (terms.row.to(gl.int64) * num_columns)[:, None]
    mask = (terms.row >= 0)[:, None] & (column < num_columns)[None, :]
    value = gl.load(parts + start + column[None, :], mask=mask, other=0.0)  # [slots, columns]
    for split in range(1, k_splits):
        value += gl.load(
            parts + split * part_stride + start + column[None, :], mask=mask, other=0.0
        )
    value = ((value + terms.bias) * terms.weight[:, None]).to(DTYPE).to(gl.float32)
    lane = gl.arange(0, _SLOTS, terms.row.type.layout)
    for place in gl.static_range(_SLOTS):  # a sum over one slot at a time keeps the order
        total += gl.sum(gl.where((lane == place)[:, None], value, 0.0), 0)
    return total


@gluon.jit(do_not_specialize=["top_k", "routing_block_m", "k_splits", "num_rows"])
def _moe_combine_parts_kernel(
    out,
    parts,
    bias,
    sorted_weights,
    slot_rows,
    block_expert_ids,
    top_k,
    num_columns,
    routing_block_m,
    k_splits,
    num_rows,
    BLOCK: gl.constexpr,
    num_warps: gl.constexpr,
):
    """``out[t] = Σ_slot round(weight * (Σ_parts + bias))``, rows rounded as REDUCE rounds them.

    parts: float32 [k_splits, num_rows, num_columns]. The kernel is launched after a GEMM. It reads
    rows, weights and biases of the first slots before grid_dependency_wait.

    Grid: [num_tokens, num_columns / BLOCK rounded up].
    """
    launch_dependents()
    TILE: gl.constexpr = gl.BlockedLayout([_SLOTS, 4], [1, 32], [1, num_warps], [1, 0])
    token = gl.program_id(0).to(gl.int64)
    column = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, TILE))
    slot = gl.arange(0, _SLOTS, gl.SliceLayout(1, TILE))
    slot_rows += token * top_k
    part_stride = num_rows.to(gl.int64) * num_columns
    DTYPE: gl.constexpr = out.dtype.element_ty
    terms = _slot_terms(
        slot_rows=slot_rows,
        sorted_weights=sorted_weights,
        bias=bias,
        block_expert_ids=block_expert_ids,
        slot=slot,
        top_k=top_k,
        routing_block_m=routing_block_m,
        column=column,
        num_columns=num_columns,
    )
    grid_dependency_wait()
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, TILE))
    total = _add_slots(total, terms, parts, part_stride, k_splits, column, num_columns, DTYPE)
    for base in range(_SLOTS, top_k, _SLOTS):
        terms = _slot_terms(
            slot_rows=slot_rows,
            sorted_weights=sorted_weights,
            bias=bias,
            block_expert_ids=block_expert_ids,
            slot=base + slot,
            top_k=top_k,
            routing_block_m=routing_block_m,
            column=column,
            num_columns=num_columns,
        )
        total = _add_slots(total, terms, parts, part_stride, k_splits, column, num_columns, DTYPE)
    gl.store(out + token * num_columns + column, total.to(DTYPE), mask=column < num_columns)


def sum_k_splits_and_combine(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    plan: RoutingPlan,
    options: MoEOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Finish stage 2 and combine: partial sums float32 [k_splits, P, H] to [T, H] in out_dtype.

    bias: float32 [E, H], or None. out: where the result is stored; None allocates.
    """
    k_splits, num_rows, num_columns = parts.shape
    if out is None:
        out = parts.new_empty((plan.num_tokens, num_columns), dtype=options.out_dtype)
    weighted = not options.apply_router_weight_on_input
    _launch(k_splits, num_rows, num_columns, plan.num_tokens, plan.top_k, plan.routing_block_m)(
        out=out,
        parts=parts,
        bias=bias,
        sorted_weights=plan.sorted_weights if weighted else None,
        slot_rows=plan.slot_rows,
        block_expert_ids=plan.block_expert_ids,
    )
    return out


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    k_splits: int,
    num_rows: int,
    num_columns: int,
    num_tokens: int,
    top_k: int,
    routing_block_m: int,
) -> Launch:
    return Launch(
        _moe_combine_parts_kernel,
        (num_tokens, triton.cdiv(num_columns, _BLOCK)),
        top_k=top_k,
        num_columns=num_columns,
        routing_block_m=routing_block_m,
        k_splits=k_splits,
        num_rows=num_rows,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **PDL_LAUNCH,
    )
