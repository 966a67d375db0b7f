"""Modelled time of a whole stage of the cdna4 MoE layer, and the config that it is least for.

For layers whose experts have one block of 16 rows: all weights come from HBM once. The cycle model
judges the loop of one compute unit. `stage_seconds` adds what a stage is beside it:

- tiles: tokens spread evenly over the experts, and the rows of each are padded to 16;
- rounds: as many tiles run side by side as the 256 compute units hold workgroups; the last round
  has what is left, with fewer workgroups on a compute unit;
- start: each round begins with the latency of HBM, which nothing hides;
- memory: a stage takes at least what HBM needs for its weights;
- split-K: each partial sum is written and read once, at the best rate of HBM.

A compute unit with fewer workgroups than it holds is as fast as each of them is alone, until it
reaches the rate of the full one.

It leaves out epilogues and launches, and the hit rate of L2: `weight_cache` makes no difference
here, so the rule of the heuristic decides it. Split-K adds a launch, so `best_config` compares it
only where the heuristic's choice has as many. The loops of both stages are the same but for the
addresses of their rows, so that of `down` stands for both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.gfx950.cells import DEEPSEEK, LONGER, WEIGHTS, moe_report, without_last_turn
from benchmarks.gfx950.published import GPT_OSS_PADDED
from gfx950emu.timing import MI355X as CHIP
from gfx950emu.timing import Execution, model_loop
from mxpert.configs import Cdna4GemmConfig, WeightCache
from mxpert.core.problem import MoEConfig, MoEOptions, MoEProblem, Op, SiLU
from mxpert.core.stage_configs import other_weight_caches
from mxpert.formats.layouts import UNIT_CODES, UNIT_ROWS
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4 import config as cdna4
from mxpert.testing.gfx950 import MI355X as TARGET
from mxpert.testing.problems import MODEL_SHAPES, MoEShape

LEFT_TO_THE_HEURISTIC = ("dsv3-ep8", "kimi-k2-tp4", "kimi-e385", "r1-e384")
"""Shares of models that the shipped table has no rows for."""

SHAPES = {
    **{name: each for name, each in MODEL_SHAPES.items() if name not in LEFT_TO_THE_HEURISTIC},
    "gpt-oss padded": GPT_OSS_PADDED,
    "deepseek-v3 EP8": DEEPSEEK,
}
"""Models, and the sizes with which the reference systems run two of them."""
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)
BLOCK_M = min(cdna4.DECODE_BLOCKS_M)
DEPTH = LONGER[-1]
"""Size of k that is executed: the loop of four slices turns four times."""
FORMATS = ("mxfp4", "mxfp8", "bf16")

ALONE_UNITS = CHIP.compute_units // 2
"""Active compute units of a loop whose workgroup is alone on each: HBM is not their limit."""
_UNIT_BYTES = UNIT_ROWS * UNIT_CODES // 2 + UNIT_ROWS * UNIT_CODES // 32
"""Codes of e2m1 and scales of a unit of weights."""


@dataclass(frozen=True)
class Rate:
    """A loop in its steady state: cycles for an element of a tile's depth, one workgroup's."""

    cycles: float
    workgroups: int


@dataclass(frozen=True)
class LoopKey:
    """What a rate depends on.

    Args:
        config: with k_splits = 1 and weights that are kept; splits shorten the loop and leave it as
            it is, and the model has no cache that streamed weights would leave.
        activation_format: of the layer.
        alone: one workgroup on each of `ALONE_UNITS`, instead of as many as all compute units hold.
    """

    config: Cdna4GemmConfig
    activation_format: str
    alone: bool = False


RateOf = Callable[[LoopKey], Rate]


def problem(shape: MoEShape, tokens: int, activation_format: str) -> MoEProblem:
    """A layer on the MI355X; `SiLU` and no bias, which the loops do not depend on."""
    sizes = (shape.top_k, shape.num_experts, shape.hidden_size, shape.intermediate_size)
    options = MoEOptions(SiLU(), activation_format)
    return MoEProblem(Op.FUSED_MOE, TARGET, tokens, *sizes, options, Layout.CDNA4_FRAGMENT)


@functools.cache
def _execution(config: Cdna4GemmConfig, activation_format: str) -> Execution:
    """The executed loop without its last turn."""
    layer = MoEConfig(config.block_m, config, config)
    report = moe_report("cdna4", layer, "down", activation_format, Layout.CDNA4_FRAGMENT, DEPTH)
    return without_last_turn(Execution.of(report, WEIGHTS))


def executed_rate(key: LoopKey) -> Rate:
    """Execute a config's loop and model it.

    Raises:
        LoopError: there is no hot loop.
    """
    config, execution = key.config, _execution(key.config, key.activation_format)
    if key.alone:
        loop = model_loop(execution, workgroups=1, active_units=ALONE_UNITS)
    else:
        loop = model_loop(execution)
    work = sum(
        count * rows * columns * elements
        for name, count in loop.mnemonics.items()
        if name.startswith("v_mfma")
        for rows, columns, elements in [map(int, re.findall(r"(\d+)x(\d+)x(\d+)", name)[0])]
    )
    elements = work * loop.waves / (config.block_m * config.block_n)
    return Rate(loop.cycles / elements, loop.workgroups)


def stage_seconds(
    layer: MoEProblem, op: Op, config: Cdna4GemmConfig, rate_of: RateOf = executed_rate
) -> float:
    """Modelled seconds of a stage, as the module describes."""
    row_blocks = layer.hit_experts
    row_units, depth_units = cdna4.units(layer, op)
    tiles = row_blocks * -(-row_units * UNIT_ROWS // config.block_n) * config.k_splits
    shares = config.k_splits * config.k_slices
    depth = -(-depth_units // shares) * config.k_slices * UNIT_CODES
    same_loop = replace(config, k_splits=1, weight_cache=WeightCache.KEEP)
    loop = LoopKey(same_loop, layer.options.activation_format)
    full = rate_of(loop)
    rounds, left = divmod(tiles, full.workgroups * CHIP.compute_units)
    cycles = rounds * (depth * full.cycles + CHIP.stream_latency)
    if left:
        alone = rate_of(replace(loop, alone=True))
        share = -(-left // CHIP.compute_units) / full.workgroups
        cycles += depth * max(alone.cycles, full.cycles * share) + CHIP.stream_latency
    weights = row_blocks * row_units * depth_units * _UNIT_BYTES
    seconds = max(cycles / CHIP.clock_hz, weights / CHIP.stream_bytes_per_second)
    if config.k_splits > 1:
        partial = config.k_splits * row_blocks * config.block_m * row_units * UNIT_ROWS * 4
        seconds += 2 * partial / CHIP.stream_bytes_per_second + CHIP.stream_latency / CHIP.clock_hz
    return seconds


def layer_seconds(layer: MoEProblem, config: MoEConfig, rate_of: RateOf = executed_rate) -> float:
    """Modelled seconds of both stages."""
    return stage_seconds(layer, Op.MOE_GATE_UP, config.gate_up, rate_of) + stage_seconds(
        layer, Op.MOE_DOWN, config.down, rate_of
    )


def launches(config: MoEConfig) -> int:
    """Kernels that finish split-K."""
    return sum(stage.k_splits > 1 for stage in (config.gate_up, config.down))


@dataclass(frozen=True)
class Choice:
    """The heuristic's config of a layer and the best one, with modelled seconds."""

    layer: MoEProblem
    heuristic: MoEConfig
    heuristic_seconds: float
    best: MoEConfig
    seconds: float
    candidates: int

    @property
    def gain(self) -> float:
        """Part of the heuristic's time that the best one saves."""
        return 1 - self.seconds / self.heuristic_seconds


def is_modelled(layer: MoEProblem) -> bool:
    """Whether the rows of an average expert fit into one block of 16."""
    return layer.rows_per_expert <= BLOCK_M


def best_config(layer: MoEProblem, rate_of: RateOf = executed_rate) -> Choice:
    """The least modelled time among the backend's configs that need no more launches.

    Larger blocks are left out: they load the same weights, and compute and hold more rows. So are
    configs that differ in `weight_cache` alone, which the model does not see.
    """
    first = cdna4.layer_heuristic(layer)
    left_out = set(other_weight_caches(first))
    seconds = {
        config: layer_seconds(layer, config, rate_of)
        for config in cdna4.layer_configs(layer)
        if config.routing_block_m == BLOCK_M
        and launches(config) <= launches(first)
        and config not in left_out
    }
    best = min(seconds, key=lambda config: seconds[config])
    return Choice(layer, first, seconds[first], best, seconds[best], len(seconds))
