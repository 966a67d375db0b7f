"""The set-up of the Makefile: which torch it takes, what it says, and how it fails."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from support.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent


environment = load_script("tools/environment.py")
PIP_FAILS = """
print("Collecting torch==2.13.0")
print("ERROR: Cannot install mxpert because these package versions have conflicting dependencies.")
print("The conflict is caused by:")
print("    torch 2.13.0 depends on triton==3.7.1")
raise SystemExit(1)
"""


def test_pip_gives_its_own_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(environment.StepError) as caught:
        environment.run("install", [sys.executable, "-c", PIP_FAILS])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("ERROR: Cannot install mxpert")
    assert lines[-1] == "    torch 2.13.0 depends on triton==3.7.1"
    assert capsys.readouterr().out == "install …\ninstall: failed\n"


def test_a_failure_without_an_error_line_shows_the_end() -> None:
    lines = [f"line {number}" for number in range(40)]
    assert environment.reason(lines).splitlines() == lines[-15:]


def test_a_long_step_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "HEARTBEAT_SECONDS", 1)
    code = "import time; print('Downloading torch', flush=True); time.sleep(2.5)"
    environment.run("install torch", [sys.executable, "-c", code])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "install torch …"
    assert re.fullmatch(r"  \d s: Downloading torch", lines[1])
    assert re.fullmatch(r"install torch: \d s", lines[-1])


def test_an_index_that_says_nothing_is_left_after_three_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        assert not environment.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/")
    assert time.monotonic() - started < environment.ANSWER_SECONDS + 2


@pytest.mark.parametrize(
    "gpu, answers, told, commands",
    [
        (True, True, "with CUDA; mxpert is measured with it", []),
        (False, True, "PyTorch's CPU build", ["--index-url", environment.CPU_INDEX]),
        (False, False, "gave no answer in 3 s", []),
    ],
    ids=["gpu", "cpu-index", "no-cpu-index"],
)
def test_where_torch_comes_from_is_told(
    gpu: bool,
    answers: bool,
    told: str,
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(environment.shutil, "which", lambda name: gpu and name == "nvidia-smi")
    monkeypatch.setattr(environment, "answers", lambda url: answers)
    monkeypatch.setattr(environment, "site_packages", lambda python: tmp_path)
    monkeypatch.setattr(environment, "run", lambda step, command: run.append(command))
    environment.provide_torch(tmp_path)
    out = capsys.readouterr().out
    assert told in out
    assert environment.pin_of("torch") in out
    assert out.count("\n") == 1
    assert [each for command in run for each in command if each in commands] == commands
    (tmp_path / f"{environment.pin_of('torch').replace('==', '-')}+cpu.dist-info").mkdir()
    environment.provide_torch(tmp_path)
    assert capsys.readouterr().out == "", "the environment has it"


@pytest.mark.parametrize("extra, projects", [("test", 2), ("plot", 1)])
def test_the_tests_have_the_emulator(
    extra: str, projects: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[list[str]] = []
    for name in ("create", "provide_torch"):
        monkeypatch.setattr(environment, name, lambda *_: None)
    monkeypatch.setattr(environment, "run", lambda step, command: run.append(command))
    (tmp_path / "bin").mkdir()
    for name in environment.TOOLS:
        (tmp_path / "bin" / name).touch()
    environment.install(tmp_path, extra)
    given = [each for command in run for each in command]
    assert given.count("-e") == projects
    assert (given[-1] == str(ROOT / "gfx950-emulator")) is (extra == "test")


def test_programs_of_lent_packages_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[str] = []
    for name in ("create", "provide_torch"):
        monkeypatch.setattr(environment, name, lambda *_: None)
    monkeypatch.setattr(environment, "run", lambda step, command: steps.append(step))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mypy").touch()
    environment.install(tmp_path, "plot")
    environment.install(tmp_path, "test")
    for name in environment.TOOLS:
        (tmp_path / "bin" / name).touch()
    environment.install(tmp_path, "test")
    project = "install mxpert[test]"
    assert steps == [*("install mxpert[plot]", project), *("install ruff, import-linter", project)]


def test_a_lent_environment_sees_packages_after_its_own(tmp_path: Path) -> None:
    for name, folder in (("shared", "lender"), ("shared", "own"), ("only", "lender")):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / "__init__.py").write_text(f"place = {folder!r}\n")
    (tmp_path / "elsewhere" / "editable").mkdir(parents=True)
    (tmp_path / "elsewhere" / "editable" / "__init__.py").write_text("place = 'elsewhere'\n")
    (tmp_path / "lender" / "project.pth").write_text(f"{tmp_path / 'elsewhere'}\n")
    (tmp_path / "own" / "zz_lent.pth").write_text(
        environment.LEND.format(folder=str(tmp_path / "lender"))
    )
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'own')!r})\n"
        "import shared, only, editable\n"
        "print(shared.place, only.place, editable.place)"
    )
    out = os.popen(f'{sys.executable} -c "{code}"').read()
    assert out == "own lender elsewhere\n"


def test_make_shows_steps_and_no_shell_text() -> None:
    recipe, continued = [], False
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if line.startswith("\t") and not continued:
            recipe.append(line)
        continued = line.endswith("\\")
    assert len(recipe) > 15
    assert not [line for line in recipe if not line.startswith("\t@")]
