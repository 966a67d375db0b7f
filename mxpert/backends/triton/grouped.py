"""QUANTIZE_DUAL, GROUPED_GEMM and GROUPED_WGRAD on Triton: tiles, grids, launches; no host sync."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from ...errors import require
from ...formats.spec import MX_BLOCK_SIZE, ScaleSpan
from ...formats.tensor import MXTensor
from ...problem import Config, DualProblem, GemmConfig, GroupedProblem, Op, Target
from ...routing import padded_capacity
from .dual_kernels import _quantize_dual_kernel
from .grouped_kernels import _grouped_gemm_kernel, _grouped_wgrad_kernel
from .heuristics import OUT_DTYPES, compute_capability
from .moe import operand
from .quantize import DTYPES
from .quantize_kernels import scale_rule_constants

MAX_GROUPS = 1024
"""Every program holds the offsets of all groups in registers: sixteen a thread."""

DUAL_TILE = (64, 128)
"""Rows and columns a program: runs of 64 bytes, two sectors, in the transposed copy's rows."""

MAX_ACCUMULATORS = 128
"""Float32 accumulators per thread: half of the registers."""

SCALED_MMA_ROWS = 128
"""Height of Blackwell's block-scaled MMA; lower tiles would be decoded instead."""


def _unsupported(target: Target, num_groups: int) -> str | None:
    """Why none of the kernels runs on this target or with this many groups; None if they can."""
    if target.kind == "cpu" and not isinstance(_grouped_gemm_kernel, InterpretedFunction):
        return "runs on a CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    if target.kind == "hip" and target.arch != "gfx950":
        return f"needs scaled MFMA and the OCP fp8 types (gfx950), got {target.arch}"
    if target.kind == "cuda" and compute_capability(target) < 90:
        return f"needs sm_90 or later, got {target.arch}"
    if num_groups > MAX_GROUPS:
        return f"holds at most {MAX_GROUPS} groups, got {num_groups}"
    return None


def _is_blackwell(target: Target) -> bool:
    return target.kind == "cuda" and compute_capability(target) >= 100


def _group_block(num_groups: int) -> int:
    """Length of the vector of groups in a kernel, with one entry for the rows without a group."""
    return max(32, triton.next_power_of_2(num_groups + 1))


class _QuantizeDual:
    """x → its row-wise and column-wise copies, bit-exact to `formats.codec.quantize_blocks`."""

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
        self, problem: DualProblem, config: Config, *, x: torch.Tensor,
        group_offsets: torch.Tensor | None,
    ) -> tuple[MXTensor, MXTensor]:
        """Row copy of the shape of x; column copy [K, M], [K, padded capacity] or [G, K, N]."""
        if x.stride(-1) != 1:
            x = x.contiguous()  # dense rows, whatever their distance, are read in place
        *leading, num_rows, width = x.shape
        num_groups = 0 if group_offsets is None else group_offsets.shape[0] - 1
        length = padded_capacity(num_rows, num_groups) if num_groups else num_rows
        row, column = (_allocate(problem, shape, x.device)
                       for shape in ((*leading, num_rows, width), (*leading, width, length)))
        block_rows, block_columns = DUAL_TILE
        batch = leading[0] if leading else 1
        grid = (batch * triton.cdiv(length, block_rows) * triton.cdiv(width, block_columns),)
        block_g = _group_block(num_groups)
        if grid[0] > 0:
            with torch.cuda.device_of(x):  # Triton launches on the current device
                _quantize_dual_kernel[grid](
                    row_ptr=row.qdata, row_scale_ptr=row.scale, column_ptr=column.qdata,
                    column_scale_ptr=column.scale, x_ptr=x, group_offsets_ptr=group_offsets,
                    num_rows=num_rows, num_groups=num_groups,
                    num_k_blocks=width // MX_BLOCK_SIZE, num_column_blocks=length // MX_BLOCK_SIZE,
                    x_stride_batch=x.stride(0) if leading else 0, x_stride_row=x.stride(-2),
                    FORMAT=problem.format.element.name,
                    **scale_rule_constants(problem.format, problem.scale_rule),
                    BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns,
                    BLOCK_G=block_g, num_warps=4 if block_g <= 512 else 8)
        return row, column


def _allocate(problem: DualProblem, shape: tuple[int, ...], device: torch.device) -> MXTensor:
    """An MXTensor of this shape, quantised along its last axis, not yet written."""
    scale_shape = (*shape[:-1], shape[-1] // MX_BLOCK_SIZE)
    qdata, scale = (torch.empty(size, dtype=torch.uint8, device=device)
                    for size in (shape, scale_shape))
    return MXTensor(qdata, scale, problem.format)


def shared_memory(problem: GroupedProblem, config: GemmConfig) -> int:
    """Upper estimate of the shared memory of one program, in bytes.

    Every pipeline stage holds both operands' tiles as they lie in memory, and their scales. On
    Hopper MX tiles pass through shared memory once more, as bf16. The epilogue may rearrange the
    float32 accumulator there, after the loop.
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
    """Why `config` cannot run, as a phrase; None if it can. The one rule for every chooser."""
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
        return (f"{accumulators} accumulators a thread, at most {MAX_ACCUMULATORS}: "
                "more warps or a smaller tile")
    need = shared_memory(problem, config)
    if need > target.shared_memory:
        return f"about {need} bytes of shared memory, the device has {target.shared_memory}"
    return None


@functools.cache
def require_valid(problem: GroupedProblem, config: GemmConfig) -> None:
    """Raise ValueError for a config (pinned or from a table) that `invalid` refuses."""
    reason = invalid(problem, config)
    require(reason is None, problem.op.value, "config", need="a config that this device can run",
            got=f"{config} ({reason})", remedy="see configs() of the kernel for valid ones")


class _Grouped:
    """What both GEMMs share: which problems they serve and the choice of tiles."""

    op: Op
    backend = "triton"

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.out_dtype not in OUT_DTYPES:
            return f"writes bfloat16, float16 or float32, not {problem.out_dtype}"
        # wgrad reads no more than two offsets a program.
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
        """128 × 128 tiles with 8 warps, 128 bytes deep: a full row of a swizzled shared tile.

        64 rows a tile where an average group has no more, except on Blackwell: its block-scaled
        MMA is 128 rows high.
        """
        target, mx = problem.target, problem.a_format != "bf16"
        average = problem.num_rows / max(1, problem.num_groups)
        may_be_low = not (mx and _is_blackwell(target))
        small = problem.op is Op.GROUPED_GEMM and average <= 64 and may_be_low
        config = GemmConfig(block_m=64 if small else 128, block_n=128, block_k=128 if mx else 64,
                            num_warps=8, num_stages=2 if target.kind == "hip" else 4, group_m=8)
        smaller = ({"num_stages": 3}, {"num_stages": 2}, {"num_stages": 2, "block_k": 64})
        candidates = [config, *(replace(config, **change) for change in smaller)]
        return next((c for c in candidates if invalid(problem, c) is None), candidates[-1])


class _GroupedGemm(_Grouped):
    """c[r] = a[r] @ b[group of r].T, zeros in rows without a group."""

    op = Op.GROUPED_GEMM

    def launch(
        self, problem: GroupedProblem, config: GemmConfig, *, a: torch.Tensor | MXTensor,
        b: torch.Tensor | MXTensor, group_offsets: torch.Tensor,
    ) -> torch.Tensor:
        """[M, n], contiguous, in `problem.out_dtype`."""
        require_valid(problem, config)
        c = group_offsets.new_empty((problem.num_rows, problem.n), dtype=problem.out_dtype)
        _multiply(problem, config, a, b, group_offsets, c, (None, None))
        return c

    def launch_if_wide(self, problem: GroupedProblem, a: torch.Tensor | MXTensor,
                       b: torch.Tensor | MXTensor, group_offsets: torch.Tensor,
                       c: torch.Tensor) -> None:
        """Fill c if one of the operands has wide blocks; the device looks."""
        _multiply(problem, self.heuristic(problem), a, b, group_offsets, c,
                  (wide_blocks(a), wide_blocks(b)))


Wide = tuple[torch.Tensor | None, torch.Tensor | None]
"""Counts of wide blocks; with one that is given the kernels run only if one is above 0."""


def _multiply(problem: GroupedProblem, config: GemmConfig, a: torch.Tensor | MXTensor,
              b: torch.Tensor | MXTensor, group_offsets: torch.Tensor, c: torch.Tensor,
              wide: Wide) -> None:
    a_data, a_scale, a_format = operand(a)
    b_data, b_scale, b_format = operand(b)
    num_rows, num_k = a_data.shape
    num_groups, n_axis, k_axis = b_data.shape[0], *((1, 2) if problem.trans_b else (2, 1))
    num_n = b_data.shape[n_axis]
    # Rows without a group form one more; each group has one ragged tile at most, and a tile has at
    # least one row.
    row_tiles = min(triton.cdiv(num_rows, config.block_m) + num_groups, num_rows)
    grid = (row_tiles * triton.cdiv(num_n, config.block_n),)
    if grid[0] == 0:
        return
    with torch.cuda.device_of(c):  # Triton launches on the current device
        _grouped_gemm_kernel[grid](
            c_ptr=c, a_ptr=a_data, a_scale_ptr=a_scale, b_ptr=b_data, b_scale_ptr=b_scale,
            group_offsets_ptr=group_offsets, a_wide_ptr=wide[0], b_wide_ptr=wide[1],
            num_rows=num_rows, num_groups=num_groups, num_n=num_n, num_k=num_k,
            a_stride_m=a_data.stride(0), a_stride_k=a_data.stride(1),
            a_scale_stride_m=_stride(a_scale, 0), a_scale_stride_k=_stride(a_scale, 1),
            b_stride_g=b_data.stride(0), b_stride_n=b_data.stride(n_axis),
            b_stride_k=b_data.stride(k_axis), b_scale_stride_g=_stride(b_scale, 0),
            b_scale_stride_n=_stride(b_scale, n_axis), b_scale_stride_k=_stride(b_scale, k_axis),
            A_FORMAT=a_format, B_FORMAT=b_format, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
            BLOCK_G=_group_block(num_groups),
            PREFETCH_SCALES=_prefetch_scales(
                problem.target, _stride(a_scale, 1), _stride(b_scale, k_axis)),
            num_warps=config.num_warps, num_stages=config.num_stages)


class _GroupedWgrad(_Grouped):
    """out[g] = grad_g.T @ a_g over the rows of each group; zeros for empty groups."""

    op = Op.GROUPED_WGRAD

    def launch(
        self, problem: GroupedProblem, config: GemmConfig, *, grad: torch.Tensor | MXTensor,
        a: torch.Tensor | MXTensor, group_offsets: torch.Tensor,
        padded_offsets: torch.Tensor | None, accumulate_into: torch.Tensor | None,
    ) -> torch.Tensor:
        """[G, n, k] in `problem.out_dtype`, or `accumulate_into` with the result added."""
        require_valid(problem, config)
        out = accumulate_into
        if out is None:
            out = group_offsets.new_empty((problem.num_groups, problem.n, problem.k),
                                          dtype=problem.out_dtype)
        offsets = group_offsets if padded_offsets is None else padded_offsets
        _multiply_columns(problem, config, grad, a, offsets, out, (None, None))
        return out

    def launch_if_wide(self, problem: GroupedProblem, grad: torch.Tensor | MXTensor,
                       a: torch.Tensor | MXTensor, padded_offsets: torch.Tensor,
                       out: torch.Tensor) -> None:
        """Fill (or add to) out if one of the operands has wide blocks; the device looks."""
        _multiply_columns(problem, self.heuristic(problem), grad, a, padded_offsets, out,
                          (wide_blocks(grad), wide_blocks(a)))


def _multiply_columns(problem: GroupedProblem, config: GemmConfig, grad: torch.Tensor | MXTensor,
                      a: torch.Tensor | MXTensor, offsets: torch.Tensor, out: torch.Tensor,
                      wide: Wide) -> None:
    grad_data, grad_scale, grad_format = operand(grad)
    a_data, a_scale, a_format = operand(a)
    if grad_scale is None:  # bf16 [M, n] and [M, k]: the reduction is the leading axis
        grad_data, a_data = grad_data.T, a_data.T
    num_n, reduction = grad_data.shape
    num_k, num_groups = a_data.shape[0], offsets.shape[0] - 1
    tiles = triton.cdiv(num_n, config.block_m) * triton.cdiv(num_k, config.block_n)
    if num_groups * tiles == 0:
        return
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _grouped_wgrad_kernel[(num_groups * tiles,)](
            out_ptr=out, grad_ptr=grad_data, grad_scale_ptr=grad_scale, a_ptr=a_data,
            a_scale_ptr=a_scale, offsets_ptr=offsets, grad_wide_ptr=wide[0], a_wide_ptr=wide[1],
            reduction=reduction, num_n=num_n, num_k=num_k, out_stride_g=out.stride(0),
            out_stride_n=out.stride(1), out_stride_k=out.stride(2),
            grad_stride_n=grad_data.stride(0), grad_stride_r=grad_data.stride(1),
            grad_scale_stride_n=_stride(grad_scale, 0), grad_scale_stride_r=_stride(grad_scale, 1),
            a_stride_k=a_data.stride(0), a_stride_r=a_data.stride(1),
            a_scale_stride_k=_stride(a_scale, 0), a_scale_stride_r=_stride(a_scale, 1),
            A_FORMAT=grad_format, B_FORMAT=a_format, ACCUMULATE=problem.accumulate,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            PREFETCH_SCALES=_prefetch_scales(
                problem.target, _stride(grad_scale, 1), _stride(a_scale, 1)),
            num_warps=config.num_warps, num_stages=config.num_stages)


def wide_blocks(value: torch.Tensor | MXTensor) -> torch.Tensor | None:
    """The count that an operand of ScaleSpan.AUTO carries."""
    return value.wide_blocks if isinstance(value, MXTensor) else None


def _stride(scale: torch.Tensor | None, axis: int) -> int:
    """Stride of a scale tensor; 0 for bf16, which has none."""
    return 0 if scale is None else scale.stride(axis)


def _prefetch_scales(target: Target, *strides: int) -> bool:
    """Whether scales are fetched a step ahead: on NVIDIA, where nothing else hides their latency.

    Not on Blackwell with strided scales (``trans_b=False``): Triton 3.6 fails to lower those.
    """
    dense = all(stride <= 1 for stride in strides)
    return target.kind != "hip" and (dense or not _is_blackwell(target))


QUANTIZE_DUAL = _QuantizeDual()
GROUPED_GEMM = _GroupedGemm()
GROUPED_WGRAD = _GroupedWgrad()
