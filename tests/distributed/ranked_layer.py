"""A small layer over several ranks: tokens of each rank, the judge, and checks of results.

The judge is one process with all experts, which runs the tokens of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mxpert
from mxpert import GateUpOrder, MoEWeights, MXTensor, SwiGLU
from mxpert.distributed import DispatchedTokens, ExpertParallel, Transport
from mxpert.moe.local_weights import take_experts
from mxpert.testing.numerics import assert_close_relative
from mxpert.testing.problems import MoEShape, random_moe_problem, random_tokens

SHAPE = MoEShape(64, 32, 10, 3, SwiGLU(), GateUpOrder.INTERLEAVED, True)
"""Ten experts divide by neither 4 nor 3."""

UNEVEN = (3, 0, 7, 1)
"""Tokens of each rank: they differ, and rank 1 has none."""

MAX_TOKENS = 7
FLOAT32 = 1e-6
"""The contract of a float32 wire: float32 sums of a few terms in another order."""

BF16_UNIT = 2.0**-8
"""Largest relative error of rounding to bfloat16."""

TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)


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


@dataclass(frozen=True)
class Parts:
    """What a rank's result is the sum of, each computed by itself.

    Args:
        slots: float32 [k, T, H], of each slot.
        ranks: float32 [N, T, H], of each rank.
    """

    slots: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, ep: ExpertParallel, weights: MoEWeights, given: Tokens, **options: Any) -> Parts:
        owners = ep.placement.owners[ep.rank][given.ids.long()]
        slots = torch.arange(given.ids.shape[1]).expand_as(given.ids)

        def alone(places: torch.Tensor, count: int) -> torch.Tensor:
            masked = (given.ids.masked_fill(places != each, -1) for each in range(count))
            return torch.stack(
                [judge(weights, replace(given, ids=ids), **options) for ids in masked]
            )

        return cls(alone(slots, slots.shape[1]), alone(owners, ep.size))


def check_float32(actual: torch.Tensor, parts: Parts) -> None:
    """A float32 wire: float32 rounding alone."""
    assert_close_relative(actual, parts.slots.sum(0), FLOAT32, "float32 wire")


def check_bf16(actual: torch.Tensor, parts: Parts) -> None:
    """A bfloat16 wire: the row of each slot is rounded, the sum of a rank, and N − 1 more sums.

    N + 1 roundings of relative error u give at most ``((1 + u)^(N + 1) − 1) · Σ |slots|`` for an
    element. FLOAT32 covers the float32 arithmetic of both sides.
    """
    magnitude, roundings = parts.slots.double().abs().sum(0), parts.ranks.shape[0] + 1
    bound = ((1 + BF16_UNIT) ** roundings - 1 + FLOAT32) * magnitude
    error = (actual.double() - parts.slots.double().sum(0)).abs()
    excess = (error - bound).max().item() if error.numel() else 0.0
    assert excess <= 0, f"bf16 wire: error exceeds its bound by {excess:.3e}"


def planted(actual: torch.Tensor, parts: Parts) -> dict[str, torch.Tensor]:
    """Results that imitate real errors of an exchange; each must fail a check."""
    most = parts.ranks.square().sum((1, 2)).argmax()
    nan = actual.clone()
    nan[-1, -1] = torch.nan
    return {
        "tokens exchanged": actual.roll(1, 0),
        "a rank's rows lost": actual - parts.ranks[most],
        "a rank's rows added twice": actual + parts.ranks[most],
        "slot of another token": torch.cat([actual[:1], actual[:1], actual[2:]]),
        "a rank's rows of an earlier call": actual + parts.ranks[most].roll(1, 0),
        "NaN": nan,
    }


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
