"""convert(…, keep_fp8=True): copies in every layer, in models that are converted already too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mxpert import MoEWeights, ScaleRule
from mxpert.formats.tensor import Layout, MXTensor
from mxpert.integrations.models import convert as module
from mxpert.integrations.models.convert import convert, mx_experts
from mxpert.moe.stacked import quantize_stacked
from mxpert.training import MXFP8Recipe
from support.devices import prepared_for
from tests.integrations.families import build

COPY = Layout.HOPPER_FRAGMENT_FP8


def layouts(model: Any) -> list[Layout]:
    return [experts.weights.layout for experts in mx_experts(model)]


def dense() -> Any:
    return build("mixtral", dtype=torch.bfloat16)


@pytest.fixture
def hopper() -> Any:
    with prepared_for("sm_90"):
        yield


@pytest.mark.usefixtures("hopper")
def test_every_layer_has_a_copy_and_saves_none(tmp_path: Path) -> None:
    for name, options in (("with", {"keep_fp8": True}), ("without", {})):
        model = convert(dense(), "a8w4", progress=False, **options)
        assert layouts(model) == [COPY if options else Layout.HOPPER_FRAGMENT] * 2
        model.save_pretrained(tmp_path / name)
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("with", "without")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.usefixtures("hopper")
def test_a_converted_model_gets_copies() -> None:
    model = convert(dense(), "a8w4", progress=False)
    plain = [experts.weights.unprepare() for experts in mx_experts(model)]
    for _ in range(2):
        convert(model, "a4w4", keep_fp8=True, progress=False)
        assert layouts(model) == [COPY] * 2
    for experts, before in zip(mx_experts(model), plain, strict=True):
        assert experts.activation_format == "mxfp4"
        assert torch.equal(
            experts.weights.unprepare().gate_up_proj.qdata, before.gate_up_proj.qdata
        )
        assert experts.get_buffer("down_proj_fp8_codes") is experts.weights.down_proj.fp8_codes


def test_copies_are_made_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that were converted on a CPU, too, where there are none."""
    models, seen = [dense(), convert(dense(), "a8w4", progress=False)], []

    class Prepared(Exception):  # noqa: N818  no error
        pass

    def prepare(weights: MoEWeights, *, device: torch.device, keep_fp8: bool) -> None:
        seen.append((str(device), keep_fp8))
        raise Prepared

    monkeypatch.setattr(module, "_data_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(module, "quantize_stacked", lambda weight, **_: quantized(weight))
    monkeypatch.setattr(MoEWeights, "prepare", prepare)
    for model in models:
        with pytest.raises(Prepared):
            convert(model, "a8w4", device="cuda", keep_fp8=True, progress=False)
    assert seen == [("cuda", True)] * 2


def quantized(weight: torch.Tensor) -> MXTensor:
    """On the weight's own device, since this machine may have no other."""
    return quantize_stacked(
        weight, transposed=False, scale_rule=ScaleRule.RCEIL, device=weight.device
    )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options, said",
    [
        (dict(activation_format="bf16"), "convert: keep_fp8 — need activations in 8 or 4 bits, .*"),
        (dict(recipe=MXFP8Recipe()), "convert: keep_fp8 — need False with a recipe, got True; .*"),
        (dict(weight_format="nvfp4"), "prepare: keep_fp8 — need False for .*, got nvfp4; omit it"),
    ],
    ids=str,
)
def test_what_has_no_copy_is_refused(options: dict[str, Any], said: str) -> None:
    model = dense()
    with pytest.raises(ValueError, match=f"^{said}$"):
        convert(model, **{"activation_format": "a8w4", **options}, keep_fp8=True, progress=False)
    assert not mx_experts(model)


def test_other_devices_are_refused() -> None:
    model = dense()
    with pytest.raises(ValueError, match=r"^prepare: keep_fp8 — .* got ROW_MAJOR on cpu; 0 blocks"):
        convert(model, "a8w4", keep_fp8=True, progress=False)
    assert not mx_experts(model)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.usefixtures("hopper")
def test_a_layer_that_does_not_fold_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers before it are converted; a call without the option converts the others."""
    model, original = dense(), module.quantize_stacked
    last = model.model.layers[1].mlp.experts.down_proj

    def quantize_stacked(weight: torch.Tensor, **options: Any) -> Any:
        made = original(weight, **options)
        if weight is last:
            made.scale[0, 0, 0] += 30
        return made

    monkeypatch.setattr(module, "quantize_stacked", quantize_stacked)
    with pytest.raises(ValueError, match=r"^prepare: keep_fp8 — .* 1 blocks do not fold; prepare"):
        convert(model, "a8w4", keep_fp8=True, progress=False)
    assert layouts(model) == [COPY]
    convert(model, "a8w4", progress=False)
    assert layouts(model) == [COPY, Layout.ROW_MAJOR]
