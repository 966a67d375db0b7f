"""Host side of the portable MoE kernels: allocation, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import Combine, GemmConfig, MoEProblem, Op, Target, WeightCache
from ...formats.spec import MX_BLOCK_SIZE, MXFP8_E4M3
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import WeightLike, WeightTensor
from ...routing.plan import RoutingPlan
from ..finish import _moe_down_finish_kernel, _moe_gate_up_finish_kernel, _moe_up_finish_kernel
from ..layer import (
    DownStage,
    GateUpStage,
    Rows,
    Stage,
    TwoStageLayer,
    gate_up_epilogue_arguments,
    gemm_rows,
    up_epilogue_arguments,
)
from ..token_rows import CodedRows
from ..weights import GateUpOrder, MoEWeights
from . import config as heuristics
from .kernels import _moe_down_kernel, _moe_gate_up_kernel, _moe_up_kernel

FINISH_NUM_WARPS = 4


def operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Return codes (or bf16 values), block scales (or None) and the name of the element format."""
    if isinstance(rows, MXTensor):
        return rows.qdata, rows.scale, rows.format.element.name
    if isinstance(rows, CodedRows):
        return rows.qdata, rows.block_scale.expand(rows.qdata.shape[0], -1), "e4m3"
    return rows, None, "bf16"


def weight_operand(weight: WeightLike, target: Target) -> str:
    """W_FORMAT of weights: how they are multiplied."""
    if isinstance(weight, MXTensor):
        decoded = heuristics.decodes_mxfp8(target) and weight.format == MXFP8_E4M3
        return "mxfp8" if decoded else weight.format.element.name
    return weight.format.name


class _Stage(Stage[GemmConfig]):
    """What both stages have: supported problems, choice of tiles, the GEMM."""

    backend = "triton"

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        return heuristics.unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[GemmConfig]:
        """Valid configs whose block_m divides the plan's routing_block_m, the heuristic's first."""
        blocks = [b for b in heuristics.BLOCKS_M if problem.routing_block_m % b == 0]
        first = self.heuristic(problem)
        yield first
        if heuristics.can_stream(problem.target):
            yield replace(first, weight_cache=first.weight_cache.other)
        yield from heuristics.stage_configs(problem, self.op, blocks)

    def heuristic(self, problem: MoEProblem) -> GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.gemm_heuristic(problem, self.op, heuristics.stage_block_m(problem))

    def multiply(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        plan: RoutingPlan,
        rows: torch.Tensor | MXTensor,
        weights: MoEWeights,
        epilogue: dict[str, torch.Tensor | None],
    ) -> None:
        """Start the GEMM and, after split-K, the kernel that sums its parts."""
        sizes = problem.options.activation_format, config, weights.has_gate, problem.weight_format
        heuristics.require_valid(problem.target, self.op, *sizes)
        # At most 2^24 routed rows keep grids below 2^31.
        row_blocks = plan.max_blocks * (plan.routing_block_m // config.block_m)
        if not row_blocks:
            return
        weight, order = self.weight(weights), weights.gate_up_order
        coded = gemm_rows(problem, rows)
        w_format = weight_operand(weight, problem.target)
        geometry = _Geometry.of(plan, row_blocks, coded, weight, w_format)
        gemm, finish = _launches(problem, self.op, config, geometry, order)
        x, x_scale, _ = operand(coded)
        partial = None
        if config.split_k > 1:
            shape = (config.split_k, row_blocks * config.block_m, weight.qdata.shape[1])
            partial = weight.qdata.new_empty(shape, dtype=torch.float32)
        gemm(
            partial_ptr=partial,
            x_ptr=x,
            x_scale_ptr=x_scale,
            x_row_scale_ptr=coded.scale if isinstance(coded, CodedRows) else None,
            w_ptr=weight.qdata,
            w_scale_ptr=weight.scale,
            w_zero_ptr=weight.zero_point if isinstance(weight, WeightTensor) else None,
            w_row_scale_ptr=weight.row_scale if isinstance(weight, WeightTensor) else None,
            **epilogue,
        )
        if partial is not None:
            finish(partial_ptr=partial, **epilogue)


class _Geometry(NamedTuple):
    """What a launch needs beside problem and config: sizes of the plan, format and strides."""

    routing_block_m: int
    row_blocks: int
    x_format: str
    w_format: str
    x_strides: tuple[int, int]
    weight_strides: tuple[int, ...]

    @staticmethod
    def of(
        plan: RoutingPlan, row_blocks: int, rows: Rows, weight: WeightLike, w_format: str
    ) -> _Geometry:
        x, x_scale, x_format = operand(rows)
        return _Geometry(
            plan.routing_block_m,
            row_blocks,
            x_format,
            w_format,
            (x.stride(0), 0 if x_scale is None else x_scale.stride(0)),
            (*weight.qdata.stride()[:2], *weight.scale.stride()[:2]),
        )

    def gemm_arguments(self, depth: int, config: GemmConfig, target: Target) -> dict[str, Any]:
        """Stride and tile arguments of a GEMM; every K split is a multiple of block_k."""
        k_blocks = depth // MX_BLOCK_SIZE
        k_steps = triton.cdiv(k_blocks * MX_BLOCK_SIZE, config.block_k)
        per_split = triton.cdiv(k_steps, config.split_k) * (config.block_k // MX_BLOCK_SIZE)
        names = ("w_stride_e", "w_stride_n", "w_scale_stride_e", "w_scale_stride_n")
        return {
            "num_k_blocks": k_blocks,
            "k_blocks_per_split": per_split,
            "x_stride": self.x_strides[0],
            "x_scale_stride": self.x_strides[1],
            **dict(zip(names, self.weight_strides, strict=True)),
            "X_FORMAT": self.x_format,
            "W_FORMAT": self.w_format,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "PREFETCH_SCALES": target.kind != "hip",
            "STREAM": config.weight_cache is WeightCache.STREAM,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


@functools.lru_cache(CACHED_LAUNCHES)
def _launches(
    problem: MoEProblem, op: Op, config: GemmConfig, geometry: _Geometry, order: GateUpOrder | None
) -> tuple[Launch, Launch]:
    """Launches of a stage's GEMM and of its finishing kernel, which runs if split_k > 1."""
    columns, depth = heuristics.stage_dimensions(problem, op)
    tiles = geometry.row_blocks * triton.cdiv(columns, config.block_n)
    both = dict(
        num_tokens=problem.num_tokens,
        num_experts=problem.num_experts,
        num_n_blocks=columns // MX_BLOCK_SIZE,
        routing_block_m=geometry.routing_block_m,
        split_k=config.split_k,
        partial_rows=geometry.row_blocks * config.block_m,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
    )
    finishing: dict[str, Any] = dict(num_warps=FINISH_NUM_WARPS)
    if op is Op.MOE_GATE_UP and order is None:
        multiply, finish = _moe_up_kernel, _moe_up_finish_kernel
        both |= up_epilogue_arguments(problem.options)
    elif op is Op.MOE_GATE_UP:
        assert order is not None  # for the type checker
        multiply, finish = _moe_gate_up_kernel, _moe_gate_up_finish_kernel
        both |= gate_up_epilogue_arguments(problem.options)
        both |= dict(gate_up_group=order.group(problem.intermediate_size))
        finishing |= dict(GATE_UP_GROUP=None)  # the GEMM stores gates and ups apart
    else:
        multiply, finish = _moe_down_kernel, _moe_down_finish_kernel
        both |= dict(ATOMIC=problem.options.combine is Combine.ATOMIC)
    of_gemm = geometry.gemm_arguments(depth, config, problem.target)
    return (
        Launch(multiply, (tiles * config.split_k,), **both, **of_gemm),
        Launch(finish, (tiles,), **both, **finishing),
    )


class _GateUp(GateUpStage[GemmConfig], _Stage):
    """Stage 1."""


class _Down(DownStage[GemmConfig], _Stage):
    """Stage 2."""


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = TwoStageLayer(GATE_UP, DOWN, heuristics)
