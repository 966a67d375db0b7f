"""The end of `mxpert doctor`: what this machine is good for, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.backend import Status
from ...core.problem import Target
from ...core.support import remedy_of, support_of
from ..report import Row
from .findings import BROKEN, Finding
from .operations import short_names

NEXT = {
    "broken": ("mxpert doctor", "again, when the above is repaired"),
    "cpu": ("mxpert demo", "runs every operation on the CPU and checks it"),
    "measured": ("mxpert bench --model gpt-oss-120b", "times a model's layers here"),
    "kernels": (
        "mxpert doctor --measure",
        "checks the kernels here against float64, times a layer",
    ),
    "reference": (
        "mxpert demo",
        "checks every operation; docs/supported-gpus.md names faster GPUs",
    ),
}
"""The next command, and what it does."""


@dataclass(frozen=True)
class Verdict:
    """What a machine is good for.

    Args:
        device: in words. status: what is broken, then the status of docs/supported-gpus.md.
        broken: names of what is missing, too old or wrong.
        fast: operations that have kernels here. slow: those that run plain torch.
        command: to type next. why: what the command does.
    """

    device: str
    status: str
    broken: tuple[str, ...]
    fast: tuple[str, ...]
    slow: tuple[str, ...]
    command: str
    why: str

    def lines(self) -> list[tuple[str, str]]:
        """The printed lines, as names and texts."""
        every = (*self.fast, *self.slow)

        def text(names: Sequence[str]) -> str:
            if not names:
                return "nothing"
            everything = len(names) == len(every)
            return "every operation" if everything else ", ".join(short_names(names, every))

        return [
            ("here", f"{self.device}: {self.status}"),
            ("fast kernels", text(self.fast)),
            ("plain torch", text(self.slow) + (", slow" if self.slow else "")),
            ("next", f"{self.command}  ({self.why})"),
        ]


def judge(
    target: Target, findings: Sequence[Finding], operations: Sequence[Row], wrong: Sequence[str]
) -> Verdict:
    """The verdict on a machine: what is broken comes first, then the status of its GPU.

    wrong: problems that were executed and gave a wrong result.
    """
    fast = tuple(row["op"] for row in operations if row["chosen"] not in (None, "reference"))
    slow = tuple(row["op"] for row in operations if row["chosen"] == "reference")
    broken = [each.name for each in findings if each.state == BROKEN]
    broken += [*(row["op"] for row in operations if row["chosen"] is None), *wrong]
    support = support_of(target)
    if target.kind == "cpu":
        status, kind = "no GPU; right results, slow", "cpu"
    elif not support.has_kernels:
        status, kind = f"{support.status.value}; {remedy_of(target)}", "reference"
    else:
        status = support.status.value
        kind = "measured" if support.status is Status.MEASURED else "kernels"
    if broken:  # what the GPU would be good for stays to be read
        status, kind = f"broken: {', '.join(broken)}; {status}", "broken"
    device = target.name if target.kind == "cpu" else f"{target.name} ({target.arch})"
    return Verdict(device, status, tuple(broken), fast, slow, *NEXT[kind])
