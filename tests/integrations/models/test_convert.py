"""convert and restore leave nothing half done, and nothing changed that is not theirs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers

from mxpert import ScaleRule
from mxpert.integrations.models import convert as module
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.testing.numerics import assert_exact, cosine
from mxpert.training import MXFP8Recipe
from tests.integrations.families import build, config_of

IDS = torch.arange(16)[None]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


class OutOfMemoryError(RuntimeError):
    """What an allocator raises in the middle of a layer."""


def fail_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the quantisation of a matrix fail, counted from 1; a layer has two."""
    original, calls = module.quantize_stacked, []

    def quantize_stacked(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise OutOfMemoryError
        return original(*arguments, **options)

    monkeypatch.setattr(module, "quantize_stacked", quantize_stacked)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_failed_conversion_can_be_saved_and_ended(call, family, monkeypatch, tmp_path) -> None:
    """Layers are converted or as they were, and a second call converts the rest."""
    model = build(family, dtype=torch.bfloat16)
    wanted = convert(copy.deepcopy(model), "mxfp8", scale_rule=ScaleRule.FLOOR, progress=False)
    names = {name for name, _ in model.named_parameters()}
    with monkeypatch.context() as patch:
        fail_at(patch, call)
        with pytest.raises(OutOfMemoryError):
            convert(model, scale_rule=ScaleRule.FLOOR, progress=False)
    done = (call - 1) // 2
    assert len(mx_experts(model)) == done
    dense = {name for name in names if ".experts." in name and ".0." not in name[: 20 * done]}
    assert dense <= {name for name, _ in model.named_parameters()}, "a layer lost its weights"
    between = logits(model)
    model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert ("quantization_config" in stated) == bool(done)
    if done:
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, experts_implementation="mxpert", attn_implementation="eager"
        )
        assert len(mx_experts(again)) == done
        assert cosine(logits(again), between) > 0.9999  # dense layers run another implementation
    convert(model, "mxfp8", scale_rule=ScaleRule.FLOOR, progress=False)
    assert len(mx_experts(model)) == 2
    assert_exact(logits(model), logits(wanted), "logits")
    assert_exact(logits(restore(model)), logits(restore(wanted)), "logits")


def test_a_failed_recipe_can_be_ended(monkeypatch) -> None:
    model = build("mixtral")
    make = module.TrainableExperts.__init__

    def fails(self: Any, found: Any, *rest: Any) -> None:
        if found.name == "model.layers.1.mlp.experts":
            raise OutOfMemoryError
        make(self, found, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module.TrainableExperts, "__init__", fails)
        with pytest.raises(OutOfMemoryError):
            convert(model, recipe=MXFP8Recipe())
    convert(model, recipe=MXFP8Recipe())
    kinds = [type(layer.mlp.experts).__name__ for layer in model.model.layers]
    assert kinds == ["TrainableExperts", "TrainableExperts"]


def test_a_recipe_does_not_end_another_conversion(monkeypatch) -> None:
    model = build("mixtral")
    with monkeypatch.context() as patch:
        fail_at(patch, 3)
        with pytest.raises(OutOfMemoryError):
            convert(model, progress=False)
    with pytest.raises(ValueError, match=r"recipe — need .*restore\(model\) first"):
        convert(model, recipe=MXFP8Recipe())


def test_the_meta_device_is_refused_before_a_layer_changes() -> None:
    model = build("mixtral")
    before, names = logits(model), [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="convert: device — need a device that holds data"):
        convert(model, device="meta", progress=False)
    assert [name for name, _ in model.named_parameters()] == names
    assert_exact(logits(model), before, "logits")


@pytest.mark.parametrize("recipe", [None, MXFP8Recipe()], ids=["mxfp4", "recipe"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_restored_parameters_require_what_they_did(family, recipe) -> None:
    model = build(family)
    model.requires_grad_(False)
    for name, parameter in model.model.layers[1].named_parameters():
        parameter.requires_grad_(name.endswith(("down_proj", "gate_up_proj_bias")))
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert set(wanted.values()) == {True, False}
    options = {} if recipe is None else {"recipe": recipe}
    restored = restore(convert(model, progress=False, **options))
    found = {name: parameter.requires_grad for name, parameter in restored.named_parameters()}
    assert found == wanted


@pytest.mark.parametrize("marked_by", ["convert", "from_pretrained"])
def test_a_shared_config_stays_the_other_models(marked_by, tmp_path) -> None:
    config = config_of("mixtral")
    config._experts_implementation = "eager"
    first, second = (transformers.MixtralForCausalLM(config).bfloat16() for _ in range(2))
    second.save_pretrained(tmp_path / "dense")
    before = config.to_dict()
    if marked_by == "convert":
        first = convert(first, progress=False)
    else:
        first = transformers.MixtralForCausalLM.from_pretrained(
            tmp_path / "dense", config=config, experts_implementation="mxpert"
        )
    assert config.to_dict() == before == second.config.to_dict()
    assert second.config is config
    second.save_pretrained(tmp_path / "second")
    stated = json.loads((tmp_path / "second" / "config.json").read_text("utf-8"))
    assert not {"quantization_config", "experts_implementation"} & set(stated)
    configs = {id(each.config) for each in first.modules() if hasattr(each, "config")}
    assert configs == {id(first.config)}, "all parts of a model have one config"
    restore(first).set_experts_implementation("grouped_mm")
    configured = [each for each in first.modules() if hasattr(each, "config")]
    assert {each.config._experts_implementation for each in configured} == {"grouped_mm"}
    assert config._experts_implementation == "eager"
