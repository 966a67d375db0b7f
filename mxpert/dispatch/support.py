"""Which GPU has which kernels, and what of them was tried: the one table of it.

`mxpert doctor`, `explain` and PerformanceWarning read it. docs/_gpus.py writes it into the pages.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from ..problem import Target


class Status(enum.Enum):
    """What is known of the kernels on a GPU."""

    MEASURED = "measured"
    TESTED = "tested; results files for H200 only"
    SAME_BINARIES = "not run; the binaries of the H200"
    COMPILED = "compiled, not run"
    EMULATED = "emulated: its code runs on a CPU in the tests"
    NOT_TRIED = "not tried"
    REFERENCE = "torch reference, slow"


@dataclass(frozen=True)
class Support:
    """A row of the table.

    Args:
        gpus: names, for people. architectures: as in `Target.arch`.
        kernels: the fastest backend. status: what was tried.
        name: pattern that the driver's name of the device contains; "" matches any.
    """

    gpus: str
    architectures: tuple[str, ...]
    kernels: str
    status: Status
    name: str = ""

    @property
    def has_kernels(self) -> bool:
        """Whether anything faster than torch runs."""
        return self.kernels != "reference"


TABLE = (
    Support("H200", ("sm_90",), "hopper", Status.MEASURED, r"\bH200\b"),
    Support("H100", ("sm_90",), "hopper", Status.TESTED, r"\bH100\b"),
    Support("GH200, H800, H20", ("sm_90",), "hopper", Status.SAME_BINARIES),
    Support("B200, GB200, B300, GB300", ("sm_100", "sm_103"), "triton", Status.COMPILED),
    Support("RTX 50, RTX PRO (Blackwell)", ("sm_120",), "triton", Status.COMPILED),
    Support("L40S, L4, RTX 40, RTX Ada", ("sm_89",), "triton", Status.COMPILED),
    Support("A100, A30", ("sm_80",), "triton", Status.COMPILED),
    Support("A10, A40, RTX 30, RTX A6000", ("sm_86",), "triton", Status.COMPILED),
    Support("MI350X, MI355X", ("gfx950",), "cdna4", Status.EMULATED),
    Support("MI300X, MI325X", ("gfx942",), "reference", Status.REFERENCE),
    Support("CPU", ("cpu",), "reference", Status.REFERENCE),
)
_LATER = Support("other NVIDIA GPUs from sm_80 on", (), "triton", Status.NOT_TRIED)
_OTHER = Support("all other GPUs", (), "reference", Status.REFERENCE)


def support_of(target: Target) -> Support:
    """The row of a device.

    >>> support_of(Target("cuda", "sm_80", "NVIDIA A100-SXM4-80GB", 108, 166912)).status.value
    'compiled, not run'
    """
    arch = "cpu" if target.kind == "cpu" else target.arch
    for row in TABLE:
        if arch in row.architectures and re.search(row.name, target.name):
            return row
    portable = target.kind == "cuda" and target.compute_capability >= 80
    return _LATER if portable else _OTHER


def remedy_of(target: Target) -> str:
    """What to do where only the reference serves a GPU, as a phrase; "" where kernels do."""
    if support_of(target).has_kernels:
        return ""
    return (
        "this GPU runs plain torch: use an NVIDIA GPU from sm_80 on, or gfx950 "
        "(docs/supported-gpus.md has the list)"
    )


def markdown_table() -> str:
    """The table of docs/supported-gpus.md."""
    lines = ["| GPU | architecture | kernels | status |", "|---|---|---|---|"]
    for row in (*TABLE, _LATER, _OTHER):
        architectures = ", ".join(f"`{name}`" for name in row.architectures if name != "cpu")
        kernels = f"`{row.kernels}`"
        lines.append(f"| {row.gpus} | {architectures or '–'} | {kernels} | {row.status.value} |")
    return "\n".join(lines) + "\n"
