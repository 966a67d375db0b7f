"""Groups of rows, whose offsets the kernels read on the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import GroupedProblem, Target
from .targets import refuse_without

MAX_GROUPS = 1024
"""Every program keeps the offsets of all groups in registers: at most sixteen a thread."""

OFFSETS_BLOCK = 128
"""Groups that `_padded_offsets_kernel` handles per iteration."""


@triton.jit
def clamp_rows(offsets, num_rows):
    """Clamp group offsets to [0, num_rows]; return int32."""
    return tl.minimum(tl.maximum(offsets, 0), num_rows).to(tl.int32)


@triton.jit
def load_offset(offsets_ptr, index, num_rows):
    """Load group offset `index` (int32 or int64), clamp it to [0, num_rows], return int32."""
    return clamp_rows(tl.load(offsets_ptr + index), num_rows)


@triton.jit
def group_extents(
    group_offsets_ptr, num_groups, num_rows, UNIT: tl.constexpr, BLOCK_G: tl.constexpr
):
    """First row, end row and number of UNIT-row blocks (rounded up) of every group.

    Three int32 vectors [BLOCK_G]. Entry `num_groups` stands for the rows past the last group; later
    entries are empty.
    """
    index = tl.arange(0, BLOCK_G)
    starts = tl.load(group_offsets_ptr + index, mask=index <= num_groups, other=0)
    stops = tl.load(group_offsets_ptr + index + 1, mask=index < num_groups, other=0)
    starts = clamp_rows(starts, num_rows)
    stops = tl.where(index == num_groups, num_rows, clamp_rows(stops, num_rows))
    return starts, stops, tl.cdiv(tl.maximum(stops - starts, 0), UNIT)


@triton.jit(
    do_not_specialize=("num_groups", "reduction"),
    do_not_specialize_on_alignment=("group_offsets_ptr",),
)
def _padded_offsets_kernel(
    padded_ptr, group_offsets_ptr, num_groups, reduction, BLOCK: tl.constexpr
):
    """Write padded [num_groups + 1]: offsets of the groups in a columnwise copy, multiples of 32.

    Grid: (1,). The program handles all groups, BLOCK per iteration. Offsets are clamped to
    `reduction`, the length of the copy.
    """
    before = tl.full((), 0, tl.int64)  # blocks of the groups of earlier iterations
    for first in range(0, num_groups + 1, BLOCK):
        index = first + tl.arange(0, BLOCK)
        starts = tl.load(group_offsets_ptr + index, mask=index <= num_groups, other=0)
        stops = tl.load(group_offsets_ptr + index + 1, mask=index < num_groups, other=0)
        sizes = clamp_rows(stops, reduction) - clamp_rows(starts, reduction)
        blocks = tl.cdiv(tl.maximum(sizes, 0), 32).to(tl.int64)
        begins = before + tl.cumsum(blocks, axis=0) - blocks
        tl.store(
            padded_ptr + index,
            tl.minimum(begins * 32, reduction).to(tl.int32),
            mask=index <= num_groups,
        )
        before += tl.sum(blocks, axis=0)


@triton.jit
def pick(chosen, values):
    """The entry of `values` that is chosen; 0 if none is."""
    return tl.sum(tl.where(chosen, values, 0), axis=0)


def group_block(num_groups: int) -> int:
    """Length of the group vector in a kernel; one more entry stands for rows without a group."""
    result: int = max(32, triton.next_power_of_2(num_groups + 1))
    return result


def refuse_groups(target: Target, num_groups: int) -> str | None:
    """Why portable kernels cannot run on `target` with this many groups; None if they can."""
    if num_groups > MAX_GROUPS:
        return f"holds at most {MAX_GROUPS} groups, got {num_groups}; split the call"
    return refuse_without(target, "scaled MFMA and the OCP fp8 types")


def padded_offsets(problem: GroupedProblem, group_offsets: torch.Tensor) -> torch.Tensor:
    """Compute `mxpert.padded_group_offsets` in one launch, clamped to the length of the copies."""
    padded = group_offsets.new_empty(problem.num_groups + 1, dtype=torch.int32)
    _padded_offsets_launch(problem.num_groups, problem.num_rows)(
        padded_ptr=padded, group_offsets_ptr=group_offsets
    )
    return padded


@functools.lru_cache(CACHED_LAUNCHES)
def _padded_offsets_launch(num_groups: int, reduction: int) -> Launch:
    return Launch(
        _padded_offsets_kernel,
        (1,),
        num_groups=num_groups,
        reduction=reduction,
        BLOCK=OFFSETS_BLOCK,
        num_warps=OFFSETS_BLOCK // 32,
    )
