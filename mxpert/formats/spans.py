"""MX tensors in which several blocks share a scale: quantising, rebasing, and another axis."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import Checks, require, require_tensor
from .codec import (
    ZERO_BLOCK_SCALE,
    block_scale,
    decode,
    dequantize_blocks,
    encode,
    exact_power_of_two,
    pack_codes,
    quantize_blocks,
    unpack_codes,
)
from .spec import (
    E8M0_BIAS,
    E8M0_NAN,
    MX_BLOCK_SIZE,
    WIDE_DTYPES,
    MXFormat,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
    refuse_squares,
)
from .stochastic import encode_stochastic
from .tensor import Layout, MXTensor

BLOCKS_OF_SPAN128 = 4

FREE_BINADES = {"e4m3": 9, "e5m2": 25}
"""Binades that a block's scale may lie below its span's scale at negligible cost.

A block's largest value is then at least 2^5 (e5m2: 2^6) subnormal steps. The longer span adds an
error of at most half a step: an eighth of the error 2^-4 (2^-3) of rounding to the element."""


def quantize_spans(
    x: torch.Tensor,
    fmt: MXFormat | str,
    rule: ScaleRuleLike,
    span: ScaleSpanLike,
    *,
    group_starts: torch.Tensor | None = None,
    random: torch.Tensor | None = None,
) -> MXTensor:
    """Quantise along the last axis with one scale per span.

    ``scale = block_scale(max |x| over the span)``, but at least byte 1; codes as in
    `quantize_blocks`. A span of zeros has scale byte 127. A NaN or an infinity makes its
    whole span NaN.

    Args:
        x: float32, bfloat16, float16 or float64 [..., K], K a multiple of 32.
        fmt: an MXFP8 format or its name.
        rule: how the scale follows from the span's maximum.
        span: which blocks share a scale.
        group_starts: int32 or int64 [G + 1] on the device of x: positions along the last axis,
            multiples of 32, where groups start (and the last ends); no span crosses them. They are
            not read on the host: positions that decrease or lie outside are clamped.
        random: `stochastic.random_bits` of the shape of x, to round stochastically; not float64.

    Returns:
        MXTensor of axis -1 with `scale_span` span.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a shape that does not fit, an unknown format, or mxfp4.

    Source:
        OCP MX 1.0, section 6.3, with the maximum of a span in place of a block's.

    Example:
        >>> x = torch.tensor([[1.0] * 32 + [256.0] * 32])
        >>> quantize_spans(x, "mxfp8", ScaleRule.RCEIL, ScaleSpan.ROW).scale.tolist()
        [[127, 127]]
    """
    op = "quantize_spans"
    require_tensor(x, op, "x", dtype=WIDE_DTYPES)
    fmt = get_format(fmt, op, "fmt")
    rule = ScaleRule.parse(rule, op, "rule")
    span = ScaleSpan.parse(span, op, "span")
    refuse_squares(span, op, "span")
    require(fmt.codes_per_byte == 1, op, "fmt", need="mxfp8_e4m3 or mxfp8_e5m2", got=fmt.name)
    require(
        x.dim() > 0 and x.shape[-1] % MX_BLOCK_SIZE == 0,
        op,
        "x.shape",
        got=list(x.shape),
        need="[..., K] with K a multiple of 32",
        remedy="pad with zeros (torch.nn.functional.pad)",
    )
    _check_group_starts(group_starts, x.device, op)
    count = None
    if span is ScaleSpan.AUTO:
        count = x.new_full((1,), -most_wide_blocks(x.numel()), dtype=torch.int32)
    if span is ScaleSpan.BLOCK or x.numel() == 0:
        made = quantize_blocks(x, fmt, -1, rule, random=random)
        return replace(made, scale_span=span, wide_blocks=count)
    working = (
        x.detach().to(torch.float64 if x.dtype is torch.float64 else torch.float32).resolve_neg()
    )
    by_block = working.unflatten(-1, (-1, MX_BLOCK_SIZE))
    amax = by_block.abs().amax(-1)
    scale = block_scale(_span_maximum(amax, span, group_starts), fmt, rule).clamp(min=1)
    if span is ScaleSpan.AUTO:
        own = block_scale(amax, fmt, rule).clamp(min=1)
        wide = (
            (amax != 0)
            & (scale != E8M0_NAN)
            & (scale.int() - own.int() > FREE_BINADES[fmt.element.name])
        )
        count = (wide.sum(dtype=torch.int32) - most_wide_blocks(x.numel())).reshape(1)
        scale = torch.where(count > 0, own, scale)
    inverse = exact_power_of_two(E8M0_BIAS - scale.int(), working.dtype)
    inverse = inverse.masked_fill(scale == E8M0_NAN, float("nan"))
    scaled = by_block * inverse[..., None]
    if random is None:
        codes = encode(scaled, fmt.element).flatten(-2)
    else:
        codes = encode_stochastic(scaled, fmt.element, random).flatten(-2)
    return MXTensor(codes.contiguous(), scale.contiguous(), fmt, scale_span=span, wide_blocks=count)


def rebase(
    tensor: MXTensor, span: ScaleSpanLike, *, group_starts: torch.Tensor | None = None
) -> MXTensor:
    """Give all blocks of a span the same scale: the largest of its blocks that have values.

    Values that become subnormal are rounded to nearest even; all others keep their value. A block
    of NaN stays NaN: its codes become NaN.

    It runs in plain torch on every device: on one H200 it takes a hundred times as long as a copy
    of the tensor. `quantize_dual` has kernels that write such scales from unquantised values.

    Args:
        tensor: an MXFP8 MXTensor of axis -1, ROW_MAJOR.
        span: which blocks share a scale: BLOCK, SPAN128 or ROW.
        group_starts: int32 or int64 [G + 1] on the device of the tensor: positions along the last
            axis where groups start, multiples of 32; no span crosses them.

    Returns:
        MXTensor with `scale_span` span.

    Raises:
        TypeError: `tensor` is no MXTensor, `span` no ScaleSpan, or `group_starts` not of ints.
        ValueError: another format, layout or axis, or ScaleSpan.AUTO.

    Source:
        OCP MX 1.0, section 6.3, applied to values that are quantised already.

    Example:
        >>> t = quantize_blocks(torch.tensor([[1.0] * 32 + [256.0] * 32]), "mxfp8")
        >>> t.scale.tolist(), rebase(t, ScaleSpan.ROW).scale.tolist()
        ([[119, 127]], [[127, 127]])
    """
    span = _check_spanned(
        tensor,
        span,
        group_starts,
        "rebase",
        "quantise with AUTO: quantize_dual(…, scale_span=ScaleSpan.AUTO)",
    )
    if span is ScaleSpan.BLOCK or tensor.qdata.numel() == 0:
        return replace(tensor, scale_span=span, wide_blocks=None)
    by_block = tensor.qdata.unflatten(-1, (-1, MX_BLOCK_SIZE))
    present = _have_values(tensor)
    top = _span_maximum(torch.where(present, tensor.scale.float(), -1.0), span, group_starts)
    top = torch.where(top < 0, float(ZERO_BLOCK_SCALE), top).clamp(min=1).int()
    shift = (tensor.scale.int() - top).clamp(-126, 0)  # below that nothing is left
    values = (
        decode(by_block, tensor.format.element)
        * exact_power_of_two(shift, torch.float32)[..., None]
    )
    values = values.masked_fill((tensor.scale == E8M0_NAN)[..., None], float("nan"))
    codes = encode(values, tensor.format.element).flatten(-2)
    return MXTensor(codes, top.to(torch.uint8), tensor.format, scale_span=span)


def with_axis(tensor: MXTensor, axis: int, rule: ScaleRule) -> MXTensor:
    """`MXTensor.with_axis` of a ROW_MAJOR tensor."""
    need, dims = Checks("MXTensor.with_axis"), tensor.ndim
    if type(axis) is not int:
        raise need.type_error("axis", "an int", repr(axis))
    need(-dims <= axis < dims, "axis", f"an axis of a {dims}-dimensional tensor", axis)
    axis = axis if axis < 0 else axis - dims
    if axis == tensor.axis:
        return tensor
    size, remedy = tensor.shape[axis], "pad the tensor before it is quantised"
    need(size % MX_BLOCK_SIZE == 0, f"shape[{axis}]", "a multiple of 32", size, remedy)
    if tensor.scale_span is not ScaleSpan.SQUARE:
        # float64 holds every value of every format
        return quantize_blocks(dequantize_blocks(tensor, torch.float64), tensor.format, axis, rule)
    remedy = "squares lie in the last two dimensions; quantise the dequantised tensor again"
    need(axis in (-1, -2), "axis", "-1 or -2, with ScaleSpan.SQUARE", axis, remedy)
    return _turned(tensor)


def _turned(tensor: MXTensor) -> MXTensor:
    """Squares along the other of the last two axes, with the same values."""
    old, new = tensor.axis, -3 - tensor.axis
    codes = tensor.qdata
    if tensor.format.codes_per_byte == 2:
        codes = pack_codes(unpack_codes(codes, old), new)
    one = tensor.scale.unflatten(new, (-1, MX_BLOCK_SIZE)).select(new, 0)
    scale = one.repeat_interleave(MX_BLOCK_SIZE, old)
    return replace(tensor, qdata=codes.contiguous(), scale=scale.contiguous(), axis=new)


def most_wide_blocks(numel: int) -> int:
    """Return how many wide blocks ScaleSpan.AUTO tolerates in a tensor: one in 1024.

    >>> most_wide_blocks(4096 * 4096)
    512
    """
    return numel // (1024 * MX_BLOCK_SIZE)


def count_wide_blocks(
    tensor: MXTensor,
    span: ScaleSpanLike = ScaleSpan.ROW,
    *,
    group_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the blocks whose scale lies more than 9 binades (e5m2: 25) below their span's largest.

    A count of 0 means that `span` costs these data less than 0.1 dB of a product's SNR; a large
    count means that they need BLOCK.

    Args:
        tensor: an MXFP8 MXTensor of axis -1, ROW_MAJOR, with a scale for each block.
        span: BLOCK, SPAN128 or ROW.
        group_starts: as in `rebase`.

    Returns:
        int64 [] on the device of the tensor. Blocks of zeros and of NaN do not count.

    Raises:
        TypeError: `tensor` is no MXTensor, `span` no ScaleSpan, or `group_starts` not of ints.
        ValueError: another format, layout or axis, or ScaleSpan.AUTO.

    Example:
        >>> t = quantize_blocks(torch.tensor([[1.0] * 32 + [2.0**12] * 32]), "mxfp8")
        >>> int(count_wide_blocks(t))
        1
    """
    span = _check_spanned(
        tensor, span, group_starts, "count_wide_blocks", "AUTO itself chooses between BLOCK and ROW"
    )
    present = _have_values(tensor)
    scale = torch.where(present, tensor.scale.float(), -1.0)
    deficit = _span_maximum(scale, span, group_starts) - scale
    return (present & (deficit > FREE_BINADES[tensor.format.element.name])).sum()


def _have_values(tensor: MXTensor) -> torch.Tensor:
    """Return which blocks [..., B] hold a value that is not zero and do not have the NaN scale."""
    by_block = tensor.qdata.unflatten(-1, (-1, MX_BLOCK_SIZE))
    result: torch.Tensor = ((by_block & 0x7F) != 0).any(-1) & (tensor.scale != E8M0_NAN)
    return result


def _span_maximum(
    amax: torch.Tensor, span: ScaleSpan, group_starts: torch.Tensor | None
) -> torch.Tensor:
    """For each block [..., B] the maximum over its span; NaN if one is."""
    ids = _span_ids(amax.shape[-1], span, group_starts, amax.device).expand(amax.shape)
    spans = amax.new_full((*amax.shape[:-1], amax.shape[-1] + 1), -1.0)
    spans = spans.scatter_reduce(-1, ids, amax.masked_fill(amax.isnan(), 0.0), "amax")
    nans = torch.zeros_like(spans).scatter_reduce(-1, ids, amax.isnan().to(amax.dtype), "amax")
    return spans.masked_fill(nans > 0, float("nan")).gather(-1, ids)


def _span_ids(
    num_blocks: int, span: ScaleSpan, group_starts: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """A number below B + 1 for each block, the same for all blocks of a span; int64 [B]."""
    block = torch.arange(num_blocks, device=device)
    first = torch.zeros_like(block)
    if group_starts is not None:
        starts = group_starts.long().div(MX_BLOCK_SIZE, rounding_mode="floor")
        starts = starts.clamp(0, num_blocks).cummax(0).values
        group = torch.searchsorted(starts, block, right=True) - 1
        first = torch.where(group < 0, 0, starts[group])
    length = {ScaleSpan.BLOCK: 1, ScaleSpan.SPAN128: BLOCKS_OF_SPAN128}.get(span, num_blocks + 1)
    return first + (block - first) // length


def _check_spanned(
    tensor: MXTensor, span: ScaleSpanLike, group_starts: torch.Tensor | None, op: str, remedy: str
) -> ScaleSpan:
    """Return the span, not AUTO; check an MXFP8 tensor along its last axis, and group starts."""
    need = Checks(op)
    if not isinstance(tensor, MXTensor):
        raise need.type_error(
            "tensor", "an MXTensor", type(tensor).__name__, "make one with mxpert.quantize"
        )
    span = ScaleSpan.parse(span, op, "span")
    refuse_squares(span, op, "span")
    need(
        tensor.format.codes_per_byte == 1,
        "tensor.format",
        "mxfp8_e4m3 or mxfp8_e5m2",
        tensor.format.name,
    )
    need(
        tensor.layout is Layout.ROW_MAJOR and tensor.axis == -1,
        "tensor",
        "axis -1 in ROW_MAJOR",
        f"axis {tensor.axis} in {tensor.layout}",
    )
    need(span is not ScaleSpan.AUTO, "span", "BLOCK, SPAN128 or ROW", span, remedy)
    _check_group_starts(group_starts, tensor.device, op)
    return span


def _check_group_starts(group_starts: torch.Tensor | None, device: torch.device, op: str) -> None:
    if group_starts is not None:
        require_tensor(
            group_starts,
            op,
            "group_starts",
            dtype=(torch.int32, torch.int64),
            shape=(None,),
            device=device,
        )
        require(group_starts.numel() > 0, op, "group_starts.shape", need="[G + 1]", got=[0])
