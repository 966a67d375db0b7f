"""quantize_dual: the rowwise and the columnwise MXFP8 copy of one tensor, for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..core.kernel import AnyKernel
from ..core.ops import OpSpec, runs_eagerly
from ..core.problem import DualProblem, Op
from ..core.registry import resolve
from ..core.schema import FormatName, Spans, rebuild_mx, spans_of
from ..core.target import detect_target
from ..errors import Checks
from ..formats.spec import (
    FLOAT_DTYPES,
    MX_BLOCK_SIZE,
    MXFormat,
    MXFP8FormatLike,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
    refuse_squares,
)
from ..formats.tensor import MXTensor
from ..routing.plan import GROUP_OFFSET_DTYPES, padded_capacity
from .inputs import DualInputs
from .op import check_seed, seed_tensor

MAX_GROUPED_ROWS = 1 << 30
"""Kernels count padded columns in int32 and add one tile before they mask."""

COUNTS_REMEDY = "counts become offsets by torch.nn.functional.pad(counts.cumsum(0), (1, 0))"


def quantize_dual(
    x: torch.Tensor,
    format: MXFP8FormatLike = "mxfp8_e4m3",
    *,
    group_offsets: torch.Tensor | None = None,
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    scale_span: ScaleSpanLike | tuple[ScaleSpanLike, ScaleSpanLike] = ScaleSpan.BLOCK,
    stochastic_seed: int | torch.Tensor | None = None,
) -> tuple[MXTensor, MXTensor]:
    """Quantise a tensor along its rows and along its columns, in one read.

    ``row = quantize(x, axis=-1)`` and ``col = quantize(x.mT, axis=-1)``. Training needs both: one
    GEMM sums along the rows of x, another along its columns.

    With `group_offsets`, group g is the rows ``offsets[g] … offsets[g + 1]``. In the columnwise
    copy each group starts at a multiple of 32 (`padded_group_offsets`) and is padded with zeros, so
    that no block crosses groups. Rows at or beyond ``offsets[-1]`` count as zero. A block of zeros
    has codes 0 and scale byte 127.

    Args:
        x: float32, bfloat16 or float16, any strides. [M, K], K a multiple of 32 (and M too without
            `group_offsets`), or weights [G, N, K], N and K multiples of 32.
        format: "mxfp8_e4m3" (or "mxfp8") or "mxfp8_e5m2", of both copies.
        group_offsets: int32 or int64 [G + 1] on the device of `x`: 0, then not decreasing, at most
            M; offsets, not counts. On a GPU they are not read by the host;
            `mxpert.testing.validate.validate_group_offsets` checks them. Rows of x before
            ``offsets[0]`` are undefined in the rowwise copy.
        scale_rule: how a scale follows from its block's maximum: a ScaleRule or its name.
        scale_span: how many blocks share a scale, for both copies or as a pair (row, col): a
            ScaleSpan or its name. GPUs with block-scaled tensor cores use BLOCK, those with plain
            FP8 are fastest with ROW. In a grouped columnwise copy no span crosses groups.
        stochastic_seed: as for `quantize`, for both copies: both round an element by the same
            random number, that of its place in x. On GPUs the portable kernels round so, with
            scales of BLOCK.

    Returns:
        Two MXTensors of axis −1: the rowwise copy in the shape of `x`, and the columnwise copy,
        stored transposed: [K, M], with groups [K, P] where P is ``padded_capacity(M, G)``, for
        weights [G, K, N]. Codes and scales are contiguous where the device's grouped GEMMs read
        such; elsewhere they have the strides that these read in place, for example rows of codes
        that begin at lines of 128 bytes.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a shape, format or device that does not fit.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 6.3.

    Example:
        >>> import torch, mxpert
        >>> offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> row, col = mxpert.quantize_dual(torch.ones(4, 64), group_offsets=offsets)
        >>> row.shape, col.shape
        (torch.Size([4, 64]), torch.Size([64, 96]))
        >>> mxpert.dequantize(col)[0].nonzero().flatten().tolist()
        [0, 32, 33]
    """
    if not isinstance(scale_rule, ScaleRule):
        scale_rule = ScaleRule.parse(scale_rule, "quantize_dual", "scale_rule")
    spans: Any = scale_span  # what is no span goes on to the checks
    if isinstance(scale_span, str):
        spans = ScaleSpan.parse(scale_span, "quantize_dual", "scale_span")
    elif isinstance(scale_span, tuple) and str in map(type, scale_span):
        spans = tuple(ScaleSpan.parse(each, "quantize_dual", "scale_span") for each in scale_span)
    if group_offsets is not None:
        refuse_counts(group_offsets, "quantize_dual")
    seed = None
    if stochastic_seed is not None:
        seed = seed_tensor(stochastic_seed, x, "quantize_dual")
    return _DUAL(DualOptions(scale_rule, format, spans), DualInputs(x, group_offsets, seed))


class DualOptions(NamedTuple):
    """Options of `quantize_dual`."""

    scale_rule: ScaleRule
    format: FormatName
    scale_span: Spans


def _check_spans(scale_span: Spans, need: Checks) -> None:
    spans = spans_of(scale_span)
    if not (
        isinstance(spans, tuple)
        and len(spans) == 2
        and all(isinstance(span, ScaleSpan) for span in spans)
    ):
        remedy = "for example mxpert.ScaleSpan.ROW"
        raise need.type_error("scale_span", "a ScaleSpan or two", repr(scale_span), remedy)
    for span in spans:
        refuse_squares(span, need.op, "scale_span")


def check_quantize_dual(options: DualOptions, inputs: DualInputs) -> None:
    """Argument checks of `quantize_dual`."""
    need, x, group_offsets = Checks("quantize_dual"), inputs.x, inputs.group_offsets
    need.tensor(x, "x", dtype=FLOAT_DTYPES)
    need(x.dim() in (2, 3), "x.dim()", "2 for [M, K] or 3 for weights [G, N, K]", x.dim())
    element = get_format(options.format, need.op, "format")
    need(
        element.codes_per_byte == 1,
        "format",
        "mxfp8_e4m3 or mxfp8_e5m2",
        repr(element.name),
        "quantise mxfp4 with mxpert.quantize, axis by axis",
    )
    need(
        x.shape[-1] % MX_BLOCK_SIZE == 0,
        "x.shape[-1]",
        "a multiple of 32",
        x.shape[-1],
        "pad with zeros (torch.nn.functional.pad)",
    )
    if group_offsets is None:
        need(
            x.shape[-2] % MX_BLOCK_SIZE == 0,
            "x.shape[-2]",
            "a multiple of 32",
            x.shape[-2],
            "pad with zeros, or pass group_offsets, which pads",
        )
    else:
        need(
            x.dim() == 2,
            "group_offsets",
            "None for weights [G, N, K]",
            "a tensor",
            "the groups of weights are their leading dimension",
        )
        check_group_offsets(group_offsets, need, x.device, x.shape[0])
    _check_spans(options.scale_span, need)
    check_seed(inputs.seed, x.device, need)


def refuse_counts(group_offsets: torch.Tensor, op: str) -> None:
    """Raise for offsets that decrease, as counts do, where the host can read them.

    Offsets on another device are not read: kernels make a group that ends before it begins empty.
    """
    if not (isinstance(group_offsets, torch.Tensor) and group_offsets.is_cpu and runs_eagerly()):
        return
    is_dense = group_offsets.layout is torch.strided and not group_offsets.is_nested
    if is_dense and group_offsets.dim() == 1 and group_offsets.dtype in GROUP_OFFSET_DTYPES:
        need = Checks(op)
        need(
            not (group_offsets[1:] < group_offsets[:-1]).any(),
            "group_offsets",
            "offsets that do not decrease",
            group_offsets.tolist()[:8],
            COUNTS_REMEDY,
        )


def check_group_offsets(
    group_offsets: torch.Tensor,
    need: Checks,
    device: torch.device,
    num_rows: int,
    num_groups: int | None = None,
) -> None:
    """Check dtype, shape and device of group offsets, not their values."""
    need.tensor(
        group_offsets,
        "group_offsets",
        dtype=GROUP_OFFSET_DTYPES,
        shape=(None,),
        device=device,
        contiguous=True,
    )
    groups = group_offsets.shape[0] - 1
    need(
        groups >= 1,
        "group_offsets.shape",
        "[G + 1], one group at least",
        list(group_offsets.shape),
        "begin with 0 and append each group's end",
    )
    if num_groups is not None and groups != num_groups:
        raise need.value_error(
            "group_offsets.shape",
            f"[G + 1] = [{num_groups + 1}]",
            list(group_offsets.shape),
            COUNTS_REMEDY if groups + 1 == num_groups else "",
        )
    need(
        padded_capacity(num_rows, groups) <= MAX_GROUPED_ROWS,
        "rows",
        f"at most {MAX_GROUPED_ROWS} with padding",
        num_rows,
        "split the batch",
    )


def _problem(options: DualOptions, inputs: DualInputs) -> DualProblem:
    x, group_offsets = inputs.x, inputs.group_offsets
    if group_offsets is not None:
        num_groups = group_offsets.shape[0] - 1
    else:
        num_groups = x.shape[0] if x.dim() == 3 else 0
    return DualProblem(
        Op.QUANTIZE_DUAL,
        detect_target(x.device),
        tuple(x.shape),
        x.dtype,
        get_format(options.format),
        options.scale_rule,
        num_groups,
        group_offsets is not None,
        *spans_of(options.scale_span),
        inputs.seed is not None,
    )


def _fake(options: DualOptions, inputs: DualInputs) -> list[torch.Tensor]:
    problem, x, group_offsets = _problem(options, inputs), inputs.x, inputs.group_offsets
    empty = getattr(_kernel(problem), "empty", _empty)
    *leading, rows, columns = x.shape
    padded = rows
    if group_offsets is not None:
        padded = padded_capacity(rows, group_offsets.shape[0] - 1)
    tensors = []
    for span, size, reduced in zip(
        spans_of(options.scale_span), (rows, columns), (columns, padded), strict=True
    ):
        copy = empty(x, (*leading, size, reduced), problem.format)
        tensors += [copy.qdata, copy.scale]
        if span is ScaleSpan.AUTO:
            tensors.append(x.new_empty(1, dtype=torch.int32))
    return tensors


def _kernel(problem: DualProblem) -> AnyKernel:
    """The kernel of a problem whose sizes may be symbols; it depends on no size."""
    sizes = (MX_BLOCK_SIZE,) * len(problem.shape)
    groups = int(problem.num_groups) if problem.grouped_rows else 0
    return resolve(replace(problem, shape=sizes, num_groups=groups))[0]


def _empty(like: torch.Tensor, shape: tuple[int, ...], format: MXFormat) -> MXTensor:
    """A contiguous MXTensor of this shape."""
    qdata, scale = (
        like.new_empty((*shape[:-1], size), dtype=torch.uint8)
        for size in (shape[-1], shape[-1] // MX_BLOCK_SIZE)
    )
    return MXTensor.unchecked(qdata, scale, format)


def _build(
    tensors: Sequence[torch.Tensor], options: DualOptions, inputs: DualInputs
) -> tuple[MXTensor, MXTensor]:
    row_span, column_span = spans_of(options.scale_span)
    first = 3 if row_span is ScaleSpan.AUTO else 2  # tensors of the rowwise copy
    name = get_format(options.format).name
    row, column = tensors[:first], tensors[first:]
    return _copy(row, name, row_span), _copy(column, name, column_span)


def _copy(tensors: Sequence[torch.Tensor], name: str, span: ScaleSpan) -> MXTensor:
    wide = tensors[2] if span is ScaleSpan.AUTO else None
    return rebuild_mx(tensors[0], tensors[1], name, span=span, wide=wide)


_DUAL: OpSpec[DualOptions, DualInputs, tuple[MXTensor, MXTensor]] = OpSpec(
    "quantize_dual",
    check=check_quantize_dual,
    describe=_problem,
    fake=_fake,
    returns="Tensor[]",
    build=_build,
)
