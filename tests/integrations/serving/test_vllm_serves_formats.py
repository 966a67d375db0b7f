"""A tiny Qwen3-MoE through a whole vLLM on a CPU, its experts in one container after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-serving")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs a vLLM that runs on a CPU", allow_module_level=True)

import transformers

from mxpert.integrations.checkpoints.load import load_expert_weights
from support.expert_containers import store_experts
from tests.integrations.serving.stored_experts import CASES
from tests.integrations.serving.test_vllm_serves import Engines, log_probabilities

SERVED = (
    "ModelOpt NVFP4",
    "compressed-tensors NVFP4",
    "compressed-tensors cast",
    "compressed-tensors MXFP8",
    "compressed-tensors INT4 g32",
    "AWQ g32",
    "GPTQ v2 g32",
)
"""Containers whose other layers this model has in bfloat16."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        intermediate_size=128,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():  # experts that matter beside the residual stream
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(8)
    path = tmp_path_factory.mktemp("qwen") / "dense"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engines(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(dense, tmp_path_factory.mktemp("engines") / "log")
    yield made
    made.end()


def transformers_model(dense: Path, stored: Path, dtype: torch.dtype) -> Any:
    """Transformers' own model with the decoded experts of a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    with torch.no_grad():
        for path, weights in load_expert_weights(stored):
            experts: Any = model.get_submodule(path)
            for mine, decoded in zip(
                (experts.gate_up_proj, experts.down_proj), weights.dequantize(), strict=True
            ):
                mine.copy_(decoded)
    return model


@pytest.mark.parametrize("case", SERVED)
def test_a_model_is_served(case: str, dense: Path, engines: Engines, tmp_path: Path) -> None:
    """Closer to float32 than twice Transformers' bfloat16; an exchanged gate is farther."""
    stored = store_experts(dense, tmp_path / "stored", CASES[case])
    exact = log_probabilities(transformers_model(dense, stored, torch.float32))
    rounded_model = transformers_model(dense, stored, torch.bfloat16)
    ranks = 2 if case == "ModelOpt NVFP4" else 1

    def error(found: torch.Tensor) -> float:
        return float((found - exact).abs().mean())

    allowed = 2 * error(log_probabilities(rounded_model))
    request = dict(model=str(stored), format="a16w4", reload=True, tensor_parallel_size=ranks)
    found, answer = engines.answered(**request)
    assert error(found) <= allowed, (error(found), allowed)
    assert answer["log_probabilities"][1] == answer["log_probabilities"][0]
    with torch.no_grad():  # planted
        gate_up = rounded_model.model.layers[1].mlp.experts.gate_up_proj
        gate_up.copy_(torch.cat(gate_up.chunk(2, 1)[::-1], 1))
    assert error(log_probabilities(rounded_model)) > allowed
