"""A short run of `ambient.py`, and faults that it must find."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).parent))

import ambient

from mxpert.core import calls

CASES = 1200


def test_no_state_changes_a_bit() -> None:
    report = ambient.run(CASES, seed=0)
    assert not report.wrong, "\n".join(map(str, report.wrong.items()))
    assert set(report.names) == set(ambient.STATES)
    assert report.counted < CASES // 4


def test_autocast_inside_of_the_kernels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "isolated", lambda _: contextlib.nullcontext())
    report = ambient.run(CASES // 2, seed=0)
    assert any("autocast" in text for text in report.wrong.values())
