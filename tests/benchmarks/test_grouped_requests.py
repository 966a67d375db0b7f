"""The script that times slow requests, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxpert
from benchmarks.grouped import requests as grouped_requests
from benchmarks.grouped.cells import BALANCES, SHAPES, Operands, sample, tiny
from mxpert.cli.measure import GateError
from tests.benchmarks.scripts import dry_run


def test_a_dry_run_measures_every_request(tmp_path: Path) -> None:
    code, found = dry_run(grouped_requests.main, tmp_path / "requests.json", "--shapes", "6")
    assert code == 0
    assert {(row["request"], row["op"]) for row in found["rows"]} == {
        *(
            (name, op)
            for name in ("row", "auto", "auto wide", "exact")
            for op in ("forward", "wgrad")
        ),
        ("bf16", "forward"),
        ("bf16 [G, K, N]", "forward"),
        ("exact [G, K, N]", "forward"),
    }


def test_wide_data_are_too_wide_for_one_scale_a_row() -> None:
    data = Operands.random(tiny(SHAPES[0]), BALANCES[0], torch.device("cpu"))
    for wide, expected in ((grouped_requests.widened(data), True), (data, False)):
        for groups, tensor in ((data.group_offsets, wide.x), (None, wide.weight)):
            row, _ = mxpert.quantize_dual(
                tensor, group_offsets=groups, scale_span=grouped_requests.SPANS["auto"]
            )
            assert row.wide_blocks is not None
            assert (int(row.wide_blocks) > 0) is expected


def test_a_wrong_result_is_not_timed() -> None:
    data = Operands.random(tiny(SHAPES[0]), BALANCES[0], torch.device("cpu"))
    right = grouped_requests.layout_requests(data)[0]
    wrong = replace(right, call=lambda: right.call().roll(1, -1))
    grouped_requests.check(right, sample(data))
    with pytest.raises(GateError, match="relative L2"):
        grouped_requests.check(wrong, sample(data))
