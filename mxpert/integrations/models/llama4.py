"""Llama 4's MoE block: its router weights multiply the experts' input, and it names no experts.

Transformers gives these experts [E · T, H]: each token once for every expert, times its score, or
zero where the router did not choose the expert. A converted block gives its experts each token
once, with ids and weights, as the other models of Transformers do. The router, the shared expert,
what the block returns and the names in its state dict stay as they are.

This module imports Transformers. It is imported where a model has such a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from ...errors import UnsupportedError, require


class RoutedLlama4Moe(Llama4TextMoe):
    """The class of a block whose experts are mxpert's: ``experts(x, topk_ids, topk_weights)``."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [..., H] → [T, H] and the router's logits [T, E]."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(tokens)  # [T, E], zero where an expert is not chosen
        topk_weights, topk_ids = scores.topk(self.top_k, dim=-1)
        routed = self.experts(tokens, topk_ids, topk_weights)
        return self.shared_expert(tokens) + routed, logits


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is the stacked experts of Llama 4."""
    return isinstance(module, Llama4TextExperts)


def check_blocks(name: str, blocks: Sequence[Any], op: str) -> None:
    """Check the blocks around the experts `name`, before one of them changes.

    Args:
        blocks: modules (Any: blocks of Transformers have no common class).

    Raises:
        UnsupportedError: a block with a forward of its own (FSDP2 makes a subclass of each module
            that it shards), or with several experts per token.
    """
    for block in blocks:
        require(
            type(block) in (Llama4TextMoe, RoutedLlama4Moe),
            op,
            name,
            need="a Llama4TextMoe around these experts",
            got=type(block).__name__,
            remedy="convert the model before it is sharded",
            error=UnsupportedError,
        )
        require(
            block.top_k == 1,
            op,
            name,
            need="one expert per token, as Llama 4 has",
            got=f"num_experts_per_tok={block.top_k}",
            remedy="leave this model unconverted",
            error=UnsupportedError,
        )


def route(block: torch.nn.Module, *, routed: bool) -> None:
    """Let a block call its experts with ids and weights, or again as Transformers does.

    Args:
        block: one that `check_blocks` takes. Its class changes, as it does in torch's
            parametrisations, so that copies, pickles and hooks of the block stay valid.
    """
    block.__class__ = RoutedLlama4Moe if routed else Llama4TextMoe


def routed_call(
    rows: torch.Tensor, result: torch.Tensor, num_experts: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """A call of Transformers' experts and its result, as a converted block calls its experts.

    Args:
        rows: [E · T, H], which the weights have scaled; result: [E · T, H].

    Returns:
        The chosen rows [T, H] with ids and weights of 1 [T, 1], and their results [T, H].
    """
    rows, result = (each.unflatten(0, (num_experts, -1)) for each in (rows, result))
    ids = rows.abs().amax(-1).argmax(0)  # [T]: rows of the other experts are zero
    tokens = torch.arange(len(ids), device=ids.device)
    arguments = rows[ids, tokens], ids[:, None], torch.ones_like(ids[:, None], dtype=rows.dtype)
    return arguments, result[ids, tokens]


def gate_of(experts: Llama4TextExperts, values: torch.Tensor) -> torch.Tensor:
    """What these experts compute between their GEMMs: [R, 2F] → [R, F].

    Their own forward runs with identity matrices in the place of the weights.
    """
    width = values.shape[-1]
    unit = torch.eye(width, dtype=values.dtype, device=values.device)[None]
    sample = SimpleNamespace(
        gate_up_proj=unit, down_proj=unit[:, : width // 2], hidden_size=width, act_fn=experts.act_fn
    )
    result: torch.Tensor = Llama4TextExperts.forward(sample, values)
    return result[:, : width // 2]
