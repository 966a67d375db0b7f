"""Reference routing in torch on any device, without host synchronisation."""

from __future__ import annotations

import torch

from ..core.kernel import ReferenceKernel
from ..core.problem import Config, GroupScore, Op, RoutingProblem, Scoring, TopKOptions, TopKProblem
from .inputs import PlanInputs, TopKInputs
from .plan import TOKEN_BITS, RoutingPlan, plan_capacity

DEEPSEEK_EPSILON = 1e-20
"""Added to the sum of sigmoid scores before the division, as DeepSeek-V3 does."""
_EXCLUDED = -(1 << 31)
"""Rank key of experts outside the chosen groups; lower than the key of −inf."""


class TopKKernel(ReferenceKernel):
    """route_topk by one stable sort per token."""

    op = Op.ROUTE_TOPK

    def launch(
        self, problem: TopKProblem, config: Config, inputs: TopKInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options, correction_bias = problem.options, inputs.correction_bias
        logits = inputs.logits.float()
        limited = options.num_groups > 1
        over_chosen = options.scoring is Scoring.SOFTMAX and options.normalize
        # Scores are monotone: ranking by logits gives the same order without their rounding error.
        by_logit = not limited and correction_bias is None
        by_logit &= options.scoring is not Scoring.SIGMOID
        lost = None
        if options.clamp_nan:
            lost = _scores(logits, options.scoring).isfinite().logical_not()
            logits = logits.masked_fill(lost, 0)
        scores = logits
        if not (by_logit and over_chosen):
            scores = _scores(logits, options.scoring)
        if lost is not None:
            scores = scores.masked_fill(lost, 0)
        ranked = logits if by_logit else scores
        if by_logit and lost is not None:
            ranked = logits.masked_fill(lost, float("-inf"))
        if correction_bias is not None:
            ranked = scores + correction_bias
        rank = rank_keys(ranked)
        if limited:
            rank = _limit_to_groups(rank, ranked, options)
        ids = rank.argsort(dim=-1, descending=True, stable=True)[:, : problem.top_k]
        if over_chosen:
            weights = logits.gather(1, ids).softmax(dim=-1)
            if lost is not None:
                weights = weights.masked_fill(lost.gather(1, ids), 0)
        else:
            weights = scores.gather(1, ids)
            if options.normalize:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + DEEPSEEK_EPSILON)
        return weights * float(options.routed_scaling_factor), ids.to(torch.int32)


def _scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Scores of float32 logits [T, E]."""
    if scoring is Scoring.SIGMOID:
        return logits.sigmoid()
    if scoring is Scoring.SQRTSOFTPLUS:
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(dim=-1)


def rank_keys(values: torch.Tensor) -> torch.Tensor:
    """int32 keys with the same order as the float32 values; NaN counts as −inf, −0 equals 0."""
    values = torch.where(values.isnan(), float("-inf"), values)
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _limit_to_groups(
    rank: torch.Tensor, ranked: torch.Tensor, options: TopKOptions
) -> torch.Tensor:
    """Exclude experts outside the `top_groups` best groups; see `GroupScore`."""
    num_groups, top_groups = options.num_groups, options.top_groups
    num_tokens, num_experts = ranked.shape
    numbers = torch.where(ranked.isnan(), float("-inf"), ranked)
    size = num_experts // num_groups
    best = 1 if options.group_score is GroupScore.MAX else 2
    group_scores = numbers.view(num_tokens, num_groups, size).topk(best, dim=-1).values.sum(dim=-1)
    order = rank_keys(group_scores).argsort(dim=-1, descending=True, stable=True)
    competes = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=rank.device)
    competes.scatter_(1, order[:, :top_groups], True)
    allowed = competes.repeat_interleave(size, dim=1)
    return torch.where(allowed, rank, _EXCLUDED)


class PlanKernel(ReferenceKernel):
    """make_routing_plan by one stable sort of all routed rows."""

    op = Op.ROUTING_PLAN

    def launch(self, problem: RoutingProblem, config: Config, inputs: PlanInputs) -> RoutingPlan:
        topk_ids, expert_map = inputs.topk_ids, inputs.expert_map
        experts, unit = problem.num_local_experts, problem.routing_block_m
        num_tokens, top_k, device = problem.num_tokens, problem.top_k, topk_ids.device
        capacity = plan_capacity(num_tokens, top_k, experts, unit)
        tokens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
        if inputs.num_local_tokens is not None:
            tokens = inputs.num_local_tokens.clamp(0, num_tokens)

        token = torch.arange(num_tokens, device=device).repeat_interleave(top_k)  # [R]
        slot = torch.arange(top_k, device=device).repeat(num_tokens)  # [R]
        expert = local_experts(topk_ids.reshape(-1), expert_map, problem.num_experts, experts)
        expert = torch.where(token < tokens, expert, experts)  # [R]; `experts`: a dropped row
        order = expert.argsort(stable=True)  # ascending (expert, token, slot)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        counts.scatter_add_(0, expert, torch.ones_like(expert))
        padded = (counts[:experts] + unit - 1) // unit * unit
        ends = padded.cumsum(0)
        used = padded.sum()

        # Position of the i-th sorted row: start of its expert plus its rank within the expert.
        # Dropped rows are written to an extra last row, which is cut off.
        shift = torch.zeros_like(counts)
        shift[:experts] = ends - padded - (counts.cumsum(0) - counts)[:experts]
        sorted_expert = expert[order]
        kept = sorted_expert < experts
        row = torch.arange(order.shape[0], device=device) + shift[sorted_expert]
        row = torch.where(kept, row, capacity)

        sorted_ids = torch.full(
            (capacity + 1,), top_k << TOKEN_BITS | num_tokens, dtype=torch.int32, device=device
        )
        sorted_ids[row] = (slot << TOKEN_BITS | token)[order].to(torch.int32)
        weights = torch.zeros(capacity + 1, dtype=torch.float32, device=device)
        weights[row] = inputs.topk_weights.reshape(-1)[order].float()
        slot_rows = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
        slot_rows[order] = torch.where(kept, row, -1).to(torch.int32)
        block_start = torch.arange(capacity // unit, device=device) * unit
        block_expert = torch.searchsorted(ends, block_start, right=True)
        return RoutingPlan(
            sorted_token_ids=sorted_ids[:capacity],
            sorted_weights=weights[:capacity],
            block_expert_ids=torch.where(block_start < used, block_expert, -1).to(torch.int32),
            num_valid=torch.cat([used.view(1).to(torch.int32), tokens]),
            slot_rows=slot_rows.view(num_tokens, top_k),
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=experts,
            routing_block_m=unit,
        )


def local_experts(
    ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, num_local_experts: int
) -> torch.Tensor:
    """Local expert of each global id, int64; `num_local_experts` for ids without one."""
    ids = ids.long()
    known = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = expert_map[torch.where(known, ids, 0)].long()
    known &= (ids >= 0) & (ids < num_local_experts)
    return torch.where(known, ids, num_local_experts)


TOPK = TopKKernel()
PLAN = PlanKernel()
