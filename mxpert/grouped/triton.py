"""Host side of GROUPED_GEMM and GROUPED_WGRAD on Triton; no synchronisation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import GemmConfig, GroupedProblem, Op, Target, WeightCache, resident_programs
from ..device.groups import group_block, refuse_groups
from ..device.targets import decodes_fp8, has_mma_sync_only, has_tcgen05, has_wgmma
from ..device.tile_rules import (
    EPILOGUE_BYTES,
    invalid_tile,
    require_config,
    shrink_until_valid,
    without_scaled_mfma,
)
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, get_format
from ..formats.tensor import MXTensor, Operand
from .host import Grouped, GroupedGemm, GroupedWgrad
from .triton_kernels import _grouped_gemm_kernel, _grouped_wgrad_kernel

# ---- Tile choice for the portable grouped GEMMs; heuristic and tuner share one validity rule.

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
    if config.weight_cache is not WeightCache.KEEP:
        return f"needs weight_cache keep, got {config.weight_cache.value}"
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


class _Grouped(Grouped):
    """Base class of both GEMMs: supported problems and choice of tiles."""

    backend = "triton"

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.out_dtype not in FLOAT_DTYPES:
            return (
                f"writes bfloat16, float16 or float32, not {problem.out_dtype}; "
                "pass one as out_dtype"
            )
        # The number of groups does not limit wgrad: a program reads two offsets only.
        searched = problem.num_groups if problem.op is Op.GROUPED_GEMM else 0
        return refuse_groups(problem.target, searched)

    def configs(self, problem: GroupedProblem) -> Iterator[GemmConfig]:
        """Every valid config of the tuner's grid, the heuristic's first."""
        yield heuristic(problem)
        yield from configs(problem)

    def heuristic(self, problem: GroupedProblem) -> GemmConfig:
        """The config used if the tuned table has no row for `problem`."""
        return heuristic(problem)

    def require_valid(self, problem: GroupedProblem, config: GemmConfig) -> None:
        require_valid(problem, config)


class _GroupedGemm(_Grouped, GroupedGemm):
    def multiply(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        out: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        a_data, a_scale, a_strides = _parts(a)
        b_data, b_scale, b_strides = _parts(b)
        _gemm_launch(problem, config, a_strides, b_strides)(
            c_ptr=out,
            a_ptr=a_data,
            a_scale_ptr=a_scale,
            b_ptr=b_data,
            b_scale_ptr=b_scale,
            group_offsets_ptr=offsets,
        )


@functools.lru_cache(CACHED_LAUNCHES)
def _gemm_launch(
    problem: GroupedProblem,
    config: GemmConfig,
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
) -> Launch:
    # An upper bound of the number of tiles, without the groups' sizes: each group, and the rows
    # without a group, add at most one ragged tile; a tile has at least one row.
    row_tiles = triton.cdiv(problem.num_rows, config.block_m) + problem.num_groups
    row_tiles = min(row_tiles, problem.num_rows)
    a_m, a_k, a_scale_m, a_scale_k = a_strides
    b_g, b_n, b_k, b_scale_g, b_scale_n, b_scale_k = b_strides
    if not problem.trans_b:
        b_n, b_k, b_scale_n, b_scale_k = b_k, b_n, b_scale_k, b_scale_n
    grid, num_tiles = _grid(problem, row_tiles * triton.cdiv(problem.n, config.block_n))
    return Launch(
        _grouped_gemm_kernel,
        grid,
        num_tiles=num_tiles,
        num_rows=problem.num_rows,
        num_groups=problem.num_groups,
        num_n=problem.n,
        num_k=problem.k,
        a_stride_m=a_m,
        a_stride_k=a_k,
        a_scale_stride_m=a_scale_m,
        a_scale_stride_k=a_scale_k,
        b_stride_g=b_g,
        b_stride_n=b_n,
        b_stride_k=b_k,
        b_scale_stride_g=b_scale_g,
        b_scale_stride_n=b_scale_n,
        b_scale_stride_k=b_scale_k,
        BLOCK_G=group_block(problem.num_groups),
        PREFETCH_SCALES=_prefetch_scales(problem.target, a_scale_k, b_scale_k),
        **_tile_constants(problem, config),
    )


class _GroupedWgrad(_Grouped, GroupedWgrad):
    def multiply(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        out: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        grad_data, grad_scale, grad_strides = _parts(a)
        a_data, a_scale, a_strides = _parts(b)
        _wgrad_launch(problem, config, grad_strides, a_strides, out.stride())(
            out_ptr=out,
            grad_ptr=grad_data,
            grad_scale_ptr=grad_scale,
            a_ptr=a_data,
            a_scale_ptr=a_scale,
            offsets_ptr=offsets,
        )


@functools.lru_cache(CACHED_LAUNCHES)
def _wgrad_launch(
    problem: GroupedProblem,
    config: GemmConfig,
    grad_strides: tuple[int, ...],
    a_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> Launch:
    tiles = triton.cdiv(problem.n, config.block_m) * triton.cdiv(problem.k, config.block_n)
    grad_n, grad_r, grad_scale_n, grad_scale_r = grad_strides
    a_k, a_r, a_scale_k, a_scale_r = a_strides
    if problem.a_format == "bf16":  # [M, n] and [M, k]; MX copies are [n, M] and [k, M]
        grad_n, grad_r, a_k, a_r = grad_r, grad_n, a_r, a_k
    out_g, out_n, out_k = out_strides
    grid, num_tiles = _grid(problem, problem.num_groups * tiles)
    return Launch(
        _grouped_wgrad_kernel,
        grid,
        num_tiles=num_tiles,
        reduction=problem.num_rows,
        num_n=problem.n,
        num_k=problem.k,
        out_stride_g=out_g,
        out_stride_n=out_n,
        out_stride_k=out_k,
        grad_stride_n=grad_n,
        grad_stride_r=grad_r,
        grad_scale_stride_n=grad_scale_n,
        grad_scale_stride_r=grad_scale_r,
        a_stride_k=a_k,
        a_stride_r=a_r,
        a_scale_stride_k=a_scale_k,
        a_scale_stride_r=a_scale_r,
        ACCUMULATE=problem.accumulate,
        PREFETCH_SCALES=_prefetch_scales(problem.target, grad_scale_r, a_scale_r),
        **_tile_constants(problem, config),
    )


def _grid(problem: GroupedProblem, num_tiles: int) -> tuple[tuple[int], int | None]:
    """The grid, and the number of tiles that its programs share; None for one tile a program."""
    if problem.num_sms is None:
        return (num_tiles,), None
    return (min(num_tiles, resident_programs(problem)),), num_tiles


def _tile_constants(problem: GroupedProblem, config: GemmConfig) -> dict[str, Any]:
    return dict(
        A_FORMAT=_element(problem.a_format),
        B_FORMAT=_element(problem.b_format),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _element(format_name: str) -> str:
    """The kernels' element format name of an operand."""
    return "bf16" if format_name == "bf16" else get_format(format_name).element.name


def _parts(value: Operand) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """Return values, scales (None for bf16) and the strides of both (0 for absent scales)."""
    if isinstance(value, MXTensor):
        return value.qdata, value.scale, value.qdata.stride() + value.scale.stride()
    return value, None, value.stride() + (0,) * value.dim()


def _prefetch_scales(target: Target, *strides: int) -> bool:
    """Whether the kernel loads scales one step ahead.

    True on NVIDIA, where the pipeliner does not hide their latency. False with tcgen05 and strided
    scales (``trans_b=False``), which Triton 3.6 fails to lower.
    """
    dense = all(stride <= 1 for stride in strides)
    return target.kind != "hip" and (dense or not has_tcgen05(target))


GROUPED_GEMM = _GroupedGemm()
GROUPED_WGRAD = _GroupedWgrad()
