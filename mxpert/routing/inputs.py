"""Inputs of route_topk and make_routing_plan."""

from __future__ import annotations

import torch

from ..core.kernel import op_inputs


@op_inputs
class TopKInputs:
    """Inputs of ROUTE_TOPK: logits [T, E], correction_bias float32 [E] or None."""

    logits: torch.Tensor
    correction_bias: torch.Tensor | None = None


@op_inputs
class PlanInputs:
    """Inputs of ROUTING_PLAN.

    Args:
        topk_weights, topk_ids: [T, top_k].
        expert_map, num_local_tokens: as in `FusedMoEInputs`.
        arrivals: int64 words of `common.exchange` that say which tokens of other ranks to wait for.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    num_local_tokens: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None
