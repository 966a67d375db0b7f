"""NaN, infinities, subnormals and the largest values through the kernels of a GPU.

The cases and what they must hold are those of `tests/fuzz/special.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))

import special

from support.poison import nan_filled_scratch

CASES, PARTS = 2500, 10
"""Cases of each size; workers share them in parts."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [1, 4])
def test_special_values_never_become_finite(size: int, part: int, device: torch.device) -> None:
    """Widths from 32 and from 128 on."""
    cases = CASES // PARTS
    with nan_filled_scratch():
        report = special.run(cases, seed=10_000 * size + cases * part, device=device, size=size)
    print(f"special values: {report.cases} cases, {report.counted} of them not finite in float64")
    assert not report.wrong, "\n".join(map(str, report.wrong.items()))
    assert set(report.names) == {case.name for case in special.CASES if case.on_gpu}
    assert report.counted > 0.2 * cases
