"""convert with other weights than MXFP4: their bits, and what cannot be done with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert.errors import UnsupportedError
from mxpert.integrations.models import convert as module
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.testing.numerics import assert_exact
from mxpert.training import MXFP8Recipe
from tests.integrations.families import build
from tests.integrations.models.test_convert import OutOfMemoryError, logits

FORMATS = ("mxfp8", "nvfp4", "int4_g32")


def dense_of(model: Any, index: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """[E, 2F, H] and [E, H, F] of a layer, and their order."""
    experts = model.model.layers[index].mlp.experts
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if type(model).__name__.startswith("GptOss"):
        return gate_up.transpose(1, 2), down.transpose(1, 2), "interleaved"
    return gate_up, down, "concatenated"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_layers_have_the_bits_of_quantize_weights(weight_format: Any, family: str) -> None:
    model = build(family, dtype=torch.bfloat16)
    wanted = []
    for index in range(2):
        gate_up, down, order = dense_of(model, index)
        wanted.append(
            mxpert.quantize_weights(
                gate_up.contiguous(),
                down.contiguous(),
                gate_up_order=order,
                weight_format=weight_format,
            )
        )
    convert(model, weight_format=weight_format, progress=False)
    for found, weights in zip(mx_experts(model), wanted, strict=True):
        assert found.weights.weight_format == weights.weight_format
        plain = found.weights.unprepare()
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(plain, name).qdata, getattr(weights, name).qdata)
            assert torch.equal(getattr(plain, name).scale, getattr(weights, name).scale)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_converted_model_runs_and_comes_back(weight_format: Any, tmp_path: Path) -> None:
    model = build("mixtral", dtype=torch.bfloat16)
    dense = logits(model)
    convert(model, weight_format=weight_format, progress=False)
    found = logits(model)
    assert not torch.equal(found, dense)
    with pytest.raises(UnsupportedError, match=r"^save_pretrained: experts — need experts in"):
        model.save_pretrained(tmp_path / "saved")
    convert(model, "a8w4", progress=False)
    assert not torch.equal(logits(model), found)
    assert mx_experts(model)[0].weights.weight_format.startswith(weight_format)
    restore(model)
    model.save_pretrained(tmp_path / "saved")
    assert logits(model).shape == dense.shape


def test_mxfp4_by_its_name_is_the_default() -> None:
    model = build("mixtral", dtype=torch.bfloat16)
    other = convert(copy.deepcopy(model), weight_format="mxfp4", progress=False)
    assert_exact(logits(other), logits(convert(model, progress=False)), "logits")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weight_format": "fp8"}, r"^convert: weight_format — need one of"),
        ({"weight_format": "int4_g128"}, r"experts — need H and F in multiples of 128, the group"),
        (
            {"weight_format": "nvfp4", "scale_rule": "even"},
            r"scale_rule — need None for nvfp4, got even",
        ),
        (
            {"weight_format": "nvfp4", "recipe": MXFP8Recipe()},
            r"weight_format — need None with a recipe, got nvfp4",
        ),
    ],
    ids=["unknown", "groups", "rule", "recipe"],
)
def test_what_does_not_fit_is_refused_before_a_layer_changes(options: Any, match: str) -> None:
    model = build("mixtral", dtype=torch.bfloat16)
    before = logits(model)
    with pytest.raises(ValueError, match=match):
        convert(model, progress=False, **options)
    assert torch.equal(logits(model), before)
    assert not mx_experts(model)


def test_another_format_needs_dense_weights() -> None:
    model = convert(build("mixtral", dtype=torch.bfloat16), weight_format="nvfp4", progress=False)
    match = r"weight_format — need a model with dense experts, got one that is in nvfp4 already"
    with pytest.raises(ValueError, match=match):
        convert(model, weight_format="mxfp8", progress=False)


def test_a_failed_conversion_is_ended_in_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral", dtype=torch.bfloat16)
    wanted = convert(copy.deepcopy(model), weight_format="nvfp4", progress=False)
    original, calls = module.quantize_experts, []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise OutOfMemoryError
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "quantize_experts", fail)
        with pytest.raises(OutOfMemoryError):
            convert(model, weight_format="nvfp4", progress=False)
    assert len(mx_experts(model)) == 1
    with pytest.raises(ValueError, match="need nvfp4, as the call before, got mxfp4"):
        convert(model, progress=False)
    convert(model, weight_format="nvfp4", progress=False)
    assert_exact(logits(model), logits(wanted), "logits")
