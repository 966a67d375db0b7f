"""What `import mxpert` brings along: torch, and nothing else that takes time to load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mxpert

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"triton", "torch._dynamo", "torch._inductor", "sympy", "rich", "typer", "transformers"}
"""Packages that take longer to load than this one."""
MODULES = """
import json, sys, time
import torch
before, started = set(sys.modules), time.process_time()
{statement}
print(json.dumps([sorted(set(sys.modules) - before), time.process_time() - started]))
"""
COSTS_AT_MOST = 0.2
"""Seconds of this process that the import may take beside torch's own."""


def imported_by(statement: str) -> tuple[set[str], float]:
    """Modules that a statement loads in a process that has torch, and its seconds of CPU time."""
    done = subprocess.run(
        [sys.executable, "-c", MODULES.format(statement=statement)],
        # empty: byte code is written, as where a user imports the package for the second time
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    modules, seconds = json.loads(done.stdout.splitlines()[-1])
    return set(modules), seconds


def heavy(modules: set[str]) -> set[str]:
    return {name for name in HEAVY if any(f"{each}.".startswith(f"{name}.") for each in modules)}


def test_import_takes_nothing_heavy_and_little_time() -> None:
    seconds = []
    for _ in range(8):  # the first writes byte code; other processes make an attempt slower
        modules, taken = imported_by("import mxpert")
        seconds.append(taken)
        if taken <= COSTS_AT_MOST:
            break
    assert heavy(modules) == set()
    assert min(seconds) <= COSTS_AT_MOST


def test_the_version_is_printed_without_what_it_does_not_need() -> None:
    modules, _ = imported_by(
        "from mxpert.cli.main import app; app(['--version'], standalone_mode=0)"
    )
    assert "mxpert.cli.main" in modules
    assert heavy(modules) <= {"typer", "rich"}  # the command line is made of them


@pytest.mark.parametrize("name", [*mxpert.__all__, "distributed", "integrations", "training"])
def test_every_name_is_there_after_a_plain_import(name: str) -> None:
    assert getattr(mxpert, name) is not None
    assert name in dir(mxpert) or name in ("distributed", "integrations", "training")


def test_modules_that_take_time_are_imported_when_they_are_used() -> None:
    modules, _ = imported_by("import mxpert; mxpert.training.MXFP8Recipe; mxpert.convert")
    assert {"mxpert.training.recipe", "mxpert.integrations.models.convert"} <= modules


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mxpert' has no attribute 'fused_mow'"):
        mxpert.fused_mow  # noqa: B018


@pytest.mark.parametrize("name", ["torch", "safetensors", "numpy", "rich"])
def test_a_missing_package_is_one_line_of_the_command(name: str) -> None:
    """What `pip install --no-deps` leaves out; see the guide for AMD."""
    done = without(name, "import runpy; sys.argv = ['mxpert']; runpy.run_module('mxpert')")
    line = f"error: mxpert: import — need {name}, got no such package; pip install {name}\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_missing_package_is_an_error_that_a_script_can_catch() -> None:
    done = without("torch", "import mxpert")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: mxpert: import — need torch, got no such package")
    assert without("rich", "import mxpert").returncode == 0, "the command alone needs it"


def without(name: str, statement: str) -> subprocess.CompletedProcess[str]:
    """Run a statement in a process that finds a package nowhere."""
    code = (
        "import importlib.machinery as m, sys\n"
        "find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = lambda name, *a: "
        f"None if name.partition('.')[0] == {name!r} else find(name, *a)\n"
        f"{statement}\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_messages_name_packages_that_an_index_has() -> None:
    """mxpert itself is on no index, so `pip install 'mxpert[plot]'` cannot work."""
    sources = sorted((ROOT / "mxpert").rglob("*.py"))
    assert len(sources) > 100
    wrong = re.compile(r"pip install ['\"\\]*mxpert")
    named = [path for path in sources if wrong.search(path.read_text(encoding="utf-8"))]
    assert not named
