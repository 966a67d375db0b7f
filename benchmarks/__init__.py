"""Benchmarks, a folder a subject: `python -m benchmarks.<subject>.<script>` from the repository.

Importing it puts this checkout first on the path: its library is measured, with the rigs of
tests/support and the emulator's.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = "gfx950-emulator", "gfx950-emulator/tests"
sys.path[:0] = [str(ROOT / each) for each in (".", "tests", *EMULATOR)]
