"""The cdna4 table of modelled rows: the time of a stage, and rows only where they gain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from benchmarks.gfx950.choice import (
    CHIP,
    LoopKey,
    Rate,
    best_config,
    executed_rate,
    launches,
    problem,
    stage_seconds,
)
from benchmarks.gfx950.choose import OUTPUT, TARGET, choices, table_row, worst_residual
from benchmarks.gfx950.rates import RATES, Rates
from mxpert.configs import Cdna4GemmConfig, Cdna4Kernel
from mxpert.core import tables
from mxpert.core.problem import Op
from mxpert.core.registry import explain_problem
from mxpert.testing.problems import MoEShape

SHAPE = MoEShape(4096, 2048, 8, 8)
"""Eight experts that all tokens take; gate_up has 4096 weight rows: 16 tiles of 256 each."""
DECODE = Cdna4GemmConfig(Cdna4Kernel.DECODE, 16, 256, 4, 4)


def flat(key: LoopKey) -> Rate:
    """Cycles an element: ten of a workgroup alone, sixteen of two on a compute unit."""
    return Rate(10.0, 1) if key.alone else Rate(16.0, 2)


@pytest.mark.parametrize(
    ("experts", "cycles"),
    [
        pytest.param(8, [10], id="128 tiles: one workgroup alone, ten cycles an element"),
        pytest.param(16, [10], id="256 tiles"),
        pytest.param(17, [16], id="272 tiles: two on a unit, sixteen cycles each"),
        pytest.param(32, [16], id="512 tiles: all units hold two"),
        pytest.param(33, [16, 10], id="528 tiles: the rest alone in another round"),
        pytest.param(72, [16, 16, 10], id="1152 tiles"),
    ],
)
def test_rounds_of_a_stage(experts: int, cycles: list[float]) -> None:
    shape = replace(SHAPE, num_experts=experts, top_k=experts)
    found = stage_seconds(problem(shape, 16, "mxfp4"), Op.MOE_GATE_UP, DECODE, flat)
    expected = sum(4096 * each + CHIP.stream_latency for each in cycles) / CHIP.clock_hz
    weights = experts * 4096 * 4096 * (1 / 2 + 1 / 32) / CHIP.stream_bytes_per_second
    assert found == pytest.approx(max(expected, weights))


def test_a_stage_takes_what_hbm_needs_for_its_weights() -> None:
    def instant(key: LoopKey) -> Rate:
        return replace(flat(key), cycles=0.0)

    found = stage_seconds(problem(SHAPE, 16, "mxfp4"), Op.MOE_GATE_UP, DECODE, instant)
    weights = 8 * 4096 * 4096 * (1 / 2 + 1 / 32)
    assert found == pytest.approx(weights / CHIP.stream_bytes_per_second)


def test_splits_shorten_tiles_and_move_their_sums() -> None:
    def slow(key: LoopKey) -> Rate:
        return replace(flat(key), cycles=30.0)

    layer, split = problem(SHAPE, 16, "mxfp4"), replace(DECODE, k_splits=2)
    found = stage_seconds(layer, Op.MOE_GATE_UP, split, slow)
    loop = (2048 * 30 + CHIP.stream_latency) / CHIP.clock_hz
    sums = 2 * 2 * (8 * 16) * 4096 * 4 / CHIP.stream_bytes_per_second
    assert found == pytest.approx(loop + sums + CHIP.stream_latency / CHIP.clock_hz)


def test_a_choice_has_no_more_launches_than_the_heuristics() -> None:
    for tokens in (1, 16):
        choice = best_config(problem(SHAPE, tokens, "mxfp4"), flat)
        assert launches(choice.best) <= launches(choice.heuristic)
        assert choice.seconds <= choice.heuristic_seconds


def test_the_table_has_the_rows_that_gain() -> None:
    """And so the heuristic is within the residual of the model's best everywhere else."""
    residual = worst_residual()
    found = list(choices(Rates(execute=False)))
    head = {"commit": "c", "date": "d"}
    expected = {
        row.key: row
        for row in (table_row(each, head, residual) for each in found if each.gain > residual)
    }
    kept = {
        row.key: replace(row, commit="c", date="d", place="")
        for row in tables.read_rows(OUTPUT, TARGET.name)
    }
    assert kept == expected


def test_a_recorded_rate_is_what_is_executed() -> None:
    recorded = json.loads(RATES.read_text())["triton"]
    if recorded != triton.__version__:
        pytest.skip(f"recorded with Triton {recorded}")
    key = LoopKey(DECODE, "mxfp4")
    assert executed_rate(key).cycles == pytest.approx(Rates(execute=False)(key).cycles, rel=0.03)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The shipped table of a package whose tables lie in a folder of this test."""
    monkeypatch.setattr(tables.resources, "files", lambda _: tmp_path)
    monkeypatch.setenv("MXPERT_CACHE_DIR", str(tmp_path / "cache"))
    tables.reload_tables()
    return tmp_path / "tables" / tables.table_name(TARGET)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda row: row, True, id="modelled"),
        pytest.param(lambda row: replace(row, source="search", rel_l2=2e-3), False, id="measured"),
    ],
)
def test_explain_tells_modelled_rows_from_measured_ones(
    shipped: Path, change: Callable[[tables.TunedRow], tables.TunedRow], words: bool
) -> None:
    layer = problem(SHAPE, 16, "mxfp4")
    row = change(table_row(best_config(layer, flat), {"commit": "c", "date": "d"}, 0.04))
    head = {"device": TARGET.name, "torch": "2", "triton": "3", "commit": "c", "date": "d"}
    tables.add_rows(shipped, head, [row])
    found = explain_problem(layer)
    assert (found.resolution.source, found.resolution.config) == ("table", row.config)
    assert ("modelled, not measured" in str(found)) is words
    tables.reload_tables()
