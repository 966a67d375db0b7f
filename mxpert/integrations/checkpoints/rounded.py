"""The option ``weight_rounding`` of every way in: NVFP4 is rounded, other formats are refused."""

from __future__ import annotations

from ...errors import require
from ...formats.weight_rounding import WeightRounding
from ...formats.weight_tensor import NVFP4
from ...moe.weights import MoEWeights


def check_rounding(weight_rounding: object, weight_format: str, where: str, op: str) -> None:
    """Refuse another name than "e4m3", and weights that need no rounding; None passes.

    Args:
        weight_rounding: the option. weight_format: "NVFP4", or what the experts hold instead.
        where: the container or the layer, for the message. op: what the message starts with.

    Raises:
        ValueError: either of them.
    """
    if weight_rounding is None:
        return
    argument, need = "weight_rounding", "None or 'e4m3'"
    require(weight_rounding == "e4m3", op, argument, need=need, got=repr(weight_rounding))
    need, got = "None, since nothing else than NVFP4 is rounded", f"{weight_format} ({where})"
    require(weight_format == "NVFP4", op, argument, need=need, got=got)


def rounded(weights: MoEWeights, weight_rounding: WeightRounding | None) -> MoEWeights:
    """The weights as the option has them: casts of MXFP4 are no NVFP4 any more, and stay exact."""
    if weight_rounding is None or weights.weight_format != NVFP4.name:
        return weights
    return weights.round_weights(weight_rounding)
