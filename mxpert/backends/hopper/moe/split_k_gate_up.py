"""Stage 1 after split-K: sum the K splits in order, then bias and activation.

Split-K is used if the tiles of a few tokens would leave SMs idle. The kernel is plain Triton. The
partial sums are float32 [k_splits, P, 2F], with row factors and activation scales applied.
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

_BLOCK = 256
_NUM_WARPS = 2
_TOKEN_MASK = tl.constexpr((1 << 24) - 1)


@triton.jit
def _sum_k_splits(part_ptr, part_stride, k_splits, mask):
    """Sum the values at `part_ptr` over the K splits, in ascending order: the same bits always."""
    total = tl.load(part_ptr, mask=mask, other=0.0)
    for split in range(1, k_splits):
        total += tl.load(part_ptr + split * part_stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_tokens", "routing_block_m", "k_splits", "num_rows"])
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
    values = gated_activation(gate, up, p0, p1, ACTIVATION)
    tl.store(h_ptr + row.to(tl.int64) * num_features + feature, values.to(tl.bfloat16), mask=mask)


def sum_k_splits_and_activate(
    parts: torch.Tensor, bias: torch.Tensor | None, plan: RoutingPlan, options: MoEOptions
) -> torch.Tensor:
    """Finish stage 1: interleaved partial sums float32 [k_splits, P, 2F] to bf16 [P, F].

    bias: interleaved, float32 [E, 2F], or None.
    """
    k_splits, num_rows, width = parts.shape
    h = parts.new_empty((num_rows, width // 2), dtype=torch.bfloat16)
    _launch(k_splits, num_rows, width // 2, plan.num_tokens, plan.routing_block_m, options)(
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
def _launch(
    k_splits: int,
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
        k_splits=k_splits,
        num_rows=num_rows,
        ACTIVATION=options.activation.name,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **PDL_LAUNCH,
    )
