"""grouped_mm: torch's grouped matmul in MXFP8, with the same signature."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..core.ambient import Context, isolated, refuse_transforms
from ..core.gradient import apply, differentiable_once, keep_graph
from ..core.schema import rebuild_mx
from ..errors import Checks, UnsupportedError, message
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, WIDE_DTYPES
from ..grouped.op import grouped_gemm, grouped_wgrad
from ..quantize.dual_op import quantize_dual
from ..routing.plan import group_bounds
from .autograd import grouped_linear, multiply_groups, multiply_rows, quantize_rows
from .checks import check_limit
from .quantized import Quantized, copies_of
from .recipe import MXFP8Recipe


def grouped_mm(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    recipe: MXFP8Recipe = MXFP8Recipe(),
    num_sms: int | None = None,
) -> torch.Tensor:
    """`torch._grouped_mm` (`torch.nn.functional.grouped_mm`) in MXFP8, differentiable.

    With group g at ``offs[g − 1] … offs[g] − 1``:
        2D × 3D: a [M, K], b [G, K, N], groups of rows: ``out[r] = a[r] @ b[g(r)]``, [M, N]. Rows
        beyond ``offs[-1]`` are 0.
        2D × 2D: a [M, K], b [K, N], groups along K: ``out[g] = a[:, g] @ b[g, :]``, [G, M, N].

    Args:
        a, b: bfloat16, float16 or float32, of one dtype. A b [G, K, N] that is the transpose of a
            contiguous [G, N, K] (as torchtitan passes it) is used without a copy. 2D × 3D operands
            may be quantised before, as in `grouped_linear`: a as an MXTensor of axis −1 or
            ``quantize_dual(a, group_offsets=pad(offs, (1, 0)))``, b as one of axis −2 (for example
            the ``mT`` of a weight [G, N, K]) or ``quantize_dual(b)``.
        offs: int32 [G] on the device of a: where each group ends; clamped as the offsets of
            `grouped_linear`.
        bias: None, as torch requires; for 2D × 3D also [G, N].
        out_dtype: None or the dtype of a, as torch requires.
        recipe: formats and switches. With MXFP8, K and N (2D × 2D: M and N) are multiples of 32;
            group sizes are free.
        num_sms: most SMs that each GEMM occupies, as for `grouped_linear`.

    Returns:
        In the dtype of a; bfloat16 where a is quantised.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
        UnsupportedError: 3D × 2D or 3D × 3D operands.

    Example:
        >>> import torch
        >>> from mxpert.training import grouped_mm
        >>> a, weight = torch.randn(5, 32).bfloat16(), torch.randn(2, 64, 32).bfloat16()
        >>> offs = torch.tensor([3, 5], dtype=torch.int32)
        >>> grouped_mm(a, weight.transpose(-2, -1), offs=offs).shape
        torch.Size([5, 64])
        >>> grouped_mm(torch.randn(64, 5).bfloat16(), a, offs=offs).shape
        torch.Size([2, 64, 32])
    """
    refuse_transforms("grouped_mm", (a, b, bias))
    if copies_of(a) is not None or copies_of(b) is not None:
        return _of_quantized(a, b, offs, bias, out_dtype, recipe, num_sms)
    _check_grouped_mm(a, b, offs, bias, out_dtype, recipe)
    assert isinstance(a, torch.Tensor)  # for the type checker
    assert isinstance(b, torch.Tensor)  # for the type checker
    assert offs is not None  # for the type checker
    check_limit("grouped_mm", num_sms, a.device, recipe, a)
    group_offsets = torch.nn.functional.pad(offs, (1, 0))
    if b.dim() == 3:
        weight = b.transpose(-2, -1).contiguous()
        return grouped_linear(a, weight, group_offsets, bias=bias, recipe=recipe, num_sms=num_sms)
    result: torch.Tensor = apply(
        _GroupedOuter,
        a.transpose(0, 1).contiguous(),
        b.contiguous(),
        group_offsets,
        recipe,
        num_sms,
    )
    return result


def _of_quantized(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    recipe: MXFP8Recipe,
    num_sms: int | None,
) -> torch.Tensor:
    """2D × 3D operands, one of which was quantised before."""
    need, copies = Checks("grouped_mm"), copies_of(b)
    if copies is not None:
        first, second = copies
        shape = list(first.shape)
        need(
            len(shape) == 3,
            "b.shape",
            "[G, K, N]; 2D × 2D operands are quantised by the call",
            shape,
            "pass dense tensors, or call mxpert.grouped_wgrad",
        )
        if second is None:
            need(first.axis == -2, "b.axis", "-2 (K)", first.axis, "see MXTensor.with_axis")
            turned = first.mT
            weight: torch.Tensor | Quantized = replace(
                turned, qdata=turned.qdata.contiguous(), scale=turned.scale.contiguous()
            )
        else:
            weight = second, first
    else:
        need.tensor(b, "b", dtype=FLOAT_DTYPES, shape=(None, None, None))
        assert isinstance(b, torch.Tensor)  # for the type checker
        weight = b.transpose(-2, -1).contiguous()
    dtype = a.dtype if isinstance(a, torch.Tensor) else torch.bfloat16
    need(out_dtype in (None, dtype), "out_dtype", f"None or {dtype}", out_dtype, "cast the result")
    need.tensor(offs, "offs", dtype=torch.int32, shape=(None,))
    assert offs is not None  # for the type checker
    group_offsets = torch.nn.functional.pad(offs, (1, 0))
    return grouped_linear(a, weight, group_offsets, bias=bias, recipe=recipe, num_sms=num_sms)


def _check_grouped_mm(
    a: object,
    b: object,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    recipe: MXFP8Recipe,
) -> None:
    need = Checks("grouped_mm")
    if not isinstance(recipe, MXFP8Recipe):
        raise need.type_error("recipe", "an MXFP8Recipe", type(recipe).__name__)
    dtypes = FLOAT_DTYPES if recipe.enabled else WIDE_DTYPES
    need.tensor(a, "a", dtype=dtypes)
    assert isinstance(a, torch.Tensor)  # for the type checker
    need.tensor(b, "b", dtype=a.dtype, device=a.device)
    assert isinstance(b, torch.Tensor)  # for the type checker
    if (a.dim(), b.dim()) not in ((2, 2), (2, 3)):
        raise UnsupportedError(
            message(
                need.op,
                "a, b",
                "2D × 3D or 2D × 2D operands",
                f"{a.dim()}D × {b.dim()}D",
                "use torch.bmm where each group is a matrix of its own",
            )
        )
    need.tensor(offs, "offs", dtype=torch.int32, shape=(None,), device=a.device)
    inner = b.shape[-2]
    need(a.shape[1] == inner, "b.shape", f"{a.shape[1]} rows (K) in each matrix", list(b.shape))
    need(
        out_dtype in (None, a.dtype),
        "out_dtype",
        f"None or {a.dtype}",
        out_dtype,
        "cast the result",
    )
    if b.dim() == 3:
        return  # the rest is checked by grouped_linear
    need(bias is None, "bias", "None for 2D × 2D operands", "a tensor")
    if recipe.enabled:
        for name, size in (("a.shape[0]", a.shape[0]), ("b.shape[1]", b.shape[1])):
            need(
                size % MX_BLOCK_SIZE == 0,
                name,
                f"a multiple of {MX_BLOCK_SIZE}",
                size,
                "pad it, or pass MXFP8Recipe(enabled=False)",
            )


class _GroupedOuter(torch.autograd.Function):
    """``out[g] = a_g.T @ b_g`` for rows a [R, M] and b [R, N]; both gradients are M-grouped.

    Forward sums each operand over its rows; the other operand's gradient sums it over its columns.
    Backward therefore keeps the row-wise copies.
    """

    @staticmethod
    def forward(
        ctx: Context,
        a: torch.Tensor,
        b: torch.Tensor,
        group_offsets: torch.Tensor,
        recipe: MXFP8Recipe,
        num_sms: int | None,
    ) -> torch.Tensor:
        keep_graph(ctx, a, b)
        ctx.recipe, ctx.dtype, ctx.num_sms = recipe, a.dtype, num_sms
        group_offsets = group_bounds(group_offsets, a.shape[0])
        if not recipe.enabled:
            ctx.save_for_backward(a, b, group_offsets)
            with isolated(a.device.type):
                return multiply_groups(a, b, group_offsets, out_dtype=a.dtype, num_sms=num_sms)
        # In backward the gradient is the second operand, as the weight is in grouped_linear.
        spans = recipe.spans(a.device)
        (a_row, a_col), (b_row, b_col) = (
            quantize_dual(
                rows,
                recipe.forward_format,
                group_offsets=group_offsets,
                scale_rule=recipe.scale_rule,
                scale_span=span,
            )
            for rows, span in ((a, spans.grad), (b, spans.x))
        )
        ctx.span = spans.x[0]
        ctx.save_for_backward(
            a_row.qdata,
            a_row.scale,
            a_row.wide_blocks,
            b_row.qdata,
            b_row.scale,
            b_row.wide_blocks,
            group_offsets,
        )
        return grouped_wgrad(a_col, b_col, group_offsets, out_dtype=a.dtype, num_sms=num_sms)

    @staticmethod
    @differentiable_once("grouped_mm")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *operands, group_offsets = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        grad = grad.contiguous()  # [G, M, N]
        da = db = None
        multiply = functools.partial(multiply_rows, num_sms=ctx.num_sms)
        multiply_mx = functools.partial(grouped_gemm, num_sms=ctx.num_sms)
        if not ctx.recipe.enabled:
            a, b = operands
            with isolated(grad.device.type):
                da = multiply(b, grad, group_offsets, trans_b=True) if need_a else None
                db = multiply(a, grad, group_offsets, trans_b=False) if need_b else None
            return da, db, None, None, None
        recipe: MXFP8Recipe = ctx.recipe
        a_row, b_row = (
            rebuild_mx(qdata, scale, recipe.forward_format, span=ctx.span, wide=wide)
            for qdata, scale, wide in (operands[:3], operands[3:])
        )
        fmt, rule = recipe.backward_format, recipe.scale_rule
        spans = recipe.spans(grad.device).weight
        if need_b:
            grad_row, grad_col = quantize_dual(grad, fmt, scale_rule=rule, scale_span=spans)
            db = multiply_mx(a_row, grad_col, group_offsets, out_dtype=ctx.dtype)
        else:
            grad_row = quantize_rows(grad, fmt, rule, spans, None)
        if need_a:
            da = multiply_mx(b_row, grad_row, group_offsets, out_dtype=ctx.dtype)
        return da, db, None, None, None
