"""MXFP4 checkpoints load in any float dtype, renamed routers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mxpert
import mxpert.integrations.transformers  # registers "mxpert"
from mxpert.integrations.models.convert import mx_experts
from mxpert.testing.numerics import assert_exact
from support.mixtral import SIZES
from tests.integrations.supported import skip_before_its_release

IDS = torch.arange(12)[None]
COMMON = SIZES | dict(num_experts_per_tok=2, tie_word_embeddings=False)
MODELS = {
    "mixtral": ("Mixtral", {}),
    "minimax": ("MiniMax", {"layer_types": ["full_attention"], "head_dim": 32}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 32}),
    "phimoe": ("Phimoe", {"bos_token_id": None, "eos_token_id": None}),
    "granitemoe": ("GraniteMoe", {"bos_token_id": None, "eos_token_id": None}),
    "gpt_oss": ("GptOss", {"head_dim": 32}),
}


def build(family: str) -> Any:
    name, changes = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**COMMON | changes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()


def load(directory: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, experts_implementation="mxpert"
    ).eval()


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_parameter_has_the_dtype_that_was_asked_for(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    skip_before_its_release(family)
    dense = build(family)
    dense.save_pretrained(tmp_path / "dense")
    # What Transformers itself makes of the dense checkpoint in this dtype.
    wanted = {
        name: tensor.dtype
        for name, tensor in transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "dense", dtype=dtype
        ).named_parameters()
    }
    converted = mxpert.convert(dense, progress=False)
    converted.save_pretrained(tmp_path / "mxfp4")
    model = load(tmp_path / "mxfp4", dtype)
    assert len(mx_experts(model)) == 1
    for name, parameter in model.named_parameters():
        assert parameter.dtype == wanted[name], name
    assert model(IDS).logits.isfinite().all()
    stored = load(tmp_path / "mxfp4", torch.bfloat16)
    values = dict(stored.named_parameters())
    for name, parameter in model.named_parameters():
        assert_exact(parameter.detach().float(), values[name].detach().to(dtype).float(), name)
