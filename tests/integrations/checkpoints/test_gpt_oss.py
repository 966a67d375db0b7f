"""The demo checkpoint, and transformers as the oracle of what its MoE layers compute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mxpert import UnsupportedError, fused_moe
from mxpert.formats import dequantize_blocks
from mxpert.integrations.checkpoints.gpt_oss import (
    DEMO_TEXT,
    collect_moe_inputs,
    demo_token_ids,
    load_transformers_oracle,
    write_demo_checkpoint,
)
from mxpert.integrations.checkpoints.load import load_gpt_oss_layers
from mxpert.integrations.checkpoints.safetensors_files import (
    INDEX_FILE,
    CheckpointReader,
    sha256_of,
)


@pytest.fixture(scope="module")
def oracle(demo: Path) -> Any:
    return load_transformers_oracle(demo)


def test_transformers_holds_exactly_our_weights(demo: Path, oracle: Any) -> None:
    for layer in load_gpt_oss_layers(demo):
        moe = oracle.model.layers[layer.layer].mlp
        for name in ("gate_up_proj", "down_proj"):
            ours = dequantize_blocks(getattr(layer.weights, name))
            assert torch.equal(ours, getattr(moe.experts, name).transpose(1, 2))
        assert torch.equal(layer.weights.gate_up_bias, moe.experts.gate_up_proj_bias)
        assert torch.equal(layer.weights.down_bias, moe.experts.down_proj_bias)
        assert torch.equal(layer.router_weight.float(), moe.router.weight)
        assert torch.equal(layer.router_bias.float(), moe.router.bias)
        assert layer.activation.limit == moe.experts.limit
        assert layer.activation.alpha == moe.experts.alpha


@pytest.mark.parametrize("layer", [0, 1])
def test_captured_output_is_the_moe_of_the_captured_input(
    layer: int, demo: Path, oracle: Any
) -> None:
    capture = collect_moe_inputs(oracle, demo_token_ids(40), layer)
    assert capture.hidden.shape == capture.output.shape == (40, 64)
    assert capture.topk_ids.shape == capture.topk_weights.shape == (40, 2)
    with torch.no_grad():
        again, _ = oracle.model.layers[layer].mlp(capture.hidden[None])
    assert torch.equal(again[0], capture.output)
    (loaded,) = load_gpt_oss_layers(demo, layers=[layer])
    # bf16 inputs, intermediate and output against float32: a relative error of 2^-9 each, so the
    # cosine falls short of one by about 3 * 2^-18 / 2 < 1e-5; the gate leaves a factor of ten.
    ours = fused_moe(
        capture.hidden.to(torch.bfloat16),
        loaded.weights,
        capture.topk_weights,
        capture.topk_ids.to(torch.int32),
        activation=loaded.activation,
    )
    cosine = torch.nn.functional.cosine_similarity(
        ours.double().flatten(), capture.output.double().flatten(), dim=0
    )
    assert float(cosine) >= 0.9999
    assert capture.hidden.unique(dim=0).shape[0] > 10  # real, different tokens
    assert not oracle.model.layers[layer].mlp._forward_hooks


def test_the_demo_looks_like_a_published_checkpoint(demo: Path) -> None:
    reader = CheckpointReader(demo, "test")
    config = reader.config()
    assert config["model_type"] == "gpt_oss"
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["swiglu_limit"] == 7.0
    assert config["quantization_config"] == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    layer = {name.removeprefix("model.layers.0.") for name in reader.names if ".layers.0." in name}
    assert layer == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.sinks",
        *(f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
        "mlp.router.weight",
        "mlp.router.bias",
        *(
            f"mlp.experts.{p}_proj_{kind}"
            for p in ("gate_up", "down")
            for kind in ("blocks", "scales", "bias")
        ),
    }
    for name in reader.names:
        wanted = "U8" if name.endswith(("_blocks", "_scales")) else "BF16"
        assert reader.info(name).dtype == wanted, name
    (weights,) = (layer.weights for layer in load_gpt_oss_layers(demo, layers=[0]))
    scale = weights.gate_up_proj.scale
    assert int(scale.max()) - int(scale.min()) >= 5  # a realistic spread


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_experts": 2,
        "top_k": 1,
        "num_layers": 1,
    }
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = write_demo_checkpoint(tmp_path / "a", **sizes)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's generator is untouched
    torch.rand(1)
    second = write_demo_checkpoint(tmp_path / "b", **sizes)
    other = write_demo_checkpoint(tmp_path / "c", **sizes, seed=1)
    name = "model-00002-of-00002.safetensors"
    assert sha256_of(first / name) == sha256_of(second / name) != sha256_of(other / name)


def test_fewer_layers_load_from_a_deeper_checkpoint(demo: Path, oracle: Any) -> None:
    model = load_transformers_oracle(demo, num_layers=1)
    assert len(model.model.layers) == 1
    capture = collect_moe_inputs(model, demo_token_ids(8), 0)
    assert torch.equal(capture.output, collect_moe_inputs(oracle, demo_token_ids(8), 0).output)
    with pytest.raises(ValueError, match="num_layers — need 1 to 2, got 3"):
        load_transformers_oracle(demo, num_layers=3)


def test_token_ids_are_the_text(oracle: Any) -> None:
    ids = demo_token_ids(2 * len(DEMO_TEXT))
    assert bytes(ids.tolist()).decode() == 2 * DEMO_TEXT
    assert len(DEMO_TEXT.encode()) >= 1024  # a batch of 1024 tokens does not repeat itself
    batch = collect_moe_inputs(oracle, ids[:16].reshape(2, 8), 0)
    assert torch.allclose(
        batch.hidden[:8], collect_moe_inputs(oracle, ids[:8], 0).hidden, rtol=2e-5, atol=2e-5
    )  # float32, other summation order in the batch


BAD_DEMO = {
    "hidden_size": (96, "a positive multiple of 64, got 96"),
    "intermediate_size": (40, "a positive multiple of 32, got 40"),
    "num_experts": (0, "a positive multiple of 1, got 0"),
    "top_k": (17, "1 to 16, got 17"),
}


@pytest.mark.parametrize("argument", BAD_DEMO)
def test_bad_sizes_are_refused(argument: str, tmp_path: Path) -> None:
    value, expected = BAD_DEMO[argument]
    with pytest.raises(ValueError, match=f"write_demo_checkpoint: {argument} — need {expected}"):
        write_demo_checkpoint(tmp_path / "out", **{argument: value})
    assert not (tmp_path / "out").exists()


def test_other_bad_arguments_are_refused(demo: Path, oracle: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need an absent or empty directory"):
        write_demo_checkpoint(demo)
    with pytest.raises(ValueError, match=r"need a checkpoint directory with config.json"):
        load_transformers_oracle(tmp_path)
    with pytest.raises(ValueError, match="need ids from 0 to 255, got 0 to 256"):
        collect_moe_inputs(oracle, torch.tensor([0, 256]), 0)
    with pytest.raises(TypeError, match="need int64, got float32"):
        collect_moe_inputs(oracle, torch.zeros(3), 0)
    with pytest.raises(ValueError, match="layer — need 0 to 1, got 2"):
        collect_moe_inputs(oracle, demo_token_ids(4), 2)


def test_a_missing_tensor_is_not_filled_with_random_numbers(
    demo: Path, copy_of: Any, rewrite: Any
) -> None:
    directory = copy_of(demo)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(directory, name, lambda tensor: None)
    with pytest.raises(ValueError, match="need the tensor that the index names"):
        load_transformers_oracle(directory)
    index = json.loads((directory / INDEX_FILE).read_text("utf-8"))
    del index["weight_map"][name]
    (directory / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="need every tensor of the model, got 1 missing"):
        load_transformers_oracle(directory)


def test_without_transformers_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'transformers>="):
        write_demo_checkpoint(tmp_path / "out")
