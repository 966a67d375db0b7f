"""Cases of an MoE layer over several ranks, and their comparison with all experts on one.

Problems are exact (`support.exact`), so that the result has the bits of one rank with all experts,
whatever the kernels, the wire and the order of sums. `exact=False` draws normal values: there a
rounding on the way shows, within the float32 rounding of sums in another order. Rows, weights and
slots that no expert takes are NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import mxpert
from mxpert import ClampedSiLU, Combine, GateUpOrder, MXTensor, ScaleRule, SiLU, SwiGLU
from mxpert.distributed import ExpertParallel, Placement, Transport
from mxpert.formats.tensor import Layout
from mxpert.moe.local_weights import take_experts
from mxpert.testing.numerics import assert_close_relative, assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.exact import exact_moe_problem
from support.executors import Executor

SHAPE = MoEShape(64, 32, 10, 3, SwiGLU(), GateUpOrder.INTERLEAVED, True)
"""Ten experts divide by neither 4 nor 3."""
FEW = MoEShape(64, 32, 5, 2, SiLU())
"""What an interpreter can do."""
FLOAT32 = 1e-6
"""The contract of a float32 wire: float32 sums of a few terms in another order."""
UNEVEN = (3, 0, 7, 1)
"""Tokens of each rank: they differ, and rank 1 has none."""
ROUTINGS = ("any", "twice", "one rank", "elsewhere", "foreign", "none", "half none")
TRANSPORTS = (Transport.GATHER, Transport.ALL_TO_ALL)
CALLS = {"plain": 2, "interpreted": 1, "emulated": 1, "gpu": 5}
"""Calls with other tokens: the last ones on a GPU are replays of recorded launches. Interpreted
ranks repeat epochs in the tests of the protocol."""

Placed = Literal["contiguous", "copies", "drawn"]


@dataclass(frozen=True)
class ExchangeCase:
    """One layer, the ranks that hold its experts, and their tokens.

    Args:
        counts: tokens of each rank. shape: of the layer. exact: compare bits.
        placement: "contiguous"; "copies" of experts 0 and 1 on every rank, the others in descending
            order of ranks; or "drawn", with copies and local ids at random.
        routing: one of `ROUTINGS` for each rank in turn.
        max_tokens: slots of the object. bound: slots of the calls; None for all.
        wire, combine_dtype: as for ExpertParallel.
        activation_format, scale_rule, on_input, combine, out_dtype: of `fused_moe`.
        rows: "quantised" before the call, or a "strided" view. out: new, "given", or x itself.
        transports: of the reference.
    """

    counts: tuple[int, ...] = (3, 7)
    shape: MoEShape = SHAPE
    exact: bool = True
    placement: Placed = "contiguous"
    routing: tuple[str, ...] = ("any",)
    max_tokens: int = 7
    bound: int | None = None
    wire: str = "bf16"
    combine_dtype: torch.dtype = torch.float32
    activation_format: str = "bf16"
    scale_rule: ScaleRule = ScaleRule.RCEIL
    on_input: bool = False
    combine: Combine = Combine.REDUCE
    out_dtype: torch.dtype = torch.float32
    rows: Literal["plain", "quantised", "strided"] = "plain"
    out: Literal["new", "given", "x"] = "new"
    ids_dtype: torch.dtype = torch.int32
    weights_dtype: torch.dtype = torch.float32
    seed: int = 0
    transports: tuple[Transport, ...] = TRANSPORTS
    backends: tuple[str, ...] = ("reference", "triton", "cdna4", "hopper")

    @property
    def size(self) -> int:
        return len(self.counts)

    def served_by(self, backend: str) -> bool:
        return backend in self.backends

    def problem(self) -> MoEInputs:
        """All experts, and rows to take tokens from; the same on every rank."""
        count = max(*self.counts, 1) * self.size
        if not self.exact:
            return random_moe_problem(self.shape, count, seed=self.seed)
        on_input = self.on_input
        given = dict(seed=self.seed, apply_router_weight_on_input=on_input)
        return exact_moe_problem(self.shape, count, **given)  # type: ignore[arg-type]

    def ranks(self, transport: Transport, group: Any, device: torch.device) -> ExpertParallel:
        """The object of the case's calls."""
        return ExpertParallel(
            group,
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            hidden_size=self.shape.hidden_size,
            max_tokens=self.max_tokens,
            placement=self._placed(),
            transport=transport,
            wire_format=self.wire,  # type: ignore[arg-type]
            combine_dtype=self.combine_dtype,
            timeout_s=600.0,  # ranks compile, or are interpreted
            device=device,
        )

    def _placed(self) -> Placement | None:
        experts = range(self.shape.num_experts)
        pick = random.Random(self.seed)
        if self.placement == "contiguous":
            return None
        if self.placement == "copies":
            every = set(range(self.size))
            holders = [
                every if each < 2 else {self.size - 1 - each % self.size} for each in experts
            ]
        else:
            holders = [{pick.randrange(self.size)} for _ in experts]
            for rank in range(self.size):
                pick.choice(holders).add(rank)
        maps = torch.full((self.size, len(experts)), -1, dtype=torch.int32)
        for rank in range(self.size):
            mine = [expert for expert in experts if rank in holders[expert]]
            mine = mine[:2][::-1] + mine[2:] if self.placement == "copies" else mine
            if self.placement == "drawn":
                pick.shuffle(mine)
            maps[rank, mine] = torch.arange(len(mine), dtype=torch.int32)
        return Placement(maps)

    def tokens(self, problem: MoEInputs, ep: ExpertParallel, call: int) -> dict[str, Any]:
        """x, topk_weights and topk_ids of this rank; others for each call."""
        rank, experts = ep.rank, self.shape.num_experts
        generator = torch.Generator().manual_seed(1000 * (10 * self.seed + call) + rank)
        count, top_k = self.counts[rank], self.shape.top_k

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        routing, ids = self.routing[rank % len(self.routing)], draw(0, experts, count, top_k)
        if routing == "twice":
            ids[:, top_k // 2 :] = ids[:, :1]
        elif routing == "one rank":
            ids.fill_(experts - 1)
        elif routing == "elsewhere":
            ids[ep.placement.owners[rank][ids] == rank] = -1
        elif routing == "foreign":
            ids = draw(-3, experts + 3, count, top_k)
            ids[draw(0, 8, count, top_k) == 0] = torch.iinfo(torch.int32).max
            if self.ids_dtype is torch.int64:
                ids += (draw(0, 8, count, top_k) == 0) * ((1 << 32) + 1)
        elif routing == "none":
            ids.fill_(-1)
        elif routing == "half none":
            ids[::2] = -1
        known = (ids >= 0) & (ids < experts)
        x = problem.x[draw(0, len(problem.x), count)]
        x[~known.any(1)] = torch.nan
        weights = draw(1, 3, count, top_k) / 2
        if not self.exact:
            weights = torch.rand(weights.shape, generator=generator)
        weights[~known] = torch.nan
        rows: torch.Tensor | MXTensor = x
        if self.rows == "strided":
            rows = torch.cat([x, x], 1)[:, : x.shape[1]]
            ids = ids.repeat_interleave(2, 1)[:, ::2]
        elif self.rows == "quantised":
            rows = mxpert.quantize(x, "mxfp8", scale_rule=self.scale_rule)
        weights, ids = weights.to(self.weights_dtype), ids.to(self.ids_dtype)
        return dict(x=rows, topk_weights=weights, topk_ids=ids)

    def options(self, problem: MoEInputs) -> dict[str, Any]:
        return dict(
            activation=problem.activation,
            activation_format=self.activation_format,
            scale_rule=self.scale_rule,
            apply_router_weight_on_input=self.on_input,
            combine=self.combine,
            out_dtype=self.out_dtype,
        )

    def judge(self, problem: MoEInputs, given: dict[str, Any]) -> torch.Tensor:
        """The same tokens with all experts on one rank, by the reference backend."""
        ids = given["topk_ids"]
        known = (ids >= 0) & (ids < self.shape.num_experts)
        known_ids = torch.where(known, ids, -1).int()
        with mxpert.override(backend="reference"):
            return mxpert.fused_moe(
                **given | {"topk_ids": known_ids}, weights=problem.weights, **self.options(problem)
            )

    def check(self, executor: Executor, transport: Transport, group: Any = None) -> None:
        """Run the case on all ranks, and compare this rank's results.

        Raises:
            AssertionError: a result is wrong.
        """
        problem, device = self.problem(), executor.device
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        ep = self.ranks(transport, group, device)
        mine, view = take_experts(problem.weights, ep.local_experts), ep
        if executor.backend != "reference":
            layout = Layout.ROW_MAJOR if executor.backend == "triton" else None
            mine = mine.prepare(device=device, layout=layout)
        if self.bound is not None:
            view = ep.with_max_tokens(self.bound)
        for call in range(CALLS[executor.way]):
            given = self.tokens(problem, ep, call)
            expected = self.judge(problem, given)
            here = {name: part.to(device) for name, part in given.items()}
            out = None
            if self.out != "new":
                out = torch.full(expected.shape, torch.nan, dtype=self.out_dtype, device=device)
            if self.out == "x":
                out = here["x"] = here["x"].clone()
            with executor.serving():
                actual = mxpert.fused_moe(
                    **here, weights=mine, **self.options(problem), out=out, expert_parallel=view
                )
            assert out is None or actual is out
            self.compare(actual.cpu(), expected)
        ep.check()
        ep.close()

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise unless the result is right."""
        assert (actual.dtype, actual.shape) == (self.out_dtype, expected.shape)
        if self.exact:
            assert_exact(actual, expected, "the ranks' layer", ignore_zero_sign=True)
        else:
            assert_close_relative(actual, expected, FLOAT32, "the ranks' layer")


def drawn(number: int, size: int) -> ExchangeCase:
    """Random case `number` for `size` ranks."""
    pick = random.Random(f"{number} {size}")
    experts = pick.randint(size, 12)
    shape = MoEShape(
        hidden_size=32 * pick.randint(1, 7),
        intermediate_size=32 * pick.randint(1, 3),
        num_experts=experts,
        top_k=pick.randint(1, min(8, experts)),
        activation=pick.choice((SwiGLU(), SwiGLU(1.0, 3.0), SiLU(), ClampedSiLU())),
        gate_up_order=pick.choice(list(GateUpOrder)),
        has_bias=pick.random() < 0.5,
    )
    wire = pick.choice(("bf16", "mxfp8"))
    most = pick.choice((1, 2, 5, 9, 17))
    bound = pick.randint(1, most)
    exact = pick.random() < 0.5
    rows = ("plain", "plain", "strided") if wire == "bf16" else ("plain", "quantised", "strided")
    formats = ("bf16", "mxfp8", "mxfp4", *(() if exact else ("fp8_token",)))
    return ExchangeCase(
        counts=tuple(pick.choice((0, 1, bound, pick.randint(0, bound))) for _ in range(size)),
        shape=shape,
        exact=exact,
        placement=pick.choice(("contiguous", "drawn")),
        routing=tuple(pick.choice(ROUTINGS) for _ in range(size)),
        max_tokens=most,
        bound=bound,
        wire=wire,
        combine_dtype=torch.bfloat16 if exact and pick.random() < 0.5 else torch.float32,
        activation_format="mxfp8" if wire == "mxfp8" else pick.choice(formats),
        scale_rule=pick.choice(list(ScaleRule)),
        on_input=pick.random() < 0.3,
        combine=pick.choice((Combine.REDUCE, Combine.REDUCE, Combine.ATOMIC)),
        rows=pick.choice(rows),  # type: ignore[arg-type]
        out=pick.choice(("new", "new", "given")),
        ids_dtype=pick.choice((torch.int32, torch.int32, torch.int64)),
        weights_dtype=pick.choice((torch.float32, torch.bfloat16, torch.float16)),
        seed=number,
        transports=(TRANSPORTS[number % 2],),
        backends=("reference",),
    )


def _alone(**changes: Any) -> ExchangeCase:
    """A case that only the reference runs: it is about the collectives."""
    return ExchangeCase(**{"backends": ("reference",)} | changes)


def _few(**changes: Any) -> ExchangeCase:
    return ExchangeCase(**{"shape": FEW, "counts": (4, 1), "max_tokens": 4} | changes)


_MX: dict[str, Any] = dict(wire="mxfp8", activation_format="mxfp8")
_LARGE: dict[str, Any] = dict(
    shape=MoEShape(704, 384, 13, 3, SwiGLU(), GateUpOrder.INTERLEAVED, True),
    max_tokens=160,
    combine_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    backends=("reference", "hopper"),
)

LAYERS: dict[str, ExchangeCase] = {
    "bf16": _few(
        combine_dtype=torch.bfloat16,
        placement="copies",
        out_dtype=torch.bfloat16,
        backends=("reference", "triton", "hopper"),
    ),
    "mxfp8": _few(**_MX, routing=("foreign", "half none")),
    "mxfp8-quantised": _few(
        **_MX,
        counts=(0, 3),
        bound=3,
        rows="quantised",
        placement="drawn",
        backends=("reference", "hopper"),
    ),
    "top-1": _few(
        shape=replace(FEW, num_experts=2, top_k=1),
        ids_dtype=torch.int64,
        backends=("reference", "triton", "hopper"),
    ),
}
"""What the executors run on two ranks; few cases on gfx950, whose code takes long to read."""
ALONE: dict[str, ExchangeCase] = {
    "wire-bf16": _alone(combine_dtype=torch.bfloat16),
    "wire-mxfp8": _alone(**_MX, routing=("foreign", "half none")),
    "copies": _alone(activation_format="mxfp8", placement="copies"),
    "few-experts": _alone(
        shape=replace(SHAPE, num_experts=2, top_k=2), routing=("one rank", "any")
    ),
    "empty-rank": _alone(counts=(0, 5)),
    "rounded": _alone(exact=False),
    "rounded-floor": _alone(exact=False, **_MX, scale_rule=ScaleRule.FLOOR, on_input=True),
    "rounded-quantised": _alone(exact=False, **_MX, rows="quantised", scale_rule=ScaleRule.EVEN),
    "mxfp4": _alone(exact=False, activation_format="mxfp4"),
    "fp8_token": _alone(exact=False, activation_format="fp8_token"),
    "on-input": _alone(on_input=True, combine=Combine.ATOMIC),
    "no-bias": _alone(shape=MoEShape(64, 32, 10, 3, ClampedSiLU())),
    "twice": _alone(routing=("twice",)),
    "elsewhere": _alone(routing=("elsewhere",)),
    "no-expert": _alone(routing=("none", "any")),
    "foreign-int64": _alone(routing=("foreign",), ids_dtype=torch.int64),
    "strided": _alone(rows="strided"),
    "weights-bf16": _alone(weights_dtype=torch.bfloat16),
    "weights-float16": _alone(weights_dtype=torch.float16),
    "out": _alone(out="given"),
    "out-is-x": _alone(out="x", out_dtype=torch.bfloat16),
    "four": _alone(counts=UNEVEN, combine_dtype=torch.bfloat16),
    "four-mxfp8": _alone(counts=UNEVEN, **_MX, exact=False),
    "four-copies": _alone(counts=UNEVEN, placement="copies"),
    "four-few-experts": _alone(counts=UNEVEN, shape=replace(SHAPE, num_experts=4, top_k=2)),
    "four-top-1": _alone(counts=UNEVEN, shape=replace(SHAPE, top_k=1)),
    **{
        f"one-busy-{busy}": _alone(counts=tuple(6 * (rank == busy) for rank in range(4)))
        for busy in (0, 3, 4)
    },
    **{f"drawn-{size}-{number}": drawn(number, size) for size in (2, 4) for number in range(20)},
}
"""Arguments and routings that no kernel of the exchange tells apart, and four ranks."""
LARGE: dict[str, ExchangeCase] = {
    "large": ExchangeCase(**_LARGE, counts=(160, 127)),
    "large-bf16-mxfp8": ExchangeCase(**_LARGE, counts=(17, 160), activation_format="mxfp8"),
    "large-mxfp8": ExchangeCase(**_LARGE, **_MX, counts=(128, 129)),
    "large-quantised": ExchangeCase(**_LARGE, **_MX, counts=(48, 1), rows="quantised"),
    "large-slots": ExchangeCase(**_LARGE, **_MX, counts=(8, 7), bound=8),
    "gpt-oss": ExchangeCase(
        counts=(256, 255),
        shape=MoEShape(2880, 2880, 32, 4, SwiGLU(), GateUpOrder.INTERLEAVED, True),
        max_tokens=256,
        backends=("hopper",),
    ),
}
"""Many tiles and CTAs, and sizes of a model: too much for an interpreter."""
ALL = {**LAYERS, **ALONE, **LARGE}
