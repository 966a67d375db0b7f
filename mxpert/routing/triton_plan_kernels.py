"""Device code of make_routing_plan: the sort of routed rows into padded blocks of one expert.

Results are exact and do not depend on the order of execution. There is no global atomic, and
exactly one program writes each output element, so no buffer needs clearing.

The sort has two forms, chosen by the number of routed rows R = T·k (see host.py):

* One launch with one program per expert, for small R: work grows as E·R. Each program counts the
  rows of all experts itself (the ids stay in L2), which costs less than a second launch or a grid
  barrier. It ranks its own rows by a prefix sum over a match mask.
* Two launches with one program per chunk of rows. The first counts the rows of each expert per
  chunk. The second adds the counts (each program reads at most MAX_CHUNKS vectors from L2, which
  saves a third launch). It then sorts ``expert << log2(TILE) | position`` of its rows in registers
  and scatters them. A sort of 1024 keys takes 55 compare steps, 52 of them inside a warp. A prefix
  sum over a one-hot [TILE, E] tile would take E / 55 times as many operations, a comparison of all
  pairs of rows TILE / 55 times as many. Stores of sorted rows are also contiguous in runs.

Tokens that other ranks send (`arrivals`): each program waits for them and agrees with the others on
whether all are there; see `distributed/exchange`. If a rank is lost, no row is routed.

Shapes: R routed rows, P sorted rows, E local experts, B = NUM_BINS ≥ E a power of two.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.exchange_wait import wait_for_predecessor
from ..device.pdl import launch_dependents_and_wait
from .plan import TOKEN_BITS

_TOKEN_BITS: tl.constexpr = tl.constexpr(TOKEN_BITS)
_FILL: tl.constexpr = tl.constexpr(512)
"""Padding rows, or block experts, that a program stores at once."""
_PAD_EXPERTS: tl.constexpr = tl.constexpr(16)
_PAD_ROWS: tl.constexpr = tl.constexpr(32)
"""Experts and rows of the tiles in which the scatter stores the padding between experts."""
_BLOCKS: tl.constexpr = tl.constexpr(32)
"""Blocks whose expert a program of the scatter finds at once, by comparing with all experts."""
_CHUNKS: tl.constexpr = tl.constexpr(8)
"""Chunks whose counts a program of the scatter adds at once."""

PLAN_SIZES = (
    "num_tokens",
    "top_k",
    "num_experts",
    "num_local_experts",
    "routing_block_m",
    "capacity",
    "num_chunks",
    "tiles_per_chunk",
)
"""Sizes of the model and the batch, which Triton must not specialise on."""


class RoutedIds(NamedTuple):
    """Experts of the routed rows: global ids [R], their map to local experts or None, sizes."""

    topk_ids: tl.tensor
    expert_map: tl.tensor | None
    num_used: tl.tensor
    num_experts: tl.tensor
    num_local_experts: tl.tensor


class SortedRows(NamedTuple):
    """Where sorted rows are stored, [P] each, and what is written there for padding."""

    token_ids: tl.tensor
    weights: tl.tensor
    num_tokens: tl.tensor
    top_k: tl.tensor


@triton.jit
def _load_local_experts(ids, row):
    """Local expert of each routed row, −1 if it has none; ids out of range never index memory.

    int64 ids are compared as they are and narrowed at the end, so that none of them wraps.
    """
    expert = tl.load(ids.topk_ids + row, mask=row < ids.num_used, other=-1)
    if ids.expert_map is not None:
        known = (expert >= 0) & (expert < ids.num_experts)
        expert = tl.load(ids.expert_map + expert, mask=known, other=-1)
    else:
        expert = tl.where(expert < ids.num_experts, expert, -1)
    return tl.where((expert >= 0) & (expert < ids.num_local_experts), expert, -1).to(tl.int32)


@triton.jit
def _wait_for_inputs(arrivals, KIND: tl.constexpr, USE_PDL: tl.constexpr):
    """Wait for the inputs; return whether all tokens of other ranks are there, if there are any."""
    if arrivals is None:
        launch_dependents_and_wait(USE_PDL)
        return True
    else:
        return wait_for_predecessor(arrivals, KIND, USE_PDL)


@triton.jit
def _used_tokens(num_local_tokens, num_tokens, arrivals, complete):
    """Number of tokens to route: `num_local_tokens` clamped to 0 … T, or T if it is None.

    It is 0 if tokens of another rank are lost.
    """
    used = num_tokens
    if num_local_tokens is not None:
        used = tl.minimum(tl.maximum(tl.load(num_local_tokens), 0), num_tokens)
    if arrivals is not None:
        used = tl.where(complete, used, 0)
    return used


@triton.jit
def _store_rows(out, slot_rows, topk_weights, row, position, kept):
    """Store routed rows at their sorted positions, and the positions in slot_rows."""
    code = ((row % out.top_k) << _TOKEN_BITS) | (row // out.top_k)
    weight = tl.load(topk_weights + row, mask=kept, other=0.0).to(tl.float32)
    tl.store(out.token_ids + position, code, mask=kept)
    tl.store(out.weights + position, weight, mask=kept)
    tl.store(slot_rows + row, position, mask=kept)


@triton.jit
def _store_padding(out, row, mask):
    """Store padding rows: slot `top_k` of token T, weight 0."""
    code = tl.zeros_like(row) + ((out.top_k << _TOKEN_BITS) | out.num_tokens)
    tl.store(out.token_ids + row, code, mask=mask)
    tl.store(out.weights + row, tl.zeros_like(row).to(tl.float32), mask=mask)


@triton.jit
def _store_tail(out, total, capacity):
    """Store padding in this program's share of the rows after the last block in use."""
    first = total + tl.program_id(0) * _FILL
    for start in range(first, capacity, tl.num_programs(0) * _FILL):
        row = start + tl.arange(0, _FILL)
        _store_padding(out, row, row < capacity)


@triton.jit(do_not_specialize=PLAN_SIZES)
def _routing_plan_expert_kernel(
    sorted_token_ids,
    sorted_weights,
    block_expert_ids,
    num_valid,
    slot_rows,
    topk_ids,
    topk_weights,
    expert_map,
    num_local_tokens,
    arrivals,
    num_tokens,
    top_k,
    num_experts,
    num_local_experts,
    routing_block_m,
    capacity,
    NUM_BINS: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The whole plan in one launch.

    Grid: (local experts,). Program e writes the rows and blocks of expert e, and a share of what
    lies behind the last block in use. Programs do not wait for each other.
    """
    complete = _wait_for_inputs(arrivals, KIND, USE_PDL)
    own = tl.program_id(0)
    used_tokens = _used_tokens(num_local_tokens, num_tokens, arrivals, complete)
    used_rows = used_tokens * top_k
    ids = RoutedIds(topk_ids, expert_map, used_rows, num_experts, num_local_experts)
    out = SortedRows(sorted_token_ids, sorted_weights, num_tokens, top_k)
    lane = tl.arange(0, TILE)

    counts = tl.zeros([NUM_BINS], tl.int32)
    for first in range(0, used_rows, TILE):
        expert = _load_local_experts(ids, first + lane)
        counts += tl.histogram(tl.maximum(expert, 0), NUM_BINS, mask=expert >= 0)
    padded = (counts + routing_block_m - 1) // routing_block_m * routing_block_m
    bins = tl.arange(0, NUM_BINS)
    total = tl.sum(padded, 0)
    start = tl.sum(tl.where(bins < own, padded, 0), 0)
    end = start + tl.sum(tl.where(bins == own, padded, 0), 0)

    # A row's rank within the expert is a prefix sum over matches, in (token, slot) order.
    position = start
    for first in range(0, num_tokens * top_k, TILE):
        row = first + lane
        expert = _load_local_experts(ids, row)
        mine = expert == own
        rank = tl.cumsum(mine.to(tl.int32), 0)
        _store_rows(out, slot_rows, topk_weights, row, position + rank - 1, mine)
        position += tl.sum(mine.to(tl.int32), 0)
        dropped = (expert < 0) & (row < num_tokens * top_k) & (own == 0)
        tl.store(slot_rows + row, tl.full([TILE], -1, tl.int32), mask=dropped)

    for first in range(position, end, _FILL):
        row = first + tl.arange(0, _FILL)
        _store_padding(out, row, row < end)
    _store_tail(out, total, capacity)

    last_block = end // routing_block_m
    for first in range(start // routing_block_m, last_block, _FILL):
        block = first + tl.arange(0, _FILL)
        tl.store(block_expert_ids + block, tl.zeros_like(block) + own, mask=block < last_block)
    num_blocks = capacity // routing_block_m
    first_unused = total // routing_block_m + own * _FILL
    for first in range(first_unused, num_blocks, tl.num_programs(0) * _FILL):
        block = first + tl.arange(0, _FILL)
        tl.store(block_expert_ids + block, tl.full([_FILL], -1, tl.int32), mask=block < num_blocks)
    if own == 0:
        tl.store(num_valid, total)
        tl.store(num_valid + 1, used_tokens)


@triton.jit(do_not_specialize=PLAN_SIZES)
def _routing_plan_count_kernel(
    chunk_counts,
    topk_ids,
    expert_map,
    num_local_tokens,
    arrivals,
    num_tokens,
    top_k,
    num_experts,
    num_local_experts,
    tiles_per_chunk,
    NUM_BINS: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Count the rows of each local expert per chunk: chunk_counts int32 [num_chunks, NUM_BINS].

    Grid: (num_chunks,), one chunk of tiles_per_chunk · TILE rows per program.
    """
    complete = _wait_for_inputs(arrivals, KIND, USE_PDL)
    chunk = tl.program_id(0)
    used_rows = _used_tokens(num_local_tokens, num_tokens, arrivals, complete) * top_k
    ids = RoutedIds(topk_ids, expert_map, used_rows, num_experts, num_local_experts)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for tile in range(tiles_per_chunk):
        row = (chunk * tiles_per_chunk + tile) * TILE + tl.arange(0, TILE)
        expert = _load_local_experts(ids, row)
        counts += tl.histogram(tl.maximum(expert, 0), NUM_BINS, mask=expert >= 0)
    tl.store(chunk_counts + chunk * NUM_BINS + tl.arange(0, NUM_BINS), counts)


@triton.jit
def _sum_chunks(chunk_counts, num_chunks, NUM_BINS: tl.constexpr):
    """Sums of counts over all chunks and over the chunks before this one, int32 [NUM_BINS] each."""
    bins = tl.arange(0, NUM_BINS)
    counts = tl.zeros([NUM_BINS], tl.int32)
    before = tl.zeros([NUM_BINS], tl.int32)
    for first in range(0, num_chunks, _CHUNKS):
        chunk = first + tl.arange(0, _CHUNKS)
        tile = tl.load(
            chunk_counts + chunk[:, None] * NUM_BINS + bins[None, :],
            mask=(chunk < num_chunks)[:, None],
            other=0,
        )  # [_CHUNKS, NUM_BINS]
        counts += tl.sum(tile, 0)
        before += tl.sum(tl.where((chunk < tl.program_id(0))[:, None], tile, 0), 0)
    return counts, before


@triton.jit
def _pad_experts(out, pad_starts, pad_ends, num_local_experts, routing_block_m):
    """Store the padding rows of this program's share of the experts."""
    step = tl.num_programs(0) * _PAD_EXPERTS
    for first in range(tl.program_id(0) * _PAD_EXPERTS, num_local_experts, step):
        expert = first + tl.arange(0, _PAD_EXPERTS)
        clipped = tl.minimum(expert, num_local_experts - 1)
        start = tl.gather(pad_starts, clipped, 0)
        end = tl.where(expert < num_local_experts, tl.gather(pad_ends, clipped, 0), 0)
        for offset in range(0, routing_block_m, _PAD_ROWS):
            row = start[:, None] + (offset + tl.arange(0, _PAD_ROWS))[None, :]
            _store_padding(out, row, row < end[:, None])  # [_PAD_EXPERTS, _PAD_ROWS]


@triton.jit
def _store_block_experts(block_expert_ids, ends, total, routing_block_m, capacity):
    """Store the expert of each block: the number of experts that end at or before its start."""
    num_blocks = capacity // routing_block_m
    for first in range(tl.program_id(0) * _BLOCKS, num_blocks, tl.num_programs(0) * _BLOCKS):
        block = first + tl.arange(0, _BLOCKS)
        start = block * routing_block_m
        expert = tl.sum((ends[:, None] <= start[None, :]).to(tl.int32), 0)
        tl.store(
            block_expert_ids + block, tl.where(start < total, expert, -1), mask=block < num_blocks
        )


@triton.jit(do_not_specialize=PLAN_SIZES)
def _routing_plan_scatter_kernel(
    sorted_token_ids,
    sorted_weights,
    block_expert_ids,
    num_valid,
    slot_rows,
    chunk_counts,
    topk_ids,
    topk_weights,
    expert_map,
    num_local_tokens,
    arrivals,
    num_tokens,
    top_k,
    num_experts,
    num_local_experts,
    routing_block_m,
    capacity,
    num_chunks,
    tiles_per_chunk,
    NUM_BINS: tl.constexpr,
    TILE: tl.constexpr,
    LOG2_TILE: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Store the rows of one chunk at their sorted positions.

    Grid: (num_chunks,), the chunks of `_routing_plan_count_kernel`. Each program also stores a
    share of the padding rows, unused rows and block experts.
    """
    complete = _wait_for_inputs(arrivals, KIND, USE_PDL)
    used_tokens = _used_tokens(num_local_tokens, num_tokens, arrivals, complete)
    counts, before = _sum_chunks(chunk_counts, num_chunks, NUM_BINS)
    padded = (counts + routing_block_m - 1) // routing_block_m * routing_block_m
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    total = tl.sum(padded, 0)
    out = SortedRows(sorted_token_ids, sorted_weights, num_tokens, top_k)
    _pad_experts(out, starts + counts, ends, num_local_experts, routing_block_m)
    _store_tail(out, total, capacity)
    _store_block_experts(block_expert_ids, ends, total, routing_block_m, capacity)
    if tl.program_id(0) == 0:
        tl.store(num_valid, total)
        tl.store(num_valid + 1, used_tokens)

    lane = tl.arange(0, TILE)
    next_row = starts + before  # [NUM_BINS], the next free row of each expert
    for tile in range(tiles_per_chunk):
        first = (tl.program_id(0) * tiles_per_chunk + tile) * TILE
        used_rows = used_tokens * top_k
        ids = RoutedIds(topk_ids, expert_map, used_rows, num_experts, num_local_experts)
        expert = _load_local_experts(ids, first + lane)
        in_tile = tl.histogram(tl.maximum(expert, 0), NUM_BINS, mask=expert >= 0)
        # Keys are distinct and ascend in expert, then in row. Rows without an expert are last.
        key = (tl.where(expert >= 0, expert, NUM_BINS) << LOG2_TILE) | lane
        key = tl.sort(key)
        expert = key >> LOG2_TILE
        row = first + (key & (TILE - 1))
        # Rank within the expert: index in the sorted tile minus the tile's rows of lower experts.
        shift = next_row - (tl.cumsum(in_tile, 0) - in_tile)
        kept = expert < NUM_BINS
        position = tl.gather(shift, tl.where(kept, expert, 0), 0) + lane
        _store_rows(out, slot_rows, topk_weights, row, position, kept)
        dropped = (row < num_tokens * top_k) & (expert >= NUM_BINS)
        tl.store(slot_rows + row, tl.full([TILE], -1, tl.int32), mask=dropped)
        next_row += in_tile
