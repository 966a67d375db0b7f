"""Host side of the gfx950 MoE kernels: allocation, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ....formats.layouts import UNIT_ROWS
from ....formats.spec import MX_BLOCK_SIZE
from ....formats.tensor import MXTensor
from ....formats.token import FP8_TOKEN
from ....problem import (
    Cdna4GemmConfig,
    Cdna4Kernel,
    Combine,
    MoEOptions,
    MoEProblem,
    Op,
    activation_mx_format,
)
from ....routing import RoutingPlan
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ....weights import MoEWeights
from ...common.combine import combine_slots
from ...common.moe_layer import TwoStageLayer, quantize_rows
from ...common.mx_codec import scale_rule_constants
from ...common.token_rows import CodedRows, quantize_tokens
from ..lib.gcn import WITHOUT_ACCUMULATOR_REGISTERS
from . import config as heuristics
from .decode import _moe_gemm_decode_cdna4_kernel
from .finish import _moe_down_finish_cdna4_kernel, _moe_gate_up_finish_cdna4_kernel
from .prefill import _moe_gemm_prefill_cdna4_kernel
from .prefill_scales import arrange_scales

_XCDS = 8
"""Dies of the chip: a grid is a multiple of them, so that all get as many workgroups."""

_FINISH_BLOCK_M, _FINISH_BLOCK_N, _FINISH_NUM_WARPS = 16, 128, 4
_CHUNK_BYTES = 16

Rows = torch.Tensor | MXTensor | CodedRows


class Gemm(NamedTuple):
    """What a GEMM's launch needs beside problem and config.

    Args:
        op: the stage.
        row_blocks: largest number of row blocks in use.
        routing_block_m: rows of a block of the plan.
        x_format: "bf16", or the element format of the activations.
        x_row_chunks: distance of activation rows in 16-byte chunks.
        x_scale_stride: distance of their scales' rows, in words if they are words.
        row_units, depth_units: units of the weights, 64 rows and 128 elements of depth.
    """

    op: Op
    row_blocks: int
    routing_block_m: int
    x_format: str
    x_row_chunks: int
    x_scale_stride: int
    row_units: int
    depth_units: int


class _Stage:
    """Base class of both stages: supported problems and choice of tiles."""

    op: Op
    backend = "cdna4"
    stage_config = Cdna4GemmConfig

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernels cannot serve `problem`, as a phrase; None if they can."""
        return heuristics.unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[Cdna4GemmConfig]:
        """Valid configs whose block_m divides the plan's routing_block_m, the heuristic's first."""
        return heuristics.stage_configs(problem)

    def heuristic(self, problem: MoEProblem) -> Cdna4GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.stage_heuristic(problem)

    def multiply(
        self,
        problem: MoEProblem,
        config: Cdna4GemmConfig,
        plan: RoutingPlan,
        rows: torch.Tensor | MXTensor,
        weight: MXTensor,
        outputs: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Start the GEMM and, after split-K, the kernel that sums its parts.

        outputs: tensors of the epilogue, which both kernels get.
        """
        heuristics.require_valid(config, problem)
        row_blocks = plan.max_blocks * (plan.routing_block_m // config.block_m)
        if not row_blocks:
            return
        x, x_scale, row_scale, x_format = _operand(_gemm_rows(problem, rows))
        if config.kernel is Cdna4Kernel.DECODE and x_scale is not None:
            x_scale = _scale_words(x_scale)
        gemm = Gemm(
            self.op,
            row_blocks,
            plan.routing_block_m,
            x_format,
            x.stride(0) * x.element_size() // _CHUNK_BYTES,
            0 if x_scale is None else x_scale.stride(0),
            *weight.qdata.shape[1:3],
        )
        launch, finish = _LAUNCHES[config.kernel](problem, config, gemm)
        w_scale = weight.scale.view(torch.uint32)
        if config.kernel is Cdna4Kernel.PREFILL:
            blocks = row_blocks * (config.block_m // UNIT_ROWS)
            gather, depth = self.op is Op.MOE_GATE_UP, heuristics.depth(problem, self.op)
            wide = x_format == "e2m1"
            x_scale = arrange_scales(x_scale, plan, depth, blocks, gather=gather, wide=wide)
            w_scale = weight.scale
        of_plan = {
            "sorted_token_ids_ptr": plan.sorted_token_ids,
            "block_expert_ids_ptr": plan.block_expert_ids,
            "num_valid_ptr": plan.num_valid,
        }
        partial = None
        if finish is not None:
            width = heuristics.weight_rows(problem, self.op)
            shape = (config.k_splits, row_blocks * config.block_m, width)
            partial = weight.qdata.new_empty(shape, dtype=torch.float32)
        launch(
            partial_ptr=partial,
            x_ptr=x,
            x_scale_ptr=x_scale,
            x_row_scale_ptr=row_scale,
            w_ptr=weight.qdata.view(torch.uint32) if x_format == "bf16" else weight.qdata,
            w_scale_ptr=w_scale,
            **outputs,
            **of_plan,
        )
        if finish is not None:
            used = (name for name in outputs if name in finish.kernel.arg_names)
            finish(partial_ptr=partial, **{name: outputs[name] for name in used}, **of_plan)


def _gemm_rows(problem: MoEProblem, rows: torch.Tensor | MXTensor) -> Rows:
    """Convert `rows` to the layer's activation format, if they are not in it."""
    if problem.options.activation_format == FP8_TOKEN and isinstance(rows, torch.Tensor):
        return quantize_tokens(rows)
    return quantize_rows(problem, rows)


def _operand(rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, str]:
    """Codes (or bf16 values), block scales, row scales, and the name of the element format."""
    if isinstance(rows, MXTensor):
        return _aligned(rows.qdata), rows.scale, None, rows.format.element.name
    if isinstance(rows, CodedRows):
        return _aligned(rows.qdata), None, rows.scale, "e4m3"
    return _aligned(rows), None, None, "bf16"


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, or a copy if a row does not start at a multiple of 16 bytes."""
    whole = rows.stride(0) * rows.element_size() % _CHUNK_BYTES == 0 and rows.stride(1) == 1
    if whole and rows.data_ptr() % _CHUNK_BYTES == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _scale_words(scale: torch.Tensor) -> torch.Tensor:
    """Scales [T, K / 32] as uint32 [T, ceil(K / 128)]; zeros past K.

    They are copied, padded, if K is no multiple of 128 or a row does not start at a multiple of 4
    bytes.
    """
    whole = scale.shape[1] % 4 == 0 and scale.stride(0) % 4 == 0 and scale.stride(1) == 1
    if not whole or scale.data_ptr() % 4:
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return scale.view(torch.uint32)


@functools.lru_cache(CACHED_LAUNCHES)
def _decode_launches(
    problem: MoEProblem, config: Cdna4GemmConfig, gemm: Gemm
) -> tuple[Launch, Launch | None]:
    """Launches of the decode kernel and, with split-K, of the kernel that finishes it."""
    waves = config.num_warps // config.k_slices
    tiles = -(-gemm.row_units // waves) * gemm.row_blocks * config.k_splits
    per_split = -(-gemm.depth_units // config.k_splits)
    both = dict(
        num_tokens=problem.num_tokens,
        num_experts=problem.num_experts,
        routing_block_m=gemm.routing_block_m,
        k_splits=config.k_splits,
        partial_rows=gemm.row_blocks * config.block_m,
        **_epilogue(problem, gemm),
    )
    launch = Launch(
        _moe_gemm_decode_cdna4_kernel,
        (-(-tiles // _XCDS) * _XCDS,),
        num_k_blocks=heuristics.depth(problem, gemm.op) // MX_BLOCK_SIZE,
        row_units=gemm.row_units,
        depth_units=gemm.depth_units,
        units_per_split=-(-per_split // config.k_slices) * config.k_slices,
        x_row_chunks=gemm.x_row_chunks,
        x_scale_stride=gemm.x_scale_stride,
        X_FORMAT=gemm.x_format,
        GATHER=gemm.op is Op.MOE_GATE_UP,
        ROWS=config.block_m,
        SLICES=config.k_slices,
        WAVES=waves,
        DEPTH=config.num_stages,
        ITERATIONS=heuristics.iterations_per_copy(config, problem.options.activation_format),
        STREAM=heuristics.rows_per_expert(problem) <= config.block_m,
        num_warps=config.num_warps,
        **both,
    )
    return launch, _finish_launch(both, gemm) if config.k_splits > 1 else None


@functools.lru_cache(CACHED_LAUNCHES)
def _prefill_launches(
    problem: MoEProblem, config: Cdna4GemmConfig, gemm: Gemm
) -> tuple[Launch, Launch | None]:
    """Launch of the prefill kernel."""
    launch = Launch(
        _moe_gemm_prefill_cdna4_kernel,
        (-(-gemm.row_units * UNIT_ROWS // config.block_n) * gemm.row_blocks,),
        num_tokens=problem.num_tokens,
        num_experts=problem.num_experts,
        num_k_blocks=heuristics.depth(problem, gemm.op) // MX_BLOCK_SIZE,
        row_units=gemm.row_units,
        depth_units=gemm.depth_units,
        routing_block_m=gemm.routing_block_m,
        x_row_chunks=gemm.x_row_chunks,
        X_FORMAT=gemm.x_format,
        BLOCK_M=config.block_m,
        GROUP_M=heuristics.PREFILL_GROUP_M,
        num_warps=config.num_warps,
        **WITHOUT_ACCUMULATOR_REGISTERS,
        **_epilogue(problem, gemm),
    )
    return launch, None


def _finish_launch(both: dict[str, Any], gemm: Gemm) -> Launch:
    """Launch of the kernel that sums the splits. both: the GEMM's arguments that it shares."""
    gate_up = gemm.op is Op.MOE_GATE_UP
    kernel = _moe_gate_up_finish_cdna4_kernel if gate_up else _moe_down_finish_cdna4_kernel
    tiles_m = both["partial_rows"] // _FINISH_BLOCK_M
    tiles_n = -(-both["num_n_blocks"] * MX_BLOCK_SIZE // _FINISH_BLOCK_N)
    return Launch(
        kernel,
        (tiles_m * tiles_n,),
        BLOCK_M=_FINISH_BLOCK_M,
        BLOCK_N=_FINISH_BLOCK_N,
        num_warps=_FINISH_NUM_WARPS,
        **{name: value for name, value in both.items() if name in kernel.arg_names},
    )


def _epilogue(problem: MoEProblem, gemm: Gemm) -> dict[str, Any]:
    """Arguments of a stage's epilogue."""
    options, width = problem.options, problem.hidden_size
    constants: dict[str, Any] = {"EMAX": 0, "THRESHOLD": 0, "INF_BYTE": 0}
    p0, p1, name, out_format = 0.0, 0.0, "", "bf16"
    if gemm.op is Op.MOE_GATE_UP:
        (p0, p1), name = options.activation.parameters, options.activation.name
        width = problem.intermediate_size
        format = activation_mx_format(options.activation_format, gemm.op.value)
        if format is not None:
            out_format = format.element.name
            constants = scale_rule_constants(format, options.scale_rule)
    return dict(
        num_n_blocks=width // MX_BLOCK_SIZE,
        p0=float(p0),
        p1=float(p1),
        ACTIVATION=name,
        OUT_FORMAT=out_format,
        ATOMIC=gemm.op is Op.MOE_DOWN and options.combine is Combine.ATOMIC,
        **constants,
    )


_Launches = Callable[[MoEProblem, Cdna4GemmConfig, Gemm], tuple[Launch, Launch | None]]
_LAUNCHES: Mapping[Cdna4Kernel, _Launches] = {
    Cdna4Kernel.DECODE: _decode_launches,
    Cdna4Kernel.PREFILL: _prefill_launches,
}
"""The launches of each kernel of `Cdna4Kernel`: the GEMM, and what finishes it, if anything."""


class _GateUp(_Stage):
    """Stage 1: gather, gate/up GEMM, bias, activation, requantisation."""

    op = Op.MOE_GATE_UP

    def launch(
        self,
        problem: MoEProblem,
        config: Cdna4GemmConfig,
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
        config: Cdna4GemmConfig,
        *,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        num_rows: int,
    ) -> torch.Tensor | MXTensor:
        """As `launch`, but allocate `num_rows` rows."""
        h = _allocate(problem.options, num_rows, weights)
        weighted = problem.options.apply_router_weight_on_input
        outputs = {
            "out_ptr": h.qdata if isinstance(h, MXTensor) else h,
            "out_scale_ptr": h.scale if isinstance(h, MXTensor) else None,
            "bias_ptr": weights.gate_up_bias,
            "sorted_weights_ptr": plan.sorted_weights if weighted else None,
        }
        self.multiply(problem, config, plan, x, weights.gate_up_proj, outputs)
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
        config: Cdna4GemmConfig,
        *,
        h: torch.Tensor | MXTensor,
        weights: MoEWeights,
        plan: RoutingPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, H] (`out`, if given), or with FLAT [P, H] whose padding is uninitialised."""
        options, combine = problem.options, problem.options.combine
        num_rows, dtype = plan.max_blocks * plan.routing_block_m, options.out_dtype
        if combine is Combine.FLAT:
            num_rows = plan.capacity
        elif combine is Combine.ATOMIC:
            num_rows, dtype = plan.num_tokens, torch.float32
        values = weights.down_proj.qdata.new_empty((num_rows, problem.hidden_size), dtype=dtype)
        if combine is Combine.ATOMIC:
            values.zero_()
        weighted = not options.apply_router_weight_on_input
        outputs = {
            "out_ptr": values,
            "out_scale_ptr": None,
            "bias_ptr": weights.down_bias,
            "sorted_weights_ptr": plan.sorted_weights if weighted else None,
        }
        self.multiply(problem, config, plan, h, weights.down_proj, outputs)
        if combine is not Combine.REDUCE:
            return values.to(options.out_dtype) if out is None else out.copy_(values)
        if plan.num_tokens == 0:
            return values.new_empty((0, problem.hidden_size))
        return combine_slots(values, plan.slot_rows, problem.target, out=out)


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = TwoStageLayer(GATE_UP, DOWN, heuristics)
