"""Models of Transformers from every container: bits of the experts, the dense rest as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mxpert
from mxpert.errors import UnsupportedError
from mxpert.integrations.models import convert as convert_module
from mxpert.integrations.models.convert import convert, mx_experts, restore
from mxpert.integrations.models.expert_modules import StoredExperts
from mxpert.testing.numerics import assert_exact
from support.expert_containers import EXACT_NVFP4, KINDS, MX_KINDS, edit, store_experts
from support.memory import peak_bytes
from support.written_experts import state_of
from tests.integrations.families import EXPERTS, build
from tests.integrations.test_transformers_loading import dense_layer_bytes, load, logits

Tensors = dict[str, torch.Tensor]
CT, QUARK, MODELOPT = ("compressed-tensors mxfp4-pack-quantized", "Quark OCP MX", "ModelOpt NVFP4")
BESIDE_DENSE = tuple(name for name in KINDS if name not in ("DeepSeek-V4", "MiMo"))
"""Containers whose other layers may be dense; DeepSeek-V4's and MiMo's are FP8."""
MXFP4 = tuple(name for name in BESIDE_DENSE if name in MX_KINDS)
OTHER = {name: KINDS[name] for name in BESIDE_DENSE if name not in MX_KINDS}
OTHER |= {f"exact {name}": kind for name, kind in EXACT_NVFP4.items()}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """bf16 checkpoints in their published naming, one matrix per expert."""
    root = tmp_path_factory.mktemp("dense")
    for family in FAMILIES:
        build(family, dtype=torch.bfloat16).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def stored(dense: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root, made = tmp_path_factory.mktemp("stored"), {}

    def write(family: str, kind: str) -> Path:
        if (family, kind) not in made:
            out = root / f"{family}-{len(made)}"
            made[family, kind] = store_experts(dense[family], out, OTHER.get(kind, kind))
        return made[family, kind]

    return write


@pytest.mark.parametrize("kind", MXFP4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_bits_of_its_container(
    family: str, kind: str, dense: dict[str, Path], stored: Any, monkeypatch: Any
) -> None:
    wanted = convert(load(dense[family], "eager"), progress=False)
    path = stored(family, kind)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("dequantised or quantised on the way")

    for name in ("dequantize_blocks", "quantize_blocks"):
        monkeypatch.setattr(f"mxpert.formats.codec.{name}", refuse)
    monkeypatch.setattr(convert_module, "quantize_stacked", refuse)
    model, info = load(path, output_loading_info=True)
    monkeypatch.undo()
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(mx_experts(model)) == 2
    assert not any(isinstance(module, StoredExperts) for module in model.modules())
    assert not model.training
    assert_exact(logits(model), logits(wanted), "logits")
    read = dict(mxpert.load_expert_weights(path))
    for experts, weights in zip(mx_experts(model), read.values(), strict=True):
        plain = experts.weights.unprepare()
        assert_exact(plain.dequantize()[0], weights.dequantize()[0], "gate_up_proj")
        assert torch.equal(plain.down_proj.qdata, weights.down_proj.qdata)
        assert torch.equal(plain.down_proj.scale, weights.down_proj.scale)


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_model_in_another_format_has_its_values(
    family: str, kind: str, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dense model in float32 with the values that the container holds."""
    path = stored(family, kind)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("dequantised on the way")

    monkeypatch.setattr("mxpert.formats.weight_tensor.WeightTensor.dequantize", refuse)
    monkeypatch.setattr("mxpert.formats.codec.dequantize_blocks", refuse)
    model, info = load(path, output_loading_info=True)
    monkeypatch.undo()
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    read = dict(mxpert.load_expert_weights(path))
    for experts, weights in zip(mx_experts(model), read.values(), strict=True):
        assert experts.weights.weight_format == weights.weight_format == OTHER[kind].format
        states = [each.unprepare().state_dict() for each in (experts.weights, weights)]
        assert states[0].keys() == states[1].keys()
        for name in states[0].keys() - {"_extra_state"}:
            assert torch.equal(states[0][name], states[1][name]), name
    found = logits(model).double()
    with pytest.raises(UnsupportedError, match=r"^save_pretrained: experts — need experts in MXF"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    restore(model)
    for layer, weights in zip(model.model.layers[-len(read) :], read.values(), strict=True):
        gate_up, down = weights.dequantize(torch.bfloat16)
        assert torch.equal(layer.mlp.experts.gate_up_proj, gate_up)
        assert torch.equal(layer.mlp.experts.down_proj, down)
    model.save_pretrained(tmp_path / "dense")
    wanted = logits(load(tmp_path / "dense", "eager")).double()
    error = (found - wanted).norm() / wanted.norm()
    assert float(error) < 24 * 2.0**-9  # both round to bf16 after a dozen steps


def test_a_planted_swap_of_gate_and_up_is_seen(stored: Any, dense: Any, tmp_path: Path) -> None:
    wanted = logits(convert(load(dense["qwen3_moe"], "eager"), progress=False))
    path = shutil.copytree(stored("qwen3_moe", CT), tmp_path / "swapped")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name and ".gate_proj." in name]:
        other = name.replace(".gate_proj.", ".up_proj.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        assert_exact(logits(load(path)), wanted, "logits")


def test_other_formats_of_activations(stored: Any, dense: Any) -> None:
    model = load(stored("qwen3_moe", MODELOPT), "mxpert_a8w4")
    assert {experts.activation_format for experts in mx_experts(model)} == {"mxfp8"}
    wanted = convert(load(dense["qwen3_moe"], "eager"), "mxfp8", progress=False)
    assert_exact(logits(model), logits(wanted), "logits")


@pytest.mark.parametrize("kind", [kind for kind in OTHER if kind.startswith("exact")])
def test_nvfp4_is_rounded_on_request(kind: str, stored: Any) -> None:
    path = stored("qwen3_moe", kind)
    model = load(path, "mxpert_a8w4", weight_rounding="e4m3")
    read = dict(mxpert.load_expert_weights(path, weight_rounding="e4m3"))
    for experts, weights in zip(mx_experts(model), read.values(), strict=True):
        assert experts.weights.weight_format == "mxfp8_e4m3"
        plain = experts.weights.unprepare()
        assert torch.equal(plain.gate_up_proj.qdata, weights.gate_up_proj.qdata)
        assert torch.equal(plain.down_proj.scale, weights.down_proj.scale)
        assert experts.weights.rounding_certificates == weights.rounding_certificates
        assert "rounded: nvfp4 rounded to e4m3" in repr(experts.weights)
    assert not torch.equal(logits(model), logits(load(path, "mxpert_a8w4")))


def test_casts_are_not_rounded(stored: Any) -> None:
    path = stored("qwen3_moe", MODELOPT)
    found = logits(load(path, weight_rounding="e4m3"))
    assert_exact(found, logits(load(path)), "logits")


@pytest.mark.parametrize("kind", ["dense", "mxfp4", CT, "AWQ"])
def test_rounding_another_format_is_refused(
    kind: str, stored: Any, dense: Any, tmp_path: Path
) -> None:
    path = dense["qwen3_moe"] if kind in ("dense", "mxfp4") else stored("qwen3_moe", kind)
    if kind == "mxfp4":
        load(path).save_pretrained(tmp_path / kind)
        path = tmp_path / kind
    said = {"dense": "dense weights", CT: "MXFP4", "AWQ": "INT4"}.get(kind, kind)
    match = f"^from_pretrained: weight_rounding — need None, since .*, got {said} "
    with pytest.raises(ValueError, match=match):
        load(path, weight_rounding="e4m3")


def test_rounding_is_an_option_of_mxpert_alone(stored: Any, dense: Any) -> None:
    with pytest.raises(ValueError, match=r"^from_pretrained: weight_rounding — need experts_impl"):
        load(dense["qwen3_moe"], "eager", weight_rounding="e4m3")
    with pytest.raises(ValueError, match="need None or 'e4m3', got 'e5m2'"):
        load(stored("qwen3_moe", f"exact {MODELOPT}"), weight_rounding="e5m2")


def test_modelopts_own_file_is_found(stored: Any, tmp_path: Path) -> None:
    path = shutil.copytree(stored("qwen3_moe", MODELOPT), tmp_path / "own")
    edit(path, quantization_config=None)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (path / "hf_quant_config.json").write_text(json.dumps(own), encoding="utf-8")
    assert_exact(logits(load(path)), logits(load(stored("qwen3_moe", MODELOPT))), "logits")


def test_a_model_class_takes_values_of_the_config_too(stored: Any) -> None:
    path = stored("qwen3_moe", CT)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        path, experts_implementation="mxpert", attn_implementation="eager", num_hidden_layers=1
    )
    assert len(mx_experts(model)) == 1
    assert model.config.num_hidden_layers == 1
    assert model.dtype == torch.bfloat16
    config = transformers.AutoConfig.from_pretrained(path)
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(
        path, config=config, experts_implementation="mxpert", dtype=torch.float32
    )
    assert again.dtype == torch.float32
    assert config.quantization_config["quant_method"] == "compressed-tensors"  # the caller's own


def test_a_loaded_model_saves_and_restores(stored: Any, tmp_path: Path) -> None:
    model = load(stored("mixtral", QUARK))
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text("utf-8"))
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert_exact(logits(load(tmp_path / "saved")), logits(model), "logits")
    restore(model)
    assert not hasattr(model, "hf_quantizer")
    model.save_pretrained(tmp_path / "dense")
    again = convert(load(tmp_path / "dense", "eager"), progress=False)
    assert_exact(logits(again), logits(load(tmp_path / "saved")), "logits")


def test_dense_experts_of_a_layer_stay_dense(dense: Any, tmp_path: Path) -> None:
    kept = "model.layers.0.mlp.experts"
    path = store_experts(
        dense["qwen3_moe"], tmp_path / "mixed", QUARK, lambda name: name.startswith(kept)
    )
    stated = KINDS[QUARK].config["quantization_config"]
    edit(path, quantization_config=stated | {"exclude": [*stated["exclude"], f"{kept}*"]})
    model = load(path)
    assert len(mx_experts(model)) == 1
    experts = model.model.layers[0].mlp.experts
    wanted = load(dense["qwen3_moe"], "eager").model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj, wanted.gate_up_proj)
    logits(model)
    tensors = load_file(path / "model.safetensors")
    for expert in range(EXPERTS):
        del tensors[f"{kept}.{expert}.down_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^from_pretrained: {kept}\.down_proj — need these tens"):
        load(path)


def test_gpt_oss_with_a_matrix_and_a_bias_for_each_expert(tmp_path: Path) -> None:
    """As llm-compressor takes its experts apart; the model's own rows alternate gate and up."""
    model = build("gpt_oss", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    tensors = state_of(tmp_path / "dense")
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        path, _, projection = name.rpartition(".")
        weights, biases = tensors.pop(name).transpose(1, 2), tensors.pop(f"{name}_bias")
        steps = {"gate_proj": (0, 2), "up_proj": (1, 2)}
        for part, (first, step) in (
            steps if projection == "gate_up_proj" else {"down_proj": (0, 1)}
        ).items():
            for expert in range(EXPERTS):
                prefix = f"{path}.{expert}.{part}"
                tensors[f"{prefix}.weight"] = weights[expert, first::step].contiguous()
                tensors[f"{prefix}.bias"] = biases[expert, first::step].contiguous()
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    path = store_experts(tmp_path / "dense", tmp_path / "stored", CT)
    found, wanted = load(path), convert(model, progress=False)
    assert_exact(logits(found), logits(wanted), "logits")
    for mine, theirs in zip(mx_experts(found), mx_experts(wanted), strict=True):
        rows = mine.restored(), theirs.restored()
        assert rows[0].keys() == rows[1].keys()
        for name, tensor in rows[0].items():
            assert torch.equal(tensor, rows[1][name]), name


def test_modelopts_file_of_a_dense_checkpoint_changes_nothing(dense: Any, tmp_path: Path) -> None:
    """Its experts are quantised as they are loaded, as without the file."""
    path = shutil.copytree(dense["qwen3_moe"], tmp_path / "dense")
    own = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(own), encoding="utf-8")
    assert_exact(logits(load(path)), logits(load(dense["qwen3_moe"])), "logits")


def test_a_model_loads_within_its_own_size_and_one_layer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_hidden_layers=6)
    model = build("qwen3_moe", dtype=torch.bfloat16, **sizes)
    layer = dense_layer_bytes(model)
    model.save_pretrained(tmp_path / "dense")
    path = store_experts(tmp_path / "dense", tmp_path / "stored", CT)
    stored = sum(tensor.nbytes for tensor in state_of(path).values())
    mapped = (path / "model.safetensors").stat().st_size
    peak = peak_bytes(lambda: None, lambda _: load(path), mapped=mapped)
    assert peak < stored + layer, f"{peak} bytes; {stored} on disk, a dense layer has {layer}"
    mapped = (tmp_path / "dense" / "model.safetensors").stat().st_size
    whole = peak_bytes(lambda: None, lambda _: load(tmp_path / "dense"), mapped=mapped)
    assert whole > stored + layer, "the measure would not see dense experts"


# ---- what is refused ----------------------------------------------------------------------------


def change(path: Path, out: Path, function: Callable[[Tensors], object]) -> Path:
    copy = shutil.copytree(path, out)
    tensors = load_file(copy / "model.safetensors")
    function(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def quantized_attention(tensors: Tensors) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def no_global_scale(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.5.down_proj.weight_scale_2"].zero_()


REFUSED: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "quantised attention": (
        CT,
        quantized_attention,
        r"layers\.1\.self_attn\.q_proj\.weight — need dense layers in BF16 or F16 or F32 beside "
        r"the experts, got F8_E4M3 .*; mxpert\.load_expert_weights reads its experts",
    ),
    "a missing tensor": (
        CT,
        lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight_scale"),
        r"layers\.1\.mlp\.experts\.5\.up_proj\.weight_scale — need this tensor in the checkpoint",
    ),
    "a global scale of zero": (
        f"exact {MODELOPT}",
        no_global_scale,
        r"layers\.1\.mlp\.experts\.5\.down_proj\.weight_scale_2 — need a positive number, got 0",
    ),
    "words in another order": (
        "GPTQ",
        lambda tensors: tensors["model.layers.1.mlp.experts.5.down_proj.g_idx"].add_(1),
        r"layers\.1\.mlp\.experts\.5\.down_proj\.g_idx — need k // 32, got another order",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(case: str, stored: Any, tmp_path: Path) -> None:
    kind, damage, expected = REFUSED[case]
    path = change(stored("qwen3_moe", kind), tmp_path / "damaged", damage)
    with pytest.raises(
        (ValueError, UnsupportedError), match=f"^from_pretrained: [^\n]*{expected}[^\n]*$"
    ):
        load(path)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"quant_method": "gptq", "bits": 8}, "bits — need 4, got 8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"got ModelOpt FP8 \(FP8\)"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"got FP8 in blocks \(FP8\)"),
    ],
    ids=["gptq", "modelopt", "fp8"],
)
def test_other_formats_are_refused_by_name(
    stated: dict[str, Any], expected: str, stored: Any, tmp_path: Path
) -> None:
    path = shutil.copytree(stored("qwen3_moe", MODELOPT), tmp_path / "other")
    edit(path, quantization_config=stated)
    with pytest.raises(UnsupportedError, match=f"^from_pretrained: .*{expected}"):
        load(path)


def test_a_checkpoint_of_another_size_is_refused(stored: Any, tmp_path: Path) -> None:
    path = shutil.copytree(stored("qwen3_moe", CT), tmp_path / "other")
    edit(path, moe_intermediate_size=96)
    with pytest.raises(
        ValueError, match=r"E, H, F — need \(8, 128, 96\), as the model, got \(8, 1"
    ):
        load(path)


def test_experts_of_the_deepseek_form_are_read_where_the_rest_is_dense(
    dense: Any, tmp_path: Path
) -> None:
    path = store_experts(dense["qwen3_moe"], tmp_path / "deepseek", "DeepSeek-V4")
    wanted = convert(load(dense["qwen3_moe"], "eager"), progress=False)
    assert_exact(logits(load(path)), logits(wanted), "logits")


WITHOUT_KERNELS = """
import sys
sys.modules["kernels"] = None  # an import of it fails
import torch, transformers, mxpert
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], experts_implementation="mxpert", attn_implementation="eager")
with torch.no_grad():
    torch.save(model(torch.arange(24)[None]).logits, sys.argv[2])
"""


def test_no_kernels_and_no_compressed_tensors_are_needed(stored: Any, tmp_path: Path) -> None:
    path = stored("qwen3_moe", CT)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNELS, str(path), str(tmp_path / "y.pt")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_exact(torch.load(tmp_path / "y.pt"), logits(load(path)), "logits")
