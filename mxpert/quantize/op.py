"""quantize and dequantize: tensors to and from the MX formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.ops import OpSpec
from ..core.problem import Op, QuantizeProblem
from ..core.schema import FormatName, rebuild_mx
from ..core.target import detect_target
from ..errors import Checks
from ..formats.codec import check_square_axis
from ..formats.spec import (
    FLOAT_DTYPES,
    MXFormatLike,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
)
from ..formats.tensor import Layout, MXTensor
from .inputs import DequantizeInputs, QuantizeInputs


def quantize(
    x: torch.Tensor,
    format: MXFormatLike,
    *,
    axis: int = -1,
    scale_rule: ScaleRuleLike = ScaleRule.RCEIL,
    scale_span: ScaleSpanLike = ScaleSpan.BLOCK,
    stochastic_seed: int | torch.Tensor | None = None,
) -> MXTensor:
    """Quantise a tensor to an MX format: codes and one power-of-two scale per 32 elements.

    ``code = round_to_nearest_even(x / 2^(scale - 127))``, saturating at the format's largest value.

    Args:
        x: float32, bfloat16 or float16, any shape; the size along `axis` a multiple of 32.
        format: "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2".
        axis: the dimension along which 32 elements share a scale.
        scale_rule: how the scale follows from the block's maximum: a ScaleRule, or "floor",
            "rceil", "ceil", "even".
        scale_span: BLOCK, or SQUARE: one scale for 32 × 32 values of the last two dimensions, of
            which `axis` is one. The scale follows from the maximum of the square. It is stored for
            each of its blocks. Where the other dimension is no multiple of 32, the last squares are
            cut: their scale follows from the values that are there. A NaN or an infinity makes its
            whole square NaN (scale byte 255).
        stochastic_seed: None rounds to nearest even. A number from 0 to 2^63 − 1, or int64 [1] on
            the device of x, rounds to one of the two neighbouring codes, with probabilities by the
            distances, so that the mean over seeds is the value (unless the scale rule saturates it:
            RCEIL does not). The same seed gives the same codes on every backend. A tensor can be
            changed between replays of a CUDA graph.

    Returns:
        MXTensor with uint8 codes (two per byte for mxfp4, low nibble first) and uint8 E8M0 scales.

    Raises:
        TypeError: `x` is no tensor of these dtypes, or `scale_rule` no ScaleRule and no name.
        ValueError: an unknown format, rule or span, an axis that `x` lacks or that has no squares,
            or a size that is no multiple of 32.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 6.3. Stochastic rounding for training: Deep
        learning with limited numerical precision (arXiv 1502.02551).

    Example:
        >>> import torch, mxpert
        >>> q = mxpert.quantize(torch.full((1, 32), 3.0), "mxfp4")
        >>> q.scale.item(), mxpert.dequantize(q)[0, 0].item()
        (126, 3.0)
        >>> x = torch.full((1000, 32), 5.0)  # between the codes 4 and 6
        >>> q = mxpert.quantize(x, "mxfp4", stochastic_seed=1)
        >>> round(mxpert.dequantize(q).mean().item(), 1)
        5.0
    """
    if not isinstance(scale_rule, ScaleRule):
        scale_rule = ScaleRule.parse(scale_rule, "quantize", "scale_rule")
    if not isinstance(scale_span, ScaleSpan):
        scale_span = ScaleSpan.parse(scale_span, "quantize", "scale_span")
    seed = None if stochastic_seed is None else seed_tensor(stochastic_seed, x, "quantize")
    return _QUANTIZE(QuantizeOptions(scale_rule, format, axis, scale_span), QuantizeInputs(x, seed))


def seed_tensor(seed: int | torch.Tensor | None, x: torch.Tensor, op: str) -> torch.Tensor | None:
    """A seed as int64 [1] on the device of x; what is no number goes on to the checks.

    Raises:
        TypeError: neither a number nor a tensor. ValueError: a number out of range.
    """
    if seed is None or isinstance(seed, torch.Tensor):
        return seed
    need = Checks(op)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise need.type_error("stochastic_seed", "an int, a tensor or None", repr(seed))
    if not 0 <= seed < 1 << 63:
        raise need.value_error("stochastic_seed", "0 to 2^63 − 1", seed)
    device = x.device if isinstance(x, torch.Tensor) else None
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def check_seed(seed: torch.Tensor | None, device: torch.device, need: Checks) -> None:
    """Check the seed of stochastic rounding: None, or int64 [1] on a device."""
    if seed is not None:
        need.tensor(seed, "stochastic_seed", dtype=torch.int64, shape=(1,), device=device)


def dequantize(tensor: MXTensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode an MXTensor: ``decode(code) * 2^(scale - 127)``; scale byte 255 gives NaN.

    Args:
        tensor: an MXTensor in ROW_MAJOR layout.
        dtype: float32 (exact for every code and scale whose value float32 holds), bfloat16 or
            float16.

    Returns:
        A dense tensor of the logical shape.

    Raises:
        TypeError: `tensor` is no MXTensor, or `dtype` is another one.
        ValueError: a prepared layout.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 6.1.

    Example:
        >>> import torch, mxpert
        >>> mxpert.dequantize(mxpert.quantize(torch.ones(2, 32), "mxfp8")).sum().item()
        64.0
    """
    return _DEQUANTIZE(dtype, DequantizeInputs(tensor))


class QuantizeOptions(NamedTuple):
    """Options of `quantize`."""

    scale_rule: ScaleRule
    format: FormatName
    axis: int
    scale_span: ScaleSpan


def check_quantize(options: QuantizeOptions, inputs: QuantizeInputs) -> None:
    """Argument checks of `quantize`."""
    need, x, axis = Checks("quantize"), inputs.x, options.axis
    need.tensor(x, "x", dtype=FLOAT_DTYPES)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise need.type_error("axis", "an int", repr(axis), "for example -1")
    if not (x.dim() > 0 and -x.dim() <= axis < x.dim()):
        raise need.value_error("axis", f"an axis of a {x.dim()}-dimensional tensor", axis)
    if x.shape[axis] % 32 != 0:  # composed on failure alone: sizes may be symbols
        raise need.value_error(
            f"x.shape[{axis}]",
            "a multiple of 32",
            x.shape[axis],
            "pad with zeros (torch.nn.functional.pad)",
        )
    get_format(options.format, need.op, "format")
    check_seed(inputs.seed, x.device, need)
    if options.scale_span is not ScaleSpan.BLOCK:
        check_square_axis(options.scale_span, need.op, x.dim(), _negative(axis, x))


def check_dequantize(dtype: torch.dtype, inputs: DequantizeInputs) -> None:
    """Argument checks of `dequantize`."""
    need, tensor = Checks("dequantize"), inputs.tensor
    if not isinstance(tensor, MXTensor):
        raise need.type_error(
            "tensor", "an MXTensor", type(tensor).__name__, "make one with mxpert.quantize"
        )
    need.dtype(dtype, FLOAT_DTYPES)
    need(tensor.layout is Layout.ROW_MAJOR, "tensor.layout", Layout.ROW_MAJOR, tensor.layout)


def _quantize_problem(options: QuantizeOptions, inputs: QuantizeInputs) -> QuantizeProblem:
    x = inputs.x
    return QuantizeProblem(
        Op.QUANTIZE,
        detect_target(x.device),
        tuple(x.shape),
        _negative(options.axis, x),
        x.dtype,
        get_format(options.format),
        options.scale_rule,
        options.scale_span,
        inputs.seed is not None,
    )


def _dequantize_problem(dtype: torch.dtype, inputs: DequantizeInputs) -> QuantizeProblem:
    tensor = inputs.tensor
    return QuantizeProblem(
        Op.DEQUANTIZE,
        detect_target(tensor.device),
        tuple(tensor.shape),
        tensor.axis,
        dtype,
        tensor.format,
    )


def _negative(axis: int, x: torch.Tensor) -> int:
    """The axis counted from the end, as MXTensor holds it."""
    return axis if axis < 0 else axis - x.dim()


def _fake_quantize(options: QuantizeOptions, inputs: QuantizeInputs) -> list[torch.Tensor]:
    x, axis, element = inputs.x, options.axis, get_format(options.format)
    codes, scales = list(x.shape), list(x.shape)
    codes[axis] //= element.codes_per_byte
    scales[axis] //= element.block_size
    return [x.new_empty(shape, dtype=torch.uint8) for shape in (codes, scales)]


def _build_quantize(
    tensors: Sequence[torch.Tensor], options: QuantizeOptions, inputs: QuantizeInputs
) -> MXTensor:
    qdata, scale = tensors
    axis = _negative(options.axis, inputs.x)
    name = get_format(options.format).name
    return rebuild_mx(qdata, scale, name, axis=axis, span=options.scale_span)


def _fake_dequantize(dtype: torch.dtype, inputs: DequantizeInputs) -> torch.Tensor:
    return inputs.tensor.qdata.new_empty(inputs.tensor.shape, dtype=dtype)


_QUANTIZE: OpSpec[QuantizeOptions, QuantizeInputs, MXTensor] = OpSpec(
    "quantize",
    check=check_quantize,
    describe=_quantize_problem,
    fake=_fake_quantize,
    returns="(Tensor, Tensor)",
    build=_build_quantize,
)
_DEQUANTIZE: OpSpec[torch.dtype, DequantizeInputs, torch.Tensor] = OpSpec(
    "dequantize", check=check_dequantize, describe=_dequantize_problem, fake=_fake_dequantize
)
