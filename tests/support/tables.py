"""Tuned tables of tests: a device, a head, what a row says of its config, a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxpert.cli.tune_cells import TARGETS
from mxpert.core import tables
from mxpert.testing.problems import MoEShape

H200 = TARGETS["nvidia-h200"]
SHAPE = MoEShape(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2)
HEAD = {
    "device": "NVIDIA H200",
    "date": "2026-11-20",
    "commit": "abc",
    "torch": "2.11",
    "triton": "3.6",
}
MEASURED: dict[str, Any] = dict(
    us=9.5,
    heuristic_us=None,
    spread=0.02,
    source="search",
    note="because",
    rel_l2=2e-3,
    tried=4,
    valid=5,
    commit="abc",
    date="today",
)
"""Of a row of any table."""


def ship_tables_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the package's tables, and the user's, lie in a folder; returns the H200's shipped one."""
    monkeypatch.setattr("mxpert.core.tables.resources.files", lambda _: folder)
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(folder / "cache"))
    tables.reload_tables()
    return folder / "tables" / "nvidia-h200.json"
