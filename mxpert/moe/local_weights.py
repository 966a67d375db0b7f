"""The experts of one rank: taken out of a layer's weights, and checked against its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import message, require
from .weights import MoEWeights
from .weights_state import BIASES, PROJECTIONS

if TYPE_CHECKING:
    from ..distributed import ExpertParallel


def require_ranks(op: str, ranks: object) -> None:
    """Raise TypeError for what is no ExpertParallel, a class that ops do not import."""
    if not hasattr(ranks, "run_layer"):
        need, got = "an mxpert.distributed.ExpertParallel", type(ranks).__name__
        raise TypeError(message(op, "expert_parallel", need, got))


def take_experts(weights: MoEWeights, experts: Sequence[int]) -> MoEWeights:
    """Weights of some experts, in the given order; a copy that is not prepared.

    Args:
        weights: ROW_MAJOR.
    """
    index = list(experts)
    projections = {
        name: getattr(weights, name)._mapped(lambda part: part[index]) for name in PROJECTIONS
    }
    biases = {name: bias[index] for name in BIASES if (bias := getattr(weights, name)) is not None}
    return replace(weights, **projections, **biases, fold_certificates=None)


def local_weights(op: str, ranks: ExpertParallel, weights: MoEWeights) -> MoEWeights:
    """Take this rank's experts out of those of the whole layer; local ones are returned as given.

    Args:
        op: name that error messages start with.
        ranks: an ExpertParallel.
        weights: of this rank, or of all experts, prepared or not.

    Returns:
        MoEWeights of this rank; a copy in ROW_MAJOR if all were given.

    Raises:
        ValueError: weights of another number of experts.
    """
    whole, local = ranks.placement.num_experts, ranks.num_local_experts
    require(
        weights.num_experts in (whole, local),
        op,
        "weights.num_experts",
        need=f"the {local} experts of rank {ranks.rank}, or all {whole}",
        got=weights.num_experts,
    )
    if weights.num_experts == local:
        return weights
    return take_experts(weights.unprepare(), ranks.local_experts)


def check_local_weights(
    op: str, ranks: ExpertParallel, weights: MoEWeights, activation_format: str
) -> None:
    """Check that the weights of a rank and its ExpertParallel fit; calls check the tokens."""
    for name, given, need in (
        ("weights.num_experts", weights.num_experts, ranks.num_local_experts),
        ("weights.hidden_size", weights.hidden_size, ranks.hidden_size),
        ("weights.device", weights.device, ranks.device),
    ):
        require(given == need, op, name, need=f"{need}, as expert_parallel has", got=given)
    local = ranks.local_experts
    require(
        len(local) < ranks.placement.num_experts or local == tuple(sorted(local)),
        op,
        "expert_parallel.placement",
        need="ascending experts on a rank that has all of them",
        got=list(local),
        remedy="a state dict would not show their order",
    )
    check_wire_format(op, ranks, activation_format)


def check_wire_format(op: str, ranks: ExpertParallel, activation_format: str) -> None:
    """Raise ValueError for MXFP8 rows between ranks whose local layer takes another format."""
    require(
        ranks.wire_format == "bf16" or activation_format == "mxfp8",
        op,
        "activation_format",
        need="'mxfp8' with wire_format='mxfp8'",
        got=repr(activation_format),
        remedy="make ExpertParallel with wire_format='bf16'",
    )
