"""Which backend serves each operation here, and why the others do not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...core.backend import BACKENDS
from ...core.problem import (
    ACTIVATION_FORMATS,
    DualProblem,
    GroupedProblem,
    MoEOptions,
    MoEProblem,
    Op,
    Problem,
    QuantizeProblem,
    RoutingProblem,
    SiLU,
    Target,
    TopKOptions,
    TopKProblem,
)
from ...core.registry import explain_problem, refusal
from ...errors import UnsupportedError
from ...formats.spec import MXFP4, MXFP8_E4M3, ScaleRule
from ...formats.tensor import Layout
from ..options import FORMAT_NAMES
from ..report import Row


def small_problems(target: Target) -> list[Problem]:
    """One small problem for each operation; MoE operations once for each activation format."""
    problems: list[Problem] = [
        QuantizeProblem(op, target, (32, 64), -1, torch.bfloat16, MXFP4)
        for op in (Op.QUANTIZE, Op.DEQUANTIZE)
    ]
    problems.append(TopKProblem(Op.ROUTE_TOPK, target, 16, 4, 32, TopKOptions()))
    problems.append(RoutingProblem(Op.ROUTING_PLAN, target, 16, 4, 32, 32, 16))
    for op in (Op.MOE_GATE_UP, Op.MOE_DOWN, Op.FUSED_MOE):
        unit = 0 if op is Op.FUSED_MOE else 64
        problems += [
            MoEProblem(
                op, target, 16, 4, 32, 512, 512, MoEOptions(SiLU(), name), Layout.ROW_MAJOR, unit
            )
            for name in ACTIVATION_FORMATS
        ]
    problems.append(
        DualProblem(
            Op.QUANTIZE_DUAL, target, (64, 64), torch.bfloat16, MXFP8_E4M3, ScaleRule.RCEIL, 4, True
        )
    )
    name = MXFP8_E4M3.name
    problems += [
        GroupedProblem(
            op, target, 256, 4, 512, 512, name, name, op is Op.GROUPED_GEMM, torch.bfloat16
        )
        for op in (Op.GROUPED_GEMM, Op.GROUPED_WGRAD)
    ]
    return problems


def problem_name(problem: Problem) -> str:
    """Name of the op, and the format where there is one: "fused_moe a16w4"."""
    if not isinstance(problem, MoEProblem):
        return problem.op.value
    return f"{problem.op.value} {FORMAT_NAMES[problem.options.activation_format]}"


def variants(problem: Problem) -> list[Problem]:
    """The problem with its weights in every layout, a backend's own before the common one."""
    if not isinstance(problem, MoEProblem):
        return [problem]
    return [replace(problem, weight_layout=layout) for layout in reversed(Layout)]


def chosen_backend(problem: Problem) -> str | None:
    """The backend that the library chooses for a problem, in the layout that suits it best."""
    for variant in variants(problem):
        try:
            with warnings.catch_warnings(action="ignore"):
                return explain_problem(variant).resolution.kernel.backend
        except UnsupportedError:
            continue
    return None


def refused(problem: Problem, backend: str) -> str:
    """Why a backend serves a problem in no layout, as phrases after its name; "" if it does."""
    reasons = [refusal(variant, backend) for variant in variants(problem)]
    return "" if None in reasons else "; ".join(dict.fromkeys(map(str, reasons)))


def examine_operations(target: Target) -> list[Row]:
    """For each operation: which backends serve it here, why others do not, which one answers."""
    rows: list[Row] = []
    for problem in small_problems(target):
        reasons = {backend: refused(problem, backend) for backend in sorted(BACKENDS)}
        rows.append(
            {
                "op": problem_name(problem),
                "chosen": chosen_backend(problem),
                "served_by": [backend for backend, reason in reasons.items() if not reason],
                "refused": {backend: reason for backend, reason in reasons.items() if reason},
            }
        )
    return rows


def short_names(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Operations by name; formats only of those that are named in part.

    >>> short_names(["a x", "a y", "b x"], ["a x", "a y", "b x", "b y", "c"])
    ['a', 'b (x)']
    """
    formats: dict[str, list[str]] = {}
    for name in names:
        op, _, a_format = name.partition(" ")
        formats.setdefault(op, []).append(a_format)
    counts = Counter(name.partition(" ")[0] for name in every)
    return [
        op if len(found) == counts[op] else f"{op} ({', '.join(found)})"
        for op, found in formats.items()
    ]


def unused_backends(operations: Sequence[Row]) -> list[str]:
    """A sentence for each reason why a backend serves no operation, or not all that it has."""
    found: dict[tuple[str, str], list[str]] = {}
    has: dict[str, list[str]] = {}
    for row in operations:
        for backend in (*row["served_by"], *row["refused"]):
            reason = row["refused"].get(backend, "")
            if reason.startswith("has no "):  # what a backend never had is no news
                continue
            has.setdefault(backend, []).append(row["op"])
            if reason:
                found.setdefault((backend, reason), []).append(row["op"])
    return [
        f"{backend} {reason}"
        + ("" if names == has[backend] else f": not {', '.join(short_names(names, has[backend]))}")
        for (backend, reason), names in found.items()
    ]


def operation_lines(operations: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Lines of the table: formats of an operation with the same answer share one."""
    answers: dict[tuple[str, str, str], list[str]] = {}
    for row in operations:
        others = ", ".join(each for each in row["served_by"] if each != row["chosen"]) or "–"
        key = row["op"].partition(" ")[0], row["chosen"] or "[red]nothing[/]", others
        answers.setdefault(key, []).append(row["op"])
    every = [row["op"] for row in operations]
    return [
        (short_names(names, every)[0], chosen, others)
        for (_, chosen, others), names in answers.items()
    ]
