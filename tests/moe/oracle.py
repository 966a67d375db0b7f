"""An independent MoE layer in float64: one token, one slot, one matrix-vector product at a time.

Written without the library's routing, plan or activation code; only the codecs are shared (they are
tested against foreign oracles). test_reference_transformers.py compares the
whole with transformers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mxpert import GateUpOrder, MoEWeights, ScaleRule
from mxpert.core.problem import GELU, Activation, ClampedSiLU, ReLU2, SiLU, SiTUv2, SwiGLU
from mxpert.formats import dequantize_blocks, quantize_blocks, quantize_token_rows
from mxpert.formats.tensor import MXTensor


def rounded(row: torch.Tensor, activation_format: str, rule: ScaleRule) -> torch.Tensor:
    """The row in bfloat16, then as the layer's activation format holds that, float64."""
    row = row.float().bfloat16()
    if activation_format == "bf16":
        return row.double()
    if activation_format == "fp8_token":
        return quantize_token_rows(row[None]).dequantize(torch.float64)[0]
    return dequantize_blocks(quantize_blocks(row, activation_format, -1, rule), torch.float64)


def split(values: torch.Tensor, order: GateUpOrder | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of the 2F values in `order`; without a gate, F values stand for both."""
    if order is None:
        return values, values
    if order is GateUpOrder.CONCATENATED:
        gate, up = values.chunk(2)
        return gate, up
    if order is GateUpOrder.INTERLEAVED:
        return values[0::2], values[1::2]
    groups = values.view(-1, 2, 16)
    return groups[:, 0].reshape(-1), groups[:, 1].reshape(-1)


def sigmoid(value: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-value))


def activated(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Contracts, word by word."""
    if isinstance(activation, SiLU):
        return gate * sigmoid(gate) * up
    if isinstance(activation, SwiGLU):
        gate = torch.minimum(gate, torch.tensor(activation.limit, dtype=torch.float64))
        up = torch.clamp(up, -activation.limit, activation.limit)
        return gate * sigmoid(activation.alpha * gate) * (up + activation.beta)
    if isinstance(activation, GELU):
        if activation.approximate == "none":
            return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + torch.tanh(inner)) / 2 * up
    if isinstance(activation, ReLU2):
        return torch.where(up > 0, up**2, 0)
    if isinstance(activation, ClampedSiLU):
        gate = torch.minimum(gate, torch.tensor(activation.limit, dtype=torch.float64))
        return gate * sigmoid(gate) * torch.clamp(up, -activation.limit, activation.limit)
    assert isinstance(activation, SiTUv2)
    gated = activation.beta * torch.tanh(gate / activation.beta) * sigmoid(gate)
    return gated * activation.beta_up * torch.tanh(up / activation.beta_up)


class Rows(NamedTuple):
    """What a layer computes for each token and slot.

    Args:
        h: the activation's output in float64 [T, k, F], before it is rounded. y: rows of stage 2
            from the rounded `h`, times the routing weight unless stage 1 has applied it, [T, k, H].
        valid: bool [T, k], whether the slot has a local expert; other rows are zero.
    """

    h: torch.Tensor
    y: torch.Tensor
    valid: torch.Tensor


def moe_layer(
    x: torch.Tensor | MXTensor,
    weights: MoEWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    activation_format: str = "bf16",
    scale_rule: ScaleRule = ScaleRule.RCEIL,
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
) -> Rows:
    """Each row of the layer, with x and the intermediate in `activation_format`."""
    w_gate_up = weights.gate_up_proj.dequantize(torch.float64)
    w_down = weights.down_proj.dequantize(torch.float64)
    sizes = weights.intermediate_size, weights.hidden_size
    h, y = (torch.zeros(*topk_ids.shape, size, dtype=torch.float64) for size in sizes)
    valid = torch.zeros(topk_ids.shape, dtype=torch.bool)
    for token in range(topk_ids.shape[0]):
        row = (
            dequantize_blocks(x[token], torch.float64)
            if isinstance(x, MXTensor)
            else rounded(x[token], activation_format, scale_rule)
        )
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            if expert_map is not None:
                expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
            if not 0 <= expert < weights.num_experts:
                continue
            weight = float(topk_weights[token, slot])
            assert math.isfinite(weight)
            values = w_gate_up[expert] @ row
            if apply_router_weight_on_input:
                values, weight = values * weight, 1.0
            if weights.gate_up_bias is not None:
                values = values + weights.gate_up_bias[expert]
            out = activated(activation, *split(values, weights.gate_up_order))
            row_out = w_down[expert] @ rounded(out, activation_format, scale_rule)
            if weights.down_bias is not None:
                row_out = row_out + weights.down_bias[expert]
            h[token, slot], y[token, slot] = out, weight * row_out
            valid[token, slot] = True
    return Rows(h, y, valid)
