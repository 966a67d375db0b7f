"""Argument checks of `grouped_linear`."""

from __future__ import annotations

import torch

from ..core.target import check_num_sms
from ..errors import Checks
from ..formats.spec import FLOAT_DTYPES, MX_BLOCK_SIZE, WIDE_DTYPES, ScaleSpan
from ..formats.tensor import Layout
from ..quantize.dual_op import COUNTS_REMEDY
from ..routing.plan import padded_capacity
from .quantized import Copies, Given, Quantized
from .recipe import MXFP8Recipe

MAIN_GRAD_DTYPES = FLOAT_DTYPES
"""Dtypes of main_grad; 16-bit ones take the float32 gradient with one rounding."""

OFFSET_DTYPES = (torch.int32, torch.int64)


def check_grouped_linear(
    x: torch.Tensor | Quantized,
    weight: torch.Tensor | Quantized,
    given: Given,
    group_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: MXFP8Recipe,
    main_grad: torch.Tensor | None,
) -> None:
    """Argument checks of `grouped_linear`."""
    need = Checks("grouped_linear")
    if not isinstance(recipe, MXFP8Recipe):
        raise need.type_error("recipe", "an MXFP8Recipe", type(recipe).__name__)
    dtypes = FLOAT_DTYPES if recipe.enabled else WIDE_DTYPES
    num_rows, in_features, device = _check_x(need, x, given, dtypes)
    num_groups, out_features = _check_weight(need, weight, given, in_features, device, dtypes)
    _check_offsets(need, group_offsets, num_groups, device)
    padded = [in_features, padded_capacity(num_rows, num_groups)]
    shape = [num_groups, out_features, in_features]
    if given.x is not None:
        rows = [num_rows, in_features]
        check_copies(need, "x", given.x, (rows, padded), device, recipe)
    if given.weight is not None:
        shapes = shape, [num_groups, in_features, out_features]
        check_copies(need, "weight", given.weight, shapes, device, recipe)
    if bias is not None:
        need.tensor(bias, "bias", dtype=dtypes, shape=(num_groups, out_features), device=device)
    if main_grad is not None:
        need.tensor(
            main_grad,
            "weight.main_grad",
            dtype=MAIN_GRAD_DTYPES,
            shape=tuple(shape),
            device=device,
            contiguous=True,
        )
    if recipe.enabled:
        for axis, size in ((2, in_features), (1, out_features)):
            need(
                size % MX_BLOCK_SIZE == 0,
                f"weight.shape[{axis}]",
                f"a multiple of {MX_BLOCK_SIZE}",
                size,
                "pad the layer, or pass MXFP8Recipe(enabled=False)",
            )
    if torch.is_grad_enabled():
        wanted = (isinstance(each, torch.Tensor) and each.requires_grad for each in (x, weight))
        check_gradients(need, given, recipe, *wanted)


def check_limit(
    op: str,
    num_sms: int | None,
    device: torch.device,
    recipe: MXFP8Recipe,
    x: torch.Tensor | Quantized,
) -> None:
    """Check `num_sms`, which no product of torch keeps to."""
    need = Checks(op)
    check_num_sms(num_sms, device, need)
    by_torch = not recipe.enabled and isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16
    if num_sms is not None and by_torch:
        wanted = "None where torch multiplies"
        raise need.value_error("num_sms", wanted, num_sms, "pass bfloat16, or enable the recipe")


def _check_x(
    need: Checks, x: torch.Tensor | Quantized, given: Given, dtypes: tuple[torch.dtype, ...]
) -> tuple[int, int, torch.device]:
    """M, K and the device of x; its copies are checked later."""
    if given.x is None:
        need.tensor(x, "x", dtype=dtypes, shape=(None, None))
    rows = given.geometry(x, given.x)
    need(len(rows.shape) == 2, "x.shape", "[M, K]", list(rows.shape))
    return rows.shape[0], rows.shape[1], rows.device


def _check_weight(
    need: Checks,
    weight: torch.Tensor | Quantized,
    given: Given,
    in_features: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[int, int]:
    """G and N of the weight; its copies are checked later."""
    if isinstance(weight, torch.Tensor) or given.weight is None:
        need.tensor(weight, "weight", dtype=dtypes, shape=(None, None, in_features), device=device)
    matrices = given.geometry(weight, given.weight)
    need(len(matrices.shape) == 3, "weight.shape", "[G, N, K]", list(matrices.shape))
    need(matrices.shape[0] > 0, "weight.shape[0]", "at least one group", matrices.shape[0])
    return matrices.shape[0], matrices.shape[1]


def _check_offsets(
    need: Checks, group_offsets: torch.Tensor, num_groups: int, device: torch.device
) -> None:
    need.tensor(group_offsets, "group_offsets")
    need(
        group_offsets.shape != (num_groups,),
        "group_offsets.shape",
        [num_groups + 1],
        [num_groups],
        COUNTS_REMEDY,
    )
    need.tensor(
        group_offsets, "group_offsets", dtype=OFFSET_DTYPES, shape=(num_groups + 1,), device=device
    )


def check_copies(
    need: Checks,
    name: str,
    copies: Copies,
    shapes: tuple[list[int], list[int]],
    device: torch.device,
    recipe: MXFP8Recipe,
) -> None:
    """Check the copies of one operand; `shapes` are of the row-wise and the column-wise one."""
    need(
        recipe.enabled,
        name,
        "a dense tensor with MXFP8Recipe(enabled=False)",
        "an MXTensor",
        "pass mxpert.dequantize(…) of it",
    )
    for copy, what, shape in zip(copies, (name, f"{name}[1]"), shapes, strict=True):
        if copy is None:
            continue
        names = "mxfp8_e4m3 or mxfp8_e5m2"
        need(copy.format.codes_per_byte == 1, f"{what}.format", names, copy.format.name)
        need(copy.layout is Layout.ROW_MAJOR, f"{what}.layout", Layout.ROW_MAJOR, copy.layout)
        remedy = "the blocks lie along the dimension that is summed over; see MXTensor.with_axis"
        need(copy.axis == -1, f"{what}.axis", -1, copy.axis, remedy)
        need(list(copy.shape) == shape, f"{what}.shape", shape, list(copy.shape))
        need(copy.device == device, f"{what}.device", device, copy.device)


def check_gradients(
    need: Checks, given: Given, recipe: MXFP8Recipe, need_x: bool, need_weight: bool
) -> None:
    """Refuse gradients that need a copy which was not given and does not follow without loss."""
    if need_x and given.weight is not None:
        row, column = given.weight
        need(
            column is not None or row.scale_span is ScaleSpan.SQUARE,
            "weight",
            "squares or both copies, for the gradient of x",
            f"one copy with {row.scale_span}",
            'pass quantize(weight, "mxfp8", scale_span="square"), or quantize_dual(weight)',
        )
    if need_weight and given.x is not None:
        need(
            not recipe.high_precision_wgrad,
            "x",
            "a dense tensor for the gradient of weight, with high_precision_wgrad",
            "an MXTensor",
            "pass x itself, or a recipe without it",
        )
        need(
            given.x[1] is not None,
            "x",
            "both copies, for the gradient of weight",
            "one copy",
            "pass quantize_dual(x, group_offsets=…): its second copy begins a block at each group",
        )
