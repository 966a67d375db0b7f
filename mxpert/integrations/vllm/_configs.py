"""vLLM's quantisation configs, with mxpert's method for their MXFP4 experts.

Each served config is a subclass of the config that this vLLM has under the same name. It decides
which layers are MXFP4 experts and which of vLLM's methods creates and loads their weights.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from ...errors import UnsupportedError, message
from ._method import served_method
from ._plugin import serve
from ._refusals import activation_of
from .options import KEY, OP, requested_format, require_supported

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig


def in_tree_config(name: str) -> type:
    """Return the config class that vLLM itself has under `name`, on this platform."""
    registered = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    ours = registered.pop(name, None)
    try:
        found: type = quantization.get_quantization_config(name)
        return found
    finally:
        if ours is not None:
            registered[name] = ours


def unsupported_experts(prefix: str, got: str) -> UnsupportedError:
    """The error for routed experts that are quantised, but not to MXFP4 as mxpert reads it."""
    remedy = f'remove "{KEY}" from --additional-config: vLLM has kernels for these experts'
    return UnsupportedError(message(OP, prefix, "MXFP4 experts", got, remedy))


class Served:
    """Mixed into a config of vLLM: routed experts in MXFP4 get mxpert's method if it is asked for.

    vLLM's own answer is returned without the option, and for every other layer.
    """

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer; vLLM calls this."""
        in_tree = super().get_quant_method  # type: ignore[misc]
        vllm_config = get_current_vllm_config()
        activation_format = requested_format(vllm_config.additional_config)
        if activation_format is None:
            return in_tree(layer, prefix)
        require_supported(vllm.__version__)
        base = self.moe_method(layer, prefix) if hasattr(layer, "moe_config") else None
        if base is None:
            return in_tree(layer, prefix)
        activation_of(layer.moe_config, layer)  # refused here, before weights are loaded
        return served_method(base)(layer.moe_config, activation_format, prefix, vllm_config)

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        """Return vLLM's method that creates and loads the layer's weights.

        Args:
            layer: the routed experts. prefix: the layer's name.

        Returns:
            The method's class; None if the checkpoint leaves these experts unquantised.

        Raises:
            UnsupportedError: the experts are quantised to something else.
        """
        raise NotImplementedError


class GptOss(Served):
    """gpt-oss checkpoints: gate and up rows interleaved, with biases."""

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        method: type = mxfp4.GptOssMxfp4MoEMethod
        return method


class Mxfp4(Served):
    """Other models with ``"quant_method": "mxfp4"``."""

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        one_method = not hasattr(mxfp4.Mxfp4Config, "_make_moe_method")  # vLLM 0.20, 0.26
        method: type = mxfp4.GptOssMxfp4MoEMethod if one_method else mxfp4.Mxfp4MoEMethod
        return method


class DeepSeekV4(Served):
    """DeepSeek-V4: FP8 linear layers, experts in MXFP4 ("fp4"), in FP8, or in NVFP4."""

    ignored_layers: list[str]
    packed_modules_mapping: dict[str, list[str]]
    expert_dtype: str

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        if is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
        ):
            return None
        if self.expert_dtype != "fp4":
            raise unsupported_experts(prefix, f"expert_dtype {self.expert_dtype!r}")
        by_layer = getattr(self, "_is_nvfp4_expert_layer", None)  # DeepSeek-V4.1, vLLM 0.33
        algorithm = getattr(self, "moe_quant_algo", "")
        if by_layer(prefix) if by_layer else algorithm == "NVFP4":
            raise unsupported_experts(prefix, "NVFP4")
        method: type = mxfp4.Mxfp4MoEMethod
        return method


class CompressedTensors(Served):
    """compressed-tensors checkpoints (``mxfp4-pack-quantized``).

    The option chooses the activation format, whatever the checkpoint declares for activations.
    """

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        config: CompressedTensorsConfig = self
        config._add_fused_moe_to_target_scheme_map()
        name = getattr(layer, "ckpt_gate_proj_name", "gate_proj")
        scheme = config.get_scheme_dict(layer, f"{prefix}.0.{name}")
        if scheme is None:
            return None
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        if not config._is_mxfp4(weights):
            raise unsupported_experts(prefix, f"a compressed-tensors scheme of {weights}")
        is_a8 = getattr(config, "_is_mxfp4_w4a8_fp8", None)  # from vLLM 0.32 on
        bits = 8 if is_a8 is not None and is_a8(weights, inputs) else 4
        module = importlib.import_module(
            f"{quantization.__name__}.compressed_tensors.compressed_tensors_moe"
            f".compressed_tensors_moe_w4a{bits}_mxfp4"
        )
        method: type = getattr(module, f"CompressedTensorsW4A{bits}Mxfp4MoEMethod")
        return method


class Quark(Served):
    """Quark checkpoints whose experts have MXFP4 weights, alone or with dynamic activations."""

    packed_modules_mapping: dict[str, list[str]]
    quant_config: dict[str, Any]

    def moe_method(self, layer: torch.nn.Module, prefix: str) -> type | None:
        from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkOCP_MX_MoEMethod
        from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

        more = {"check_children": True}  # from vLLM 0.26 on
        known = inspect.signature(should_ignore_layer).parameters
        if should_ignore_layer(
            prefix,
            ignore=self.quant_config.get("exclude"),
            fused_mapping=self.packed_modules_mapping,
            **{name: value for name, value in more.items() if name in known},
        ):
            return None
        config: QuarkConfig = self
        matched = config._find_matched_config(prefix, layer)
        weight, inputs = (_only(matched.get(key)) for key in ("weight", "input_tensors"))
        if inputs is not None and not (isinstance(inputs, dict) and inputs.get("is_dynamic")):
            raise unsupported_experts(prefix, f"static activation scales ({inputs})")
        mx = isinstance(weight, dict) and config._is_w_ocp_mx_a_x(weight, inputs)
        if not mx or weight["dtype"] != "fp4":
            raise unsupported_experts(prefix, f"a quark scheme of {weight}")
        method: type = QuarkOCP_MX_MoEMethod
        return method


def _only(config: object) -> Any:
    """The entry of a list with one entry; anything else as it is."""
    return config[0] if isinstance(config, list) and len(config) == 1 else config


def _served_configs() -> dict[str, type]:
    """The served configs by vLLM's name; at module level, because workers unpickle them."""
    mixins = {
        "gpt_oss_mxfp4": GptOss,
        "mxfp4": Mxfp4,
        "deepseek_v4_fp8": DeepSeekV4,
        "compressed-tensors": CompressedTensors,
        "quark": Quark,
    }
    made = {
        name: type(f"Mxpert{mixin.__name__}Config", (mixin, in_tree_config(name)), {})
        for name, mixin in mixins.items()
        if name in quantization.QUANTIZATION_METHODS
    }
    for config in made.values():
        config.__module__ = __name__
        globals()[config.__name__] = config
    return made


SERVED = _served_configs()
serve(True)  # a worker gets its config by pickle, and no check runs there
