"""From checkpoints to prepared weights and back: bits, names, peak memory."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mxpert
import mxpert.integrations.transformers as integration
from mxpert.formats.names import FORMAT_OF
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.integrations.models import convert as convert_module
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.integrations.models.expert_modules import StoredExperts
from mxpert.moe import stacked
from mxpert.testing.numerics import assert_exact, cosine
from support.gpt_oss import tiny_gpt_oss
from support.incomplete import copy_without
from support.memory import peak_bytes
from support.written_experts import state_of
from tests.integrations.families import FAMILIES, build, oracle_of

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.arange(24)[None]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def load(path: Path, implementation: str = "mxpert", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=implementation, attn_implementation="eager", **options
    )


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
        for name, tensor in state_of(out).items()
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
    before, after = state_of(dense), state_of(tmp_path)
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
    path = tiny_gpt_oss(tmp_path / "demo")

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
    stored, held = state_of(path), model.state_dict()
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
    with pytest.raises(ValueError, match=r"quantization_config\.dequantize — need False.*restore"):
        load(out, "mxpert", **options)
    with pytest.raises(ValueError, match=r"quantization_config\.dequantize — need False"):
        load(out, "mxpert", quantization_config={"quant_method": "mxfp4", "dequantize": True})


SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6}


def dense_layer_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.model.layers[0].mlp.experts.parameters())


def test_conversion_holds_one_layer_twice_at_most(monkeypatch) -> None:
    monkeypatch.setitem(stacked.CHUNK_ELEMENTS, "cpu", 1 << 14)  # small as the layers are
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
    stored = sum(tensor.nbytes for tensor in state_of(tmp_path).values())
    peak = peak_bytes(lambda: None, lambda _: load(tmp_path))
    assert peak < stored + layer, f"{peak} bytes; {stored} on disk, a dense layer has {layer}"
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    dequantised = peak_bytes(lambda: None, lambda _: load(tmp_path, "eager", **options))
    assert dequantised > stored + layer, "the measure would not see a dequantised model"


def test_other_families_load_within_their_own_size_and_one_layer(tmp_path, monkeypatch) -> None:
    """As above; their matrices are concatenated, which dequantisation and a copy would show."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    dense = build("mixtral", dtype=torch.bfloat16, **SIZES)
    layer = dense_layer_bytes(dense)
    dense.save_pretrained(tmp_path / "dense")
    convert(dense, progress=False).save_pretrained(tmp_path / "mxfp4")
    stored = sum(tensor.nbytes for tensor in state_of(tmp_path / "mxfp4").values())
    peak = peak_bytes(lambda: None, lambda _: load(tmp_path / "mxfp4"))
    assert peak < stored + layer, f"{peak} bytes; {stored} on disk, a dense layer has {layer}"
    assert peak_bytes(lambda: None, lambda _: load(tmp_path / "dense")) > stored + layer


KINDS = [
    f"{projection}_proj_{part}"
    for projection in ("gate_up", "down")
    for part in ("blocks", "scales", "bias")
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_of_experts_is_named(kind, saved, tmp_path) -> None:
    """Transformers leaves it uninitialised, so the model would compute with any memory."""
    name = f"model.layers.1.mlp.experts.{kind}"
    damaged = copy_without(saved["gpt_oss"][2], tmp_path / "damaged", name)
    with pytest.raises(ValueError, match=f"{name} — need these tensors of experts"):
        load(damaged)


def test_a_tensor_of_experts_in_another_shape_is_named(saved, tmp_path) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    damaged = copy_without(saved["mixtral"][2], tmp_path / "damaged")
    file = damaged / "model.safetensors"
    tensors = load_file(file)
    ends = re.compile(r".*layers\.0\..*experts\.down_proj_scales")
    (key,) = filter(ends.fullmatch, tensors)
    save_file(tensors | {key: tensors[key][:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} — need these tensors of experts"):
        load(damaged, ignore_mismatched_sizes=True)


def test_missing_dense_experts_are_named(saved, tmp_path) -> None:
    """Transformers fills them with random numbers."""
    name = "model.layers.1.mlp.experts.down_proj"
    damaged = copy_without(saved["gpt_oss"][1], tmp_path / "damaged", name)
    with pytest.raises(ValueError, match=f"{name} — need these tensors of experts"):
        load(damaged)


PLAIN = {"mixtral": transformers.MixtralForCausalLM, "gpt_oss": transformers.GptOssForCausalLM}


def test_a_quantised_folder_needs_no_option(saved, tmp_path) -> None:
    """Its config names mxpert; a class of Transformers reads the config itself."""
    model, dense, out = saved["mixtral"]
    quantize_checkpoint(dense, tmp_path / "written")
    for path in (out, tmp_path / "written"):
        for model_class in (transformers.AutoModelForCausalLM, PLAIN["mixtral"]):
            plain = model_class.from_pretrained(path, attn_implementation="eager")
            assert_exact(logits(plain), logits(model), "logits")


@pytest.mark.parametrize("name", ["eager", "grouped_mm", None])
def test_a_quantised_folder_says_which_option_reads_it(name, saved, tmp_path) -> None:
    """With another implementation, or in a folder whose config does not name mxpert yet."""
    _, _, out = saved["mixtral"]
    folder = copy_without(out, tmp_path / "older")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config.pop("experts_implementation") == "mxpert"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for path in (out, folder) if name else (folder,):
        for model_class in (transformers.AutoModelForCausalLM, PLAIN["mixtral"]):
            with pytest.raises(
                mxpert.UnsupportedError,
                match=r'need experts_implementation="mxpert".*restore\(model\)',
            ):
                model_class.from_pretrained(path, experts_implementation=name)


WITHOUT_MXPERT_SAYS = """
import sys, transformers
options = dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
except ValueError as error:
    print(error)
assert "mxpert" not in sys.modules
"""


def test_without_mxpert_transformers_names_it(saved) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MXPERT_SAYS, str(saved["mixtral"][2])],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert 'experts_implementation="mxpert"` is not supported' in done.stdout, done.stderr


def test_the_saved_config_is_of_transformers_kind(saved) -> None:
    for family in FAMILIES:
        model, _, out = saved[family]
        for each in (model, load(out)):
            found = each.config.quantization_config
            assert isinstance(found, transformers.Mxfp4Config)
            assert found.quant_method == "mxfp4"
            assert "lm_head" in found.modules_to_not_convert
        assert load(out).quantization_method == "mxfp4"
        read = transformers.AutoConfig.from_pretrained(out).quantization_config
        assert read == found.to_dict() | {"mxpert": found.mxpert}


def test_options_of_other_quantisers_are_refused_for_mxfp4(saved) -> None:
    _, _, out = saved["mixtral"]
    plain = load(out, quantization_config=transformers.Mxfp4Config())
    assert_exact(logits(plain), logits(saved["mixtral"][0]), "logits")
    with pytest.raises(ValueError, match=r"quantization_config — need none, .*got FineGrainedFP8"):
        load(out, quantization_config=transformers.FineGrainedFP8Config())


def test_loaded_models_can_be_copied_and_pickled(saved, tmp_path) -> None:
    model = load(saved["gpt_oss"][2])
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert_exact(logits(again), logits(model), "logits")
        assert again.config.quantization_config.mxpert == model.config.quantization_config.mxpert


LEFT = "model.layers.1.mlp.experts"


@EVERY_FAMILY
@pytest.mark.parametrize("given", [LEFT, r"model\.layers\.1\.mlp"])
def test_modules_to_not_convert_stay_dense(given, family, saved, tmp_path) -> None:
    """From a bf16 checkpoint, through a saved one, and back to a dense model."""
    dense = saved[family][1]
    options = transformers.Mxfp4Config(modules_to_not_convert=[given])
    mixed = load(dense, quantization_config=options)
    layers = {name: type(each).__name__ for name, each in mixed.named_modules()}
    first = "model.layers.2.mlp.experts" if family == "deepseek_v3" else LEFT.replace("1", "0")
    assert (layers[first], layers[LEFT] != "MXExperts") == ("MXExperts", True)
    plain = load(dense, "eager")
    wanted = oracle_of(plain)
    wanted.get_submodule(LEFT).load_state_dict(plain.get_submodule(LEFT).state_dict())
    assert cosine(logits(mixed), logits(wanted)) > 0.999
    assert LEFT in mixed.config.quantization_config.modules_to_not_convert
    assert len(mx_experts(convert(mixed, "bf16"))) == 1, "convert respects what was asked for"
    mixed.save_pretrained(tmp_path / "mixed")
    again = load(tmp_path / "mixed")
    assert [type(each).__name__ for each in again.modules()] == list(layers.values())
    assert_exact(logits(again), logits(mixed), "logits")
    restored = restore(again)
    assert cosine(logits(restored), logits(wanted)) > 0.999
    assert len(mx_experts(convert(restored, progress=False))) == 2


def test_a_restored_model_can_be_trained_by_transformers(saved) -> None:
    """Nothing is left that names it quantised."""
    model = restore(load(saved["mixtral"][2]))
    assert not hasattr(model, "hf_quantizer")
    assert not getattr(model, "is_quantized", False)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.config._experts_implementation in ("grouped_mm", "eager")
    assert "experts_implementation" not in model.config.to_dict()
    model.train()(IDS, labels=IDS).loss.backward()


@EVERY_FAMILY
def test_set_experts_implementation_converts(family, saved) -> None:
    model, dense, _ = saved[family]
    plain = load(dense, "eager")
    plain.set_experts_implementation("mxpert_a8w4")
    assert {experts.activation_format for experts in mx_experts(plain)} == {"mxfp8"}
    plain.set_experts_implementation("mxpert")
    assert_exact(logits(plain), logits(model), "logits")
    with pytest.raises(mxpert.UnsupportedError, match=r"got 'eager'.*restore\(model\)"):
        plain.set_experts_implementation("eager")
    restore(plain).set_experts_implementation("eager")
    assert not mx_experts(plain)
    assert_exact(logits(plain), logits(oracle_of(load(dense, "eager"))), "logits")


def test_set_experts_implementation_says_at_once_what_it_cannot() -> None:
    model = build("mixtral", hidden_act="relu")
    before = logits(model)
    with pytest.raises(mxpert.UnsupportedError, match="with ReLU"):
        model.set_experts_implementation("mxpert")
    assert model.config._experts_implementation == "eager"
    assert_exact(logits(model), before, "logits")


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
