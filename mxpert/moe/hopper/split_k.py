"""Stage 2 after split-K: sum the K splits, run the epilogue and combine, in one launch."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEOptions, kernel_parameters
from ...device.activation import gated_activation
from ...device.compat import aggregate
from ...device.hopper import reset_tile_counter
from ...device.pdl import (
    BEFORE_WAIT,
    PDL_LAUNCH,
    grid_dependency_wait,
    launch_dependents,
    launch_dependents_and_wait,
)
from ...routing.plan import TOKEN_MASK, RoutingPlan
from .encode import (
    RowsOut,
    SortedRows,
    empty_rows,
    encode_step,
    one_step,
    padded,
    row_format,
    row_maximum,
    row_scale,
    statistic_of,
    step_layout,
    step_offsets,
    store_step,
)
from .epilogue import is_real

# ---- Stage 1 after split-K: sum the K splits in order, then bias and activation.
#
# Split-K is used if the tiles of a few tokens would leave SMs idle. The partial sums are float32
# [k_splits, P, 2F], with row factors and activation scales applied.
#
# Inside a layer one kernel also encodes the rows for stage 2, without storing the bf16
# intermediate. Its programs hold a row in registers, as those of the row-encoding kernel do.
# Another kernel, plain Triton, writes bf16 rows for `moe_gate_up` alone and for rows too long for
# registers.

_BLOCK = 256
_NUM_WARPS = 2
_TOKEN_MASK = tl.constexpr(TOKEN_MASK)


@triton.jit
def _sum_k_splits(part_ptr, part_stride, k_splits, mask):
    """Sum the values at `part_ptr` over the K splits, in ascending order: the same bits always."""
    total = tl.load(part_ptr, mask=mask, other=0.0)
    for split in range(1, k_splits):
        total += tl.load(part_ptr + split * part_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "routing_block_m", "k_splits", "num_rows"])
def _moe_gate_up_sum_splits_kernel(
    h_ptr,
    parts_ptr,
    bias_ptr,
    sorted_weights_ptr,
    sorted_token_ids_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    p0,
    p1,
    p2,
    num_tokens,
    num_features,
    routing_block_m,
    k_splits,
    num_rows,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK features of a sorted row per program: interleaved gate and up partial sums to bf16.

    Padding rows are neither read nor written.

    Grid: [num_rows, num_features / BLOCK rounded up].
    """
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row >= tl.load(num_valid_ptr):
        return
    if (tl.load(sorted_token_ids_ptr + row) & _TOKEN_MASK) >= num_tokens:
        return
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = feature < num_features
    parts_ptr += row.to(tl.int64) * (2 * num_features) + 2 * feature
    part_stride = num_rows.to(tl.int64) * (2 * num_features)
    gate = _sum_k_splits(parts_ptr, part_stride, k_splits, mask)
    up = _sum_k_splits(parts_ptr + 1, part_stride, k_splits, mask)
    if sorted_weights_ptr is not None:
        weight = tl.load(sorted_weights_ptr + row)
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        expert = tl.load(block_expert_ids_ptr + row // routing_block_m)
        bias_ptr += expert.to(tl.int64) * (2 * num_features) + 2 * feature
        gate += tl.load(bias_ptr, mask=mask, other=0.0)
        up += tl.load(bias_ptr + 1, mask=mask, other=0.0)
    values = gated_activation(gate, up, p0, p1, p2, ACTIVATION)
    tl.store(h_ptr + row.to(tl.int64) * num_features + feature, values.to(tl.bfloat16), mask=mask)


def sum_k_splits_and_activate(
    parts: torch.Tensor, bias: torch.Tensor | None, plan: RoutingPlan, options: MoEOptions
) -> torch.Tensor:
    """Finish stage 1: interleaved partial sums float32 [k_splits, P, 2F] to bf16 [P, F].

    bias: interleaved, float32 [E, 2F], or None.
    """
    k_splits, num_rows, width = parts.shape
    h = parts.new_empty((num_rows, width // 2), dtype=torch.bfloat16)
    _activate_launch(
        k_splits, num_rows, width // 2, plan.num_tokens, plan.routing_block_m, options
    )(
        h_ptr=h,
        parts_ptr=parts,
        bias_ptr=bias,
        sorted_weights_ptr=plan.sorted_weights if options.apply_router_weight_on_input else None,
        sorted_token_ids_ptr=plan.sorted_token_ids,
        block_expert_ids_ptr=plan.block_expert_ids,
        num_valid_ptr=plan.num_valid,
    )
    return h


@functools.lru_cache(CACHED_LAUNCHES)
def _activate_launch(
    k_splits: int,
    num_rows: int,
    num_features: int,
    num_tokens: int,
    routing_block_m: int,
    options: MoEOptions,
) -> Launch:
    return Launch(
        _moe_gate_up_sum_splits_kernel,
        (num_rows, triton.cdiv(num_features, _BLOCK)),
        **kernel_parameters(options.activation),
        num_tokens=num_tokens,
        num_features=num_features,
        routing_block_m=routing_block_m,
        k_splits=k_splits,
        num_rows=num_rows,
        ACTIVATION=options.activation.name,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **PDL_LAUNCH,
    )


@gluon.constexpr_function
def _pair_layout(STEPS):
    """As `step_layout`, but a thread has gate and up of four features: eight adjacent values."""
    return gl.BlockedLayout([1, 1, 4, 8], [4, 8, 1, 1], [STEPS.warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _load_pairs(pointer, source, mask, STEPS: gl.constexpr):
    """Load interleaved gates and ups, [chunks, 8, 4, 8] float32; 0 where masked."""
    LAYOUT: gl.constexpr = _pair_layout(STEPS)
    WORDS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    source = gl.convert_layout(source, WORDS, assert_trivial=True)
    mask = gl.convert_layout(mask, WORDS, assert_trivial=True)
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = 2 * source[:, :, :, None] + place[None, None, None, :]
    return gl.load(
        pointer + offsets, mask=mask[:, :, :, None], other=0.0, cache_modifier=BEFORE_WAIT
    )


@gluon.jit
def _activated_row(
    pairs, biases, weight, p0, p1, p2, ACTIVATION: gl.constexpr, STEPS: gl.constexpr
):
    """Activated features [chunks, 8, 4, 4] of summed gates and ups, rounded to bfloat16.

    They are returned as float32. weight, biases, p2: None if there are none.
    """
    if weight is not None:
        pairs *= weight
    if biases is not None:
        pairs += biases
    gate, up = pairs.reshape([STEPS.chunks, 8, 4, 4, 2]).split()
    values = gated_activation(gate, up, p0, p1, p2, ACTIVATION).to(gl.bfloat16).to(gl.float32)
    return gl.convert_layout(values, step_layout(STEPS), assert_trivial=True)


@gluon.jit(do_not_specialize=["num_tokens", "depth", "routing_block_m", "k_splits", "num_rows"])
def _moe_finish_rows_kernel(
    codes,
    scale,
    tile_counter,
    parts,
    bias,
    sorted_weights,
    sorted_token_ids,
    block_expert_ids,
    num_valid,
    p0,
    p1,
    p2,
    num_tokens,
    depth,
    padded_depth,
    parts_stride,
    routing_block_m,
    k_splits,
    num_rows,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    FORMAT: gl.constexpr,
    STEPS: gl.constexpr,
):
    """One sorted row per program: interleaved gate and up partial sums to an e4m3 row with a scale.

    parts: float32 [k_splits, num_rows, parts_stride = 2 depth]. FORMAT, STEPS: a RowFormat and a
    RowSteps with one step for the whole row. The kernel is launched after a GEMM. It reads plan and
    bias before grid_dependency_wait.

    Grid: [num_rows].
    """
    launch_dependents()
    gl.static_assert(STEPS.whole and STEPS.held == 1, "a row is one step")
    row = gl.program_id(0)
    real = is_real(gl.load(sorted_token_ids + row, cache_modifier=BEFORE_WAIT), num_tokens)
    used = real & (row < gl.load(num_valid, cache_modifier=BEFORE_WAIT))
    source, block, target = step_offsets(0, STEPS)
    mask = block * 32 < gl.where(used, depth, 0)
    row_weight = gl.load(sorted_weights + row, cache_modifier=BEFORE_WAIT)
    expert = gl.load(
        block_expert_ids + row // routing_block_m, mask=used, other=0, cache_modifier=BEFORE_WAIT
    )
    weight = row_weight if WEIGHTED else None
    biases = None
    if HAS_BIAS:
        biases = _load_pairs(bias + expert.to(gl.int64) * parts_stride, source, mask, STEPS)
    grid_dependency_wait()
    reset_tile_counter(tile_counter)
    if used:
        row_parts = parts + row.to(gl.int64) * parts_stride
        split_stride = num_rows.to(gl.int64) * parts_stride
        pairs = _load_pairs(row_parts, source, mask, STEPS)
        for split in range(1, k_splits):  # ascending, so that every run gives the same bits
            pairs += _load_pairs(row_parts + split * split_stride, source, mask, STEPS)
        values = _activated_row(pairs, biases, weight, p0, p1, p2, ACTIVATION, STEPS)
        numbers = statistic_of(values, FORMAT, STEPS)
        factor, encoding = row_scale(row_maximum(numbers), FORMAT)
        encoded = encode_step(values, encoding, FORMAT, STEPS)
        out = RowsOut(codes, scale, padded_depth, num_rows)
        store_step(out, row, factor, encoded, target)


def sum_k_splits_and_encode(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    plan: RoutingPlan,
    options: MoEOptions,
    in_order: bool = False,
) -> SortedRows:
    """Finish stage 1 and encode the rows for stage 2 in one launch.

    Equals `sum_k_splits_and_activate` followed by `encode_rows`. Requires `fits_one_step`.

    Args:
        parts: interleaved gate and up partial sums, float32 [k_splits, P, 2F].
        bias: interleaved, float32 [E, 2F], or None.
        plan: the routing plan. options: of the layer. in_order: as in `encode_rows`.
    """
    k_splits, num_rows, width = parts.shape
    rows = empty_rows(plan, num_rows, width // 2, options)
    has_bias, depth, unit = bias is not None, width // 2, plan.routing_block_m
    _encode_launch(k_splits, num_rows, depth, plan.num_tokens, unit, has_bias, options, in_order)(
        codes=rows.codes,
        scale=rows.scale,
        tile_counter=rows.tile_counter,
        parts=parts,
        bias=parts if bias is None else bias,
        sorted_weights=plan.sorted_weights,
        sorted_token_ids=plan.sorted_token_ids,
        block_expert_ids=plan.block_expert_ids,
        num_valid=plan.num_valid,
    )
    return rows


@functools.lru_cache(CACHED_LAUNCHES)
def _encode_launch(
    k_splits: int,
    num_rows: int,
    depth: int,
    num_tokens: int,
    routing_block_m: int,
    has_bias: bool,
    options: MoEOptions,
    in_order: bool,
) -> Launch:
    steps = one_step(depth, in_order)
    return Launch(
        _moe_finish_rows_kernel,
        (num_rows,),
        **kernel_parameters(options.activation),
        num_tokens=num_tokens,
        depth=depth,
        padded_depth=padded(depth),
        parts_stride=2 * depth,
        routing_block_m=routing_block_m,
        k_splits=k_splits,
        num_rows=num_rows,
        ACTIVATION=options.activation.name,
        HAS_BIAS=has_bias,
        WEIGHTED=options.apply_router_weight_on_input,
        FORMAT=row_format(options),
        STEPS=steps,
        num_warps=steps.warps,
        **PDL_LAUNCH,
    )


_COMBINE_BLOCK = 256
_COMBINE_NUM_WARPS = 2
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
        (num_tokens, triton.cdiv(num_columns, _COMBINE_BLOCK)),
        top_k=top_k,
        num_columns=num_columns,
        routing_block_m=routing_block_m,
        k_splits=k_splits,
        num_rows=num_rows,
        BLOCK=_COMBINE_BLOCK,
        num_warps=_COMBINE_NUM_WARPS,
        **PDL_LAUNCH,
    )
