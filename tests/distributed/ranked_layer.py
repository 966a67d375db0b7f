"""A small layer over several ranks: tokens of each rank, the judge, and checks of results.

The judge is one process with all experts, which runs the tokens of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import MoEWeights, MXTensor
from mxpert.distributed import DispatchedTokens, ExpertParallel
from mxpert.moe.local_weights import take_experts
from mxpert.testing.problems import MoEShape, random_moe_problem, random_tokens
from tests.conformance.cases.exchange import FLOAT32, SHAPE, TRANSPORTS, UNEVEN

__all__ = ["FLOAT32", "SHAPE", "TRANSPORTS", "UNEVEN"]
MAX_TOKENS = 7


@dataclass(frozen=True)
class Tokens:
    """Arguments of one rank's call."""

    x: torch.Tensor | MXTensor
    weights: torch.Tensor
    ids: torch.Tensor


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def whole_layer(shape: MoEShape = SHAPE) -> MoEWeights:
    """The weights of all experts; the same on every rank."""
    return random_moe_problem(shape, 0).weights


def part_of(weights: MoEWeights, ep: ExpertParallel) -> MoEWeights:
    """The experts of this rank, in the order of their local ids."""
    return take_experts(weights, ep.local_experts)


def make(shape: MoEShape = SHAPE, group: Any = None, **changes: Any) -> ExpertParallel:
    options: dict[str, Any] = dict(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        max_tokens=MAX_TOKENS,
        combine_dtype=torch.float32,
        timeout_s=30,
    )
    return ExpertParallel(group, **options | changes)


def tokens(count: int | None = None, *, shape: MoEShape = SHAPE, seed: int = 0) -> Tokens:
    """Random tokens, others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank())
    return Tokens(*random_tokens(shape, UNEVEN[rank()] if count is None else count, generator))


def run(ep: ExpertParallel, weights: MoEWeights, given: Tokens, **options: Any) -> torch.Tensor:
    """This rank's part of the layer."""
    options = dict(activation=SHAPE.activation, out_dtype=torch.float32) | options
    return mxpert.fused_moe(
        given.x, weights, given.weights, given.ids, expert_parallel=ep, **options
    )


def judge(weights: MoEWeights, given: Tokens, **options: Any) -> torch.Tensor:
    """The same tokens with all experts on one rank."""
    options = dict(activation=SHAPE.activation, out_dtype=torch.float32) | options
    ids = given.ids.clone()
    ids[(ids < 0) | (ids >= weights.num_experts)] = -1
    return mxpert.fused_moe(given.x, weights, given.weights, ids, **options)


@contextlib.contextmanager
def refused(text: str, error: type[Exception] = ValueError) -> Iterator[None]:
    with pytest.raises(error, match=text):
        yield


def local_layer(
    dispatched: DispatchedTokens, mine: MoEWeights, *, format: str = "bf16"
) -> torch.Tensor:
    """This rank's experts on the rows that arrived: float32 [R, H]."""
    routed = dispatched.topk_weights, dispatched.topk_ids
    whole = torch.arange(mine.num_experts, dtype=torch.int32)
    slots = torch.nn.functional.pad(whole, (0, SHAPE.top_k), value=-1)  # more ids than experts
    return mxpert.fused_moe(
        dispatched.x,
        mine,
        *routed,
        activation=SHAPE.activation,
        activation_format=format,
        expert_map=slots,
        out_dtype=torch.float32,
    )
