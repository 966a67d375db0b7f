"""`mxpert doctor --emulate` and `--measure`: what is executed, and that wrong results are found."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import gfx950emu
from mxpert.cli import main
from mxpert.cli.doctor import command, executed
from mxpert.cli.doctor.executed import Case, _execute_case, cases, execute
from mxpert.testing import gfx950

runner = CliRunner()
CPU = torch.device("cpu")
QUIET = Console(quiet=True)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases instead of all."""

    def two(device: torch.device) -> dict[str, object]:
        made = cases(device)
        return {name: made[name] for name in ("quantize mxfp8", "fused_moe a8w4")}

    monkeypatch.setattr(executed, "cases", two)


def test_every_case_passes_on_gfx950_code() -> None:
    rows = execute(QUIET, CPU, gfx950.emulate)
    assert [row["case"] for row in rows] == list(cases(CPU))
    assert {row["case"].split()[0] for row in rows} == {"quantize", "fused_moe", "grouped_gemm"}
    for row in rows:
        assert row["passed"], row
        assert row["backend"] not in (None, "reference")
        assert row["launches"] >= 1
        assert row["instructions"] == sum(k["instructions"] for k in row["kernels"].values()) > 1000


def test_doctor_emulates_and_writes_json(few: None) -> None:
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950", "--json", "-"])
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["healthy"]
    assert document["emulated"]["arch"] == "gfx950"
    assert [row["case"] for row in document["emulated"]["cases"]] == [
        "quantize mxfp8",
        "fused_moe a8w4",
    ]
    assert "Executed by emulation of gfx950" in outcome.stderr
    assert "executing" in outcome.stderr  # the progress


def test_doctor_measures_this_machine(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MEASURED_TOKENS", (1,))
    monkeypatch.setattr(command, "DEFAULT_FORMATS", "a8w4")
    monkeypatch.setattr(command.bench, "is_timed", lambda _: True)  # as on a GPU
    monkeypatch.setattr(command.bench, "CPU_SCALE", 64)
    monkeypatch.setattr(command.bench, "STAGES", ("layer",))
    outcome = runner.invoke(main.app, ["doctor", "--measure", "--json", "-"])
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert all(row["passed"] for row in document["executed"])
    assert "instructions" not in document["executed"][0]
    (row,) = document["bench"]["rows"]
    assert (row["stage"], row["activation"], row["T"]) == ("layer", "mxfp8", 1)
    assert row["us"] > 0


def test_a_wrong_result_fails(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = executed.layer_case

    def wrong(name: str, device: torch.device) -> Case:
        case = real(name, device)
        return replace(case, want=case.want * 1.02)

    monkeypatch.setattr(executed, "layer_case", wrong)
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950", "--json", "-"])
    assert outcome.exit_code == 1
    document = json.loads(outcome.stdout)
    assert [row["passed"] for row in document["emulated"]["cases"]] == [True, False]
    assert not document["healthy"]
    assert "wrong" in outcome.stderr


def test_a_differing_bit_fails() -> None:
    made = executed.quantize_case("mxfp8", CPU)
    flipped = replace(made.want, qdata=made.want.qdata ^ 1)  # type: ignore[type-var, union-attr, arg-type]
    row = _execute_case(lambda: replace(made, want=flipped), None)
    assert (row["passed"], row["error"]) == (False, math.inf)


def test_a_fault_fails_and_is_shown(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> Case:
        place = gfx950emu.Place("_moe_down_kernel", 7, "ds_read_b32 v1, v2", "host.py:3")
        raise gfx950emu.LdsRaceFault(place, "LDS byte 0x10 was written by wave 2")

    monkeypatch.setattr(executed, "layer_case", fault)
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950"])
    assert outcome.exit_code == 1
    assert "fault" in outcome.stdout
    assert "LdsRaceFault: _moe_down_kernel+7 (host.py:3)" in outcome.stdout.replace("\n", "")


def test_another_architecture_is_refused() -> None:
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "sm_90"])
    assert isinstance(outcome.exception, SystemExit)
    assert outcome.exit_code == 2
    assert outcome.stderr == "error: doctor: --emulate — need one of gfx950, got 'sm_90'\n"


def test_without_the_emulator_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mxpert.testing.gfx950")
    monkeypatch.delattr("mxpert.testing.gfx950")
    monkeypatch.setitem(sys.modules, "gfx950emu", None)
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950"])
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        "error: mxpert.testing.gfx950: import — need the gfx950 emulator, got no package gfx950emu;"
        " pip install 'git+https://github.com/mxpert/mxpert#subdirectory=gfx950-emulator',"
        " in a checkout pip install ./gfx950-emulator\n"
    )


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mxpert.testing.gfx950")
    monkeypatch.delattr("mxpert.testing.gfx950")
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("mxpert.testing.ahead")]:
        monkeypatch.delitem(sys.modules, name)
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950"])
    assert outcome.exit_code == 2
    assert "need Triton, which compiles the kernels" in outcome.stderr
    assert "pip install 'triton>=3.6'" in outcome.stderr
