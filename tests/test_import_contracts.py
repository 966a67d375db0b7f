"""The contracts of import-linter in pyproject.toml are kept, and a planted import breaks each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="installed with the extra `test`")

ROOT = Path(__file__).resolve().parent.parent
PLANTED = {
    "imports go down": ("formats/spec.py", "from ..moe.op import fused_moe"),
    "the chips of a layer do not know each other": (
        "moe/hopper/config.py",
        "from ..cdna4 import config as other",
    ),
    "the chips of a grouped GEMM do not know each other": (
        "grouped/hopper.py",
        "from .triton import GROUPED_GEMM as OTHER",
    ),
    "the chips of a quantiser do not know each other": (
        "quantize/dual_hopper.py",
        "from .dual_cdna4 import QUANTIZE_DUAL as OTHER",
    ),
    "testing serves the command, tests and benchmarks": (
        "routing/op.py",
        "from ..testing import timing",
    ),
    "the registry alone reads the manifests of backends": (
        "distributed/layer.py",
        "from ..backends import hopper",
    ),
}
"""Contract → a file and the line that breaks it."""


def copy_package(folder: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mxpert", folder / "mxpert", ignore=ignored)
    return folder


def contracts(folder: Path) -> dict[str, bool]:
    """Whether the package in `folder` keeps each contract, by its name."""
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line.strip().rpartition(" ") for line in done.stdout.splitlines()]
    found = {name: word == "KEPT" for name, _, word in lines if word in ("KEPT", "BROKEN")}
    assert found, done.stdout + done.stderr
    return found


def test_every_contract_is_kept(tmp_path: Path) -> None:
    assert contracts(copy_package(tmp_path)) == dict.fromkeys(PLANTED, True)


def test_every_contract_can_break(tmp_path: Path) -> None:
    folder = copy_package(tmp_path)
    for place, line in PLANTED.values():
        path = folder / "mxpert" / place
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")
    assert contracts(folder) == dict.fromkeys(PLANTED, False)


def test_every_contract_has_a_planted_import() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]
    assert named == list(PLANTED)
