"""The benchmark scripts import each other by plain names, as they do when run; so do the helpers of
these tests."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1] / "benchmarks"), str(FOLDER)]
