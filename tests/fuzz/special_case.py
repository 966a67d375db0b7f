"""Case: one function of `special_cases` and `special_grouped`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu

import mxpert
from mxpert import MoEWeights, MXTensor
from mxpert.core.problem import Activation
from mxpert.formats import WeightTensor

Arguments = dict[str, Any]
Results = list[torch.Tensor | None]
WIDE = torch.float64


@dataclass(frozen=True)
class Case:
    """One function.

    Args:
        name: for reports.
        arguments: makes right ones, on the CPU; sizes grow with the second argument.
        call: the results, as tensors of floats.
        exact: the results by definition in float64; None where there is no bound.
        spoilt: names of the arguments that get special values.
        rows: the argument whose rows decide the result's rows of the same numbers.
        on_gpu: whether the function has kernels.
    """

    name: str
    arguments: Callable[[random.Random, int], Arguments]
    call: Callable[[Arguments], Results]
    exact: Callable[[Arguments], Results]
    spoilt: tuple[str, ...]
    rows: str | None = None
    on_gpu: bool = True


def wide(value: torch.Tensor | MXTensor | WeightTensor) -> torch.Tensor:
    """Values in float64."""
    return value.detach().double() if isinstance(value, torch.Tensor) else value.dequantize(WIDE)


def bounds(offsets: torch.Tensor) -> list[tuple[int, slice]]:
    """Groups and their rows."""
    ends = offsets.tolist()
    return [(g, slice(ends[g], ends[g + 1])) for g in range(len(ends) - 1)]


def exact_gemm(a: Arguments) -> Results:
    """grouped_gemm."""
    left, right = wide(a["a"]), wide(a["b"])
    right = right.mT if a.get("trans_b", True) else right
    out = torch.zeros(left.shape[0], right.shape[-1], dtype=WIDE)
    for g, part in bounds(a["group_offsets"]):
        out[part] = left[part] @ right[g]
    return [out]


def act(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The activations by their formulas."""
    if isinstance(activation, mxpert.GELU):
        return gelu(gate, approximate=activation.approximate) * up
    p = {name: float(getattr(activation, name)) for name in activation.__dataclass_fields__}
    if activation.name == mxpert.SiTUv2().name:
        bounded = p["beta"] * torch.tanh(gate / p["beta"]) / (1 + torch.exp(-gate))
        return bounded * p["beta_up"] * torch.tanh(up / p["beta_up"])
    if "limit" in p:
        gate, up = gate.clamp(max=p["limit"]), up.clamp(-p["limit"], p["limit"])
    swish = gate / (1 + torch.exp(-p.get("alpha", 1.0) * gate))
    return swish * (up + p["beta"] if "alpha" in p else up)


class Experts:
    """The two stages in float64."""

    def __init__(self, a: Arguments) -> None:
        weights: MoEWeights = a["weights"]
        order = weights.gate_up_order
        assert order is not None
        self.gate, self.up = mxpert.moe.weights.gate_up_rows(order, weights.intermediate_size)
        self.gate_up, self.down = wide(weights.gate_up_proj), wide(weights.down_proj)
        self.biases = weights.gate_up_bias, weights.down_bias

    def hidden(
        self, expert: int, x: torch.Tensor, factor: torch.Tensor | float, activation: Activation
    ) -> torch.Tensor:
        h = factor * (self.gate_up[expert] @ x)
        if self.biases[0] is not None:
            h = h + self.biases[0][expert].double()
        return act(activation, h[self.gate], h[self.up])

    def out(self, expert: int, h: torch.Tensor) -> torch.Tensor:
        y = self.down[expert] @ h
        return y if self.biases[1] is None else y + self.biases[1][expert].double()


def exact_layer(
    a: Arguments, stored: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> Results:
    """The definition of fused_moe, one (token, slot) at a time; `stored` rounds between stages."""
    experts, x = Experts(a), wide(a["x"])
    y = torch.zeros(x.shape, dtype=WIDE)
    on_input = a["apply_router_weight_on_input"]
    for token, (ids, factors) in enumerate(
        zip(a["topk_ids"].tolist(), a["topk_weights"].double(), strict=True)
    ):
        for expert, factor in zip(ids, factors, strict=True):
            h = experts.hidden(expert, x[token], factor if on_input else 1.0, a["activation"])
            y[token] += experts.out(expert, stored(h).double()) * (1.0 if on_input else factor)
    return [y]
