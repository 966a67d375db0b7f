"""What options cost: every case has its variants, wrong results have no time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.grouped import options
from tests.benchmarks.scripts import dry_run


def test_a_dry_run_measures_every_case(tmp_path: Path) -> None:
    code, found = dry_run(options.main, tmp_path / "a.json")
    assert code == 0, found["meta"]["failures"]
    limits = ["no limit", "all", "half", "1"]
    by_op: dict[str, list[str]] = {}
    for row in found["rows"]:
        by_op.setdefault(row["op"], []).append(row["option"])
    assert by_op["grouped_gemm"] == limits * len(options.GROUPED)
    assert by_op["fused_moe"] == limits * len(options.MODELS) * len(options.TOKENS) * len(
        options.FORMATS
    )
    assert by_op["quantize mxfp4"] == ["nearest", "stochastic"]
    assert "| fused_moe | dsv3-ep8 T=1024 mxfp8 | 1 |" in (tmp_path / "a.md").read_text("utf-8")


def fail(check: Callable[[], None]) -> str:
    with pytest.raises(ValueError, match="options: ") as caught:
        check()
    return str(caught.value)


def test_other_bits_are_seen() -> None:
    calls = {"no limit": lambda: torch.zeros(2), "1": lambda: torch.tensor([0.0, 1e-30])}
    assert "num_sms=1" in fail(lambda: options.check_same("gemm", calls))


def test_a_rounding_that_is_not_unbiased_is_seen() -> None:
    def to_nearest(x: torch.Tensor, stochastic_seed: Any = None) -> Any:
        return options.mxpert.quantize(x, format="mxfp4")

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    options.check_mean("mxfp4", x, lambda x, **seed: options.mxpert.quantize(x, "mxfp4", **seed))
    assert "mean of roundings" in fail(lambda: options.check_mean("mxfp4", x, to_nearest))
