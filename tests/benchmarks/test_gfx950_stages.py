"""Whole stages beside published times: what they are compared with, and what the model adds up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from benchmarks import ROOT
from benchmarks.gfx950 import run_stages, stages
from benchmarks.gfx950.cells import GroupedCell
from benchmarks.gfx950.published import (
    GPT_OSS,
    GPT_OSS_PADDED,
    PEAK_TFLOPS,
    SKINNY,
    STAGES,
    SUSTAINED,
)
from benchmarks.gfx950.stage_tables import (
    SCHEMA,
    grouped_table,
    kilowatts,
    moe_table,
    power,
    ratio,
    summary,
    word,
)
from benchmarks.gfx950.stages import (
    CHIP,
    LAUNCH_SECONDS,
    Work,
    expected_blocks,
    grouped_cells,
    grouped_work,
    moe_row,
    moe_work,
    picked,
    shape_name,
    stage_time,
)
from gfx950emu.timing import TileReport
from mxpert.core.problem import GemmConfig
from mxpert.testing.problems import MoEShape

PAGE = ROOT / "docs/gfx950-stages.md"
BY_SHAPE = {(each.model, each.tokens, each.activation_format, each.stage): each for each in STAGES}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return SCHEMA.load(run_stages.OUTPUT)


# --- what is published ---------------------------------------------------------------------------


def test_each_shape_has_its_own_time() -> None:
    assert len(BY_SHAPE) == len(STAGES)
    times = {
        ("deepseek-v3 TP4", 8192): {"gate_up": (736.0, 870.0), "down": (901.0, 905.0)},
        ("EP-K6", 16384): {"gate_up": (2527.0, 2643.0), "down": (994.0, 1070.0)},
        ("gpt-oss-120b", 128): {"gate_up": (181.0, 182.8), "down": (95.6, 100.7)},
    }
    for (model, tokens), of_stages in times.items():
        for stage, found in of_stages.items():
            both = (BY_SHAPE[model, tokens, name, stage].us for name in ("mxfp4", "mxfp8"))
            assert tuple(both) == found
    assert not any(each.us for each in STAGES if each.model.startswith("kimi"))


def test_the_sizes_of_gpt_oss_are_those_of_the_rates_that_stand_beside_its_times() -> None:
    """5.80 TB/s in stage 2, and 75 to 76 % of 8 TB/s in stage 1: so 2880, not the stored 3072."""

    def terabytes(shape: MoEShape, matrices: int) -> float:
        experts, _ = expected_blocks(128, shape, 16)
        return experts * matrices * shape.hidden_size * shape.intermediate_size * 4.25 / 8 / 1e12

    assert terabytes(GPT_OSS, 1) / 95.6e-6 == pytest.approx(5.80, abs=0.005)
    assert terabytes(GPT_OSS, 2) / 184e-6 / 8 == pytest.approx(0.755, abs=0.005)
    assert terabytes(GPT_OSS_PADDED, 2) / 181e-6 > max(SKINNY.values()) / 1000 * 1.05


def test_sustained_rates_are_a_half_to_two_thirds_of_the_peak() -> None:
    parts = [rate / PEAK_TFLOPS[name] for name, (rate, _) in SUSTAINED.items()]
    assert 0.52 < min(parts) < max(parts) < 0.65


# --- what the model adds up ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "shape", "block_m", "experts", "blocks"),
    [
        pytest.param(1, MoEShape(64, 64, 8, 2), 16, 2.0, 2.0, id="one token"),
        pytest.param(40, MoEShape(64, 64, 8, 8), 16, 8.0, 24.0, id="all experts"),
        pytest.param(2, MoEShape(64, 64, 2, 1), 1, 1.5, 2.0, id="a block for each row"),
        pytest.param(2, MoEShape(64, 64, 2, 1), 2, 1.5, 1.5, id="a block for each expert"),
    ],
)
def test_blocks_of_random_routing(
    tokens: int, shape: MoEShape, block_m: int, experts: float, blocks: float
) -> None:
    found = expected_blocks(tokens, shape, block_m)
    assert found == (pytest.approx(experts), pytest.approx(blocks))


def test_blocks_are_those_of_drawn_tokens() -> None:
    torch.manual_seed(0)
    shape, block_m = MoEShape(64, 64, 32, 4), 16
    found = [0.0, 0.0]
    for _ in range(50):
        ids = torch.rand(100, shape.num_experts).topk(shape.top_k).indices
        rows = torch.bincount(ids.flatten(), minlength=shape.num_experts)
        found[0] += float((rows > 0).sum()) / 50
        found[1] += float((-(-rows // block_m)).sum()) / 50
    assert expected_blocks(100, shape, block_m) == pytest.approx(found, rel=0.03)


WORK = Work(tiles=256.0, fresh=1.0, flops=1.0, useful=1.0, bytes=1.0, operands="fp4", others={})


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """Calls of a model in which two workgroups fit, turns take 100, 90, 80 … cycles."""
    calls: list[tuple[int, int, float]] = []

    def model(
        execution: object, *, workgroups: int | None, turns: int, active_units: float
    ) -> TileReport:
        side_by_side = workgroups or 2
        calls.append((side_by_side, turns, active_units))
        cycles = {1: 100.0, 2: 190.0, 3: 270.0}[turns] / (3 - side_by_side)
        return TileReport("k", side_by_side, turns, cycles, 0.0, 0.0, 0.0, 0)

    monkeypatch.setattr(stages, "model_tiles", model)
    return calls


@pytest.mark.parametrize(
    ("tiles", "cycles", "units"),
    [
        pytest.param(100, 50, 100, id="one tile on each of 100 units"),
        pytest.param(256, 50, 256, id="one on each"),
        pytest.param(500, 100, 250, id="two side by side"),
        pytest.param(768, 100 + 50, 256, id="two, then one"),
        pytest.param(6 * 256, 270, 256, id="three turns"),
        pytest.param(10 * 256, 270 + 2 * 80, 256, id="two more like the third"),
    ],
)
def test_cycles_of_the_fullest_compute_unit(
    replays: list[tuple[int, int, float]], tiles: int, cycles: float, units: float
) -> None:
    found = stage_time([(1.0, None)], replace(WORK, tiles=tiles))  # type: ignore[list-item]
    assert found.cycles * CHIP.clock_hz == pytest.approx(cycles)
    assert {call[2] for call in replays} == {units}


def test_a_stage_is_bound_by_memory_and_power_and_waits_for_other_kernels(
    replays: list[tuple[int, int, float]],
) -> None:
    parts: Any = [(1.0, None)]
    memory = stage_time(parts, replace(WORK, bytes=7.3e9))
    assert (memory.limit, memory.seconds) == ("memory", pytest.approx(1e-3))
    hot = stage_time(parts, replace(WORK, flops=5255e9))
    assert (hot.limit, hot.seconds) == ("power", pytest.approx(1e-3))
    summed = stage_time(parts, replace(WORK, bytes=7.3e9, others={"sum": 7.3e9, "x": 0.0}))
    each = CHIP.stream_latency / CHIP.clock_hz + LAUNCH_SECONDS
    assert summed.seconds == pytest.approx(2e-3 + 2 * each)


def test_f_512_is_executed_and_counted_at_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    published = BY_SHAPE["deepseek-v3 TP4", 8192, "mxfp8", "down"]
    depths = []

    def report(config: object, stage: str, format: str, depth: int) -> object:
        depths.append(depth)
        raise InterruptedError

    monkeypatch.setattr(stages, "_moe_report", report)
    with pytest.raises(InterruptedError):
        stages.moe_time(published)
    assert depths == [512]
    _, config = picked(published)
    chosen: Any = config.down
    work = moe_work(published, chosen)
    tile = 2 * chosen.block_m * chosen.block_n * 512
    assert work.flops == pytest.approx(work.tiles * tile)
    assert set(work.others) == {"sum of slots"}


def test_a_grouped_gemm_pads_tiles_and_depth() -> None:
    config = GemmConfig(256, 256, 128)
    work = grouped_work(GroupedCell("forward", 4, 2048, 2880, 2880), config)
    assert work.tiles == 4 * 8 * 12
    assert work.flops == work.tiles * 2 * 256 * 256 * 2944
    assert work.useful == 2 * 4 * 2048 * 2880 * 2880


# --- the tables ----------------------------------------------------------------------------------


def line(us: float, published: float | None = 100.0, **columns: float) -> dict[str, Any]:
    bounds: Mapping[str, float] = {"cycles_us": 100.0, "memory_us": 50.0, "power_us": 10.0}
    return {"us": us, "published_us": published, "error_percent": 10.0, **bounds, **columns}


def test_words_follow_the_known_error() -> None:
    found = [word(line(us)) for us in (89.0, 91.0, 109.0, 111.0)]
    assert found == ["faster", "level", "level", "slower"]
    assert word(line(100.0, None)) == "–"


def test_matrix_work_above_a_kilowatt_is_told() -> None:
    assert power(line(100.0)) == "no"
    assert kilowatts(line(100.0, power_us=100.0)) == pytest.approx(1.4)
    assert power(line(100.0, power_us=110.0)) == "yes (1.4 kW)"


def test_every_published_shape_has_a_row_with_its_own_time(document: dict[str, Any]) -> None:
    rows = {(row["shape"], row["tokens"], row["what"]): row for row in document["rows"]}
    assert len(rows) == len(STAGES) + 3 * len(stages.GROUPED)
    for each in STAGES:
        what = f"{each.activation_format} {each.stage}"
        assert rows[shape_name(each), each.tokens, what]["published_us"] == each.us
    for cell in grouped_cells():
        rate = stages.GROUPED[cell.groups, cell.rows, cell.n, cell.k][0][stages.OPS.index(cell.op)]
        shape = f"{cell.groups} × {cell.rows}, N {cell.n}, K {cell.k}"
        flops = 2 * cell.groups * cell.rows * cell.n * cell.k
        found = rows[shape, cell.groups * cell.rows, cell.op]["published_us"]
        assert found == pytest.approx(flops / rate / 1e6, abs=0.06)


def test_errors_are_those_of_the_calibration(document: dict[str, Any]) -> None:
    known = run_stages.errors()
    assert {row["error_percent"] for row in document["rows"]} == {
        round(error, 1) for error in known.values()
    }


def test_no_word_depends_on_what_a_launch_is_assumed_to_take(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        launches = (row["launches"] - 1) * LAUNCH_SECONDS * 1e6
        if row["published_us"] is not None:
            assert word({**row, "us": row["us"] - launches}) == word(row), row


def test_the_documentation_shows_the_json(document: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for part in (moe_table(document["rows"]), grouped_table(document["rows"])):
        assert part in text
    assert summary(document["rows"]) in text


def test_each_row_that_is_slower_has_its_reason(document: dict[str, Any]) -> None:
    reasons = PAGE.read_text(encoding="utf-8").partition("## Where it is slower")[2]
    for row in document["rows"]:
        if word(row) == "slower":
            assert f"T = {row['tokens']}" in reasons, row
            assert f"{row['us']:.0f} µs" in reasons, row
            assert ratio(row)


def test_a_recorded_stage_is_what_is_executed(document: dict[str, Any]) -> None:
    recorded = document["meta"]["versions"]["triton"]
    if recorded != triton.__version__:
        pytest.skip(f"recorded with Triton {recorded}")
    published = BY_SHAPE["deepseek-v3 TP4", 8192, "mxfp8", "down"]
    found = moe_row(published)
    old = next(
        row
        for row in document["rows"]
        if (row["shape"], row["what"]) == (found["shape"], found["what"])
    )
    assert old["config"] == found["config"]
    assert found["us"] == pytest.approx(old["us"], rel=0.03)
