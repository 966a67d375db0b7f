"""A trainer's dense experts, quantised into the layers that vLLM or SGLang serves.

In a worker of the engine, with the model that it serves (vLLM: ``llm.apply_model(function)``):

    for name, layer in served_layers(model).items():
        requantize_layer_(layer, gate_up_proj[name], down_proj[name])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import message, require_tensor
from ...formats.gate_up import GateUpOrder
from ...formats.spec import FLOAT_DTYPES, ScaleRule
from ...moe.requantize import requantize_
from ...moe.weights import MoEWeights


@dataclass(frozen=True)
class Share:
    """The part of a layer that a rank holds.

    Args:
        weights: the prepared ones. experts: their global ids.
        first, columns: of the intermediate size, those that lie here; what `weights` has beyond
            them is padding.
        has_down_bias: whether this rank adds the bias of the down projection.
    """

    weights: MoEWeights
    experts: list[int]
    first: int
    columns: int
    has_down_bias: bool


def served_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers of an engine's model that mxpert computes, by their names.

    Example:
        >>> served_layers(torch.nn.Linear(2, 2))
        {}
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "quant_method", None), "share")
    }


def requantize_layer_(
    layer: torch.nn.Module,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate_up_order: GateUpOrder | None = None,
    scale_rule: ScaleRule = ScaleRule.RCEIL,
) -> None:
    """Quantise this rank's share of a layer's dense experts into its prepared weights, in place.

    Captured CUDA graphs stay valid. Arguments are those of `mxpert.modules.requantize_`, for all
    experts and all columns of the layer: the rank takes its part, for any TP and EP.

    Args:
        layer: of `served_layers`.
        gate_up_proj: bfloat16, float16 or float32 [E, 2F, H], on the device of the layer.
        down_proj: the same dtypes, [E, H, F]. gate_up_bias: [E, 2F], where the layer has one.
        down_bias: [E, H]. gate_up_order: of the rows; None is that of the model's checkpoints.

    Raises:
        TypeError, ValueError: a wrong type, dtype, shape or device, or weights that the prepared
            layout cannot hold; the layer is then as it was.

    Example:
        >>> dense = torch.zeros(2, 64, 32), torch.zeros(2, 32, 32)
        >>> requantize_layer_(torch.nn.Linear(2, 2), *dense)
        Traceback (most recent call last):
        TypeError: requantize_layer_: layer — need a layer that mxpert serves, got Linear; take it \
from served_layers(model)
    """
    op = "requantize_layer_"
    share_of = getattr(getattr(layer, "quant_method", None), "share", None)
    if share_of is None:
        need, got = "a layer that mxpert serves", type(layer).__name__
        raise TypeError(message(op, "layer", need, got, "take it from served_layers(model)"))
    share: Share = share_of(layer)
    weights = share.weights
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        require_tensor(tensor, op, name, dtype=FLOAT_DTYPES, shape=(None, None, None))
    inner, padded = down_proj.shape[2], weights.intermediate_size
    order = gate_up_order or weights.source_order or weights.gate_up_order
    require_tensor(gate_up_proj, op, "gate_up_proj", shape=(None, 2 * inner, weights.hidden_size))
    own = slice(share.first, share.first + share.columns)
    index = torch.tensor(share.experts, device=down_proj.device)

    def rows(dense: torch.Tensor) -> torch.Tensor:
        """Own experts and rows of [E, 2F, …]; zeros as padding."""
        interleaved = order is GateUpOrder.INTERLEAVED
        shape = (inner, 2) if interleaved else (2, inner)
        pairs = dense[index].unflatten(1, shape)
        made = pairs[:, own] if interleaved else pairs[:, :, own]
        axis = 1 if interleaved else 2
        missing = list(made.shape)
        missing[axis] = padded - share.columns
        return torch.cat([made, made.new_zeros(missing)], axis).flatten(1, 2)

    down = torch.nn.functional.pad(down_proj[index][..., own], (0, padded - share.columns))
    if down_bias is not None:
        down_bias = down_bias[index] if share.has_down_bias else torch.zeros_like(down_bias[index])
    requantize_(
        weights,
        rows(gate_up_proj),
        down,
        gate_up_order=order,
        gate_up_bias=None if gate_up_bias is None else rows(gate_up_bias),
        down_bias=down_bias,
        scale_rule=scale_rule,
    )
