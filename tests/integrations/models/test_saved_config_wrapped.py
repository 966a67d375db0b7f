"""`convert(wrapper)` marks the Transformers model inside, so that it loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.quantizers.base import HfQuantizer

import mxpert
import mxpert.integrations.transformers  # registers "mxpert"
from mxpert import UnsupportedError
from mxpert.integrations.models.convert import mx_experts, restore
from mxpert.testing.numerics import assert_exact
from support.mixtral import tiny_mixtral

IDS = torch.arange(12)[None]


class Wrapper(torch.nn.Module):
    """A trainer's module: holds a model and has no config."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids)


class WrapperWithConfig(Wrapper):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.config = model.config


def mixtral() -> Any:
    torch.manual_seed(0)
    return tiny_mixtral(num_hidden_layers=2).eval()


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        WrapperWithConfig,
        torch.nn.DataParallel,
        torch.compile,
        lambda model: Wrapper(Wrapper(model)),
    ],
    ids=["plain", "config", "parallel", "compile", "twice"],
)
def test_the_inner_model_saves_a_checkpoint_that_loads(wrap: Any, tmp_path: Path) -> None:
    model = mixtral()
    wrapper = mxpert.convert(wrap(model), progress=False)
    model.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text("utf-8"))["quantization_config"]
    assert stated["quant_method"] == "mxfp4"
    assert "lm_head" in stated["modules_to_not_convert"]
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="mxpert", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_exact(again(IDS).logits, model(IDS).logits, "logits")
    restore(wrapper)
    assert not mx_experts(model)
    model.save_pretrained(tmp_path / "dense")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert_exact(plain(IDS).logits, model(IDS).logits, "logits")


def test_the_base_model_inside_can_be_saved(tmp_path: Path) -> None:
    model = mxpert.convert(mixtral(), progress=False)
    model.model.save_pretrained(tmp_path)
    base, info = transformers.AutoModel.from_pretrained(
        tmp_path, experts_implementation="mxpert", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert_exact(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state, "states")


def test_a_wrapped_model_of_another_quantiser_is_refused() -> None:
    model = mixtral()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match="load the model dequantised"):
        mxpert.convert(Wrapper(model), progress=False)


@pytest.mark.parametrize("inner", [False, True], ids=["whole", "language model alone"])
def test_a_multimodal_model_and_the_model_inside_load_again(inner: bool, tmp_path: Path) -> None:
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(
            text_config=dict(
                vocab_size=64,
                hidden_size=64,
                moe_intermediate_size=32,
                intermediate_size=64,
                head_dim=32,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_hidden_layers=1,
                num_experts=4,
                num_experts_per_tok=2,
                rope_scaling={"rope_type": "default", "mrope_section": [4, 4, 8]},
            ),
            vision_config=dict(
                depth=1,
                hidden_size=32,
                intermediate_size=32,
                num_heads=2,
                out_hidden_size=64,
                deepstack_visual_indexes=[0],
            ),
        )
    ).eval()
    mxpert.convert(model, progress=False)
    saved = model.model.language_model if inner else model
    saved.save_pretrained(tmp_path)
    if not inner and not hasattr(HfQuantizer, "update_weight_conversions"):
        with pytest.raises(UnsupportedError, match=r"need Transformers 5\.8 or newer, got 5\.7"):
            type(saved).from_pretrained(tmp_path, experts_implementation="mxpert")
        return
    again, info = type(saved).from_pretrained(
        tmp_path, experts_implementation="mxpert", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_exact(again(IDS)[0], saved(IDS)[0], "output")
