"""`mxpert doctor`: what it finds on machines of every kind, and its verdict."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from triton import knobs
from typer.testing import CliRunner

from mxpert.cli import main, report
from mxpert.cli.doctor import command, findings, operations
from mxpert.cli.doctor.findings import BROKEN, OK, WARNING, Finding
from mxpert.core import cuda_compiler
from mxpert.core.problem import Target
from mxpert.core.target import detect_target, on_device
from mxpert.core.toolchain import Toolchain
from mxpert.errors import UnsupportedError, message
from support.devices import DEVICES, HOPPER_CARDS

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"commit": None, "versions": {"mxpert": "0.2.0"}}
runner = CliRunner()


def run(*arguments: str) -> str:
    """What doctor prints, in one line."""
    outcome = runner.invoke(main.app, ["doctor", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return " ".join(outcome.output.split())


@pytest.fixture
def on() -> Iterator[Callable[[Target], None]]:
    """A function that makes doctor take this machine for one with another device."""
    with contextlib.ExitStack() as stack:
        yield lambda target: stack.enter_context(on_device(target))


VERDICTS = {
    "sm_90": (
        "NVIDIA H200 (sm_90): measured",
        "fast kernels every operation plain torch nothing",
        "mxpert bench --model gpt-oss-120b",
    ),
    "sm_80": (
        "(sm_80): compiled, not run",
        "fast kernels every operation plain torch nothing",
        "mxpert doctor --measure",
    ),
    "sm_120": ("(sm_120): compiled, not run", "plain torch nothing", "mxpert doctor --measure"),
    "gfx950": ("(gfx950): emulated", "plain torch nothing", "mxpert doctor --measure"),
    "gfx942": (
        "(gfx942): torch reference, slow; this GPU runs plain torch: use an NVIDIA GPU",
        "plain torch quantize, dequantize, moe_gate_up, moe_down, fused_moe",
        "mxpert demo",
    ),
}
"""Architecture → the verdict's device, operations and next command."""


@pytest.mark.parametrize("arch", VERDICTS)
def test_the_last_lines_are_a_verdict(arch: str, on: Any) -> None:
    on(DEVICES[arch])
    said = run().rpartition("Verdict")[2]
    for part in VERDICTS[arch]:
        assert part in said


def test_a_cpu_is_told_what_to_do_next() -> None:
    said = run().rpartition("Verdict")[2]
    assert "no GPU; right results, slow" in said
    assert "plain torch every operation, slow next mxpert demo" in said


@pytest.mark.parametrize("card, status", [("H100 80GB HBM3", "measured"), ("H20", "not run;")])
def test_a_hopper_card_is_told_whether_it_was_measured(card: str, status: str, on: Any) -> None:
    on(HOPPER_CARDS[card])
    assert status in run()


def test_the_report_has_the_verdict(on: Any) -> None:
    on(DEVICES["sm_86"])
    outcome = runner.invoke(main.app, ["doctor", "--json", "-"])
    verdict = json.loads(outcome.stdout)["verdict"]
    assert verdict["status"] == "compiled, not run"
    assert verdict["slow"] == verdict["broken"] == []
    assert verdict["command"] == "mxpert doctor --measure"


def test_a_broken_machine_is_called_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(findings.MINIMUM_VERSIONS, "numpy", "99.0")
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == 1
    assert "broken: numpy" in outcome.output.rpartition("Verdict")[2]


@pytest.mark.parametrize("arch", VERDICTS)
def test_a_broken_machine_still_names_its_gpu(
    arch: str, on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(DEVICES[arch])
    monkeypatch.setitem(findings.MINIMUM_VERSIONS, "numpy", "99.0")
    outcome = runner.invoke(main.app, ["doctor", "--json", "-"])
    verdict = json.loads(outcome.stdout)["verdict"]
    assert verdict["device"].endswith(f"({arch})")
    status = VERDICTS[arch][0].partition("): ")[2]
    assert verdict["status"].startswith(f"broken: numpy; {status}")


def test_a_report_names_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bug report has to tell, in the text too."""
    monkeypatch.setattr(report, "commit", lambda: "0123456789abcdef+changes")
    said = run()
    assert f"mxpert {main.__version__} ok commit 0123456789ab, with changes" in said
    for name in ("accelerate", "vllm", "sglang"):
        assert f"{name} {findings.package_version(name) or 'absent'}" in said


@pytest.mark.parametrize("arch", [*VERDICTS, "cpu"])
def test_nothing_is_a_riddle(arch: str, on: Any) -> None:
    if arch != "cpu":
        on(DEVICES[arch])
    said = run()
    for riddle in ("name another backend", "cannot run ok", "wgmma A operand", "None"):
        assert riddle not in said


def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make Triton's cache a folder that nobody can make, not even root."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache")
    monkeypatch.setattr(knobs.cache, "dir", folder)
    return folder


def test_the_cache_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    assert f"triton cache {tmp_path / 'cache'} ok" in run()
    assert os.listdir(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unwritable(tmp_path, monkeypatch)
    for target, state in ((detect_target("cpu"), WARNING), (DEVICES["sm_90"], BROKEN)):
        (cache,) = (
            each for each in findings.examine_toolchain(target) if each.name == "triton cache"
        )
        assert (cache.value, cache.state) == (folder, state)
        assert "set TRITON_CACHE_DIR to a folder that can be written" in cache.note


def test_a_missing_compiler_of_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a kernel is in CUDA C++: on Hopper."""

    def found(arch: str) -> list[tuple[str, str]]:
        return [
            (each.state, each.note)
            for each in findings.examine_toolchain(DEVICES[arch])
            if each.name == "cuda-core"
        ]

    assert found("sm_90") == [(OK, "")]
    assert found("gfx950") == []
    monkeypatch.setattr(cuda_compiler, "missing_compiler", lambda: "needs x (pip install x)")
    ((state, note),) = found("sm_90")
    assert state == WARNING
    assert "one to four tokens" in note
    assert note.endswith("needs x (pip install x)")


def test_emulation_names_the_remedy_of_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unwritable(tmp_path, monkeypatch)
    outcome = runner.invoke(main.app, ["doctor", "--emulate", "gfx950"])
    assert outcome.exit_code == main.EXIT_USER_ERROR
    (line,) = outcome.stderr.splitlines()
    assert folder in line
    assert line.endswith("set TRITON_CACHE_DIR to a folder that can be written")


def test_doctor_reports_every_operation_as_json() -> None:
    outcome = runner.invoke(main.app, ["doctor", "--json", "-"])
    report = json.loads(outcome.stdout)
    assert outcome.exit_code == 0, report
    assert report["healthy"]
    served = {row["op"]: row["served_by"] for row in report["operations"]}
    assert set(served) >= {"quantize", "make_routing_plan", "fused_moe a16w4", "moe_down a4w4"}
    assert all("reference" in backends for backends in served.values())
    for row in report["operations"]:
        assert set(row["served_by"]) | set(row["refused"]) == set(operations.BACKENDS)


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
    assert operations.unused_backends(rows) == ["triton lacks it: not a (y), b, c"]
    assert operations.operation_lines(rows) == [
        ("a (x)", "triton", "reference"),
        ("a (y)", "reference", "–"),
        ("b", "reference", "–"),
        ("c", "reference", "–"),
    ]


def test_doctor_fails_when_a_needed_package_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(findings.MINIMUM_VERSIONS, "torch", "99.0")
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
    real = findings.package_version
    for version in (*inside, outside):
        monkeypatch.setattr(
            findings,
            "package_version",
            lambda asked, version=version: version if asked == name else real(asked),
        )
        (found,) = (
            each
            for each in findings.examine_versions(detect_target("cpu"), FACTS)
            if each.name == name
        )
        tested = f"{findings.MINIMUM_VERSIONS[name]} to {findings.TESTED_UP_TO[name]}"
        assert found.state == (WARNING if version == outside else OK)
        assert tested in found.note
    assert findings.requirement(name) in found.note
    assert runner.invoke(main.app, ["doctor"]).exit_code == 0, "a warning breaks nothing"


ROCM = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)


def triton_on_rocm(monkeypatch: pytest.MonkeyPatch, brought_by: list[str]) -> Finding:
    """What doctor says of Triton where no distribution of that name is installed."""
    versions = {"triton": None, "triton-rocm": "3.7.1"}
    real = findings.package_version
    monkeypatch.setattr(
        findings, "package_version", lambda name: versions[name] if name in versions else real(name)
    )
    monkeypatch.setattr(
        findings.importlib.metadata,
        "packages_distributions",
        lambda: {"triton": brought_by} if brought_by else {},
    )
    (found,) = (each for each in findings.examine_versions(ROCM, FACTS) if each.name == "triton")
    return found


def test_doctor_finds_the_triton_of_a_rocm_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = triton_on_rocm(monkeypatch, ["triton-rocm"])
    assert (found.value, found.state) == ("3.7.1", OK)


def test_doctor_never_advises_another_triton_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = triton_on_rocm(monkeypatch, [])
    assert found.state == BROKEN
    assert "ROCm build of torch" in found.note
    assert "pip install" not in found.note


def test_doctor_fits_80_columns_in_sections() -> None:
    text = io.StringIO()
    note = "a note that does not fit beside its finding, " * 3
    found = [
        Finding("torch", "2.13.0", OK, "tested: 2.11 to 2.15"),
        Finding("ptxas", "12.8", WARNING, note.strip(), findings.COMPILER),
    ]
    target = detect_target("cpu")
    facts = {"device": target.name, "arch": target.arch, "kind": target.kind, "num_sms": 2}
    rows = [
        {
            "op": "fused_moe",
            "chosen": "reference",
            "served_by": ["reference"],
            "refused": {"hopper": "needs a GPU " * 20},
        }
    ]
    command._print(Console(width=200, file=text), facts, found, rows)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= command.NARROW == 80
    sections = [line for line in lines if line[:1].isalpha() and "  " not in line][1:]
    assert sections == ["Packages", "Compiler", "Operations", "Backends that are not used"]
    assert " ".join(" ".join(lines).split()).count("does not fit beside") == 3, "notes are whole"


def test_doctor_fails_when_nothing_serves_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: object) -> None:
        raise UnsupportedError(message("op", "backend", "a kernel", "a reason", "a remedy"))

    monkeypatch.setattr(operations, "explain_problem", refuse)
    monkeypatch.setattr(operations, "refusal", lambda problem, backend: "a reason")
    rows = operations.examine_operations(detect_target("cpu"))
    assert all(row["chosen"] is None and row["refused"]["reference"] == "a reason" for row in rows)
    outcome = runner.invoke(main.app, ["doctor"])
    assert outcome.exit_code == 1
    assert "broken: quantize, dequantize" in outcome.output.rpartition("Verdict")[2]


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
    for name, minimum in (findings.MINIMUM_VERSIONS | findings.OPTIONAL).items():
        wanted = (
            findings.requirement(name)
            if name in findings.MINIMUM_VERSIONS
            else (f"{name}>={minimum}")
        )
        ends = (";", ",") if name in findings.OPTIONAL else (";",)
        bare = {re.split("|".join(ends), line)[0].strip() for line in stated}
        assert wanted in bare, name
    assert project["requires-python"] == f">={'.'.join(map(str, findings.MINIMUM_PYTHON))}"
