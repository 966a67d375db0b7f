"""Layers that mxpert does not serve in SGLang: refused at start-up, with the option to change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ...core.problem import GELU, Activation, ClampedSiLU, SiLU, SiTUv2, SwiGLU
from ...errors import UnsupportedError, message
from ...formats.spec import MX_BLOCK_SIZE
from ...moe.weights import GateUpOrder
from ..serving.refusals import Refusal, refuse_first
from ._plugin import OP
from ._start import refused_options

if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.server_args import ServerArgs

    from ._layer_formats import Experts

_OTHER = "choose another --moe-runner-backend"
_SITU_BETA = 4.0
"""SGLang's own default of SiTU's first parameter."""


def refuse_unsupported(config: MoeRunnerConfig, server_args: ServerArgs) -> None:
    """Raise UnsupportedError, in one line, for the first thing that mxpert does not serve.

    Args:
        config: SGLang's MoeRunnerConfig of one layer. server_args: SGLang's ServerArgs.
    """
    refuse_first(OP, chain(refused_options(server_args), _refused_layer(config)))


def refuse_other_than_mxfp4(
    config: MoeRunnerConfig, columns: int, experts: Experts, *, with_bias: bool
) -> None:
    """Raise UnsupportedError for what mxpert serves with MXFP4 of gpt-oss's kind alone.

    Args:
        config: SGLang's MoeRunnerConfig of one layer. columns: of the rank's intermediate size.
        experts: how they are stored. with_bias: whether they have biases.
    """
    format, block = experts.format, experts.block
    refused: list[Refusal] = []
    if with_bias:
        refused.append(("the experts", f"{format} without biases", "biases", _OTHER))
    if _is_interleaved(config):
        need = f"gate rows before up rows in {format}"
        refused.append(("the experts' activation", need, "rows that alternate", _OTHER))
    if config.hidden_size % block:
        need = f"a multiple of the group, {block}"
        refused.append(("hidden_size", need, config.hidden_size, _OTHER))
    if columns % block:
        need, remedy = f"a multiple of {block} columns for each rank", "pass another size"
        refused.append(("--tp-size", need, columns, f"{remedy} or --ep-size"))
    refuse_first(OP, refused)


def _refused_layer(config: MoeRunnerConfig) -> Iterator[Refusal]:
    if config.params_dtype is not torch.bfloat16:
        yield "--dtype", "bfloat16", config.params_dtype, "pass --dtype bfloat16"
    if config.no_combine or not config.is_gated:
        got = "no_combine" if config.no_combine else f"{config.activation} without a gate"
        yield "the layer", "gated experts whose results are summed", got, _OTHER
    if config.hidden_size % MX_BLOCK_SIZE:
        yield "hidden_size", f"a multiple of {MX_BLOCK_SIZE}", config.hidden_size, _OTHER
    columns = config.intermediate_size_per_partition
    if columns % MX_BLOCK_SIZE and not _is_interleaved(config):
        need, remedy = f"a multiple of {MX_BLOCK_SIZE} columns for each rank", "pass another size"
        yield "--tp-size", need, columns, f"{remedy} or --ep-size"


def _is_interleaved(config: MoeRunnerConfig) -> bool:
    """Whether gate and up rows alternate, as in gpt-oss."""
    is_swiglu: bool = config.activation == "silu" and config.gemm1_alpha is not None
    return is_swiglu and bool(config.gate_up_interleaved)


def activation_of(config: MoeRunnerConfig) -> tuple[Activation, GateUpOrder]:
    """Return a layer's activation and the order of its gate and up rows.

    Args:
        config: SGLang's MoeRunnerConfig.

    Raises:
        UnsupportedError: mxpert has no such activation.
    """
    order = GateUpOrder.INTERLEAVED if _is_interleaved(config) else GateUpOrder.CONCATENATED
    alpha, clamp = config.gemm1_alpha, config.gemm1_clamp_limit
    limit = config.swiglu_limit if clamp is None else clamp
    if config.activation == "silu":
        if alpha is None:
            return (SiLU() if limit is None else ClampedSiLU(limit)), order
        if clamp is not None:
            return SwiGLU(
                alpha, clamp, 1.0 if config.gemm1_beta is None else config.gemm1_beta
            ), order
    if config.activation in ("gelu", "gelu_tanh") and alpha is None and limit is None:
        return GELU("none" if config.activation == "gelu" else "tanh"), order
    if config.activation == "situ" and clamp is not None:
        return SiTUv2(_SITU_BETA if alpha is None else alpha, clamp), GateUpOrder.CONCATENATED
    known = (
        "silu, silu with a limit, gelu, gelu_tanh, gpt-oss's swiglu, or situ with both of its "
        "parameters"
    )
    raise UnsupportedError(message(OP, "the experts' activation", known, config.activation, _OTHER))
