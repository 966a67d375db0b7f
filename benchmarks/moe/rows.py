"""Rows of a comparison, and the form of its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.harness.document import META, NUMBER, OPTIONAL, Row, Schema, Section
from benchmarks.harness.run import times_of
from benchmarks.moe.cells import ROUTINGS, STAGES, WIDTHS, Cell, Model
from mxpert.testing.timing import Timing, Work

KEY_COLUMNS = ("model", "T", "routing", "impl", "activation", "stage")
TEXTS = ("model", "routing", "impl", "activation", "stage")
SECTION = Section(
    dict.fromkeys(TEXTS, (str,))
    | dict.fromkeys("EkHFT", (int,))
    | dict.fromkeys(("hit", "us", "us_spread", "tbs", "tflops", "percent_of_roof"), NUMBER)
    | {"rel_l2": OPTIONAL},
    KEY_COLUMNS,
    {"stage": STAGES, "activation": WIDTHS, "routing": ROUTINGS},
)
SCHEMA = Schema("moe.run", {"rows": SECTION}, META, optional_meta=("peers", "failures", "left"))
Key = tuple[str, int, str, str, str, str]


def work_of(model: Model, tokens: int, stage: str, hit: float) -> Work:
    """Traffic and arithmetic of a stage that hits so many experts."""
    return Work.of_stage(
        stage.removesuffix("_gemm"),
        hit_experts=hit,
        routed_rows=tokens * model.k,
        hidden_size=model.H,
        intermediate_size=model.F,
    )


def make_row(
    cell: Cell,
    hit: float,
    impl: str,
    activation: str,
    stage: str,
    timing: Timing,
    rel_l2: float | None,
    ceilings: Mapping[str, float],
) -> Row:
    """One measurement set against the ceilings of its run; times in µs, `us_spread` the width of
    the band from the 10th to the 90th percentile."""
    work = work_of(cell.model, cell.tokens, stage, hit)
    rate = ceilings["bf16_tflops" if WIDTHS[activation] == "a16" else "fp8_tflops"]
    floor = work.floor_us(ceilings["read_tbs"] * 1e12, rate * 1e12)
    finite = rel_l2 is not None and math.isfinite(rel_l2)
    return {
        **cell.model.columns,
        "T": cell.tokens,
        "hit": hit,
        "routing": cell.routing,
        "impl": impl,
        "activation": activation,
        "stage": stage,
        **times_of(timing),
        "rel_l2": rel_l2 if finite else None,
        "tbs": work.weight_bytes / timing.us / 1e6,
        "tflops": work.flops / timing.us / 1e6,
        "percent_of_roof": 100 * floor / timing.us,
    }
