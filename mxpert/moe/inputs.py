"""Inputs of the MoE layer and of its stages."""

from __future__ import annotations

from typing import Any

import torch

from ..core.kernel import KernelSpec, Launchable, op_inputs
from ..core.problem import MoEProblem
from ..formats.tensor import Operand
from ..routing.plan import RoutingPlan
from .weights import MoEWeights


@op_inputs
class FusedMoEInputs:
    """Inputs of FUSED_MOE.

    Args:
        x: bfloat16 [T, H], or an MXTensor in the layer's activation format.
        weights: of the local experts.
        topk_weights, topk_ids: [T, top_k].
        expert_map: int32 [E_global], global id → local id or −1; None: ids are local.
        num_local_tokens: int32 [1]; tokens at or beyond it are skipped. None means T.
        out: [T, H] to write; None allocates.
        arrivals: what the sort waits for where other ranks send the tokens.
    """

    x: Operand
    weights: MoEWeights
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None = None
    num_local_tokens: torch.Tensor | None = None
    out: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None


@op_inputs
class LogitsInputs:
    """Inputs of FUSED_MOE where the layer chooses the experts itself (`MoEProblem.routing`).

    Args:
        logits: of the router, [T, E] over all experts: those of `expert_map`, if there is one.
        correction_bias: float32 [E], added to the scores for the choice only.
        x, weights, expert_map, num_local_tokens, out: as in `FusedMoEInputs`.
    """

    x: Operand
    weights: MoEWeights
    logits: torch.Tensor
    correction_bias: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    num_local_tokens: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def with_ids(self, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> FusedMoEInputs:
        """The same inputs with the experts that were chosen, in the place of logits."""
        return FusedMoEInputs(
            self.x,
            self.weights,
            topk_weights,
            topk_ids,
            self.expert_map,
            self.num_local_tokens,
            self.out,
        )


LayerInputs = FusedMoEInputs | LogitsInputs
"""What a kernel of FUSED_MOE takes: ids, or logits from which it chooses them."""


@op_inputs
class GateUpInputs:
    """Inputs of MOE_GATE_UP.

    Args:
        x: bfloat16 [T, H], or an MXTensor in the layer's activation format.
    """

    x: Operand
    weights: MoEWeights
    plan: RoutingPlan


@op_inputs
class DownInputs:
    """Inputs of MOE_DOWN.

    Args:
        h: bfloat16 [P, F] in sorted order, or an MXTensor in the layer's activation format.
        out: [T, H] to write, of a whole layer; None allocates.
    """

    h: Operand
    weights: MoEWeights
    plan: RoutingPlan
    out: torch.Tensor | None = None


LayerKernel = KernelSpec[MoEProblem, Any, LayerInputs, torch.Tensor]
"""A kernel of FUSED_MOE. Any: a MoEConfig, or a ReferenceConfig."""

LayerLaunch = Launchable[MoEProblem, Any, FusedMoEInputs, torch.Tensor]
"""A whole layer, with the exchange between ranks where there are several."""
