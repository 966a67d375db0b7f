"""Tiles of the Hopper kernels: which are valid, and which one to take."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import require
from ...problem import GemmConfig, MoEConfig, MoEProblem

DECODE_BLOCKS_M = (8, 16, 32)
PREFILL_BLOCK_M = 64
BLOCKS_M = (*DECODE_BLOCKS_M, PREFILL_BLOCK_M)

DECODE_REGISTERS = 80
"""Register cap: two CTAs of twelve warps (three partitions' worth) share an SM."""

_DECODE_SHARED = 113 * 1024
"""Bytes a CTA may use so that two fit on an SM; one kilobyte of it is the system's."""

_BARRIER_BYTES = 2048


def _decode_config(block_m: int, split: bool) -> GemmConfig:
    """The deepest pipeline that leaves room for two CTAs per SM."""
    columns = block_m * (2 if split else 1)
    stage = 128 * 128 + 32 * 32 + columns * 256
    stages = min(8, (_DECODE_SHARED - _BARRIER_BYTES) // stage)
    return GemmConfig(block_m, 128, 256, num_warps=8, num_stages=stages)


def _stage_config(problem: MoEProblem, block_m: int) -> GemmConfig:
    if block_m == PREFILL_BLOCK_M:
        return GemmConfig(block_m, 128, 128, num_warps=4, num_stages=4)
    return _decode_config(block_m, problem.options.activation_format == "bf16")


def _preferred_block_m(problem: MoEProblem) -> int:
    """Rows per hit expert, if tokens spread evenly, decide the tile."""
    routed = problem.num_tokens * problem.top_k
    average = routed / max(1, min(problem.num_experts, routed))
    for block_m, limit in ((8, 6), (16, 12), (32, 40)):
        if average <= limit:
            return block_m
    return PREFILL_BLOCK_M


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Both stages with the preferred tile."""
    return _layer(problem, _preferred_block_m(problem))


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """The heuristic's choice first, then the others."""
    first = _preferred_block_m(problem)
    yield _layer(problem, first)
    for block_m in BLOCKS_M:
        if block_m != first:
            yield _layer(problem, block_m)


def _layer(problem: MoEProblem, block_m: int) -> MoEConfig:
    config = _stage_config(problem, block_m)
    return MoEConfig(block_m, config, config)


def stage_heuristic(problem: MoEProblem) -> GemmConfig:
    """The largest tile that divides the plan's unit, up to the preferred one where possible."""
    fitting = [b for b in BLOCKS_M if problem.routing_block_m % b == 0]
    preferred = _preferred_block_m(problem)
    return _stage_config(problem, max((b for b in fitting if b <= preferred),
                                      default=min(fitting)))


def stage_configs(problem: MoEProblem) -> Iterator[GemmConfig]:
    """Every tile that divides the plan's unit."""
    for block_m in BLOCKS_M:
        if problem.routing_block_m % block_m == 0:
            yield _stage_config(problem, block_m)


def require_valid(config: GemmConfig, problem: MoEProblem) -> None:
    """Refuse a pinned or tuned config that no kernel of this backend implements."""
    expected = (_stage_config(problem, config.block_m) if config.block_m in BLOCKS_M else None)
    valid = (expected is not None and config.num_stages <= expected.num_stages
             and config.num_stages % (2 if config.block_m == PREFILL_BLOCK_M else 1) == 0
             and config == GemmConfig(expected.block_m, expected.block_n, expected.block_k,
                                      expected.num_warps, config.num_stages))
    require(valid, problem.op.value, "config", got=config,
            need=f"block_m in {list(BLOCKS_M)} with that tile's own sizes, e.g. {expected}",
            remedy="take one from the kernel's configs()")
