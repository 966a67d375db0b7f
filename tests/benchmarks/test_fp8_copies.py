"""FP8 copies of weights: who reads them, what is timed, what has the same bits, the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from benchmarks.moe import fp8_copies, warm_up
from benchmarks.moe.cells import GEMM_STAGES, NAMED, Cell, Inputs, random_inputs, tiny
from benchmarks.moe.fp8_copies import COPIES, ORDINARY
from benchmarks.moe.ours import Batch, Ours, random_weights
from mxpert.cli.measure import RunWeights
from mxpert.moe.weights import MoEWeights
from mxpert.routing.plan import RoutingPlan
from support.launches import count_launches
from tests.benchmarks.scripts import dry_run

CPU = torch.device("cpu")
MODEL = tiny(NAMED["gpt-oss-20b"])
CELL = Cell(MODEL, 32)
CEILINGS = {"read_tbs": 4.0, "bf16_tflops": 800.0, "fp8_tflops": 1500.0}


def another_expert(weights: MoEWeights) -> MoEWeights:
    """Weights whose experts have each other's down projections."""
    down = weights.mx_projections[1]
    wrong = replace(down, qdata=down.qdata.roll(1, 0), scale=down.scale.roll(1, 0))
    return replace(weights, down_proj=wrong)


def measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[MoEWeights], MoEWeights] = lambda weights: weights,
) -> fp8_copies.Run:
    """A cell that is gated and timed on the CPU; plant: makes the weights of the second form."""
    monkeypatch.setattr(fp8_copies.Run, "dry", False)
    monkeypatch.setattr(fp8_copies.Run, "synchronize", lambda run: None)
    keys = ("model", "T", "activation", "stage"), ("cell", "activation", "form")
    meta = {"ceilings": CEILINGS}
    run = fp8_copies.Run(tmp_path / "a.json", meta, *keys, device=CPU, deadline=0.0)
    right = random_weights(MODEL, CPU)
    other = plant(right.plain)  # a CPU's layers read the plain weights
    forms = {ORDINARY: right, COPIES: RunWeights(other, other)}
    fp8_copies.measure_format(run, CELL, forms, "mxfp8")
    return run


def layer_of(run: fp8_copies.Run) -> dict[str, Any]:
    return run.rows[MODEL.name, 32, "mxfp8", "layer"]


def test_a_cell_has_the_times_and_rates_of_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = layer_of(measured(tmp_path, monkeypatch))
    assert row["same_bits"] is True
    assert row["reads_copy"] is False
    assert row["rows_per_expert"] == 32 * MODEL.k / row["hit"]
    flops = 2 * 3 * MODEL.H * MODEL.F * 32 * MODEL.k
    assert list(row["times"]) == [ORDINARY, COPIES]
    for form in row["times"].values():
        assert form["tflops"] == pytest.approx(flops / form["us"] / 1e6)
        assert form["percent_of_fp8"] == pytest.approx(100 * form["tflops"] / 1500.0)


def test_wrong_results_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = measured(tmp_path, monkeypatch, another_expert)
    assert "relative L2 to float64" in run.failures[str(CELL), "mxfp8", COPIES]
    row = layer_of(run)
    assert row["same_bits"] is False
    assert list(row["times"]) == [ORDINARY]
    gate_up = run.rows[MODEL.name, 32, "mxfp8", "gate_up_gemm"]
    assert gate_up["same_bits"] is True
    assert gate_up["times"] == {}


def test_a_gemm_that_is_not_found_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has none."""
    run = measured(tmp_path, monkeypatch)
    names = [f"{form} {stage}" for form in fp8_copies.FORMS for stage in GEMM_STAGES]
    assert [name for _, _, name in run.failures] == names


def routed_row(plan: RoutingPlan) -> int:
    return int(plan.slot_rows[-1, -1])


def padding_row(plan: RoutingPlan) -> int:
    used = set(plan.slot_rows.flatten().tolist())
    return next(row for row in range(plan.capacity) if row not in used)


@pytest.mark.parametrize("row_of, same", [(routed_row, False), (padding_row, True)])
@pytest.mark.parametrize("part", ["qdata", "scale"])
def test_one_bit_of_a_row_counts_and_padding_does_not(
    part: str, row_of: Callable[[RoutingPlan], int], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, right = random_inputs(CELL, CPU)[0], random_weights(MODEL, CPU)
    ours = {form: Ours(MODEL, right, "mxfp8") for form in fp8_copies.FORMS}
    batch_of = Ours._batch

    def changed(mine: Ours, weights: MoEWeights, inputs: Inputs) -> Batch:
        batch = batch_of(mine, weights, inputs)
        if mine is ours[COPIES]:
            getattr(batch.h, part)[row_of(batch.plan), 0] ^= 1
        return batch

    monkeypatch.setattr(Ours, "_batch", changed)
    found = fp8_copies.same_bits(ours, inputs)
    assert found["gate_up_gemm"] is same
    assert found["layer"] is True


@pytest.mark.parametrize("activation", fp8_copies.ACTIVATIONS)
def test_the_gemm_that_is_timed_reads_the_copy_of_experts_with_many_rows(activation: str) -> None:
    model = NAMED["gpt-oss-20b"]
    with warm_up.stand_in():
        forms = fp8_copies.unwritten_forms(model)
        ours = {form: Ours(model, each, activation) for form, each in forms.items()}
        few, many = (random_inputs(Cell(model, count), CPU)[0] for count in (512, 2048))
        assert set(fp8_copies.copy_readers(ours[COPIES], few).values()) == {False}
        assert set(fp8_copies.copy_readers(ours[COPIES], many).values()) == {True}
        assert set(fp8_copies.copy_readers(ours[ORDINARY], many).values()) == {False}
        weights = forms[COPIES].prepared
        gemm = ours[COPIES]._gemm("down_gemm", weights, ours[COPIES]._batch(weights, many))
        assert count_launches(gemm) == 2  # the list of tiles, and the GEMM


def test_a_dry_run_has_a_row_for_each_stage(tmp_path: Path) -> None:
    some = "--models", "gpt-oss-20b", "--tokens", "1024,8192", "--formats", "mxfp8"
    code, found = dry_run(fp8_copies.main, tmp_path / "a.json", *some)
    assert code == 0, found["meta"]["failures"]
    rows = [(row["T"], row["stage"], row["reads_copy"]) for row in found["rows"]]
    stages = fp8_copies.STAGES
    assert rows == [(count, stage, count == 8192) for count in (1024, 8192) for stage in stages]
    gib = found["rows"][0]["gib"]
    assert 2.8 < gib[COPIES] / gib[ORDINARY] < 2.9


def test_rows_of_bfloat16_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.json")
    assert fp8_copies.main(["--dry-run", "--output", path, "--formats", "bf16"]) == 2
    assert "some of mxfp8, fp8_token, mxfp4" in capsys.readouterr().err


def row(stage: str, *us: float, **more: Any) -> dict[str, Any]:
    """A row with two times, or only that of the ordinary weights."""
    times = {
        form: dict(us=each, tflops=1e6 / each, percent_of_fp8=1e5 / each)
        for form, each in zip(fp8_copies.FORMS, us, strict=False)
    }
    known = dict(model="m", T=8192, activation="mxfp8", stage=stage, gib={ORDINARY: 1, COPIES: 3})
    return known | dict(reads_copy=True, same_bits=True, times=times) | more


def test_tables_compare_both_forms() -> None:
    text = fp8_copies.layer_table([row("layer", 2000.0, 1600.0), row("down_gemm", 1.0, 1.0)])
    assert text.splitlines()[-1] == ("| m, a8w4, MXFP8 (1.0 → 3.0 GiB) | 2000 → 1600 (0.80) |")
    text = fp8_copies.layer_table([row("layer", 10.0, 10.0, reads_copy=False, same_bits=False)])
    assert text.endswith("| 10 → 10 (1.00, not read, other bits) |")
    assert fp8_copies.layer_table([row("layer", 10.0)]).endswith("| 10 → – |")
    text = fp8_copies.gemm_table([row("layer", 1.0, 1.0), row("gate_up_gemm", 2000.0, 1250.0)])
    assert text.splitlines()[-1] == "| m, a8w4, MXFP8, gate_up | 500 → 800 (50 → 80 %) |"


def test_the_page_has_both_tables_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = measured(tmp_path, monkeypatch, another_expert)
    run.meta |= dict(device="a GPU", date="today", commit="abc", versions={})
    run.meta |= dict(protocol=fp8_copies.PROTOCOL)
    text = fp8_copies.markdown(run.as_json())
    assert "Both forms give the same bits in 1 of 3 results." in text
    assert text.count("|---|---:|") == 2
    assert f"- {CELL} mxfp8 {COPIES}: GateError" in text
