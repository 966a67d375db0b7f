"""`mxpert demo` works after a plain install, which does not bring Transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mxpert.cli import demo_layers, measure
from mxpert.cli.main import app
from mxpert.cli.measure import float64_reference
from mxpert.moe.op import fused_moe
from mxpert.testing.numerics import relative_l2


@pytest.fixture
def plain_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_layers, "has_transformers", lambda: False)
    monkeypatch.setattr(demo_layers, "load_transformers_oracle", None)
    monkeypatch.setattr(demo_layers, "write_demo_checkpoint", None)
    monkeypatch.setattr(measure, "CPU_SECONDS_PER_CASE", 0.0)


def run(tmp_path: Path) -> tuple[int, dict, str]:
    done = CliRunner().invoke(
        app, ["demo", "--tokens", "1,40", "--output", str(tmp_path), "--json", "-"]
    )
    return done.exit_code, json.loads(done.stdout), done.stderr


@pytest.mark.usefixtures("plain_install")
def test_the_demo_checks_random_layers(tmp_path: Path) -> None:
    code, document, told = run(tmp_path)
    assert code == 0
    assert document["oracle"] == "torch"
    assert document["checkpoint"] is None
    assert len(document["summary"]) == 8
    assert all(row["passed"] for row in document["rows"])
    assert "8 of 8 checks passed" in told
    assert "Transformers is not installed" in told


@pytest.mark.usefixtures("plain_install")
def test_a_wrong_layer_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo_layers.loop_over_experts

    def gate_and_up_exchanged(layer, hidden):
        part = layer.weights.gate_up_proj
        swapped = replace(
            part,
            qdata=part.qdata.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
            scale=part.scale.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        )
        return right(replace(layer, weights=replace(layer.weights, gate_up_proj=swapped)), hidden)

    monkeypatch.setattr(demo_layers, "loop_over_experts", gate_and_up_exchanged)
    code, document, told = run(tmp_path)
    assert code == 1
    assert not any(row["passed"] for row in document["rows"])
    assert "0 of 8 checks passed" in told


def test_the_loop_is_the_layer_of_the_reference() -> None:
    case = next(demo_layers.RandomLayers().cases([3], 24, torch.device("cpu")))
    topk_weights, topk_ids = demo_layers.route(case, 24)
    with float64_reference():
        truth = fused_moe(
            case.rows(24),
            case.weights.plain,
            topk_weights,
            topk_ids,
            activation=case.layer.activation,
            out_dtype=torch.float64,
        )
    # The reference rounds the intermediate to bfloat16 (2^-9 at most for each value), the loop not.
    assert relative_l2(truth, case.oracle) < 2**-8
