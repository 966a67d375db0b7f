"""mxpert: microscaling (OCP MX) kernels for Mixture-of-Experts layers."""

from .dispatch import override
from .errors import UnsupportedError
from .formats.spans import rebase
from .formats.spec import ScaleRule, ScaleSpan
from .formats.tensor import MXTensor
from .integrations.convert import convert
from .modules import MoE
from .ops.explain import explain
from .ops.grouped_gemm import grouped_gemm, grouped_wgrad
from .ops.moe import fused_moe, moe_down, moe_gate_up
from .ops.quantize import dequantize, quantize
from .ops.quantize_dual import quantize_dual
from .ops.route import make_routing_plan, route_topk
from .problem import (
    ClampedSiLU, Combine, GemmConfig, MoEConfig, ReferenceConfig, Scoring, SiLU, SiTUv2, SwiGLU,
)
from .routing import RoutingPlan, padded_capacity, padded_group_offsets
from .weights import GateUpOrder, MoEWeights

__version__ = "0.1.0"

__all__ = [
    "ClampedSiLU", "Combine", "GateUpOrder", "GemmConfig", "MXTensor", "MoE", "MoEConfig",
    "MoEWeights",
    "ReferenceConfig", "RoutingPlan", "ScaleRule", "ScaleSpan", "Scoring", "SiLU", "SiTUv2",
    "SwiGLU", "UnsupportedError", "convert", "dequantize", "explain", "fused_moe", "grouped_gemm",
    "grouped_wgrad", "make_routing_plan", "moe_down", "moe_gate_up", "override", "padded_capacity",
    "padded_group_offsets", "quantize", "quantize_dual", "rebase", "route_topk",
]
