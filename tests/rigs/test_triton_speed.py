"""The suite's faster Triton gives the binaries of the stock one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import load_script

binaries = load_script("tools/binaries.py")

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/moe/hopper/test_group_weights_aot.py::test_row_kernels",
    "tests/moe/triton/test_kernels_aot.py::test_split_k_without_a_gate_is_finished",
)
"""Gluon kernels and portable ones."""


def compiled(folder: Path, *options: str) -> dict[str, list[str]]:
    """Hashes of what the tests compile into a cache of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *options, *TESTS]
    environment = {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=300)
    found: dict[str, list[str]] = binaries.texts(folder)
    return found


def test_binaries_are_those_of_stock_triton(tmp_path: Path) -> None:
    stock = compiled(tmp_path / "stock", "--stock-triton")
    assert stock
    assert compiled(tmp_path / "patched") == stock
