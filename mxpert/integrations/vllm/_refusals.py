"""What mxpert does not serve in vLLM: refused at start-up, with the option to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import vllm.envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ...errors import UnsupportedError, message
from ...formats.spec import MX_BLOCK_SIZE
from ...problem import Activation, ClampedSiLU, SiLU, SiTUv2, SwiGLU
from ...weights import GateUpOrder

ALL2ALL = ("allgather_reducescatter", "deepep_high_throughput")
"""Backends of ``--all2all-backend`` whose output is in vLLM's Standard format."""

_GPT_OSS_ALPHA, _GPT_OSS_LIMIT = 1.702, 7.0  # constants of vLLM's own swigluoai
_OP = "mxpert for vLLM"


def refuse_unsupported(moe: Any, vllm_config: Any) -> None:
    """Raise UnsupportedError, in one line, for the first thing that mxpert does not serve.

    Args:
        moe: vLLM's FusedMoEConfig of one layer. vllm_config: vLLM's VllmConfig.
    """
    for argument, need, got, remedy in _refused(moe, vllm_config):
        raise UnsupportedError(message(_OP, argument, need, got, remedy))


def _refused(moe: Any, vllm_config: Any) -> Iterator[tuple[str, str, object, str]]:
    """Argument, what is needed, what was given, remedy."""
    parallel = moe.moe_parallel_config
    if parallel.enable_eplb:
        yield "--enable-eplb", "experts that stay where they are", "true", "remove --enable-eplb"
    if moe.is_lora_enabled:
        yield "--enable-lora", "experts without LoRA", "true", "remove --enable-lora"
    dispatches = parallel.use_all2all_kernels or getattr(parallel, "use_passthrough_all2all", False)
    if dispatches and parallel.all2all_backend not in ALL2ALL:
        yield (
            "--all2all-backend",
            f"one of {ALL2ALL}, which hand over tokens in the Standard format",
            repr(parallel.all2all_backend),
            f"pass --all2all-backend {ALL2ALL[0]}",
        )
    offload = getattr(vllm_config, "offload_config", None)
    if offload is not None and offload.uva.cpu_offload_gb > 0:
        got = offload.uva.cpu_offload_gb
        yield "--cpu-offload-gb", "0 (weights on the device)", got, "remove --cpu-offload-gb"
    if offload is not None and offload.prefetch.offload_group_size > 0:
        got = offload.prefetch.offload_group_size
        yield "--offload-group-size", "0 (weights on the device)", got, "remove it"
    if moe.moe_backend != "auto":
        yield (
            "--moe-backend",
            "'auto', since mxpert is the backend",
            repr(moe.moe_backend),
            "remove --moe-backend",
        )
    if moe.in_dtype is not torch.bfloat16:
        yield "--dtype", "bfloat16", moe.in_dtype, "pass --dtype bfloat16"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        yield (
            "VLLM_BATCH_INVARIANT",
            "0: tiles depend on the batch",
            "1",
            "unset VLLM_BATCH_INVARIANT",
        )
    if moe.hidden_dim % MX_BLOCK_SIZE:
        need = f"a multiple of {MX_BLOCK_SIZE}"
        yield "hidden_size", need, moe.hidden_dim, 'remove "mxpert" from --additional-config'


def activation_of(moe: Any, layer: Any) -> tuple[Activation, GateUpOrder]:
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
        if alpha is not None and beta == 1.0:
            return SwiGLU(alpha, limit), order
        if alpha in (None, 1.0) and beta in (None, 0.0):
            return ClampedSiLU(limit), order
    if kind is getattr(MoEActivation, "SITU", None):
        first, second = parameter("activation_situ_beta"), parameter("activation_situ_linear_beta")
        if first is not None and second is not None:
            return SiTUv2(first, second), order
    known = "silu, silu with a limit, swigluoai, or situ with both of its parameters"
    remedy = 'remove "mxpert" from --additional-config'
    raise UnsupportedError(message(_OP, "the experts' activation", known, kind.value, remedy))
