"""Models of Transformers from DeepSeek-V4's and MiMo's containers, whose other layers are FP8."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mxpert
from mxpert.errors import UnsupportedError
from mxpert.integrations.models.convert import convert, mx_experts
from mxpert.testing.numerics import assert_exact
from support.expert_containers import KINDS, store_experts
from tests.integrations.families import EXPERTS, build
from tests.integrations.test_transformers_loading import load, logits

_LAYERS = {
    "MiMo": r"self_attn\.[qkvo]_proj\.weight$",
    "DeepSeek-V4": r"(attn\.w(q_a|q_b|kv|o_a|o_b)|shared_experts\.w\d)\.weight$",
}
"""Weights that these checkpoints have in FP8."""
BESIDE_FP8 = tuple(_LAYERS)


def in_fp8(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a matrix by their suffixes, and its value by DeepSeek's formula, in bfloat16.

    One scale for 128 × 128 values: float32 in MiMo's, a power of two as E8M0 in DeepSeek-V4's.
    """
    amax = weight.float().abs().max()
    scale = amax / 448 * 1.01 if name == "MiMo" else torch.exp2((amax / 448).log2().ceil())
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    blocks = scale.expand(*(-(-size // 128) for size in weight.shape)).contiguous()
    stored = {"weight_scale_inv": blocks}
    if name == "DeepSeek-V4":
        stored = {"scale": blocks.to(torch.float8_e8m0fnu)}
    return {"weight": codes, **stored}, (codes.double() * scale.double()).bfloat16()


def write(dense: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint in a container with FP8 beside the experts, and its bfloat16 equal."""
    stored = store_experts(dense, folder / "stored", KINDS[name])
    equal = Path(shutil.copytree(dense, folder / "equal"))
    tensors = load_file(stored / "model.safetensors")
    plain = load_file(equal / "model.safetensors")
    found = [each for each in tensors if re.search(_LAYERS[name], each)]
    assert len(found) > 7
    for each in found:
        parts, plain[each] = in_fp8(tensors.pop(each), name)
        tensors |= {each.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, equal / "model.safetensors", metadata={"format": "pt"})
    return stored, equal


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "qwen3_moe"
    build("qwen3_moe", dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_a_model_has_the_bits_of_its_checkpoint(qwen: Path, tmp_path: Path) -> None:
    """Of a model with the decoded layers in bfloat16 and the same experts; it saves as that."""
    stored, equal = write(qwen, tmp_path, "MiMo")
    wanted = convert(load(equal, "eager", dtype=torch.bfloat16), progress=False)
    model, info = load(stored, output_loading_info=True, dtype=torch.bfloat16)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert mine.dtype is torch.bfloat16
        assert torch.equal(mine, theirs), name
    assert_exact(logits(model), logits(wanted), "logits")
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.bfloat16)
    assert_exact(logits(again), logits(wanted), "logits")


def test_a_wrong_scale_is_seen(qwen: Path, tmp_path: Path) -> None:
    stored, equal = write(qwen, tmp_path, "MiMo")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    tensors[name] = 1 / tensors[name]
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    wanted = convert(load(equal, "eager", dtype=torch.bfloat16), progress=False)
    with pytest.raises(AssertionError):
        assert_exact(logits(load(stored, dtype=torch.bfloat16)), logits(wanted), "logits")


def test_deepseek_v4_loads(tmp_path: Path) -> None:
    """Its own class, with the names of its published checkpoints."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"Transformers {transformers.__version__} has no DeepSeek-V4")
    config = transformers.DeepseekV4Config(
        vocab_size=64,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=EXPERTS,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=4,
        hc_mult=2,
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(0)
    model: Any = transformers.DeepseekV4ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    stored, equal = write(tmp_path / "dense", tmp_path, "DeepSeek-V4")
    wanted = load(equal, "eager", dtype=torch.bfloat16)
    found, info = load(stored, output_loading_info=True, dtype=torch.bfloat16)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs = dict(wanted.named_parameters())
    mine = dict(found.named_parameters())
    assert {name for name in theirs if ".experts." not in name} == set(mine)
    for name, parameter in mine.items():
        assert parameter.dtype == theirs[name].dtype, name
        assert torch.equal(parameter, theirs[name]), name
    read = dict(mxpert.load_expert_weights(stored))
    for experts, weights in zip(mx_experts(found), read.values(), strict=True):
        assert_exact(experts.weights.dequantize()[0], weights.dequantize()[0], "gate_up_proj")
        assert_exact(experts.weights.dequantize()[1], weights.dequantize()[1], "down_proj")
    exact = load(equal, "eager", dtype=torch.float32)
    with torch.no_grad():
        for layer, weights in zip(exact.model.layers, read.values(), strict=True):
            for name, decoded in zip(("gate_up", "down"), weights.dequantize(), strict=True):
                getattr(layer.mlp.experts, f"{name}_proj").copy_(decoded)
    wanted_logits = logits(exact).double()
    error = logits(load(stored, dtype=torch.float32)).double() - wanted_logits
    # mxpert's experts round their inputs and results to bf16, a dozen times in all.
    assert float(error.norm() / wanted_logits.norm()) < 24 * 2.0**-9


def test_experts_are_not_dequantised_on_the_way(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = write(qwen, tmp_path, "MiMo")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("dequantised on the way")

    monkeypatch.setattr("mxpert.formats.codec.dequantize_blocks", refuse)
    model = load(stored, dtype=torch.bfloat16)
    assert {each.weights.weight_format for each in mx_experts(model)} == {"mxfp4"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_have_the_dtype_that_is_asked_for(
    dtype: torch.dtype, qwen: Path, tmp_path: Path
) -> None:
    stored, _ = write(qwen, tmp_path, "MiMo")
    model = load(stored, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert logits(model).isfinite().all()


def test_layers_in_another_format_are_refused(qwen: Path, tmp_path: Path) -> None:
    stored, _ = write(qwen, tmp_path, "MiMo")
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(torch.float8_e5m2)
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    said = r"need dense layers in BF16 or F16 or F32 or F8_E4M3 beside the experts, got F8_E5M2"
    with pytest.raises(UnsupportedError, match=rf"q_proj\.weight — {said}"):
        load(stored)
