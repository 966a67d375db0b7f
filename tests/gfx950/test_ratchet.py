"""Hot loops may not become slower: modelled rates against those of the recorded report."""

from __future__ import annotations

import pytest
import triton

from benchmarks.gfx950.cells import BACKENDS, cells, run_cell
from benchmarks.gfx950.render import SCHEMA
from benchmarks.gfx950.run import OUTPUT

GROWTH = 1.03
"""Modelled cycles may grow by 3 %."""
LOOPS = (
    "decode gpt-oss T=128 mxfp4 down",
    "prefill gpt-oss T=8192 mxfp8 gate_up",
    "grouped forward 16×2048 N=4096 K=7168",
)
"""A loop of each kind; other cells of the report share them or differ in the epilogue."""


def rate(row: dict[str, object]) -> float:
    """Work a cycle: bytes from HBM in decode, else matrix work."""
    value = row["tbs" if row["regime"] == "decode" else "mfma_percent"]
    assert isinstance(value, (int, float))
    return float(value)


def growth(recorded: dict[str, object], found: dict[str, object]) -> float:
    """Cycles for the same work over those recorded."""
    return rate(recorded) / rate(found)


RECORDED = {(row["backend"], row["cell"]): row for row in SCHEMA.load(OUTPUT)["rows"]}
CELLS = {cell.name: cell for cell in cells()}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_modelled_cycles_do_not_grow(backend: str, name: str) -> None:
    recorded = RECORDED[backend, name]
    if recorded["triton"] != triton.__version__:
        pytest.skip(
            f"the record is of Triton {recorded['triton']}: another compiler's schedule of the "
            "same source has other cycles"
        )
    found = run_cell(CELLS[name], backend, (recorded["depth"],))
    assert growth(recorded, found) <= GROWTH, (
        f"{backend}, {name}: {found['cycles']} cycles, {rate(found)} instead of {rate(recorded)}, "
        f"limit {found['limit']}; if it must be, record it: python -m benchmarks.gfx950.run"
    )


def test_a_loop_that_takes_four_percent_longer_is_found() -> None:
    row: dict[str, object] = {"regime": "decode", "tbs": 5.0, "mfma_percent": 5.0}
    assert growth(row, row | {"tbs": 5.0 / 1.04}) > GROWTH
    assert growth(row, row | {"tbs": 5.0 / 1.02}) < GROWTH
    row["regime"] = "grouped"
    assert growth(row, row | {"mfma_percent": 5.0 / 1.04}) > GROWTH


def test_the_executed_size_does_not_matter() -> None:
    """The loop is modelled in its steady state, whatever part of k was executed."""
    name = "prefill gpt-oss T=8192 mxfp8 gate_up"
    small, large = (run_cell(CELLS[name], "cdna4", (depth,)) for depth in (1536, 3072))
    assert small["cycles"] == pytest.approx(large["cycles"], rel=0.01)
    assert small["others_per_mfma"] == large["others_per_mfma"]


def test_the_report_has_every_loop_that_is_watched() -> None:
    assert set(LOOPS) <= set(CELLS)
    rows = [RECORDED[backend, name] for backend in BACKENDS for name in LOOPS]
    assert all(row["depth"] for row in rows)
