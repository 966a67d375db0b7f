"""quantize and dequantize: tensors to and from the MX formats."""

from __future__ import annotations

import functools

import torch

from ..dispatch import Calls, detect_target
from ..errors import message, require, require_dtype, require_tensor
from ..formats.spec import MXFormat, ScaleRule, get_format
from ..formats.tensor import Layout, MXTensor
from ..problem import Op, QuantizeProblem
from .library import is_unobserved, rebuild_mx, register

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_QUANTIZE, _DEQUANTIZE = Calls(), Calls()
_kept_problem = functools.lru_cache(8192)(QuantizeProblem)
"""One object for one problem: the caches below find it by identity."""


def quantize(
    x: torch.Tensor,
    format: str | MXFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
) -> MXTensor:
    """Quantise a tensor to an MX format: codes and one power-of-two scale per 32 elements.

    ``code = round_to_nearest_even(x / 2^(scale - 127))``, saturating at the format's largest value.

    Args:
        x: float32, bfloat16 or float16, any shape; the size along `axis` a multiple of 32.
        format: "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2".
        axis: the dimension along which 32 elements share a scale.
        scale_rule: how the scale follows from the block's maximum; see ScaleRule.

    Returns:
        MXTensor with uint8 codes (two per byte for mxfp4, low nibble first) and uint8 E8M0 scales.

    Raises:
        TypeError: `x` is no tensor of these dtypes, or `scale_rule` no ScaleRule.
        ValueError: an unknown format, an axis that `x` lacks, or a size that is no multiple of 32.

    Source:
        OCP Microscaling Formats (MX) 1.0, section 6.3.

    Example:
        >>> import torch, mxpert
        >>> q = mxpert.quantize(torch.full((1, 32), 3.0), "mxfp4")
        >>> q.scale.item(), mxpert.dequantize(q)[0, 0].item()
        (126, 3.0)
    """
    if is_unobserved(x):
        return _call_quantize(x, format, axis, scale_rule)
    element = check_quantize(x, format, axis, scale_rule)
    axis = axis if axis < 0 else axis - x.dim()
    qdata, scale = _quantize_op(x, element.name, axis, scale_rule.value)
    return rebuild_mx(qdata, scale, element.name, axis=axis)


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
    if isinstance(tensor, MXTensor) and is_unobserved(tensor.qdata):
        return _call_dequantize(tensor, dtype)
    check_dequantize(tensor, dtype)
    return _dequantize_op(tensor.qdata, tensor.scale, tensor.format.name, tensor.axis, dtype)


def check_quantize(
    x: torch.Tensor, format: str | MXFormat, axis: int, scale_rule: ScaleRule
) -> MXFormat:
    """Check the arguments of `quantize` and return the format."""
    op = "quantize"
    require_tensor(x, op, "x", dtype=FLOAT_DTYPES)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(message(op, "axis", "an int", repr(axis), "for example -1"))
    if not (x.dim() > 0 and -x.dim() <= axis < x.dim()):
        raise ValueError(message(op, "axis", f"an axis of a {x.dim()}-dimensional tensor", axis))
    if x.shape[axis] % 32 != 0:  # composed on failure alone: sizes may be symbols
        raise ValueError(
            message(
                op,
                f"x.shape[{axis}]",
                "a multiple of 32",
                x.shape[axis],
                "pad with zeros (torch.nn.functional.pad)",
            )
        )
    if not isinstance(scale_rule, ScaleRule):
        raise TypeError(
            message(
                op,
                "scale_rule",
                "a ScaleRule",
                repr(scale_rule),
                "for example mxpert.ScaleRule.RCEIL",
            )
        )
    return get_format(format, op, "format")


def check_dequantize(tensor: MXTensor, dtype: torch.dtype) -> None:
    """Argument checks of `dequantize`."""
    op = "dequantize"
    if not isinstance(tensor, MXTensor):
        raise TypeError(
            message(
                op, "tensor", "an MXTensor", type(tensor).__name__, "make one with mxpert.quantize"
            )
        )
    require_dtype(dtype, FLOAT_DTYPES, op)
    require(
        tensor.layout is Layout.ROW_MAJOR,
        op,
        "tensor.layout",
        need=Layout.ROW_MAJOR,
        got=tensor.layout,
    )


def _quantize_problem(
    op: Op,
    device: torch.device,
    shape: torch.Size,
    axis: int,
    dtype: torch.dtype,
    format: str,
    rule: str = "rceil",
) -> QuantizeProblem:
    return _kept_problem(
        op, detect_target(device), tuple(shape), axis, dtype, get_format(format), ScaleRule(rule)
    )


def describe_quantize(
    x: torch.Tensor,
    format: str | MXFormat,
    *,
    axis: int = -1,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
) -> QuantizeProblem:
    """The problem that `quantize` resolves for the same arguments."""
    element = check_quantize(x, format, axis, scale_rule)
    return _quantize_problem(
        Op.QUANTIZE,
        x.device,
        x.shape,
        axis if axis < 0 else axis - x.dim(),
        x.dtype,
        element.name,
        scale_rule.value,
    )


def describe_dequantize(tensor: MXTensor, *, dtype: torch.dtype = torch.float32) -> QuantizeProblem:
    """The problem that `dequantize` resolves for the same arguments."""
    check_dequantize(tensor, dtype)
    return _quantize_problem(
        Op.DEQUANTIZE, tensor.device, tensor.shape, tensor.axis, dtype, tensor.format.name
    )


def _call_quantize(
    x: torch.Tensor, format: str | MXFormat, axis: int, scale_rule: ScaleRule
) -> MXTensor:
    result: MXTensor = _QUANTIZE.launch(
        scale_rule,
        (format, axis),
        dict(x=x),
        lambda: describe_quantize(x, format, axis=axis, scale_rule=scale_rule),
    )
    return result


def _run_quantize(
    x: torch.Tensor, format: str, axis: int, scale_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    result = _call_quantize(x, format, axis, ScaleRule(scale_rule))
    return result.qdata, result.scale


def _fake_quantize(
    x: torch.Tensor, format: str, axis: int, scale_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    element = get_format(format)
    codes, scales = list(x.shape), list(x.shape)
    codes[axis] //= element.codes_per_byte
    scales[axis] //= element.block_size
    return (x.new_empty(codes, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8))


def _call_dequantize(tensor: MXTensor, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = _DEQUANTIZE.launch(
        dtype, (), dict(tensor=tensor), lambda: describe_dequantize(tensor, dtype=dtype)
    )
    return result


def _run_dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, format: str, axis: int, dtype: torch.dtype
) -> torch.Tensor:
    return _call_dequantize(rebuild_mx(qdata, scale, format, axis=axis), dtype)


def _fake_dequantize(
    qdata: torch.Tensor, scale: torch.Tensor, format: str, axis: int, dtype: torch.dtype
) -> torch.Tensor:
    shape = list(qdata.shape)
    shape[axis] *= get_format(format).codes_per_byte
    return qdata.new_empty(shape, dtype=dtype)


_quantize_op = register(
    "quantize(Tensor x, str format, int axis, str scale_rule) -> (Tensor, Tensor)",
    _run_quantize,
    _fake_quantize,
)
_dequantize_op = register(
    "dequantize(Tensor qdata, Tensor scale, str format, int axis, ScalarType dtype) -> Tensor",
    _run_dequantize,
    _fake_dequantize,
)
