"""What the tiles of the portable GEMMs have in common; their heuristics and the tuner use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.problem import GemmConfig, Op, Target
from ..errors import require

MIN_BLOCK_M = 16
"""Smallest row block that every target's matrix instructions support."""

MAX_ACCUMULATORS = 128
"""Float32 accumulators per thread: half of the registers; decoded weights need the other half."""

EPILOGUE_BYTES = 1024
"""Shared memory for barriers and reductions."""


def num_threads(target: Target, config: GemmConfig) -> int:
    """Threads of one program."""
    return config.num_warps * (64 if target.kind == "hip" else 32)


def invalid_tile(
    target: Target, config: GemmConfig, width: int, memory: int, min_block_k: int = 64
) -> str | None:
    """Why a program cannot have this tile, as a phrase; None if it can.

    Args:
        width: columns of the accumulator, which has block_m rows.
        memory: bytes of shared memory that the program needs.
        min_block_k: the smallest step along K.
    """
    for name, low in (("block_m", MIN_BLOCK_M), ("block_n", 32), ("block_k", min_block_k)):
        value = getattr(config, name)
        if not low <= value <= 256 or value & (value - 1):
            return f"{name} must be a power of two from {low} to 256, got {value}"
    if config.num_warps not in (1, 2, 4, 8):
        return f"num_warps must be 1, 2, 4 or 8, got {config.num_warps}"
    if min(config.num_stages, config.group_m, config.split_k) < 1:
        return "num_stages, group_m and split_k must be at least 1"
    if target.kind == "cpu":
        return None
    accumulators = config.block_m * width // num_threads(target, config)
    if accumulators > MAX_ACCUMULATORS:
        return (
            f"{accumulators} accumulators a thread, at most {MAX_ACCUMULATORS}: "
            "more warps or a smaller tile"
        )
    if memory > target.shared_memory:
        return f"about {memory} bytes of shared memory, the device has {target.shared_memory}"
    return None


def without_scaled_mfma(target: Target, config: GemmConfig) -> str | None:
    """Why an AMD GPU would not multiply a tile of MX operands by scaled MFMA; None if it does.

    Scaled MFMA is 16 × 16 × 128 or 32 × 32 × 64. For other tiles and for a single warp the compiler
    decodes the operands to bf16 without a warning (Triton 3.6.0 and 3.9.0, compiled for gfx950).
    """
    if target.kind != "hip":
        return None
    if config.num_warps == 1:
        return "one warp multiplies MX operands as bf16, without scaled MFMA: set num_warps to 2"
    if config.block_m < 32 and config.block_k < 128:
        return (
            f"{config.block_m} rows with block_k {config.block_k} would be multiplied as bf16: "
            "scaled MFMA of 16 rows has a K of 128; set block_k to 128 or block_m to 32"
        )
    return None


def require_config(op: Op, config: GemmConfig, reason: str | None) -> None:
    """Raise ValueError for a config (pinned or from a table) that is invalid for `reason`."""
    require(
        reason is None,
        op.value,
        "config",
        need="a config that this device can run",
        got=f"{config} ({reason})",
        remedy="see configs() of the kernel for valid ones",
    )


def shrink_until_valid(
    config: GemmConfig, invalid: Callable[[GemmConfig], str | None]
) -> GemmConfig:
    """`config`, or the first of its versions with fewer stages and a smaller K step that is valid.

    If none is, the smallest.
    """
    candidates = [
        config,
        replace(config, num_stages=3),
        replace(config, num_stages=2),
        replace(config, num_stages=2, block_k=min(64, config.block_k)),
    ]
    return next((c for c in candidates if invalid(c) is None), candidates[-1])
