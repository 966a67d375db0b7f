"""From checkpoints to prepared weights and back: bits, names, peak memory."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import mxpert
import mxpert.integrations.transformers as integration
from mxpert import modules
from mxpert.formats.names import FORMAT_OF
from mxpert.integrations.checkpoints.gpt_oss import write_demo_checkpoint
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.models import convert as convert_module
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.integrations.models.expert_modules import StoredExperts
from mxpert.testing.numerics import assert_exact
from support.memory import peak_bytes

from .families import FAMILIES, build, oracle_of

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.arange(24)[None]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def load(path: Path, implementation: str = "mxpert", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=implementation, attn_implementation="eager", **options
    )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, Path]]:
    """By family: a converted model, the bf16 checkpoint it came from, and what it saved."""
    root, made = tmp_path_factory.mktemp("saved"), {}
    for family in FAMILIES:
        dense, out = root / f"{family}-bf16", root / f"{family}-mxfp4"
        build(family, dtype=torch.bfloat16).save_pretrained(dense)
        model = load(dense)
        model.save_pretrained(out)
        made[family] = model, dense, out
    return made


@EVERY_FAMILY
def test_one_line_converts_a_bf16_checkpoint(family, saved) -> None:
    model, dense, _ = saved[family]
    by_hand = convert(load(dense, "eager"), progress=False)
    assert len(mx_experts(model)) == 2
    assert not any(
        "experts.gate_up_proj" in name or "experts.down_proj" in name
        for name, _ in model.named_parameters()
        if "shared" not in name
    )
    assert_exact(logits(model), logits(by_hand), "logits")


@EVERY_FAMILY
def test_a_saved_model_holds_the_published_tensors_and_loads_again(family, saved) -> None:
    model, _, out = saved[family]
    found = {
        name.rpartition(".")[2]: tensor
        for name, tensor in tensors_of(out).items()
        if ".experts." in name
    }
    kinds = {"blocks", "scales"} | ({"bias"} if family == "gpt_oss" else set())
    assert found.keys() == {
        f"{name}_{kind}" for name in ("gate_up_proj", "down_proj") for kind in kinds
    }
    assert found["gate_up_proj_blocks"].shape == (8, 128, 4, 16)
    assert found["down_proj_scales"].shape == (8, 128, 2)
    stated = json.loads((out / "config.json").read_text("utf-8"))["quantization_config"]
    assert stated["quant_method"] == "mxfp4"
    assert stated["mxpert"]["gate_up_order"] == "interleaved"
    again = load(out)
    assert_exact(logits(again), logits(model), "logits")
    assert again.state_dict().keys() == model.state_dict().keys()


@EVERY_FAMILY
def test_a_checkpoint_of_mxpert_quantize_is_the_same_model(family, saved, tmp_path) -> None:
    model, dense, _ = saved[family]
    assert quantize_checkpoint(dense, tmp_path / "out").verified
    loaded = load(tmp_path / "out", "mxpert_mxfp8")
    assert {experts.activation_format for experts in mx_experts(loaded)} == {"mxfp8"}
    assert_exact(logits(loaded), logits(convert(copy.deepcopy(model), "mxfp8")), "logits")


@EVERY_FAMILY
def test_a_restored_model_is_an_ordinary_checkpoint(family, saved, tmp_path) -> None:
    model, dense, _ = saved[family]
    restore(copy.deepcopy(model)).save_pretrained(tmp_path)
    before, after = tensors_of(dense), tensors_of(tmp_path)
    assert {name: tensor.shape for name, tensor in before.items()} == {
        name: tensor.shape for name, tensor in after.items()
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager", attn_implementation="eager"
    )
    assert_exact(logits(plain), logits(oracle_of(load(dense, "eager"))), "logits")


WITHOUT_MXPERT = """
import sys, torch, transformers
options = dict(quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16,
               attn_implementation="eager", experts_implementation="eager")
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
assert "mxpert" not in sys.modules
with torch.no_grad():
    torch.save(model(torch.arange(24)[None]).logits, sys.argv[2])
"""


def test_transformers_reads_a_saved_gpt_oss_without_mxpert(saved, tmp_path) -> None:
    model, _, out = saved["gpt_oss"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MXPERT, str(out), str(tmp_path / "y.pt")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    restored = restore(copy.deepcopy(model))
    restored.set_experts_implementation("eager")
    assert_exact(torch.load(tmp_path / "y.pt"), logits(restored), "logits")


def test_published_gpt_oss_blocks_are_taken_as_they_are(tmp_path, monkeypatch) -> None:
    path = write_demo_checkpoint(
        tmp_path / "demo",
        hidden_size=64,
        intermediate_size=96,
        num_experts=4,
        top_k=2,
        num_layers=2,
    )

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("dequantised or quantised on the way")

    for name in (
        "transformers.integrations.mxfp4._convert_moe_packed_tensors",
        "mxpert.formats.codec.dequantize_blocks",
        "mxpert.formats.codec.quantize_blocks",
    ):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr(convert_module, "quantize_stacked", refuse)
    model = load(path)
    stored, held = tensors_of(path), model.state_dict()
    for name in (name for name in stored if ".experts." in name):
        assert torch.equal(stored[name], held[name]), name
    assert not model.training
    assert not any(isinstance(module, StoredExperts) for module in model.modules())
    assert model.get_memory_footprint() < 1.05 * sum(t.nbytes for t in stored.values())


def test_other_implementations_read_mxfp4_as_before(saved) -> None:
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    _, _, out = saved["gpt_oss"]
    plain = load(out, "eager", **options)
    assert not mx_experts(plain)
    assert plain.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    converted = load(out, "mxpert", **options)  # dequantised because it was asked for, then ours
    assert_exact(logits(converted), logits(load(out)), "logits")


SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6}


def dense_layer_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.model.layers[0].mlp.experts.parameters())


def test_conversion_holds_one_layer_twice_at_most(monkeypatch) -> None:
    monkeypatch.setitem(modules.CHUNK_ELEMENTS, "cpu", 1 << 14)  # small as the layers are
    layer = dense_layer_bytes(build("mixtral", **SIZES)) // 2
    peak = peak_bytes(
        lambda: build("mixtral", dtype=torch.bfloat16, **SIZES),
        lambda model: convert(model, progress=False),
    )
    assert 0 < peak < layer, f"{peak} bytes above the model, a layer has {layer}"


def test_mxfp4_loads_within_its_own_size_and_one_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    dense = build("gpt_oss", dtype=torch.bfloat16, **SIZES)
    layer = dense_layer_bytes(dense)
    convert(dense, progress=False).save_pretrained(tmp_path)
    stored = sum(tensor.nbytes for tensor in tensors_of(tmp_path).values())
    peak = peak_bytes(lambda: None, lambda _: load(tmp_path))
    assert peak < stored + layer, f"{peak} bytes; {stored} on disk, a dense layer has {layer}"
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    dequantised = peak_bytes(lambda: None, lambda _: load(tmp_path, "eager", **options))
    assert dequantised > stored + layer, "the measure would not see a dequantised model"


def test_state_dicts_load_and_devices_change(saved) -> None:
    model, dense, _ = saved["gpt_oss"]
    other = convert(load(dense, "eager"), progress=False)
    for experts in mx_experts(other):
        experts._hold(
            mxpert.MoEWeights(
                *(
                    mxpert.quantize(torch.zeros(projection.shape), "mxfp4")
                    for projection in (experts.weights.gate_up_proj, experts.weights.down_proj)
                ),
                experts.weights.gate_up_bias,
                experts.weights.down_bias,
                gate_up_order=experts.weights.gate_up_order,
            )
        )
    assert not torch.equal(logits(other), logits(model))
    outcome = other.load_state_dict(model.state_dict())
    assert not outcome.missing_keys
    assert not outcome.unexpected_keys
    assert_exact(logits(other), logits(model), "logits")
    assert_exact(logits(other.to("cpu")), logits(model), "logits")
    incomplete = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith("0.mlp.experts.down_proj_scales")
    }
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.mlp\.experts\.down_proj_sc"):
        other.load_state_dict(incomplete)


def test_registration_happens_once() -> None:
    first = transformers.PreTrainedModel.from_pretrained.__func__
    integration.register()
    assert transformers.PreTrainedModel.from_pretrained.__func__ is first
    assert set(integration.IMPLEMENTATIONS) == {"mxpert", *(f"mxpert_{name}" for name in FORMAT_OF)}
