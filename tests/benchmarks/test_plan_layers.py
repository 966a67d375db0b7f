"""The planner's measured layers are those of the results in this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.script import RESULTS
from benchmarks.ranks import plan_layers

ROWS = [
    {"E": 128, "k": 4, "T": 1, "us": 2.0},
    {"E": 128, "k": 4, "T": 101, "us": 4.0},
    {"E": 384, "k": 8, "T": 1, "us": 3.0},
    {"E": 384, "k": 8, "T": 101, "us": 11.0},
]


def test_the_shipped_file_is_current() -> None:
    assert plan_layers.TARGET.read_text("utf-8") == plan_layers.text_from(RESULTS)


def test_top_k_is_that_of_the_nearest_shape() -> None:
    assert plan_layers.topk_us(ROWS, 32, 4, 51) == pytest.approx(3.0)
    assert plan_layers.topk_us(ROWS, 385, 9, 1) == 3.0
    with pytest.raises(ValueError, match="need 1 to 101, got 102"):
        plan_layers.topk_us(ROWS, 128, 4, 102)


def test_an_id_costs_the_steepest_slope() -> None:
    assert plan_layers.sort_ns(ROWS) == pytest.approx(8000 / (100 * 8))


def test_the_script_writes_the_file(tmp_path: Path) -> None:
    assert plan_layers.main(["--output", str(tmp_path / "layers.json")]) == 0
    assert (tmp_path / "layers.json").read_bytes() == plan_layers.TARGET.read_bytes()
