"""gpt-oss models with random weights and codes: configs, tensors, a loader for vLLM."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SIZES = {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128), "tiny": (2, 8)}
"""Model → (decoder layers, experts)."""

GATE_LAYERS = 2
"""Depth of the gate's models: deeper random ones differ by the routers' ties."""

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150000.0,
}
_NOT_QUANTISED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head")


def config_of(model: str, layers: int | None = None) -> dict[str, Any]:
    """The published config of a model, as in its config.json; `layers` replaces its depth."""
    depth, experts = SIZES[model]
    depth = layers or depth
    width, heads, vocabulary = (128, 2, 512) if model == "tiny" else (2880, 64, 201088)
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "num_hidden_layers": depth,
        "layer_types": [kinds[layer % 2] for layer in range(depth)],
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": width,
        "head_dim": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 8 or 1,
        "sliding_window": 128,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": _ROPE,
        "eos_token_id": vocabulary - 1,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [*_NOT_QUANTISED, "model.embed_tokens"],
        },
    }


def write_config(folder: Path, model: str, layers: int | None = None) -> Path:
    """A model's folder with nothing but its config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model, layers)), encoding="utf-8")
    return folder


def cache_bytes(config: dict[str, Any], tokens: int) -> int:
    """Bytes of keys and values of `tokens` tokens in bfloat16, and a quarter for whole blocks."""
    per_token = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(1.25 * tokens * per_token * config["num_hidden_layers"]) + (64 << 20)


def random_tensors(config: Any, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors by its names; the values depend on the name alone.

    E2M1 codes are uniform, with an rms of 2.9. Scales of 2⁻⁹ to 2⁻⁷ keep the output of a layer of
    experts near the size of its input. Nothing is zero, since zeros would save power.
    """

    def seeded(name: str) -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def normal(name: str, *shape: int, std: float) -> tuple[str, torch.Tensor]:
        values = torch.randn(*shape, generator=seeded(name), device=device)
        return name, values.mul_(std).bfloat16()

    def codes(name: str, *shape: int, low: int = 0, high: int = 256) -> tuple[str, torch.Tensor]:
        made = torch.randint(
            low, high, shape, generator=seeded(name), device=device, dtype=torch.uint8
        )
        return name, made

    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query = config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    yield normal("model.embed_tokens.weight", config.vocab_size, hidden, std=1.0)
    yield normal("lm_head.weight", config.vocab_size, hidden, std=hidden**-0.5)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16, device=device)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16, device=device)
        yield normal(f"{at}self_attn.sinks", config.num_attention_heads, std=1.0)
        for name, rows, columns in (
            ("q_proj", query, hidden),
            ("k_proj", shared, hidden),
            ("v_proj", shared, hidden),
            ("o_proj", hidden, query),
        ):
            yield normal(f"{at}self_attn.{name}.weight", rows, columns, std=columns**-0.5)
            yield normal(f"{at}self_attn.{name}.bias", rows, std=0.02)
        yield normal(f"{at}mlp.router.weight", experts, hidden, std=hidden**-0.5)
        yield normal(f"{at}mlp.router.bias", experts, std=0.02)
        for name, rows, columns in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            place, blocks = f"{at}mlp.experts.{name}", columns // 32
            yield codes(f"{place}_blocks", experts, rows, blocks, 16)
            yield codes(f"{place}_scales", experts, rows, blocks, low=118, high=121)
            yield normal(f"{place}_bias", experts, rows, std=0.02)


def register_loader(name: str, device: str, loaded: Callable[[Any], None]) -> None:
    """Make ``load_format=name`` fill models with `random_tensors`; `loaded` gets the model."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(name)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(random_tensors(model_config.hf_config, device))
            loaded(model)
