"""Which model families convert, quantise, load and train, tried on tiny models of each.

`python -m integrations.supported` in tests/ writes the table of docs/supported-models.md.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import mxpert
import mxpert.integrations.transformers
from mxpert.integrations.checkpoints.quantize import quantize_checkpoint
from mxpert.training import MXFP8Recipe

PAGE = Path(__file__).parents[2] / "docs" / "supported-models.md"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4
IDS = torch.tensor([[1, 5, 9, 2, 40, 33, 17, 8]])

_ATTENTION = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32
)
_DEEPSEEK = dict(**_ATTENTION, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
_LINEAR = dict(
    linear_num_value_heads=2,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    shared_expert_intermediate_size=32,
)
_JAMBA = dict(
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=4,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)
_GEMMA4 = dict(
    enable_moe_block=True,
    top_k_experts=2,
    global_head_dim=32,
    num_global_key_value_heads=2,
    hidden_size_per_layer_input=0,
)
_LLAMA4 = dict(intermediate_size_mlp=64, interleave_moe_layer_step=2, num_experts_per_tok=1)
"""A dense layer, then one with experts."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepSeek-V2", _DEEPSEEK),
    "deepseek_v3": ("DeepSeek-V3, R1, Kimi-K2", _DEEPSEEK | dict(head_dim=16)),
    "deepseek_v32": ("DeepSeek-V3.2", _DEEPSEEK),
    "dots1": ("dots.llm1", _DEEPSEEK),
    "ernie4_5_moe": ("Ernie 4.5", dict(moe_num_experts=4, moe_k=2, moe_layer_start_index=1)),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma4_text": ("Gemma 4", _GEMMA4),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", _DEEPSEEK),
    "glm4_moe_lite": ("GLM-4.7-Flash", _DEEPSEEK),
    "gpt_oss": ("gpt-oss", {}),
    "granitemoe": ("GraniteMoe", {}),
    "hunyuan_v1_moe": ("HunYuan", dict(moe_topk=2)),
    "jamba": ("Jamba", _JAMBA),
    "jetmoe": ("JetMoe", {}),
    "llama4_text": ("Llama 4", _LLAMA4),
    "minimax": ("MiniMax-Text", {}),
    "minimax_m2": ("MiniMax-M2", {}),
    "mixtral": ("Mixtral", {}),
    "nemotron_h": ("Nemotron-H", {}),
    "olmoe": ("OLMoE", {}),
    "phimoe": ("Phi-3.5-MoE", {}),
    "qwen2_moe": ("Qwen2-MoE", dict(shared_expert_intermediate_size=32)),
    "qwen3_5_moe_text": ("Qwen3.5-MoE", _LINEAR),
    "qwen3_moe": ("Qwen3-MoE", {}),
    "qwen3_next": ("Qwen3-Next", _LINEAR),
    "solar_open": ("Solar Open", _DEEPSEEK),
}
"""``model_type`` → the family's name, and what its tiny config has beyond the common values."""


@dataclass(frozen=True)
class Support:
    """What works with a family; the first reason why something does not."""

    convert: bool
    quantize: bool
    load: bool
    train: bool
    reason: str = ""

    def row(self, model_type: str) -> str:
        marks = ["yes" if each else "no" for each in (self.convert, self.quantize)]
        marks += ["yes" if each else "no" for each in (self.load, self.train)]
        name = FAMILIES[model_type][0]
        return f"| {name} | `{model_type}` | {' | '.join(marks)} | {self.reason} |"


NEEDS = (5, 17)
NEWER = ("deepseek_v32", "glm4_moe_lite", "granitemoe")
"""Families that need this release of Transformers, as the page says."""


def skip_before_its_release(model_type: str) -> None:
    """Skip a test of a family that this release of Transformers is too old for."""
    if model_type in NEWER and Version(transformers.__version__).release[:2] < NEEDS:
        pytest.skip(f"needs Transformers {NEEDS[0]}.{NEEDS[1]}, has {transformers.__version__}")


def build(model_type: str, **changes: Any) -> Any:
    """A tiny random model whose experts matter; `changes` replace values of its config."""
    common: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = transformers.AutoConfig.for_model(
        model_type, **common | FAMILIES[model_type][1] | changes
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:  # experts: unit gain
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS, use_cache=False).logits
    return result


def try_family(model_type: str, folder: Path) -> Support:
    """Convert, quantise, load and train a tiny model of a family."""
    model = build(model_type)
    dense, mxfp4 = folder / "dense", folder / "mxfp4"
    model.save_pretrained(dense)
    reasons: list[str] = []

    def attempt(step: Callable[[], None]) -> bool:
        try:
            step()
        except (ValueError, TypeError, mxpert.UnsupportedError) as error:
            if " — need " not in str(error):
                raise
            reasons.append(str(error))
            return False
        return True

    converted = copy.deepcopy(model)

    def convert() -> None:
        mxpert.convert(converted, progress=False)
        assert logits(converted).isfinite().all()

    def quantize() -> None:
        assert quantize_checkpoint(dense, mxfp4).verified

    def load() -> None:
        source = mxfp4 if is_quantized else dense
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            source, experts_implementation="mxpert", dtype=torch.float32
        )
        torch.testing.assert_close(logits(loaded.eval()), logits(converted), rtol=0, atol=2e-2)

    def train() -> None:
        trained = mxpert.convert(copy.deepcopy(model), recipe=MXFP8Recipe(), progress=False)
        trained.train()(IDS, labels=IDS, use_cache=False).loss.backward()
        found = [each for name, each in trained.named_parameters() if "experts" in name]
        gradients = [each.grad for each in found if each.grad is not None and each.dim() == 3]
        assert gradients
        assert all(bool(each.isfinite().all() and each.any()) for each in gradients)

    is_converted = attempt(convert)
    is_quantized = attempt(quantize)
    assert not list(mxfp4.glob("*")) or is_quantized, "files of a refused checkpoint"
    is_loaded = attempt(load) if is_converted else False
    return Support(is_converted, is_quantized, is_loaded, attempt(train), _short(reasons))


def _short(reasons: list[str]) -> str:
    """What the first error says that mxpert got, in the table's words."""
    if not reasons:
        return ""
    for part, text in (
        ("experts modules of transformers", "its experts are no stacked experts of Transformers"),
    ):
        if part in reasons[0]:
            return text
    return reasons[0].partition(" — ")[2].partition(";")[0]


HEADER = """\
| family | `model_type` | converts | `mxpert quantize` | loads | trains | why not |
|---|---|---|---|---|---|---|
"""


def render(found: dict[str, Support]) -> str:
    return HEADER + "".join(f"{found[name].row(name)}\n" for name in FAMILIES)


def table_of(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    results = {}
    for each in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            results[each] = try_family(each, Path(place))
        print(results[each].row(each), flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{render(results)}{END}{after}", encoding="utf-8")
