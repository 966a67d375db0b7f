"""Stage 1 after split-K: sum the splits in order, then run the epilogue.

Split-K is used if the tiles of a few tokens would leave SMs idle. The kernel is plain Triton. The
partial sums are float32 [splits, P, rows], with row factors and activation scales applied.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ....problem import MoEOptions
from ....routing import RoutingPlan
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ...common.activation import gated_activation
from ...common.pdl import PDL_LAUNCH, launch_dependents_and_wait
from .encode import SortedRows, empty_rows, format_constants, padded, step_options
from .split_k_encode import _moe_finish_rows_kernel

_BLOCK = 256
_NUM_WARPS = 2
_TOKEN_MASK = tl.constexpr((1 << 24) - 1)


@triton.jit
def _sum_parts(part_ptr, part_stride, splits, mask):
    """Sum the values at `part_ptr` over the splits, in ascending order."""
    total = tl.load(part_ptr, mask=mask, other=0.0)
    for split in range(1, splits):
        total += tl.load(part_ptr + split * part_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "routing_block_m", "splits", "num_rows"])
def _moe_gate_up_finish_kernel(
    h_ptr,
    parts_ptr,
    bias_ptr,
    sorted_weights_ptr,
    sorted_token_ids_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    p0,
    p1,
    num_tokens,
    num_features,
    routing_block_m,
    splits,
    num_rows,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish one sorted row per program: interleaved gate and up partial sums to bf16 features."""
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
    gate = _sum_parts(parts_ptr, part_stride, splits, mask)
    up = _sum_parts(parts_ptr + 1, part_stride, splits, mask)
    if sorted_weights_ptr is not None:
        weight = tl.load(sorted_weights_ptr + row)
        gate *= weight
        up *= weight
    if bias_ptr is not None:
        expert = tl.load(block_expert_ids_ptr + row // routing_block_m)
        bias_ptr += expert.to(tl.int64) * (2 * num_features) + 2 * feature
        gate += tl.load(bias_ptr, mask=mask, other=0.0)
        up += tl.load(bias_ptr + 1, mask=mask, other=0.0)
    values = gated_activation(gate, up, p0, p1, ACTIVATION)
    tl.store(h_ptr + row.to(tl.int64) * num_features + feature, values.to(tl.bfloat16), mask=mask)


def finish_gate_up(
    parts: torch.Tensor, bias: torch.Tensor | None, plan: RoutingPlan, options: MoEOptions
) -> torch.Tensor:
    """Finish stage 1: interleaved partial sums float32 [splits, P, 2F] to bf16 [P, F]."""
    splits, num_rows, width = parts.shape
    h = parts.new_empty((num_rows, width // 2), dtype=torch.bfloat16)
    _finish_launch(splits, num_rows, width // 2, plan.num_tokens, plan.routing_block_m, options)(
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
def _finish_launch(
    splits: int,
    num_rows: int,
    num_features: int,
    num_tokens: int,
    routing_block_m: int,
    options: MoEOptions,
) -> Launch:
    first, second = options.activation.parameters
    return Launch(
        _moe_gate_up_finish_kernel,
        (num_rows, triton.cdiv(num_features, _BLOCK)),
        p0=float(first),
        p1=float(second),
        num_tokens=num_tokens,
        num_features=num_features,
        routing_block_m=routing_block_m,
        splits=splits,
        num_rows=num_rows,
        ACTIVATION=options.activation.name,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **PDL_LAUNCH,
    )


def finish_rows(
    parts: torch.Tensor, bias: torch.Tensor | None, plan: RoutingPlan, options: MoEOptions
) -> SortedRows:
    """Finish stage 1 and encode the rows for stage 2 in one launch.

    Equals `finish_gate_up` followed by `sorted_rows`. Requires `fits_one_step`.
    """
    splits, num_rows, width = parts.shape
    rows = empty_rows(plan, num_rows, width // 2, options)
    _finish_rows_launch(
        splits,
        num_rows,
        width // 2,
        plan.num_tokens,
        plan.routing_block_m,
        bias is not None,
        options,
    )(
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
def _finish_rows_launch(
    splits: int,
    num_rows: int,
    depth: int,
    num_tokens: int,
    routing_block_m: int,
    has_bias: bool,
    options: MoEOptions,
) -> Launch:
    first, second = options.activation.parameters
    return Launch(
        _moe_finish_rows_kernel,
        (num_rows,),
        p0=float(first),
        p1=float(second),
        num_tokens=num_tokens,
        depth=depth,
        padded_depth=padded(depth),
        parts_stride=2 * depth,
        routing_block_m=routing_block_m,
        splits=splits,
        num_rows=num_rows,
        ACTIVATION=options.activation.name,
        HAS_BIAS=has_bias,
        WEIGHTED=options.apply_router_weight_on_input,
        **format_constants(options),
        **step_options(depth),
        **PDL_LAUNCH,
    )
