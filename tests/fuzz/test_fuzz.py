"""Random calls of every public function: an error in the library's form or a right answer.

A budgeted part runs with the suite. The long run: ``pytest tests/fuzz -s --fuzz-calls 6000``. A bug
is repeated with ``python tests/fuzz/run.py --only TARGET --one SEED``.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mxpert
import mxpert.formats
import mxpert.training
from support.scripts import load_script

pytest.importorskip("hypothesis")
ROOT = Path(__file__).resolve().parent.parent.parent
RUNNER = Path(__file__).with_name("run.py")
NOT_CALLED = {"ElementFormat", "MXFormat", "WeightFormat", "FoldCertificate", "Layout"} | {
    "RoundingCertificate",
    "TopKOptions",
}
"""Plain records, and a set of named objects."""
NOT_FUZZED = {"ExpertParallel", "evaluate", "load_expert_weights", "restore", "save_quantized"}
"""What takes ranks, whole models or folders."""
PLANTED_CALLS = 400


def fuzz(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The runner in a process of its own, so that a crash or a hang is its own."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            str(RUNNER),
            "--log",
            str(tmp_path / "log"),
            *arguments,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


def report(done: subprocess.CompletedProcess[str], tmp_path: Path) -> dict[str, Any]:
    last = (tmp_path / "log").read_text(encoding="utf-8") if (tmp_path / "log").exists() else ""
    assert done.returncode == 0, f"died in {last}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.timeout(3600)
def test_every_call_answers_or_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    calls = request.config.getoption("--fuzz-calls")
    found = report(fuzz(tmp_path, "--calls", str(calls)), tmp_path)
    print(
        f"fuzz: {found['calls']} calls of {len(found['by_target'])} functions in "
        f"{found['seconds']:.0f} s: {found['answers']} answers, {found['errors']} refusals, "
        f"{len(found['bugs'])} bugs"
    )
    assert not found["bugs"], "\n".join(f"{key}\n{text}" for key, text in found["bugs"].items())
    assert found["calls"] >= calls
    assert min(found["answers"], found["errors"]) > calls // 5


@pytest.fixture(scope="module")
def runner() -> Any:
    """The runner as a module, for what needs no process of its own."""
    return load_script(RUNNER)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("foreign", "RuntimeError"),
        ("wrong", "wrong answer"),
        ("strides", "equal values give"),
        ("shape", "another geometry"),
        ("refusal", "refused: "),
    ],
)
def test_a_planted_bug_is_found(runner: Any, tmp_path: Path, fault: str, text: str) -> None:
    """From fixed seeds: hypothesis draws other ones as soon as other modules are loaded."""
    target = next(target for target in runner.TARGETS if target.name == "dequantize")
    calls, sound = runner.Fuzz(tmp_path / "log"), runner.Fuzz(tmp_path / "sound")
    for seed in range(PLANTED_CALLS):
        calls.one(replace(target, call=runner.planted(target.call, fault)), seed)
        sound.one(target, seed)
    assert any(text in bug for bug in calls.report.bugs)
    assert not sound.report.bugs


@pytest.mark.parametrize(("fault", "text"), [("crash", "Segmentation fault"), ("hang", "Timeout")])
def test_a_planted_crash_is_found(tmp_path: Path, fault: str, text: str) -> None:
    done = fuzz(tmp_path, "--only", "dequantize", "--calls", "9", "--plant", fault)
    assert done.returncode != 0
    assert text in done.stderr
    assert (tmp_path / "log").read_text(encoding="utf-8").startswith("dequantize seed ")


def test_every_public_function_is_called(runner: Any) -> None:
    names = [target.name for target in runner.TARGETS]
    heads = {name.split(".")[0].split(" ")[0].split("[")[0] for name in names}
    public = {
        name: getattr(module, name)
        for module in (mxpert, mxpert.formats, mxpert.training)
        for name in module.__all__
    }
    missing = {
        name
        for name, value in public.items()
        if callable(value)
        and not (
            inspect.isclass(value)
            and (hasattr(value, "__members__") or issubclass(value, BaseException))
        )
    }
    assert missing - heads - NOT_CALLED - NOT_FUZZED - {"ReLU2", "SiLU"} == set()
