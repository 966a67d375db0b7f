"""grouped_linear: one linear layer per group of rows, its three GEMMs in MXFP8, for autograd."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..core.ambient import Context, isolated, refuse_transforms
from ..core.geometry import describe
from ..core.gradient import apply, differentiable_once, keep_graph
from ..core.known import KnownArguments
from ..formats.spec import MXFP8FormatLike, ScaleRule, ScaleSpan
from ..formats.tensor import MXTensor, Operand
from ..grouped.op import grouped_gemm, grouped_wgrad
from ..quantize.dual_op import quantize_dual
from ..quantize.op import quantize
from ..routing.plan import group_bounds
from .checks import check_grouped_linear, check_limit
from .quantized import (
    NONE_GIVEN,
    Given,
    Quantized,
    copies_of,
    copy_from,
    kind_of_copy,
    parts_of_copy,
)
from .recipe import MXFP8Recipe, Spans

# ---- Weight gradients that backward adds to ``weight.main_grad``, by the convention of Megatron-
# LM.
#
# Its optimisers read `main_grad`. Its DistributedDataParallel marks each parameter with
# ``grad_added_to_main_grad``, and its hook wants a gradient of the parameter's shape from backward:
# it starts the reduction, and adds ``param.grad`` unless the mark is True.
#
# Source:
#     megatron.core.tensor_parallel.layers and transformer_engine.pytorch's linear modules,
#     with
#     ``gradient_accumulation_fusion``.


class MarkedWeight:
    """A weight whose trainer follows the convention. Not a tensor, so that autograd ignores it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @staticmethod
    def of(weight: torch.Tensor) -> MarkedWeight | None:
        """None where no trainer has marked the weight: ``weight.grad`` is left alone then."""
        marked = hasattr(weight, "grad_added_to_main_grad") or hasattr(weight, "__fsdp_param__")
        return MarkedWeight(weight) if marked else None

    def begin(self) -> torch.Tensor | None:
        """The main_grad that takes the gradient now; None if there is none.

        Megatron's FSDP makes it just before its use, and overwrites what an earlier step has left.
        """
        weight = self._weight
        if hasattr(weight, "__fsdp_param__"):
            weight.main_grad = weight.get_main_grad()  # type: ignore[attr-defined]
        main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and getattr(weight, "overwrite_main_grad", False):
            main_grad.zero_()
        return main_grad

    def end(self) -> torch.Tensor:
        """Mark the gradient as added, and return one in its place, which nobody reads.

        It is uninitialised unless ``weight.zero_out_wgrad`` says that the hook adds it.
        """
        weight = self._weight
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)


def grouped_linear(
    x: torch.Tensor | Quantized,
    weight: torch.Tensor | Quantized,
    group_offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recipe: MXFP8Recipe = MXFP8Recipe(),
    num_sms: int | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by its own weight; differentiable in x, weight and bias.

    Forward ``y[r] = x[r] @ weight[g(r)].T + bias[g(r)]``, dgrad ``dx[r] = dy[r] @ weight[g(r)]``,
    wgrad ``dweight[g] = dy_g.T @ x_g``, where g(r) is the group with ``group_offsets[g] ≤ r <
    group_offsets[g + 1]``. Rows at or beyond ``group_offsets[-1]`` are not read: their outputs and
    gradients are 0. Empty groups have zero gradients. Offsets outside of [0, M] are clamped, and an
    offset below an earlier one counts as the earlier one, so that its group is empty.

    For backward only quantised column-wise copies are kept: x [K, P] and weight [G, K, N], codes
    and scales (33 bytes for 32 values), with P = ``padded_capacity(M, G)``, and the offsets. Under
    `high_precision_wgrad` x itself is kept instead of its copy, with `enabled=False` x and weight.
    A copy that no requested gradient needs is dropped.

    If `weight` has an attribute ``main_grad`` ([G, N, K]), wgrad is added to it in place: by the
    GEMM if it is float32, with one rounding if it is bfloat16 or float16. ``weight.grad`` is left
    alone. A weight with Megatron-LM's ``grad_added_to_main_grad`` gets its mark, and the gradient
    of its shape that Megatron's hooks want. Autocast changes nothing.

    An operand that was quantised before is taken as it is, and has no gradient. The gradient of the
    other one needs its blocks along the other dimension as well. For a weight they follow from
    squares (``quantize(weight, "mxfp8", scale_span="square")``) without loss, for any operand from
    both copies of `quantize_dual`. The result has the bits of a call that quantises with the same
    options.

    Args:
        x: [M, K], bfloat16, float16 or float32; also float64 where the recipe is not enabled. Or an
            MXFP8 MXTensor of axis −1, or ``quantize_dual(x, group_offsets=group_offsets)``.
        weight: [G, N, K], any of these dtypes: quantised as it is (float32 master weights lose
            nothing on the way), or cast to the dtype of x where the recipe is not enabled. Or an
            MXFP8 MXTensor of axis −1, or ``quantize_dual(weight)``.
        group_offsets: int32 or int64 [G + 1] on the device of x; the first is 0. Never read back to
            the host, except for float16, float32 and float64 with ``enabled=False``.
        bias: [G, N], added to the rounded product in the dtype of x. Its gradient is summed in
            float32 (float64 for float64).
        recipe: formats, scale rule and switches. With MXFP8, K and N are multiples of 32.
        num_sms: most SMs that each of the three GEMMs occupies, as for `mxpert.grouped_gemm`; None
            is all of them. Quantisation is not limited.

    Returns:
        [M, N] in the dtype of x; bfloat16 where x is quantised.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; a gradient
            that needs a copy which was not given.
        UnsupportedError: no backend serves the problem here; see mxpert.explain.

    Example:
        >>> import torch
        >>> from mxpert.training import grouped_linear
        >>> x = torch.randn(5, 32, dtype=torch.bfloat16, requires_grad=True)
        >>> weight = torch.randn(3, 64, 32, requires_grad=True)
        >>> y = grouped_linear(x, weight, torch.tensor([0, 2, 2, 5]))  # the second group is empty
        >>> y.sum().backward()
        >>> y.shape, weight.grad[1].abs().max().item()
        (torch.Size([5, 64]), 0.0)
    """
    given = NONE_GIVEN
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        given = Given(copies_of(x), copies_of(weight))
    return run_grouped_linear(x, weight, given, group_offsets, bias, recipe, num_sms)


def run_grouped_linear(
    x: torch.Tensor | Quantized,
    weight: torch.Tensor | Quantized,
    given: Given,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: MXFP8Recipe,
    num_sms: int | None,
) -> torch.Tensor:
    """`grouped_linear` with the copies in `given`, in place of those that it would make.

    A weight that is a tensor has its gradient although its copies were given.
    """
    refuse_transforms("grouped_linear", (x, weight, bias))
    main_grad = getattr(weight, "main_grad", None)
    options = recipe, num_sms
    values = x, weight, bias, group_offsets, main_grad
    is_dense = given is NONE_GIVEN and not torch.compiler.is_compiling()
    if not is_dense or _PASSED.recall(options, values) is None:
        check_grouped_linear(x, weight, given, group_offsets, bias, recipe, main_grad)
        check_limit("grouped_linear", num_sms, group_offsets.device, recipe, x)
        if is_dense and describe(values) is not None:
            _PASSED.learn(options, values, None)
    dense_x = x if isinstance(x, torch.Tensor) else None
    dense_weight = weight if isinstance(weight, torch.Tensor) else None
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _multiply(dense_x, dense_weight, bias, group_offsets, given, recipe, num_sms)[0]
    marked = None if dense_weight is None else MarkedWeight.of(dense_weight)
    result: torch.Tensor = apply(
        _GroupedLinear,
        dense_x,
        dense_weight,
        bias,
        group_offsets,
        main_grad,
        marked,
        recipe,
        torch.is_grad_enabled(),
        given,
        num_sms,
    )
    return result


_PASSED = KnownArguments[tuple[MXFP8Recipe, int | None], None]()
"""Arguments of `grouped_linear` that have passed its checks, which look at no data."""


class _GroupedLinear(torch.autograd.Function):
    """Autograd of `grouped_linear`; arguments are checked by then."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        group_offsets: torch.Tensor,
        main_grad: torch.Tensor | None,
        marked: MarkedWeight | None,
        recipe: MXFP8Recipe,
        grad_enabled: bool,
        given: Given,
        num_sms: int | None,
    ) -> torch.Tensor:
        keep_graph(ctx, x, weight, bias)
        need_x, need_weight = ctx.needs_input_grad[:2]
        # main_grad is no saved tensor: backward writes it, which autograd would take for an error
        # where one weight is used twice.
        ctx.recipe, ctx.main_grad, ctx.marked = recipe, main_grad, marked
        ctx.num_sms = num_sms
        ctx.x_dtype = torch.bfloat16 if x is None else x.dtype
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.turns_weight = given.weight is not None and given.weight[1] is None
        needs = grad_enabled and need_x, grad_enabled and need_weight
        y, kept, group_offsets = _multiply(
            x, weight, bias, group_offsets, given, recipe, num_sms, needs
        )
        ctx.kinds = kind_of_copy(kept[0]), kind_of_copy(kept[1])
        ctx.save_for_backward(*parts_of_copy(kept[0]), *parts_of_copy(kept[1]), group_offsets)
        return y

    @staticmethod
    @differentiable_once("grouped_linear")
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, group_offsets = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad, marked, main_grad = grad.contiguous(), ctx.marked, ctx.main_grad
        if marked is not None and need_weight:
            main_grad = marked.begin()
        # The GEMM adds to float32 alone.
        ctx.accumulate_into = main_grad
        if main_grad is not None and main_grad.dtype != torch.float32:
            ctx.accumulate_into, ctx.weight_dtype = None, torch.float32
        backward = _backward_mx if ctx.recipe.enabled else _backward_plain
        dbias = None
        with isolated(grad.device.type):
            dx, dweight = backward(ctx, grad, saved, group_offsets, need_x, need_weight)
            if need_bias:
                dbias = _sum_groups(grad, group_offsets).to(ctx.bias_dtype)
            if main_grad is not None and need_weight and ctx.accumulate_into is None:
                main_grad.add_(dweight)
        if main_grad is not None and need_weight:
            dweight = None if marked is None else marked.end()  # main_grad has it
        return dx, dweight, dbias, None, None, None, None, None, None, None


def _multiply(
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_offsets: torch.Tensor,
    given: Given,
    recipe: MXFP8Recipe,
    num_sms: int | None,
    needs: tuple[bool, bool] = (False, False),
) -> tuple[torch.Tensor, tuple[Operand | None, Operand | None], torch.Tensor]:
    """The result, what backward needs of x and of the weight, and the group offsets for it.

    needs: whether x and the weight get a gradient.
    """
    rows = x if given.x is None else given.x[0]
    assert rows is not None  # for the type checker
    group_offsets, (need_x, need_weight) = group_bounds(group_offsets, rows.shape[0]), needs
    kept: tuple[Operand | None, Operand | None]
    # The recipe says what is computed in which format: autocast has no part in it.
    with isolated(rows.device.type):
        if recipe.enabled:
            (x_row, weight_row), kept = _forward_operands(
                x, weight, given, group_offsets, recipe, need_x, need_weight
            )
            out_dtype = torch.bfloat16 if x is None else x.dtype
            y = grouped_gemm(x_row, weight_row, group_offsets, out_dtype=out_dtype, num_sms=num_sms)
        else:
            assert x is not None  # for the type checker
            assert weight is not None  # for the type checker
            weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
            y = multiply_rows(x, weight, group_offsets, trans_b=True, num_sms=num_sms)
            kept = x if need_weight else None, weight if need_x else None
        return y if bias is None else _add_bias(y, bias, group_offsets), kept, group_offsets


def _forward_operands(
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    given: Given,
    group_offsets: torch.Tensor,
    recipe: MXFP8Recipe,
    need_x: bool,
    need_weight: bool,
) -> tuple[tuple[MXTensor, MXTensor], tuple[Operand | None, Operand | None]]:
    """Operands of the product, and what backward needs of x and of the weight."""
    fmt, rule, spans = recipe.forward_format, recipe.scale_rule, recipe.spans(group_offsets.device)
    kept_x: Operand | None = None
    kept_weight: MXTensor | None = None
    if given.x is not None:
        x_row, kept_x = given.x[0], given.x[1] if need_weight else None
    else:
        assert x is not None  # for the type checker
        if need_weight and not recipe.high_precision_wgrad:
            x_row, kept_x = quantize_dual(
                x, fmt, group_offsets=group_offsets, scale_rule=rule, scale_span=spans.x
            )
        else:
            x_row = quantize_rows(x, fmt, rule, spans.x, group_offsets)
            if need_weight:
                kept_x = x.to(torch.bfloat16)
    if given.weight is not None:
        weight_row, column = given.weight
        if need_x:  # squares are turned in backward: until then the caller's tensor is enough
            kept_weight = weight_row if column is None else column
    else:
        assert weight is not None  # for the type checker
        if need_x:
            weight_row, kept_weight = quantize_dual(
                weight, fmt, scale_rule=rule, scale_span=spans.weight
            )
        else:
            weight_row = quantize_rows(weight, fmt, rule, spans.weight, None)
    return (x_row, weight_row), (kept_x, kept_weight)


def quantize_rows(
    x: torch.Tensor,
    fmt: MXFP8FormatLike,
    rule: ScaleRule,
    spans: Spans,
    group_offsets: torch.Tensor | None,
) -> MXTensor:
    """The row-wise copy alone; with longer spans the other one is made beside it."""
    if spans[0] is ScaleSpan.BLOCK:
        return quantize(x, fmt, scale_rule=rule)
    return quantize_dual(x, fmt, group_offsets=group_offsets, scale_rule=rule, scale_span=spans)[0]


def _backward_mx(
    ctx: Context,
    grad: torch.Tensor,
    saved: list[Any],
    group_offsets: torch.Tensor,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dgrad and wgrad from one quantisation of the gradient."""
    recipe: MXFP8Recipe = ctx.recipe
    x, weight = saved[:3], saved[3:]
    rule, high_precision = recipe.scale_rule, recipe.high_precision_wgrad
    backward, spans = recipe.backward_format, recipe.spans(grad.device)
    dx = dweight = grad_row = None
    if need_weight and high_precision:
        dweight = grouped_wgrad(
            grad.to(torch.bfloat16),
            x[0],
            group_offsets,
            out_dtype=ctx.weight_dtype,
            accumulate_into=ctx.accumulate_into,
            num_sms=ctx.num_sms,
        )
    elif need_weight:
        grad_row, grad_col = quantize_dual(
            grad, backward, group_offsets=group_offsets, scale_rule=rule, scale_span=spans.grad
        )
        dweight = grouped_wgrad(
            grad_col,
            copy_from(x, ctx.kinds[0]),
            group_offsets,
            out_dtype=ctx.weight_dtype,
            accumulate_into=ctx.accumulate_into,
            num_sms=ctx.num_sms,
        )
    if need_x:
        if grad_row is None:
            grad_row = quantize_rows(grad, backward, rule, spans.grad, group_offsets)
        weight_col = copy_from(weight, ctx.kinds[1])
        if ctx.turns_weight:  # it is squares of the row-wise copy
            weight_col = weight_col.mT.with_axis(-1)
        dx = grouped_gemm(
            grad_row, weight_col, group_offsets, out_dtype=ctx.x_dtype, num_sms=ctx.num_sms
        )
    return dx, dweight


def _backward_plain(
    ctx: Context,
    grad: torch.Tensor,
    saved: list[Any],
    group_offsets: torch.Tensor,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dgrad and wgrad without quantisation."""
    x, _, _, weight, _, _ = saved
    dx = dweight = None
    if need_x:
        dx = multiply_rows(grad, weight, group_offsets, trans_b=False, num_sms=ctx.num_sms)
    if need_weight:
        dweight = multiply_groups(
            grad,
            x,
            group_offsets,
            out_dtype=ctx.weight_dtype,
            accumulate_into=ctx.accumulate_into,
            num_sms=ctx.num_sms,
        )
    return dx, dweight


def multiply_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    group_offsets: torch.Tensor,
    *,
    trans_b: bool,
    num_sms: int | None = None,
) -> torch.Tensor:
    """``a[r] @ b[g(r)].T`` (or without the transposition) in one dtype; bfloat16 on the kernels."""
    if a.dtype == torch.bfloat16:
        return grouped_gemm(a, b, group_offsets, trans_b=trans_b, num_sms=num_sms)
    matrices = b.mT if trans_b else b
    out = a.new_zeros(a.shape[0], matrices.shape[-1])
    for part, matrix in zip(_parts(group_offsets), matrices.unbind(0), strict=True):
        torch.mm(a[part], matrix, out=out[part])
    return out


def multiply_groups(
    grad: torch.Tensor,
    a: torch.Tensor,
    group_offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    accumulate_into: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> torch.Tensor:
    """``grad_g.T @ a_g`` for each group in one dtype; bfloat16 on the kernels."""
    if a.dtype == torch.bfloat16:
        return grouped_wgrad(
            grad,
            a,
            group_offsets,
            out_dtype=out_dtype,
            accumulate_into=accumulate_into,
            num_sms=num_sms,
        )
    out = torch.stack([grad[part].mT @ a[part] for part in _parts(group_offsets)])
    return out.to(out_dtype) if accumulate_into is None else accumulate_into.add_(out)


def _parts(group_offsets: torch.Tensor) -> list[slice]:
    """Row ranges of the groups, read back from the device."""
    offsets = group_offsets.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(offsets)]


def _add_bias(y: torch.Tensor, bias: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """Add to each row its group's bias; rows outside of every group get zeros.

    group_offsets: as `group_bounds` returns them.
    """
    rows = torch.arange(y.shape[0], dtype=group_offsets.dtype, device=y.device)
    group = torch.searchsorted(group_offsets, rows, right=True)
    padded = torch.nn.functional.pad(bias.to(y.dtype), (0, 0, 1, 1))  # [G + 2, N]
    return y + padded[group]


def _sum_groups(grad: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """Sum of each group's rows [G, N], in float32 or wider, in a fixed order.

    group_offsets: as `group_bounds` returns them; `segment_reduce` does not check them.
    """
    wide = grad if grad.dtype == torch.float64 else grad.float()
    return torch.segment_reduce(wide, "sum", offsets=group_offsets, axis=0, unsafe=True, initial=0)
