"""List of runs of blocks for the prefill kernel, made on the device.

A run is up to `width` routing blocks of one expert; all tiles of a run have its activation rows.
Even lists have no run of a single block behind others, which takes more than its share of time: the
last `width` + 1 blocks of an expert are two runs, of `width` - 1 blocks and of two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...device.pdl import PDL_LAUNCH, launch_dependents_and_wait
from ...routing.plan import RoutingPlan

_CHUNK = tl.constexpr(1024)
_MOST_BLOCKS = tl.constexpr(4)
"""Largest width. All widths share one binary, which issues a run's loads together."""

_NUM_WARPS = 4


@dataclass(frozen=True)
class TileSchedule:
    """First block, number of blocks and expert of each run, and the number of runs [1]; int32."""

    first_block: torch.Tensor
    blocks: torch.Tensor
    expert: torch.Tensor
    count: torch.Tensor


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit
def _remaining_blocks(block_expert_ids_ptr, block, expert, used, num_blocks, blocks_per_unit):
    """Blocks of each block's expert from it on, at most `_MOST_BLOCKS` + 2."""
    remaining = tl.full([_CHUNK], 1, tl.int32)
    for ahead in tl.static_range(1, _MOST_BLOCKS + 2):
        after = tl.load(
            block_expert_ids_ptr + (block + ahead) // blocks_per_unit,
            mask=used & (block + ahead < num_blocks),
            other=-1,
        )
        remaining += (after == expert).to(tl.int32)
    return remaining


@triton.jit
def _even_runs(place, offset, remaining, width):
    """Whether a run starts at blocks, and its length; see the module.

    place: offset % width. offset: blocks of the expert before.
    """
    shares = width > 2
    last_pair = shares & (place == width - 1) & (remaining == 2)
    alone = shares & (offset > 0) & (remaining == 1)
    length = tl.minimum(remaining, width) - (shares & (remaining == width + 1)).to(tl.int32)
    return ((place == 0) & (alone == 0)) | last_pair, tl.where(last_pair, 2, length)


@triton.jit(do_not_specialize=["blocks_per_unit", "block_m", "width"])
def _moe_tile_schedule_kernel(
    first_block_ptr,
    blocks_ptr,
    expert_ptr,
    count_ptr,
    block_expert_ids_ptr,
    num_valid_ptr,
    blocks_per_unit,
    block_m,
    width,
    EVEN: tl.constexpr,
):
    """Scan the plan's blocks of block_m rows. Grid: one program.

    Among the blocks of one expert, every width-th block starts a run; EVEN: see the module.
    """
    launch_dependents_and_wait()
    num_blocks = tl.load(num_valid_ptr) // block_m
    count = 0
    run_start = 0
    for base in range(0, num_blocks, _CHUNK):
        block = base + tl.arange(0, _CHUNK)
        used = block < num_blocks
        expert = tl.load(block_expert_ids_ptr + block // blocks_per_unit, mask=used, other=-1)
        before = tl.load(
            block_expert_ids_ptr + (block - 1) // blocks_per_unit, mask=used & (block > 0), other=-1
        )
        starts = tl.where(used & (expert != before), block, 0)
        starts = tl.maximum(tl.associative_scan(starts, 0, _later), run_start)
        run_start = tl.max(starts, 0)
        head = used & ((block - starts) % width == 0)
        if EVEN:
            remaining = _remaining_blocks(
                block_expert_ids_ptr, block, expert, used, num_blocks, blocks_per_unit
            )
            offset = block - starts
            head, length = _even_runs(offset % width, offset, remaining, width)
            head = head & used
        else:
            length = tl.full([_CHUNK], 1, tl.int32)
            for ahead in tl.static_range(1, _MOST_BLOCKS):
                inside = (ahead < width) & (block + ahead < num_blocks)
                after = tl.load(
                    block_expert_ids_ptr + (block + ahead) // blocks_per_unit,
                    mask=head & inside,
                    other=-1,
                )
                length += (after == expert).to(tl.int32)
        position = count + tl.cumsum(head.to(tl.int32), 0) - 1
        tl.store(first_block_ptr + position, block, mask=head)
        tl.store(blocks_ptr + position, length, mask=head)
        tl.store(expert_ptr + position, expert, mask=head)
        count += tl.sum(head.to(tl.int32), 0)
    tl.store(count_ptr, count)


Schedules = dict[tuple[int, int, bool], TileSchedule]
"""Lists of a call by (block_m, width, even). Both stages of a layer share them."""


def tile_schedule(
    plan: RoutingPlan, block_m: int, width: int, made: Schedules | None, *, even: bool = False
) -> TileSchedule:
    """Group the plan's blocks of `block_m` rows into runs of up to `width` blocks.

    `made` caches the lists of a call; None makes a new list. even: see the module.
    """
    if made is None:
        return _make_schedule(plan, block_m, width, even)
    key = block_m, width, even
    if key not in made:
        made[key] = _make_schedule(plan, *key)
    return made[key]


def _make_schedule(plan: RoutingPlan, block_m: int, width: int, even: bool) -> TileSchedule:
    per_unit = plan.routing_block_m // block_m
    limit = plan.max_blocks * per_unit
    # Pad so that all three rows are 16-byte aligned: Triton specialises kernels on alignment.
    first_block, blocks, expert = plan.num_valid.new_empty((3, -(-limit // 4) * 4)).unbind()
    count = plan.num_valid.new_empty(1)
    _launch(per_unit, block_m, width, even)(
        first_block_ptr=first_block,
        blocks_ptr=blocks,
        expert_ptr=expert,
        count_ptr=count,
        block_expert_ids_ptr=plan.block_expert_ids,
        num_valid_ptr=plan.num_valid,
    )
    return TileSchedule(first_block, blocks, expert, count)


@functools.lru_cache(CACHED_LAUNCHES)
def _launch(blocks_per_unit: int, block_m: int, width: int, even: bool) -> Launch:
    return Launch(
        _moe_tile_schedule_kernel,
        (1,),
        blocks_per_unit=blocks_per_unit,
        block_m=block_m,
        width=width,
        EVEN=even,
        num_warps=_NUM_WARPS,
        **PDL_LAUNCH,
    )
