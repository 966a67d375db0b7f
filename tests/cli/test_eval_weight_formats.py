"""`mxpert eval --weight-format`: each format is measured on the dense weights, in any order."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from mxpert.integrations.models.convert import convert, mx_experts
from mxpert.integrations.models.evaluation import evaluate
from tests.cli.test_eval import TEXT, checkpoint, model_of, of_text  # noqa: F401  a fixture

NAMES = ("mxfp4", "mxfp8", "nvfp4", "nvfp4-e4m3", "int4_g32")
IDS = torch.frombuffer(bytearray(TEXT.read_bytes()[:256]), dtype=torch.uint8).long()


def test_a_format_has_the_loss_of_a_model_in_it_alone() -> None:
    """After other formats, whose rounding must not stay in the weights."""
    model = model_of()
    alone = {}
    for name in NAMES:
        report = evaluate(
            copy.deepcopy(model), IDS, formats=["a16w4"], weight_formats=[name], context=64
        )
        alone[report.formats[1].name] = report.formats[1].loss
    together = evaluate(
        model, IDS, formats=["a16w4"], weight_formats=list(reversed(NAMES)), context=64
    )
    found = {each.name: each.loss for each in together.formats[1:]}
    assert found == alone
    assert list(found) == [
        "bf16xint4_g32",
        "bf16xnvfp4-e4m3",
        "bf16xnvfp4",
        "bf16xmxfp8_e4m3",
        "a16w4",
    ]
    ratios = together.layers[0].sqnr_db
    assert ratios["bf16xmxfp8_e4m3"] > ratios["bf16xnvfp4"] > ratios["bf16xnvfp4-e4m3"]
    assert ratios["bf16xnvfp4-e4m3"] > ratios["a16w4"]


def test_every_format_of_weights_meets_every_one_of_activations() -> None:
    report = evaluate(
        model_of(), IDS, formats=["a16w4", "a8w4"], weight_formats=["nvfp4", "mxfp4"], context=64
    )
    names = [each.name for each in report.formats]
    assert names == ["bf16", "bf16xnvfp4", "mxfp8xnvfp4", "a16w4", "a8w4"]
    assert all(set(layer.sqnr_db) == set(names[1:]) for layer in report.layers)


def test_the_rounded_format_is_that_of_round_weights() -> None:
    model = model_of()
    other = convert(copy.deepcopy(model), weight_format="nvfp4", progress=False)
    evaluate(model, IDS, formats=["a16w4"], weight_formats=["nvfp4-e4m3"], context=64)
    for found, exact in zip(mx_experts(model), mx_experts(other), strict=True):
        wanted = exact.weights.unprepare().round_weights("e4m3")
        assert found.weights.rounding_certificates == wanted.rounding_certificates
        assert torch.equal(found.weights.unprepare().down_proj.qdata, wanted.down_proj.qdata)


def test_the_command_prints_and_writes_them(
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    outputs = ("--json", tmp_path / "eval.json", "--plot", tmp_path / "eval.png")
    names = ("--format", "a16w4,a8w4", "--weight-format", "mxfp4,mxfp8,nvfp4,nvfp4-e4m3")
    done = of_text(checkpoint, 64, 256, *names, *outputs)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "eval.json").read_text("utf-8"))["formats"]
    assert len(found) == 1 + 2 * 4
    for entry in found:
        assert f"{entry['loss']:.4f}" in done.stdout
        assert entry["name"] in done.stdout
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    failed = of_text(checkpoint, 64, 256, "--weight-format", "fp8")
    assert failed.exit_code == 2
    assert "eval: --weight-format — need some of mxfp4,mxfp8" in failed.stderr


def test_names_that_are_none_are_refused() -> None:
    for names in ("nvfp4", [], ["fp8"]):
        with pytest.raises(ValueError, match=r"^evaluate: weight_formats — need"):
            evaluate(model_of(), IDS, weight_formats=names, context=64)
