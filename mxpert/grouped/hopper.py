"""Host side of GROUPED_GEMM and GROUPED_WGRAD on Hopper: choice of FP8 or bf16, launches."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ..core.launch import CACHED_LAUNCHES, Launch
from ..core.problem import (
    GemmConfig,
    GroupedProblem,
    Op,
    QuantizeProblem,
    Target,
    resident_programs,
)
from ..device.hopper import matrices_descriptor, rows_descriptor
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, MXFP8_E5M2, ScaleSpan
from ..formats.tensor import MXTensor, Operand
from ..quantize.inputs import DequantizeInputs
from ..quantize.triton import DEQUANTIZE
from .hopper_kernel import (
    CONSUMER_ROWS,
    CONSUMER_WARPS,
    IN_TENSOR_CORE,
    PROMOTED,
    SCALED,
    STAGE_ROW_BYTES,
    _grouped_gemm_hopper_kernel,
)
from .hopper_wide_operands import decode_if_wide
from .host import Grouped, GroupedGemm, GroupedWgrad

BLOCK_M, BLOCK_N = 128, 256
_STAGES = 4
_STAGING_ROW_BYTES = 256
"""Bytes of a row of a consumer's staging memory: 128 columns, or 64 of float32."""

_BANDS = (16, 8, 32)
"""Choices for the row tiles that share a column tile's operand in L2; the first is the default. It
is the nearest to a square of as many tiles as there are SMs, on every card (78, 114 or 132)."""

UNPROMOTED_DEPTH = 8192
"""Longest reduction whose fp8 sums stay in the tensor core. Its adder drops bits below 2^-13 of the
sum: an error of 2e-3 at this depth. Longer sums are promoted to float32 every 256 values."""


class _Grouped(Grouped):
    """Base class of both GEMMs: supported problems, configs, and the launch."""

    backend = "hopper"

    def unsupported(self, problem: GroupedProblem) -> str | None:
        """Why the kernel cannot serve `problem`; None if it can."""
        if problem.target.arch != "sm_90":
            return f"needs sm_90, not {problem.target.arch}"
        if problem.out_dtype not in FLOAT_DTYPES:
            return f"writes bfloat16, float16 or float32, not {problem.out_dtype}"
        wgrad = problem.op is Op.GROUPED_WGRAD
        columns = problem.k if wgrad else problem.n
        if columns % 8:
            return (
                f"writes rows of whole 16 bytes, got {columns} columns; "
                "pad the operand to a multiple of 8"
            )
        if problem.a_format == "bf16":
            if wgrad:
                return (
                    "reads operands with the reduction contiguous, as quantize_dual(…, "
                    "group_offsets=…) makes them; quantise both"
                )
            if problem.k % 8:
                return (
                    f"reads rows of whole 16 bytes, got K = {problem.k}; pad K to a multiple of 8"
                )
        return None

    def configs(self, problem: GroupedProblem) -> Iterator[GemmConfig]:
        """One tile size, with each of the choices for group_m."""
        for band in _BANDS:
            yield GemmConfig(
                BLOCK_M,
                BLOCK_N,
                STAGE_ROW_BYTES.value,
                num_warps=CONSUMER_WARPS.value,
                num_stages=_STAGES,
                group_m=band,
            )

    def mode(self, problem: GroupedProblem) -> str:
        """How the kernel applies scales; `explain` shows it.

        - "row": FP8 products; both operands have one scale per row.
        - "auto": as "row" if neither operand has wide blocks (counted on the device), else as
          "exact".
        - "span128": FP8 products; a has one scale per 128 values, b one per row.
        - "exact": bf16 products of bf16 operands, or of the exact values of MX operands with any
          scales. Also MX operands with ``trans_b=False``: FP8 wgmma needs a contiguous reduction
          axis.
        """
        spans = problem.a_span, problem.b_span
        contiguous = problem.trans_b or problem.op is Op.GROUPED_WGRAD
        if problem.a_format == "bf16" or not contiguous:
            return "exact"
        if spans == (ScaleSpan.ROW, ScaleSpan.ROW):
            return "row"
        if set(spans) <= {ScaleSpan.ROW, ScaleSpan.AUTO}:
            return "auto"
        return "span128" if spans == (ScaleSpan.SPAN128, ScaleSpan.ROW) else "exact"

    def slower(self, problem: GroupedProblem) -> str:
        """Why MX operands are multiplied in bf16 although their scales allow FP8; "" if not."""
        spans = {problem.a_span, problem.b_span}
        if problem.op is Op.GROUPED_WGRAD or problem.trans_b or spans & {ScaleSpan.BLOCK}:
            return ""
        return (
            "multiplies in bf16: FP8 tensor cores need the reduction contiguous; pass b as "
            "[G, N, K], the other copy of quantize_dual, with trans_b=True"
        )

    def multiply(
        self,
        problem: GroupedProblem,
        config: GemmConfig,
        a: Operand,
        b: Operand,
        out: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        mode, target = self.mode(problem), problem.target
        if mode == "exact":
            a, b = _as_bf16(a, target), _as_bf16(b, target)
        others = dict(
            out=out, out_desc=out, a_wide=_wide_blocks(a), b_wide=_wide_blocks(b), offsets=offsets
        )
        _multiply(problem, config, mode, a, b, others)
        if mode == "auto" and isinstance(a, MXTensor) and isinstance(b, MXTensor):
            _multiply(problem, config, "wide", *decode_if_wide(a, b, problem), others)


class _GroupedGemm(_Grouped, GroupedGemm):
    pass


class _GroupedWgrad(_Grouped, GroupedWgrad):
    pass


def _multiply(
    problem: GroupedProblem,
    config: GemmConfig,
    mode: str,
    a: Operand,
    b: Operand,
    others: dict[str, torch.Tensor | None],
) -> None:
    """One launch of the GEMM.

    Args:
        mode: as in `_Grouped.mode`, or "wide": exact products if a count of wide blocks is above 0,
            else nothing.
        others: the kernel's tensors besides the operands.
    """
    (a_values, a_scale), (b_values, b_scale) = _operand(a), _operand(b)
    _gemm_launch(problem, config.group_m, mode, a_values.dtype, b_values.dtype)(
        a_desc=a_values, b_desc=b_values, a_scale=a_scale, b_scale=b_scale, **others
    )


def _wide_blocks(value: Operand) -> torch.Tensor | None:
    """The device count of wide blocks [1] of an operand with ScaleSpan.AUTO; None for others."""
    return value.wide_blocks if isinstance(value, MXTensor) else None


def _operand(value: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Contiguous values, and the scale bytes of an MX tensor (None for bf16)."""
    if not isinstance(value, MXTensor):
        return value.contiguous(), None
    dtype = torch.float8_e5m2 if value.format is MXFP8_E5M2 else torch.float8_e4m3fn
    return value.qdata.contiguous().view(dtype), value.scale.contiguous()


def _as_bf16(value: torch.Tensor | MXTensor, target: Target) -> torch.Tensor:
    """Dequantise an MX tensor to bf16; exact, since values have at most 4 significant bits."""
    if not isinstance(value, MXTensor):
        return value
    problem = QuantizeProblem(
        Op.DEQUANTIZE, target, tuple(value.shape), value.axis, torch.bfloat16, value.format
    )
    return DEQUANTIZE.launch(problem, None, DequantizeInputs(value))


@functools.lru_cache(CACHED_LAUNCHES)
def _gemm_launch(
    problem: GroupedProblem, band: int, mode: str, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> Launch:
    wgrad = problem.op is Op.GROUPED_WGRAD
    num_outer, columns = (problem.n, problem.k) if wgrad else (0, problem.n)
    reduction = problem.num_rows if wgrad else problem.k
    pitch = 0 if mode in ("exact", "wide") else reduction // MX_BLOCK_SIZE
    depth = STAGE_ROW_BYTES.value // a_dtype.itemsize
    staging_shape = CONSUMER_ROWS.value, _STAGING_ROW_BYTES // problem.out_dtype.itemsize
    b_tile = (
        rows_descriptor(BLOCK_N, depth, b_dtype)
        if wgrad or problem.trans_b
        else matrices_descriptor(depth, BLOCK_N, b_dtype)
    )
    return Launch(
        _grouped_gemm_hopper_kernel,
        (resident_programs(problem),),
        {
            "out_desc": rows_descriptor(*staging_shape, problem.out_dtype),
            "a_desc": rows_descriptor(BLOCK_M, depth, a_dtype),
            "b_desc": b_tile,
        },
        num_groups=problem.num_groups,
        num_rows=problem.num_rows,
        num_outer=num_outer,
        num_n=columns,
        num_k=0 if wgrad else problem.k,
        a_pitch=pitch,
        b_pitch=pitch,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=_STAGES,
        BAND=band,
        WGRAD=wgrad,
        SUMS=_sums(problem, mode),
        ACCUMULATE=problem.accumulate,
        IF_WIDE=mode == "wide",
        num_warps=CONSUMER_WARPS.value,
    )


def _sums(problem: GroupedProblem, mode: str) -> str:
    """The kernel's SUMS: where sums are kept."""
    if mode == "span128":
        return str(SCALED.value)
    depth = problem.k
    if problem.op is Op.GROUPED_WGRAD:
        depth = problem.num_rows // max(1, problem.num_groups)
    is_fp8 = mode in ("row", "auto")
    return str((PROMOTED if is_fp8 and depth > UNPROMOTED_DEPTH else IN_TENSOR_CORE).value)


GROUPED_GEMM = _GroupedGemm()
GROUPED_WGRAD = _GroupedWgrad()
