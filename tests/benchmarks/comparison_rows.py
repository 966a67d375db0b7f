"""Rows of made-up comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.grouped import rows as grouped_rows
from benchmarks.grouped.cells import SHAPES
from benchmarks.grouped.ours import Variant
from benchmarks.moe import cells
from benchmarks.moe.rows import KEY_COLUMNS, Key, make_row
from mxpert.testing.timing import Timing

CEILINGS = {"read_tbs": 4.0, "copy_tbs": 3.5, "bf16_tflops": 700.0, "fp8_tflops": 1300.0}
META: dict[str, Any] = dict(
    device="a GPU",
    clocks={},
    versions={},
    commit="abc",
    date="2026-01-01",
    protocol={"power": "idle", "pause": "none"},
    ceilings=CEILINGS,
)


def row_key(row: Mapping[str, Any]) -> Key:
    """What makes a row unique."""
    model, tokens, routing, impl, activation, stage = (row[name] for name in KEY_COLUMNS)
    return model, tokens, routing, impl, activation, stage


def row(
    impl: str = "mxpert",
    us: float = 10.0,
    *,
    model: str = "dsv3-ep8",
    tokens: int = 16,
    activation: str = "bf16",
    stage: str = "layer",
) -> dict[str, Any]:
    cell = cells.Cell(cells.MODELS[model], tokens)
    return make_row(cell, 31.5, impl, activation, stage, Timing(us, us, us + 1, 5), 1e-3, CEILINGS)


def grouped_row(
    impl: str = "mxpert",
    mode: str = "row",
    op: str = "forward",
    us: float = 1000.0,
    *,
    balance: str = "balanced",
    with_quant: bool = False,
) -> dict[str, Any]:
    variant = Variant(impl, mode, op, with_quant, lambda: None)
    timing = Timing(us, us, us + 1, 7)
    return grouped_rows.make_row(SHAPES[0], balance, variant, timing, 28.4, 1.7e-3)


def grouped_document(*rows: dict[str, Any]) -> dict[str, Any]:
    texts = {"operand": "x", "op": "quantize_dual", "mode": "row", "dtype": "bfloat16"}
    numbers = {"width": 7168, "bytes_ideal": 1 << 30, "us": 300.0, "tbs": 3.5, "of_copy": 0.9}
    quantiser = {"shape": str(SHAPES[0])} | texts | numbers
    return {"meta": dict(META), "rows": list(rows or [grouped_row()]), "quantiser": [quantiser]}
