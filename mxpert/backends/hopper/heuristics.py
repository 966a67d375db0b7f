"""Tiles of the Hopper kernels: which are valid, and which one to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...errors import require
from ...formats.layouts import UNIT_ROWS
from ...problem import GemmConfig, MoEConfig, MoEProblem, Op

STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

BLOCKS_M = (8, 16, 32, 64)
"""Rows of a decode tile. The routing blocks of prefill tiles are 32 or 64."""

DECODE_REGISTERS = 80
"""Register cap: two CTAs of twelve warps' worth of registers share an SM."""

DECODE_WORKER_REGISTERS = 104
"""What a consumer may use: the producer's four warps give theirs up (80 → 24)."""

PREFILL = GemmConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4)
"""The prefill kernel: tiles of up to four blocks of 64 rows (two for hi and lo)."""

NARROW_PREFILL = GemmConfig(block_m=32, block_n=128, block_k=128, num_warps=4, num_stages=8)
"""The prefill kernel with tiles of up to four blocks of 32 rows (two for hi and lo) and a deeper
ring."""

TRIPLE_PREFILL = GemmConfig(block_m=32, block_n=192, block_k=128, num_warps=4, num_stages=6)
"""NARROW_PREFILL with three consumers, whose registers hold three blocks (two for hi and lo)."""

_DECODE_DEPTH = 256
_DECODE_SHARED = 113 * 1024
"""Bytes a CTA may use so that two fit on an SM; one kilobyte of it is the system's."""

_BARRIER_BYTES = 2048
_MIN_SPLIT_STEPS = 2
_MAX_SPLIT_ROWS = 64
_MAX_STAGES = 8
_MAX_COLUMNS = 64
"""Accumulator columns that fit under DECODE_REGISTERS."""

_DECODE_LIMITS = ((8, 6), (16, 12), (32, 28))
"""Rows per hit expert up to which each decode tile wins (H200: gpt-oss-120b, kimi-k2 TP4,
deepseek-v3 EP8, qwen3-235b and dsv4-flash at T = 64..8192)."""

_WIDE_DECODE_LIMITS = (36, 56)
"""Between these, the decode tile of 64 FP8 rows, where `_time` prefers it to narrow ones."""

_NARROW_LIMITS = {True: 72, False: 128}
"""Rows per hit expert up to which narrow prefill tiles win, by hi and lo split; more go to
PREFILL."""

_TRIPLE_LIMIT = 88
"""Rows per hit expert up to which TRIPLE_PREFILL may win: with more, more experts need a second
tile for their last rows."""

_DECODE_TIME = 0.99
_TRIPLE_TIME = 0.92
"""Time of a row unit in tiles of 64 decode rows and of TRIPLE_PREFILL, in NARROW_PREFILL's (H200:
qwen3-235b and gpt-oss-120b at 32 to 80 rows an expert)."""


def is_prefill(config: GemmConfig) -> bool:
    """Whether a config names the prefill kernel."""
    return config.block_k == PREFILL.block_k


def consumers(config: GemmConfig) -> int:
    """Warpgroups of a tile, each with its own 64 weight rows."""
    return config.block_n // UNIT_ROWS


def blocks_of_tile(config: GemmConfig, split: bool) -> int:
    """Blocks that a tile of the prefill kernel holds at most."""
    if split:
        return 2
    return 3 if config.block_n == TRIPLE_PREFILL.block_n else 4


def splits(problem: MoEProblem) -> bool:
    """bf16 activations travel as hi and lo columns."""
    return problem.options.activation_format == "bf16"


def decode_config(block_m: int, split: bool) -> GemmConfig:
    """The deepest pipeline that leaves room for two CTAs per SM."""
    columns = block_m * (2 if split else 1)
    stage = 128 * 128 + 32 * 32 + columns * _DECODE_DEPTH
    stages = min(_MAX_STAGES, (_DECODE_SHARED - _BARRIER_BYTES) // stage)
    return GemmConfig(block_m, 128, _DECODE_DEPTH, num_warps=4, num_stages=stages)


def _decode_blocks(problem: MoEProblem) -> list[int]:
    columns = 2 if splits(problem) else 1
    return [block_m for block_m in BLOCKS_M if block_m * columns <= _MAX_COLUMNS]


def _time(config: GemmConfig, problem: MoEProblem, op: Op, hit: int) -> float:
    """Of a stage whose hit experts have one tile's rows each: what an SM multiplies, in row units
    of NARROW_PREFILL. SMs claim tiles, so that they end within a tile of each other."""
    units = _row_units(problem, op)
    if not is_prefill(config):
        return _DECODE_TIME * units * hit / problem.target.num_sms
    tiles = -(-units // consumers(config)) * hit
    time = (tiles / problem.target.num_sms + 0.5) * consumers(config)
    return time * _TRIPLE_TIME if config == TRIPLE_PREFILL else time


def _preferred(problem: MoEProblem) -> dict[Op, GemmConfig]:
    """Tiles of both stages. Rows per hit expert, if tokens spread evenly, decide; between narrow
    ones how well the stages' tiles fill the SMs."""
    routed, split = problem.num_tokens * problem.top_k, splits(problem)
    hit = max(1, min(problem.num_experts, routed))
    average = routed / hit
    for block_m, limit in _DECODE_LIMITS:
        if average <= limit:
            return dict.fromkeys(STAGE_OPS, decode_config(block_m, split))
    if average > _NARROW_LIMITS[split]:
        return dict.fromkeys(STAGE_OPS, PREFILL)
    choices = [NARROW_PREFILL, *([TRIPLE_PREFILL] if average <= _TRIPLE_LIMIT else [])]
    narrow = {op: min(choices, key=lambda config: _time(config, problem, op, hit))
              for op in STAGE_OPS}
    least, most = _WIDE_DECODE_LIMITS
    if split or not least < average <= most:
        return narrow
    decode = dict.fromkeys(STAGE_OPS, decode_config(64, split))
    return min((narrow, decode), key=lambda tiles: sum(
        _time(tiles[op], problem, op, hit) for op in STAGE_OPS))


def _row_units(problem: MoEProblem, op: Op) -> int:
    rows = 2 * problem.intermediate_size if op is Op.MOE_GATE_UP else problem.hidden_size
    return -(-rows // UNIT_ROWS)


def _tiles_and_steps(problem: MoEProblem, op: Op) -> tuple[int, int]:
    """Decode tiles of one block's rows of output, and steps of depth, of a stage."""
    depth = problem.hidden_size if op is Op.MOE_GATE_UP else problem.intermediate_size
    return -(-_row_units(problem, op) // 2), -(-depth // _DECODE_DEPTH)


def with_split_k(config: GemmConfig, problem: MoEProblem, op: Op) -> GemmConfig:
    """Split the depth where the tiles of the routed rows leave more than half of the CTAs idle."""
    if is_prefill(config):
        return config
    tiles, steps = _tiles_and_steps(problem, op)
    blocks = min(problem.num_tokens * problem.top_k, problem.num_experts)
    idle_factor = 2 * problem.target.num_sms // max(1, blocks * tiles)
    return replace(config, split_k=max(1, min(idle_factor, steps // _MIN_SPLIT_STEPS)))


def _all_configs(problem: MoEProblem) -> list[GemmConfig]:
    return [*(decode_config(b, splits(problem)) for b in _decode_blocks(problem)),
            NARROW_PREFILL, TRIPLE_PREFILL, PREFILL]


def _layer(problem: MoEProblem, tiles: dict[Op, GemmConfig]) -> MoEConfig:
    gate_up, down = (with_split_k(tiles[op], problem, op) for op in STAGE_OPS)
    return MoEConfig(gate_up.block_m, gate_up, down)


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Both stages with their preferred tiles, which share their routing blocks."""
    return _layer(problem, _preferred(problem))


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """The heuristic's choice first, then other tiles for both stages, then other splits."""
    first = layer_heuristic(problem)
    yield first
    for config in _all_configs(problem):
        layer = _layer(problem, dict.fromkeys(STAGE_OPS, config))
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
    yield from (with_split_k(c, problem, problem.op) for c in _all_configs(problem)
                if problem.routing_block_m % c.block_m == 0)


def stage_heuristic(problem: MoEProblem) -> GemmConfig:
    """The preferred tile, or the largest decode tile that divides the plan's unit."""
    preferred = _preferred(problem)[problem.op]
    if problem.routing_block_m % preferred.block_m:
        fitting = [b for b in _decode_blocks(problem) if problem.routing_block_m % b == 0]
        preferred = decode_config(max(fitting), splits(problem))
    return with_split_k(preferred, problem, problem.op)


def require_valid(config: GemmConfig, problem: MoEProblem) -> None:
    """Refuse a pinned or tuned config that no kernel of this backend implements."""
    known = [c for c in _all_configs(problem)
             if (c.block_m, c.block_n, c.block_k) == (config.block_m, config.block_n,
                                                      config.block_k)]
    step = 2 if is_prefill(config) else 1
    valid = (bool(known) and 1 < config.num_stages <= known[0].num_stages
             and config.num_stages % step == 0 and config.split_k >= 1
             and (config.split_k == 1 or not is_prefill(config))
             and config == replace(known[0], num_stages=config.num_stages,
                                   split_k=config.split_k))
    require(valid, problem.op.value, "config", got=config,
            need=f"one of {_all_configs(problem)}, with split_k in decode tiles, or fewer stages",
            remedy="take one from the kernel's configs()")
