"""MXFP8Recipe: the choices that change the numbers of a training GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from ..core.backend import made_for
from ..core.target import detect_target
from ..errors import Checks
from ..formats.spec import (
    MXFP8_E4M3,
    MXFP8_E5M2,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
    refuse_squares,
)

TRAINING_FORMATS = (MXFP8_E4M3.name, MXFP8_E5M2.name)
_Format = Literal["mxfp8_e4m3", "mxfp8_e5m2"]
TrainingFormat = _Format | Literal["mxfp8"]
"""Name of a recipe's format; "mxfp8" means "mxfp8_e4m3"."""

Spans = tuple[ScaleSpan, ScaleSpan]


class OperandSpans(NamedTuple):
    """Scale spans of the (row-wise, column-wise) copies of each operand."""

    x: Spans
    weight: Spans
    grad: Spans


def _operand_spans(span: ScaleSpan) -> OperandSpans:
    # With SPAN128 the second operand has one scale a row: w in forward and dgrad, x in wgrad.
    other = ScaleSpan.ROW if span is ScaleSpan.SPAN128 else span
    return OperandSpans(x=(span, other), weight=(other, other), grad=(span, span))


_OPERAND_SPANS = {span: _operand_spans(span) for span in ScaleSpan}
"""By a recipe's span: the same objects in each call, because ops know options by identity."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _span_of(device: torch.device) -> str:
    """Name of the span of recipes that leave it open."""
    backend = made_for(detect_target(device).arch)
    return (ScaleSpan.BLOCK if backend is None else backend.training_span).name


@dataclass(frozen=True)
class MXFP8Recipe:
    """How forward, dgrad and wgrad quantise their operands.

    x, weight and the incoming gradient are each quantised once for two GEMMs: along the dimension
    that the first one sums over, and along the dimension that the second one sums over.

    Args:
        forward_format: "mxfp8_e4m3" (or "mxfp8") or "mxfp8_e5m2", of x and weight.
        backward_format: the same choice for the incoming gradient.
        scale_rule: of all three, or its name; RCEIL never saturates.
        scale_span: how many values share a scale, or its name. BLOCK: 32; on Hopper the products
            are bf16 then. ROW: a row (of one group in wgrad), at full FP8 speed on Hopper. AUTO:
            the device chooses ROW for tensors that lose nothing by it, and BLOCK for the others.
            SPAN128: 128 of x and gradient. None, the default: AUTO on Hopper, BLOCK elsewhere.
            docs/training.md says what each costs.
        high_precision_wgrad: compute wgrad from the bfloat16 values of x and gradient; backward
            then keeps x itself (2 bytes a value instead of 1.03).
        enabled: False computes without quantisation, in the dtype of x: bfloat16 on the same
            kernels, any other float dtype as one torch matmul per group.

    Raises:
        ValueError: a format that is not one of the two, or an unknown name of a rule or span.
        TypeError: a rule, span or switch of another type.

    Source:
        FP8 formats for deep learning (arXiv 2209.05433, section 3) for HYBRID; Recipes for
        pre-training LLMs with MXFP8 (arXiv 2506.08027) for e4m3 throughout and the round-up rule.

    Example:
        >>> MXFP8Recipe().backward_format, MXFP8Recipe.hybrid().backward_format
        ('mxfp8_e4m3', 'mxfp8_e5m2')
    """

    forward_format: _Format = "mxfp8_e4m3"
    backward_format: _Format = "mxfp8_e4m3"
    scale_rule: ScaleRule = ScaleRule.RCEIL
    scale_span: ScaleSpan | None = None
    high_precision_wgrad: bool = False
    enabled: bool = True

    if TYPE_CHECKING:  # the fields as callers may pass them

        def __init__(
            self,
            forward_format: TrainingFormat = ...,
            backward_format: TrainingFormat = ...,
            scale_rule: ScaleRuleLike = ...,
            scale_span: ScaleSpanLike | None = ...,
            high_precision_wgrad: bool = ...,
            enabled: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        need = Checks("MXFP8Recipe")
        for name in ("forward_format", "backward_format"):
            value = getattr(self, name)
            known = get_format(value, need.op, name).name if isinstance(value, str) else None
            need(known in TRAINING_FORMATS, name, f"one of {list(TRAINING_FORMATS)}", repr(value))
            object.__setattr__(self, name, known)
        object.__setattr__(
            self, "scale_rule", ScaleRule.parse(self.scale_rule, need.op, "scale_rule")
        )
        if self.scale_span is not None:
            span = ScaleSpan.parse(self.scale_span, need.op, "scale_span")
            refuse_squares(span, need.op, "scale_span")
            object.__setattr__(self, "scale_span", span)
        for name in ("high_precision_wgrad", "enabled"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise need.type_error(name, "True or False", repr(value))

    def spans(self, device: torch.device) -> OperandSpans:
        """Spans of all copies on a device.

        >>> MXFP8Recipe().spans(torch.device("cpu")).x[0].name
        'BLOCK'
        """
        span = self.scale_span
        if span is None:
            span = ScaleSpan[_span_of(device)]
        return _OPERAND_SPANS[span]

    @classmethod
    def hybrid(cls) -> MXFP8Recipe:
        """e4m3 forward, e5m2 for gradients: more range, one mantissa bit less."""
        return cls(backward_format="mxfp8_e5m2")
