"""Tile choice for the portable MoE kernels; heuristic and tuner share one validity rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import triton

from ...core.problem import GemmConfig, MoEConfig, MoEProblem, Op, Target, WeightCache
from ...core.stage_configs import other_weight_caches
from ...device.targets import has_mma_sync_only, has_tcgen05, has_wgmma, refuse_without
from ...device.tile_rules import (
    EPILOGUE_BYTES,
    MIN_BLOCK_M,
    invalid_tile,
    num_threads,
    require_config,
    shrink_until_valid,
    without_scaled_mfma,
)
from ...formats.spec import FLOAT_DTYPES, MXFP4, MXFP8_E4M3
from ...formats.tensor import Layout
from ...formats.token import FP8_TOKEN
from ...formats.weight_tensor import WEIGHT_FORMATS

BLOCKS_M = (MIN_BLOCK_M, 32, 64, 128)
SPLITS = (1, 2, 4, 8)

VALUE_BYTES = {"bf16": 2.0, "mxfp8": 1.0, "mxfp4": 0.5, FP8_TOKEN: 1.0}
"""Bytes per activation in shared memory."""


WEIGHT_BYTES = {"mxfp8_e4m3": 1.0}
"""Bytes per weight; the other formats have two weights a byte."""


def decodes_mxfp8(target: Target) -> bool:
    """Whether MXFP8 weights are decoded by `group_tiles`, and not by `tl.dot_scaled`.

    Without block-scaled MMA both multiply in bf16, and Triton's own decoding is slower.
    """
    return target.kind == "cuda" and not has_tcgen05(target)


def _is_decoded(target: Target, weight_format: str) -> bool:
    """Whether `group_tiles` decodes these weights."""
    by_choice = weight_format == MXFP8_E4M3.name and decodes_mxfp8(target)
    return by_choice or weight_format in WEIGHT_FORMATS


def projections(op: Op, has_gate: bool = True) -> int:
    """Weight rows per output column: gate and up in stage 1; one in stage 2 and without gate."""
    return 2 if op is Op.MOE_GATE_UP and has_gate else 1


def unsupported(problem: MoEProblem) -> str | None:
    """Why the kernels cannot serve `problem`, as a phrase; None if they can."""
    options = problem.options
    refused = refuse_without(problem.target, "scaled MFMA")
    if refused:
        return refused
    if options.out_dtype not in FLOAT_DTYPES:
        return (
            f"writes bfloat16, float16 or float32, not {options.out_dtype}; pass one as out_dtype"
        )
    if problem.weight_layout is not Layout.ROW_MAJOR:
        return (
            f"reads ROW_MAJOR weights, got {problem.weight_layout.name}; call weights.unprepare()"
        )
    if problem.routing_block_m % MIN_BLOCK_M:
        return (
            f"needs routing_block_m in multiples of {MIN_BLOCK_M}, not {problem.routing_block_m}; "
            "make the plan with one"
        )
    return None


def shared_memory(
    target: Target,
    op: Op,
    activation_format: str,
    config: GemmConfig,
    has_gate: bool = True,
    weight_format: str = MXFP4.name,
) -> int:
    """Upper estimate of the shared memory of one program, in bytes.

    A pipeline stage holds the tiles of activations and weights in their memory format, and their
    scales. With tcgen05 e2m1 weights with e4m3 activations take one byte a code. With wgmma MX
    activations are also stored in shared memory as bf16, and where weights are no MX format, on
    every GPU. After the loop the epilogue may use shared memory to transpose the float32
    accumulator.
    """
    rows, depth = config.block_m, config.block_k
    weight_rows = projections(op, has_gate) * config.block_n
    widened = has_tcgen05(target) and activation_format in ("mxfp8", FP8_TOKEN)
    weight_bytes = 1.0 if widened else WEIGHT_BYTES.get(weight_format, 0.5)
    of_groups = WEIGHT_FORMATS.get(weight_format)
    scales = weight_rows * depth // 32
    if of_groups is not None:  # INT4: a float32 scale and a zero point for each step
        scales = weight_rows * (5 if of_groups.is_integer else depth // of_groups.group_size)
    if target.kind == "hip" and weight_format == MXFP8_E4M3.name:
        scales += weight_rows * depth // 64  # Triton 3.9 pads the rows of the weights
    stage = (
        int(rows * depth * VALUE_BYTES[activation_format])
        + int(weight_rows * depth * weight_bytes)
        + rows * depth // 32
        + scales
    )
    by_hand = _is_decoded(target, weight_format)
    stored = activation_format != "bf16" and (has_wgmma(target) or by_hand)
    decoded = rows * depth * 2 if stored else 0
    if by_hand and not has_wgmma(target):
        decoded += weight_rows * depth * 2
    loop = config.num_stages * stage + decoded
    return max(loop, rows * weight_rows * 4) + EPILOGUE_BYTES


def can_stream(target: Target) -> bool:
    """Whether loads of weights can leave the caches first.

    On NVIDIA the pipeliner makes them asynchronous copies, which drop Triton's eviction policy
    (Triton 3.6.0, compiled for sm_90).
    """
    return target.kind != "cuda"


def invalid(
    target: Target,
    op: Op,
    activation_format: str,
    config: GemmConfig,
    has_gate: bool = True,
    weight_format: str = MXFP4.name,
) -> str | None:
    """Why `config` cannot run, as a phrase; None if it can. Tuner and heuristic both use this."""
    of_groups = WEIGHT_FORMATS.get(weight_format)
    if of_groups is not None and of_groups.is_integer and of_groups.group_size % config.block_k:
        return f"block_k must divide the weights' group of {of_groups.group_size}"
    memory = shared_memory(target, op, activation_format, config, has_gate, weight_format)
    least = 64 if of_groups is None else 32
    width = projections(op, has_gate) * config.block_n
    reason = invalid_tile(target, config, width, memory, least)
    by_hand = _is_decoded(target, weight_format)
    decodes = target.kind == "cuda" and activation_format == "mxfp4" and not by_hand
    few = config.block_m * config.block_k < 8 * num_threads(target, config)
    if reason is None and decodes and few:
        return "fewer than 8 activations a thread: fewer warps or a larger tile"
    if reason is None and config.weight_cache is WeightCache.STREAM and not can_stream(target):
        return "weight_cache stream needs an AMD GPU: set it to keep"
    if reason is None and not by_hand and activation_format != "bf16":
        return without_scaled_mfma(target, config)
    return reason


@functools.cache
def require_valid(
    target: Target,
    op: Op,
    activation_format: str,
    config: GemmConfig,
    has_gate: bool = True,
    weight_format: str = MXFP4.name,
) -> None:
    """Raise ValueError for a config (pinned or from a table) that `invalid` refuses."""
    reason = invalid(target, op, activation_format, config, has_gate, weight_format)
    require_config(op, config, reason)


def block_m_for(rows_per_expert: float) -> int:
    """Smallest row block that holds the rows of an average expert, at most 128.

    A half-empty block wastes MMA on padding; a second block reads the expert's weights again.
    """
    return next((block for block in BLOCKS_M if rows_per_expert <= block), BLOCKS_M[-1])


def stage_dimensions(problem: MoEProblem, op: Op) -> tuple[int, int]:
    """Output columns (stage 1: features, not gate and up rows) and reduction length of a stage."""
    sizes = (problem.intermediate_size, problem.hidden_size)
    return sizes if op is Op.MOE_GATE_UP else sizes[::-1]


def gemm_heuristic(problem: MoEProblem, op: Op, block_m: int) -> GemmConfig:
    """Config of one stage for a given row block.

    128 weight rows a tile in both stages: the height of Blackwell's block-scaled MMA and of two
    Hopper warpgroups. Eight warps on NVIDIA keep the decoded weights in registers without spills
    (sm_90, compiled: 98 to 255 registers over all formats; four warps spill from 64 rows on), with
    half the K step at 128 rows. Where warps multiply operands in registers (mma.sync), the K step
    is halved from 32 rows on, and a tile of 128 rows has 64 weight rows: 90 to 221 registers, no
    spills (sm_80, sm_86, sm_89, sm_120; compiled, not run). group_m is 1 where an expert has one
    row block, so that no weight is read twice. Otherwise eight row blocks share each weight tile in
    L2.

    Weights of NVFP4, INT4 and MXFP8 may be decoded in registers (`group_tiles`): on gfx950 the K
    step is halved, since one of 128 spills up to 17 registers with INT4, and on NVIDIA from 64 rows
    on (H100, NVFP4, Qwen3-30B-A3B, T = 1024: 777 to 567 µs). A step of INT4 is at most a group, and
    four warps are faster for it below 128 rows (T = 16: 247 to 204 µs).
    """
    target, name = problem.target, problem.options.activation_format
    has_gate, format = problem.options.activation.is_gated, problem.weight_format
    columns, depth = stage_dimensions(problem, op)
    by_warp = has_mma_sync_only(target)
    block_n = (64 if by_warp and block_m >= 128 else 128) // projections(op, has_gate)
    halved = target.kind == "cuda" and block_m >= (32 if by_warp else 128)
    block_k, of_groups = 64 if halved else 128, WEIGHT_FORMATS.get(format)
    is_integer = of_groups is not None and of_groups.is_integer
    if _is_decoded(target, format) and (target.kind == "hip" or (block_m >= 64 and not is_integer)):
        block_k = 64
    if of_groups is not None and of_groups.is_integer:
        block_k = min(block_k, of_groups.group_size)
    few_warps = is_integer and target.kind == "cuda" and block_m < 128
    config = GemmConfig(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=4 if (target.kind == "hip" and block_m < 128) or few_warps else 8,
        num_stages=4,
        group_m=1 if problem.rows_per_expert <= block_m else 8,
        split_k=split_k_for(problem, block_m, block_n, columns, depth),
    )
    return shrink_until_valid(config, lambda c: invalid(target, op, name, c, has_gate, format))


def split_k_for(problem: MoEProblem, block_m: int, block_n: int, columns: int, depth: int) -> int:
    """Splits of K if there are fewer tiles than SMs.

    There are at most two programs per SM, and each split has at least four K steps.
    """
    num_sms = problem.target.num_sms
    blocks = problem.hit_experts * max(1, round(problem.rows_per_expert / block_m))
    tiles = blocks * triton.cdiv(columns, block_n)
    steps = triton.cdiv(depth, 128)
    return max(
        split
        for split in SPLITS
        if split == 1 or (tiles < num_sms and split * tiles <= 2 * num_sms and steps // split >= 4)
    )


def stage_block_m(problem: MoEProblem) -> int:
    """Row block of a separate stage.

    The largest that divides routing_block_m and is at most the choice of `block_m_for`.
    """
    wanted = block_m_for(problem.rows_per_expert)
    return max(b for b in BLOCKS_M if problem.routing_block_m % b == 0 and b <= max(wanted, 16))


def stage_configs(problem: MoEProblem, op: Op, blocks_m: Iterable[int]) -> Iterator[GemmConfig]:
    """Every valid config of a stage in the tuner's grid."""
    target, name = problem.target, problem.options.activation_format
    has_gate, format = problem.options.activation.is_gated, problem.weight_format
    _, depth = stage_dimensions(problem, op)
    depths = (32, 64, 128) if format.startswith("int4") else (64, 128, 256)
    grid = itertools.product(
        blocks_m, (32, 64, 128, 256), depths, (4, 8), (2, 3, 4, 5), (1, 8), SPLITS
    )
    for block_m, block_n, block_k, num_warps, num_stages, group_m, split_k in grid:
        config = GemmConfig(block_m, block_n, block_k, num_warps, num_stages, group_m, split_k)
        enough_steps = split_k == 1 or depth // block_k >= 2 * split_k
        if enough_steps and invalid(target, op, name, config, has_gate, format) is None:
            yield config


def layer_heuristic(problem: MoEProblem) -> MoEConfig:
    """Config of a whole layer: one row block for the plan and both stages."""
    block_m = block_m_for(problem.rows_per_expert)
    return MoEConfig(
        block_m,
        gemm_heuristic(problem, Op.MOE_GATE_UP, block_m),
        gemm_heuristic(problem, Op.MOE_DOWN, block_m),
    )


def layer_configs(problem: MoEProblem) -> Iterator[MoEConfig]:
    """Configs of a layer, varying one stage at a time, since the times of the stages add up.

    Streamed weights are tried with the heuristic's tiles, and each pair of different row blocks
    with the tiles that the heuristic has for them.
    """
    first = layer_heuristic(problem)
    yield first
    if can_stream(problem.target):
        yield from other_weight_caches(first)
    for rows, other in itertools.permutations(BLOCKS_M, 2):
        yield MoEConfig.of(
            gemm_heuristic(problem, Op.MOE_GATE_UP, rows),
            gemm_heuristic(problem, Op.MOE_DOWN, other),
        )
    for block_m in BLOCKS_M:
        gate_up = gemm_heuristic(problem, Op.MOE_GATE_UP, block_m)
        down = gemm_heuristic(problem, Op.MOE_DOWN, block_m)
        for config in stage_configs(problem, Op.MOE_GATE_UP, (block_m,)):
            yield MoEConfig(block_m, config, down)
        for config in stage_configs(problem, Op.MOE_DOWN, (block_m,)):
            yield MoEConfig(block_m, gate_up, config)
