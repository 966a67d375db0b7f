"""Every planted fault is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from planting import Fault, all_faults, judge

FAULTS = list(all_faults())


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_the_fault_is_seen(fault: Fault) -> None:
    assert judge(fault) == "seen"
