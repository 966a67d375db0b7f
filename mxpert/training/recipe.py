"""MXFP8Recipe: every choice that changes the numbers of a training GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import message, require
from ..formats.spec import MXFP8_E4M3, MXFP8_E5M2, ScaleRule

TRAINING_FORMATS = (MXFP8_E4M3.name, MXFP8_E5M2.name)


@dataclass(frozen=True)
class MXFP8Recipe:
    """How forward, dgrad and wgrad quantise their operands.

    Each of x, weight and the incoming gradient is quantised once, in both orientations with 1×32
    scales: along the reduction of its first GEMM and of its second one. All three GEMMs accumulate
    in float32.

    Args:
        forward_format: "mxfp8_e4m3" or "mxfp8_e5m2", of x and weight.
        backward_format: the same choice for the incoming gradient.
        scale_rule: of all three; RCEIL never saturates.
        high_precision_wgrad: wgrad from the bfloat16 values of x and gradient; x itself is then
            kept for backward (2 bytes a value instead of 1.03).
        enabled: False computes without quantisation, in the dtype of x: bfloat16 on the same
            kernels, any other float dtype as one torch matmul per group.

    Raises:
        ValueError: a format that is not one of the two. TypeError: not a ScaleRule.

    Source:
        FP8 formats for deep learning (arXiv 2209.05433, section 3) for HYBRID; Recipes for
        pre-training LLMs with MXFP8 (arXiv 2506.08027) for e4m3 throughout and the round-up rule.

    Example:
        >>> MXFP8Recipe().backward_format, MXFP8Recipe.hybrid().backward_format
        ('mxfp8_e4m3', 'mxfp8_e5m2')
    """

    forward_format: str = MXFP8_E4M3.name
    backward_format: str = MXFP8_E4M3.name
    scale_rule: ScaleRule = ScaleRule.RCEIL
    high_precision_wgrad: bool = False
    enabled: bool = True

    def __post_init__(self) -> None:
        op = "MXFP8Recipe"
        for name in ("forward_format", "backward_format"):
            value = getattr(self, name)
            require(value in TRAINING_FORMATS, op, name, need=f"one of {list(TRAINING_FORMATS)}",
                    got=repr(value))
        if not isinstance(self.scale_rule, ScaleRule):
            raise TypeError(message(op, "scale_rule", "a ScaleRule", repr(self.scale_rule),
                                    "for example mxpert.ScaleRule.RCEIL"))

    @classmethod
    def hybrid(cls) -> MXFP8Recipe:
        """e4m3 forward, e5m2 for gradients: more range, one mantissa bit less."""
        return cls(backward_format=MXFP8_E5M2.name)
