"""The command group: help without imports, versions, one-line errors, `doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import mxpert
from mxpert.cli import doctor, main
from mxpert.dispatch import detect_target
from mxpert.errors import UnsupportedError, message
from mxpert.testing.toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def test_help_lists_every_command_and_imports_none() -> None:
    code = ("import sys; from typer.testing import CliRunner; from mxpert.cli.main import app; "
            "print(CliRunner().invoke(app, ['--help']).output); "
            "print([m for m in sys.modules if m.startswith('mxpert.cli.') or m == 'transformers'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in main.COMMANDS:
        assert name in done.stdout
    assert done.stdout.strip().endswith("['mxpert.cli.main']")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_has_help_with_an_example(name: str) -> None:
    outcome = runner.invoke(main.app, [name, "--help"])
    assert outcome.exit_code == 0, outcome.output
    assert f"mxpert {name}" in outcome.output


def test_version() -> None:
    assert runner.invoke(main.app, ["--version"]).output.strip() == f"mxpert {mxpert.__version__}"


def test_unknown_command_is_a_usage_error() -> None:
    outcome = runner.invoke(main.app, ["dem"])
    assert outcome.exit_code == 2
    assert "demo" in outcome.output


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A command group whose `doctor` raises the parameter."""
    def fail() -> None:
        raise request.param

    def load(name: str) -> object:
        single = typer.Typer()
        single.command(name)(fail)
        return typer.main.get_command(single)

    monkeypatch.setattr(main, "_load", load)
    return str(request.param)


@pytest.mark.parametrize("failing_command", [
    pytest.param(ValueError(message("op", "x", "one", "two", "fix it")), id="value"),
    pytest.param(TypeError(message("op", "x", "one", "two")), id="type"),
    pytest.param(UnsupportedError(message("op", "backend", "one", "none")), id="unsupported"),
], indirect=True)
def test_library_errors_are_one_line_with_exit_code_2(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == f"error: {failing_command}\n"


@pytest.mark.parametrize("failing_command", [PermissionError(13, "Permission denied", "/x/y")],
                         indirect=True)
def test_a_path_that_cannot_be_used_is_named(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == ("error: mxpert doctor: /x/y — need a path that can be used, "
                              "got Permission denied\n")


UNUSABLE = {
    "demo-output": (["demo", "--output", "FILE"], "demo: --output — need a folder"),
    "bench-output": (["bench", "--output", "FILE/deeper"], "bench: --output — need a folder"),
    **{f"{name}-json": ([*call, "--json", "FOLDER"], f"{call[0]}: --json — need a file")
       for name, call in {
           "bench": ["bench"], "demo": ["demo"], "doctor": ["doctor"],
           "tune": ["tune", "--dry-run"], "inspect": ["inspect", "FILE"],
           "quantize": ["quantize", "FILE", "FOLDER/new"],
           "eval": ["eval", "FOLDER", "--text", "FILE"]}.items()},
    "demo-backend": (["demo", "--backend", "cuda"], "demo: --backend — need one of hopper, "),
    "bench-backend": (["bench", "--backend", "cuda"], "bench: --backend — need one of hopper, "),
}


@pytest.mark.parametrize(("arguments", "match"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_options_are_refused_before_the_work(arguments: list[str], match: str,
                                                      tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = [each.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
             for each in arguments]
    outcome = runner.invoke(main.app, given)
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert match in outcome.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing_command", [ValueError("a bug"), KeyError("a bug")], indirect=True)
def test_other_errors_keep_their_traceback(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_DEFECT
    assert "Traceback" in outcome.stderr
    assert "Error: " in outcome.stderr.splitlines()[-2]
    assert outcome.stderr.splitlines()[-1] == "error: a defect of mxpert; please report it"


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "demo", main._Lazy("demo", "demo", "planted"))

    def missing(name: str) -> object:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    outcome = runner.invoke(main.app, ["demo"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert "pip install 'mxpert[transformers]'" in outcome.output


def test_doctor_reports_every_operation_as_json() -> None:
    outcome = runner.invoke(main.app, ["doctor", "--json", "-"])
    report = json.loads(outcome.stdout)
    assert outcome.exit_code == 0, report
    assert report["healthy"]
    served = {row["op"]: row["served_by"] for row in report["operations"]}
    assert set(served) >= {"quantize", "make_routing_plan", "fused_moe a16w4", "moe_down a4w4"}
    assert all("reference" in backends for backends in served.values())
    for row in report["operations"]:
        assert set(row["served_by"]) | set(row["refused"]) == set(doctor.BACKENDS)


def test_doctor_prints_tables_and_reasons() -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == 0, outcome.output
    for part in ("torch", "fused_moe a8w4", "triton cache"):
        assert part in outcome.output


def test_doctor_fails_when_a_needed_package_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.MINIMUM_VERSIONS, "torch", "99.0")
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == 1
    assert "need 99.0 or newer" in outcome.output


def test_doctor_fails_when_nothing_serves_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: object) -> None:
        raise UnsupportedError(message("op", "backend", "a kernel", "a reason", "a remedy"))

    monkeypatch.setattr(doctor, "explain_problem", refuse)
    rows = doctor.examine_operations(detect_target("cpu"))
    assert all(row["chosen"] is None and row["refused"]["reference"] == "a reason" for row in rows)
    assert runner.invoke(main.app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize(("version", "hazard"), [("12.8", True), ("13.2", True), ("13.3", False),
                                                 ("14.0", False), (None, False)])
def test_register_operand_hazard_ends_with_cuda_13_3(version: str | None, hazard: bool) -> None:
    assert Toolchain("3.6.0", "ptxas", version, "cache").register_operand_hazard is hazard


def test_minimum_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = project["dependencies"] + [line for lines in project["optional-dependencies"].values()
                                        for line in lines]
    for name, minimum in (doctor.MINIMUM_VERSIONS | doctor.OPTIONAL).items():
        assert any(line.split(";")[0].strip() == f"{name}>={minimum}" for line in stated), name
    assert project["requires-python"] == f">={'.'.join(map(str, doctor.MINIMUM_PYTHON))}"
