"""Host side of routing on the device: geometry of the launches, allocation, no synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton

from ...problem import Op, RoutingProblem, Scoring, Target, TopKProblem
from ...routing import RoutingPlan, plan_capacity
from .routing_kernels import (
    _route_topk_kernel, _routing_plan_count_kernel, _routing_plan_expert_kernel,
    _routing_plan_scatter_kernel,
)

MAX_EXPERTS = 1024
_EXPERT_TILES = (128, 512, 1024)
"""Powers of two that experts are padded to; few, so that models share binaries."""
_SLOT_TILES = (16, 128)
_TOPK_TILE = 512
"""Logits per program of route_topk, 16 a thread; one row where a row is longer."""
MAX_CHUNKS = 128
"""Chunks of rows in the two-launch sort: about the multiprocessors of a large GPU, and as many
count vectors as each program of the second launch reads (512 kB of L2 at 1024 experts)."""
_CHUNK_TILES = (256, 1024)
SINGLE_LAUNCH_ROWS = 4096
"""Up to here every program of the one-launch sort reads all ids: at most 4 tiles, twice."""


def _padded(size: int, tiles: tuple[int, ...]) -> int:
    return next(tile for tile in tiles if size <= tile)


def _cannot_run(target: Target, num_experts: int) -> str | None:
    """Why routing kernels cannot serve this device or this many experts."""
    if target.kind == "cpu" and not triton.knobs.runtime.interpret:
        return "has no kernels for a CPU (outside Triton's interpreter)"
    if num_experts > MAX_EXPERTS:
        return f"routes among at most {MAX_EXPERTS} experts, not {num_experts}"
    return None


def _device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the tensor's device; entering costs nothing where it is current already."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


@dataclass(frozen=True)
class TopKConfig:
    """Tokens per program. One warp each: reductions over experts then are shuffles only."""

    rows: int
    num_warps: int = 1


class TopKKernel:
    """route_topk: repeated maximum of keys that hold score and expert id."""

    op = Op.ROUTE_TOPK
    backend = "triton"

    def unsupported(self, problem: TopKProblem) -> str | None:
        return _cannot_run(problem.target, problem.num_experts)

    def configs(self, problem: TopKProblem) -> Iterable[TopKConfig]:
        most = self.heuristic(problem).rows
        return tuple(TopKConfig(rows) for rows in (1, 2, 4) if rows <= most)

    def heuristic(self, problem: TopKProblem) -> TopKConfig:
        return TopKConfig(max(1, _TOPK_TILE // _padded(problem.num_experts, _EXPERT_TILES)))

    def launch(self, problem: TopKProblem, config: TopKConfig, *, logits: torch.Tensor,
               correction_bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        options, shape = problem.options, (problem.num_tokens, problem.top_k)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
        if problem.num_tokens == 0:
            return weights, ids
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        grouped = options.num_groups > 1
        with _device_of(logits):
            _route_topk_kernel[(triton.cdiv(problem.num_tokens, config.rows),)](
                topk_weights=weights, topk_ids=ids, logits=logits, correction_bias=correction_bias,
                num_tokens=problem.num_tokens, top_k=problem.top_k,
                num_experts=problem.num_experts, num_groups=options.num_groups,
                top_groups=options.top_groups, row_stride=logits.stride(0),
                routed_scaling_factor=float(options.routed_scaling_factor),
                SIGMOID=options.scoring is Scoring.SIGMOID, NORMALIZE=options.normalize,
                GROUPED=grouped, BY_PROBABILITY=grouped or correction_bias is not None,
                ROWS=config.rows, EXPERTS=_padded(problem.num_experts, _EXPERT_TILES),
                SLOTS=_padded(problem.top_k, _SLOT_TILES), num_warps=config.num_warps)
        return weights, ids


@dataclass(frozen=True)
class PlanConfig:
    """Geometry of the sort.

    Args:
        num_chunks: chunks of rows of the two-launch sort; 0 sorts in one launch, a program per
            expert. tile: rows that a program handles at once, a power of two.
    """

    num_chunks: int
    tile: int = 1024
    num_warps: int = 4


class PlanKernel:
    """make_routing_plan in one launch (few rows) or two."""

    op = Op.ROUTING_PLAN
    backend = "triton"

    def unsupported(self, problem: RoutingProblem) -> str | None:
        return _cannot_run(problem.target, problem.num_local_experts)

    def configs(self, problem: RoutingProblem) -> Iterable[PlanConfig]:
        return PlanConfig(0), *(_chunked(problem, tile) for tile in _CHUNK_TILES)

    def heuristic(self, problem: RoutingProblem) -> PlanConfig:
        rows = problem.num_tokens * problem.top_k
        if rows <= SINGLE_LAUNCH_ROWS:
            return PlanConfig(0)
        # Small tiles sort faster and spread over more programs; large ones need fewer chunks.
        small, large = _CHUNK_TILES
        return _chunked(problem, small if rows <= small * MAX_CHUNKS else large)

    def launch(
        self, problem: RoutingProblem, config: PlanConfig, *, topk_ids: torch.Tensor,
        topk_weights: torch.Tensor, expert_map: torch.Tensor | None,
        num_local_tokens: torch.Tensor | None,
    ) -> RoutingPlan:
        plan = _allocate(problem, topk_ids.device)
        ids, num_bins = topk_ids.contiguous(), _padded(problem.num_local_experts, _EXPERT_TILES)
        outputs = {"sorted_token_ids": plan.sorted_token_ids, "sorted_weights": plan.sorted_weights,
                   "block_expert_ids": plan.block_expert_ids, "num_valid": plan.num_valid,
                   "slot_rows": plan.slot_rows, "topk_weights": topk_weights.contiguous(),
                   "routing_block_m": problem.routing_block_m, "capacity": plan.capacity}
        shared = {"topk_ids": ids, "expert_map": expert_map, "num_local_tokens": num_local_tokens,
                  "num_tokens": problem.num_tokens, "top_k": problem.top_k,
                  "num_experts": problem.num_experts,
                  "num_local_experts": problem.num_local_experts,
                  "NUM_BINS": num_bins, "TILE": config.tile, "num_warps": config.num_warps}
        chunks = config.num_chunks
        with _device_of(topk_ids):
            if chunks == 0:
                _routing_plan_expert_kernel[(problem.num_local_experts,)](**outputs, **shared)
                return plan
            tiles = triton.cdiv(problem.num_tokens * problem.top_k, chunks * config.tile)
            counts = torch.empty((chunks, num_bins), dtype=torch.int32, device=topk_ids.device)
            _routing_plan_count_kernel[(chunks,)](
                chunk_counts=counts, tiles_per_chunk=tiles, **shared)
            _routing_plan_scatter_kernel[(chunks,)](
                chunk_counts=counts, num_chunks=chunks, tiles_per_chunk=tiles,
                LOG2_TILE=config.tile.bit_length() - 1, **outputs, **shared)
        return plan


def _chunked(problem: RoutingProblem, tile: int) -> PlanConfig:
    """One tile per chunk, or more where that would make more than MAX_CHUNKS chunks."""
    rows = problem.num_tokens * problem.top_k
    return PlanConfig(min(MAX_CHUNKS, max(1, triton.cdiv(rows, tile))), tile)


def _allocate(problem: RoutingProblem, device: torch.device) -> RoutingPlan:
    """A plan of uninitialised tensors; the kernels write every element."""
    unit = problem.routing_block_m
    capacity = plan_capacity(problem.num_tokens, problem.top_k, problem.num_local_experts, unit)

    def ids(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return RoutingPlan(
        sorted_token_ids=ids(capacity),
        sorted_weights=torch.empty(capacity, dtype=torch.float32, device=device),
        block_expert_ids=ids(capacity // unit), num_valid=ids(2),
        slot_rows=ids(problem.num_tokens, problem.top_k), num_tokens=problem.num_tokens,
        top_k=problem.top_k, num_experts=problem.num_local_experts, routing_block_m=unit)


TOPK = TopKKernel()
PLAN = PlanKernel()
