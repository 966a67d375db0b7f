"""One MoE layer over the ranks of a group: inputs, gate, and the calls that are timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...distributed import DispatchedTokens, ExpertParallel, Placement
from ...distributed.transport import WireFormat
from ...formats.names import OwnFormat
from ...formats.tensor import MXTensor
from ...moe.checks import moe_options
from ...moe.inputs import FusedMoEInputs
from ...moe.local_weights import take_experts
from ...moe.op import fused_moe, fused_moe_received
from ...moe.weights import MoEWeights
from ...quantize.op import quantize
from ...testing.numerics import relative_l2
from ...testing.problems import MoEShape, random_moe_problem, random_tokens
from ...testing.ranks import Steps, Variant, time_ranks
from ...testing.timing import Call
from ..measure import check_gate, float64_reference, intermediate_sizes, rotations

Rows = torch.Tensor | MXTensor
GATED_TOKENS = 64
"""Tokens of a rank that are compared with float64: the first ones."""
EXCHANGES = 16
"""Exchanges in one graph, because its replay costs about as much as one of them."""


@dataclass(frozen=True)
class Case:
    """What a layer computes: T tokens of each rank.

    Args:
        model: name. shape: its dimensions. num_tokens: T. routing: a name of `Routing`.
        activation_format: of the local layer. wire_format: of dispatched rows.
    """

    model: str
    shape: MoEShape
    num_tokens: int
    routing: str
    activation_format: OwnFormat
    wire_format: WireFormat

    def __str__(self) -> str:
        return (
            f"{self.model} T={self.num_tokens} {self.routing} {self.activation_format}, "
            f"{self.wire_format} wire"
        )


@dataclass(frozen=True)
class Tokens:
    """Tokens of one rank: x [T, H] in bf16 or MXFP8, topk_weights and topk_ids [T, k]."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


class Exchange(Protocol):
    """A way to run the layer: its parts, and the whole."""

    name: str
    is_captured: bool

    def dispatch(self, tokens: Tokens) -> DispatchedTokens: ...

    def compute(self, received: DispatchedTokens) -> torch.Tensor: ...

    def combine(self, rows: torch.Tensor, received: DispatchedTokens) -> torch.Tensor: ...

    def layer(self, tokens: Tokens) -> torch.Tensor: ...


@dataclass(frozen=True)
class RankWeights:
    """Weights of one model: all experts as stored, and this rank's, prepared."""

    every: MoEWeights
    local: MoEWeights

    @classmethod
    def random(cls, shape: MoEShape, ranks: ExpertParallel) -> RankWeights:
        """The same random weights on every rank, on its device."""
        every = random_moe_problem(shape, 1, device=ranks.device).weights
        return cls(every, take_experts(every, ranks.local_experts).prepare(device=ranks.device))

    @functools.cached_property
    def prepared(self) -> MoEWeights:
        """All experts, prepared."""
        return self.every.prepare(device=self.every.device)


class OnRanks:
    """Ours: `fused_moe` with `expert_parallel`, and its parts."""

    def __init__(self, case: Case, weights: RankWeights, ranks: ExpertParallel) -> None:
        self.name = f"mxpert/{ranks.transport.value}"
        self.is_captured = ranks.transport.value != "all_to_all"
        self._case, self._weights = case, weights
        self._ranks = ranks.with_max_tokens(case.num_tokens)
        self._options = moe_options(
            "fused_moe",
            case.shape.activation,
            case.activation_format,
            out_dtype=ranks.combine_dtype,
        )

    def dispatch(self, tokens: Tokens) -> DispatchedTokens:
        return self._ranks.dispatch(tokens.x, tokens.topk_weights, tokens.topk_ids)

    def compute(self, received: DispatchedTokens) -> torch.Tensor:
        local_top_k = self._ranks.local_top_k
        inputs = FusedMoEInputs(
            received.x, self._weights.local, received.topk_weights, received.topk_ids
        )
        return fused_moe_received(inputs, self._options, local_top_k)

    def combine(self, rows: torch.Tensor, received: DispatchedTokens) -> torch.Tensor:
        return self._ranks.combine(rows, received)

    def layer(self, tokens: Tokens) -> torch.Tensor:
        return fused_moe(
            tokens.x,
            self._weights.local,
            tokens.topk_weights,
            tokens.topk_ids,
            activation=self._case.shape.activation,
            activation_format=self._case.activation_format,
            expert_parallel=self._ranks,
        )


class Collectives:
    """All-gather, the local experts by `expert_map`, reduce-scatter in bf16: vLLM's default."""

    name = "all_gather + reduce_scatter"
    is_captured = True

    def __init__(self, case: Case, weights: RankWeights, ranks: ExpertParallel) -> None:
        self._case, self._weights = case, weights
        self._size, self._map = ranks.size, ranks.expert_map

    def dispatch(self, tokens: Tokens) -> DispatchedTokens:
        routing, count = (tokens.topk_weights, tokens.topk_ids), tokens.x.shape[0]
        if self._case.wire_format == "mxfp8":
            mx = quantize(tokens.x, "mxfp8")
            codes = mx.qdata.view(torch.uint8)
            codes, scale, weights, ids = self._gather(codes, mx.scale, *routing)
            rows = replace(mx, qdata=codes.view(mx.qdata.dtype), scale=scale)
            return DispatchedTokens(rows, weights, ids, num_tokens=count)
        x, weights, ids = self._gather(tokens.x, *routing)
        return DispatchedTokens(x, weights, ids, num_tokens=count)

    def _gather(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Gather tensors of all ranks, one after the other."""
        found = [part.new_empty((self._size * part.shape[0], *part.shape[1:])) for part in parts]
        gather = _collective("all_gather_single", "all_gather_into_tensor")
        for out, part in zip(found, parts, strict=True):
            gather(out, part.contiguous())
        return found

    def compute(self, received: DispatchedTokens) -> torch.Tensor:
        return fused_moe(
            received.x,
            self._weights.local,
            received.topk_weights,
            received.topk_ids,
            activation=self._case.shape.activation,
            activation_format=self._case.activation_format,
            expert_map=self._map,
        )

    def combine(self, rows: torch.Tensor, received: DispatchedTokens) -> torch.Tensor:
        out = rows.new_empty((received.num_tokens, rows.shape[1]))
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(out, rows)
        return out

    def layer(self, tokens: Tokens) -> torch.Tensor:
        received = self.dispatch(tokens)
        return self.combine(self.compute(received), received)


@dataclass(frozen=True)
class Load:
    """Expert load of all ranks, mean over the routings.

    Args:
        hit: experts that are hit on the rank with most rows. rows: its rows.
        balance: mean rows of a rank over those of the rank with most.
    """

    hit: float
    rows: float
    balance: float

    @classmethod
    def of(cls, ids: Sequence[torch.Tensor], placement: Placement) -> Load:
        """Load of several routings, each the ids [N · T, k] of all ranks' tokens."""
        hits, most, balances = [], [], []
        for each in ids:
            counts = torch.bincount(each.flatten().long(), minlength=placement.num_experts)
            ranks = range(placement.num_ranks)
            of_rank = [counts[list(placement.local_experts(rank))] for rank in ranks]
            rows = torch.stack([local.sum() for local in of_rank])
            busiest = int(rows.argmax())
            hits.append(int((of_rank[busiest] > 0).sum()))
            most.append(int(rows[busiest]))
            balances.append(float(rows.double().mean() / rows[busiest]))
        count = len(hits)
        return cls(sum(hits) / count, sum(most) / count, sum(balances) / count)


class RankCase:
    """One case on this rank: its tokens for each routing, the gate, and what is timed."""

    def __init__(self, case: Case, weights: RankWeights, ranks: ExpertParallel) -> None:
        self.case, self.weights, self.ranks = case, weights, ranks
        self.turns = rotations(case.num_tokens) if ranks.device.type == "cuda" else 1
        made = [
            [self._tokens(1000 * turn + rank) for rank in range(ranks.size)]
            for turn in range(self.turns)
        ]
        ids = [torch.cat([each.topk_ids for each in turn]) for turn in made]
        self.load = Load.of(ids, ranks.placement)
        self.tokens = [self._moved(turn[ranks.rank]) for turn in made]
        self.together = [self._moved(_concatenated(turn)) for turn in made]

    def _tokens(self, seed: int) -> Tokens:
        """Tokens of one rank and routing, the same wherever they are made."""
        case, generator = self.case, torch.Generator().manual_seed(seed)
        return Tokens(*random_tokens(case.shape, case.num_tokens, generator, case.routing))

    def _moved(self, tokens: Tokens) -> Tokens:
        return Tokens(*(part.to(self.ranks.device) for part in _parts(tokens)))

    @functools.cached_property
    def truth(self) -> torch.Tensor:
        """The first tokens' outputs in float64, with all experts on one rank."""
        case, tokens = self.case, self.tokens[0]
        with float64_reference():
            return fused_moe(
                tokens.x[:GATED_TOKENS],
                self.weights.every,
                tokens.topk_weights[:GATED_TOKENS],
                tokens.topk_ids[:GATED_TOKENS],
                activation=case.shape.activation,
                activation_format=case.activation_format,
            )

    def gate(self, exchange: Exchange) -> float:
        """Compare a layer with float64 on one rank with all experts.

        Returns:
            The largest relative L2 error of the ranks.

        Raises:
            GateError: on every rank, if the result of some rank is wrong.
        """
        return self.judge(exchange.name, exchange.layer(self.tokens[0]))

    def judge(self, name: str, rows: torch.Tensor) -> float:
        """`gate` of what `name` has computed for this rank's tokens, [T, H]."""
        case, got = self.case, rows[:GATED_TOKENS]
        found: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(found, relative_l2(got, self.truth), group=self.ranks.group)
        sizes = intermediate_sizes(len(got), case.shape.top_k, case.shape.intermediate_size)
        for rank, error in enumerate(found):
            where = f"{case}, {name}, rank {rank}"
            check_gate(where, error, "layer", case.activation_format, sizes)
        return float(max(found))

    @property
    def columns(self) -> dict[str, Any]:
        """What identifies the case in a row."""
        case, shape = self.case, self.case.shape
        return {
            "model": case.model,
            "E": shape.num_experts,
            "k": shape.top_k,
            "H": shape.hidden_size,
            "F": shape.intermediate_size,
            "N": self.ranks.size,
            "T": case.num_tokens,
            "routing": case.routing,
            "activation": case.activation_format,
            "wire": case.wire_format,
        }

    def timed(
        self,
        exchanges: Sequence[Exchange],
        repeats: int,
        others: Mapping[str, Variant] | None = None,
    ) -> dict[tuple[str, str], list[float]]:
        """Time exchanges and other whole layers in turns.

        Returns:
            (name of an exchange or of one of `others`, stage) → microseconds by the slower rank,
            one for each repeat. Stages are dispatch, combine, exchange and layer. The first
            exchange has "local" too, which does not depend on the exchange.
        """
        every = [(exchanges[0].name, "local", self.local_variant(exchanges[0]))]
        every += [(name, "layer", variant) for name, variant in (others or {}).items()]
        every += [
            (exchange.name, name, variant)
            for exchange in exchanges
            for name, variant in self.variants(exchange).items()
        ]
        variants = {f"{owner}, {name}": variant for owner, name, variant in every}
        samples = time_ranks(variants, device=self.ranks.device, repeats=repeats)
        return {
            (owner, step): samples[f"{owner}, {name}"][step]
            for owner, name, variant in every
            for step in variant.steps
        }

    def variants(self, exchange: Exchange) -> dict[str, Variant]:
        """Everything that is timed of one exchange.

        "parts" times dispatch and combine one after the other, "exchange" both in one graph,
        EXCHANGES times, and "layer" the whole.
        """
        outputs = [self._prepared(exchange, tokens) for tokens in self.tokens]
        boxes: list[list[DispatchedTokens]] = [[] for _ in self.tokens]

        def dispatch(turn: int) -> None:
            boxes[turn][:] = [exchange.dispatch(self.tokens[turn])]

        def combine(turn: int) -> torch.Tensor:
            return exchange.combine(outputs[turn], boxes[turn][0])

        def both(turn: int) -> torch.Tensor:
            return exchange.combine(outputs[turn], exchange.dispatch(self.tokens[turn]))

        def calls(function: Callable[[int], object]) -> list[Call]:
            return [functools.partial(function, turn) for turn in range(self.turns)]

        layers = [functools.partial(exchange.layer, tokens) for tokens in self.tokens]
        steps: dict[str, Steps] = {
            "parts": {"dispatch": calls(dispatch), "combine": calls(combine)},
            "exchange": {"exchange": calls(both) * (EXCHANGES // self.turns)},
            "layer": {"layer": layers},
        }
        return {name: Variant(step, exchange.is_captured) for name, step in steps.items()}

    def one_rank_variant(self) -> Variant:
        """The layer on one rank: all experts, the tokens of all ranks."""
        case = self.case
        run = functools.partial(
            fused_moe, activation=case.shape.activation, activation_format=case.activation_format
        )
        weights = self.weights.prepared
        calls = [
            functools.partial(run, each.x, weights, each.topk_weights, each.topk_ids)
            for each in self.together
        ]
        return Variant({"layer": calls})

    def local_variant(self, exchange: Exchange) -> Variant:
        """The local layer alone, on copies of what was received."""
        received = []
        for tokens in self.tokens:
            found = exchange.dispatch(tokens)
            names = "x", "topk_weights", "topk_ids"
            copies = {name: _copied(getattr(found, name)) for name in names}
            received.append(replace(found, **copies))
            exchange.combine(exchange.compute(found), found)
        return Variant({"local": [functools.partial(exchange.compute, each) for each in received]})

    def _prepared(self, exchange: Exchange, tokens: Tokens) -> torch.Tensor:
        """Output rows of the local layer, as `combine` takes them."""
        received = exchange.dispatch(tokens)
        rows = exchange.compute(received)
        exchange.combine(rows, received)
        return rows.clone()


def _collective(name: str, older_name: str) -> Callable[..., Any]:
    """A function of torch.distributed by its name from torch 2.13 on, or before."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older_name)
    return found


def _parts(tokens: Tokens) -> tuple[torch.Tensor, ...]:
    return tokens.x, tokens.topk_weights, tokens.topk_ids


def _concatenated(turn: Sequence[Tokens]) -> Tokens:
    """The tokens of all ranks, in rank order."""
    return Tokens(*(torch.cat(parts) for parts in zip(*map(_parts, turn), strict=True)))


def _copied(part: Rows) -> Any:
    """A copy that later exchanges do not overwrite."""
    if isinstance(part, MXTensor):
        return replace(part, qdata=part.qdata.clone(), scale=part.scale.clone())
    return part.clone()
