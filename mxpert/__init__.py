"""Kernels in the OCP microscaling formats (MXFP4, MXFP8) for Mixture-of-Experts layers.

A layer in ten lines: quantise the experts, prepare them for a device, route tokens, run.

    >>> import torch, mxpert
    >>> E, H, F, T = 8, 64, 32, 5                     # experts, hidden, intermediate, tokens
    >>> gate_up, down = torch.randn(E, 2 * F, H) / 8, torch.randn(E, H, F) / 6
    >>> weights = mxpert.quantize_weights(gate_up, down, gate_up_order="concatenated")
    >>> weights = weights.prepare(device="cpu")
    >>> x, logits = torch.randn(T, H, dtype=torch.bfloat16), torch.randn(T, E)
    >>> topk_weights, topk_ids = mxpert.route_topk(logits, top_k=2)
    >>> y = mxpert.fused_moe(x, weights, topk_weights, topk_ids, activation="silu",
    ...                      activation_format="a8w4")
    >>> y.shape, y.dtype
    (torch.Size([5, 64]), torch.bfloat16)

`mxpert.explain` shows which kernel answers a call, `mxpert.training` holds layers that train in
MXFP8, and `mxpert.convert` puts these kernels under a model of Transformers.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from . import required as required  # first: it refuses in one line where a package is missing
from .core import interrupts as _interrupts  # noqa: F401 (before torch: its import takes a second)

# isort: split
import torch

from . import backends as _backends  # noqa: F401 (it registers the manifests)
from . import configs
from .core.problem import (
    GELU,
    ClampedSiLU,
    Combine,
    GroupScore,
    ReLU2,
    Scoring,
    SiLU,
    SiTUv2,
    SwiGLU,
    TopKOptions,
)
from .core.registry import override
from .distributed import ExpertParallel
from .errors import PerformanceWarning, UnsupportedError
from .explain import explain
from .formats.folding import FoldCertificate
from .formats.spans import rebase
from .formats.spec import ElementFormat, MXFormat, ScaleRule, ScaleSpan
from .formats.tensor import Layout, MXTensor
from .formats.token import TokenRows
from .formats.weight_rounding import RoundingCertificate
from .formats.weight_tensor import WeightFormat, WeightTensor
from .grouped.op import grouped_gemm, grouped_wgrad
from .integrations.on_import import watch
from .modules import MoE, quantize_weights
from .moe.from_logits import fused_moe_from_logits
from .moe.op import fused_moe, moe_down, moe_gate_up
from .moe.warm_up import warm_up
from .moe.weights import GateUpOrder, MoEWeights
from .quantize.dual_op import quantize_dual
from .quantize.op import dequantize, quantize
from .routing.op import make_routing_plan, route_topk
from .routing.plan import RoutingPlan, padded_capacity, padded_group_offsets

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import training as training
    from .integrations.checkpoints.load import load_expert_weights
    from .integrations.checkpoints.save import save_quantized
    from .integrations.models.convert import convert, restore
    from .integrations.models.evaluation import evaluate

__version__ = "0.2.0"

__all__ = [
    "GELU",
    "ClampedSiLU",
    "Combine",
    "ExpertParallel",
    "GateUpOrder",
    "GroupScore",
    "MXTensor",
    "MoE",
    "MoEWeights",
    "PerformanceWarning",
    "ReLU2",
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
    "evaluate",
    "explain",
    "fused_moe",
    "fused_moe_from_logits",
    "grouped_gemm",
    "grouped_wgrad",
    "load_expert_weights",
    "make_routing_plan",
    "moe_down",
    "moe_gate_up",
    "override",
    "padded_capacity",
    "padded_group_offsets",
    "quantize",
    "quantize_dual",
    "quantize_weights",
    "rebase",
    "restore",
    "route_topk",
    "save_quantized",
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
        RoundingCertificate,
        RoutingPlan,
        ScaleSpan,
        TokenRows,
        WeightFormat,
        WeightTensor,
        # where earlier versions had them, as their files say
        (GateUpOrder, "mxpert.weights.GateUpOrder"),
        (MoEWeights, "mxpert.weights.MoEWeights"),
        (RoutingPlan, "mxpert.routing.RoutingPlan"),
    ]
)

watch()  # so that experts_implementation="mxpert" works in Transformers


_LAZY = {
    "convert": "integrations.models.convert",
    "evaluate": "integrations.models.evaluation",
    "integrations": "",
    "load_expert_weights": "integrations.checkpoints.load",
    "restore": "integrations.models.convert",
    "save_quantized": "integrations.checkpoints.save",
    "training": "",
}
"""Module of each name that is imported at first use; empty where the name is a module."""


def __getattr__(name: str) -> Any:
    if name in configs.__all__:
        text = f"mxpert.{name} is now mxpert.configs.{name}; the old name goes in version 0.3"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(configs, name)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name] or name}")
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
