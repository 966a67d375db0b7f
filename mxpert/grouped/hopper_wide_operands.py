"""Decoding of ScaleSpan.AUTO operands to bfloat16 if the device has counted wide blocks.

The host does not read the count. It always allocates memory for the decoded copies and launches the
kernel, which returns at once if no copy is needed.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import GroupedProblem, resident_programs
from ..device.mx_codec import decode, scale_value
from ..formats.tensor import MXTensor

_BLOCKS = 128
"""Blocks that a program decodes per iteration: 32 values a thread."""

_NUM_WARPS = 4

_PROGRAMS = 8
"""Programs per SM: 32 KiB of loads in flight hide the latency of memory."""


@triton.jit
def is_wide(first_wide_ptr, second_wide_ptr):
    """Whether an operand has wide blocks: one of the counts [1] is above 0 (None counts as 0)."""
    count = 0
    if first_wide_ptr is not None:
        count = tl.maximum(count, tl.load(first_wide_ptr))
    if second_wide_ptr is not None:
        count = tl.maximum(count, tl.load(second_wide_ptr))
    return count > 0


@triton.jit
def _decode_blocks(
    out_ptr, qdata_ptr, scale_ptr, num_blocks, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    """Decode contiguous blocks of 32 values in a grid-stride loop, BLOCK blocks per iteration."""
    for tile in range(tl.program_id(0), tl.cdiv(num_blocks, BLOCK), tl.num_programs(0)):
        blocks = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = blocks < num_blocks
        offsets = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
        codes = tl.load(qdata_ptr + offsets, mask=mask[:, None], other=0)  # [BLOCK, 32]
        scale = scale_value(tl.load(scale_ptr + blocks, mask=mask, other=0).to(tl.int32))
        values = decode(codes, FORMAT) * scale[:, None]
        tl.store(out_ptr + offsets, values.to(tl.bfloat16), mask=mask[:, None])


@triton.jit(
    do_not_specialize=["first_blocks", "second_blocks"],
    do_not_specialize_on_alignment=["first_wide_ptr", "second_wide_ptr"],
)
def _grouped_decode_if_wide_kernel(
    first_out_ptr,
    second_out_ptr,
    first_ptr,
    first_scale_ptr,
    second_ptr,
    second_scale_ptr,
    first_wide_ptr,
    second_wide_ptr,
    first_blocks,
    second_blocks,
    FIRST_FORMAT: tl.constexpr,
    SECOND_FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode both operands exactly if a count of wide blocks is above 0; otherwise return.

    Grid: 8 programs per SM; each decodes BLOCK blocks at a time, in a grid-stride loop.
    """
    if is_wide(first_wide_ptr, second_wide_ptr):
        _decode_blocks(first_out_ptr, first_ptr, first_scale_ptr, first_blocks, FIRST_FORMAT, BLOCK)
        _decode_blocks(
            second_out_ptr, second_ptr, second_scale_ptr, second_blocks, SECOND_FORMAT, BLOCK
        )


def decode_if_wide(
    first: MXTensor, second: MXTensor, problem: GroupedProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 copies of both operands; uninitialised unless one has wide blocks.

    first, second: MXFP8 along their last axis; at least one has a count of wide blocks.
    """
    copies = tuple(
        torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        for tensor in (first, second)
    )
    names = first.format.element.name, second.format.element.name
    _launch(
        resident_programs(problem, _PROGRAMS), *names, first.scale.numel(), second.scale.numel()
    )(
        first_out_ptr=copies[0],
        second_out_ptr=copies[1],
        first_ptr=first.qdata.contiguous(),
        first_scale_ptr=first.scale.contiguous(),
        second_ptr=second.qdata.contiguous(),
        second_scale_ptr=second.scale.contiguous(),
        first_wide_ptr=first.wide_blocks,
        second_wide_ptr=second.wide_blocks,
    )
    return copies[0], copies[1]


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(
    programs: int, first: str, second: str, first_blocks: int, second_blocks: int
) -> Launch:
    return Launch(
        _grouped_decode_if_wide_kernel,
        (programs,),
        first_blocks=first_blocks,
        second_blocks=second_blocks,
        FIRST_FORMAT=first,
        SECOND_FORMAT=second,
        BLOCK=_BLOCKS,
        num_warps=_NUM_WARPS,
    )
