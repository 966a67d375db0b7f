"""The cost of the kernel between the stages: what is launched with and without it, the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from benchmarks.moe import row_encoding
from benchmarks.moe.cells import NAMED, Cell, random_inputs
from benchmarks.moe.warm_up import unwritten_weights
from mxpert.core.target import on_device
from support.launches import H200, count_launches, without_device
from tests.benchmarks.scripts import dry_run


@pytest.mark.parametrize("activation", ["bf16", "mxfp8"])
def test_the_layer_without_the_kernel_launches_one_less(activation: str) -> None:
    model = NAMED["gpt-oss-20b"]
    with without_device(record=False), on_device(H200):
        weights = unwritten_weights(model)
        inputs = random_inputs(Cell(model, 64), weights.device)[0]
        layer = row_encoding.Layer.of(weights, inputs, model.k, activation)
        calls = row_encoding.variants_of([layer])
        counts = {name: count_launches(each[0]) for name, each in calls.items()}
    assert counts["rows"] == 1
    assert counts["layer"] == counts["without"] + 1


def test_a_stage_that_encodes_its_sums_has_no_such_kernel() -> None:
    """One token of kimi-k2 splits the depth of stage 1."""
    model = NAMED["kimi-k2-tp4"]
    with without_device(record=False), on_device(H200):
        weights = unwritten_weights(model)
        inputs = random_inputs(Cell(model, 1), weights.device)[0]
        layer = row_encoding.Layer.of(weights, inputs, model.k, "mxfp8")
        assert row_encoding.variants_of([layer]) == {}


def test_a_dry_run_has_a_row_for_each_format(tmp_path: Path) -> None:
    some = "--models", "gpt-oss-20b", "--tokens", "16"
    code, found = dry_run(row_encoding.main, tmp_path / "a.json", *some)
    assert code == 0, found["meta"]["failures"]
    assert [each["activation"] for each in found["rows"]] == list(row_encoding.FORMATS)


def test_time_that_is_over_leaves_cells(tmp_path: Path) -> None:
    some = "--models", "gpt-oss-20b", "--tokens", "16,64", "--time-limit", "0"
    _, found = dry_run(row_encoding.main, tmp_path / "a.json", *some)
    assert found["meta"]["left"] == ["gpt-oss-20b T=16 uniform", "gpt-oss-20b T=64 uniform"]
