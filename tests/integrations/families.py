"""Tiny random models of a few families, and heads that give their greedy tokens a margin."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from mxpert.integrations.models.convert import convert, restore

FAMILIES = ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3")
"""Those whose experts get ids and weights; "llama4" is another."""
VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS = 48, 128, 64, 8
PROMPT, NEW_TOKENS = 8, 64


def config_of(family: str, **changes: Any) -> Any:
    """A tiny config; `changes` replace single values."""
    common: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    match family:
        case "gpt_oss":
            return transformers.GptOssConfig(
                **common
                | dict(intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, head_dim=32)
                | changes
            )
        case "llama4":  # its first layer is dense, its router chooses one expert
            layers = dict(num_hidden_layers=3, moe_layers=[1, 2], intermediate_size_mlp=96)
            one = dict(intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS, head_dim=32)
            one |= dict(num_experts_per_tok=1)
            return transformers.Llama4TextConfig(**common | layers | one | changes)
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(
                **common
                | dict(
                    moe_intermediate_size=INTERMEDIATE,
                    intermediate_size=96,
                    head_dim=32,
                    num_experts=EXPERTS,
                    norm_topk_prob=True,
                )
                | changes
            )
        case "mixtral":
            return transformers.MixtralConfig(
                **common | dict(intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS) | changes
            )
    return transformers.DeepseekV3Config(
        **common
        | dict(  # its first layer is dense
            num_hidden_layers=3,
            moe_intermediate_size=INTERMEDIATE,
            intermediate_size=96,
            n_routed_experts=EXPERTS,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=32,
        )
        | changes
    )


def build(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model whose experts matter: unit-scale embeddings, decisive routers, biases not zero."""
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(family, **changes),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float) -> None:
        values = torch.randn(parameter.shape, generator=generator) * std
        parameter.copy_(values)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                normal(parameter, 1.0)
            elif name.endswith(("router.weight", "mlp.gate.weight")):
                normal(parameter, 2 / parameter.shape[-1] ** 0.5)
            elif name.endswith(("bias", "sinks")):
                normal(parameter, 0.1)
            elif parameter.dim() > 1:  # some experts are [E, K, N]
                transposed = family in ("gpt_oss", "llama4") and ".experts." in name
                normal(parameter, parameter.shape[-2 if transposed else -1] ** -0.5)
    return model.eval()


def oracle_of(model: Any) -> Any:
    """A copy that carries the dequantised weights and runs Transformers' eager experts."""
    oracle = restore(convert(copy.deepcopy(model), progress=False))
    oracle.set_experts_implementation("eager")
    return oracle


@torch.no_grad()
def teach(model: Any, sequence: torch.Tensor) -> None:
    """Set the head by ridge regression so that greedy decoding continues `sequence` [S].

    A random head has near ties at every step; this one prefers the next token by about one, and
    only for hidden states that are right, because tokens recur in the sequence.
    """
    hidden = model.model(sequence[None, :-1]).last_hidden_state[0].double()  # [S - 1, H]
    target = torch.nn.functional.one_hot(sequence[1:], VOCABULARY).double()  # [S - 1, V]
    gram = hidden.T @ hidden + 1e-2 * torch.eye(HIDDEN, dtype=torch.float64)
    model.lm_head.weight.copy_(torch.linalg.solve(gram, hidden.T @ target).T)


def taught_pairs(sequence: torch.Tensor, **options: Any) -> dict[str, tuple[Any, Any]]:
    """By family, in float32: the oracle and the converted model, with the same taught head.

    options: of `convert`.
    """
    made: dict[str, tuple[Any, Any]] = {}
    for family in FAMILIES:
        model = build(family)
        oracle = oracle_of(model)
        teach(oracle, sequence)
        model.lm_head.load_state_dict(oracle.lm_head.state_dict())
        made[family] = oracle, convert(model, progress=False, **options)
    return made


def greedy(model: Any, sequence: torch.Tensor, **options: Any) -> torch.Tensor:
    """PROMPT tokens of the sequence, continued by NEW_TOKENS: int64 [PROMPT + NEW_TOKENS]."""
    prompt = sequence[None, :PROMPT]
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        **options,
    )[0]
