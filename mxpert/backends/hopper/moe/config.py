"""Choice of tiles for the Hopper MoE kernels, and the check of configs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ....errors import require
from ....formats.layouts import UNIT_ROWS
from ....problem import GemmConfig, MoEConfig, MoEProblem, Op

STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

BLOCKS_M = (8, 16, 32)
"""block_m of decode tiles. Prefill tiles have routing blocks of 32 or 64 rows."""

DECODE_REGISTERS = 80
"""Registers per thread (maxnreg) of the decode kernel: the register file then holds two CTAs of
twelve warps."""

DECODE_WORKER_REGISTERS = 104
"""Registers per thread of a consumer: the producer's warps release theirs (80 → 24)."""

DECODE_DEPTH = 256
"""Codes of depth per step of the decode kernel."""

_PREFILL_DEPTH = 128
_DECODE_SHARED = 113 * 1024
"""Shared memory per CTA in bytes so that two fit on an SM; the system takes one kilobyte of it."""

_PREFILL_SHARED = 227 * 1024
"""Shared memory of one CTA in bytes."""

_BARRIER_BYTES = 2048
_MIN_SPLIT_STEPS = 2
_MAX_SPLIT_ROWS = 64
_MAX_STAGES = 8
_FEW_STAGES = 3
_MOST_IDLE = 1.1
"""Largest ratio of padded to real row units with three consumers. In a stage with few weight rows
the third consumer has none in the last tile: with the 1024 rows (16 units) of kimi-k2 TP4, tiles of
two consumers take 4 % less time."""

_DECODE_LIMITS = (("decode8", 1.5), ("decode32", 26))
_LIMITS: dict[bool, tuple[tuple[str, float], ...]] = {
    True: (*_DECODE_LIMITS, ("triple", 84), ("wide", math.inf)),
    False: (
        *_DECODE_LIMITS,
        ("short", 56),
        ("triple", 88),
        ("narrow", 104),
        ("middle", 192),
        ("wide", math.inf),
    ),
}
"""Tile names with the largest number of rows per hit expert at which each is the fastest, by SPLIT.

The limits are somewhat below a tile's rows, since experts with more rows than the average need a
second tile. A decode tile of 32 rows loads only its block's real rows. It is within 1 % (a8w4) or
3 % (a16w4) of narrower tiles if tokens spread evenly, and up to 20 % faster if they do not. The
tile of 16 rows is used only for plans with routing_block_m = 16.

Measured on an H200 with 1 to 2000 rows an expert, on gpt-oss-120b, kimi-k2 TP4, deepseek-v3 EP8 and
qwen3-235b.
"""


def is_prefill(config: GemmConfig) -> bool:
    """Whether a config selects the prefill kernel."""
    return config.block_k == _PREFILL_DEPTH


def consumers(config: GemmConfig) -> int:
    """Number of consumer warpgroups; each computes its own 64 weight rows."""
    return config.block_n // UNIT_ROWS


def _prefill_stage_bytes(config: GemmConfig, split: bool) -> int:
    """Bytes of a pipeline stage of 256 codes: weight codes, shifts, activation rows (hi and lo)."""
    rows = config.block_m * config.group_m * (2 if split else 1)
    return consumers(config) * (64 * 128 + 16 * 32) + rows * 256


@functools.cache
def _prefill_config(block_m: int, num_consumers: int, blocks: int, split: bool) -> GemmConfig:
    """Prefill config for tiles of up to `blocks` blocks, with as many stages as fit.

    Shared memory must also hold the output buffers. More stages hide more memory latency: with two
    stages more, the "short" tile was up to 11 % faster than "triple" on the same rows.
    """
    config = GemmConfig(block_m, UNIT_ROWS * num_consumers, _PREFILL_DEPTH, group_m=blocks)
    piece = num_consumers * block_m * UNIT_ROWS * torch.bfloat16.itemsize
    room = _PREFILL_SHARED - _BARRIER_BYTES - piece
    return replace(config, num_stages=2 * (room // _prefill_stage_bytes(config, split)))


def output_pieces(config: GemmConfig, split: bool, row_bytes: int) -> tuple[int, int]:
    """Output buffers per consumer of a prefill tile (TMA stores in flight), and rows of each.

    row_bytes: bytes of a consumer's outputs per row.
    """
    ring = config.num_stages // 2 * _prefill_stage_bytes(config, split)
    room = _PREFILL_SHARED - _BARRIER_BYTES - ring
    return next(
        (pieces, rows)
        for pieces, rows in ((2, config.block_m), (1, config.block_m), (1, 32), (1, 16))
        if consumers(config) * pieces * rows * row_bytes <= room
    )


@functools.cache
def tiles(split: bool) -> dict[str, GemmConfig]:
    """All tiles by name, ordered by activation rows.

    Wide tiles decode each weight for more rows. Narrow tiles leave room for more stages. Registers
    hold the sums of up to 256 rows with two prefill consumers and 96 with three; with hi and lo 128
    and 64.
    """
    prefill = (
        {"triple": (32, 3, 2), "wide": (64, 2, 2)}
        if split
        else {
            "short": (32, 3, 2),
            "triple": (32, 3, 3),
            "narrow": (32, 2, 4),
            "middle": (64, 2, 3),
            "wide": (64, 2, 4),
        }
    )
    return {f"decode{rows}": _decode_config(rows, split) for rows in BLOCKS_M} | {
        name: _prefill_config(*shape, split) for name, shape in prefill.items()
    }


def splits(problem: MoEProblem) -> bool:
    """Whether activations are encoded as hi and lo rows (bf16 activations)."""
    return problem.options.activation_format == "bf16"


def _decode_config(block_m: int, split: bool) -> GemmConfig:
    """Decode config with as many stages as two CTAs per SM allow."""
    columns = block_m * (2 if split else 1)
    stage = 128 * 128 + 32 * 32 + columns * DECODE_DEPTH
    stages = min(_MAX_STAGES, (_DECODE_SHARED - _BARRIER_BYTES) // stage)
    return GemmConfig(block_m, 128, DECODE_DEPTH, num_warps=4, num_stages=stages)


def decode_ctas(problem: MoEProblem) -> int:
    """Number of CTAs of the decode kernel; all are resident."""
    return 2 * problem.target.num_sms


def _hit_experts(problem: MoEProblem) -> int:
    """Number of experts that have rows if tokens spread evenly."""
    return max(1, min(problem.num_experts, problem.num_tokens * problem.top_k))


def _preferred(problem: MoEProblem, op: Op) -> GemmConfig:
    """Choose the tile of a stage by the rows per hit expert, assuming that tokens spread evenly.

    Both stages get the same block_m.
    """
    split = splits(problem)
    average = problem.num_tokens * problem.top_k / _hit_experts(problem)
    name = next(name for name, limit in _LIMITS[split] if average <= limit)
    units = _row_units(problem, op)
    if name == "triple" and not split and -(-units // 3) * 3 > _MOST_IDLE * units:
        name = "narrow"
    return tiles(split)[name]


def _row_units(problem: MoEProblem, op: Op) -> int:
    rows = 2 * problem.intermediate_size if op is Op.MOE_GATE_UP else problem.hidden_size
    return -(-rows // UNIT_ROWS)


def _tiles_and_steps(problem: MoEProblem, op: Op) -> tuple[int, int]:
    """Number of decode tiles per block, and of steps of depth, of a stage."""
    depth = problem.hidden_size if op is Op.MOE_GATE_UP else problem.intermediate_size
    return -(-_row_units(problem, op) // 2), -(-depth // DECODE_DEPTH)


def with_split_k(config: GemmConfig, problem: MoEProblem, op: Op) -> GemmConfig:
    """Set split_k > 1 if the tiles of the routed rows leave more than half of the CTAs idle."""
    if is_prefill(config):
        return config
    num_tiles, steps = _tiles_and_steps(problem, op)
    idle_factor = decode_ctas(problem) // (_hit_experts(problem) * num_tiles)
    return replace(config, split_k=max(1, min(idle_factor, steps // _MIN_SPLIT_STEPS)))


def early_stages(config: GemmConfig, problem: MoEProblem, num_tiles: int) -> int:
    """Stages of weights that a CTA of stage 1 loads before it waits for the activation rows.

    num_tiles: tiles per block. Loads complete in the order in which they are issued. If every tile
    has its own CTA, the activation rows are ready before all stages of weights have arrived. With
    three stages instead of all, T = 1 takes 1 to 4 % less time, T = 2 and more up to 5 % more.
    """
    if _hit_experts(problem) * num_tiles <= decode_ctas(problem):
        return min(_FEW_STAGES, config.num_stages)
    return config.num_stages


def _layer(problem: MoEProblem, gate_up: GemmConfig, down: GemmConfig) -> MoEConfig:
    """Config of a layer with these tiles, with split-K if CTAs would be idle."""
    gate_up, down = (
        with_split_k(tile, problem, op) for tile, op in zip((gate_up, down), STAGE_OPS, strict=True)
    )
    return MoEConfig(gate_up.block_m, gate_up, down)


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a layer: the preferred tile for each stage."""
    return _layer(problem, *(_preferred(problem, op) for op in STAGE_OPS))


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """Configs of a layer: the heuristic's first, then other tiles, then other split_k."""
    first = layer_heuristic(problem)
    yield first
    for config in tiles(splits(problem)).values():
        layer = _layer(problem, config, config)
        if layer != first:
            yield layer
    if not is_prefill(first.gate_up):
        for gate_up, down in _split_choices(problem, first):
            if (gate_up, down) != (first.gate_up.split_k, first.down.split_k):
                yield MoEConfig(
                    first.routing_block_m,
                    replace(first.gate_up, split_k=gate_up),
                    replace(first.down, split_k=down),
                )


def _split_choices(problem: MoEProblem, config: MoEConfig) -> Iterator[tuple[int, int]]:
    """Pairs of split_k for both stages that the tuner tries; none if there are many routed rows."""
    if problem.num_tokens * problem.top_k > _MAX_SPLIT_ROWS:
        return
    for gate_up in (1, 2, 3, 4, 6):
        for down in (1, 2, 3):
            if all(
                split == 1 or split <= _tiles_and_steps(problem, op)[1]
                for split, op in zip((gate_up, down), STAGE_OPS, strict=True)
            ):
                yield gate_up, down


def stage_configs(problem: MoEProblem) -> Iterator[GemmConfig]:
    """Every tile whose block_m divides the plan's routing_block_m."""
    yield from (
        with_split_k(c, problem, problem.op)
        for c in tiles(splits(problem)).values()
        if problem.routing_block_m % c.block_m == 0
    )


def stage_heuristic(problem: MoEProblem) -> GemmConfig:
    """The preferred tile, or the largest decode tile whose block_m divides routing_block_m."""
    preferred = _preferred(problem, problem.op)
    if problem.routing_block_m % preferred.block_m:
        rows = max(rows for rows in BLOCKS_M if problem.routing_block_m % rows == 0)
        preferred = tiles(splits(problem))[f"decode{rows}"]
    return with_split_k(preferred, problem, problem.op)


def require_valid(config: GemmConfig, problem: MoEProblem) -> None:
    """Raise ValueError for a pinned or tuned config that no kernel of this backend implements."""
    known_tiles = list(tiles(splits(problem)).values())
    step = 2 if is_prefill(config) else 1
    valid = (
        config.num_stages > 1
        and config.num_stages % step == 0
        and config.split_k >= 1
        and (config.split_k == 1 or not is_prefill(config))
        and any(
            config.num_stages <= known.num_stages
            and config == replace(known, num_stages=config.num_stages, split_k=config.split_k)
            for known in known_tiles
        )
    )
    require(
        valid,
        problem.op.value,
        "config",
        got=config,
        need=f"one of {known_tiles}, with split_k in decode tiles, or fewer stages",
        remedy="take one from the kernel's configs()",
    )
