"""Tiles of the Hopper kernels: which are valid, and which one to take."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import require
from ...problem import GemmConfig, MoEConfig, MoEProblem

BLOCKS_M = (8, 16, 32, 64)
"""Rows of a decode tile, and of a prefill tile's routing block (64)."""

DECODE_REGISTERS = 80
"""Register cap: two CTAs of twelve warps' worth of registers share an SM."""

DECODE_WORKER_REGISTERS = 104
"""What a consumer may use: the producer's four warps give theirs up (80 → 24)."""

PREFILL = GemmConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=4)
"""The prefill kernel: tiles of up to four blocks of 64 rows (two for hi and lo)."""

_DECODE_DEPTH = 256
_DECODE_SHARED = 113 * 1024
"""Bytes a CTA may use so that two fit on an SM; one kilobyte of it is the system's."""

_BARRIER_BYTES = 2048
_MAX_STAGES = 8
_MAX_COLUMNS = 64
"""Accumulator columns that fit under DECODE_REGISTERS."""

_DECODE_LIMITS = {True: ((8, 6), (16, 12), (32, 40)), False: ((8, 6), (16, 12), (32, 22), (64, 72))}
"""Rows per hit expert up to which each decode tile wins, by hi and lo split (H200, 2026-11-20:
gpt-oss-120b, kimi-k2 TP4 and deepseek-v3 EP8 at T = 64..1024)."""


def is_prefill(config: GemmConfig) -> bool:
    """Whether a config names the prefill kernel."""
    return config.block_k == PREFILL.block_k


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


def _preferred(problem: MoEProblem) -> GemmConfig:
    """Rows per hit expert, if tokens spread evenly, decide the tile."""
    routed = problem.num_tokens * problem.top_k
    average = routed / max(1, min(problem.num_experts, routed))
    for block_m, limit in _DECODE_LIMITS[splits(problem)]:
        if average <= limit:
            return decode_config(block_m, splits(problem))
    return PREFILL


def _all_configs(problem: MoEProblem) -> list[GemmConfig]:
    return [*(decode_config(b, splits(problem)) for b in _decode_blocks(problem)), PREFILL]


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Both stages with the preferred tile."""
    config = _preferred(problem)
    return MoEConfig(config.block_m, config, config)


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """The heuristic's choice first, then each other tile for both stages."""
    first = layer_heuristic(problem)
    yield first
    for config in _all_configs(problem):
        if config != first.gate_up:
            yield MoEConfig(config.block_m, config, config)


def stage_configs(problem: MoEProblem) -> Iterator[GemmConfig]:
    """Every tile that divides the plan's unit."""
    yield from (c for c in _all_configs(problem) if problem.routing_block_m % c.block_m == 0)


def stage_heuristic(problem: MoEProblem) -> GemmConfig:
    """The preferred tile, or the largest decode tile that divides the plan's unit."""
    preferred = _preferred(problem)
    if problem.routing_block_m % preferred.block_m == 0:
        return preferred
    fitting = [b for b in _decode_blocks(problem) if problem.routing_block_m % b == 0]
    return decode_config(max(fitting), splits(problem))


def require_valid(config: GemmConfig, problem: MoEProblem) -> None:
    """Refuse a pinned or tuned config that no kernel of this backend implements."""
    known = [c for c in _all_configs(problem)
             if (c.block_m, c.block_k) == (config.block_m, config.block_k)]
    step = 2 if is_prefill(config) else 1
    valid = (bool(known) and 1 < config.num_stages <= known[0].num_stages
             and config.num_stages % step == 0
             and config == GemmConfig(config.block_m, known[0].block_n, config.block_k,
                                      known[0].num_warps, config.num_stages))
    require(valid, problem.op.value, "config", got=config,
            need=f"one of {_all_configs(problem)}, or fewer stages",
            remedy="take one from the kernel's configs()")
