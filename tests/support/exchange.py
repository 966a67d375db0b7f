"""Problems for the SYMMETRIC exchange whose results are exact, and the loop that checks them.

Rows, weights and factors are small integers, so that MXFP8 and bfloat16 hold them and sums are
exact in any order. Expert e multiplies a row by a factor of its own. A result is therefore known
without a peer, and any wrong, stale or missing row shows as a difference of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import mxpert
from mxpert import MXTensor, ScaleRule
from mxpert.core.problem import Op, RoutingProblem
from mxpert.core.target import detect_target
from mxpert.distributed import DispatchedTokens, Placement
from mxpert.distributed.symmetric import SymmetricExchange, layout_of
from mxpert.distributed.transport import ExchangeSpec
from mxpert.distributed.workspace import plain_workspaces
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.triton import PLAN

UNIT = 16
"""Padding unit of the routing plan."""


@dataclass(frozen=True)
class Case:
    """An exchange and its experts.

    The largest sum, ``4 · 2 · 4 · top_k`` with top_k = 4, is 128: bfloat16 holds it.
    """

    size: int = 2
    num_experts: int = 7
    top_k: int = 3
    hidden_size: int = 64
    max_tokens: int = 4
    wire_format: str = "mxfp8"
    combine_dtype: torch.dtype = torch.float32
    timeout_s: float = 600.0
    seed: int = 0

    def spec(self, rank: int) -> ExchangeSpec:
        return ExchangeSpec(
            name="case",
            rank=rank,
            placement=Placement.contiguous(self.num_experts, self.size),
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens=self.max_tokens,
            wire_format=self.wire_format,
            combine_dtype=self.combine_dtype,
            timeout_s=self.timeout_s,
        )

    def factors(self) -> torch.Tensor:
        """Float32 [E]: what each expert multiplies by."""
        return torch.arange(self.num_experts).remainder(4).add(1).float()


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank: bfloat16 [T, H], float32 [T, k], int32 [T, k]."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    def to(self, device: torch.device) -> Tokens:
        return Tokens(self.x.to(device), self.weights.to(device), self.ids.to(device))


def random_tokens(case: Case, rank: int, epoch: int, count: int | None = None) -> Tokens:
    """Tokens that differ for each rank and epoch, and so do their number and kind of routing."""
    generator = torch.Generator().manual_seed(1_000_003 * case.seed + 1009 * epoch + rank)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if count is None:
        count = int(draw(0, case.max_tokens + 1, 1))
    x = draw(-4, 5, count, case.hidden_size).bfloat16()
    weights = draw(1, 3, count, case.top_k).float()
    kind = (epoch + rank) % 5
    if kind == 0:  # all to one rank
        last = -(-case.num_experts // case.size)
        ids = draw(0, last, count, case.top_k)
    elif kind == 1:  # negative and foreign ids
        ids = draw(-2, case.num_experts + 2, count, case.top_k)
    elif kind == 2:  # some tokens without any expert
        ids = draw(0, case.num_experts, count, case.top_k)
        ids[::2] = -1
    else:
        ids = draw(0, case.num_experts, count, case.top_k)
    return Tokens(x, weights, ids.int())


def expected(case: Case, tokens: Tokens) -> torch.Tensor:
    """Float32 [T, H]: the exact result."""
    ids = tokens.ids.long()
    valid = (ids >= 0) & (ids < case.num_experts)
    factors = case.factors().to(tokens.x.device)[torch.where(valid, ids, 0)]
    coefficients = torch.where(valid, tokens.weights * factors, 0).sum(1)
    return coefficients[:, None] * tokens.x.float()


def multiply(case: Case, factors: torch.Tensor, received: DispatchedTokens) -> torch.Tensor:
    """The local experts without a plan, for tokens that were waited for: [R, H]."""
    mine = received.topk_ids >= 0
    factor = factors[torch.where(mine, received.topk_ids, 0).long()]
    coefficients = torch.where(mine, received.topk_weights * factor, 0).sum(1)
    rows = coefficients[:, None] * values(received.x)
    return torch.where(mine.any(1)[:, None], rows, 0).to(case.combine_dtype)


@dataclass
class Experts:
    """The local experts of a rank: a real routing plan, then each row times its coefficient."""

    case: Case
    rank: int
    device: torch.device
    factors: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        local = Placement.contiguous(self.case.num_experts, self.case.size).local_experts(self.rank)
        self.factors = self.case.factors()[list(local)].to(self.device)

    def __call__(
        self, received: DispatchedTokens, arrivals: torch.Tensor | None, config: Any = None
    ) -> torch.Tensor:
        """[R, H] in combine_dtype; zero for rows without a local expert.

        arrivals: what the plan waits for; None for tokens that are there.
        """
        problem = RoutingProblem(
            Op.ROUTING_PLAN,
            detect_target(self.device),
            received.topk_ids.shape[0],
            received.topk_ids.shape[1],
            len(self.factors),
            len(self.factors),
            UNIT,
        )
        plan = PLAN.launch(
            problem,
            config or PLAN.heuristic(problem),
            PlanInputs(
                topk_weights=received.topk_weights, topk_ids=received.topk_ids, arrivals=arrivals
            ),
        )
        place = plan.slot_rows.long()
        computed = place >= 0
        place = torch.where(computed, place, 0)
        expert = plan.block_expert_ids[place // UNIT].long().clamp(0, len(self.factors) - 1)
        weight = plan.sorted_weights[place] * self.factors[expert]
        coefficients = torch.where(computed, weight, 0).sum(1)
        rows = coefficients[:, None] * values(received.x)
        return torch.where(computed.any(1)[:, None], rows, 0).to(self.case.combine_dtype)


def exchanges_of_one_process(
    specs: Sequence[ExchangeSpec], device: torch.device
) -> list[SymmetricExchange]:
    """The exchanges of ranks that live in one process, each on a stream of its own."""
    memories = plain_workspaces(len(specs), layout_of(specs[0]).nbytes, device)
    pairs = zip(specs, memories, strict=True)
    return [SymmetricExchange(None, spec, device, memory) for spec, memory in pairs]


def values(x: torch.Tensor | MXTensor) -> torch.Tensor:
    """Float32 [R, H]."""
    return mxpert.dequantize(x, dtype=torch.float32) if isinstance(x, MXTensor) else x.float()


def poison(received: DispatchedTokens) -> None:
    """Overwrite received rows and weights, after their use and before `combine`.

    Ids are left: combine reads them.
    """
    parts = (
        (received.x.qdata, received.x.scale) if isinstance(received.x, MXTensor) else (received.x,)
    )
    for part in (*parts, received.topk_weights):
        part.view(torch.uint8).fill_(0xFF)  # NaN in each format


def send(
    exchange: Any, tokens: Tokens, bound: int, *, waits: bool = False
) -> tuple[DispatchedTokens, torch.Tensor | None]:
    """Dispatch to a float32 result.

    Returns:
        The tokens, and what the plan has to wait for: None if dispatch `waits`.
    """
    received = exchange.dispatch(
        tokens.x,
        tokens.weights,
        tokens.ids,
        bound=bound,
        scale_rule=ScaleRule.RCEIL,
        out_dtype=torch.float32,
        waits=waits,
    )
    return received, None if waits else exchange.arrivals(bound)
