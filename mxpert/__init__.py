"""Kernels in the OCP microscaling formats (MXFP4, MXFP8) for Mixture-of-Experts layers.

A layer in ten lines: quantise the experts, prepare them for a device, route tokens, run.

    >>> import torch, mxpert
    >>> E, H, F, T = 8, 64, 32, 5                     # experts, hidden, intermediate, tokens
    >>> gate_up, down = torch.randn(E, 2 * F, H) / 8, torch.randn(E, H, F) / 6
    >>> weights = mxpert.MoEWeights(
    ...     mxpert.quantize(gate_up, "mxfp4"), mxpert.quantize(down, "mxfp4"),
    ...     gate_up_order=mxpert.GateUpOrder.CONCATENATED).prepare(device="cpu")
    >>> x, logits = torch.randn(T, H, dtype=torch.bfloat16), torch.randn(T, E)
    >>> topk_weights, topk_ids = mxpert.route_topk(logits, top_k=2)
    >>> y = mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation=mxpert.SiLU(),
    ...                      activation_format="a8w4")
    >>> y.shape, y.dtype
    (torch.Size([5, 64]), torch.bfloat16)

`mxpert.explain` shows which kernel answers a call, `mxpert.training` holds layers that train in
MXFP8, and `mxpert.convert` puts these kernels under a model of Transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import required as required  # first: it refuses in one line where a package is missing

# isort: split
import torch

from .dispatch import override
from .errors import PerformanceWarning, UnsupportedError
from .formats.folding import FoldCertificate
from .formats.spans import rebase
from .formats.spec import ElementFormat, MXFormat, ScaleRule, ScaleSpan
from .formats.tensor import Layout, MXTensor
from .formats.token import TokenRows
from .modules import MoE
from .ops.explain import explain
from .ops.grouped_gemm import grouped_gemm, grouped_wgrad
from .ops.moe import fused_moe, moe_down, moe_gate_up
from .ops.quantize import dequantize, quantize
from .ops.quantize_dual import quantize_dual
from .ops.route import make_routing_plan, route_topk
from .ops.warm_up import warm_up
from .problem import (
    Cdna4GemmConfig,
    Cdna4Kernel,
    ClampedSiLU,
    Combine,
    GemmConfig,
    HopperGemmConfig,
    HopperKernel,
    MoEConfig,
    ReferenceConfig,
    Scoring,
    SiLU,
    SiTUv2,
    SwiGLU,
    TopKOptions,
)
from .routing import RoutingPlan, padded_capacity, padded_group_offsets
from .weights import GateUpOrder, MoEWeights

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import training as training
    from .integrations.models.convert import convert

__version__ = "0.2.0"

__all__ = [
    "ClampedSiLU",
    "Combine",
    "GateUpOrder",
    "GemmConfig",
    "Cdna4GemmConfig",
    "Cdna4Kernel",
    "HopperGemmConfig",
    "HopperKernel",
    "MXTensor",
    "MoE",
    "MoEConfig",
    "MoEWeights",
    "PerformanceWarning",
    "ReferenceConfig",
    "RoutingPlan",
    "ScaleRule",
    "ScaleSpan",
    "Scoring",
    "SiLU",
    "SiTUv2",
    "SwiGLU",
    "TopKOptions",
    "UnsupportedError",
    "convert",
    "dequantize",
    "explain",
    "fused_moe",
    "grouped_gemm",
    "grouped_wgrad",
    "make_routing_plan",
    "moe_down",
    "moe_gate_up",
    "override",
    "padded_capacity",
    "padded_group_offsets",
    "quantize",
    "quantize_dual",
    "rebase",
    "route_topk",
    "warm_up",
]

# torch.load(weights_only=True) makes these objects; each checks itself as it is made.
torch.serialization.add_safe_globals(
    [
        ElementFormat,
        FoldCertificate,
        GateUpOrder,
        Layout,
        MXFormat,
        MXTensor,
        MoEWeights,
        RoutingPlan,
        ScaleSpan,
        TokenRows,
    ]
)


# Imported at first use: they take torch's compiler, which costs as much as torch itself.
_LAZY = {"convert": "integrations.models.convert", "integrations": "", "training": ""}
"""Module of each name; empty where the name is a module."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name] or name}")
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
