"""Choice of kernels and tiles for the gfx950 MoE GEMMs, and the check of configs."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ...core.problem import MoEConfig, MoEProblem, Op
from ...core.stage_configs import StageConfig, require_integers, require_positive, set_kernel
from ...errors import require
from ...formats.layouts import UNIT_CODES, UNIT_ROWS
from ...formats.spec import FLOAT_DTYPES
from .layout import CDNA4_FRAGMENT


class Cdna4Kernel(enum.StrEnum):
    """The two GEMM kernels of an MoE stage on gfx950.

    DECODE: few rows an expert; limited by the memory that weights are read from.
    PREFILL: many rows an expert; limited by the matrix cores.

    Source:
        The kernels of the cdna4 backend.

    Example:
        >>> Cdna4Kernel("prefill") is Cdna4Kernel.PREFILL
        True
    """

    DECODE = "decode"
    PREFILL = "prefill"

    def __repr__(self) -> str:
        return f"Cdna4Kernel.{self.name}"


@dataclass(frozen=True)
class Cdna4GemmConfig(StageConfig):
    """Kernel, tile and schedule of one MoE stage on gfx950, to pin with `override`.

    Args:
        kernel: the kernel that runs, or its name.
        block_m: sorted rows of a tile.
        block_n: weight rows of a tile: outputs, or in stage 1 gate and up rows.
        num_warps: waves of a workgroup.
        num_stages: decode: units of 64 x 128 weights that a wave holds or loads at a time.
            Prefill: buffers of 128 elements of the contracted dimension in LDS.
        k_splits: workgroups that share the contracted dimension of a tile.
        k_slices: waves of a workgroup that share the contracted dimension of a tile. The prefill
            kernel has one.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown kernel, or a size below 1. An op raises it too for a tile that the
            kernel does not have.

    Example:
        >>> Cdna4GemmConfig("decode", block_m=16, block_n=256).kernel
        Cdna4Kernel.DECODE
    """

    kernel: Cdna4Kernel
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    k_splits: int = 1
    k_slices: int = 1

    def __post_init__(self) -> None:
        set_kernel(self, Cdna4Kernel)
        sizes = ("block_m", "block_n", "num_warps", "num_stages", "k_splits", "k_slices")
        require_integers(self, sizes)
        for name in sizes:
            require_positive(self, name)


STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

DECODE_BLOCKS_M = (16, 32)
"""Rows of a decode tile: the N of one or two MFMA."""

_MOST_BYTES = 1 << 31
"""Activations and float32 outputs must have fewer bytes: offsets of buffers have 31 bits."""

PREFILL_BLOCKS_M = (64, 128, 256)
"""Sorted rows of a prefill tile; the least is not for bf16 activations."""
PREFILL_BLOCK_N = 256
PREFILL_GROUP_M = 8
"""Row blocks that share weight tiles in L2."""

_STEP_CYCLES = {
    "bf16": {256: 4168, 128: 2084},
    "mxfp4": {64: 790, 128: 747, 256: 1084},
    "mxfp8": {64: 658, 128: 1052, 256: 2066},
}
"""Modelled cycles of a CU for 128 elements of depth of a prefill tile (Triton 3.6.0, L2 hits).

The first of equals is chosen. 32 rows of the decode kernel with bf16 take 1220 cycles.
"""

_RESIDENT_WAVES = 8
"""Waves of a CU that the heuristic wants: two of each SIMD hide the latency of each other's loads.
Fewer tiles than that make it split the depth."""

_MIN_UNITS_PER_SPLIT = 4
"""Units of depth of a split: below, its start and its partial sums cost more than it gains."""


def unsupported(problem: MoEProblem) -> str | None:
    """Why the kernels cannot serve `problem`, as a phrase; None if they can."""
    if problem.target.arch != "gfx950":
        return f"needs gfx950, not {problem.target.arch}"
    if not problem.options.activation.is_gated:
        return "multiplies gate and up rows; experts without a gate run on portable kernels"
    if problem.weight_layout is not CDNA4_FRAGMENT:
        return "needs weights in CDNA4_FRAGMENT layout: call weights.prepare(device=...)"
    if problem.options.out_dtype not in FLOAT_DTYPES:
        return f"writes bfloat16, float16 or float32, not {problem.options.out_dtype}"
    if problem.routing_block_m % min(DECODE_BLOCKS_M):
        return f"needs routing_block_m to be a multiple of {min(DECODE_BLOCKS_M)}"
    if problem.num_tokens * problem.hidden_size * 4 >= _MOST_BYTES:
        return f"takes fewer than {_MOST_BYTES // 4} activations"
    return None


def weight_rows(problem: MoEProblem, op: Op) -> int:
    """Weight rows of a stage: gates and ups, or outputs."""
    return 2 * problem.intermediate_size if op is Op.MOE_GATE_UP else problem.hidden_size


def depth(problem: MoEProblem, op: Op) -> int:
    """Contracted dimension of a stage."""
    return problem.hidden_size if op is Op.MOE_GATE_UP else problem.intermediate_size


def units(problem: MoEProblem, op: Op) -> tuple[int, int]:
    """Units of 64 weight rows and of 128 elements of depth of a stage."""
    return -(-weight_rows(problem, op) // UNIT_ROWS), -(-depth(problem, op) // UNIT_CODES)


def block_m_for(problem: MoEProblem) -> int:
    """Rows of a decode tile: the fewest that hold the rows of an average expert, or the most."""
    rows = problem.rows_per_expert
    return next((block for block in DECODE_BLOCKS_M if rows <= block), DECODE_BLOCKS_M[-1])


@functools.cache
def decode_config(problem: MoEProblem, op: Op, block_m: int) -> Cdna4GemmConfig:
    """Decode config of a stage.

    Four waves of 64 weight rows. Where that leaves CUs without work, the waves of a workgroup share
    the depth instead, and then workgroups do.
    """
    row_units, depth_units = units(problem, op)
    blocks = problem.hit_experts * max(1, round(problem.rows_per_expert / block_m))
    wanted = problem.target.num_sms * _RESIDENT_WAVES
    waves = blocks * row_units
    k_slices = 4 if waves * 2 <= wanted and depth_units >= 4 * _MIN_UNITS_PER_SPLIT else 1
    k_splits = max(
        1, min(wanted // (waves * k_slices), depth_units // (k_slices * _MIN_UNITS_PER_SPLIT))
    )
    return Cdna4GemmConfig(
        Cdna4Kernel.DECODE,
        block_m,
        block_n=4 // k_slices * UNIT_ROWS,
        num_warps=4,
        num_stages=4,
        k_splits=k_splits,
        k_slices=k_slices,
    )


def prefill_blocks(activation_format: str) -> tuple[int, ...]:
    """Sorted rows that a prefill tile may have with these activations."""
    return PREFILL_BLOCKS_M[1:] if activation_format == "bf16" else PREFILL_BLOCKS_M


def prefill_block_m(problem: MoEProblem) -> int | None:
    """Rows of a prefill tile that serves an average expert fastest; None for the decode kernel.

    The decode kernel has the experts with few rows.
    """
    rows = problem.rows_per_expert
    if rows <= DECODE_BLOCKS_M[-1]:
        return None
    activation_format = problem.options.activation_format
    cycles = _STEP_CYCLES["mxfp8" if activation_format == "fp8_token" else activation_format]
    return min(cycles, key=lambda block: -(-rows // block) * cycles[block])


def stage_heuristic(problem: MoEProblem) -> Cdna4GemmConfig:
    """Config of a separate stage: block_m must divide the plan's routing_block_m."""
    wanted = prefill_block_m(problem)
    if wanted is not None:
        blocks = prefill_blocks(problem.options.activation_format)
        allowed = [b for b in blocks if problem.routing_block_m % b == 0 and b <= wanted]
        if allowed:
            return prefill_config(allowed[-1])
    allowed = [rows for rows in DECODE_BLOCKS_M if problem.routing_block_m % rows == 0]
    block_m = max(rows for rows in allowed if rows <= max(block_m_for(problem), min(allowed)))
    return decode_config(problem, problem.op, block_m)


def stage_configs(problem: MoEProblem) -> Iterator[Cdna4GemmConfig]:
    """The heuristic's config and all others of the stage."""
    first = stage_heuristic(problem)
    yield first
    allowed = [rows for rows in DECODE_BLOCKS_M if problem.routing_block_m % rows == 0]
    others = [
        *_decode_configs(problem, problem.op, allowed),
        *(c for c in _prefill_configs(problem) if problem.routing_block_m % c.block_m == 0),
    ]
    yield from (config for config in others if config != first)


def _prefill_configs(problem: MoEProblem) -> Iterator[Cdna4GemmConfig]:
    yield from map(prefill_config, prefill_blocks(problem.options.activation_format))


def _decode_configs(problem: MoEProblem, op: Op, blocks_m: list[int]) -> Iterator[Cdna4GemmConfig]:
    _, depth_units = units(problem, op)
    for block_m, k_slices, num_stages, k_splits in itertools.product(
        blocks_m, (1, 2, 4), (2, 4), (1, 2, 3, 4, 6, 8)
    ):
        if k_slices * k_splits == 1 or depth_units >= k_slices * k_splits * 2:
            yield Cdna4GemmConfig(
                Cdna4Kernel.DECODE,
                block_m,
                4 // k_slices * UNIT_ROWS,
                4,
                num_stages,
                k_splits,
                k_slices,
            )


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a layer: one row block for the plan and both stages."""
    block_m = prefill_block_m(problem)
    if block_m is not None:
        return MoEConfig(block_m, prefill_config(block_m), prefill_config(block_m))
    block_m = block_m_for(problem)
    gate_up, down = (decode_config(problem, op, block_m) for op in STAGE_OPS)
    return MoEConfig(block_m, gate_up, down)


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """Configs of a layer, varying one stage at a time, since the times of the stages add up."""
    configs = [layer_heuristic(problem)]
    configs += [MoEConfig(each.block_m, each, each) for each in _prefill_configs(problem)]
    for block_m in DECODE_BLOCKS_M:
        gate_up, down = (decode_config(problem, op, block_m) for op in STAGE_OPS)
        for config in _decode_configs(problem, Op.MOE_GATE_UP, [block_m]):
            configs.append(MoEConfig(block_m, config, down))
        for config in _decode_configs(problem, Op.MOE_DOWN, [block_m]):
            configs.append(MoEConfig(block_m, gate_up, config))
    yield from dict.fromkeys(configs)


def iterations_per_copy(config: Cdna4GemmConfig, activation_format: str) -> int:
    """Iterations that a copy of a decode tile's activations lasts.

    A wave waits for all of its loads at the end of a copy. Two copies must leave room in LDS for
    another workgroup. An iteration is four units of depth for each slice, 4 KB of e2m1 for 16 rows.

    Modelled with 16 rows (Triton 3.6.0): four iterations instead of one give 1 % more bandwidth,
    with MXFP4 activations as with MXFP8.
    """
    bits = {"mxfp4": 4, "bf16": 16}.get(activation_format, 8)
    bytes_each = config.block_m * config.k_slices * 4 * UNIT_CODES * bits // 8
    most = 1 if activation_format == "bf16" else 4
    return max(1, min(most, _COPY_BYTES // bytes_each))


_COPY_BYTES = 32 * 1024
"""Bytes of a copy of activations, unless an iteration needs more."""


def prefill_config(block_m: int) -> Cdna4GemmConfig:
    """Prefill config of a stage: two waves on each SIMD, or one in a tile of 64 rows."""
    return Cdna4GemmConfig(
        Cdna4Kernel.PREFILL,
        block_m,
        PREFILL_BLOCK_N,
        num_warps=4 if block_m == min(PREFILL_BLOCKS_M) else 8,
        num_stages=3,
    )


def require_valid(config: Cdna4GemmConfig, problem: MoEProblem) -> None:
    """Raise ValueError for a pinned or tuned config that no kernel of this backend implements."""
    if config.kernel is Cdna4Kernel.PREFILL:
        activation_format = problem.options.activation_format
        tiles = [prefill_config(rows) for rows in prefill_blocks(activation_format)]
        need = f"with {activation_format} activations one of {tiles}"
        valid = config in tiles
    else:
        need = (
            f"block_m in {DECODE_BLOCKS_M}, num_stages 2 or 4, num_warps and k_slices powers of "
            "two up to 8, and block_n = 64 * num_warps / k_slices"
        )
        valid = _is_valid_decode(config)
    require(
        valid,
        problem.op.value,
        "config",
        got=config,
        need=need,
        remedy="take one from the kernel's configs()",
    )


def _is_valid_decode(config: Cdna4GemmConfig) -> bool:
    waves = config.num_warps // config.k_slices
    return (
        config.block_m in DECODE_BLOCKS_M
        and config.num_warps in (1, 2, 4, 8)
        and config.k_slices in (1, 2, 4, 8)
        and config.num_stages in (2, 4)
        and config.block_n == waves * UNIT_ROWS > 0
    )
