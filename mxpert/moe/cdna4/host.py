"""Host side of the gfx950 MoE kernels: allocation, grid sizes, launches; no synchronisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from ...core.kernel import NO_PERSISTENT_GRID
from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import Combine, MoEConfig, MoEProblem, Op, WeightCache, resident_programs
from ...device.cdna4 import NUM_XCDS, WITHOUT_ACCUMULATOR_REGISTERS
from ...errors import UnsupportedError, message
from ...formats.layouts import UNIT_ROWS
from ...formats.spec import MX_BLOCK_SIZE, get_format
from ...formats.tensor import MXTensor
from ...routing.plan import RoutingPlan
from ..finish import _moe_down_finish_kernel, _moe_gate_up_finish_kernel
from ..inputs import DownInputs, FusedMoEInputs, GateUpInputs, LayerInputs
from ..layer import (
    DownStage,
    GateUpStage,
    Rows,
    Stage,
    TwoStageLayer,
    gate_up_epilogue_arguments,
    gemm_rows,
    routed,
)
from ..token_rows import CodedRows
from ..weights import MoEWeights
from . import config as heuristics
from .config import Cdna4GemmConfig, Cdna4Kernel
from .decode import _moe_gemm_decode_cdna4_kernel
from .prefill import _moe_gemm_prefill_cdna4_kernel
from .prefill_scales import arrange_scales, empty_arranged

_FINISH_BLOCK_M, _FINISH_BLOCK_N, _FINISH_NUM_WARPS = 16, 128, 4
_GATE_UP_GROUP = 16
"""Gates between runs of ups in the weights and in partial sums: `GateUpOrder.INTERLEAVED_16`."""
_CHUNK_BYTES = 16


class Gemm(NamedTuple):
    """Arguments of a GEMM's launch beside problem and config.

    Args:
        op: the stage.
        row_blocks: largest number of row blocks in use.
        routing_block_m: rows of a block of the plan.
        x_format: "bf16", or the element format of the activations.
        x_row_chunks: distance of activation rows in 16-byte chunks.
        x_scale_stride: distance of their scales' rows in words; in bytes if they begin anywhere.
        row_units, depth_units: units of the weights, 64 rows and 128 elements of depth.
        arranged: stage 1 stores scales in the order of the prefill kernel of stage 2.
        aligned: whether the rows of x_scale begin at words; asked by the decode kernel.
    """

    op: Op
    row_blocks: int
    routing_block_m: int
    x_format: str
    x_row_chunks: int
    x_scale_stride: int
    row_units: int
    depth_units: int
    arranged: bool = False
    aligned: bool = True


class _Stage(Stage[Cdna4GemmConfig]):
    """Base of both stages: supported problems, choice of tiles, the GEMM."""

    backend = "cdna4"

    def unsupported(self, problem: MoEProblem) -> str | None:
        """Why the kernels cannot serve `problem`, as a phrase; None if they can."""
        return heuristics.unsupported(problem)

    def configs(self, problem: MoEProblem) -> Iterator[Cdna4GemmConfig]:
        """Valid configs whose block_m divides the plan's routing_block_m, the heuristic's first."""
        return heuristics.stage_configs(problem)

    def heuristic(self, problem: MoEProblem) -> Cdna4GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristics.stage_heuristic(problem)

    def persistent(self, problem: MoEProblem, config: Cdna4GemmConfig) -> Cdna4GemmConfig | str:
        """The config with a persistent grid, which the prefill kernel of MX activations has."""
        if config.kernel is Cdna4Kernel.DECODE:
            return f"{NO_PERSISTENT_GRID}, or pass tokens enough for the prefill kernel"
        if problem.options.activation_format == "bf16":
            return f"{NO_PERSISTENT_GRID}, or pass activation_format='mxfp8'"
        return replace(config, persistent=True)

    def multiply(
        self,
        problem: MoEProblem,
        config: Cdna4GemmConfig,
        plan: RoutingPlan,
        rows: torch.Tensor | MXTensor,
        weights: MoEWeights,
        epilogue: dict[str, torch.Tensor | None],
    ) -> None:
        """Start the GEMM and, after split-K, the kernel that sums its parts.

        Scales of three dimensions, of `rows` and to store, are in the order of `arrange_scales`.
        """
        heuristics.require_valid(config, problem)
        row_blocks = plan.max_blocks * (plan.routing_block_m // config.block_m)
        if not row_blocks:
            return
        weight = self.weight(weights)
        x, x_scale, row_scale, x_format = _operand(gemm_rows(problem, rows))
        x_scale_stride = 0 if x_scale is None else x_scale.stride(0)
        if config.kernel is Cdna4Kernel.DECODE and x_scale is not None:
            x_scale, x_scale_stride = _scale_words(x_scale)
        out_scale = epilogue.get("out_scale_ptr")
        gemm = Gemm(
            self.op,
            row_blocks,
            plan.routing_block_m,
            x_format,
            x.stride(0) * x.element_size() // _CHUNK_BYTES,
            x_scale_stride,
            *weight.qdata.shape[1:3],
            arranged=_is_arranged(out_scale),
            aligned=x_scale is None or x_scale.dim() > 1,
        )
        launch, finish = _LAUNCHES[config.kernel](problem, config, gemm)
        w_scale = weight.scale.view(torch.uint32)
        w = weight.qdata
        if config.kernel is Cdna4Kernel.PREFILL:
            w_scale, x = weight.scale, x.view(torch.uint8)
            if x_format != "bf16" and not _is_arranged(x_scale):
                blocks = row_blocks * (config.block_m // UNIT_ROWS)
                gather, depth = self.op is Op.MOE_GATE_UP, heuristics.depth(problem, self.op)
                wide = x_format == "e2m1"
                x_scale = arrange_scales(x_scale, plan, depth, blocks, gather=gather, wide=wide)
        elif x_format == "bf16":
            w = w.view(torch.uint32)
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
            w_ptr=w,
            w_scale_ptr=w_scale,
            **{"out_scale_ptr": None, **epilogue},
        )
        if finish is not None:
            finish(partial_ptr=partial, **epilogue)


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


def _is_arranged(scale: torch.Tensor | None) -> bool:
    """Whether scales have the order of `arrange_scales`, not a row for each row of codes."""
    return scale is not None and scale.dim() == 3


def _scale_words(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales [T, K / 32] as uint32 words, and the distance of their rows.

    Words [T, K / 128], that many words apart, if rows begin at words. Otherwise all words of the
    dense matrix, [T * K / 128], and the distance in bytes. Scales that have neither form, those of
    an odd number of tokens for example, are copied with zeros past K.
    """
    starts_at_word = scale.data_ptr() % 4 == 0 and scale.stride(1) == 1
    whole = scale.shape[1] % 4 == 0 and scale.stride(0) % 4 == 0
    if not (starts_at_word and whole):
        if starts_at_word and scale.is_contiguous() and scale.numel() % 4 == 0:
            return scale.view(-1).view(torch.uint32), scale.stride(0)
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    words = scale.view(torch.uint32)
    return words, words.stride(0)


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
        (-(-tiles // NUM_XCDS.value) * NUM_XCDS.value,),
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
        STREAM=config.weight_cache is WeightCache.STREAM,
        ALIGNED=gemm.aligned,
        W_FORMAT=get_format(problem.weight_format).element.name,
        num_warps=config.num_warps,
        **both,
    )
    return launch, _finish_launch(both, gemm) if config.k_splits > 1 else None


@functools.lru_cache(CACHED_LAUNCHES)
def _prefill_launches(
    problem: MoEProblem, config: Cdna4GemmConfig, gemm: Gemm
) -> tuple[Launch, Launch | None]:
    """Launch of the prefill kernel."""
    tiles = -(-gemm.row_units * UNIT_ROWS // config.block_n) * gemm.row_blocks
    per_cu = heuristics.resident_workgroups(config, gemm.x_format)
    resident = resident_programs(problem, per_cu)
    launch = Launch(
        _moe_gemm_prefill_cdna4_kernel,
        (min(tiles, resident) if config.persistent else tiles,),
        num_tokens=problem.num_tokens,
        num_experts=problem.num_experts,
        num_k_blocks=heuristics.depth(problem, gemm.op) // MX_BLOCK_SIZE,
        row_units=gemm.row_units,
        depth_units=gemm.depth_units,
        routing_block_m=gemm.routing_block_m,
        x_row_chunks=gemm.x_row_chunks,
        X_FORMAT=gemm.x_format,
        BLOCK_M=config.block_m,
        GROUP_M=config.group_m,
        NUM_RUNS=config.num_runs,
        PERSISTENT=config.persistent,
        STREAM=config.weight_cache is WeightCache.STREAM,
        ARRANGED=gemm.arranged,
        W_FORMAT=get_format(problem.weight_format).element.name,
        num_warps=config.num_warps,
        **WITHOUT_ACCUMULATOR_REGISTERS,
        **_epilogue(problem, gemm),
    )
    return launch, None


def _finish_launch(both: dict[str, Any], gemm: Gemm) -> Launch:
    """Launch of the kernel that sums the splits. both: the GEMM's arguments that it shares."""
    gate_up = gemm.op is Op.MOE_GATE_UP
    kernel = _moe_gate_up_finish_kernel if gate_up else _moe_down_finish_kernel
    order = dict(gate_up_group=_GATE_UP_GROUP, GATE_UP_GROUP=_GATE_UP_GROUP) if gate_up else {}
    tiles_m = both["partial_rows"] // _FINISH_BLOCK_M
    tiles_n = -(-both["num_n_blocks"] * MX_BLOCK_SIZE // _FINISH_BLOCK_N)
    return Launch(
        kernel,
        (tiles_m * tiles_n,),
        split_k=both["k_splits"],
        BLOCK_M=_FINISH_BLOCK_M,
        BLOCK_N=_FINISH_BLOCK_N,
        num_warps=_FINISH_NUM_WARPS,
        **order,
        **{name: value for name, value in both.items() if name in kernel.arg_names},
    )


def _epilogue(problem: MoEProblem, gemm: Gemm) -> dict[str, Any]:
    """Arguments of a stage's epilogue."""
    options, gate_up = problem.options, gemm.op is Op.MOE_GATE_UP
    width = problem.intermediate_size if gate_up else problem.hidden_size
    return dict(
        num_n_blocks=width // MX_BLOCK_SIZE,
        ATOMIC=not gate_up and options.combine is Combine.ATOMIC,
        **(gate_up_epilogue_arguments(options) if gate_up else _NO_ACTIVATION),
    )


_NO_ACTIVATION = dict(
    p0=0.0, p1=0.0, p2=None, ACTIVATION="", OUT_FORMAT="bf16", EMAX=0, THRESHOLD=0
)

_Launches = Callable[[MoEProblem, Cdna4GemmConfig, Gemm], tuple[Launch, Launch | None]]
_LAUNCHES: Mapping[Cdna4Kernel, _Launches] = {
    Cdna4Kernel.DECODE: _decode_launches,
    Cdna4Kernel.PREFILL: _prefill_launches,
}
"""The launches of each kernel of `Cdna4Kernel`: the GEMM, and what finishes it, if anything."""


class _GateUp(GateUpStage[Cdna4GemmConfig], _Stage):
    """Stage 1."""


class _Down(DownStage[Cdna4GemmConfig], _Stage):
    """Stage 2."""


class _Layer(TwoStageLayer):
    """Both stages; tokens that offsets do not reach at once are computed in parts.

    Two prefill kernels hand scales over as the second one reads them.
    """

    def launch(self, problem: MoEProblem, config: MoEConfig, inputs: LayerInputs) -> torch.Tensor:
        """See `TwoStageLayer.launch`."""
        most, total = heuristics.most_tokens(problem), problem.num_tokens
        if total <= most:
            return super().launch(problem, config, inputs)
        given, out = routed(problem, inputs), inputs.out
        if out is None:
            shape, device = (total, problem.hidden_size), inputs.weights.device
            out = torch.empty(shape, dtype=problem.options.out_dtype, device=device)
        size = -(-total // -(-total // most))
        for first in range(0, total, size):
            part = slice(first, min(first + size, total))
            tokens = replace(problem, num_tokens=part.stop - first)
            super().launch(tokens, config, _part_of(given, part, out[part]))
        return out

    def stages(
        self, problem: MoEProblem, config: MoEConfig, inputs: FusedMoEInputs, plan: RoutingPlan
    ) -> torch.Tensor:
        """Run both stages with a given plan; return [T, H], or `out`, which stage 2 writes."""
        format = problem.options.mx_format
        gate_up, down = (cast(Cdna4GemmConfig, each) for each in (config.gate_up, config.down))
        if format is None or not gate_up.kernel is down.kernel is Cdna4Kernel.PREFILL:
            return super().stages(problem, config, inputs, plan)
        weights, num_rows = inputs.weights, plan.max_blocks * plan.routing_block_m
        features, like = weights.intermediate_size, weights.down_proj.qdata
        codes = like.new_empty((num_rows, features // format.codes_per_byte))
        scale = empty_arranged(like, num_rows // UNIT_ROWS, features)
        GATE_UP.store(problem, gate_up, GateUpInputs(inputs.x, weights, plan), codes, scale)
        h = MXTensor.unchecked(codes, scale, format)
        return DOWN.launch(problem, down, DownInputs(h, weights, plan, inputs.out))


def _part_of(inputs: FusedMoEInputs, part: slice, out: torch.Tensor) -> FusedMoEInputs:
    """Inputs of some of the tokens, which write `out`.

    Raises:
        UnsupportedError: other ranks send the tokens, and announce them all at once.
    """
    if inputs.arrivals is not None:
        need, got = "tokens whose activations have fewer than 2 GiB", "more"
        raise UnsupportedError(
            message("fused_moe", "expert_parallel", need, got, "lower max_tokens")
        )
    x, local = inputs.x, inputs.num_local_tokens
    if isinstance(x, MXTensor):
        x = MXTensor(x.qdata[part], x.scale[part], x.format)
    else:
        x = x[part]
    if local is not None:
        local = (local - part.start).clamp(0, part.stop - part.start)
    return replace(
        inputs,
        x=x,
        topk_weights=inputs.topk_weights[part],
        topk_ids=inputs.topk_ids[part],
        num_local_tokens=local,
        out=out,
    )


GATE_UP = _GateUp()
DOWN = _Down()
FUSED_MOE = _Layer(GATE_UP, DOWN, heuristics)
