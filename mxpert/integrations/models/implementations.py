"""The values of ``experts_implementation`` that name mxpert."""

from __future__ import annotations

from ...core.problem import FORMAT_OF, OwnFormat

NAME = "mxpert"
IMPLEMENTATIONS: dict[str, OwnFormat] = {
    NAME: "bf16",
    **{f"{NAME}_{name}": own for name, own in FORMAT_OF.items()},
}
"""Value of ``experts_implementation`` → activation format: "mxpert_mxfp8" and "mxpert_a8w4"."""
