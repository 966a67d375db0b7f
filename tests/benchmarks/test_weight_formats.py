"""The comparison of weight formats: a dry run, its tables, resumption, what peers are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.moe import weight_format_tables, weight_formats
from benchmarks.moe.cells import Model
from benchmarks.moe.humming import _stored, weight_config
from benchmarks.moe.ours import random_weights
from mxpert.formats.weight_tensor import WeightTensor

TINY = Model("tiny", 4, 2, 256, 128)


def run(output: Path, *options: str) -> int:
    fixed = ["--dry-run", "--models", "qwen3-30b", "--activations", "mxfp8"]
    return weight_formats.main([*fixed, "--output", str(output), *options])


def test_a_dry_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "weight_formats.json"
    assert run(path, "--formats", "nvfp4") == 0
    first = json.loads(path.read_text())["rows"]
    assert [(row["weights"], row["T"]) for row in first] == [("nvfp4", 1), ("nvfp4", 16)]
    assert all(row["rel_l2"] < 0.02 for row in first)
    assert run(path, "--formats", "nvfp4,int4_g32", "--resume") == 0
    rows = json.loads(path.read_text())["rows"]
    assert rows[:2] == first
    assert [row["weights"] for row in rows] == ["nvfp4"] * 2 + ["int4_g32"] * 2


@pytest.mark.parametrize("name", weight_formats.FORMATS)
def test_humming_gets_our_weights(name: str) -> None:
    """Codes and scales as stored, and one factor for each expert."""
    weights = random_weights(TINY, torch.device("cpu"), name).plain
    for part in (weights.gate_up_proj, weights.down_proj):
        stored = _stored(part)
        codes = stored.get("weight", stored.get("weight_packed"))
        assert codes is part.qdata
        assert stored["weight_scale"] is part.scale
        if name == "nvfp4":
            assert stored["weight_scale_2"].shape == (TINY.E, 1)
    config = weight_config(name)
    if name.startswith("int4"):
        assert config["group_size"] == int(name.partition("_g")[2])
    else:
        assert config.get("quant_algo", config["quant_method"]) == name.partition("_")[0]


def test_humming_cannot_hold_a_factor_for_each_row() -> None:
    weights = random_weights(TINY, torch.device("cpu"), "nvfp4").plain
    part = weights.down_proj
    assert isinstance(part, WeightTensor)
    assert part.row_scale is not None
    part.row_scale[1, 3] *= 2
    with pytest.raises(ValueError, match="one of each expert"):
        _stored(part)


def test_a_reason_is_told_once() -> None:
    failures = [
        dict(cell=f"tiny T={count}", weights="nvfp4", impl="humming", activation="bf16", error="no")
        for count in (1, 16)
    ]
    assert weight_format_tables.reasons(failures) == ["humming bf16, nvfp4 weights: `no`"]
