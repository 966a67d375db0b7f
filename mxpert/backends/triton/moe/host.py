"""Host side of the portable MoE kernels: allocation, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from ....formats.spec import MX_BLOCK_SIZE
from ....formats.tensor import MXTensor
from ....formats.token import FP8_TOKEN
from ....problem import (
    Combine,
    GemmConfig,
    MoEOptions,
    MoEProblem,
    Op,
    Target,
    activation_mx_format,
)
from ....routing import RoutingPlan
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ....weights import GateUpOrder, MoEWeights
from ...common.combine import combine_slots
from ...common.moe_layer import TwoStageLayer, quantize_rows
from ...common.mx_codec import scale_rule_constants
from ...common.token_rows import CodedRows, quantize_tokens
from . import config as heuristics
from .kernels import (
    _moe_down_finish_kernel,
    _moe_down_kernel,
    _moe_gate_up_finish_kernel,
    _moe_gate_up_kernel,
)

FINISH_NUM_WARPS = 4

Rows = torch.Tensor | MXTensor | CodedRows


def operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Return codes (or bf16 values), block scales (or None) and the name of the element format."""
    if isinstance(rows, MXTensor):
        return rows.qdata, rows.scale, rows.format.element.name
    if isinstance(rows, CodedRows):
        return rows.qdata, rows.block_scale.expand(rows.qdata.shape[0], -1), "e4m3"
    return rows, None, "bf16"


class _Stage:
    """Base class of both stages: supported problems, choice of tiles, arguments of the plan."""

    op: Op
    backend = "triton"

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        return heuristics.unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[GemmConfig]:
        """Valid configs whose block_m divides the plan's routing_block_m, the heuristic's first."""
        blocks = [b for b in heuristics.BLOCKS_M if problem.routing_block_m % b == 0]
        yield self.heuristic(problem)
        yield from heuristics.stage_configs(problem, self.op, blocks)

    def heuristic(self, problem: MoEProblem) -> GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.gemm_heuristic(problem, self.op, heuristics.stage_block_m(problem))

    def check(self, problem: MoEProblem, config: GemmConfig) -> None:
        """Raise ValueError for a pinned or tuned config that the device cannot run."""
        heuristics.require_valid(problem.target, self.op, problem.options.activation_format, config)


def _row_blocks(plan: RoutingPlan, config: GemmConfig) -> int:
    """Largest number of row blocks in use. At most 2^24 routed rows keep grids below 2^31."""
    return plan.max_blocks * (plan.routing_block_m // config.block_m)


def _plan_tensors(plan: RoutingPlan, weighted: bool) -> dict[str, torch.Tensor | None]:
    """Arguments of the plan's tensors for GEMM and finishing kernels."""
    return {
        "sorted_token_ids_ptr": plan.sorted_token_ids,
        "sorted_weights_ptr": plan.sorted_weights if weighted else None,
        "block_expert_ids_ptr": plan.block_expert_ids,
        "num_valid_ptr": plan.num_valid,
    }


class _Geometry(NamedTuple):
    """What a launch needs beside problem and config: sizes of the plan, format and strides."""

    routing_block_m: int
    row_blocks: int
    x_format: str
    x_strides: tuple[int, int]
    weight_strides: tuple[int, ...]

    @staticmethod
    def of(plan: RoutingPlan, row_blocks: int, rows: Rows, weight: MXTensor) -> _Geometry:
        x, x_scale, x_format = operand(rows)
        return _Geometry(
            plan.routing_block_m,
            row_blocks,
            x_format,
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
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "PREFETCH_SCALES": target.kind != "hip",
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def _launches(
    op: Op,
    kernels: tuple[Any, Any],
    problem: MoEProblem,
    config: GemmConfig,
    geometry: _Geometry,
    **epilogue: Any,
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
        **epilogue,
    )
    multiply, finish = kernels
    of_gemm = geometry.gemm_arguments(depth, config, problem.target)
    return (
        Launch(multiply, (tiles * config.split_k,), **both, **of_gemm),
        Launch(finish, (tiles,), **both, num_warps=FINISH_NUM_WARPS),
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _gate_up_launches(
    problem: MoEProblem, config: GemmConfig, geometry: _Geometry, order: GateUpOrder
) -> tuple[Launch, Launch]:
    options = problem.options
    h_format = activation_mx_format(options.activation_format, problem.op.value)
    constants = {"EMAX": 0, "THRESHOLD": 0, "INF_BYTE": 0}
    if h_format is not None:
        constants = scale_rule_constants(h_format, options.scale_rule)
    p0, p1 = options.activation.parameters
    return _launches(
        Op.MOE_GATE_UP,
        (_moe_gate_up_kernel, _moe_gate_up_finish_kernel),
        problem,
        config,
        geometry,
        gate_up_group=order.group(problem.intermediate_size),
        p0=float(p0),
        p1=float(p1),
        H_FORMAT="bf16" if h_format is None else h_format.element.name,
        ACTIVATION=options.activation.name,
        **constants,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _down_launches(
    problem: MoEProblem, config: GemmConfig, geometry: _Geometry
) -> tuple[Launch, Launch]:
    kernels = _moe_down_kernel, _moe_down_finish_kernel
    atomic = problem.options.combine is Combine.ATOMIC
    return _launches(Op.MOE_DOWN, kernels, problem, config, geometry, ATOMIC=atomic)


def _multiply(
    launches: tuple[Launch, Launch],
    config: GemmConfig,
    row_blocks: int,
    rows: Rows,
    weight: MXTensor,
    **epilogue: torch.Tensor | None,
) -> None:
    """Start the GEMM and, after split-K, the kernel that sums its parts; both get `epilogue`."""
    gemm, finish = launches
    x, x_scale, _ = operand(rows)
    partial = None
    if config.split_k > 1:
        shape = (config.split_k, row_blocks * config.block_m, weight.qdata.shape[1])
        partial = weight.qdata.new_empty(shape, dtype=torch.float32)
    gemm(
        partial_ptr=partial,
        x_ptr=x,
        x_scale_ptr=x_scale,
        x_row_scale_ptr=rows.scale if isinstance(rows, CodedRows) else None,
        w_ptr=weight.qdata,
        w_scale_ptr=weight.scale,
        **epilogue,
    )
    if partial is not None:
        finish(partial_ptr=partial, **epilogue)


class _GateUp(_Stage):
    """Stage 1: gather, gate/up GEMM, bias, activation, requantisation."""

    op = Op.MOE_GATE_UP

    def launch(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        *,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
    ) -> torch.Tensor | MXTensor:
        """Return the intermediate [P, F] in sorted order; padding rows are uninitialised."""
        return self.run(problem, config, x=x, weights=weights, plan=plan, num_rows=plan.capacity)

    def run(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        *,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        num_rows: int,
    ) -> torch.Tensor | MXTensor:
        """As `launch`, but allocate `num_rows` rows."""
        self.check(problem, config)
        rows = _gemm_rows(problem, x)
        h = _allocate(problem.options, num_rows, weights)
        row_blocks = _row_blocks(plan, config)
        if row_blocks == 0:
            return h
        weight, order = weights.gate_up_proj, weights.gate_up_order
        assert order is not None  # checked by MoEWeights
        geometry = _Geometry.of(plan, row_blocks, rows, weight)
        h_data, h_scale, _ = operand(h)
        _multiply(
            _gate_up_launches(problem, config, geometry, order),
            config,
            row_blocks,
            rows,
            weight,
            h_ptr=h_data,
            h_scale_ptr=h_scale,
            bias_ptr=weights.gate_up_bias,
            **_plan_tensors(plan, problem.options.apply_router_weight_on_input),
        )
        return h


def _allocate(options: MoEOptions, num_rows: int, weights: MoEWeights) -> torch.Tensor | MXTensor:
    """Uninitialised rows [num_rows, F] in the format that stage 1 stores."""
    features, empty = weights.intermediate_size, weights.gate_up_proj.qdata.new_empty
    format = activation_mx_format(options.activation_format, Op.MOE_GATE_UP.value)
    if format is None:
        return empty((num_rows, features), dtype=torch.bfloat16)
    return MXTensor(
        empty((num_rows, features // format.codes_per_byte)),
        empty((num_rows, features // format.block_size)),
        format,
    )


class _Down(_Stage):
    """Stage 2: down GEMM, bias, routing weight, combine."""

    op = Op.MOE_DOWN

    def launch(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        *,
        h: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, H] (`out`, if given), or with FLAT [P, H] whose padding is uninitialised."""
        self.check(problem, config)
        options, weight, row_blocks = problem.options, weights.down_proj, _row_blocks(plan, config)
        num_rows, dtype = row_blocks * config.block_m, options.out_dtype
        if options.combine is Combine.FLAT:
            num_rows = plan.capacity
        elif options.combine is Combine.ATOMIC:
            num_rows, dtype = plan.num_tokens, torch.float32
        values = weight.qdata.new_empty((num_rows, problem.hidden_size), dtype=dtype)
        if options.combine is Combine.ATOMIC:
            values.zero_()
        if row_blocks:
            rows = _gemm_rows(problem, h)
            geometry = _Geometry.of(plan, row_blocks, rows, weight)
            _multiply(
                _down_launches(problem, config, geometry),
                config,
                row_blocks,
                rows,
                weight,
                out_ptr=values,
                bias_ptr=weights.down_bias,
                **_plan_tensors(plan, not options.apply_router_weight_on_input),
            )
        if options.combine is not Combine.REDUCE:
            return values.to(options.out_dtype) if out is None else out.copy_(values)
        if plan.num_tokens == 0:
            return values.new_empty((0, problem.hidden_size))
        return combine_slots(values, plan.slot_rows, problem.target, out=out)


def _gemm_rows(problem: MoEProblem, rows: torch.Tensor | MXTensor) -> Rows:
    """Convert `rows` to the layer's activation format, if they are not in it."""
    if problem.options.activation_format == FP8_TOKEN and isinstance(rows, torch.Tensor):
        return quantize_tokens(rows)
    return quantize_rows(problem, rows)


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = TwoStageLayer(GATE_UP, DOWN, heuristics)
