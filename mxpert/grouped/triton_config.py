"""Tile choice for the portable grouped GEMMs; heuristic and tuner share one validity rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from ..core.problem import GemmConfig, GroupedProblem, Op
from ..device.targets import decodes_fp8, has_mma_sync_only, has_tcgen05, has_wgmma
from ..device.tile_rules import (
    EPILOGUE_BYTES,
    invalid_tile,
    require_config,
    shrink_until_valid,
    without_scaled_mfma,
)
from ..formats.spec import MX_BLOCK_SIZE

SCALED_MMA_ROWS = 128
"""Rows of Blackwell's block-scaled MMA; tiles with fewer rows would be decoded to bf16 instead."""


def shared_memory(problem: GroupedProblem, config: GemmConfig) -> int:
    """Upper estimate of the shared memory of one program, in bytes.

    A pipeline stage holds the tiles of both operands in their memory format, and their scales. On
    Hopper MX tiles are also stored in shared memory as bf16. After the loop the epilogue may use
    shared memory to change the layout of the float32 accumulator.
    """
    target, (rows, depth) = problem.target, (config.block_m + config.block_n, config.block_k)
    if problem.a_format == "bf16":
        stage, decoded = rows * depth * 2, 0
    else:
        stage = rows * depth + rows * depth // MX_BLOCK_SIZE
        decoded = rows * depth * 2 if has_wgmma(target) else 0
    loop = config.num_stages * stage + decoded
    return max(loop, config.block_m * config.block_n * 4) + EPILOGUE_BYTES


def invalid(problem: GroupedProblem, config: GemmConfig) -> str | None:
    """Why `config` cannot run, as a phrase; None if it can. Tuner and heuristic both use this."""
    if config.split_k != 1:
        return f"needs split_k 1, got {config.split_k}"
    block_scaled = problem.a_format != "bf16" and has_tcgen05(problem.target)
    if block_scaled and config.block_m < SCALED_MMA_ROWS:
        return f"block-scaled MMA is {SCALED_MMA_ROWS} rows high, block_m is {config.block_m}"
    reason = invalid_tile(problem.target, config, config.block_n, shared_memory(problem, config))
    if reason is None and problem.a_format != "bf16":
        return without_scaled_mfma(problem.target, config)
    return reason


def require_valid(problem: GroupedProblem, config: GemmConfig) -> None:
    """Raise ValueError for a config (pinned or from a table) that `invalid` refuses."""
    require_config(problem.op, config, invalid(problem, config))


def configs(problem: GroupedProblem) -> Iterator[GemmConfig]:
    """Every valid config of the tuner's grid."""
    grid = itertools.product((64, 128), (64, 128, 256), (64, 128), (4, 8), (2, 3, 4), (1, 8))
    for block_m, block_n, block_k, num_warps, num_stages, group_m in grid:
        config = GemmConfig(block_m, block_n, block_k, num_warps, num_stages, group_m)
        if invalid(problem, config) is None:
            yield config


def heuristic(problem: GroupedProblem) -> GemmConfig:
    """Tiles of 128 × 128 with 8 warps and a K step of 128 bytes, a row of a swizzled tile.

    The tile has 64 rows if an average group has at most 64, except with MX operands and tcgen05,
    whose block-scaled MMA has 128 rows. Where warps multiply operands in registers (mma.sync), the
    K step of MX operands is halved, and the tile has 64 rows where they are decoded: 128 to 198
    registers, no spills (sm_80, sm_86, sm_89, compiled, not run).
    """
    target, mx = problem.target, problem.a_format != "bf16"
    average = problem.num_rows / max(1, problem.num_groups)
    may_be_low = not (mx and has_tcgen05(target))
    small = problem.op is Op.GROUPED_GEMM and average <= 64 and may_be_low
    config = GemmConfig(
        block_m=64 if small or (mx and decodes_fp8(target)) else 128,
        block_n=128,
        block_k=128 if mx and not has_mma_sync_only(target) else 64,
        num_warps=8,
        num_stages=2 if target.kind == "hip" else 4,
        group_m=8,
    )
    return shrink_until_valid(config, functools.partial(invalid, problem))
