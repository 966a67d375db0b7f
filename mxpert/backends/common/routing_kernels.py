"""Device code of routing: choice of experts, and the sort into padded blocks of one expert.

Results are exact and do not depend on the order of execution. There is no global atomic, and
exactly one program writes each output element, so no buffer needs clearing.

The sort has two forms, chosen by the number of routed rows R = T·k (see routing.py):

* One launch with one program per expert, for small R: work grows as E·R. Each program counts the
  rows of all experts itself (the ids stay in L2), which costs less than a second launch or a grid
  barrier. It ranks its own rows by a prefix sum over a match mask.
* Two launches with one program per chunk of rows. The first counts the rows of each expert per
  chunk. The second adds the counts (each program reads at most MAX_CHUNKS vectors from L2, which
  saves a third launch). It then sorts ``expert << log2(TILE) | position`` of its rows in registers
  and scatters them. A sort of 1024 keys takes 55 compare steps, 52 of them inside a warp. A prefix
  sum over a one-hot [TILE, E] tile would take E / 55 times as many operations, a comparison of all
  pairs of rows TILE / 55 times as many. Stores of sorted rows are also contiguous in runs.

Shapes: R routed rows, P sorted rows, E local experts, B = NUM_BINS ≥ E a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pdl import maybe_launch_dependents_and_wait

_TOKEN_BITS: tl.constexpr = tl.constexpr(24)
_FILL: tl.constexpr = tl.constexpr(512)
_PAD_EXPERTS: tl.constexpr = tl.constexpr(16)
_PAD_ROWS: tl.constexpr = tl.constexpr(32)
_BLOCKS: tl.constexpr = tl.constexpr(32)
_EXCLUDED: tl.constexpr = tl.constexpr(-(1 << 31))
_NO_INDEX: tl.constexpr = tl.constexpr((1 << 31) - 1)
_DEEPSEEK_EPSILON: tl.constexpr = tl.constexpr(1e-20)

# Sizes of the model and the batch, which Triton must not specialise on.
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
TOPK_SIZES = (
    "num_tokens",
    "top_k",
    "num_experts",
    "num_groups",
    "top_groups",
    "row_stride",
    "routed_scaling_factor",
)


@triton.jit
def _load_local_experts(topk_ids, expert_map, row, used_rows, num_experts, num_local_experts):
    """Local expert of each routed row, −1 if it has none; ids out of range never index memory."""
    expert = tl.load(topk_ids + row, mask=row < used_rows, other=-1)
    if expert_map is not None:
        known = (expert >= 0) & (expert < num_experts)
        expert = tl.load(expert_map + expert, mask=known, other=-1)
    else:
        expert = tl.where(expert < num_experts, expert, -1)
    return tl.where((expert >= 0) & (expert < num_local_experts), expert, -1)


@triton.jit
def _used_tokens(num_local_tokens, num_tokens):
    """Number of tokens to route: `num_local_tokens` clamped to 0 … T, or T if it is None."""
    used = num_tokens
    if num_local_tokens is not None:
        used = tl.minimum(tl.maximum(tl.load(num_local_tokens), 0), num_tokens)
    return used


@triton.jit
def _store_rows(
    sorted_token_ids, sorted_weights, slot_rows, topk_weights, row, position, top_k, kept
):
    """Store routed rows at their sorted positions, and the positions in slot_rows."""
    code = ((row % top_k) << _TOKEN_BITS) | (row // top_k)
    weight = tl.load(topk_weights + row, mask=kept, other=0.0)
    tl.store(sorted_token_ids + position, code, mask=kept)
    tl.store(sorted_weights + position, weight, mask=kept)
    tl.store(slot_rows + row, position, mask=kept)


@triton.jit
def _store_padding(sorted_token_ids, sorted_weights, row, num_tokens, top_k, mask):
    """Store padding rows: slot `top_k` of token T, weight 0."""
    code = tl.zeros_like(row) + ((top_k << _TOKEN_BITS) | num_tokens)
    tl.store(sorted_token_ids + row, code, mask=mask)
    tl.store(sorted_weights + row, tl.zeros_like(row).to(tl.float32), mask=mask)


@triton.jit
def _store_tail(sorted_token_ids, sorted_weights, total, capacity, num_tokens, top_k):
    """Store padding in this program's share of the rows after the last block in use."""
    first = total + tl.program_id(0) * _FILL
    for start in range(first, capacity, tl.num_programs(0) * _FILL):
        row = start + tl.arange(0, _FILL)
        _store_padding(sorted_token_ids, sorted_weights, row, num_tokens, top_k, row < capacity)


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
    num_tokens,
    top_k,
    num_experts,
    num_local_experts,
    routing_block_m,
    capacity,
    NUM_BINS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The whole plan in one launch: program e writes the rows and blocks of local expert e."""
    maybe_launch_dependents_and_wait(USE_PDL)
    own = tl.program_id(0)
    used_tokens = _used_tokens(num_local_tokens, num_tokens)
    used_rows = used_tokens * top_k
    lane = tl.arange(0, TILE)

    counts = tl.zeros([NUM_BINS], tl.int32)
    for first in range(0, used_rows, TILE):
        expert = _load_local_experts(
            topk_ids, expert_map, first + lane, used_rows, num_experts, num_local_experts
        )
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
        expert = _load_local_experts(
            topk_ids, expert_map, row, used_rows, num_experts, num_local_experts
        )
        mine = expert == own
        rank = tl.cumsum(mine.to(tl.int32), 0)
        _store_rows(
            sorted_token_ids,
            sorted_weights,
            slot_rows,
            topk_weights,
            row,
            position + rank - 1,
            top_k,
            mine,
        )
        position += tl.sum(mine.to(tl.int32), 0)
        dropped = (expert < 0) & (row < num_tokens * top_k) & (own == 0)
        tl.store(slot_rows + row, tl.full([TILE], -1, tl.int32), mask=dropped)

    for first in range(position, end, _FILL):
        row = first + tl.arange(0, _FILL)
        _store_padding(sorted_token_ids, sorted_weights, row, num_tokens, top_k, row < end)
    _store_tail(sorted_token_ids, sorted_weights, total, capacity, num_tokens, top_k)

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
    num_tokens,
    top_k,
    num_experts,
    num_local_experts,
    tiles_per_chunk,
    NUM_BINS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Count the rows of each local expert per chunk: chunk_counts int32 [num_chunks, NUM_BINS]."""
    maybe_launch_dependents_and_wait(USE_PDL)
    chunk = tl.program_id(0)
    used_rows = _used_tokens(num_local_tokens, num_tokens) * top_k
    counts = tl.zeros([NUM_BINS], tl.int32)
    for tile in range(tiles_per_chunk):
        row = (chunk * tiles_per_chunk + tile) * TILE + tl.arange(0, TILE)
        expert = _load_local_experts(
            topk_ids, expert_map, row, used_rows, num_experts, num_local_experts
        )
        counts += tl.histogram(tl.maximum(expert, 0), NUM_BINS, mask=expert >= 0)
    tl.store(chunk_counts + chunk * NUM_BINS + tl.arange(0, NUM_BINS), counts)


@triton.jit
def _sum_chunks(chunk_counts, num_chunks, NUM_BINS: tl.constexpr):
    """Sums of counts over all chunks and over the chunks before this one, int32 [NUM_BINS] each."""
    bins = tl.arange(0, NUM_BINS)
    counts = tl.zeros([NUM_BINS], tl.int32)
    before = tl.zeros([NUM_BINS], tl.int32)
    for first in range(0, num_chunks, 8):
        chunk = first + tl.arange(0, 8)
        tile = tl.load(
            chunk_counts + chunk[:, None] * NUM_BINS + bins[None, :],
            mask=(chunk < num_chunks)[:, None],
            other=0,
        )  # [8, NUM_BINS]
        counts += tl.sum(tile, 0)
        before += tl.sum(tl.where((chunk < tl.program_id(0))[:, None], tile, 0), 0)
    return counts, before


@triton.jit
def _pad_experts(
    sorted_token_ids,
    sorted_weights,
    pad_starts,
    pad_ends,
    num_tokens,
    top_k,
    num_local_experts,
    routing_block_m,
):
    """Store the padding rows of this program's share of the experts."""
    step = tl.num_programs(0) * _PAD_EXPERTS
    for first in range(tl.program_id(0) * _PAD_EXPERTS, num_local_experts, step):
        expert = first + tl.arange(0, _PAD_EXPERTS)
        clipped = tl.minimum(expert, num_local_experts - 1)
        start = tl.gather(pad_starts, clipped, 0)
        end = tl.where(expert < num_local_experts, tl.gather(pad_ends, clipped, 0), 0)
        for offset in range(0, routing_block_m, _PAD_ROWS):
            row = start[:, None] + (offset + tl.arange(0, _PAD_ROWS))[None, :]
            _store_padding(
                sorted_token_ids, sorted_weights, row, num_tokens, top_k, row < end[:, None]
            )


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
    USE_PDL: tl.constexpr,
):
    """Store the rows of one chunk at their sorted positions.

    Each program also stores a share of the padding rows, unused rows and block experts.
    """
    maybe_launch_dependents_and_wait(USE_PDL)
    used_tokens = _used_tokens(num_local_tokens, num_tokens)
    counts, before = _sum_chunks(chunk_counts, num_chunks, NUM_BINS)
    padded = (counts + routing_block_m - 1) // routing_block_m * routing_block_m
    ends = tl.cumsum(padded, 0)
    starts = ends - padded
    total = tl.sum(padded, 0)
    _pad_experts(
        sorted_token_ids,
        sorted_weights,
        starts + counts,
        ends,
        num_tokens,
        top_k,
        num_local_experts,
        routing_block_m,
    )
    _store_tail(sorted_token_ids, sorted_weights, total, capacity, num_tokens, top_k)
    _store_block_experts(block_expert_ids, ends, total, routing_block_m, capacity)
    if tl.program_id(0) == 0:
        tl.store(num_valid, total)
        tl.store(num_valid + 1, used_tokens)

    lane = tl.arange(0, TILE)
    next_row = starts + before
    for tile in range(tiles_per_chunk):
        first = (tl.program_id(0) * tiles_per_chunk + tile) * TILE
        expert = _load_local_experts(
            topk_ids, expert_map, first + lane, used_tokens * top_k, num_experts, num_local_experts
        )
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
        _store_rows(
            sorted_token_ids, sorted_weights, slot_rows, topk_weights, row, position, top_k, kept
        )
        dropped = (row < num_tokens * top_k) & (expert >= NUM_BINS)
        tl.store(slot_rows + row, tl.full([TILE], -1, tl.int32), mask=dropped)
        next_row += in_tile


@triton.jit
def _rank(value):
    """int32 key with the same order as the float32 value; NaN counts as −inf, −0 equals 0."""
    value = tl.where(value == value, value, float("-inf"))
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _rank_value(rank):
    """Inverse of `_rank`: the float32 value of a key."""
    return tl.where(rank < 0, rank ^ 0x7FFFFFFF, rank).to(tl.float32, bitcast=True)


@triton.jit
def _best(rank, index):
    """The highest rank of each row and the lowest index that has it.

    Two 32-bit reductions are faster than one of 64-bit keys.
    """
    best = tl.max(rank, 1)
    return best, tl.min(tl.where(rank == best[:, None], index, _NO_INDEX), 1)


@triton.jit
def _limit_to_groups(rank, index, group, num_groups, top_groups):
    """Exclude experts outside the `top_groups` best groups.

    A group's score is the sum of its two largest expert scores.
    """
    group_rank = tl.full(rank.shape, _EXCLUDED, tl.int32)
    for current in range(num_groups):
        inside = (group == current)[None, :]
        members = tl.where(inside, rank, _EXCLUDED)
        best, first = _best(members, index)
        second = tl.max(tl.where(index == first[:, None], _EXCLUDED, members), 1)
        score = _rank_value(best) + _rank_value(second)
        group_rank = tl.where(inside, _rank(score)[:, None], group_rank)
    allowed = rank != rank
    for _ in range(top_groups):
        _rank_of_group, first = _best(group_rank, group[None, :])
        chosen = group[None, :] == first[:, None]
        allowed |= chosen
        group_rank = tl.where(chosen, _EXCLUDED, group_rank)
    return tl.where(allowed, rank, _EXCLUDED)


@triton.jit
def _chosen_weights(
    logit,
    chosen_logit,
    filled,
    in_row,
    routed_scaling_factor,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Routing weights of the chosen experts, float32 [ROWS, SLOTS]."""
    if SIGMOID:
        weight = tl.where(filled, 1.0 / (1.0 + tl.exp(-chosen_logit)), 0.0)
        if NORMALIZE:
            weight = weight / (tl.sum(weight, 1) + _DEEPSEEK_EPSILON)[:, None]
    else:
        if NORMALIZE:
            largest = tl.max(tl.where(filled, chosen_logit, float("-inf")), 1)
            weight = tl.where(filled, tl.exp(chosen_logit - largest[:, None]), 0.0)
            total = tl.sum(weight, 1)
        else:
            largest = tl.max(tl.where(in_row, logit, float("-inf")), 1)
            weight = tl.exp(chosen_logit - largest[:, None])
            total = tl.sum(tl.where(in_row, tl.exp(logit - largest[:, None]), 0.0), 1)
        weight = weight / total[:, None]
    return weight * routed_scaling_factor


@triton.jit
def _choice_scores(
    logit, correction_bias, expert, in_row, SIGMOID: tl.constexpr, BY_PROBABILITY: tl.constexpr
):
    """Scores that rank the experts, float32 [ROWS, EXPERTS]."""
    score = logit
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif BY_PROBABILITY:
        largest = tl.max(tl.where(in_row, logit, float("-inf")), 1)
        score = tl.exp(logit - largest[:, None])
        score = score / tl.sum(tl.where(in_row, score, 0.0), 1)[:, None]
    if correction_bias is not None:
        score += tl.load(correction_bias + expert, mask=in_row, other=0.0)
    return score


@triton.jit(do_not_specialize=TOPK_SIZES)
def _route_topk_kernel(
    topk_weights,
    topk_ids,
    logits,
    correction_bias,
    num_tokens,
    top_k,
    num_experts,
    num_groups,
    top_groups,
    row_stride,
    routed_scaling_factor,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    BY_PROBABILITY: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Route ROWS tokens per program. One warp per program: reductions need no shared memory."""
    maybe_launch_dependents_and_wait(USE_PDL)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = (expert < num_experts)[None, :]
    in_row = real & (token < num_tokens)[:, None]  # [ROWS, EXPERTS]
    logit = tl.load(
        logits + token[:, None] * row_stride + expert[None, :], mask=in_row, other=0.0
    ).to(tl.float32)
    score = _choice_scores(logit, correction_bias, expert[None, :], real, SIGMOID, BY_PROBABILITY)
    rank = tl.where(real, _rank(score), _EXCLUDED)
    if GROUPED:
        rank = _limit_to_groups(
            rank, expert[None, :], expert // (num_experts // num_groups), num_groups, top_groups
        )

    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros([ROWS, SLOTS], tl.int32)
    for current in range(top_k):
        _rank_of_best, index = _best(rank, expert[None, :])
        chosen = tl.where(slot == current, index[:, None], chosen)
        rank = tl.where(expert[None, :] == index[:, None], _EXCLUDED, rank)

    # Read the chosen logits again (from L1) instead of carrying them through the reductions.
    filled = (slot < top_k) & (token < num_tokens)[:, None]
    chosen_logit = tl.load(
        logits + token[:, None] * row_stride + chosen, mask=filled, other=0.0
    ).to(tl.float32)
    weight = _chosen_weights(
        logit, chosen_logit, filled, real, routed_scaling_factor, SIGMOID, NORMALIZE
    )
    place = token[:, None] * top_k + slot
    tl.store(topk_weights + place, weight, mask=filled)
    tl.store(topk_ids + place, chosen, mask=filled)
