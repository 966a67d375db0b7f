"""grouped_gemm and grouped_wgrad: the three GEMMs of training with experts, bf16 or MXFP8.

The rows of every operand are grouped by expert; `group_offsets` lives on the device and is never
read on the host, so that sizes may change from step to step under one CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.ops import OpSpec
from ..core.problem import OUT_DTYPES, GroupedProblem, Op
from ..core.target import check_num_sms, detect_target
from ..errors import Checks
from ..formats.spec import MX_BLOCK_SIZE, ScaleSpan
from ..formats.tensor import Layout, MXTensor, Operand
from ..quantize.dual_op import COUNTS_REMEDY, check_group_offsets, refuse_counts
from .inputs import GroupedGemmInputs, GroupedWgradInputs


def grouped_gemm(
    a: Operand,
    b: Operand,
    group_offsets: torch.Tensor,
    *,
    trans_b: bool = True,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int | None = None,
) -> torch.Tensor:
    """One GEMM per group of rows: forward and, with the other copy of the weights, dgrad.

    ``c[r] = a[r] @ b[g].T`` (``a[r] @ b[g]`` with ``trans_b=False``) for the rows r of group g,
    ``offsets[g] <= r < offsets[g + 1]``. Every scale is honoured exactly: products of dequantised
    values are summed and rounded once. The precision of the sums depends on the chip and on how far
    the operands' scales reach (`ScaleSpan`). Where the tensor cores have FP8 but no block scales,
    two ROW operands, or a SPAN128 and b ROW, run on them; they add with about 14 bits between
    promotions to float32 (relative error of the result about 2e-3 and below). AUTO operands do so
    where the device finds that one scale a row is enough; it reserves memory for bf16 copies of
    both operands in case it is not.
    All other operands, and MX operands with ``trans_b=False``, are multiplied in bf16 and summed in
    float32. Where the device's own kernels use block scales of the tensor cores, all MX operands
    are multiplied as they are, with ``trans_b=False``, too. Where a request misses the fast kernel
    of its device, a PerformanceWarning says why.
    The op is not differentiable; `mxpert.training.grouped_linear` is, and calls it.

    Forward: ``grouped_gemm(x_row, weight_row, offsets)``. dgrad: ``grouped_gemm(dout_row,
    weight_col, offsets)``, with the copies of `quantize_dual`.

    Args:
        a: [M, K], bfloat16 or an MXFP8 MXTensor of axis −1.
        b: [G, N, K], bfloat16 or an MXFP8 MXTensor of axis −1; with ``trans_b=False`` [G, K, N],
            an MXTensor then of axis −2. Both operands are bfloat16 or both MX; the MX formats may
            differ (HYBRID).
        group_offsets: int32 or int64 [G + 1] on the device, not decreasing, 0 to M: offsets, not
            counts.
        trans_b: whether K is the last dimension of b.
        out_dtype: bfloat16, float16 or float32 (float64: reference backend alone).
        num_sms: most SMs (compute units) that the GEMM occupies, to leave the others to
            communication beside it; 1 to those of the device. None is all of them. The bits of the
            result are the same. The reference backend, which has no grid, refuses it.

    Returns:
        [M, N] in `out_dtype`. Rows before ``offsets[0]`` and from ``offsets[-1]`` on are zero, and
        those of a are not read.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, format, shape or device.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Example:
        >>> import torch, mxpert
        >>> a, b = torch.ones(3, 32).bfloat16(), torch.ones(2, 5, 32).bfloat16()
        >>> mxpert.grouped_gemm(a, b, torch.tensor([0, 1, 2]), out_dtype=torch.float32)[:, 0]
        tensor([32., 32.,  0.])
    """
    refuse_counts(group_offsets, "grouped_gemm")
    return _GEMM(GemmOptions(out_dtype, trans_b, num_sms), GroupedGemmInputs(a, b, group_offsets))


def grouped_wgrad(
    grad: Operand,
    a: Operand,
    group_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """The gradient of the weights of `grouped_gemm`: one GEMM per group over the group's rows.

    ``out[g] = grad_g.T @ a_g``; zero for an empty group.

    Args:
        grad: bfloat16 [M, N]; or the columnwise copy MXTensor [N, P] of ``quantize_dual(grad,
            group_offsets=…)``.
        a: bfloat16 [M, K]; or the columnwise copy MXTensor [K, P] of ``quantize_dual(a,
            group_offsets=…)``. Both operands are bfloat16 or both MX; the MX formats may differ.
        group_offsets: int32 or int64 [G + 1] on the device, the same as for the copies.
        out_dtype: bfloat16, float16 or float32 (float64: reference backend alone).
        accumulate_into: contiguous float32 [G, N, K], to which the float32 result is added in place
            (gradient accumulation); `out_dtype` is of no effect then.
        num_sms: as in `grouped_gemm`.

    Returns:
        [G, N, K] in `out_dtype`, or `accumulate_into`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, format, shape or device.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Example:
        >>> import torch, mxpert
        >>> offsets = torch.tensor([0, 1, 3])
        >>> grad, a = torch.ones(3, 32), torch.ones(3, 64)
        >>> (_, grad_col), (_, a_col) = (
        ...     mxpert.quantize_dual(x, group_offsets=offsets) for x in (grad, a))
        >>> mxpert.grouped_wgrad(grad_col, a_col, offsets, out_dtype=torch.float32)[:, 0, 0]
        tensor([1., 2.])
    """
    refuse_counts(group_offsets, "grouped_wgrad")
    inputs = GroupedWgradInputs(grad, a, group_offsets, accumulate_into)
    options = WgradOptions(out_dtype, num_sms)
    if accumulate_into is None:
        return _WGRAD(options, inputs)
    _ACCUMULATE(options, inputs)
    return accumulate_into


class GemmOptions(NamedTuple):
    """Options of `grouped_gemm`."""

    out_dtype: torch.dtype
    trans_b: bool
    num_sms: int | None = None


class WgradOptions(NamedTuple):
    """Options of `grouped_wgrad`."""

    out_dtype: torch.dtype
    num_sms: int | None = None


def check_grouped_gemm(options: GemmOptions, inputs: GroupedGemmInputs) -> None:
    """Argument checks of `grouped_gemm`."""
    need, (out_dtype, trans_b, num_sms) = Checks("grouped_gemm"), options
    a, b = inputs.a, inputs.b
    if not isinstance(trans_b, bool):
        raise need.type_error("trans_b", "a bool", repr(trans_b))
    _check_out_dtype(out_dtype, need)
    _check_operand(a, "a", 2, -1, need)
    _check_operand(b, "b", 3, -1 if trans_b else -2, need)
    _check_pair(a, "a", b, "b", need)
    reduced = b.shape[-1 if trans_b else -2]
    if reduced != a.shape[1]:
        wanted = "[G, N, K]" if trans_b else "[G, K, N]"
        raise need.value_error(
            "b.shape",
            f"K = {a.shape[1]} as in a",
            list(b.shape),
            f"trans_b={trans_b} wants {wanted}",
        )
    check_group_offsets(inputs.group_offsets, need, a.device, a.shape[0], b.shape[0])
    check_num_sms(num_sms, a.device, need)


def check_grouped_wgrad(options: WgradOptions, inputs: GroupedWgradInputs) -> None:
    """Argument checks of `grouped_wgrad`."""
    need, grad, a = Checks("grouped_wgrad"), inputs.grad, inputs.a
    group_offsets, accumulate_into = inputs.group_offsets, inputs.accumulate_into
    _check_out_dtype(options.out_dtype, need)
    _check_operand(grad, "grad", 2, -1, need)
    _check_operand(a, "a", 2, -1, need)
    _check_pair(grad, "grad", a, "a", need)
    copies = isinstance(grad, MXTensor)
    common = 1 if copies else 0
    num_rows = grad.shape[common]
    if a.shape[common] != num_rows:
        raise need.value_error(
            f"a.shape[{common}]",
            f"{num_rows} as in grad",
            a.shape[common],
            "both have the rows of the same groups",
        )
    check_group_offsets(group_offsets, need, grad.device, num_rows)
    check_num_sms(options.num_sms, grad.device, need)
    num_groups = group_offsets.shape[0] - 1
    if copies and num_rows < MX_BLOCK_SIZE * num_groups:
        raise need.value_error(
            "grad.shape[1]",
            f"padded_capacity(M, G), at least {MX_BLOCK_SIZE * num_groups}",
            num_rows,
            "pass the columnwise copies of quantize_dual(…, group_offsets=…)",
        )
    if accumulate_into is not None:
        widths = (grad.shape[0], a.shape[0]) if copies else (grad.shape[1], a.shape[1])
        need.tensor(accumulate_into, "accumulate_into")
        need(
            accumulate_into.shape[:1] != (num_groups + 1,),
            "group_offsets.shape",
            f"[G + 1] = [{num_groups + 2}], as accumulate_into has G = {num_groups + 1}",
            [num_groups + 1],
            COUNTS_REMEDY,
        )
        need.tensor(
            accumulate_into,
            "accumulate_into",
            dtype=torch.float32,
            shape=(num_groups, *widths),
            device=grad.device,
            contiguous=True,
        )


def _check_out_dtype(out_dtype: torch.dtype, need: Checks) -> None:
    need.dtype(out_dtype, OUT_DTYPES, "out_dtype")


def _check_operand(value: Operand, name: str, dims: int, axis: int, need: Checks) -> None:
    """bfloat16, or MXFP8 in logical order, quantised along the reduced axis."""
    if isinstance(value, MXTensor):
        need(
            value.format.codes_per_byte == 1,
            f"{name}.format",
            "mxfp8_e4m3 or mxfp8_e5m2",
            value.format.name,
            "quantise it to mxfp8",
        )
        need(value.layout is Layout.ROW_MAJOR, f"{name}.layout", Layout.ROW_MAJOR, value.layout)
        need(
            value.axis == axis,
            f"{name}.axis",
            axis,
            value.axis,
            "the quantised axis is the one that is summed over; quantize_dual makes both copies",
        )
        need(len(value.shape) == dims, f"{name}.dim()", dims, len(value.shape))
    else:
        need.tensor(value, name, dtype=torch.bfloat16, shape=(None,) * dims)


def _check_pair(
    first: Operand, first_name: str, second: Operand, second_name: str, need: Checks
) -> None:
    kinds = ["an MXTensor" if isinstance(x, MXTensor) else "bfloat16" for x in (first, second)]
    need(
        kinds[0] == kinds[1],
        second_name,
        f"{kinds[0]} as {first_name}",
        kinds[1],
        "both operands are bfloat16 or both are MX",
    )
    need(
        first.device == second.device,
        f"{second_name}.device",
        first.device,
        second.device,
        f"move it with .to('{first.device}')",
    )


def _gemm_problem(options: GemmOptions, inputs: GroupedGemmInputs) -> GroupedProblem:
    (out_dtype, trans_b, num_sms), a, b = options, inputs.a, inputs.b
    num_rows, k = a.shape
    return GroupedProblem(
        Op.GROUPED_GEMM,
        detect_target(a.device),
        num_rows,
        b.shape[0],
        b.shape[-2 if trans_b else -1],
        k,
        _format_name(a),
        _format_name(b),
        trans_b,
        out_dtype,
        False,
        _span(a),
        _span(b),
        num_sms,
    )


def _wgrad_problem(options: WgradOptions, inputs: GroupedWgradInputs) -> GroupedProblem:
    grad, a = inputs.grad, inputs.a
    copies = isinstance(grad, MXTensor)
    (n, num_rows), k = (grad.shape if copies else grad.shape[::-1]), a.shape[0 if copies else 1]
    accumulate = inputs.accumulate_into is not None
    return GroupedProblem(
        Op.GROUPED_WGRAD,
        detect_target(grad.device),
        num_rows,
        inputs.group_offsets.shape[0] - 1,
        n,
        k,
        _format_name(grad),
        _format_name(a),
        False,
        torch.float32 if accumulate else options.out_dtype,
        accumulate,
        _span(grad),
        _span(a),
        options.num_sms,
    )


def _format_name(value: Operand) -> str:
    return value.format.name if isinstance(value, MXTensor) else "bf16"


def _span(value: Operand) -> ScaleSpan:
    """The span of an operand; kernels read a square's scale from each of its blocks."""
    span = value.scale_span if isinstance(value, MXTensor) else ScaleSpan.BLOCK
    return ScaleSpan.BLOCK if span is ScaleSpan.SQUARE else span


def _fake_gemm(options: GemmOptions, inputs: GroupedGemmInputs) -> torch.Tensor:
    shape = inputs.a.shape[0], inputs.b.shape[1 if options.trans_b else 2]
    return inputs.group_offsets.new_empty(shape, dtype=options.out_dtype)


def _fake_wgrad(options: WgradOptions, inputs: GroupedWgradInputs) -> torch.Tensor:
    grad, a, group_offsets = inputs.grad, inputs.a, inputs.group_offsets
    width = 0 if isinstance(grad, MXTensor) else 1
    shape = group_offsets.shape[0] - 1, grad.shape[width], a.shape[width]
    return group_offsets.new_empty(shape, dtype=options.out_dtype)


_GEMM: OpSpec[GemmOptions, GroupedGemmInputs, torch.Tensor] = OpSpec(
    "grouped_gemm", check=check_grouped_gemm, describe=_gemm_problem, fake=_fake_gemm
)
_WGRAD: OpSpec[WgradOptions, GroupedWgradInputs, torch.Tensor] = OpSpec(
    "grouped_wgrad", check=check_grouped_wgrad, describe=_wgrad_problem, fake=_fake_wgrad
)
_ACCUMULATE: OpSpec[WgradOptions, GroupedWgradInputs, None] = OpSpec(
    "grouped_wgrad_accumulate",
    check=check_grouped_wgrad,
    describe=_wgrad_problem,
    fake=_fake_wgrad,
    returns="()",
    mutates="accumulate_into",
    is_public=False,
)
