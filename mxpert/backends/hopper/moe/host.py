"""Host side of the Hopper MoE kernels: row encoding, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ....formats.tensor import Layout, MXTensor
from ....problem import Combine, GemmConfig, MoEConfig, MoEProblem, Op
from ....routing import RoutingPlan
from ....runtime.launch import CACHED_LAUNCHES, DescriptorSpec, Launch
from ....weights import MoEWeights
from ...common.combine import combine_slots
from ...common.moe_layer import TwoStageLayer, quantize_rows
from ...common.pdl import PDL_LAUNCH
from ..lib.tma import matrix_descriptor, rows_descriptor
from . import config as heuristics
from .decode import _moe_gemm_decode_kernel
from .encode import SortedRows, fits_one_step, sorted_rows
from .epilogue import ROWS
from .prefill import _moe_gemm_prefill_kernel
from .prefill_tiles import Schedules, tile_schedule
from .split_k_combine import combine_parts
from .split_k_gate_up import finish_gate_up, finish_rows

_NO_PARAMETERS = (0.0, 0.0)

_STAGE_DEPTH = 256
"""Codes of depth in a pipeline stage of both kernels."""


class _Stage:
    """Base class of both stages: supported problems and choice of tiles."""

    op: Op
    backend = "hopper"

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        return unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[GemmConfig]:
        """Every tile whose block_m divides the plan's routing_block_m."""
        return heuristics.stage_configs(problem)

    def heuristic(self, problem: MoEProblem) -> GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.stage_heuristic(problem)


def unsupported(problem: MoEProblem) -> str | None:
    """Why this backend cannot serve `problem`, as a phrase; None if it can."""
    if problem.target.arch != "sm_90":
        return f"needs sm_90, not {problem.target.arch}"
    if problem.weight_layout is not Layout.HOPPER_FRAGMENT:
        return (
            "needs weights in HOPPER_FRAGMENT layout: call weights.prepare(device=...), which "
            "keeps ROW_MAJOR where a row spans more than 15 binades"
        )
    if problem.options.out_dtype is torch.float64:
        return "has no float64 output"
    if problem.routing_block_m % min(heuristics.BLOCKS_M):
        return f"needs routing_block_m to be a multiple of {min(heuristics.BLOCKS_M)}"
    return None


class _GateUp(_Stage):
    """Stage 1: gather and encode rows, gate/up GEMM, bias, activation, requantisation."""

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
        """Return the intermediate [P, F] in sorted order; padding rows are undefined."""
        h = self._multiply(problem, config, x, weights, plan, plan.capacity)
        if h.dim() == 3:
            h = finish_gate_up(h, weights.gate_up_bias, plan, problem.options)
        return quantize_rows(problem, h)

    def run(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        *,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        num_rows: int,
        schedules: Schedules | None = None,
    ) -> torch.Tensor | SortedRows:
        """Return `num_rows` rows as input of stage 2.

        These are bfloat16 rows, which stage 2 quantises and encodes, or after split-K rows that are
        already encoded.
        """
        h = self._multiply(problem, config, x, weights, plan, num_rows, schedules)
        if h.dim() == 2:
            return h
        finish = finish_rows if fits_one_step(problem.intermediate_size) else finish_gate_up
        return finish(h, weights.gate_up_bias, plan, problem.options)

    @staticmethod
    def _multiply(
        problem: MoEProblem,
        config: GemmConfig,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        num_rows: int,
        schedules: Schedules | None = None,
    ) -> torch.Tensor:
        """Run the GEMM: bfloat16 [P, F], or with split-K partial sums float32 [split_k, P, 2F]."""
        options, features = problem.options, problem.intermediate_size
        h = plan.sorted_weights.new_empty((num_rows, features), dtype=torch.bfloat16)
        if not plan.max_blocks:
            return h
        rows = sorted_rows(x, plan, num_rows, options, scatter=True)
        if config.split_k > 1:
            parts = _parts(num_rows, 2 * features, config, weights.device)
            multiply(
                parts,
                rows,
                weights.gate_up_proj,
                None,
                plan,
                problem,
                config,
                kind=ROWS,
                parameters=_NO_PARAMETERS,
                weighted=False,
            )
            return parts
        multiply(
            h,
            rows,
            weights.gate_up_proj,
            weights.gate_up_bias,
            plan,
            problem,
            config,
            kind=options.activation.name,
            parameters=options.activation.parameters,
            weighted=options.apply_router_weight_on_input,
            schedules=schedules,
        )
        return h


class _Down(_Stage):
    """Stage 2: encode rows, down GEMM, bias, routing weight, combine."""

    op = Op.MOE_DOWN

    def launch(
        self,
        problem: MoEProblem,
        config: GemmConfig,
        *,
        h: torch.Tensor | MXTensor | SortedRows,
        weights: MoEWeights,
        plan: RoutingPlan,
        schedules: Schedules | None = None,
    ) -> torch.Tensor:
        """Return [T, H], or with FLAT [P, H] whose padding rows are undefined.

        schedules: tile lists of the layer if its stage 1 computed h; None otherwise.
        ATOMIC allows any summation order; this backend sums in slot order, as REDUCE does.
        """
        options = problem.options
        flat = options.combine is Combine.FLAT
        num_rows = plan.capacity if flat else plan.max_blocks * plan.routing_block_m
        if plan.num_tokens == 0:
            return torch.empty(
                (num_rows if flat else 0, weights.hidden_size),
                device=weights.device,
                dtype=options.out_dtype,
            )
        rows = (
            h
            if isinstance(h, SortedRows)
            else sorted_rows(
                h, plan, num_rows, options, scatter=False, release_first=schedules is not None
            )
        )
        if config.split_k > 1 and not flat:
            parts = _parts(num_rows, weights.hidden_size, config, weights.device)
            multiply(
                parts,
                rows,
                weights.down_proj,
                None,
                plan,
                problem,
                config,
                kind=ROWS,
                parameters=_NO_PARAMETERS,
                weighted=False,
            )
            return combine_parts(parts, weights.down_bias, plan, options)
        out = rows.scale.new_empty((num_rows, problem.hidden_size), dtype=options.out_dtype)
        multiply(
            out,
            rows,
            weights.down_proj,
            weights.down_bias,
            plan,
            problem,
            _unsplit(config),
            kind=ROWS,
            parameters=_NO_PARAMETERS,
            weighted=not options.apply_router_weight_on_input,
            schedules=schedules,
        )
        return (
            out
            if flat
            else combine_slots(out, plan.slot_rows, problem.target, plan_before_wait=True)
        )


def _parts(num_rows: int, width: int, config: GemmConfig, device: torch.device) -> torch.Tensor:
    """Allocate the partial sums, float32 [split_k, num_rows, width]."""
    return torch.empty((config.split_k, num_rows, width), dtype=torch.float32, device=device)


@functools.cache
def _unsplit(config: GemmConfig) -> GemmConfig:
    return replace(config, split_k=1)


def multiply(
    out: torch.Tensor,
    rows: SortedRows,
    weight: MXTensor,
    bias: torch.Tensor | None,
    plan: RoutingPlan,
    problem: MoEProblem,
    config: GemmConfig,
    *,
    kind: str,
    parameters: tuple[float, float],
    weighted: bool,
    schedules: Schedules | None = None,
) -> None:
    """Run one GEMM with its epilogue over the plan's blocks.

    `out` is [P, F or H], or with split-K [split_k, P, 2F or H].
    """
    _, row_units, depth_units, _ = weight.qdata.shape
    gemm = _Gemm(
        out.shape[-2],
        out.shape[-1],
        row_units,
        depth_units,
        plan.routing_block_m,
        rows.low_rows,
        rows.split,
        bias is not None,
        weighted,
        kind,
        parameters,
    )
    tensors = dict(
        code_desc=weight.qdata,
        shift_desc=weight.scale,
        reference=weight.reference,
        bias=rows.scale if bias is None else bias,
        x_scale=rows.scale,
        routed_weights=plan.sorted_weights,
        tile_counter=rows.tile_counter,
    )
    if heuristics.is_prefill(config):
        schedule = tile_schedule(plan, config.block_m, config.group_m, schedules)
        _prefill_launch(problem, config, gemm, out.dtype)(
            out_desc=out,
            x_desc=rows.codes,
            tile_first_block=schedule.first_block,
            tile_blocks=schedule.blocks,
            tile_expert=schedule.expert,
            num_groups=schedule.count,
            **tensors,
        )
    else:
        _decode_launch(problem, config, gemm)(
            out=out,
            **dict.fromkeys(_decode_copies(config.block_m), rows.codes),
            sorted_token_ids=plan.sorted_token_ids,
            block_expert_ids=plan.block_expert_ids,
            num_valid=plan.num_valid,
            **tensors,
        )


class _Gemm(NamedTuple):
    """Sizes and flags that a GEMM's launch needs beside problem and config."""

    num_rows: int
    num_outputs: int
    row_units: int
    depth_units: int
    routing_block_m: int
    low_rows: int
    split: bool
    has_bias: bool
    weighted: bool
    kind: str
    parameters: tuple[float, float]


_X_DESCRIPTORS = {rows: f"x{rows}_desc" for rows in heuristics.BLOCKS_M}
"""The decode kernel's descriptor parameters by rows of x; None above a config's block_m."""


@functools.cache
def _decode_copies(block_m: int) -> dict[str, DescriptorSpec]:
    return {
        name: rows_descriptor(rows, heuristics.DECODE_DEPTH, torch.float8_e4m3fn)
        for rows, name in _X_DESCRIPTORS.items()
        if rows <= block_m
    }


@functools.lru_cache(CACHED_LAUNCHES)
def _decode_launch(problem: MoEProblem, config: GemmConfig, gemm: _Gemm) -> Launch:
    # The last step of an odd depth must not read the next unit: decode is limited by bandwidth.
    tiles = {
        "code_desc": matrix_descriptor(64, 128, torch.uint8),
        "shift_desc": matrix_descriptor(16, 32, torch.uint8),
        **_decode_copies(config.block_m),
    }
    unused = {name: None for name in _X_DESCRIPTORS.values() if name not in tiles}
    constants = _gemm_constants(problem, config, gemm)
    early_stages = config.num_stages  # stage 2 starts while the last tiles of stage 1 still run
    if gemm.kind != ROWS:
        early_stages = heuristics.early_stages(config, problem, constants["tiles_per_block"])
    return Launch(
        _moe_gemm_decode_kernel,
        (heuristics.decode_ctas(problem),),
        tiles,
        num_tokens=problem.num_tokens,
        splits=config.split_k,
        blocks_per_unit=gemm.routing_block_m // config.block_m,
        num_rows=gemm.num_rows,
        early_stages=early_stages,
        TOKENS=config.block_m,
        maxnreg=heuristics.DECODE_REGISTERS,
        WORKER_REGISTERS=heuristics.DECODE_WORKER_REGISTERS,
        **unused,
        **constants,
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _prefill_launch(
    problem: MoEProblem, config: GemmConfig, gemm: _Gemm, out_dtype: torch.dtype
) -> Launch:
    outputs = 64 if gemm.kind == ROWS else 32
    pieces, rows = heuristics.output_pieces(config, gemm.split, outputs * out_dtype.itemsize)
    # With hi and lo and only two stages of 256 codes, copy half a stage at a time (32 rows are 128
    # codes of depth): decoding then starts earlier.
    code_rows = 32 if gemm.split and config.num_stages <= 4 else 64
    tiles = {
        "code_desc": rows_descriptor(code_rows, 128, torch.uint8, width=128),
        "shift_desc": rows_descriptor(code_rows // 4, 32, torch.uint8, width=32),
        "x_desc": rows_descriptor(config.block_m, config.block_k, torch.float8_e4m3fn),
        "out_desc": rows_descriptor(rows, outputs, out_dtype),
    }
    return Launch(
        _moe_gemm_prefill_kernel,
        (problem.target.num_sms,),
        tiles,
        BLOCK_M=config.block_m,
        BLOCKS=config.group_m,
        PIECES=pieces,
        CONSUMERS=heuristics.consumers(config),
        **_gemm_constants(problem, config, gemm),
    )


def _gemm_constants(problem: MoEProblem, config: GemmConfig, gemm: _Gemm) -> dict[str, Any]:
    """Arguments common to the decode and the prefill kernel, for a valid config."""
    heuristics.require_valid(config, problem)
    return dict(
        param_first=float(gemm.parameters[0]),
        param_second=float(gemm.parameters[1]),
        low_rows=gemm.low_rows,
        num_outputs=gemm.num_outputs,
        tiles_per_block=-(-gemm.row_units // heuristics.consumers(config)) * config.split_k,
        row_units=gemm.row_units,
        depth_units=gemm.depth_units,
        STAGES=config.num_stages * config.block_k // _STAGE_DEPTH,
        SPLIT=gemm.split,
        KIND=gemm.kind,
        HAS_BIAS=gemm.has_bias,
        WEIGHTED=gemm.weighted,
        num_warps=config.num_warps,
        **PDL_LAUNCH,
    )


class _Layer(TwoStageLayer):
    def stages(
        self,
        problem: MoEProblem,
        config: MoEConfig,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
    ) -> torch.Tensor:
        """Run both stages; they share the tile lists."""
        schedules: Schedules = {}
        h = GATE_UP.run(
            problem,
            config.gate_up,
            x=x,
            weights=weights,
            plan=plan,
            num_rows=plan.max_blocks * plan.routing_block_m,
            schedules=schedules,
        )
        return DOWN.launch(
            problem, config.down, h=h, weights=weights, plan=plan, schedules=schedules
        )


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = _Layer(GATE_UP, DOWN, heuristics)
