"""Tiny checkpoints, written by transformers' own classes in every naming that `quantize` knows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.gpt_oss import tiny_gpt_oss
from support.written_experts import state_of

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def _model(family: str) -> Any:
    import transformers

    common = {
        "vocab_size": 64,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    match family:
        case "mixtral":
            return transformers.MixtralForCausalLM(
                transformers.MixtralConfig(
                    **common, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS
                )
            )
        case "qwen3_moe":
            return transformers.Qwen3MoeForCausalLM(
                transformers.Qwen3MoeConfig(
                    **common,
                    moe_intermediate_size=INTERMEDIATE,
                    intermediate_size=96,
                    head_dim=16,
                    num_experts=EXPERTS,
                )
            )
        case "deepseek_v3":  # its first layer is dense
            return transformers.DeepseekV3ForCausalLM(
                transformers.DeepseekV3Config(
                    **common,
                    moe_intermediate_size=INTERMEDIATE,
                    intermediate_size=96,
                    n_routed_experts=EXPERTS,
                    n_group=2,
                    topk_group=1,
                    first_k_dense_replace=1,
                    q_lora_rank=16,
                    kv_lora_rank=16,
                    qk_rope_head_dim=8,
                    qk_nope_head_dim=8,
                    v_head_dim=8,
                )
            )
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **common, intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, head_dim=16
        )
    )


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """bf16 checkpoints: ``<family>`` in its published naming, ``<family>_stacked`` as transformers
    5 holds it, sharded into files of 20 kB; with a tokenizer file beside the weights."""
    root = tmp_path_factory.mktemp("sources")
    found = {}
    for family in FAMILIES:
        model = _model(family).to(torch.bfloat16)
        with torch.no_grad():  # biases start at zero, which would hide a wrong order
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        for suffix, published in (("", True), ("_stacked", False)):
            directory = root / f"{family}{suffix}"
            model.save_pretrained(directory, save_original_format=published, max_shard_size="20KB")
            (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
            found[directory.name] = directory
    return found


@pytest.fixture(scope="session")
def expert_truth(sources: dict[str, Path]) -> Callable[[str], dict[str, torch.Tensor]]:
    """gate, up [E, F, H] and down [E, H, F] of the last layer, as transformers holds them."""

    def read(family: str) -> dict[str, torch.Tensor]:
        state = state_of(sources[f"{family}_stacked"])
        gate_up = state["model.layers.1.mlp.experts.gate_up_proj"].float()
        down = state["model.layers.1.mlp.experts.down_proj"].float()
        if family == "gpt_oss":
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            return {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": down}
        gate, up = gate_up.chunk(2, dim=1)
        return {"gate": gate, "up": up, "down": down}

    return read


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss checkpoint in the published MXFP4 layout, sharded."""
    return tiny_gpt_oss(tmp_path_factory.mktemp("demo") / "gpt-oss")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a checkpoint that a test may damage."""

    def copy(directory: Path) -> Path:
        return shutil.copytree(directory, tmp_path / f"copy-of-{directory.name}")

    return copy


@pytest.fixture
def rewrite() -> Callable[[Path, str, Callable[[torch.Tensor], torch.Tensor | None]], Path]:
    """Replace one tensor of a checkpoint (None drops it from its file, not from the index)."""

    def change(
        directory: Path, name: str, function: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Path:
        index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))
        file = directory / index["weight_map"][name]
        tensors = load_file(file)
        changed = function(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, file, metadata={"format": "pt"})
        return file

    return change
