"""The values of ``experts_implementation`` that name mxpert."""

from __future__ import annotations

from ...problem import ACTIVATION_FORMAT_ALIASES, ACTIVATION_FORMATS, parse_activation_format

NAME = "mxpert"
IMPLEMENTATIONS = {NAME: "bf16"} | {
    f"{NAME}_{name}": parse_activation_format(name, "experts_implementation")
    for name in (*ACTIVATION_FORMATS, *ACTIVATION_FORMAT_ALIASES)
}
"""Value of ``experts_implementation`` → activation format: "mxpert_mxfp8" and "mxpert_a8w4"."""
