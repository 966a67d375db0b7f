"""Checks of routing data. They synchronise with the host, so the ops do not run them."""

from __future__ import annotations

import torch

from mxpert.core.problem import GroupScore, Scoring, TopKOptions
from mxpert.errors import Checks, require
from mxpert.routing.plan import TOKEN_BITS, TOKEN_MASK, RoutingPlan, check_plan_shapes

CONTRACT_EXPERTS = (
    (256, 8),
    (257, 9),
    (385, 7),
    (513, 9),
    (128, 4),
    (129, 7),
    (161, 7),
    (33, 5),
    (100, 3),
    (1, 1),
)
"""(number of experts, top_k) pairs for tests of the sort: powers of two, odd numbers, one."""


def random_topk_ids(
    num_tokens: int, top_k: int, num_experts: int, *, generator: torch.Generator
) -> torch.Tensor:
    """Uniformly random distinct expert ids for each token, int32 [T, top_k]."""
    noise = torch.rand(num_tokens, num_experts, generator=generator)
    return noise.argsort(dim=1)[:, :top_k].to(torch.int32)


def validate_routing_plan(
    plan: RoutingPlan,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    num_local_tokens: int | None = None,
) -> None:
    """Check every invariant of a plan against the routing that it was made from.

    Only one plan satisfies all invariants, so this is a bit-exact test. It copies the plan to the
    CPU.

    Args:
        plan: the plan. topk_weights, topk_ids, num_experts, expert_map, num_local_tokens: the
            arguments that make_routing_plan received (num_local_tokens as an int).

    Raises:
        ValueError: an invariant does not hold; the message names the first.
    """
    check_plan_shapes(plan, "validate_routing_plan")
    tokens = plan.num_tokens if num_local_tokens is None else num_local_tokens
    tokens = min(max(tokens, 0), plan.num_tokens)
    expert = _expected_experts(plan, topk_ids.cpu().long(), num_experts, expert_map, tokens)
    used = _check_blocks(plan, expert, tokens)
    _check_rows(plan, expert, topk_weights.cpu(), used)


def _expected_experts(
    plan: RoutingPlan,
    ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
    tokens: int,
) -> torch.Tensor:
    """Local expert of each (token, slot), int64 [T, top_k]; −1 for dropped slots."""
    known = (ids >= 0) & (ids < num_experts)
    local = ids if expert_map is None else expert_map.cpu().long()[torch.where(known, ids, 0)]
    known &= (local >= 0) & (local < plan.num_experts)
    known &= (torch.arange(plan.num_tokens) < tokens)[:, None]
    return torch.where(known, local, -1)


def _require_equal(name: str, have: torch.Tensor, want: torch.Tensor) -> None:
    """Raise if two int tensors differ; the message gives the first differing element."""
    wrong = (have != want).flatten().nonzero()
    if wrong.numel():
        place = int(wrong[0])
        require(
            False,
            "validate_routing_plan",
            f"plan.{name}[{place}] (flat)",
            need=int(want.flatten()[place]),
            got=int(have.flatten()[place]),
        )


def _check_blocks(plan: RoutingPlan, expert: torch.Tensor, tokens: int) -> int:
    """Check num_valid and block_expert_ids; return the number of padded rows in use."""
    unit = plan.routing_block_m
    counts = torch.bincount(expert[expert >= 0], minlength=plan.num_experts)
    blocks = (counts + unit - 1) // unit
    used = int(blocks.sum())
    _require_equal("num_valid", plan.num_valid.cpu(), torch.tensor([used * unit, tokens]))
    want = torch.full((plan.capacity // unit,), -1)
    want[:used] = torch.arange(plan.num_experts).repeat_interleave(blocks)
    _require_equal("block_expert_ids", plan.block_expert_ids.cpu(), want)
    return used * unit


def _check_rows(plan: RoutingPlan, expert: torch.Tensor, weights: torch.Tensor, used: int) -> None:
    """Check sorted_token_ids, sorted_weights and slot_rows."""
    need, argument, top_k = Checks("validate_routing_plan"), "plan.sorted_token_ids", plan.top_k
    codes, slot_rows = plan.sorted_token_ids.cpu().long(), plan.slot_rows.cpu().long()
    slot, token = codes >> TOKEN_BITS, codes & TOKEN_MASK
    padding = slot == top_k
    _require_equal(
        "sorted_token_ids",
        codes[padding],
        torch.full_like(codes[padding], top_k << TOKEN_BITS | plan.num_tokens),
    )
    rows = (~padding).nonzero().flatten()
    behind = bool((rows < used).all())
    need(behind, argument, f"padding from row {used} on", rows.tolist()[-1:])

    token, slot = token[rows], slot[rows]
    inside = bool(((slot >= 0) & (slot < top_k) & (token < plan.num_tokens)).all())
    need(inside, argument, "slots and tokens of the batch", "a code outside it")
    source = token * top_k + slot
    block_expert = plan.block_expert_ids.cpu().long()[rows // plan.routing_block_m]
    _require_equal("block_expert_ids by row", block_expert, expert.flatten()[source])
    # Rows ascend strictly in (expert, token, slot), and no routed row is missing.
    order = block_expert * (plan.num_tokens * top_k) + source
    ascending, got = bool((order[1:] > order[:-1]).all()), "rows out of order or twice"
    need(ascending, argument, "rows ascending in expert, token, slot", got)
    kept = int((expert >= 0).sum())
    need(rows.numel() == kept, argument, f"{kept} routed rows", rows.numel())
    # Padding comes after all rows of an expert: rows of one expert are contiguous.
    same = block_expert[1:] == block_expert[:-1]
    adjacent = bool((rows[1:] - rows[:-1])[same].eq(1).all())
    need(adjacent, argument, "padding behind an expert's rows", "padding between them")

    want_slot_rows = torch.full((plan.num_tokens * top_k,), -1)
    want_slot_rows[source] = rows
    _require_equal("slot_rows", slot_rows.flatten(), want_slot_rows)
    want_weights = torch.zeros(plan.capacity)
    want_weights[rows] = weights.flatten()[source]
    _require_equal(
        "sorted_weights (bits)",
        plan.sorted_weights.cpu().view(torch.int32),
        want_weights.view(torch.int32),
    )


def topk_decision_gap(
    logits: torch.Tensor,
    top_k: int,
    options: TopKOptions,
    correction_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Smallest relative score difference that decides the expert ids of each token, float64 [T].

    The difference is divided by the token's largest |score| + |bias|. If the float32 scores of two
    implementations differ by a relative error below a quarter of this gap, they choose the same
    ids. (A group's score is the sum of two scores, and both sides of a comparison have an error:
    a factor of four.) Exact ties do not count: every implementation takes the lower id. If the
    logits themselves are ranked, nothing is rounded and the gap is infinite.

    Args:
        logits: [T, E]. top_k, options, correction_bias: as given to route_topk.
    """
    wide = logits.double()
    limited = options.num_groups > 1
    if options.scoring is Scoring.SIGMOID:
        ranked = wide.sigmoid()
    elif limited or correction_bias is not None:
        by_softmax = options.scoring is Scoring.SOFTMAX
        ranked = wide.softmax(dim=-1) if by_softmax else torch.nn.functional.softplus(wide).sqrt()
    else:
        return torch.full(logits.shape[:1], float("inf"), dtype=torch.float64)
    scale = ranked.abs().amax(dim=1)
    if correction_bias is not None:
        bias = correction_bias.double().cpu()
        scale, ranked = (ranked.abs() + bias.abs()).amax(dim=1), ranked + bias
    gap = torch.full(logits.shape[:1], float("inf"), dtype=torch.float64)
    if limited:
        grouped = ranked.view(len(ranked), options.num_groups, -1)
        best = 1 if options.group_score is GroupScore.MAX else 2
        group_scores = grouped.topk(best, dim=-1).values.sum(dim=-1)
        gap = _smallest_step(group_scores, options.top_groups)
        chosen = group_scores.topk(options.top_groups, dim=-1).indices
        ranked = grouped.gather(1, chosen[:, :, None].expand(-1, -1, grouped.shape[2])).flatten(1)
    return torch.minimum(gap, _smallest_step(ranked, top_k)) / scale


def _smallest_step(values: torch.Tensor, count: int) -> torch.Tensor:
    """Smallest non-zero difference between neighbours in the sorted top `count` + 1 of each row."""
    best = values.topk(min(count + 1, values.shape[1]), dim=-1).values
    steps = torch.nn.functional.pad(best[:, :-1] - best[:, 1:], (0, 1), value=float("inf"))
    return torch.where(steps == 0, float("inf"), steps).amin(dim=1)


def topk_weight_tolerance(span: float, terms: int) -> float:
    """Largest relative difference between two correct float32 implementations of the weights.

    A weight is an exponential divided by a sum of at most `terms` positive exponentials, whose
    arguments lie within ±`span`. A GPU computes ``exp(x) = 2^(x·log2 e)``: rounding the product
    adds a relative error of ``|x|·2⁻²⁴``, the instruction adds 2 ulp. Numerator and denominator
    both have this error. Each implementation's sum has ``terms − 1`` roundings. The division,
    ``1 + …``, the scaling factor and the other side's libm add at most 12 half-ulps. The total is
    ``(2·span + 2·terms + 20)·2⁻²⁴``.
    """
    return (2 * span + 2 * terms + 20) * 2.0**-24
