"""Host side of QUANTIZE_DUAL, GROUPED_GEMM and GROUPED_WGRAD on Triton; no synchronisation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from ....errors import require
from ....formats.spec import MX_BLOCK_SIZE, ScaleSpan, get_format
from ....formats.tensor import MXTensor
from ....problem import Config, DualProblem, GemmConfig, GroupedProblem, Op, Target
from ....routing import padded_capacity
from ....runtime.launch import CACHED_LAUNCHES, Launch
from ...common.groups import MAX_GROUPS, padded_offsets
from ...common.mx_codec import scale_rule_constants
from ...common.quantize import DTYPES
from ..moe.config import OUT_DTYPES
from .dual_kernels import _quantize_dual_kernel
from .kernels import _grouped_gemm_kernel, _grouped_wgrad_kernel

DUAL_TILE = (64, 128)
"""Rows and columns per program: stores of 64 bytes (two sectors) in rows of the columnwise copy."""

MAX_ACCUMULATORS = 128
"""Float32 accumulators per thread: half of the registers."""

SCALED_MMA_ROWS = 128
"""Rows of Blackwell's block-scaled MMA; tiles with fewer rows would be decoded to bf16 instead."""


def _unsupported(target: Target, num_groups: int) -> str | None:
    """Why the kernels cannot run on this target or with this many groups; None if they can."""
    if target.kind == "cpu" and not isinstance(_grouped_gemm_kernel, InterpretedFunction):
        return "runs on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    if target.kind == "hip" and target.arch != "gfx950":
        return f"needs scaled MFMA and the OCP fp8 types (gfx950), got {target.arch}"
    if target.kind == "cuda" and target.compute_capability < 90:
        return f"needs sm_90 or later, got {target.arch}"
    if num_groups > MAX_GROUPS:
        return f"holds at most {MAX_GROUPS} groups, got {num_groups}"
    return None


def _is_blackwell(target: Target) -> bool:
    return target.kind == "cuda" and target.compute_capability >= 100


def _group_block(num_groups: int) -> int:
    """Length of the group vector in a kernel; one more entry stands for rows without a group."""
    return max(32, triton.next_power_of_2(num_groups + 1))


class _QuantizeDual:
    """x → rowwise and columnwise MX copies, bit-exact to `formats.codec.quantize_blocks`."""

    op = Op.QUANTIZE_DUAL
    backend = "triton"

    def unsupported(self, problem: DualProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.dtype not in DTYPES:
            return f"reads float32, bfloat16 or float16, not {problem.dtype}"
        spans = {problem.row_span, problem.column_span}
        if spans != {ScaleSpan.BLOCK}:
            return "writes one scale per block of 32 (ScaleSpan.BLOCK)"
        return _unsupported(problem.target, problem.num_groups if problem.grouped_rows else 0)

    def configs(self, problem: DualProblem) -> Iterator[Config]:
        """One tile serves every shape."""
        yield None

    def heuristic(self, problem: DualProblem) -> Config:
        return None

    def launch(
        self,
        problem: DualProblem,
        config: Config,
        *,
        x: torch.Tensor,
        group_offsets: torch.Tensor | None,
    ) -> tuple[MXTensor, MXTensor]:
        """Return the rowwise copy (shape of x) and the columnwise copy.

        The columnwise copy is [K, M], [K, padded capacity] with group offsets, or [G, K, N].
        """
        if x.stride(-1) != 1:
            x = x.contiguous()  # dense rows are read in place at any row stride
        *leading, num_rows, width = x.shape
        num_groups = 0 if group_offsets is None else group_offsets.shape[0] - 1
        length = padded_capacity(num_rows, num_groups) if num_groups else num_rows
        row, column = (
            _allocate(problem, shape, x.device)
            for shape in ((*leading, num_rows, width), (*leading, width, length))
        )
        if row.qdata.numel() + column.qdata.numel() > 0:
            strides = x.stride(0) if leading else 0, x.stride(-2)
            _dual_launch(problem, length, strides)(
                row_ptr=row.qdata,
                row_scale_ptr=row.scale,
                column_ptr=column.qdata,
                column_scale_ptr=column.scale,
                x_ptr=x,
                group_offsets_ptr=group_offsets,
            )
        return row, column


@functools.lru_cache(CACHED_LAUNCHES)
def _dual_launch(problem: DualProblem, length: int, strides: tuple[int, int]) -> Launch:
    """Launch for columnwise copies of `length` positions a row; strides: matrix and row of x."""
    *leading, num_rows, width = problem.shape
    num_groups = problem.num_groups if problem.grouped_rows else 0
    block_rows, block_columns = DUAL_TILE
    batch = leading[0] if leading else 1
    block_g = _group_block(num_groups)
    return Launch(
        _quantize_dual_kernel,
        (batch * triton.cdiv(length, block_rows) * triton.cdiv(width, block_columns),),
        num_rows=num_rows,
        num_groups=num_groups,
        num_k_blocks=width // MX_BLOCK_SIZE,
        num_column_blocks=length // MX_BLOCK_SIZE,
        x_stride_batch=strides[0],
        x_stride_row=strides[1],
        FORMAT=problem.format.element.name,
        **scale_rule_constants(problem.format, problem.scale_rule),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_G=block_g,
        num_warps=4 if block_g <= 512 else 8,
    )


def _allocate(problem: DualProblem, shape: tuple[int, ...], device: torch.device) -> MXTensor:
    """An uninitialised MXTensor of this shape, quantised along its last axis."""
    scale_shape = (*shape[:-1], shape[-1] // MX_BLOCK_SIZE)
    qdata, scale = (
        torch.empty(size, dtype=torch.uint8, device=device) for size in (shape, scale_shape)
    )
    return MXTensor(qdata, scale, problem.format)


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
        hopper = target.kind == "cuda" and not _is_blackwell(target)
        stage = rows * depth + rows * depth // MX_BLOCK_SIZE
        decoded = rows * depth * 2 if hopper else 0
    loop = config.num_stages * stage + decoded
    return max(loop, config.block_m * config.block_n * 4) + 1024  # barriers and reductions


def invalid(problem: GroupedProblem, config: GemmConfig) -> str | None:
    """Why `config` cannot run, as a phrase; None if it can. Tuner and heuristic both use this."""
    for name, low in (("block_m", 16), ("block_n", 32), ("block_k", 64)):
        value = getattr(config, name)
        if not low <= value <= 256 or value & (value - 1):
            return f"{name} must be a power of two from {low} to 256, got {value}"
    if config.num_warps not in (1, 2, 4, 8):
        return f"num_warps must be 1, 2, 4 or 8, got {config.num_warps}"
    if min(config.num_stages, config.group_m) < 1 or config.split_k != 1:
        return "num_stages and group_m must be at least 1, split_k 1"
    target = problem.target
    if target.kind == "cpu":
        return None
    mx_on_blackwell = problem.a_format != "bf16" and _is_blackwell(target)
    if mx_on_blackwell and config.block_m < SCALED_MMA_ROWS:
        return f"block-scaled MMA is {SCALED_MMA_ROWS} rows high, block_m is {config.block_m}"
    threads = config.num_warps * (64 if target.kind == "hip" else 32)
    accumulators = config.block_m * config.block_n // threads
    if accumulators > MAX_ACCUMULATORS:
        return (
            f"{accumulators} accumulators a thread, at most {MAX_ACCUMULATORS}: "
            "more warps or a smaller tile"
        )
    need = shared_memory(problem, config)
    if need > target.shared_memory:
        return f"about {need} bytes of shared memory, the device has {target.shared_memory}"
    return None


def require_valid(problem: GroupedProblem, config: GemmConfig) -> None:
    """Raise ValueError for a config (pinned or from a table) that `invalid` refuses."""
    reason = invalid(problem, config)
    require(
        reason is None,
        problem.op.value,
        "config",
        need="a config that this device can run",
        got=f"{config} ({reason})",
        remedy="see configs() of the kernel for valid ones",
    )


class _Grouped:
    """Base class of both GEMMs: supported problems and choice of tiles."""

    op: Op
    backend = "triton"

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.out_dtype not in OUT_DTYPES:
            return f"writes bfloat16, float16 or float32, not {problem.out_dtype}"
        # The number of groups does not limit wgrad: a program reads two offsets only.
        searched = problem.num_groups if problem.op is Op.GROUPED_GEMM else 0
        return _unsupported(problem.target, searched)

    def configs(self, problem: GroupedProblem) -> Iterator[GemmConfig]:
        """Every valid config of the tuner's grid, the heuristic's first."""
        yield self.heuristic(problem)
        grid = itertools.product((64, 128), (64, 128, 256), (64, 128), (4, 8), (2, 3, 4), (1, 8))
        for block_m, block_n, block_k, num_warps, num_stages, group_m in grid:
            config = GemmConfig(block_m, block_n, block_k, num_warps, num_stages, group_m)
            if invalid(problem, config) is None:
                yield config

    def heuristic(self, problem: GroupedProblem) -> GemmConfig:
        """Tiles of 128 × 128 with 8 warps and a K step of 128 bytes, a row of a swizzled tile.

        The tile has 64 rows if an average group has at most 64, except with MX operands on
        Blackwell, whose block-scaled MMA has 128 rows.
        """
        target, mx = problem.target, problem.a_format != "bf16"
        average = problem.num_rows / max(1, problem.num_groups)
        may_be_low = not (mx and _is_blackwell(target))
        small = problem.op is Op.GROUPED_GEMM and average <= 64 and may_be_low
        config = GemmConfig(
            block_m=64 if small else 128,
            block_n=128,
            block_k=128 if mx else 64,
            num_warps=8,
            num_stages=2 if target.kind == "hip" else 4,
            group_m=8,
        )
        smaller = ({"num_stages": 3}, {"num_stages": 2}, {"num_stages": 2, "block_k": 64})
        candidates = [config, *(replace(config, **change) for change in smaller)]
        return next((c for c in candidates if invalid(problem, c) is None), candidates[-1])


class _GroupedGemm(_Grouped):
    """GROUPED_GEMM: ``c[r] = a[r] @ b[group of r].T``; zeros in rows without a group."""

    op = Op.GROUPED_GEMM

    def launch(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        *,
        a: torch.Tensor | MXTensor,
        b: torch.Tensor | MXTensor,
        group_offsets: torch.Tensor,
    ) -> torch.Tensor:
        """Return c [M, n], contiguous, in `problem.out_dtype`."""
        c = group_offsets.new_empty((problem.num_rows, problem.n), dtype=problem.out_dtype)
        a_data, a_scale, a_strides = _parts(a)
        b_data, b_scale, b_strides = _parts(b)
        launch = _gemm_launch(problem, config, a_strides, b_strides)
        if c.numel() > 0:
            launch(
                c_ptr=c,
                a_ptr=a_data,
                a_scale_ptr=a_scale,
                b_ptr=b_data,
                b_scale_ptr=b_scale,
                group_offsets_ptr=group_offsets,
            )
        return c


@functools.lru_cache(CACHED_LAUNCHES)
def _gemm_launch(
    problem: GroupedProblem,
    config: GemmConfig,
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
) -> Launch:
    require_valid(problem, config)
    return Launch(
        _grouped_gemm_kernel,
        (_gemm_tiles(problem, config),),
        **_gemm_constants(problem, config, a_strides, b_strides),
    )


def _gemm_tiles(problem: GroupedProblem, config: GemmConfig) -> int:
    """Upper bound of the number of tiles, computed without the groups' sizes."""
    # Each group, and the rows without a group, add at most one ragged tile; a tile has at least
    # one row.
    num_rows = problem.num_rows
    row_tiles = min(triton.cdiv(num_rows, config.block_m) + problem.num_groups, num_rows)
    return row_tiles * triton.cdiv(problem.n, config.block_n)


def _gemm_constants(
    problem: GroupedProblem,
    config: GemmConfig,
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
) -> dict[str, Any]:
    """All scalar and constexpr arguments of the kernel."""
    order = (0, 1, 2) if problem.trans_b else (0, 2, 1)
    b_stride, b_scale_stride = (
        [strides[axis] for axis in order] for strides in (b_strides[:3], b_strides[3:])
    )
    return dict(
        num_rows=problem.num_rows,
        num_groups=problem.num_groups,
        num_n=problem.n,
        num_k=problem.k,
        a_stride_m=a_strides[0],
        a_stride_k=a_strides[1],
        a_scale_stride_m=a_strides[2],
        a_scale_stride_k=a_strides[3],
        b_stride_g=b_stride[0],
        b_stride_n=b_stride[1],
        b_stride_k=b_stride[2],
        b_scale_stride_g=b_scale_stride[0],
        b_scale_stride_n=b_scale_stride[1],
        b_scale_stride_k=b_scale_stride[2],
        BLOCK_G=_group_block(problem.num_groups),
        PREFETCH_SCALES=_prefetch_scales(problem.target, a_strides[3], b_scale_stride[2]),
        **_tile_constants(problem, config),
    )


class _GroupedWgrad(_Grouped):
    """GROUPED_WGRAD: ``out[g] = grad_g.T @ a_g`` over the rows of group g; zeros if it is empty."""

    op = Op.GROUPED_WGRAD

    def launch(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        *,
        grad: torch.Tensor | MXTensor,
        a: torch.Tensor | MXTensor,
        group_offsets: torch.Tensor,
        accumulate_into: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return out [G, n, k] in `problem.out_dtype`, or add the result to `accumulate_into`."""
        out = accumulate_into
        if out is None:
            out = group_offsets.new_empty(
                (problem.num_groups, problem.n, problem.k), dtype=problem.out_dtype
            )
        offsets = group_offsets
        if problem.a_format != "bf16":
            offsets = padded_offsets(problem, group_offsets)
        grad_data, grad_scale, grad_strides = _parts(grad)
        a_data, a_scale, a_strides = _parts(a)
        launch = _wgrad_launch(problem, config, grad_strides, a_strides, out.stride())
        if out.numel() > 0:
            launch(
                out_ptr=out,
                grad_ptr=grad_data,
                grad_scale_ptr=grad_scale,
                a_ptr=a_data,
                a_scale_ptr=a_scale,
                offsets_ptr=offsets,
            )
        return out


@functools.lru_cache(CACHED_LAUNCHES)
def _wgrad_launch(
    problem: GroupedProblem,
    config: GemmConfig,
    grad_strides: tuple[int, ...],
    a_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> Launch:
    require_valid(problem, config)
    return Launch(
        _grouped_wgrad_kernel,
        (_wgrad_tiles(problem, config),),
        **_wgrad_constants(problem, config, grad_strides, a_strides, out_strides),
    )


def _wgrad_tiles(problem: GroupedProblem, config: GemmConfig) -> int:
    return problem.num_groups * (
        triton.cdiv(problem.n, config.block_m) * triton.cdiv(problem.k, config.block_n)
    )


def _wgrad_constants(
    problem: GroupedProblem,
    config: GemmConfig,
    grad_strides: tuple[int, ...],
    a_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> dict[str, Any]:
    """All scalar and constexpr arguments of the kernel."""
    # The reduction runs along the last axis of MX copies, and along the first of bf16 [M, n].
    row, step = (1, 0) if problem.a_format == "bf16" else (0, 1)
    return dict(
        reduction=problem.num_rows,
        num_n=problem.n,
        num_k=problem.k,
        out_stride_g=out_strides[0],
        out_stride_n=out_strides[1],
        out_stride_k=out_strides[2],
        grad_stride_n=grad_strides[row],
        grad_stride_r=grad_strides[step],
        grad_scale_stride_n=grad_strides[2],
        grad_scale_stride_r=grad_strides[3],
        a_stride_k=a_strides[row],
        a_stride_r=a_strides[step],
        a_scale_stride_k=a_strides[2],
        a_scale_stride_r=a_strides[3],
        ACCUMULATE=problem.accumulate,
        PREFETCH_SCALES=_prefetch_scales(problem.target, grad_strides[3], a_strides[3]),
        **_tile_constants(problem, config),
    )


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


def _parts(
    value: torch.Tensor | MXTensor,
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """Return values, scales (None for bf16) and the strides of both (0 for absent scales)."""
    if isinstance(value, MXTensor):
        return value.qdata, value.scale, value.qdata.stride() + value.scale.stride()
    return value, None, value.stride() + (0,) * value.dim()


def _prefetch_scales(target: Target, *strides: int) -> bool:
    """Whether the kernel loads scales one step ahead.

    True on NVIDIA, where the pipeliner does not hide their latency. False on Blackwell with strided
    scales (``trans_b=False``), which Triton 3.6 fails to lower.
    """
    dense = all(stride <= 1 for stride in strides)
    return target.kind != "hip" and (dense or not _is_blackwell(target))


QUANTIZE_DUAL = _QuantizeDual()
GROUPED_GEMM = _GroupedGemm()
GROUPED_WGRAD = _GroupedWgrad()
