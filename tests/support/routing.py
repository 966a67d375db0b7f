"""Checks of routing data. They synchronise with the host, so the ops do not run them."""

from __future__ import annotations

import torch

from mxpert.core.problem import GroupScore, Scoring, TopKOptions
from mxpert.errors import require
from mxpert.routing.plan import TOKEN_BITS, RoutingPlan, check_plan_shapes

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
    """Compare a plan bit for bit with the one that the routing asks for; copies it to the CPU.

    Args:
        plan: the plan. topk_weights, topk_ids, num_experts, expert_map, num_local_tokens: the
            arguments that make_routing_plan received (num_local_tokens as an int).

    Raises:
        ValueError: a tensor differs; the message names its first wrong element.
    """
    check_plan_shapes(plan, "validate_routing_plan")
    tokens = plan.num_tokens if num_local_tokens is None else num_local_tokens
    tokens = min(max(tokens, 0), plan.num_tokens)
    expert = _expected_experts(plan, topk_ids.cpu().long(), num_experts, expert_map, tokens)
    for name, want in _expected_plan(plan, expert, topk_weights.cpu(), tokens).items():
        have = getattr(plan, name).cpu().flatten()
        if have.dtype == torch.float32:  # bit for bit
            have, want = have.view(torch.int32), want.view(torch.int32)
        wrong = (have != want).nonzero()
        if wrong.numel():
            place = int(wrong[0])
            argument, need, got = f"plan.{name}[{place}] (flat)", int(want[place]), int(have[place])
            require(False, "validate_routing_plan", argument, need=need, got=got)


def _expected_experts(
    plan: RoutingPlan,
    ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None,
    tokens: int,
) -> torch.Tensor:
    """Local expert of each (token, slot), int64 [T · top_k]; −1 for dropped slots."""
    known = (ids >= 0) & (ids < num_experts)
    local = ids if expert_map is None else expert_map.cpu().long()[torch.where(known, ids, 0)]
    known &= (local >= 0) & (local < plan.num_experts)
    known &= (torch.arange(plan.num_tokens) < tokens)[:, None]
    return torch.where(known, local, -1).flatten()


def _expected_plan(
    plan: RoutingPlan, expert: torch.Tensor, weights: torch.Tensor, tokens: int
) -> dict[str, torch.Tensor]:
    """The flat tensors of the one plan that is right: rows ascend in (expert, token, slot), and
    each expert's rows are padded to a multiple of `routing_block_m`."""
    unit, top_k = plan.routing_block_m, plan.top_k
    counts = torch.bincount(expert[expert >= 0], minlength=plan.num_experts)
    blocks = (counts + unit - 1) // unit
    used = int(blocks.sum())
    source = expert.argsort(stable=True)[int((expert < 0).sum()) :]  # token · top_k + slot
    padding = blocks * unit - counts
    rows = torch.arange(len(source)) + (padding.cumsum(0) - padding)[expert[source]]
    found = {
        "num_valid": torch.tensor([used * unit, tokens]),
        "block_expert_ids": torch.full((plan.capacity // unit,), -1),
        "sorted_token_ids": torch.full((plan.capacity,), top_k << TOKEN_BITS | plan.num_tokens),
        "sorted_weights": torch.zeros(plan.capacity),
        "slot_rows": torch.full((plan.num_tokens * top_k,), -1),
    }
    found["block_expert_ids"][:used] = torch.arange(plan.num_experts).repeat_interleave(blocks)
    found["sorted_token_ids"][rows] = source % top_k << TOKEN_BITS | source // top_k
    found["sorted_weights"][rows] = weights.flatten()[source]
    found["slot_rows"][source] = rows
    return found


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
