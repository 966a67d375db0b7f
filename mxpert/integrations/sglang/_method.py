"""The method and the runner of a layer's MXFP4 experts in SGLang."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.layers.moe import MoeRunner
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import set_weight_attrs

import mxpert

from ...errors import UnsupportedError, message
from ...formats.names import ActivationFormat
from ...formats.spec import MX_BLOCK_SIZE
from ..serving.layer import Layer, warm_up_layer, warn_of_unfolded
from ..serving.layer_weights import prepare_layer
from . import BACKENDS, OP
from ._refusals import activation_of, refuse_unsupported

logger = logging.getLogger("sglang.srt.mxpert")  # SGLang shows the loggers below its own name

_DEFAULT_TOKENS = 8192
"""Largest prefill where --chunked-prefill-size is off and SGLang names no other limit."""


@dataclass
class MxpertQuantInfo(MoeQuantInfo):
    """What the runner computes with."""

    layer: Layer


class MxpertRunnerCore(DispatchMoeRunnerCore):
    """SGLang's runner core over `mxpert.fused_moe`, for standard dispatch."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        method = getattr(config.layer, "quant_method", None)
        if not isinstance(method, ServedMethod):
            raise UnsupportedError(
                message(
                    OP,
                    "--moe-runner-backend",
                    "MXFP4 experts (quant_method mxfp4)",
                    type(method).__name__,
                    "choose another backend: SGLang has kernels for these experts",
                )
            )

    @property
    def runner_backend(self) -> Any:
        return get_moe_runner_backend()

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """Return the experts' weighted sum [T, H]; ids are local, −1 for foreign ones."""
        x, routing = dispatch_output.hidden_states, dispatch_output.topk_output
        y = quant_info.layer.run(
            x,
            routing.topk_weights,
            routing.topk_ids,
            None,
            on_input=runner_config.apply_router_weight_on_input,
            out=x if runner_config.inplace and x.is_contiguous() else None,
        )
        factor = runner_config.routed_scaling_factor
        if factor not in (None, 1.0):
            y.mul_(factor)
        return StandardCombineInput(hidden_states=y)


class ServedMethod(FusedMoEMethodBase):
    """Creates the parameters that SGLang loads, prepares them, and runs the layer.

    Args:
        activation_format: as `mxpert.fused_moe` takes it. prefix: the layer's name, for the log.
    """

    def __init__(self, activation_format: ActivationFormat, prefix: str) -> None:
        super().__init__()
        self.activation_format, self.prefix = activation_format, prefix
        self.info: MxpertQuantInfo | None = None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        """Create SGLang's parameters, as zeros: what the checkpoint does not fill is padding."""
        refuse_unsupported(layer.moe_runner_config, get_server_args())
        activation_of(layer.moe_runner_config)  # refused here, before weights are loaded
        columns = -(-intermediate_size_per_partition // MX_BLOCK_SIZE) * MX_BLOCK_SIZE
        projections = {"w13": (2 * columns, hidden_size), "w2": (hidden_size, columns)}
        for name, (rows, depth) in projections.items():
            tensors = {
                f"{name}_weight": torch.zeros(num_experts, rows, depth // 2, dtype=torch.uint8),
                f"{name}_weight_scale": torch.zeros(
                    num_experts, rows, depth // MX_BLOCK_SIZE, dtype=torch.uint8
                ),
            }
            if with_bias:
                tensors[f"{name}_weight_bias"] = torch.zeros(
                    num_experts, rows, dtype=torch.bfloat16
                )
            for parameter_name, tensor in tensors.items():
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(parameter_name, parameter)
                set_weight_attrs(parameter, attributes)
            getattr(layer, f"{name}_weight_scale").quant_method = "group"  # SGLang's loader asks

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights, once after loading."""
        if self.info is not None:
            need, remedy = "weights that are loaded once", "restart the server with the new ones"
            raise UnsupportedError(message(OP, "loaded weights", need, "others", remedy))
        config = self.runner.config
        activation, order = activation_of(config)
        weights = prepare_layer(layer, order, None, op=OP, bias_suffix="_weight_bias")
        prepared = Layer(weights, activation, self.activation_format)
        self.info = MxpertQuantInfo(prepared)
        warn_of_unfolded(weights, self.prefix, logger)
        warm_up_layer(
            prepared,
            max_tokens(get_server_args()),
            top_k=config.top_k,
            logger=logger,
            on_input=config.apply_router_weight_on_input,
        )

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        if not TopKOutputChecker.format_is_standard(dispatch_output.topk_output):
            raise UnsupportedError(message(OP, "top-k", "SGLang's standard output", "another"))
        return self.runner.run(dispatch_output, self.info)


def max_tokens(server_args: Any) -> int:
    """The largest number of tokens of one forward pass, as far as SGLang limits it."""
    resolved = resolved_view(server_args)
    names = "chunked_prefill_size", "max_prefill_tokens"
    limits = (getattr(resolved, name, None) for name in names)
    most = next((limit for limit in limits if limit is not None and limit > 0), _DEFAULT_TOKENS)
    ranks = (getattr(resolved, name, None) or 1 for name in ("dp_size", "attn_dp_size"))
    return int(most) * math.prod(ranks)


def method_of(config: Any, layer: Any, prefix: str) -> ServedMethod | None:
    """Return mxpert's method for a layer of MXFP4 experts; None for every other layer.

    Args:
        config: SGLang's Mxfp4Config. prefix: the layer's name.

    Raises:
        UnsupportedError: experts that the checkpoint does not hold in MXFP4.
    """
    if not isinstance(layer, FusedMoE):
        return None
    if not config.is_checkpoint_mxfp4_serialized:
        raise UnsupportedError(
            message(
                OP,
                "--quantization mxfp4",
                "a checkpoint with MXFP4 experts",
                "other weights, which SGLang would quantise",
                "quantise the checkpoint first: mxpert quantize",
            )
        )
    activation_format = BACKENDS[get_moe_runner_backend().value]
    text = "mxpert %s computes the MXFP4 experts: activations %s"
    _log_once(text, mxpert.__version__, activation_format)
    return ServedMethod(activation_format, prefix)


_logged: set[tuple[object, ...]] = set()


def _log_once(*arguments: Any) -> None:
    if arguments not in _logged:
        _logged.add(arguments)
        logger.info(*arguments)
