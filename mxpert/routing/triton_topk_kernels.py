"""Device code of route_topk: repeated maximum of integer keys that order like the scores.

Results are exact: equal scores give the lowest expert, on every device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.pdl import launch_dependents_and_wait

_EXCLUDED: tl.constexpr = tl.constexpr(-(1 << 31))
"""Key of experts that cannot be chosen, below the key of −inf."""
_NO_INDEX: tl.constexpr = tl.constexpr((1 << 31) - 1)
_DEEPSEEK_EPSILON: tl.constexpr = tl.constexpr(1e-20)
"""Added to the sum of sigmoid scores before the division, as DeepSeek-V3 does."""

TOPK_SIZES = (
    "num_tokens",
    "top_k",
    "num_experts",
    "num_groups",
    "top_groups",
    "row_stride",
    "routed_scaling_factor",
)
"""Sizes of the model and the batch, which Triton must not specialise on."""


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
def _limit_to_groups(rank, index, group, num_groups, top_groups, BEST_OF_GROUP: tl.constexpr):
    """Exclude experts outside the `top_groups` best groups.

    A group's score is its largest expert score, or the sum of the two largest (BEST_OF_GROUP 2).
    """
    group_rank = tl.full(rank.shape, _EXCLUDED, tl.int32)
    for current in range(num_groups):
        inside = (group == current)[None, :]
        members = tl.where(inside, rank, _EXCLUDED)
        best, first = _best(members, index)
        if BEST_OF_GROUP == 2:
            second = tl.max(tl.where(index == first[:, None], _EXCLUDED, members), 1)
            best = _rank(_rank_value(best) + _rank_value(second))
        group_rank = tl.where(inside, best[:, None], group_rank)
    allowed = rank != rank
    for _ in range(top_groups):
        _rank_of_group, first = _best(group_rank, group[None, :])
        chosen = group[None, :] == first[:, None]
        allowed |= chosen
        group_rank = tl.where(chosen, _EXCLUDED, group_rank)
    return tl.where(allowed, rank, _EXCLUDED)


@triton.jit
def _score(logit, SCORING: tl.constexpr):
    """Score of each logit alone: "sigmoid" or "sqrtsoftplus"."""
    if SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logit))
    else:
        tl.static_assert(SCORING == "sqrtsoftplus", "a score of each logit")
        power = tl.exp(tl.minimum(logit, 20.0))
        total = 1.0 + power
        # log(1 + power) to the last bits: log of the rounded total, corrected for its rounding.
        exact = tl.where(total == 1.0, power, tl.log(total) * (power / (total - 1.0)))
        return tl.sqrt(tl.where(logit > 20.0, logit, tl.where(logit == logit, exact, logit)))


@triton.jit
def _lost(logit, real, SCORING: tl.constexpr):
    """Which scores are NaN or infinite: [ROWS, 1] with a softmax, else of each logit."""
    if SCORING == "softmax":
        bad = real & ((logit != logit) | (logit == float("inf")))
        some = real & (logit > float("-inf"))
        bad_row = (tl.max(bad.to(tl.int32), 1) > 0) | (tl.max(some.to(tl.int32), 1) == 0)
        return bad_row[:, None]
    else:
        score = _score(logit, SCORING)
        return (score != score) | (score == float("inf"))


@triton.jit
def _chosen_weights(
    logit,
    chosen_logit,
    filled,
    in_row,
    routed_scaling_factor,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLAMP_NAN: tl.constexpr,
):
    """Routing weights of the chosen experts, float32 [ROWS, SLOTS]."""
    if SCORING != "softmax":
        weight = tl.where(filled, _score(chosen_logit, SCORING), 0.0)
        if CLAMP_NAN:
            weight = tl.where(_lost(chosen_logit, filled, SCORING), 0.0, weight)
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
        if CLAMP_NAN:
            weight = tl.where(_lost(logit, in_row, SCORING), 0.0, weight)
    return weight * routed_scaling_factor


@triton.jit
def _choice_scores(
    logit,
    correction_bias,
    expert,
    in_row,
    SCORING: tl.constexpr,
    BY_SCORE: tl.constexpr,
    CLAMP_NAN: tl.constexpr,
):
    """Scores that rank the experts, float32 [ROWS, EXPERTS]; the logits without BY_SCORE."""
    score = logit
    if BY_SCORE and SCORING == "softmax":
        largest = tl.max(tl.where(in_row, logit, float("-inf")), 1)
        score = tl.exp(logit - largest[:, None])
        score = score / tl.sum(tl.where(in_row, score, 0.0), 1)[:, None]
    elif BY_SCORE:
        score = _score(logit, SCORING)
    if CLAMP_NAN:
        score = tl.where(_lost(logit, in_row, SCORING), 0.0 if BY_SCORE else float("-inf"), score)
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
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    BY_SCORE: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    CLAMP_NAN: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Choose top_k experts of each token: weights float32 and ids int32, [num_tokens, top_k].

    Grid: (token tiles,), ROWS tokens and all experts per program. With one warp a program, the
    reductions over experts need no shared memory.
    """
    launch_dependents_and_wait(USE_PDL)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = (expert < num_experts)[None, :]
    in_row = real & (token < num_tokens)[:, None]  # [ROWS, EXPERTS]
    logit = tl.load(
        logits + token[:, None] * row_stride + expert[None, :], mask=in_row, other=0.0
    ).to(tl.float32)
    # logit, score [ROWS, EXPERTS] float32; rank [ROWS, EXPERTS] int32
    score = _choice_scores(
        logit, correction_bias, expert[None, :], real, SCORING, BY_SCORE, CLAMP_NAN
    )
    rank = tl.where(real, _rank(score), _EXCLUDED)
    if GROUPED:
        rank = _limit_to_groups(
            rank,
            expert[None, :],
            expert // (num_experts // num_groups),
            num_groups,
            top_groups,
            BEST_OF_GROUP,
        )

    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros([ROWS, SLOTS], tl.int32)  # expert of each slot
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
        logit, chosen_logit, filled, real, routed_scaling_factor, SCORING, NORMALIZE, CLAMP_NAN
    )
    place = token[:, None] * top_k + slot
    tl.store(topk_weights + place, weight, mask=filled)
    tl.store(topk_ids + place, chosen, mask=filled)
