"""Persistent grid of the prefill kernel: workgroups that compute several tiles, on gfx950 code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gfx950emu import Report
from mxpert.configs import Cdna4GemmConfig
from mxpert.core.launch import record_launches
from mxpert.core.problem import Combine, MoEConfig
from mxpert.testing import gfx950
from mxpert.testing.numerics import assert_exact
from support.executors import Executor
from tests.conformance.cases.moe import HIGH_TILES

CDNA4 = Executor("cdna4", "emulated")
KERNEL = "_moe_gemm_prefill_cdna4_kernel"
LDS = 160 * 1024
CASES = [
    name for name, case in HIGH_TILES.items() if "then" not in name and case.a_format != "bf16"
]
"""bf16 activations have the one-shot grid."""


def persistent(config: MoEConfig | None) -> MoEConfig:
    assert config is not None
    gate_up, down = (replace(stage, persistent=True) for stage in (config.gate_up, config.down))
    return replace(config, gate_up=gate_up, down=down)


def run_on_few_units(
    name: str, schedule: gfx950.Schedule, units: int, monkeypatch: pytest.MonkeyPatch
) -> list[Report]:
    """Compare a layer on a GPU of so few CUs that workgroups have several tiles."""
    monkeypatch.setattr(gfx950, "MI355X", replace(gfx950.MI355X, num_sms=units))
    case = HIGH_TILES[name]
    inputs = case.inputs()
    expected, given = case.expected(inputs), case.given(inputs, CDNA4)
    with (
        gfx950.emulate(schedule=schedule, seed=3, trace=True) as emulation,
        CDNA4.serving(persistent(case.config(CDNA4))),
    ):
        case.compare(case.run(given), inputs, expected, "cdna4")
    return [each for each in emulation.reports if each.kernel == KERNEL]


def most_tiles(report: Report, config: Cdna4GemmConfig, depth: int) -> int:
    """Tiles of the wave that computed most of them, by its matrix instructions."""
    texts = [each.text for each in report.program.instructions]
    mfma = {place for place, text in enumerate(texts) if text.startswith("v_mfma")}
    rows, columns, elements = (32, 32, 64) if "32x32x64" in texts[min(mfma)] else (16, 16, 128)
    tile = config.block_m * config.block_n * -(-depth // 128) * 128 // config.num_warps
    counts = [sum(each in mfma for each in trace.instructions) for trace in report.traces]
    found, rest = divmod(max(counts) * rows * columns * elements, tile)
    assert rest == 0
    return found


@pytest.mark.epilogues
@pytest.mark.parametrize("schedule", ["lowest", "random"])
@pytest.mark.parametrize("name", CASES)
def test_workgroups_compute_several_tiles(
    name: str, schedule: gfx950.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both MX formats, every tile, right and without races; as many workgroups as fit at once."""
    reports, case = run_on_few_units(name, schedule, 1, monkeypatch), HIGH_TILES[name]
    config = case.config(CDNA4)
    assert config is not None
    stages = ((config.gate_up, case.sizes.hidden), (config.down, case.sizes.inner))
    most = []
    for report, (stage, depth) in zip(reports, stages, strict=True):
        assert isinstance(stage, Cdna4GemmConfig)
        fitting = 2 if stage.block_m == 64 and case.a_format == "mxfp8" else 1
        assert report.grid[0] <= fitting == LDS // report.lds
        most.append(most_tiles(report, stage, depth))
    assert max(most) > 1


def test_a_small_launch_has_a_workgroup_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more: with 256 CUs each of them has one tile at most."""
    reports = run_on_few_units("mxfp4-64", "lowest", 256, monkeypatch)
    assert all(report.grid[0] < 256 for report in reports)


@pytest.mark.parametrize("name", ["mxfp8-64-deep", "mxfp4-64"])
def test_fewer_compute_units_give_the_same_bits(name: str) -> None:
    """One, three, half and all of 256 CUs; a workgroup for each at most."""
    case = replace(HIGH_TILES[name], exact=False, combine=Combine.REDUCE)
    given, grids, results = case.given(case.inputs(), CDNA4), [], []
    for limit in (None, 1, 3, 128, 256):
        with (
            gfx950.emulate(),
            CDNA4.serving(persistent(case.config(CDNA4))),
            record_launches() as records,
        ):
            results.append(case.run(given, limit))
        launches = [each.launch for each in records if each.launch.kernel.__name__ == KERNEL]
        grids.append([each.grid[0] for each in launches])
        assert_exact(results[-1], results[0], f"{limit} CUs")
    assert grids[1:] == [[min(each, limit) for each in grids[0]] for limit in (1, 3, 128, 256)]
    assert max(grids[0]) > 3


def test_bf16_activations_have_no_persistent_grid() -> None:
    case = HIGH_TILES["bf16-128-deep"]
    given = case.given(case.inputs(), CDNA4)
    with (
        gfx950.emulate(),
        CDNA4.serving(persistent(case.config(CDNA4))),
        pytest.raises(ValueError, match="with bf16 activations persistent=False"),
    ):
        case.run(given)
