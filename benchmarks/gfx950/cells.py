"""Our kernels on the reference systems' shapes: what is executed small, and modelled at size.

The config is that of the full shape. The executed problem has one expert (or group) and one row
block, the full rows of the tile, and enough of k for the hot loop to turn four times; the model
repeats the loop from there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel

import mxpert
from benchmarks.gfx950.published import GPT_OSS_PADDED, KIMI_K25, PEAK_TFLOPS
from benchmarks.harness.document import Row
from gfx950emu import Report
from gfx950emu.timing import Execution, LoopError, LoopReport, model_loop
from gfx950emu.timing.execution import find_loop
from gfx950emu.timing.loop import LIKELY_LOAD
from mxpert.core.problem import (
    GemmConfig,
    GroupedProblem,
    MoEConfig,
    MoEOptions,
    MoEProblem,
    Op,
    SiLU,
)
from mxpert.core.registry import override, resolve
from mxpert.core.target import Kernel, on_device
from mxpert.formats.tensor import Layout
from mxpert.routing.plan import padded_capacity
from mxpert.testing.gfx950 import MI355X, Emulation, Grid, emulate
from mxpert.testing.problems import MoEShape, random_moe_problem

BACKENDS = ("triton", "cdna4")
LONGER = (4096, 16384)
"""Sizes of k that are executed instead of a shape's own in which the hot loop turns too seldom."""
STAGES = ("gate_up", "down")
OTHER = 256
"""The size of the layer that the modelled stage does not sum over."""
WEIGHTS = ("w_ptr", "w_scale_ptr")
"""Parameters of the MoE kernels that come from HBM where each expert has one row block."""


@dataclass(frozen=True)
class MoECell:
    """One stage of an MoE layer.

    Args:
        regime: "decode" (weights from HBM) or "prefill" (everything in L2).
        tokens: T, of the full shape. rows: of the executed row block, 0 for the config's.
    """

    regime: str
    model: str
    shape: MoEShape
    tokens: int
    activation_format: str
    stage: str

    @property
    def name(self) -> str:
        return f"{self.regime} {self.model} T={self.tokens} {self.activation_format} {self.stage}"

    @property
    def depth(self) -> int:
        """Elements that the stage sums over."""
        sizes = {"gate_up": self.shape.hidden_size, "down": self.shape.intermediate_size}
        return sizes[self.stage]


@dataclass(frozen=True)
class GroupedCell:
    """One grouped GEMM of training: `groups` × `rows` rows, E4M3.

    Args:
        op: "forward", "dgrad" or "wgrad". n, k: columns of the output and of the input of forward.
    """

    op: str
    groups: int
    rows: int
    n: int
    k: int

    regime = "grouped"

    @property
    def name(self) -> str:
        return f"grouped {self.op} {self.groups}×{self.rows} N={self.n} K={self.k}"

    @property
    def depth(self) -> int:
        """Elements that a product sums over."""
        return {"forward": self.k, "dgrad": self.n, "wgrad": self.rows}[self.op]


DEEPSEEK = MoEShape(7168, 2048, 32, 8)
Cell = MoECell | GroupedCell


def cells() -> Iterator[Cell]:
    """All shapes of the report."""
    for model, shape, tokens in (("gpt-oss", GPT_OSS_PADDED, 128), ("kimi-k2 TP4", KIMI_K25, 128)):
        for name in ("mxfp4", "mxfp8", "bf16"):
            for stage in STAGES:
                yield MoECell("decode", model, shape, tokens, name, stage)
    for model, shape, tokens in (
        ("gpt-oss", GPT_OSS_PADDED, 8192),
        ("deepseek-v3 EP8", DEEPSEEK, 8192),
    ):
        for name in ("mxfp4", "mxfp8", "bf16"):
            for stage in STAGES:
                yield MoECell("prefill", model, shape, tokens, name, stage)
    for groups, rows, n, k in (
        (16, 2048, 4096, 7168),
        (16, 2048, 7168, 2048),
        (4, 4096, 5760, 2880),
    ):
        for op in ("forward", "dgrad", "wgrad"):
            yield GroupedCell(op, groups, rows, n, k)


def run_cell(
    cell: Cell, backend: str, depths: Sequence[int] = (), likely_load: float = LIKELY_LOAD
) -> Row:
    """Execute a cell's kernel small, model it, and describe the result.

    Args:
        depths: choices for the executed k (default: the cell's, then `LONGER`).
        likely_load: see `model_loop`; a good guess saves three of four replays in decode.

    Raises:
        UnsupportedError: the backend has no kernel for the cell.
    """
    run = _run_moe if isinstance(cell, MoECell) else _run_grouped
    choices = depths or (cell.depth, *LONGER)
    for depth in choices:
        try:
            config, loop = run(cell, backend, depth, likely_load)
            break
        except LoopError:
            if depth == choices[-1]:
                raise
    return {
        "regime": cell.regime,
        "cell": cell.name,
        "backend": backend,
        "kernel": loop.kernel,
        "config": str(config),
        "depth": depth,
        **figures(loop, cell),
        "triton": triton.__version__,
    }


def figures(loop: LoopReport, cell: Cell) -> Row:
    """The metrics of one modelled loop."""
    names = loop.mnemonics
    kinds = {"mxfp4": "fp4", "bf16": "bf16"}
    peak = PEAK_TFLOPS[kinds.get(getattr(cell, "activation_format", ""), "fp8")]
    # The portable kernels may multiply MX operands in bf16, at another peak.
    native = peak == PEAK_TFLOPS["bf16"] or any(name.startswith("v_mfma_scale") for name in names)
    return {
        "cycles": round(loop.cycles, 1),
        "mfma_percent": round(100 * loop.mfma_efficiency, 2),
        "tbs": round(loop.terabytes_per_second(loop.streamed_bytes), 3),
        "tflops": round(peak * loop.mfma_efficiency) if native else None,
        "mfma": loop.instructions["mfma"],
        "others_per_mfma": round(loop.other_per_mfma, 2),
        "byte_loads": sum(n for name, n in names.items() if "load_ubyte" in name),
        "limit": loop.limit,
        "registers": loop.vector_registers,
        "lds": loop.lds_bytes,
        "workgroups": loop.workgroups,
        "waves": loop.waves,
    }


def _matrix_reports(reports: list[Report]) -> list[Report]:
    """Launches with matrix instructions, in order."""
    return [each for each in reports if any(name.startswith("v_mfma") for name in each.counts)]


def _run_moe(cell: MoECell, backend: str, depth: int, likely_load: float) -> tuple[Any, LoopReport]:
    """The config of the full shape, and the modelled loop of its stage."""
    shape, layout = cell.shape, Layout.ROW_MAJOR if backend == "triton" else Layout.CDNA4_FRAGMENT
    options = MoEOptions(SiLU(), cell.activation_format)
    sizes = (shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size)
    problem = MoEProblem(Op.FUSED_MOE, MI355X, cell.tokens, *sizes, options, layout)
    with override(backend=backend):
        _, config = resolve(problem)
    stages = {name: _unsplit(getattr(config, name)) for name in STAGES}
    config = replace(config, **stages)
    return stages[cell.stage], _moe_loop(
        backend, config, cell.stage, cell.activation_format, layout, cell.regime, depth, likely_load
    )


@functools.cache
def _moe_loop(
    backend: str,
    config: MoEConfig,
    stage: str,
    activation_format: str,
    layout: Layout,
    regime: str,
    depth: int,
    likely_load: float,
) -> LoopReport:
    """Execute one expert and one row block of a layer, and model one stage's loop."""
    report = moe_report(backend, config, stage, activation_format, layout, depth)
    if regime != "decode":
        return model_loop(Execution.of(report))
    execution = Execution.of(report, WEIGHTS)
    if backend == "cdna4":
        execution = without_last_turn(execution)
    return model_loop(execution, likely_load=likely_load)


def without_last_turn(execution: Execution) -> Execution:
    """An executed loop without its last turn, whose prefetches may lie behind the end of k.

    The model repeats the last turn that it is given, and would repeat one that loads less.
    """
    ends = [jumps[-1] for jumps in find_loop(execution).steps]
    waves = [
        replace(wave, instructions=wave.instructions[:end])
        for wave, end in zip(execution.waves, ends, strict=True)
    ]
    return replace(execution, waves=waves)


@dataclass
class _OneGemm(Emulation):
    """Executes one of a layer's GEMMs, and the kernels around both; the other is only compiled.

    A GEMM takes its time whatever values it reads.

    Args:
        wanted: number of the GEMM, from 1.
    """

    wanted: int = 1
    gemms: int = 0

    def execute(
        self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Any], *, warmup: bool = False
    ) -> CompiledKernel:
        compiled = super().execute(kernel, grid, arguments, warmup=True)
        if "v_mfma" in compiled.asm["amdgcn"]:
            self.gemms += 1
            warmup = warmup or self.gemms != self.wanted
        return compiled if warmup else super().execute(kernel, grid, arguments)


def moe_report(
    backend: str, config: MoEConfig, stage: str, activation_format: str, layout: Layout, depth: int
) -> Report:
    """Execute one expert and one row block of a layer; the report of one stage's GEMM."""
    sizes = (depth, OTHER) if stage == "gate_up" else (OTHER, depth)
    inputs = random_moe_problem(MoEShape(*sizes, 1, 1), config.routing_block_m, seed=0)
    weights = inputs.weights.prepare(device="cpu", layout=layout)
    options = dict(schedule="lowest", seed=0, checks=False, trace=True)
    emulation = _OneGemm(options, wanted=1 + STAGES.index(stage))
    with override(backend=backend, config=config), on_device(MI355X, emulation):
        mxpert.fused_moe(
            inputs.x,
            weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            activation_format=activation_format,
        )
    (report,) = _matrix_reports(emulation.reports)
    return report


def _unsplit(config: Any) -> Any:
    """A stage's config without splits of k, which shorten the loop and leave it as it is."""
    names = [name for name in ("split_k", "k_splits") if hasattr(config, name)]
    return replace(config, **dict.fromkeys(names, 1))


def _run_grouped(
    cell: GroupedCell, backend: str, depth: int, likely_load: float
) -> tuple[Any, LoopReport]:
    """The config of the full shape, and the modelled loop, which takes nothing from HBM."""
    config = grouped_config(cell, backend)
    return config, _grouped_loop(backend, config, cell.op, depth)


def grouped_config(cell: GroupedCell, backend: str) -> GemmConfig:
    """What a backend chooses for the full shape."""
    num_rows, is_wgrad = cell.groups * cell.rows, cell.op == "wgrad"
    full = GroupedProblem(
        Op.GROUPED_WGRAD if is_wgrad else Op.GROUPED_GEMM,
        MI355X,
        padded_capacity(num_rows, cell.groups) if is_wgrad else num_rows,
        cell.groups,
        *((cell.k, cell.n) if cell.op == "dgrad" else (cell.n, cell.k)),
        "mxfp8_e4m3",
        "mxfp8_e4m3",
        trans_b=not is_wgrad,
        out_dtype=torch.bfloat16,
    )
    with override(backend=backend):
        _, config = resolve(full)
    found: GemmConfig = config
    return found


@functools.cache
def _grouped_loop(backend: str, config: GemmConfig, op: str, depth: int) -> LoopReport:
    """The modelled loop of `grouped_report`."""
    return model_loop(Execution.of(grouped_report(backend, config, op, depth)))


def grouped_report(backend: str, config: GemmConfig, op: str, depth: int) -> Report:
    """Execute one group of one tile on the copies that training makes; the GEMM's report."""
    tile = 256
    torch.manual_seed(0)
    offsets = torch.tensor([0, depth if op == "wgrad" else tile], dtype=torch.int32)
    with override(backend=backend), emulate(checks=False):
        if op == "wgrad":
            first, second = (
                mxpert.quantize_dual(torch.randn(depth, tile), group_offsets=offsets)[1]
                for _ in range(2)
            )
        else:
            first = mxpert.quantize_dual(torch.randn(tile, depth), group_offsets=offsets)[0]
            shape = (1, tile, depth) if op == "forward" else (1, depth, tile)
            second = mxpert.quantize_dual(torch.randn(shape))[0 if op == "forward" else 1]
    multiply = mxpert.grouped_wgrad if op == "wgrad" else mxpert.grouped_gemm
    with override(backend=backend, config=config), emulate(trace=True, checks=False) as emulation:
        multiply(first, second, offsets)
    return _matrix_reports(emulation.reports)[-1]
