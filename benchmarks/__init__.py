"""Benchmarks, a folder a subject: `python -m benchmarks.<subject>.<script>` from the repository.

Importing it puts this checkout first on the path: its library is measured, with the rigs of
tests/support.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
