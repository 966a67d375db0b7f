"""Tiles of the Hopper kernels: which are valid, and which one to take."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...errors import require
from ...formats.layouts import UNIT_ROWS
from ...problem import GemmConfig, MoEConfig, MoEProblem, Op

STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

BLOCKS_M = (8, 16, 32)
"""Most rows of a decode tile. The routing blocks of prefill tiles are 32 or 64."""

DECODE_REGISTERS = 80
"""Register cap: two CTAs of twelve warps' worth of registers share an SM."""

DECODE_WORKER_REGISTERS = 104
"""What a consumer may use: the producer's four warps give theirs up (80 → 24)."""

DECODE_DEPTH = 256
"""Codes of a step of the decode kernel."""

_PREFILL_DEPTH = 128
_DECODE_SHARED = 113 * 1024
"""Bytes a CTA may use so that two fit on an SM; one kilobyte of it is the system's."""

_PREFILL_SHARED = 227 * 1024
"""Bytes that one CTA may use."""

_BARRIER_BYTES = 2048
_MIN_SPLIT_STEPS = 2
_MAX_SPLIT_ROWS = 64
_MAX_STAGES = 8
_FEW_STAGES = 3
_MOST_IDLE = 1.1
"""A third consumer that has no weight rows in the last tile of a stage with few: kimi-k2 TP4's 1024
(16 units) take 4 % less in tiles of two."""

_DECODE_LIMITS = (("decode8", 1.5), ("decode32", 26))
_LIMITS: dict[bool, tuple[tuple[str, float], ...]] = {
    True: (*_DECODE_LIMITS, ("triple", 84), ("wide", math.inf)),
    False: (*_DECODE_LIMITS, ("short", 56), ("triple", 88), ("narrow", 104), ("middle", 192),
            ("wide", math.inf))}
"""Rows per hit expert up to which each tile wins, by hi and lo split: somewhat fewer than it holds,
since experts with more than the average need a second tile for their last rows.

A decode tile of 32 rows is as narrow as its block's real rows, and within 1 % (a8w4) or 3 % (a16w4)
of narrower tiles where tokens spread evenly; where they do not it wins by up to 20 %. The tile of
16 rows is for plans whose unit it is.

Measured on an H200 with 1 to 2000 rows an expert, on gpt-oss-120b, kimi-k2 TP4, deepseek-v3 EP8 and
qwen3-235b.
"""


def is_prefill(config: GemmConfig) -> bool:
    """Whether a config names the prefill kernel."""
    return config.block_k == _PREFILL_DEPTH


def consumers(config: GemmConfig) -> int:
    """Warpgroups of a tile, each with its own 64 weight rows."""
    return config.block_n // UNIT_ROWS


def _prefill_stage_bytes(config: GemmConfig, split: bool) -> int:
    """Of codes, shifts and activation rows, hi and lo of each, in a stage of 256 codes."""
    rows = config.block_m * config.group_m * (2 if split else 1)
    return consumers(config) * (64 * 128 + 16 * 32) + rows * 256


@functools.cache
def _prefill_config(block_m: int, num_consumers: int, blocks: int, split: bool) -> GemmConfig:
    """The prefill kernel with tiles of up to `blocks` blocks of activation rows, and the deepest
    ring that leaves room for outputs.

    What is on its way into the ring has to cover the latency of memory: two stages more made the
    short tile up to 11 % faster than the triple one on the same rows.
    """
    config = GemmConfig(block_m, UNIT_ROWS * num_consumers, _PREFILL_DEPTH, group_m=blocks)
    piece = num_consumers * block_m * UNIT_ROWS * torch.bfloat16.itemsize
    room = _PREFILL_SHARED - _BARRIER_BYTES - piece
    return replace(config, num_stages=2 * (room // _prefill_stage_bytes(config, split)))


def output_pieces(config: GemmConfig, split: bool, row_bytes: int) -> tuple[int, int]:
    """Copies of a prefill tile's outputs that a consumer may have under way, and rows of each.

    row_bytes: of the outputs that a consumer has of a row.
    """
    ring = config.num_stages // 2 * _prefill_stage_bytes(config, split)
    room = _PREFILL_SHARED - _BARRIER_BYTES - ring
    return next((pieces, rows) for pieces, rows in (
        (2, config.block_m), (1, config.block_m), (1, 32), (1, 16))
        if consumers(config) * pieces * rows * row_bytes <= room)


@functools.cache
def tiles(split: bool) -> dict[str, GemmConfig]:
    """Every tile by name, from few activation rows to many.

    The more rows share decoded weights, the less an SM decodes; the fewer, the deeper the ring is.
    Registers of two prefill consumers hold the sums of 256 rows, of three those of 96; of hi and lo
    128 and 64.
    """
    prefill = {"triple": (32, 3, 2), "wide": (64, 2, 2)} if split else {
        "short": (32, 3, 2), "triple": (32, 3, 3), "narrow": (32, 2, 4), "middle": (64, 2, 3),
        "wide": (64, 2, 4)}
    return ({f"decode{rows}": _decode_config(rows, split) for rows in BLOCKS_M}
            | {name: _prefill_config(*shape, split) for name, shape in prefill.items()})


def splits(problem: MoEProblem) -> bool:
    """bf16 activations travel as hi and lo columns."""
    return problem.options.activation_format == "bf16"


def _decode_config(block_m: int, split: bool) -> GemmConfig:
    """The deepest pipeline that leaves room for two CTAs per SM."""
    columns = block_m * (2 if split else 1)
    stage = 128 * 128 + 32 * 32 + columns * DECODE_DEPTH
    stages = min(_MAX_STAGES, (_DECODE_SHARED - _BARRIER_BYTES) // stage)
    return GemmConfig(block_m, 128, DECODE_DEPTH, num_warps=4, num_stages=stages)


def decode_ctas(problem: MoEProblem) -> int:
    """CTAs of the decode kernel, which are all resident."""
    return 2 * problem.target.num_sms


def _hit_experts(problem: MoEProblem) -> int:
    """Experts that the routed rows hit if they spread evenly."""
    return max(1, min(problem.num_experts, problem.num_tokens * problem.top_k))


def _preferred(problem: MoEProblem, op: Op) -> GemmConfig:
    """The tile of a stage: rows per hit expert, if tokens spread evenly, decide; blocks of both
    stages have as many rows."""
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
    """Decode tiles of one block's rows of output, and steps of depth, of a stage."""
    depth = problem.hidden_size if op is Op.MOE_GATE_UP else problem.intermediate_size
    return -(-_row_units(problem, op) // 2), -(-depth // DECODE_DEPTH)


def with_split_k(config: GemmConfig, problem: MoEProblem, op: Op) -> GemmConfig:
    """Split the depth where the tiles of the routed rows leave more than half of the CTAs idle."""
    if is_prefill(config):
        return config
    num_tiles, steps = _tiles_and_steps(problem, op)
    idle_factor = decode_ctas(problem) // (_hit_experts(problem) * num_tiles)
    return replace(config, split_k=max(1, min(idle_factor, steps // _MIN_SPLIT_STEPS)))


def early_stages(config: GemmConfig, problem: MoEProblem, num_tiles: int) -> int:
    """Stages of weights that a CTA of stage 1 asks for ahead of the rows that it waits for.

    num_tiles: of one block. Copies arrive in the order in which they are asked for. Where every
    tile has a CTA of its own, rows are there before a ring of weights is: T = 1 takes 1 to 4 % less
    with three stages, T = 2 and more up to 5 % more.
    """
    if _hit_experts(problem) * num_tiles <= decode_ctas(problem):
        return min(_FEW_STAGES, config.num_stages)
    return config.num_stages


def _layer(problem: MoEProblem, gate_up: GemmConfig, down: GemmConfig) -> MoEConfig:
    """Both stages with these tiles, their depth split where CTAs would be idle."""
    gate_up, down = (with_split_k(tile, problem, op)
                     for tile, op in zip((gate_up, down), STAGE_OPS, strict=True))
    return MoEConfig(gate_up.block_m, gate_up, down)


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Both stages with their preferred tiles."""
    return _layer(problem, *(_preferred(problem, op) for op in STAGE_OPS))


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """The heuristic's choice first, then other tiles for both stages, then other splits."""
    first = layer_heuristic(problem)
    yield first
    for config in tiles(splits(problem)).values():
        layer = _layer(problem, config, config)
        if layer != first:
            yield layer
    if not is_prefill(first.gate_up):
        for gate_up, down in _split_choices(problem, first):
            if (gate_up, down) != (first.gate_up.split_k, first.down.split_k):
                yield MoEConfig(first.routing_block_m, replace(first.gate_up, split_k=gate_up),
                                replace(first.down, split_k=down))


def _split_choices(problem: MoEProblem, config: MoEConfig) -> Iterator[tuple[int, int]]:
    """Splits of both stages worth trying: only while the routed rows are few."""
    if problem.num_tokens * problem.top_k > _MAX_SPLIT_ROWS:
        return
    for gate_up in (1, 2, 3, 4, 6):
        for down in (1, 2, 3):
            if all(split == 1 or split <= _tiles_and_steps(problem, op)[1]
                   for split, op in zip((gate_up, down), STAGE_OPS, strict=True)):
                yield gate_up, down


def stage_configs(problem: MoEProblem) -> Iterator[GemmConfig]:
    """Every tile that divides the plan's unit."""
    yield from (with_split_k(c, problem, problem.op) for c in tiles(splits(problem)).values()
                if problem.routing_block_m % c.block_m == 0)


def stage_heuristic(problem: MoEProblem) -> GemmConfig:
    """The preferred tile, or the largest decode tile that divides the plan's unit."""
    preferred = _preferred(problem, problem.op)
    if problem.routing_block_m % preferred.block_m:
        rows = max(rows for rows in BLOCKS_M if problem.routing_block_m % rows == 0)
        preferred = tiles(splits(problem))[f"decode{rows}"]
    return with_split_k(preferred, problem, problem.op)


def require_valid(config: GemmConfig, problem: MoEProblem) -> None:
    """Refuse a pinned or tuned config that no kernel of this backend implements."""
    known_tiles = list(tiles(splits(problem)).values())
    step = 2 if is_prefill(config) else 1
    valid = (config.num_stages > 1 and config.num_stages % step == 0 and config.split_k >= 1
             and (config.split_k == 1 or not is_prefill(config))
             and any(config.num_stages <= known.num_stages
                     and config == replace(known, num_stages=config.num_stages,
                                           split_k=config.split_k)
                     for known in known_tiles))
    require(valid, problem.op.value, "config", got=config,
            need=f"one of {known_tiles}, with split_k in decode tiles, or fewer stages",
            remedy="take one from the kernel's configs()")
