"""Rows as bytes: bfloat16 rows, or MXFP8 codes and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..formats.spec import ScaleRule, get_format
from ..formats.tensor import MXTensor
from ..quantize.op import quantize
from .transport import Rows


def wire_parts(x: Rows, wire_format: str, scale_rule: ScaleRule) -> tuple[torch.Tensor, ...]:
    """The rows as uint8 [T, bytes], one tensor for each part of the format."""
    if wire_format == "mxfp8":
        quantised = x if isinstance(x, MXTensor) else quantize(x, "mxfp8", scale_rule=scale_rule)
        return quantised.qdata, quantised.scale
    assert isinstance(x, torch.Tensor)  # checked by ExpertParallel
    return (x.contiguous().view(torch.uint8),)


def rows_from_wire(parts: Sequence[torch.Tensor], wire_format: str) -> Rows:
    """The inverse of `wire_parts`; parts are contiguous."""
    if wire_format == "mxfp8":
        codes, scale = parts
        return MXTensor.unchecked(codes, scale, get_format("mxfp8"))
    (data,) = parts
    return data.view(torch.bfloat16)
