"""Host side of the Hopper MoE kernels: row encoding, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...core.kernel import NO_PERSISTENT_GRID
from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import (
    Activation,
    Combine,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    SiLU,
    kernel_parameters,
    leaves_sms,
    resident_programs,
)
from ...device.hopper import rows_descriptor
from ...device.pdl import PDL_LAUNCH
from ...formats.spec import MXFP4
from ...formats.tensor import MXTensor, Operand
from ...formats.weight_tensor import WeightLike
from ...routing.plan import RoutingPlan
from ..combine import combine_slots
from ..inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs, LogitsInputs
from ..layer import TwoStageLayer, quantize_rows, routed
from ..weights import MoEWeights
from . import config as heuristics
from .config import HopperGemmConfig, HopperKernel
from .decode import _moe_gemm_decode_kernel
from .descriptors import (
    FP8_DESCRIPTOR,
    X_DESCRIPTORS,
    decode_weight_descriptors,
    prefill_rows_descriptor,
    prefill_weight_descriptors,
    x_descriptors,
)
from .encode import SortedRows, encode_rows, fits_one_step
from .epilogue import LINEAR
from .few_tokens import few_tokens_layer, memory
from .few_tokens_limits import chooses_experts
from .group_layout import GroupWeights, described, refuse_groups
from .layout import HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8
from .mainloop import UNORDERED
from .prefill import _moe_gemm_prefill_kernel
from .prefill_fp8 import _moe_gemm_prefill_fp8_kernel
from .split_k import sum_k_splits_and_activate, sum_k_splits_and_combine, sum_k_splits_and_encode
from .tile_list import Schedules, tile_schedule

_NUM_WARPS = 4
"""Warps of a warpgroup: of each consumer, and of the producer's partition."""


class _Stage:
    """Base class of both stages: supported problems and choice of tiles."""

    op: Op
    backend = "hopper"

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernel cannot serve `problem`, as a phrase; None if it can."""
        if problem.target.arch != "sm_90":
            return f"needs sm_90, not {problem.target.arch}"
        if not problem.options.activation.is_gated:
            return "multiplies gate and up rows; experts without a gate run on portable kernels"
        if problem.weight_format != MXFP4.name:
            refused = refuse_groups(problem)
            if refused is not None:
                return refused
        elif problem.weight_layout not in (HOPPER_FRAGMENT, HOPPER_FRAGMENT_FP8):
            return (
                "needs weights in HOPPER_FRAGMENT layout: call weights.prepare(device=...), which "
                "keeps ROW_MAJOR where a row spans more than 15 binades"
            )
        if problem.options.out_dtype is torch.float64:
            return "has no float64 output"
        if problem.routing_block_m % min(heuristics.BLOCKS_M):
            return f"needs routing_block_m to be a multiple of {min(heuristics.BLOCKS_M)}"
        return None

    def configs(self, problem: MoEProblem) -> Iterator[HopperGemmConfig]:
        """Every tile whose block_m divides the plan's routing_block_m."""
        return heuristics.stage_configs(problem)

    def heuristic(self, problem: MoEProblem) -> HopperGemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.stage_heuristic(problem)

    def persistent(self, problem: MoEProblem, config: HopperGemmConfig) -> HopperGemmConfig | str:
        """The config itself if its kernel claims tiles one after the other."""
        claims = config.kernel in (HopperKernel.DECODE, *_PREFILL_KERNELS)
        return config if claims else NO_PERSISTENT_GRID


class _GateUp(_Stage):
    """Stage 1: gather and encode rows, gate/up GEMM, bias, activation, requantisation."""

    op = Op.MOE_GATE_UP

    def launch(
        self, problem: MoEProblem, config: HopperGemmConfig, inputs: GateUpInputs
    ) -> Operand:
        """Return the intermediate [P, F] in sorted order; padding rows are undefined."""
        call, num_rows = _Call(problem, config, inputs.plan), inputs.plan.capacity
        h = self._rows(call, inputs.x, inputs.weights, num_rows, sum_k_splits_and_activate)
        return quantize_rows(problem, h)

    def run(
        self,
        problem: MoEProblem,
        config: HopperGemmConfig,
        inputs: GateUpInputs,
        num_rows: int,
        schedules: Schedules | None = None,
        *,
        encoded: bool = True,
    ) -> torch.Tensor | SortedRows:
        """Return `num_rows` rows as input of stage 2.

        These are bfloat16 rows, which stage 2 quantises and encodes, or after split-K, if stage 2
        takes them (`encoded`), e4m3 rows.
        """
        whole = encoded and fits_one_step(problem.intermediate_size)
        encode = functools.partial(sum_k_splits_and_encode, in_order=_in_order(problem))
        finish = encode if whole else sum_k_splits_and_activate
        call = _Call(problem, config, inputs.plan, schedules)
        result: torch.Tensor | SortedRows = self._rows(
            call, inputs.x, inputs.weights, num_rows, finish
        )
        return result

    @staticmethod
    def _rows(
        call: _Call,
        x: torch.Tensor | MXTensor,
        weights: MoEWeights,
        num_rows: int,
        finish: Callable[[torch.Tensor, torch.Tensor | None, RoutingPlan, MoEOptions], Any],
    ) -> Any:
        """Return bfloat16 [num_rows, F], or after split-K what `finish` makes of the sums."""
        plan, options = call.plan, call.problem.options
        features = call.problem.intermediate_size
        h = plan.sorted_weights.new_empty((num_rows, features), dtype=torch.bfloat16)
        if not plan.max_blocks:
            return h
        in_order = _in_order(call.problem)
        rows = encode_rows(
            x,
            plan,
            num_rows,
            options,
            scatter=True,
            in_order=in_order,
            dtype=call.config.rows_dtype,
        )
        if call.config.k_splits > 1:
            parts = call.multiply_k_splits(rows, weights.gate_up_proj, num_rows, 2 * features)
            return finish(parts, weights.gate_up_bias, plan, options)
        epilogue = _Epilogue(options.activation, options.apply_router_weight_on_input)
        call.multiply(h, rows, weights.gate_up_proj, weights.gate_up_bias, epilogue)
        return h


def _reference(weight: WeightLike) -> torch.Tensor:
    """Reference exponents or factors of the rows; without any, bytes that the kernel ignores."""
    reference = weight.reference if isinstance(weight, MXTensor) else weight.row_scale
    return weight.qdata if reference is None else reference


_PREFILL_KERNELS = HopperKernel.PREFILL, HopperKernel.PREFILL_FP8


def _codes(weight: WeightLike, config: HopperGemmConfig) -> dict[str, torch.Tensor]:
    """What a kernel reads of the weights, beside the references of their rows."""
    if config.kernel is not HopperKernel.PREFILL_FP8:
        return dict(code_desc=weight.qdata, shift_desc=weight.scale)
    assert isinstance(weight, MXTensor)  # for the type checker: MXFP4
    assert weight.fp8_codes is not None  # for the type checker: `require_valid` asks for a copy
    return dict(weight_desc=weight.fp8_codes.view(torch.float8_e4m3fn))


def _in_order(problem: MoEProblem) -> bool:
    """Whether rows keep the order of K: MXFP4 weights have another."""
    return problem.weight_format != MXFP4.name


class _Down(_Stage):
    """Stage 2: encode rows, down GEMM, bias, routing weight, combine."""

    op = Op.MOE_DOWN
    mode = staticmethod(heuristics.mode_of)

    def launch(
        self, problem: MoEProblem, config: HopperGemmConfig, inputs: DownInputs
    ) -> torch.Tensor:
        """Return [T, H] (`out`, if given), or with FLAT [P, H] whose padding rows are undefined."""
        return self.run(problem, config, inputs.h, inputs.weights, inputs.plan, inputs.out)

    def run(
        self,
        problem: MoEProblem,
        config: HopperGemmConfig,
        h: Operand | SortedRows,
        weights: MoEWeights,
        plan: RoutingPlan,
        out: torch.Tensor | None,
        schedules: Schedules | None = None,
    ) -> torch.Tensor:
        """As `launch`; schedules: tile lists of the layer if its stage 1 computed h."""
        options, width = problem.options, problem.hidden_size
        flat = options.combine is Combine.FLAT
        num_rows = plan.capacity if flat else plan.max_blocks * plan.routing_block_m
        if plan.num_tokens == 0:
            size = (num_rows if flat else 0, width)
            return torch.empty(size, device=weights.device, dtype=options.out_dtype)
        if isinstance(h, SortedRows):
            rows = h
        else:
            in_layer = schedules is not None
            rows = encode_rows(
                h,
                plan,
                num_rows,
                options,
                scatter=False,
                release_first=in_layer,
                in_order=_in_order(problem),
                dtype=config.rows_dtype,
            )
        if config.k_splits > 1:
            call = _Call(problem, config, plan, schedules)
            parts = call.multiply_k_splits(rows, weights.down_proj, num_rows, width)
            return sum_k_splits_and_combine(parts, weights.down_bias, plan, options, out)
        values = rows.scale.new_empty((num_rows, width), dtype=options.out_dtype)
        call = _Call(problem, config, plan, schedules)
        epilogue = _Epilogue(weighted=not options.apply_router_weight_on_input)
        call.multiply(values, rows, weights.down_proj, weights.down_bias, epilogue)
        if flat:
            return values
        return combine_slots(values, plan.slot_rows, problem.target, plan_before_wait=True, out=out)


class _Epilogue(NamedTuple):
    """What follows a GEMM: an activation or, without one, LINEAR; and the routing weight."""

    activation: Activation | None = None
    weighted: bool = False

    @property
    def kind(self) -> str:
        return LINEAR if self.activation is None else self.activation.name


class _Gemm(NamedTuple):
    """Sizes and flags that a GEMM's launch needs beside problem and config."""

    num_rows: int
    num_outputs: int
    row_units: int
    depth_units: int
    routing_block_m: int
    low_rows: int
    has_bias: bool
    epilogue: _Epilogue
    weights: GroupWeights | None
    scale_dtype: torch.dtype


class _Call(NamedTuple):
    """One call of a stage. `schedules` caches the tile lists that both stages of a layer share."""

    problem: MoEProblem
    config: HopperGemmConfig
    plan: RoutingPlan
    schedules: Schedules | None = None

    def multiply_k_splits(
        self, rows: SortedRows, weight: WeightLike, num_rows: int, width: int
    ) -> torch.Tensor:
        """Return the partial sums of a GEMM, float32 [k_splits, num_rows, width]."""
        parts = rows.scale.new_empty((self.config.k_splits, num_rows, width))
        self.multiply(parts, rows, weight, None, _Epilogue())
        return parts

    def multiply(
        self,
        out: torch.Tensor,
        rows: SortedRows,
        weight: WeightLike,
        bias: torch.Tensor | None,
        epilogue: _Epilogue,
    ) -> None:
        """Run one GEMM with its epilogue over the plan's blocks.

        `out` is [P, F or H], or with split-K [k_splits, P, 2F or H].
        """
        problem, config, plan, _ = self
        _, row_units, depth_units, _ = weight.qdata.shape
        gemm = _Gemm(
            out.shape[-2],
            out.shape[-1],
            row_units,
            depth_units,
            plan.routing_block_m,
            rows.scale.shape[0],
            bias is not None,
            epilogue,
            described(weight),
            weight.scale.dtype,
        )
        tensors = dict(
            reference=_reference(weight),
            bias=rows.scale if bias is None else bias,
            x_scale=rows.scale,
            routed_weights=plan.sorted_weights,
            tile_counter=rows.tile_counter,
        )
        if config.kernel in _PREFILL_KERNELS:
            launch = _prefill_launch(problem, config, gemm, out.dtype)
            sizes = config.block_m, config.blocks_per_tile
            even = config.kernel is HopperKernel.PREFILL_FP8
            schedule = tile_schedule(plan, *sizes, self.schedules, even=even)
            launch(
                out_desc=out,
                **_codes(weight, config),
                x_desc=rows.codes,
                tile_first_block=schedule.first_block,
                tile_blocks=schedule.blocks,
                tile_expert=schedule.expert,
                num_runs=schedule.count,
                **tensors,
            )
        else:
            _decode_launch(problem, config, gemm)(
                out=out,
                **dict.fromkeys(x_descriptors(config.block_m), rows.codes),
                sorted_token_ids=plan.sorted_token_ids,
                block_expert_ids=plan.block_expert_ids,
                num_valid=plan.num_valid,
                **_codes(weight, config),
                **tensors,
            )


@functools.lru_cache(CACHED_LAUNCHES)
def _decode_launch(problem: MoEProblem, config: HopperGemmConfig, gemm: _Gemm) -> Launch:
    tiles = {
        **decode_weight_descriptors(gemm.weights, gemm.scale_dtype),
        **x_descriptors(config.block_m),
    }
    unused = {name: None for name in X_DESCRIPTORS.values() if name not in tiles}
    constants = _gemm_constants(problem, config, gemm)
    early_stages = config.num_stages  # stage 2 starts while the last tiles of stage 1 still run
    if gemm.epilogue.kind != LINEAR:
        early_stages = heuristics.early_stages(config, problem, constants["tiles_per_block"])
    return Launch(
        _moe_gemm_decode_kernel,
        (resident_programs(problem, heuristics.DECODE_CTAS_PER_SM),),
        tiles,
        num_tokens=problem.num_tokens,
        k_splits=config.k_splits,
        blocks_per_unit=gemm.routing_block_m // config.block_m,
        num_rows=gemm.num_rows,
        early_stages=early_stages,
        BLOCK_M=config.block_m,
        maxnreg=heuristics.DECODE_REGISTERS,
        WORKER_REGISTERS=heuristics.DECODE_WORKER_REGISTERS,
        **unused,
        **constants,
        **_of_other_formats(config, gemm),
    )


@functools.lru_cache(CACHED_LAUNCHES)
def _prefill_launch(
    problem: MoEProblem, config: HopperGemmConfig, gemm: _Gemm, out_dtype: torch.dtype
) -> Launch:
    constants = _gemm_constants(problem, config, gemm)
    outputs = 64 if gemm.epilogue.kind == LINEAR else 32  # columns of a consumer's 64 weight rows
    buffers, rows = heuristics.output_buffers(
        config, outputs * out_dtype.itemsize, problem.weight_format
    )
    tiles = {
        "x_desc": prefill_rows_descriptor(config),
        "out_desc": rows_descriptor(rows, outputs, out_dtype),
    }
    constants |= dict(
        BLOCK_M=config.block_m,
        BLOCKS=config.blocks_per_tile,
        STAGING_BUFFERS=buffers,
        CONSUMERS=config.consumers,
    )
    grid = (resident_programs(problem),)
    if config.kernel is HopperKernel.PREFILL_FP8:
        tiles["weight_desc"] = FP8_DESCRIPTOR
        skew = config.num_stages // 2 // (config.consumers - 1)  # half of them stay prefetched
        constants |= dict(ORDER=UNORDERED.value, SKEW=skew)
        return Launch(_moe_gemm_prefill_fp8_kernel, grid, tiles, **constants)
    constants |= _of_other_formats(config, gemm)
    tiles |= prefill_weight_descriptors(config, gemm.weights, gemm.scale_dtype)
    return Launch(_moe_gemm_prefill_kernel, grid, tiles, **constants)


def _of_other_formats(config: HopperGemmConfig, gemm: _Gemm) -> dict[str, Any]:
    """Arguments of kernels that decode weights, and take rows of 16 bits."""
    return dict(low_rows=gemm.low_rows, HI_LO=config.hi_lo, WEIGHTS=gemm.weights)


def _gemm_constants(problem: MoEProblem, config: HopperGemmConfig, gemm: _Gemm) -> dict[str, Any]:
    """Check the config; return the arguments common to the kernels of a GEMM."""
    heuristics.require_valid(config, problem)
    epilogue = gemm.epilogue
    return dict(
        **kernel_parameters(epilogue.activation or SiLU()),
        num_outputs=gemm.num_outputs,
        tiles_per_block=-(-gemm.row_units // config.consumers) * config.k_splits,
        row_units=gemm.row_units,
        depth_units=gemm.depth_units,
        STAGES=config.num_stages,
        EPILOGUE=epilogue.kind,
        HAS_BIAS=gemm.has_bias,
        WEIGHTED=epilogue.weighted,
        num_warps=_NUM_WARPS,
        # A GEMM that starts early would wait on SMs that the previous one leaves to other work.
        **({} if leaves_sms(problem) else PDL_LAUNCH),
    )


class _FusedMoE(TwoStageLayer):
    """FUSED_MOE: the stages of a layer share its tile lists."""

    mode = staticmethod(heuristics.mode_of)

    @property
    def resident(self) -> list[torch.Tensor]:
        """Memory that launches keep between calls."""
        return memory.tensors

    def launch(self, problem: MoEProblem, config: MoEConfig, inputs: LayerInputs) -> torch.Tensor:
        """As `TwoStageLayer.launch`. One launch cannot wait for tokens of other ranks."""
        first = config.gate_up
        if isinstance(first, HopperGemmConfig) and first.kernel is HopperKernel.FEW_TOKENS:
            stages = heuristics.require_few_tokens(config, problem)
            if isinstance(inputs, LogitsInputs) and not chooses_experts(problem, inputs):
                inputs = routed(problem, inputs)
            waits = isinstance(inputs, FusedMoEInputs) and inputs.arrivals is not None
            if inputs.num_local_tokens is None and not waits:
                out = few_tokens_layer(problem, stages, inputs)
                if out is not None:
                    return out
            config = heuristics.two_stage_heuristic(problem)
        return super().launch(problem, config, inputs)

    def stages(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs, plan: RoutingPlan
    ) -> torch.Tensor:
        """Run both stages with a given plan; return [T, H], or `out`, which stage 2 writes."""
        first, second = config.gate_up, config.down
        assert isinstance(first, HopperGemmConfig)  # for the type checker: checked by dispatch
        assert isinstance(second, HopperGemmConfig)  # for the type checker: checked by dispatch
        weights, num_rows = inputs.weights, plan.max_blocks * plan.routing_block_m
        schedules: Schedules = {}  # a cache of tile lists, which the stages fill
        tokens = GateUpInputs(inputs.x, weights, plan)
        encoded = second.rows_dtype is torch.float8_e4m3fn
        h = GATE_UP.run(problem, first, tokens, num_rows, schedules, encoded=encoded)
        return DOWN.run(problem, second, h, weights, plan, inputs.out, schedules)


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = _FusedMoE(GATE_UP, DOWN, heuristics)
