"""Case: one function of `special_cases` and `special_grouped`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu

import mxpert
from mxpert import MXTensor
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
