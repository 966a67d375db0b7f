"""The command group: help without imports, versions, one-line errors, `doctor`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import mxpert
from mxpert.cli import doctor, main
from mxpert.dispatch import detect_target
from mxpert.errors import UnsupportedError, message
from mxpert.problem import Target
from mxpert.runtime.toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from mxpert.cli.main import app; "
        "print(CliRunner().invoke(app, ['--help']).output); "
        "print([m for m in sys.modules if m.startswith('mxpert.cli.') or m == 'transformers'])"
    )
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


@pytest.mark.parametrize(
    "failing_command",
    [
        pytest.param(ValueError(message("op", "x", "one", "two", "fix it")), id="value"),
        pytest.param(TypeError(message("op", "x", "one", "two")), id="type"),
        pytest.param(UnsupportedError(message("op", "backend", "one", "none")), id="unsupported"),
    ],
    indirect=True,
)
def test_library_errors_are_one_line_with_exit_code_2(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == f"error: {failing_command}\n"


@pytest.mark.parametrize(
    "failing_command", [PermissionError(13, "Permission denied", "/x/y")], indirect=True
)
def test_a_path_that_cannot_be_used_is_named(failing_command: str) -> None:
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    assert outcome.output == (
        "error: mxpert doctor: /x/y — need a path that can be used, got Permission denied\n"
    )


UNUSABLE = {
    "demo-output": (["demo", "--output", "FILE"], "demo: --output — need a folder"),
    "bench-output": (["bench", "--output", "FILE/deeper"], "bench: --output — need a folder"),
    **{
        f"{name}-json": ([*call, "--json", "FOLDER"], f"{call[0]}: --json — need a file")
        for name, call in {
            "bench": ["bench"],
            "demo": ["demo"],
            "doctor": ["doctor"],
            "tune": ["tune", "--dry-run"],
            "inspect": ["inspect", "FILE"],
            "quantize": ["quantize", "FILE", "FOLDER/new"],
            "eval": ["eval", "FOLDER", "--text", "FILE"],
        }.items()
    },
    "demo-backend": (["demo", "--backend", "cuda"], "demo: --backend — need one of cdna4, "),
    "bench-backend": (["bench", "--backend", "cuda"], "bench: --backend — need one of cdna4, "),
}


@pytest.mark.parametrize(("arguments", "match"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_options_are_refused_before_the_work(
    arguments: list[str], match: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = [
        each.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
        for each in arguments
    ]
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
    for part in ("torch", "fused_moe", "triton cache", "hopper needs sm_90, not cpu"):
        assert part in outcome.output
    assert outcome.output.count("fused_moe") == 1, "formats with one answer share a line"


def test_doctor_names_formats_where_their_answers_differ() -> None:
    def row(op: str, served: bool) -> dict[str, Any]:
        return {
            "op": op,
            "chosen": "triton" if served else "reference",
            "served_by": ["triton"] * served + ["reference"],
            "refused": {"hopper": "has no " + op} | ({} if served else {"triton": "lacks it"}),
        }

    rows = [
        row("a x", True),
        row("a y", False),
        row("b x", False),
        row("b y", False),
        row("c", False),
    ]
    assert doctor.unused_backends(rows) == ["triton lacks it: not a (y), b, c"]
    assert doctor._operation_lines(rows) == [
        ("a (x)", "triton", "reference"),
        ("a (y)", "reference", "–"),
        ("b", "reference", "–"),
        ("c", "reference", "–"),
    ]


def test_doctor_fails_when_a_needed_package_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.MINIMUM_VERSIONS, "torch", "99.0")
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == 1
    assert "need 99.0 or newer" in outcome.output


@pytest.mark.parametrize(
    "name, inside, outside",
    [("torch", ("2.11.0", "2.15.3+cu130"), "2.16.0"), ("triton", ("3.6.0", "3.9.1"), "3.10.0")],
)
def test_doctor_warns_outside_of_the_tested_range(
    name: str, inside: tuple[str, ...], outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.package_version
    for version in (*inside, outside):
        monkeypatch.setattr(
            doctor,
            "package_version",
            lambda asked, version=version: version if asked == name else real(asked),
        )
        (found,) = (
            each for each in doctor.examine_versions(detect_target("cpu")) if each.name == name
        )
        tested = f"{doctor.MINIMUM_VERSIONS[name]} to {doctor.TESTED_UP_TO[name]}"
        assert found.state == (doctor.WARNING if version == outside else doctor.OK)
        assert tested in found.note
    assert doctor.requirement(name) in found.note
    assert runner.invoke(main.app, ["doctor"]).exit_code == 0, "a warning breaks nothing"


ROCM = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)


def triton_on_rocm(monkeypatch: pytest.MonkeyPatch, brought_by: list[str]) -> doctor.Finding:
    """What doctor says of Triton where no distribution of that name is installed."""
    versions = {"triton": None, "triton-rocm": "3.7.1"}
    real = doctor.package_version
    monkeypatch.setattr(
        doctor, "package_version", lambda name: versions[name] if name in versions else real(name)
    )
    monkeypatch.setattr(
        doctor.importlib.metadata,
        "packages_distributions",
        lambda: {"triton": brought_by} if brought_by else {},
    )
    (found,) = (each for each in doctor.examine_versions(ROCM) if each.name == "triton")
    return found


def test_doctor_finds_the_triton_of_a_rocm_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = triton_on_rocm(monkeypatch, ["triton-rocm"])
    assert (found.value, found.state) == ("3.7.1", doctor.OK)


def test_doctor_never_advises_another_triton_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = triton_on_rocm(monkeypatch, [])
    assert found.state == doctor.BROKEN
    assert "ROCm build of torch" in found.note
    assert "pip install" not in found.note


def test_doctor_fits_80_columns_in_sections() -> None:
    text = io.StringIO()
    note = "a note that does not fit beside its finding, " * 3
    findings = [
        doctor.Finding("torch", "2.13.0", doctor.OK, "tested: 2.11 to 2.15"),
        doctor.Finding("ptxas", "12.8", doctor.WARNING, note.strip(), doctor.COMPILER),
    ]
    target = detect_target("cpu")
    facts = {"device": target.name, "arch": target.arch, "kind": target.kind, "num_sms": 2}
    operations = [
        {
            "op": "fused_moe",
            "chosen": "reference",
            "served_by": ["reference"],
            "refused": {"hopper": "needs a GPU " * 20},
        }
    ]
    doctor._print(Console(width=200, file=text), facts, findings, operations)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= doctor.NARROW == 80
    sections = [line for line in lines if line[:1].isalpha() and "  " not in line][1:]
    assert sections == ["Packages", "Compiler", "Operations", "Backends that are not used"]
    assert " ".join(" ".join(lines).split()).count("does not fit beside") == 3, "notes are whole"


def test_doctor_fails_when_nothing_serves_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: object) -> None:
        raise UnsupportedError(message("op", "backend", "a kernel", "a reason", "a remedy"))

    monkeypatch.setattr(doctor, "explain_problem", refuse)
    rows = doctor.examine_operations(detect_target("cpu"))
    assert all(row["chosen"] is None and row["refused"]["reference"] == "a reason" for row in rows)
    assert runner.invoke(main.app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize(
    ("version", "hazard"),
    [("12.8", True), ("13.2", True), ("13.3", False), ("14.0", False), (None, False)],
)
def test_register_operand_hazard_ends_with_cuda_13_3(version: str | None, hazard: bool) -> None:
    assert Toolchain("3.6.0", "ptxas", version, "cache").register_operand_hazard is hazard


def test_minimum_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = project["dependencies"] + [
        line for lines in project["optional-dependencies"].values() for line in lines
    ]
    for name, minimum in (doctor.MINIMUM_VERSIONS | doctor.OPTIONAL).items():
        lines = [line.split(";")[0].strip() for line in stated]
        if name in doctor.MINIMUM_VERSIONS:
            assert doctor.requirement(name) in lines, name
        else:  # an upper bound is the integration's own
            assert f"{name}>={minimum}" in [line.partition(",")[0] for line in lines], name
    assert project["requires-python"] == f">={'.'.join(map(str, doctor.MINIMUM_PYTHON))}"
