"""The comparison of weight formats: a dry run, its tables, resumption, what peers are given."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe import warm_up, weight_format_tables, weight_formats
from benchmarks.moe.cells import Cell, Inputs, Model
from benchmarks.moe.humming import _stored, weight_config
from benchmarks.moe.ours import Ours, Truth, random_weights
from benchmarks.moe.peers import Variants
from mxpert.cli.measure import RunWeights
from mxpert.formats.weight_tensor import WeightTensor
from mxpert.moe.weights import MoEWeights

CPU = torch.device("cpu")
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


def test_weights_that_cannot_be_made_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_nvfp4(model: Model, device: torch.device, name: str) -> RunWeights:
        if name == "nvfp4":
            raise RuntimeError("out of memory")
        return random_weights(model, device, name)

    monkeypatch.setattr(weight_formats, "random_weights", without_nvfp4)
    path = tmp_path / "weight_formats.json"
    assert run(path, "--formats", "nvfp4,int4_g32", "--tokens", "1") == 1
    found = json.loads(path.read_text())
    assert [row["weights"] for row in found["rows"]] == ["int4_g32"]
    assert "out of memory" in found["meta"]["failures"][0]["error"]


def test_our_kernels_are_compiled_for_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(warm_up.subprocess, "Popen", lambda command, **_: commands.append(command))
    path = Path("none.json")
    run = weight_formats.FormatRun(
        path, {}, (), device=CPU, deadline=0.0, folder=None, activations=["bf16", "mxfp8"]
    )
    models = [weight_formats.MODELS[name] for name in ("qwen3-30b", "kimi-k2-tp8")]
    groups = list(itertools.product(models, ("mxfp4", "nvfp4")))
    weight_formats.start_compilers(run, groups, [1, 16, 1024])
    assert {command[4] for command in commands} == {"qwen3-30b,kimi-k2-tp8"}
    found = {(command[6], command[8], command[10]) for command in commands}
    wanted = ("1,16", "1024"), ("bf16", "mxfp8"), ("mxfp4", "nvfp4")
    assert found == set(itertools.product(*wanted))


class SamePeer:
    """A peer that has our layer."""

    impl, activation, same_weights = "humming", "bf16", True

    def __init__(self, ours: Ours) -> None:
        self.ours = ours

    def prepare(self, cell: Cell, batches: Sequence[Inputs]) -> Variants:
        call = partial(self.ours._layer, self.ours.weights.plain, batches[0])
        return {"": {"layer": [call]}}


def test_one_truth_serves_all_with_the_same_activations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    truth_of = weight_formats.Truth.of

    def note(weights: MoEWeights, inputs: Inputs, top_k: int, activation: str) -> Truth:
        asked.append(activation)
        return truth_of(weights, inputs, top_k, activation)

    monkeypatch.setattr(weight_formats.Truth, "of", note)
    weights = random_weights(TINY, CPU, "int4_g32")
    ours = [Ours(TINY, weights, name) for name in ("bf16", "mxfp8")]
    key, blame = ("model", "T", "weights", "impl", "activation"), ("cell", "w", "impl", "a")
    place: dict[str, Any] = dict(
        device=CPU, deadline=0.0, folder=None, activations=["bf16", "mxfp8"]
    )
    run = weight_formats.FormatRun(tmp_path / "a.json", {}, key, blame, **place)
    built = weight_formats.Built(weights, ours, [SamePeer(ours[0])])
    weight_formats.measure_cell(run, Cell(TINY, 16), built)
    assert run.failures == {}
    assert asked == ["bf16", "mxfp8"]
    errors = {(row["impl"], row["activation"]): row["rel_l2"] for row in run.rows.values()}
    assert errors["humming", "bf16"] == errors["mxpert", "bf16"] < 0.01


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


def test_every_name_of_an_activation_reaches_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "weight_formats.json"
    assert run(path, "--formats", "nvfp4", "--tokens", "1", "--activations", "a4w4,a16") == 0
    document = json.loads(path.read_text())
    assert [row["activation"] for row in document["rows"]] == ["mxfp4", "bf16"]
    ours = document["rows"][0]
    document["rows"].append(ours | dict(impl="humming", activation="fp8_token", us=2 * ours["us"]))
    document["meta"]["ceilings"] = dict(read_tbs=4.0, bf16_tflops=700.0, fp8_tflops=1400.0)
    text = weight_format_tables.full(document)
    assert "## mxfp4 activations" in text
    assert "| nvfp4, a4 | 2.00 |" in text
