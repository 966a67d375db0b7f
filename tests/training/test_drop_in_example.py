"""The drop-in example: torch's op and ours agree as far as MXFP8 allows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST_DB = 21.0
"""Four times the noise of one quantised product, which keeps 28 dB; see layer_floor_db."""


def test_example_runs() -> None:
    done = subprocess.run([sys.executable, "examples/grouped_mm_drop_in.py"], cwd=ROOT,
                          capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert set(found) == {"y", "x.grad", "w1.grad", "w2.grad", "w3.grad"}
    for name, value in found.items():
        assert LEAST_DB < float(value.removesuffix(" dB")) < 40, name
