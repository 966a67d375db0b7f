"""Layers that mxpert does not serve in vLLM: refused at start-up, with the option to change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ...core.problem import GELU, Activation, ClampedSiLU, SiLU, SiTUv2, SwiGLU
from ...errors import UnsupportedError, message
from ...formats.spec import MX_BLOCK_SIZE
from ...moe.weights import GateUpOrder
from ..serving.refusals import Refusal, refuse_first
from ._start import refused_all2all, refused_options
from .options import KEY, OP

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

_GPT_OSS_ALPHA, _GPT_OSS_LIMIT = 1.702, 7.0  # constants of vLLM's own swigluoai
WITHOUT = f'remove "{KEY}" from --additional-config'


def refuse_unsupported(moe: FusedMoEConfig, vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError, in one line, for the first thing that mxpert does not serve.

    Args:
        moe: vLLM's FusedMoEConfig of one layer. vllm_config: vLLM's VllmConfig.
    """
    refuse_first(OP, chain(refused_options(vllm_config), _refused_layer(moe)))


def refuse_other_than_mxfp4(moe: FusedMoEConfig, format: str) -> None:
    """Raise UnsupportedError for what mxpert serves with MXFP4 experts alone.

    Args:
        moe: vLLM's FusedMoEConfig of one layer. format: of its experts.
    """
    if moe.has_bias:
        raise UnsupportedError(
            message(OP, "the experts", f"{format} without biases", "biases", WITHOUT)
        )
    if moe.activation is MoEActivation.SWIGLUOAI:
        need = f"gate rows before up rows in {format}"
        got = f"{moe.activation.value}, whose rows alternate"
        raise UnsupportedError(message(OP, "the experts' activation", need, got, WITHOUT))


def _refused_layer(moe: FusedMoEConfig) -> Iterator[Refusal]:
    parallel = moe.moe_parallel_config
    if parallel.use_all2all_kernels or getattr(parallel, "use_passthrough_all2all", False):
        yield from refused_all2all(parallel.all2all_backend)
    if moe.hidden_dim % MX_BLOCK_SIZE:
        yield "hidden_size", f"a multiple of {MX_BLOCK_SIZE}", moe.hidden_dim, WITHOUT


def activation_of(moe: FusedMoEConfig, layer: torch.nn.Module) -> tuple[Activation, GateUpOrder]:
    """Return a layer's activation and the order of its gate and up rows.

    Args:
        moe: vLLM's FusedMoEConfig. layer: the routed experts; older versions keep the limit there.

    Raises:
        UnsupportedError: mxpert has no such activation.
    """

    def parameter(name: str) -> float | None:
        value = getattr(moe, name, None)
        return getattr(layer, name, None) if value is None else value

    kind, limit = moe.activation, parameter("swiglu_limit")
    if kind is MoEActivation.SWIGLUOAI:
        return SwiGLU(_GPT_OSS_ALPHA, _GPT_OSS_LIMIT), GateUpOrder.INTERLEAVED
    order = GateUpOrder.CONCATENATED
    if kind is MoEActivation.SILU:
        return (SiLU() if limit is None else ClampedSiLU(limit)), order
    if kind is getattr(MoEActivation, "SWIGLUOAI_UNINTERLEAVE", None) and limit is not None:
        alpha, beta = parameter("swiglu_alpha"), parameter("swiglu_beta")
        if alpha in (None, 1.0) and beta in (None, 0.0):
            return ClampedSiLU(limit), order
        if alpha is not None and beta is not None:
            return SwiGLU(alpha, limit, beta), order
    if kind is MoEActivation.GELU:
        return GELU(), order
    if kind is getattr(MoEActivation, "GELU_TANH", None):
        return GELU("tanh"), order
    if kind is getattr(MoEActivation, "SITU", None):
        first, second = parameter("activation_situ_beta"), parameter("activation_situ_linear_beta")
        if first is not None and second is not None:
            return SiTUv2(first, second), order
    known = (
        "silu, silu with a limit, gelu, gelu_tanh, swigluoai, or situ with both of its parameters"
    )
    raise UnsupportedError(message(OP, "the experts' activation", known, kind.value, WITHOUT))
