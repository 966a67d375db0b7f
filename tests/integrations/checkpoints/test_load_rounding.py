"""`load_expert_weights(…, weight_rounding="e4m3")`: NVFP4 alone, and only when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mxpert.cli.main import app
from mxpert.integrations.checkpoints.inspect import inspect_checkpoint
from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import EXACT_NVFP4, write

runner = CliRunner()


@pytest.mark.parametrize("name", EXACT_NVFP4)
def test_layers_of_nvfp4_load_rounded_on_request(name: str, tmp_path: Path) -> None:
    write(tmp_path / "in", EXACT_NVFP4[name])
    exact = dict(load_expert_weights(tmp_path / "in"))
    rounded = dict(load_expert_weights(tmp_path / "in", weight_rounding="e4m3"))
    statistics = inspect_checkpoint(tmp_path / "in", weight_rounding="e4m3")
    assert list(exact) == list(rounded)
    for index, (path, weights) in enumerate(rounded.items()):
        assert exact[path].weight_format == "nvfp4"
        assert weights.weight_format == "mxfp8_e4m3"
        wanted = exact[path].round_weights("e4m3")
        assert torch.equal(weights.down_proj.qdata, wanted.down_proj.qdata)
        assert weights.rounding_certificates == wanted.rounding_certificates
        for entry, cost in zip(
            statistics[2 * index : 2 * index + 2], weights.rounding_certificates or (), strict=True
        ):
            assert entry.rounding_snr_db == pytest.approx(cost.snr_db, abs=1e-6)
    assert all(each.rounding_snr_db is None for each in inspect_checkpoint(tmp_path / "in"))


def test_casts_stay_exact(tmp_path: Path) -> None:
    write(tmp_path / "in", "ModelOpt NVFP4")
    for _, weights in load_expert_weights(tmp_path / "in", weight_rounding="e4m3"):
        assert weights.weight_format == "mxfp4"
        assert weights.rounding_certificates is None


def test_other_checkpoints_and_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", "AWQ")
    match = r"^load_expert_weights: weight_rounding — need None, since nothing else than NVFP4"
    with pytest.raises(ValueError, match=match):
        load_expert_weights(tmp_path / "in", weight_rounding="e4m3")
    with pytest.raises(ValueError, match="need None or 'e4m3', got 'e5m2'"):
        load_expert_weights(tmp_path / "in", weight_rounding="e5m2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"inspect_checkpoint: weight_rounding — need one of"):
        inspect_checkpoint(tmp_path / "in", weight_rounding="e5m2")  # type: ignore[arg-type]


def test_inspect_prints_it(tmp_path: Path) -> None:
    write(tmp_path / "in", EXACT_NVFP4["ModelOpt NVFP4"])
    call = ["inspect", str(tmp_path / "in"), "--weight-rounding"]
    shown = runner.invoke(app, [*call, "e4m3", "--json", "-"])
    assert shown.exit_code == 0, shown.output
    assert "e4m3 dB" in shown.stderr
    found = json.loads(shown.stdout)["projections"]
    assert all(f"{each['rounding_snr_db']:.2f}" in shown.stderr for each in found)
    failed = runner.invoke(app, [*call, "e5m2"])
    assert failed.exit_code == 2
    assert "inspect: --weight-rounding — need one of e4m3, got 'e5m2'" in failed.stderr
