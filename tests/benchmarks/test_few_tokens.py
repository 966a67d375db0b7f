"""One to four tokens: which configs are timed, what a wrong one becomes, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from benchmarks.moe import few_tokens
from benchmarks.moe.cells import NAMED, Cell, random_inputs, tiny
from benchmarks.moe.ours import Ours, random_weights
from mxpert.moe.hopper import config as heuristics
from mxpert.testing.problems import MODEL_SHAPES
from support.hopper_launches import describe
from tests.benchmarks.scripts import dry_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", few_tokens.TOKENS)
@pytest.mark.parametrize("model", NAMED)
def test_every_config_is_valid(model: str, num_tokens: int) -> None:
    shape = MODEL_SHAPES[model]
    problem = describe(shape, num_tokens, "bf16")
    configs, refused = few_tokens.configs_of(problem)
    assert configs[few_tokens.HEURISTIC] == heuristics.two_stage_heuristic(problem)
    assert (few_tokens.ONE_LAUNCH in configs) is (refused is None)
    splits = [name for name in configs if "," in name]
    assert {"1,1"} < set(splits)
    for name in splits:
        stages = configs[name].gate_up, configs[name].down
        assert name == f"{stages[0].k_splits},{stages[1].k_splits}"
        for stage in stages:
            heuristics.require_valid(stage, problem)


def document(tmp_path: Path) -> few_tokens.Run:
    keys = ("model", "T", "activation"), ("cell", "activation", "config")
    return few_tokens.Run(tmp_path / "a.json", {}, *keys, device=CPU, deadline=0.0)


def test_wrong_results_are_not_timed(tmp_path: Path) -> None:
    cell = Cell(tiny(NAMED["gpt-oss-20b"]), 2)
    weights = random_weights(cell.model, CPU)
    inputs, run = random_inputs(cell, CPU)[0], document(tmp_path)
    mine = Ours(cell.model, weights, "mxfp8")
    calls: Any = {
        "right": [lambda: mine._layer(weights.plain, inputs)],
        "wrong": [lambda: 1.05 * mine._layer(weights.plain, inputs)],
    }
    assert list(few_tokens.right_calls(run, cell, calls, weights, inputs, "mxfp8")) == ["right"]
    assert list(run.failures) == [(str(cell), "mxfp8", "wrong")]


def test_the_table_compares_one_launch_with_the_fastest_two_stages() -> None:
    us = {"heuristic": 30.0, "1,1": 31.0, "2,1": 29.0, "one launch": 20.3}
    row = {"model": "m", "T": 1, "activation": "bf16", "us": us, "refused": None}
    text = few_tokens.row_table([row], few_tokens.COLUMNS)
    assert "| m | bf16 | 1 | 30.0 | 2,1 | 29.0 | 20.3 | 0.70 |" in text
    del us["one launch"]
    text = few_tokens.row_table([row | {"refused": "has no room"}], few_tokens.COLUMNS)
    assert "| 29.0 | has no room | – |" in text


def test_a_dry_run_has_a_row_for_each_cell(tmp_path: Path) -> None:
    some = "--models", "kimi-k2-tp4", "--tokens", "1,4", "--formats", "mxfp8"
    code, found = dry_run(few_tokens.main, tmp_path / "a.json", *some)
    assert code == 0, found["meta"]["failures"]
    assert [row["T"] for row in found["rows"]] == [1, 4]
    assert "heuristic" in found["rows"][0]["us"]
