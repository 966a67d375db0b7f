"""Modelled time of whole stages on the shapes that the reference systems publish.

One workgroup of each stage is executed at its real depth, in the config that the library picks, and
`model_tiles` replays it with as many beside it, and behind it, as one compute unit computes. So a
stage has what a hot loop leaves out:

- start and epilogue of each workgroup, at the real depth;
- tiles: row blocks expected where each token draws its experts at random, and those of the fullest
  compute unit;
- memory: at least the time that HBM needs for weights, activations and results;
- power: matrix work, padding included, no faster than AMD's best dense GEMM (`SUSTAINED`);
- other kernels of the stage: what they move, HBM's latency, and `LAUNCH_SECONDS` each.

It leaves out the launch of the first kernel, which profilers leave out too, how workgroups get to
compute units, L2's capacity, and channels of HBM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gfx950.cells import WEIGHTS, GroupedCell, grouped_config, grouped_report, moe_report
from benchmarks.gfx950.choice import problem
from benchmarks.gfx950.published import PEAK_TFLOPS, SUSTAINED, PublishedStage
from benchmarks.grouped.published import BALANCES, PUBLISHED
from benchmarks.harness.document import Row
from gfx950emu import Report
from gfx950emu.timing import MI355X as CHIP
from gfx950emu.timing import Execution, TileReport, model_tiles
from mxpert.core.problem import GemmConfig, MoEConfig, MoEProblem, Op
from mxpert.core.registry import override, resolve
from mxpert.formats.layouts import UNIT_CODES, UNIT_ROWS
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4 import config as cdna4
from mxpert.moe.cdna4.config import Cdna4GemmConfig, Cdna4Kernel
from mxpert.testing.problems import MoEShape

LAUNCH_SECONDS = 5e-6
"""From the end of one kernel to the start of the next. An assumption on the safe side: nobody has
published it for this chip."""
LONGEST = 3
"""Turns that are replayed; those behind them take the time of the last."""
OPS = ("forward", "dgrad", "wgrad")
"""In the order of `GROUPED`."""


def _published_grouped() -> dict[tuple[int, int, int, int], tuple[tuple[float, ...], ...]]:
    """(groups, rows, N, K) → TFLOP/s of `OPS` alone: balanced, then random groups."""
    found = {}
    for shape in dict.fromkeys(name for name, *_ in PUBLISHED):
        groups, sizes = shape.split("x")
        rows, n, k = map(int, sizes.split("-"))
        found[int(groups), rows, n, k] = tuple(
            tuple(PUBLISHED[shape, balance, op, False] for op in OPS) for balance in BALANCES
        )
    return found


GROUPED = _published_grouped()
"""Published rates of the kernels alone, with the reordering of scales inside (Primus-Turbo, pull
request 330; N and K are columns of forward's output and input)."""
OPERANDS = {"mxfp4": "fp4", "mxfp8": "fp8", "bf16": "bf16"}
"""Activation format → operands of MFMA."""
_ROW_BITS = {"mxfp4": 4.25, "mxfp8": 8.25, "bf16": 16.0}
_UNIT_BYTES = UNIT_ROWS * UNIT_CODES * 4.25 / 8
"""Codes of e2m1 and scales of a unit of weights."""


@dataclass(frozen=True)
class Work:
    """What a stage computes and moves.

    Args:
        tiles: workgroups, or tiles of persistent ones. A decode tile whose last waves have no
            weights counts in part: those end at once.
        fresh: part of the streamed bytes that no tile before has loaded.
        flops: of the tiles, padding included. useful: of the shape.
        bytes: from and to HBM. operands: of MFMA, as in `PEAK_TFLOPS`.
        others: kernel → bytes that it moves, for those beside the GEMM.
    """

    tiles: float
    fresh: float
    flops: float
    useful: float
    bytes: float
    operands: str
    others: dict[str, float]


@dataclass(frozen=True)
class StageTime:
    """Modelled seconds of a stage: of the compute units, of HBM, at the power limit, and beside.

    Args:
        first: the replay of the first workgroups of a compute unit.
    """

    cycles: float
    memory: float
    power: float
    others: float
    first: TileReport

    @property
    def bounds(self) -> dict[str, float]:
        """What can limit the GEMM → its seconds."""
        return {"cycles": self.cycles, "memory": self.memory, "power": self.power}

    @property
    def limit(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def seconds(self) -> float:
        return max(self.bounds.values()) + self.others


def expected_blocks(tokens: int, shape: MoEShape, block_m: int) -> tuple[float, float]:
    """Experts that have rows, and row blocks, if each token draws its experts at random.

    >>> experts, blocks = expected_blocks(128, MoEShape(2880, 2880, 128, 4), 16)
    >>> round(experts, 1), round(blocks, 1)
    (125.8, 125.8)
    """
    share = shape.top_k / shape.num_experts
    rows = np.arange(tokens + 1)
    if share == 1:
        return float(shape.num_experts), float(shape.num_experts * -(-tokens // block_m))
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, tokens + 1)))))
    log_chance = (
        log_factorial[tokens]
        - log_factorial[rows]
        - log_factorial[tokens - rows]
        + rows * math.log(share)
        + (tokens - rows) * math.log1p(-share)
    )
    chance = np.exp(log_chance)
    blocks = float((chance * -(-rows // block_m)).sum()) * shape.num_experts
    return float(1 - chance[0]) * shape.num_experts, blocks


Parts = Sequence[tuple[float, Execution]]
"""Shares of a stage's tiles, and a workgroup that is like them."""


def stage_time(parts: Parts, work: Work) -> StageTime:
    """Modelled time of a stage whose workgroups are like the executed ones."""
    tiles = math.ceil(work.tiles / CHIP.compute_units)
    units = work.tiles / tiles * work.fresh
    replays = [(share, *_unit_cycles(execution, tiles, units)) for share, execution in parts]
    each = CHIP.stream_latency / CHIP.clock_hz + LAUNCH_SECONDS
    return StageTime(
        sum(share * cycles for share, cycles, _ in replays) / CHIP.clock_hz,
        work.bytes / CHIP.stream_bytes_per_second,
        work.flops / (SUSTAINED[work.operands][0] * 1e12),
        sum(each + size / CHIP.stream_bytes_per_second for size in work.others.values()),
        max(replays, key=lambda replay: replay[0])[2],
    )


def _unit_cycles(execution: Execution, tiles: int, units: float) -> tuple[float, TileReport]:
    """Cycles of a compute unit for so many tiles, and the replay of the first ones.

    Args:
        units: compute units that load from HBM as much as this one.
    """

    def replay(turns: int, side_by_side: int | None) -> TileReport:
        return model_tiles(execution, workgroups=side_by_side, turns=turns, active_units=units)

    first = replay(1, None)
    turns, left = divmod(tiles, first.workgroups)
    if not turns:
        first = replay(1, left)
        return first.cycles, first
    reports = [first, *(replay(n, first.workgroups) for n in range(2, min(turns, LONGEST) + 1))]
    cycles = reports[-1].cycles
    if turns > LONGEST:
        cycles += (turns - LONGEST) * (reports[-1].cycles - reports[-2].cycles)
    return cycles + (replay(1, left).cycles if left else 0.0), first


# -- stages of an MoE layer ------------------------------------------------------------------------


def moe_work(published: PublishedStage, config: Cdna4GemmConfig) -> Work:
    """Tiles, bytes and kernels of a stage in a config."""
    shape, format = published.shape, published.activation_format
    layer, op = problem(shape, published.tokens, format), _op(published)
    experts, blocks = expected_blocks(published.tokens, shape, config.block_m)
    row_units, depth_units = cdna4.units(layer, op)
    tiles_n = row_units * UNIT_ROWS / config.block_n
    if config.kernel is Cdna4Kernel.PREFILL:
        tiles_n = math.ceil(tiles_n)
    depth, width = depth_units * UNIT_CODES, cdna4.weight_rows(layer, op)
    routed, row_bytes = published.tokens * shape.top_k, _ROW_BITS[format] / 8
    partial = 0.0
    others: dict[str, float] = {}
    if op is Op.MOE_GATE_UP:
        moved = published.tokens * shape.hidden_size * row_bytes
        results = routed * shape.intermediate_size * row_bytes
        if config.kernel is Cdna4Kernel.PREFILL and format != "bf16":
            others["scales in order"] = 2 * routed * shape.hidden_size / 32
    else:
        moved = routed * shape.intermediate_size * row_bytes
        results = routed * shape.hidden_size * 2
        if published.sums:
            others["sum of slots"] = results + published.tokens * shape.hidden_size * 2
    if config.k_splits > 1:
        partial = config.k_splits * blocks * config.block_m * width * 4
        others["sum of splits"] = partial + results
        results = 0.0
    return Work(
        blocks * tiles_n * config.k_splits,
        experts / blocks,
        2 * blocks * config.block_m * tiles_n * config.block_n * depth,
        2.0 * routed * width * cdna4.depth(layer, op),
        experts * row_units * depth_units * _UNIT_BYTES + moved + results + partial,
        OPERANDS[format],
        others,
    )


def _op(published: PublishedStage) -> Op:
    return Op.MOE_GATE_UP if published.stage == "gate_up" else Op.MOE_DOWN


def picked(published: PublishedStage) -> tuple[MoEProblem, MoEConfig]:
    """The layer, and the config that the library picks for it."""
    layer = problem(published.shape, published.tokens, published.activation_format)
    with override(backend="cdna4"):
        _, config = resolve(layer)
    assert isinstance(config, MoEConfig)
    return layer, config


@functools.cache
def _moe_report(config: MoEConfig, stage: str, format: str, depth: int) -> Report:
    return moe_report("cdna4", config, stage, format, Layout.CDNA4_FRAGMENT, depth)


def moe_time(published: PublishedStage) -> tuple[Cdna4GemmConfig, Work, StageTime]:
    """The picked config of a published stage, what it does, and its modelled time.

    Of an expert's row blocks one loads the weights from HBM. The others of a prefill tile find them
    in L2; in a decode tile, where they run beside each other, all have HBM's latency.
    """
    layer, config = picked(published)
    chosen = getattr(config, published.stage)
    depth = cdna4.depth(layer, _op(published))
    report = _moe_report(config, published.stage, published.activation_format, depth)
    work = moe_work(published, chosen)
    share = 1.0 if chosen.kernel is Cdna4Kernel.DECODE else work.fresh
    parts = [(share, Execution.of(report, WEIGHTS)), (1 - share, Execution.of(report))]
    return chosen, work, stage_time([part for part in parts if part[0] > 0], work)


# -- grouped GEMMs ---------------------------------------------------------------------------------


def grouped_work(cell: GroupedCell, config: GemmConfig) -> Work:
    """Tiles and bytes of a grouped GEMM whose groups have equal rows."""
    high, wide = {
        "forward": (cell.rows, cell.n),
        "dgrad": (cell.rows, cell.k),
        "wgrad": (cell.n, cell.k),
    }[cell.op]
    tiles = cell.groups * -(-high // config.block_m) * -(-wide // config.block_n)
    depth = -(-cell.depth // UNIT_CODES) * UNIT_CODES
    operands = cell.groups * (high + wide) * cell.depth * _ROW_BITS["mxfp8"] / 8
    return Work(
        tiles,
        1.0,
        2.0 * tiles * config.block_m * config.block_n * depth,
        2.0 * cell.groups * high * wide * cell.depth,
        operands + cell.groups * high * wide * 2,
        "fp8",
        {},
    )


@functools.cache
def _grouped_execution(config: GemmConfig, op: str, depth: int) -> Execution:
    return Execution.of(grouped_report("cdna4", config, op, depth))


def grouped_time(cell: GroupedCell) -> tuple[GemmConfig, Work, StageTime]:
    """The picked config of a grouped GEMM, what it does, and its modelled time."""
    config = grouped_config(cell, "cdna4")
    work = grouped_work(cell, config)
    return config, work, stage_time([(1.0, _grouped_execution(config, cell.op, cell.depth))], work)


# -- rows ------------------------------------------------------------------------------------------


def describe(config: object, work: Work, time: StageTime) -> Row:
    """The modelled columns of a row."""
    return {
        "config": str(config),
        "tiles": round(work.tiles, 1),
        "workgroups": time.first.workgroups,
        "start_cycles": round(time.first.start),
        "end_cycles": round(time.first.end),
        "tile_cycles": round(time.first.cycles),
        "mfma_percent": round(
            100 * work.useful / (PEAK_TFLOPS[work.operands] * 1e12) / time.seconds, 1
        ),
        "cycles_us": round(time.cycles * 1e6, 1),
        "memory_us": round(time.memory * 1e6, 1),
        "power_us": round(time.power * 1e6, 1),
        "others_us": round(time.others * 1e6, 1),
        "launches": 1 + len(work.others),
        "limit": time.limit,
        "us": round(time.seconds * 1e6, 1),
    }


def moe_row(published: PublishedStage) -> Row:
    """The row of a published stage."""
    return {
        "kind": "moe",
        "source": published.source,
        "shape": shape_name(published),
        "tokens": published.tokens,
        "what": f"{published.activation_format} {published.stage}",
        "whose": published.whose,
        "published_us": published.us,
        "ratio": published.ratio,
        **describe(*moe_time(published)),
    }


def shape_name(published: PublishedStage) -> str:
    """Model, H × F, experts and top k."""
    shape = published.shape
    sizes = f"{shape.hidden_size} × {shape.intermediate_size}"
    return f"{published.model} {sizes}, E{shape.num_experts} k{shape.top_k}"


def grouped_cells() -> Iterator[GroupedCell]:
    """Each published grouped GEMM."""
    for groups, rows, n, k in GROUPED:
        for op in OPS:
            yield GroupedCell(op, groups, rows, n, k)


def grouped_row(cell: GroupedCell) -> Row:
    """The row of a published grouped GEMM with groups of equal size."""
    groups, rows, n, k = cell.groups, cell.rows, cell.n, cell.k
    balanced, unbalanced = (rates[OPS.index(cell.op)] for rates in GROUPED[groups, rows, n, k])
    return {
        "kind": "grouped",
        "source": "#330",
        "shape": f"{groups} × {rows}, N {n}, K {k}",
        "tokens": groups * rows,
        "what": cell.op,
        "whose": "Primus-Turbo",
        "published_us": round(2.0 * groups * rows * n * k / balanced / 1e6, 1),
        "ratio": f"{balanced:.0f} TFLOP/s; unbalanced {unbalanced:.0f}",
        **describe(*grouped_time(cell)),
    }
