"""Cases of make_routing_plan and route_topk.

Only one plan satisfies all invariants, so plans are compared bit by bit. Ids are compared where
float32 rounding does not decide them; weights have a derived tolerance against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

import mxpert
from mxpert import Scoring
from mxpert.core.describe import describe
from mxpert.core.problem import GroupScore, TopKOptions
from mxpert.routing.inputs import PlanInputs
from mxpert.routing.plan import RoutingPlan
from support.executors import Executor
from support.routing import (
    random_topk_ids,
    topk_decision_gap,
    topk_weight_tolerance,
    validate_routing_plan,
)

GEOMETRIES = {
    "one-launch": (0, 64),
    "one-chunk": (1, 64),
    "many-chunks": (11, 32),
    "many-tiles-per-chunk": (3, 32),
    "two-chunks": (2, 64),
}
"""Chunks and tile of a `PlanConfig` of the Triton backend."""
Options = Mapping[str, Any]  # keywords of a public op


@dataclass(frozen=True)
class PlanCase:
    """One plan.

    Args:
        geometry: one of `GEOMETRIES`; None leaves the choice to the backend.
    """

    ids: Callable[[], torch.Tensor]
    num_experts: int
    unit: int
    weights_dtype: torch.dtype = torch.float32
    options: Options = field(default_factory=dict)
    geometry: str | None = None

    def served_by(self, backend: str) -> bool:
        return backend == "triton" or (backend == "reference" and self.geometry is None)

    def check(self, executor: Executor) -> None:
        ids = self.ids()
        weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
        weights = weights.to(self.weights_dtype)
        with executor.serving():
            plan = self._plan(weights.to(executor.device), ids.to(executor.device))
        tokens = self.options.get("num_local_tokens")
        validate_routing_plan(
            plan,
            weights.float(),
            ids,
            num_experts=self.num_experts,
            expert_map=self.options.get("expert_map"),
            num_local_tokens=None if tokens is None else int(tokens),
        )

    def _plan(self, weights: torch.Tensor, ids: torch.Tensor) -> RoutingPlan:
        options = {"num_experts": self.num_experts, "routing_block_m": self.unit, **self.options}
        for name in ("expert_map", "num_local_tokens"):
            if name in options:
                options[name] = options[name].to(ids.device)
        if self.geometry is None:
            return mxpert.make_routing_plan(weights, ids, **options)
        from mxpert.routing.triton import PLAN, PlanConfig  # needs Triton

        problem = describe(mxpert.make_routing_plan, weights, ids, **options)
        inputs = PlanInputs(
            topk_ids=ids,
            topk_weights=weights,
            expert_map=options.get("expert_map"),
            num_local_tokens=options.get("num_local_tokens"),
        )
        return PLAN.launch(problem, PlanConfig(*GEOMETRIES[self.geometry]), inputs)


@dataclass(frozen=True)
class TopKCase:
    """One call of route_topk.

    Args:
        ids: all ids, where ties, NaN or infinities decide. rows: of a program of the Triton
            backend; None leaves the choice to the backend.
    """

    logits: Callable[[], torch.Tensor]
    top_k: int
    options: Options = field(default_factory=dict)
    ids: tuple[tuple[int, ...], ...] | None = None
    rows: int | None = None

    def served_by(self, backend: str) -> bool:
        return backend == "triton" or (backend == "reference" and self.rows is None)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.options.get("correction_bias")

    @property
    def parsed(self) -> TopKOptions:
        named = {name: value for name, value in self.options.items() if name != "correction_bias"}
        return TopKOptions(**named)

    def run(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids, on the CPU."""
        options, bias = dict(self.options), self.bias
        if bias is not None:
            options["correction_bias"] = bias.to(logits.device)
        if self.rows is None:
            weights, ids = mxpert.route_topk(logits, self.top_k, **options)
            return weights.cpu(), ids.cpu()
        from mxpert.routing.inputs import TopKInputs
        from mxpert.routing.triton import TOPK, TopKConfig  # needs Triton

        problem = describe(mxpert.route_topk, logits, self.top_k, **options)
        inputs = TopKInputs(logits=logits, correction_bias=options.get("correction_bias"))
        weights, ids = TOPK.launch(problem, TopKConfig(self.rows), inputs)
        return weights.cpu(), ids.cpu()

    def check(self, executor: Executor) -> None:
        logits = self.logits()
        with executor.serving():
            weights, ids = self.run(logits.to(executor.device))
        self.compare(logits.float(), weights, ids)

    def compare(self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Raise unless the result is right."""
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        assert weights.shape == ids.shape == (len(logits), self.top_k)
        numbers = logits[logits.isfinite()]
        span = float(numbers.max() - numbers.min()) if numbers.numel() else 0.0
        tolerance = topk_weight_tolerance(span, logits.shape[1])
        if self.ids is not None:
            assert ids.tolist() == [list(row) for row in self.ids]
            decided = torch.ones(len(logits), dtype=torch.bool)
        else:
            gap = topk_decision_gap(logits, self.top_k, self.parsed, self.bias)
            decided = gap > 4 * tolerance
            assert decided.float().mean() >= 0.8, "the case decides too little to be a test"
            want = chosen_experts(logits.double(), self.top_k, self.parsed, self.bias)
            assert torch.equal(ids[decided].long(), want[decided])
        want = weights_of(logits.double(), ids.long(), self.parsed)
        torch.testing.assert_close(
            weights[decided].double(), want[decided], rtol=tolerance, atol=0, equal_nan=True
        )


def scores_of(logits: torch.Tensor, options: TopKOptions) -> torch.Tensor:
    """Scores [T, E] in the dtype of `logits`, written a second time."""
    if options.scoring is Scoring.SIGMOID:
        scores = 1 / (1 + torch.exp(-logits))
    elif options.scoring is Scoring.SQRTSOFTPLUS:
        scores = torch.where(logits > 30, logits, torch.log1p(torch.exp(logits))).sqrt()
    else:
        exponentials = torch.exp(logits - logits.amax(1, keepdim=True))
        scores = exponentials / exponentials.sum(1, keepdim=True)
    return scores.masked_fill(~scores.isfinite(), 0.0) if options.clamp_nan else scores


def chosen_experts(
    logits: torch.Tensor, top_k: int, options: TopKOptions, bias: torch.Tensor | None
) -> torch.Tensor:
    """Expert ids [T, top_k], best first."""
    ranked = scores_of(logits, options) + (0 if bias is None else bias.double())
    if options.num_groups > 1:
        grouped = ranked.view(len(ranked), options.num_groups, -1)
        best = 1 if options.group_score is GroupScore.MAX else 2
        order = grouped.sort(-1, descending=True).values[..., :best].sum(-1)
        worst = order.argsort(dim=-1, descending=True, stable=True)[:, options.top_groups :]
        ranked = grouped.scatter(
            1, worst[:, :, None].expand(-1, -1, grouped.shape[2]), -torch.inf
        ).flatten(1)
    return ranked.argsort(dim=-1, descending=True, stable=True)[:, :top_k]


def weights_of(logits: torch.Tensor, ids: torch.Tensor, options: TopKOptions) -> torch.Tensor:
    """Routing weights [T, top_k] of the chosen experts."""
    chosen = scores_of(logits, options).gather(1, ids)
    if options.normalize and options.scoring is Scoring.SOFTMAX and not options.clamp_nan:
        logits = logits.gather(1, ids)
        chosen = torch.exp(logits - logits.amax(1, keepdim=True))
    if options.normalize:
        total = chosen.sum(1, keepdim=True)
        chosen = torch.where(total == 0, 0.0, chosen / total)
    return chosen * options.routed_scaling_factor


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _distinct(num_tokens: int, top_k: int, num_experts: int) -> Callable[[], torch.Tensor]:
    return lambda: random_topk_ids(num_tokens, top_k, num_experts, generator=_draw(num_tokens))


def _foreign() -> torch.Tensor:
    """Ids far outside of a map, and repeated ones."""
    ids = torch.randint(-3, 27, (30, 5), generator=_draw(2)).int()
    ids[3, 1], ids[4, 0], ids[5] = (1 << 31) - 1, -(1 << 31), 7
    return ids


def _foreign_int64() -> torch.Tensor:
    """No id may wrap: some have the low 32 bits of a valid one."""
    ids = torch.randint(-3, 27, (30, 5), generator=_draw(3))
    ids[3, 1], ids[4, 0] = (1 << 63) - 1, -(1 << 63)
    ids[6], ids[7] = (1 << 32) + torch.arange(5), torch.arange(5) - (1 << 32)
    return ids


def _view() -> torch.Tensor:
    wide = torch.zeros(16, 9, dtype=torch.int32)
    wide[:, 2:6] = _distinct(16, 4, 8)()
    return wide[:, 2:6]


def _map(first: int = -8) -> torch.Tensor:
    expert_map = torch.arange(24, dtype=torch.int32) + first
    expert_map[20] = 1 << 30
    return expert_map


def _local(tokens: int) -> Options:
    """A map to −1 and beyond the local experts, and a number of local tokens."""
    return {
        "expert_map": _map(),
        "num_local_experts": 10,
        "num_local_tokens": torch.tensor([tokens], dtype=torch.int32),
    }


EVERY = (None, "one-launch", "one-chunk", "many-chunks", "many-tiles-per-chunk")
SIZES = (
    (1, 1, 1, 16),
    (3, 4, 33, 16),
    (43, 8, 20, 64),
    (100, 3, 7, 1),
    (17, 9, 70, 24),
    (0, 2, 5, 8),
)
PLANS = {
    **{
        f"{tokens}x{top_k}of{experts}-{unit}-{geometry}": PlanCase(
            _distinct(tokens, top_k, experts), experts, unit, geometry=geometry
        )
        for (tokens, top_k, experts, unit), geometry in product(SIZES, EVERY)
    },
    **{
        f"one_expert-{geometry}": PlanCase(
            lambda: torch.full((150, 1), 3, dtype=torch.int32), 5, 16, geometry=geometry
        )
        for geometry in EVERY
    },
    **{
        f"{experts}_experts": PlanCase(
            _distinct(13, 9, experts), experts, 16, geometry="two-chunks"
        )
        for experts in (257, 513, 1024)
    },
    "views": PlanCase(_view, 8, 4),
}
PLANS_OF_FOREIGN_IDS = {
    **{
        f"{tokens}_local_tokens-{geometry}": PlanCase(
            _foreign, 24, 8, options=_local(tokens), geometry=geometry
        )
        for tokens, geometry in product((21, -5, 99), EVERY)
    },
    **{
        f"int64-{str(dtype)[6:]}-{'map' if options else 'all'}-{geometry}": PlanCase(
            _foreign_int64, 24, 8, dtype, options, geometry
        )
        for dtype, options, geometry in product(
            (torch.bfloat16, torch.float16),
            ({}, {"expert_map": _map(), "num_local_experts": 10}),
            EVERY,
        )
    },
    "repeated_beyond_the_local_experts": PlanCase(
        lambda: torch.zeros(3, 8, dtype=torch.int32), 64, 1, options={"num_local_experts": 2}
    ),
}
GROUPED = {"num_groups": 4, "top_groups": 2}
TOPK_OPTIONS: dict[str, Options] = {
    "softmax-chosen": {},
    "softmax-all": {"normalize": False},
    "softmax-scaled": {"routed_scaling_factor": 1.5},
    "softmax-bias": {"correction_bias": True},
    "softmax-groups": {**GROUPED, "group_score": "max"},
    "softmax-pairs": {**GROUPED, "group_score": "top2"},
    "sqrtsoftplus": {"scoring": Scoring.SQRTSOFTPLUS},
    "sqrtsoftplus-raw": {"scoring": Scoring.SQRTSOFTPLUS, "normalize": False, "clamp_nan": True},
    "deepseek-v4": {
        "scoring": Scoring.SQRTSOFTPLUS,
        "correction_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "sigmoid": {"scoring": Scoring.SIGMOID},
    "sigmoid-raw": {"scoring": Scoring.SIGMOID, "normalize": False},
    "sigmoid-groups": {"scoring": Scoring.SIGMOID, **GROUPED, "group_score": "max"},
    "deepseek-v3": {
        "scoring": Scoring.SIGMOID,
        **GROUPED,
        "correction_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "best-of-biased-groups": {
        "scoring": Scoring.SIGMOID,
        **GROUPED,
        "group_score": "max",
        "correction_bias": True,
    },
}
"""Options by name; a bias of True stands for random numbers."""


def _options(options: Options, num_experts: int) -> Options:
    if not options.get("correction_bias"):
        return options
    return {**options, "correction_bias": 0.1 * torch.randn(num_experts, generator=_draw(5))}


def _logits(
    num_tokens: int, num_experts: int, seed: int, dtype: torch.dtype = torch.float32
) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(num_tokens, num_experts, generator=_draw(seed)).to(dtype)


TOPK = {
    f"{name}-{tokens}x{top_k}of{experts}": TopKCase(
        _logits(tokens, experts, experts), top_k, _options(options, experts)
    )
    for (name, options), (tokens, experts, top_k) in product(
        TOPK_OPTIONS.items(), ((9, 100, 4), (5, 256, 8), (3, 8, 3))
    )
}
NAN, INF = torch.nan, torch.inf
TIES = ((1.0, 3.0, 3.0, 3.0, 2.0, 2.0), (0.0, -0.0, 0.0, -1.0, -0.0, -2.0))
NANS = ((NAN, 1.0, NAN, 2.0, NAN, 0.0), (NAN,) * 6)


def _fixed(rows: tuple[tuple[float, ...], ...]) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(rows)


TOPK_SHAPES = {
    "bfloat16": TopKCase(_logits(6, 64, 6, torch.bfloat16), 4),
    "float16": TopKCase(_logits(6, 64, 6, torch.float16), 4),
    **{f"{rows}_rows": TopKCase(_logits(7, 33, 7), 33, rows=rows) for rows in (1, 2, 4)},
    "all_experts": TopKCase(_logits(7, 33, 7), 33),
    "one": TopKCase(_logits(5, 7, 4), 1),
    "most_experts": TopKCase(_logits(2, 1024, 8), 30),
    "rows_apart": TopKCase(lambda: _logits(5, 40, 9)()[:, 3:35], 4),
    "columns_apart": TopKCase(lambda: _logits(5, 40, 9)().T[:32].contiguous().T, 4),
    "no_tokens": TopKCase(lambda: torch.empty(0, 8), 2, ids=()),
}
TOPK_TIES = {
    **{
        f"ties-{scoring.value}": TopKCase(
            _fixed(TIES), 4, {"scoring": scoring}, ((1, 2, 3, 4), (0, 1, 2, 4))
        )
        for scoring in Scoring
    },
    **{
        f"nan-{scoring.value}": TopKCase(
            _fixed(NANS), 4, {"scoring": scoring}, ((3, 1, 5, 0), (0, 1, 2, 3))
        )
        for scoring in Scoring
    },
    **{
        f"one_nan-{scoring.value}": TopKCase(
            _fixed(NANS[:1]), 3, {"scoring": scoring}, ((3, 1, 5),)
        )
        for scoring in Scoring
    },
    "saturated": TopKCase(_fixed(((30.0, 40.0),)), 1, {"scoring": Scoring.SIGMOID}, ((0,),)),
    **{
        f"groups-{score}": TopKCase(
            _fixed(((0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 5.0, -9.0),)),
            2,
            {"scoring": Scoring.SIGMOID, "num_groups": 4, "top_groups": 1, "group_score": score},
            ids,
        )
        for score, ids in (("max", ((6, 7),)), ("top2", ((1, 0),)))
    },
    **{
        f"excluded-{name}": TopKCase(
            lambda: torch.zeros(1, 6),
            2,
            {
                "scoring": Scoring.SIGMOID,
                "num_groups": 3,
                "top_groups": 1,
                "correction_bias": torch.tensor(bias),
            },
            ids,
        )
        for name, bias, ids in (
            ("groups", (0.0, 0.0, 9.0, -INF, 8.0, 8.0), ((4, 5),)),
            ("all", (-INF,) * 6, ((0, 1),)),
        )
    },
    "clamped-softmax": TopKCase(_fixed(((1.0, NAN, 2.0, 0.0),)), 2, {"clamp_nan": True}, ((0, 1),)),
    **{
        f"clamped-{scoring.value}": TopKCase(
            _fixed(((1.0, NAN, 2.0, 0.0),)),
            4,
            {"scoring": scoring, "clamp_nan": True},
            ((2, 0, 3, 1),),
        )
        for scoring in (Scoring.SIGMOID, Scoring.SQRTSOFTPLUS)
    },
}
