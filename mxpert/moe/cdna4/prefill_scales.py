"""Scales of activation rows in the order of the prefill kernel's MFMA."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...formats.layouts import UNIT_CODES, UNIT_SCALE_BYTES
from ...formats.spec import E8M0_BIAS
from ...routing.plan import TOKEN_MASK, RoutingPlan

_NUM_WARPS = 4
_READ_AHEAD = 2 * UNIT_SCALE_BYTES
"""Bytes that the prefill kernel reads past the last unit: it copies steps in pairs, and ahead."""
_UNITS = 8
"""Units of 128 elements that a program reads at a time."""

_TOKEN_MASK = tl.constexpr(TOKEN_MASK)
_ONE = tl.constexpr(E8M0_BIAS)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "depth_units", "scale_stride"])
def _arrange_scales_cdna4_kernel(
    arranged_ptr,
    scale_ptr,
    sorted_token_ids_ptr,
    num_valid_ptr,
    num_tokens,
    num_blocks,
    depth_units,
    scale_stride,
    GATHER: tl.constexpr,
    WIDE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Write the scales of 64 sorted rows as units [step][256 bytes].

    In a unit: [block][row of 16][fragment of 4], or if WIDE, for MFMA of 32 rows, [block % 2][row
    of 32][fragment of 2][block / 2].

    scale: uint8 [T, num_blocks] of tokens (GATHER) or [P, num_blocks] of sorted rows; None for
    scales of 1. Padding rows and blocks past the last one get scales of 1.

    Grid: (64-row blocks,); programs past the plan's rows return at once.
    """
    first = tl.program_id(0) * 64
    if first >= tl.load(num_valid_ptr):
        return
    row = tl.arange(0, 64)
    block = tl.arange(0, 4 * UNITS)
    token = tl.load(sorted_token_ids_ptr + first + row) & _TOKEN_MASK
    source = (token if GATHER else first + row).to(tl.int64) * scale_stride
    if WIDE:
        place = block // 4 * 256 + block % 2 * 128 + block % 4 // 2
        place = place[None, :] + (row % 32 * 4 + row // 32 * 2)[:, None]
    else:
        place = block // 4 * 256 + block % 4 * 64
        place = place[None, :] + (row % 16 * 4 + row // 16)[:, None]
    arranged_ptr += tl.program_id(0).to(tl.int64) * depth_units * 256
    for unit in range(0, depth_units, UNITS):
        scales = tl.full((64, 4 * UNITS), _ONE, tl.uint8)
        if scale_ptr is not None:
            there = (unit * 4 + block < num_blocks)[None, :] & (token < num_tokens)[:, None]
            offsets = source[:, None] + (unit * 4 + block)[None, :]
            scales = tl.load(scale_ptr + offsets, mask=there, other=_ONE)
        inside = (unit + block // 4 < depth_units)[None, :]
        tl.store(arranged_ptr + unit * 256 + place, scales, mask=inside)


def empty_arranged(like: torch.Tensor, row_blocks: int, depth: int) -> torch.Tensor:
    """Uninitialised scales of sorted rows, uint8 [row_blocks, ceil(depth / 128), 256]."""
    shape = (row_blocks, -(-depth // UNIT_CODES), UNIT_SCALE_BYTES)
    size = math.prod(shape)
    return like.new_empty(size + _READ_AHEAD, dtype=torch.uint8)[:size].view(shape)


def arrange_scales(
    scale: torch.Tensor | None,
    plan: RoutingPlan,
    depth: int,
    row_blocks: int,
    *,
    gather: bool,
    wide: bool,
) -> torch.Tensor:
    """Return the scales of sorted rows as uint8 [row_blocks, ceil(depth / 128), 256].

    Args:
        scale: E8M0 [T, depth / 32] with `gather`, else [P, depth / 32]; None for scales of 1.
        wide: for MFMA of 32 rows, which multiply e2m1.
        row_blocks: blocks of 64 sorted rows. Those that the plan does not use are uninitialised.
    """
    arranged = empty_arranged(plan.sorted_token_ids, row_blocks, depth)
    stride = 0 if scale is None else scale.stride(0)
    _launch(plan.num_tokens, depth, row_blocks, stride, gather, wide)(
        arranged_ptr=arranged,
        scale_ptr=scale,
        sorted_token_ids_ptr=plan.sorted_token_ids,
        num_valid_ptr=plan.num_valid,
    )
    return arranged


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    num_tokens: int, depth: int, row_blocks: int, stride: int, gather: bool, wide: bool
) -> Launch:
    return Launch(
        _arrange_scales_cdna4_kernel,
        (row_blocks,),
        num_tokens=num_tokens,
        num_blocks=depth // 32,
        depth_units=-(-depth // UNIT_CODES),
        scale_stride=stride,
        GATHER=gather,
        WIDE=wide,
        UNITS=_UNITS,
        num_warps=_NUM_WARPS,
    )
