"""Writes the table of ops between the markers of docs/supported-ops.md: `python docs/_ops.py`.

Each cell is the answer of a backend's kernel to the problems of its row, on a target of its column.
tests/core/test_support_ops.py fails if the page has another table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mxpert.core.backend import BACKENDS, layouts_for
from mxpert.core.problem import (
    ACTIVATION_FORMATS,
    DualProblem,
    GroupedProblem,
    MoEOptions,
    MoEProblem,
    Op,
    Problem,
    QuantizeProblem,
    ReLU2,
    RoutingProblem,
    RowsProblem,
    SiLU,
    Target,
    TopKOptions,
    TopKProblem,
)
from mxpert.core.registry import kernel_of
from mxpert.formats import FORMATS, ScaleRule, ScaleSpan
from mxpert.formats.tensor import Layout

PAGE = Path(__file__).resolve().parent / "supported-ops.md"
BEGIN, END = "<!-- table of ops: python docs/_ops.py -->", "<!-- end of the table of ops -->"


@dataclass(frozen=True)
class Column:
    """A backend on a target, and how far its kernels are proven there."""

    title: str
    backend: str
    target: Target
    word: str


H200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
B200 = Target("cuda", "sm_100", "NVIDIA B200", 148, 232448)
MI355X = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)
CPU = Target("cpu", "cpu", "cpu", 1, 0)
COLUMNS = (
    Column("reference, any torch device", "reference", CPU, "measured"),
    Column("hopper, sm_90", "hopper", H200, "measured"),
    Column("triton, sm_90", "triton", H200, "measured"),
    Column("triton, sm_100 (Blackwell)", "triton", B200, "compiled-only"),
    Column("cdna4, gfx950 (AMD)", "cdna4", MI355X, "emulated"),
    Column("triton, gfx950 (AMD)", "triton", MI355X, "emulated"),
)

Layouts = Callable[[str], Layout]
"""Of a weight format, the layout that a column's backend reads."""

Problems = Callable[[Target, Layouts], list[Problem]]


@dataclass(frozen=True)
class Row:
    """Ops and formats that a backend serves all of, or none of."""

    ops: str
    formats: str
    problems: Problems


def quantizations(stochastic: bool) -> Problems:
    ops = (Op.QUANTIZE,) if stochastic else (Op.QUANTIZE, Op.DEQUANTIZE)
    return lambda target, _: [
        QuantizeProblem(op, target, (64, 64), -1, torch.bfloat16, fmt, stochastic=stochastic)
        for op in ops
        for fmt in FORMATS.values()
    ]


def routing(target: Target, _: Layouts) -> list[Problem]:
    return [
        TopKProblem(Op.ROUTE_TOPK, target, 16, 2, 8, TopKOptions()),
        RoutingProblem(Op.ROUTING_PLAN, target, 16, 2, 8, 8, 32),
    ]


def layers(weight_formats: Sequence[str], has_gate: bool = True) -> Problems:
    def made(target: Target, layout_of: Layouts) -> list[Problem]:
        activation = SiLU() if has_gate else ReLU2()
        return [
            MoEProblem(
                op,
                target,
                *(1024, 2, 8, 512, 512),
                MoEOptions(activation, a_format),
                layout_of(w_format),
                0 if op is Op.FUSED_MOE else 128,
                weight_format=w_format,
            )
            for op in (Op.FUSED_MOE, Op.MOE_GATE_UP, Op.MOE_DOWN)
            for a_format in ACTIVATION_FORMATS
            for w_format in weight_formats
        ]

    return made


def duals(spans: Sequence[ScaleSpan], stochastic: bool = False) -> Problems:
    return lambda target, _: [
        DualProblem(
            Op.QUANTIZE_DUAL,
            target,
            (512, 512),
            torch.bfloat16,
            FORMATS[name],
            ScaleRule.RCEIL,
            8,
            True,
            span,
            span,
            stochastic,
        )
        for name in ("mxfp8_e4m3", "mxfp8_e5m2")
        for span in spans
    ]


def gemms(op: Op, *formats: str, trans_b: bool = False) -> Problems:
    return lambda target, _: [
        GroupedProblem(op, target, 4096, 8, 512, 512, name, name, trans_b, torch.bfloat16)
        for name in formats
    ]


def rows_between(target: Target, _: Layouts) -> list[Problem]:
    problem = RowsProblem(Op.COMBINE_ROWS, target, 64, 512, torch.bfloat16, top_k=2)
    activate = replace(problem, top_k=1, activation=SiLU())
    return [
        problem,
        replace(problem, op=Op.COMBINE_ROWS_BACKWARD),
        replace(activate, op=Op.ACTIVATE_ROWS),
        replace(activate, op=Op.ACTIVATE_ROWS_BACKWARD),
    ]


_MX = "mxfp4, mxfp8 e4m3, mxfp8 e5m2"
_MXFP8, _NAMES = "mxfp8 e4m3, mxfp8 e5m2", ("mxfp8_e4m3", "mxfp8_e5m2")
_LAYER = "`moe_gate_up`, `moe_down`, `fused_moe`, `fused_moe_from_logits`"
_OTHER = ("nvfp4", "int4_g32", "int4_g128")
_GEMM, _WGRAD = Op.GROUPED_GEMM, Op.GROUPED_WGRAD
_SPANS = (ScaleSpan.ROW, ScaleSpan.SPAN128, ScaleSpan.AUTO)
ROWS = (
    Row("`quantize`, `dequantize`", _MX, quantizations(stochastic=False)),
    Row("`quantize` with `stochastic_seed`", _MX, quantizations(stochastic=True)),
    Row("`route_topk`, `make_routing_plan`", "–", routing),
    Row(_LAYER, "a16w4, a8w4, a4w4; a8w4 with one scale a token (`fp8_token`)", layers(["mxfp4"])),
    Row("the same, experts without a gate (`ReLU2`)", "the same", layers(["mxfp4"], False)),
    Row(
        "the same with weights in MXFP8 ([formats](formats.md#weights))",
        "the same activations",
        layers(["mxfp8_e4m3"]),
    ),
    Row("the same with weights in NVFP4 or INT4", "the same activations", layers(_OTHER)),
    Row("`quantize_dual`, a scale for 32 values", _MXFP8, duals([ScaleSpan.BLOCK])),
    Row("`quantize_dual`, other [spans](training-spans.md)", _MXFP8, duals(_SPANS)),
    Row("`quantize_dual` with `stochastic_seed`", _MXFP8, duals([ScaleSpan.BLOCK], True)),
    Row("`grouped_gemm`: forward, dgrad", _MXFP8, gemms(_GEMM, *_NAMES, trans_b=True)),
    Row("`grouped_gemm` with `trans_b=False`", _MXFP8, gemms(_GEMM, *_NAMES)),
    Row("`grouped_gemm`: forward", "bf16", gemms(_GEMM, "bf16", trans_b=True)),
    Row("`grouped_gemm` with `trans_b=False`: dgrad", "bf16", gemms(_GEMM, "bf16")),
    Row("`grouped_wgrad`", _MXFP8, gemms(_WGRAD, *_NAMES)),
    Row("`grouped_wgrad`", "bf16", gemms(_WGRAD, "bf16")),
    Row("activation and combine between the GEMMs of training", "bf16", rows_between),
)


def cell(row: Row, column: Column) -> str:
    """What a column's backend does with a row.

    Raises:
        ValueError: it serves some of the row's problems: split the row.
    """
    backend = BACKENDS[column.backend]

    def layout_of(weight_format: str) -> Layout:
        own = column.backend != "triton" and column.backend != "reference"
        return layouts_for(column.target.arch, weight_format)[0] if own else Layout.ROW_MAJOR

    served = []
    for problem in row.problems(column.target, layout_of):
        kernel = kernel_of(backend, problem.op)
        served.append(not isinstance(kernel, str) and kernel.unsupported(problem) is None)
    if any(served) != all(served):
        raise ValueError(f"{row.ops}, {row.formats}: {column.title} serves some; split the row")
    return column.word if all(served) else "absent"


def table() -> str:
    """The table of docs/supported-ops.md."""
    titles = ["op", "formats", *(column.title for column in COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in ROWS:
        cells = [row.ops, row.formats, *(cell(row, column) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page's text with today's table between the markers."""
    made = f"{BEGIN}\n\n{table()}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
