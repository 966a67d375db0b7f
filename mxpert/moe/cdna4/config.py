"""Choice of kernels and tiles for the gfx950 MoE GEMMs, and the check of configs."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from ...core.problem import MoEConfig, MoEProblem, Op
from ...core.stage_configs import (
    StageConfig,
    WeightCache,
    other_weight_caches,
    require_integers,
    require_positive,
    set_member,
)
from ...errors import message, require
from ...formats.layouts import UNIT_CODES, UNIT_ROWS
from ...formats.spec import FLOAT_DTYPES, MXFP4
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


_TILE_SIZES = ("block_m", "block_n", "num_warps", "num_stages", "k_splits", "k_slices")


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
        weight_cache: whether weights stay in the caches, or its name.
        group_m: row blocks whose tiles of the same weights follow each other, and find them in L2.
            The decode kernel has one.
        num_runs: equal runs of tiles that workgroups take in turn. With 8 each die has a run of
            neighbouring tiles, as in the decode kernel; with 1 workgroups follow one order.
        persistent: whether as many workgroups start as are resident at once, and each computes
            several tiles. The decode kernel has a workgroup for each tile.

    Raises:
        TypeError: a value of another type.
        ValueError: an unknown name, or a size below 1. An op raises it too for a tile that the
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
    weight_cache: WeightCache = WeightCache.KEEP
    group_m: int = 1
    num_runs: int = 8
    persistent: bool = False

    def __post_init__(self) -> None:
        set_member(self, "kernel", Cdna4Kernel)
        set_member(self, "weight_cache", WeightCache)
        if type(self.persistent) is not bool:
            got = repr(self.persistent)
            raise TypeError(message("Cdna4GemmConfig", "persistent", "a bool", got))
        sizes = (*_TILE_SIZES, "group_m", "num_runs")
        require_integers(self, sizes)
        for name in sizes:
            require_positive(self, name)


STAGE_OPS = (Op.MOE_GATE_UP, Op.MOE_DOWN)
"""Both stages of a layer."""

DECODE_BLOCKS_M = (16, 32)
"""Rows of a decode tile: the N of one or two MFMA."""

_MOST_BYTES = 1 << 31
"""Activations and float32 outputs must have fewer bytes: offsets of buffers have 31 bits."""

_LOW_BLOCK_M, PREFILL_BLOCK_N = 64, 256
"""Sorted rows of a prefill tile with four waves, and weight rows of all."""
PREFILL_GROUP_M = 8
"""`group_m` of the heuristic."""

_STEP_CYCLES = {
    "bf16": {256: 4168, 128: 2084},
    "mxfp4": {64: 790, 128: 747, 256: 1084},
    "mxfp8": {64: 658, 128: 1052, 256: 2066},
    "mxfp8 mxfp8_e4m3": {128: 1321},
}
"""Modelled cycles of a CU for 128 elements of depth of a prefill tile (Triton 3.6.0, L2 hits), by
activations, and weights other than MXFP4. Formats without an entry have the decode kernel alone.

The first of equals is chosen. 32 rows of the decode kernel take 1220 cycles with bf16, with MXFP8
weights 934 and 1478. There 256 rows do not fit into LDS, and 64 take 1519 cycles."""

_RASTERS = ((1, 1), (2, 4), (4, 8), (16, 8), (8, 1))
"""`group_m` and `num_runs` that the tuner tries. FlyDSL's stage 2 has the second."""

_PERSISTENT_EXPERTS, _PERSISTENT_TOKENS, _PERSISTENT_SIZE = 256, 4096, 3072
"""Least experts and tokens, and largest intermediate size, of a persistent stage 2."""

_TILE_RESIDUAL = 0.066
"""Worst residual of the cycle model on AMD's measurements of tiles, as a part of MFMA's peak."""

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
    if problem.weight_format not in CDNA4_FRAGMENT.formats:
        format = problem.weight_format
        return f"multiplies MXFP4 and MXFP8 weights; {format} runs on portable kernels"
    if problem.weight_layout is not CDNA4_FRAGMENT:
        return "needs weights in CDNA4_FRAGMENT layout: call weights.prepare(device=...)"
    if problem.options.out_dtype not in FLOAT_DTYPES:
        return f"writes bfloat16, float16 or float32, not {problem.options.out_dtype}"
    if problem.routing_block_m % min(DECODE_BLOCKS_M):
        return f"needs routing_block_m to be a multiple of {min(DECODE_BLOCKS_M)}"
    if problem.op is not Op.FUSED_MOE and problem.num_tokens > most_tokens(problem):
        return (
            f"takes fewer than {_MOST_BYTES // 4} activations in a stage; call fused_moe, or the "
            "stages with fewer tokens at a time"
        )
    return None


def most_tokens(problem: MoEProblem) -> int:
    """Most tokens whose activations and float32 outputs offsets reach."""
    return (_MOST_BYTES - 1) // (problem.hidden_size * 4)


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


def weight_cache_for(problem: MoEProblem, block_m: int) -> WeightCache:
    """STREAM if an average expert has one row block at most: no other tile reads its weights.

    The authors of FlyDSL's MoE kernels (pull request 753) measured on gfx950 that streaming takes 7
    to 13 % less time up to there, and 6 to 25 % more beyond.
    """
    return WeightCache.STREAM if problem.rows_per_expert <= block_m else WeightCache.KEEP


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
        num_stages=_decode_stages(problem, block_m),
        k_splits=k_splits,
        k_slices=k_slices,
        weight_cache=weight_cache_for(problem, block_m),
    )


def _decode_stages(problem: MoEProblem, block_m: int) -> int:
    """Units of weights in flight of a wave.

    Four of MXFP8 weights need too many registers beside 32 rows of bf16 for a second workgroup.
    """
    many = problem.weight_format != MXFP4.name and block_m > min(DECODE_BLOCKS_M)
    return 2 if many and problem.options.activation_format == "bf16" else 4


def prefill_blocks(problem: MoEProblem) -> tuple[int, ...]:
    """Sorted rows that a prefill tile may have with the formats of a problem."""
    return tuple(sorted(_step_cycles(problem)))


def _step_cycles(problem: MoEProblem) -> dict[int, int]:
    """`_STEP_CYCLES` of a problem's formats."""
    rows, weights = problem.options.activation_format, problem.weight_format
    rows = "mxfp8" if rows == "fp8_token" else rows
    return _STEP_CYCLES.get(rows if weights == MXFP4.name else f"{rows} {weights}", {})


def prefill_block_m(problem: MoEProblem) -> int | None:
    """Rows of a prefill tile that serves an average expert fastest; None for the decode kernel.

    The decode kernel has the experts with few rows.
    """
    rows = problem.rows_per_expert
    cycles = _step_cycles(problem)
    if rows <= DECODE_BLOCKS_M[-1] or not cycles:
        return None
    return min(cycles, key=lambda block: -(-rows // block) * cycles[block])


def _prefill_cycles(problem: MoEProblem, op: Op, block_m: int) -> int:
    """Modelled cycles of a stage: each CU computes one tile after the other."""
    row_units, depth_units = units(problem, op)
    tiles = problem.hit_experts * math.ceil(problem.rows_per_expert / block_m)
    rounds = -(-tiles * -(-row_units * UNIT_ROWS // PREFILL_BLOCK_N) // problem.target.num_sms)
    return rounds * depth_units * _step_cycles(problem)[block_m]


def prefill_blocks_m(problem: MoEProblem) -> tuple[int, int] | None:
    """Rows of the prefill tiles of both stages; None for the decode kernel.

    The stages have different numbers of weight rows, so the last tiles of one can leave many CUs
    idle where those of the other do not. Each gets a tile of its own where that saves more of the
    modelled cycles than the model's worst residual on tiles.
    """
    common = prefill_block_m(problem)
    if common is None:
        return None
    apart = [
        min(_step_cycles(problem), key=functools.partial(_prefill_cycles, problem, op))
        for op in STAGE_OPS
    ]

    def cycles(blocks: Iterable[int]) -> int:
        return sum(map(functools.partial(_prefill_cycles, problem), STAGE_OPS, blocks))

    gain = 1 - cycles(apart) / cycles((common, common))
    return (apart[0], apart[1]) if gain > _TILE_RESIDUAL else (common, common)


def stage_heuristic(problem: MoEProblem) -> Cdna4GemmConfig:
    """Config of a separate stage: block_m must divide the plan's routing_block_m."""
    pair = prefill_blocks_m(problem)
    if pair is not None:
        wanted = pair[STAGE_OPS.index(problem.op)]
        blocks = prefill_blocks(problem)
        allowed = [b for b in blocks if problem.routing_block_m % b == 0 and b <= wanted]
        if allowed:
            return _prefill_config(problem, problem.op, allowed[-1])
    allowed = [rows for rows in DECODE_BLOCKS_M if problem.routing_block_m % rows == 0]
    block_m = max(rows for rows in allowed if rows <= max(block_m_for(problem), min(allowed)))
    return decode_config(problem, problem.op, block_m)


def stage_configs(problem: MoEProblem) -> Iterator[Cdna4GemmConfig]:
    """The heuristic's config and all others of the stage."""
    first = stage_heuristic(problem)
    yield first
    allowed = [rows for rows in DECODE_BLOCKS_M if problem.routing_block_m % rows == 0]
    others = [
        *_variants(problem, first),
        *_decode_configs(problem, problem.op, allowed),
        *(
            c
            for c in _prefill_configs(problem, problem.op)
            if problem.routing_block_m % c.block_m == 0
        ),
    ]
    yield from (config for config in others if config != first)


def _variants(problem: MoEProblem, config: Cdna4GemmConfig) -> Iterator[Cdna4GemmConfig]:
    """The same tile with another cache policy, order of tiles, or grid."""
    yield replace(config, weight_cache=config.weight_cache.other)
    if config.kernel is Cdna4Kernel.PREFILL:
        if problem.options.activation_format != "bf16":
            yield replace(config, persistent=not config.persistent)
        for group_m, num_runs in _RASTERS:
            yield replace(config, group_m=group_m, num_runs=num_runs)


def _prefill_configs(problem: MoEProblem, op: Op) -> Iterator[Cdna4GemmConfig]:
    for block_m in prefill_blocks(problem):
        yield _prefill_config(problem, op, block_m)


def _prefill_config(problem: MoEProblem, op: Op, block_m: int) -> Cdna4GemmConfig:
    """Prefill config of a stage."""
    config = prefill_config(block_m, weight_cache_for(problem, block_m))
    return replace(config, persistent=_is_persistent(problem, op))


def _is_persistent(problem: MoEProblem, op: Op) -> bool:
    """Whether stage 2 has a persistent grid: many experts of a small size, and many tokens.

    The grid of the others is sized for the worst case, in which every expert has a row block that
    is almost empty: up to half of its workgroups have no tile. The authors of FlyDSL's MoE kernels
    (pull request 753) measured 5 to 17 % less time on gfx950 for stage 2 of such models from 4096
    tokens on, and left that of gpt-oss as it was. Bfloat16 activations have the one-shot grid.
    """
    return (
        op is Op.MOE_DOWN
        and problem.options.activation_format != "bf16"
        and problem.num_experts >= _PERSISTENT_EXPERTS
        and problem.num_tokens >= _PERSISTENT_TOKENS
        and problem.intermediate_size <= _PERSISTENT_SIZE
    )


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
                weight_cache_for(problem, block_m),
            )


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a layer; the plan's row block is the smallest that serves both stages."""
    blocks = prefill_blocks_m(problem)
    if blocks is not None:
        gate_up, down = map(functools.partial(_prefill_config, problem), STAGE_OPS, blocks)
        return MoEConfig.of(gate_up, down)
    block_m = block_m_for(problem)
    gate_up, down = (decode_config(problem, op, block_m) for op in STAGE_OPS)
    return MoEConfig(block_m, gate_up, down)


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """Configs of a layer, varying one stage at a time, since the times of the stages add up.

    Other cache policies, orders of tiles and grids are tried with the heuristic's tiles, and each
    pair of row blocks with the config that the heuristic has for them.
    """
    first = layer_heuristic(problem)
    configs = [first, *other_weight_caches(first)]
    gate_up, down = cast("tuple[Cdna4GemmConfig, Cdna4GemmConfig]", (first.gate_up, first.down))
    configs += [replace(first, gate_up=each) for each in _variants(problem, gate_up)]
    configs += [replace(first, down=each) for each in _variants(problem, down)]
    gate_ups, downs = (
        [
            *(decode_config(problem, op, rows) for rows in DECODE_BLOCKS_M),
            *_prefill_configs(problem, op),
        ]
        for op in STAGE_OPS
    )
    configs += itertools.starmap(MoEConfig.of, itertools.product(gate_ups, downs))
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


def prefill_config(block_m: int, weight_cache: WeightCache = WeightCache.KEEP) -> Cdna4GemmConfig:
    """Prefill config of a stage: two waves on each SIMD, or one in a tile of 64 rows."""
    return Cdna4GemmConfig(
        Cdna4Kernel.PREFILL,
        block_m,
        PREFILL_BLOCK_N,
        num_warps=4 if block_m == _LOW_BLOCK_M else 8,
        num_stages=3,
        weight_cache=weight_cache,
        group_m=PREFILL_GROUP_M,
    )


def resident_workgroups(config: Cdna4GemmConfig, x_format: str) -> int:
    """Workgroups of the prefill kernel that the LDS of a CU holds: 160 KiB."""
    return 2 if config.block_m == 64 and x_format != "e2m1" else 1


def require_valid(config: Cdna4GemmConfig, problem: MoEProblem) -> None:
    """Raise ValueError for a pinned or tuned config that no kernel of this backend implements."""
    if config.kernel is Cdna4Kernel.PREFILL:
        activation_format = problem.options.activation_format
        tiles = [prefill_config(rows) for rows in prefill_blocks(problem)]
        need = f"with {activation_format} activations the tile of one of {tiles}"
        valid = any(
            all(getattr(config, name) == getattr(tile, name) for name in _TILE_SIZES)
            for tile in tiles
        )
        if activation_format == "bf16" and config.persistent:
            need, valid = "with bf16 activations persistent=False", False
    else:
        need = (
            f"block_m in {DECODE_BLOCKS_M}, num_stages 2 or 4, num_warps and k_slices powers of "
            "two up to 8, block_n = 64 * num_warps / k_slices, group_m = 1, num_runs = 8, and not "
            "persistent"
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
        and (config.group_m, config.num_runs, config.persistent) == (1, 8, False)
    )
