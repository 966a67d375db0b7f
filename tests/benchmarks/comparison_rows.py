"""Rows of a made-up comparison."""

from __future__ import annotations

from typing import Any

import cells
from moe.rows import make_row

from mxpert.testing.timing import Timing

CEILINGS = {"read_tbs": 4.0, "bf16_tflops": 700.0, "fp8_tflops": 1300.0}
META: dict[str, Any] = {
    "device": "a GPU",
    "clocks": {},
    "versions": {},
    "commit": "abc",
    "date": "2026-01-01",
    "protocol": {"power": "idle"},
    "ceilings": CEILINGS,
}


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
