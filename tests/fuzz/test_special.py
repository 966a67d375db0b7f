"""A short run of `special.py`, and faults that it must find."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
sys.path.insert(0, str(Path(__file__).parent))

import special

from mxpert.formats import codec

CASES = 1000


def test_special_values_never_become_finite() -> None:
    report = special.run(CASES, seed=0)
    assert not report.wrong, "\n".join(map(str, report.wrong.items()))
    assert set(report.names) == {case.name for case in special.CASES}
    assert CASES // 5 < report.counted < CASES // 2


def test_a_finite_scale_of_infinity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `block_scale` wrote before: 254 for an infinity, 255 for NaN alone."""
    sound = codec.block_scale

    def block_scale(amax: torch.Tensor, *options: object) -> torch.Tensor:
        return torch.where(amax.isinf(), 254, sound(amax, *options)).to(torch.uint8)

    monkeypatch.setattr(codec, "block_scale", block_scale)
    report = special.run(400, seed=0)
    assert any(text.startswith("quantize ") for text in report.wrong.values())


def test_a_row_that_spoils_another_is_found() -> None:
    (case,) = (case for case in special.CASES if case.name == "fused_moe")

    def spread(arguments: dict[str, Any]) -> Any:
        (y,) = case.call(arguments)
        return [y if y.isfinite().all() else torch.full_like(y, torch.nan)]

    report = special.run(40, functions=[replace(case, call=spread)])
    assert any("change another row" in text for text in report.wrong.values())
