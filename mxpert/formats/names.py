"""The names of formats: one list for the API, the command line and the servers."""

from __future__ import annotations

from typing import Literal

from ..errors import message
from .spec import MXFormat, get_format
from .token import FP8_TOKEN

ActivationFormat = Literal[
    "bf16", "a16w4", "mxfp8", "a8w4", "mxfp4", "a4w4", "fp8_token", "a8w4-token", "a8w4_token"
]
"""Every name of an activation format."""

OwnFormat = Literal["bf16", "mxfp8", "mxfp4", "fp8_token"]
"""An activation format by its own name, as options, tuned tables and reports hold it."""

ACTIVATION_FORMATS: tuple[OwnFormat, ...] = ("bf16", "mxfp8", "mxfp4", "fp8_token")

SHORT_NAMES: dict[str, str] = dict(
    zip(ACTIVATION_FORMATS, ("a16w4", "a8w4", "a4w4", "a8w4-token"), strict=True)
)
"""Activation format → the name that tables show."""

FORMAT_OF: dict[str, OwnFormat] = {
    **{name: name for name in ACTIVATION_FORMATS},
    **{SHORT_NAMES[name]: name for name in ACTIVATION_FORMATS},
    "a8w4_token": "fp8_token",
}
"""Every name that an argument takes → the activation format that it stands for."""

WITH_FP8 = "+fp8"
"""End of the name of MXFP4 weights with an FP8 copy, as tuned tables and reports hold it."""


def parse_activation_format(
    name: object, op: str, argument: str = "activation_format"
) -> OwnFormat:
    """Return the member of ACTIVATION_FORMATS that `name` stands for.

    Args:
        name: "bf16" or "a16w4", "mxfp8" or "a8w4", "mxfp4" or "a4w4", "fp8_token" or "a8w4-token"
            (also "a8w4_token").
        op: the function that reports a wrong name.
        argument: the name that the error gives to `name`.

    Returns:
        "bf16", "mxfp8", "mxfp4" or "fp8_token".

    Raises:
        ValueError: any other name.

    Example:
        >>> parse_activation_format("a8w4", "fused_moe")
        'mxfp8'
    """
    found = FORMAT_OF.get(name) if isinstance(name, str) else None
    if found is None:
        names = ", ".join(f"{name!r} ({short!r})" for name, short in SHORT_NAMES.items())
        raise ValueError(message(op, argument, f"one of {names}", repr(name)))
    return found


def activation_mx_format(format: OwnFormat) -> MXFormat | None:
    """The MX format of activations ("mxfp8" is e4m3); None where ops exchange bfloat16."""
    return None if format in ("bf16", FP8_TOKEN) else get_format(format)
