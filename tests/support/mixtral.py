"""A tiny Mixtral of Transformers with random weights."""

from __future__ import annotations

from typing import Any

import transformers

SIZES: dict[str, Any] = dict(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
)


def tiny_mixtral(**changes: Any) -> Any:
    """The model; `changes` replace single values of its config."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES | changes))
