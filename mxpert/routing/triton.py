"""Host side of the routing kernels: grids, allocation, launches; no synchronisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import Op, RoutingProblem, Target, TopKProblem, best_of_group, compares_scores
from ..device.pdl import pdl_options
from ..device.targets import refuse_cpu
from .inputs import PlanInputs, TopKInputs
from .plan import RoutingPlan, plan_capacity
from .triton_plan_kernels import (
    _routing_plan_count_kernel,
    _routing_plan_expert_kernel,
    _routing_plan_scatter_kernel,
)
from .triton_topk_kernels import _route_topk_kernel

MAX_EXPERTS = 1024
_EXPERT_TILES = (128, 512, 1024)
"""Expert counts are padded to one of these; few values, so that models share binaries."""
_SLOT_TILES = (16, 128)
_TOPK_TILE = 512
"""Logits per program of route_topk, 16 a thread; a program has one row if the row is longer."""
MAX_CHUNKS = 128
"""Most chunks of rows in the two-launch sort: about the number of SMs of a large GPU. Each program
of the second launch reads one count vector per chunk (512 kB from L2 at 1024 experts)."""
_FEW_EXPERTS = (
    (64, 1, 64, 1),
    (128, 1, 128, 2),
    (2048, 1, 1024, 4),
    (8192, 2, 256, 4),
    (32768, 2, 512, 4),
    (math.inf, 2, 1024, 4),
)
_MANY_EXPERTS = (
    (64, 1, 64, 1),
    (128, 1, 128, 2),
    (1024, 1, 1024, 4),
    (2048, 2, 256, 8),
    (65536, 2, 512, 4),
    (math.inf, 2, 1024, 4),
)
_SORTS = {128: _FEW_EXPERTS, 512: _MANY_EXPERTS, 1024: _MANY_EXPERTS}
"""By padded number of experts: (largest number of rows, launches, rows per tile, warps).

Measured on an H200, each sort after a top-k kernel as in a layer. Repeating the sort alone gives
misleading times, because its code then stays in the instruction cache: 4096 rows among 384 experts
take 8 µs alone with tiles of 256, but 17 µs after a top-k, where tiles of 512 take 11 µs.
"""


def _bins(problem: RoutingProblem) -> int:
    return _padded(problem.num_local_experts, _EXPERT_TILES)


def _padded(size: int, tiles: tuple[int, ...]) -> int:
    return next(tile for tile in tiles if size <= tile)


def _cannot_run(target: Target, num_experts: int) -> str | None:
    """Why routing kernels cannot serve this device or this many experts."""
    if num_experts > MAX_EXPERTS:
        return f"routes among at most {MAX_EXPERTS} experts, not {num_experts}"
    return refuse_cpu(target)


@dataclass(frozen=True)
class TopKConfig:
    """Tokens per program. With one warp, reductions over experts use shuffles only."""

    rows: int
    num_warps: int = 1


class TopKKernel:
    """route_topk by repeated maximum of the scores."""

    op = Op.ROUTE_TOPK
    backend = "triton"

    def unsupported(self, problem: TopKProblem) -> str | None:
        return _cannot_run(problem.target, problem.num_experts)

    def configs(self, problem: TopKProblem) -> Iterable[TopKConfig]:
        most = self.heuristic(problem).rows
        return tuple(TopKConfig(rows) for rows in (1, 2, 4) if rows <= most)

    def heuristic(self, problem: TopKProblem) -> TopKConfig:
        return TopKConfig(max(1, _TOPK_TILE // _padded(problem.num_experts, _EXPERT_TILES)))

    def launch(
        self, problem: TopKProblem, config: TopKConfig, inputs: TopKInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, bias = inputs.logits, inputs.correction_bias
        shape = (problem.num_tokens, problem.top_k)
        weights = logits.new_empty(shape, dtype=torch.float32)
        ids = logits.new_empty(shape, dtype=torch.int32)
        if problem.num_tokens == 0:
            return weights, ids
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        _topk_launch(problem, config, logits.stride(0), bias is not None)(
            topk_weights=weights, topk_ids=ids, logits=logits, correction_bias=bias
        )
        return weights, ids


@functools.lru_cache(CACHED_LAUNCHES)
def _topk_launch(problem: TopKProblem, config: TopKConfig, row_stride: int, biased: bool) -> Launch:
    options = problem.options
    return Launch(
        _route_topk_kernel,
        (triton.cdiv(problem.num_tokens, config.rows),),
        num_tokens=problem.num_tokens,
        top_k=problem.top_k,
        num_experts=problem.num_experts,
        num_groups=options.num_groups,
        top_groups=options.top_groups,
        row_stride=row_stride,
        routed_scaling_factor=float(options.routed_scaling_factor),
        SCORING=options.scoring.value,
        NORMALIZE=options.normalize,
        GROUPED=options.num_groups > 1,
        BY_SCORE=compares_scores(options, biased),
        BEST_OF_GROUP=best_of_group(options),
        CLAMP_NAN=options.clamp_nan,
        ROWS=config.rows,
        EXPERTS=_padded(problem.num_experts, _EXPERT_TILES),
        SLOTS=_padded(problem.top_k, _SLOT_TILES),
        num_warps=config.num_warps,
        **pdl_options(problem.target),
    )


@dataclass(frozen=True)
class PlanConfig:
    """Config of the sort.

    Args:
        num_chunks: chunks of rows of the two-launch sort; 0 sorts in one launch with one program
            per expert.
        tile: rows that a program handles per iteration, a power of two.
        num_warps: warps per program.
    """

    num_chunks: int
    tile: int
    num_warps: int = 4


class PlanKernel:
    """make_routing_plan in one launch (few rows) or two (many rows)."""

    op = Op.ROUTING_PLAN
    backend = "triton"

    def unsupported(self, problem: RoutingProblem) -> str | None:
        return _cannot_run(problem.target, problem.num_local_experts)

    def configs(self, problem: RoutingProblem) -> Iterable[PlanConfig]:
        return tuple(config for _, config in _sorts(problem))

    def heuristic(self, problem: RoutingProblem) -> PlanConfig:
        rows = problem.num_tokens * problem.top_k
        return next(config for limit, config in _sorts(problem) if rows <= limit)

    def launch(
        self, problem: RoutingProblem, config: PlanConfig, inputs: PlanInputs
    ) -> RoutingPlan:
        """Allocate a plan and sort the rows."""
        plan = _allocate(problem, inputs.topk_ids)
        outputs = {
            "sorted_token_ids": plan.sorted_token_ids,
            "sorted_weights": plan.sorted_weights,
            "block_expert_ids": plan.block_expert_ids,
            "num_valid": plan.num_valid,
            "slot_rows": plan.slot_rows,
            "topk_weights": inputs.topk_weights.contiguous(),
        }
        routed = {
            "topk_ids": inputs.topk_ids.contiguous(),
            "expert_map": inputs.expert_map,
            "num_local_tokens": inputs.num_local_tokens,
            "arrivals": inputs.arrivals,
        }
        launches = _plan_launches(problem, config)
        if config.num_chunks == 0:
            (sort,) = launches
            sort(**outputs, **routed)
            return plan
        count, scatter = launches
        counts = plan.num_valid.new_empty((config.num_chunks, count.constants["NUM_BINS"]))
        count(chunk_counts=counts, **routed)
        scatter(chunk_counts=counts, **outputs, **routed)
        return plan


@functools.lru_cache(CACHED_LAUNCHES)
def _plan_launches(problem: RoutingProblem, config: PlanConfig) -> tuple[Launch, ...]:
    """The single launch of the sort, or its two launches: count, scatter."""
    sizes: dict[str, Any] = {
        "num_tokens": problem.num_tokens,
        "top_k": problem.top_k,
        "num_experts": problem.num_experts,
        "num_local_experts": problem.num_local_experts,
        "NUM_BINS": _bins(problem),
        "TILE": config.tile,
        "num_warps": config.num_warps,
        "KIND": problem.target.kind,
        **pdl_options(problem.target),
    }
    of_plan = {"routing_block_m": problem.routing_block_m, "capacity": _capacity(problem)}
    if config.num_chunks == 0:
        grid = (problem.num_local_experts,)
        return (Launch(_routing_plan_expert_kernel, grid, **of_plan, **sizes),)
    grid = (config.num_chunks,)
    rows_per_step = config.num_chunks * config.tile
    sizes["tiles_per_chunk"] = triton.cdiv(problem.num_tokens * problem.top_k, rows_per_step)
    return (
        Launch(_routing_plan_count_kernel, grid, **sizes),
        Launch(
            _routing_plan_scatter_kernel,
            grid,
            num_chunks=config.num_chunks,
            LOG2_TILE=config.tile.bit_length() - 1,
            **of_plan,
            **sizes,
        ),
    )


def _sorts(problem: RoutingProblem) -> Iterator[tuple[float, PlanConfig]]:
    """All configs of the sort, each with the largest number of rows for which it is the fastest.

    A chunk of the two-launch sort has one tile, or more if there were more than MAX_CHUNKS chunks.
    """
    rows = problem.num_tokens * problem.top_k
    for limit, launches, tile, num_warps in _SORTS[_bins(problem)]:
        chunks = min(MAX_CHUNKS, max(1, triton.cdiv(rows, tile))) if launches == 2 else 0
        yield limit, PlanConfig(chunks, tile, num_warps)


def _capacity(problem: RoutingProblem) -> int:
    return plan_capacity(
        problem.num_tokens, problem.top_k, problem.num_local_experts, problem.routing_block_m
    )


def _allocate(problem: RoutingProblem, topk_ids: torch.Tensor) -> RoutingPlan:
    """Allocate a plan without initialising it; the kernels write every element."""
    unit, capacity = problem.routing_block_m, _capacity(problem)
    empty = functools.partial(topk_ids.new_empty, dtype=torch.int32)
    return RoutingPlan(
        sorted_token_ids=empty(capacity),
        sorted_weights=empty(capacity, dtype=torch.float32),
        block_expert_ids=empty(capacity // unit),
        num_valid=empty(2),
        slot_rows=empty((problem.num_tokens, problem.top_k)),
        num_tokens=problem.num_tokens,
        top_k=problem.top_k,
        num_experts=problem.num_local_experts,
        routing_block_m=unit,
    )


TOPK = TopKKernel()
PLAN = PlanKernel()
