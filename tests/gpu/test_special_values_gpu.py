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

PARTS = 5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_special_values_never_become_finite(part: int, device: torch.device) -> None:
    """1,000 cases each; widths of 32, 64 and 128."""
    with nan_filled_scratch():
        report = special.run(1000, seed=10_000 * (part + 1), device=device, size=1 << part % 3)
    print(f"special values: {report.cases} cases, {report.lost} of them not finite in float64")
    assert not report.wrong, "\n".join(map(str, report.wrong.items()))
    assert set(report.by_name) == {case.name for case in special.CASES if case.on_gpu}
    assert report.lost > 200
