"""Hot loops may not become slower: modelled rates against those of the recorded report."""

from __future__ import annotations

from typing import Any

import pytest
import triton

from benchmarks.gfx950.cells import BACKENDS, Cell, MoECell, cells, run_cell
from benchmarks.gfx950.render import SCHEMA
from benchmarks.gfx950.run import NEWEST, OUTPUT
from gfx950emu.timing import MI355X

GROWTH = 1.03
"""Modelled cycles may grow by 3 %."""
RECORDS = {
    document["meta"]["versions"]["triton"]: {
        (row["backend"], row["cell"]): row for row in document["rows"]
    }
    for document in map(SCHEMA.load, (OUTPUT, NEWEST))
}
"""Triton → backend and cell → the recorded row."""
CELLS = {cell.name: cell for cell in cells()}
Loop = tuple[object, ...]


def loop_of(row: dict[str, Any], cell: Cell) -> Loop:
    """What a row's loop depends on: cells that have all of it in common share its instructions."""
    stage = (cell.activation_format, cell.stage) if isinstance(cell, MoECell) else (cell.op,)
    return row["backend"], row["regime"], row["kernel"], row["config"], *stage


def watched(record: dict[tuple[str, str], dict[str, Any]]) -> dict[Loop, list[dict[str, Any]]]:
    """Each loop of a record, and its rows."""
    loops: dict[Loop, list[dict[str, Any]]] = {}
    for row in record.values():
        loops.setdefault(loop_of(row, CELLS[row["cell"]]), []).append(row)
    return loops


def rate(row: dict[str, Any]) -> float:
    """Work a cycle: bytes from HBM in decode, else matrix work."""
    return float(row["tbs" if row["regime"] == "decode" else "mfma_percent"])


def load_of(row: dict[str, Any]) -> float:
    """Share of HBM's best rate: the model begins there, and ends at once if nothing has changed."""
    return min(float(row["tbs"]) * 1e12 / MI355X.stream_bytes_per_second, 1.0)


def growth(recorded: dict[str, Any], found: dict[str, Any]) -> float:
    """Cycles for the same work over those recorded."""
    return rate(recorded) / rate(found)


SHORTEST = [
    min(rows, key=lambda row: int(row["depth"]))
    for rows in watched(RECORDS.get(triton.__version__, {})).values()
]
"""Of the rows of each loop that this Triton compiles, the one that is executed soonest."""


@pytest.mark.parametrize("recorded", SHORTEST, ids=lambda row: f"{row['backend']} {row['cell']}")
def test_modelled_cycles_do_not_grow(recorded: dict[str, Any]) -> None:
    backend, name = recorded["backend"], recorded["cell"]
    found = run_cell(CELLS[name], backend, (recorded["depth"],), load_of(recorded))
    if growth(recorded, found) > GROWTH:  # the search for the load begins as for the record
        found = run_cell(CELLS[name], backend, (recorded["depth"],))
    assert growth(recorded, found) <= GROWTH, (
        f"{backend}, {name}: {found['cycles']} cycles, {rate(found)} instead of {rate(recorded)}, "
        f"limit {found['limit']}; if it must be, record it: python -m benchmarks.gfx950.run"
    )


@pytest.mark.parametrize("version", RECORDS)
def test_every_cell_is_watched(version: str) -> None:
    """Rows that share a loop have the same instructions, so that one stands for all."""
    record = RECORDS[version]
    assert set(record) == {(backend, name) for backend in BACKENDS for name in CELLS}
    for rows in watched(record).values():
        assert {row["triton"] for row in rows} == {version}
        assert len({(row["mfma"], row["registers"], row["lds"]) for row in rows}) == 1, rows
        assert all(row["depth"] for row in rows)


def test_the_oldest_and_the_newest_triton_are_recorded() -> None:
    assert len(RECORDS) == 2
    assert triton.__version__ in RECORDS, (
        f"no rows of Triton {triton.__version__}; record them: python -m benchmarks.gfx950.run "
        f"--output {NEWEST.name}"
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
