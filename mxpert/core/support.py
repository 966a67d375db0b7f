"""Which GPU has which kernels, and what of them was tried: the rows of all backends as one table.

`mxpert doctor`, `explain` and PerformanceWarning read it. docs/_gpus.py writes it into the pages.
"""

from __future__ import annotations

import re

from .backend import BACKENDS, Status, Support
from .problem import Target

_LATER = Support("other NVIDIA GPUs from sm_80 on", (), "triton", Status.NOT_TRIED)
_OTHER = Support("all other GPUs", (), "reference", Status.REFERENCE)


def rows() -> list[Support]:
    """The rows of all backends."""
    return [row for backend in BACKENDS.values() for row in backend.gpus]


def support_of(target: Target) -> Support:
    """The row of a device.

    >>> support_of(Target("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", 108, 166912)).status.value
    'compiled, not run'
    """
    arch = "cpu" if target.kind == "cpu" else target.arch
    for row in rows():
        if arch in row.architectures and re.search(row.name, target.name):
            return row
    portable = target.kind == "cuda" and target.compute_capability >= 80
    return _LATER if portable else _OTHER


def remedy_of(target: Target) -> str:
    """What to do where only the reference serves a GPU, as a phrase; "" where kernels do."""
    if support_of(target).has_kernels:
        return ""
    own = [arch for each in BACKENDS.values() if "hip" in each.rank for arch in each.made_for]
    return (
        f"this GPU runs plain torch: use an NVIDIA GPU from sm_80 on, or {' or '.join(own)} "
        "(docs/supported-gpus.md has the list)"
    )


def markdown_table() -> str:
    """The table of docs/supported-gpus.md."""
    lines = ["| GPU | architecture | kernels | status |", "|---|---|---|---|"]
    for row in (*rows(), _LATER, _OTHER):
        architectures = ", ".join(f"`{name}`" for name in row.architectures if name != "cpu")
        kernels = f"`{row.kernels}`"
        lines.append(f"| {row.gpus} | {architectures or '–'} | {kernels} | {row.status.value} |")
    return "\n".join(lines) + "\n"
