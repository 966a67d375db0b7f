"""vLLM's quantisation configs, with mxpert's method for their experts.

Each served config is a subclass of the config that this vLLM has under the same name. It decides
which layers are experts that mxpert computes, and how vLLM creates and loads their weights.
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
from ..serving.refusals import FORMATS
from ..serving.shares import is_packed_int4
from ._layer_formats import (
    Experts,
    awq,
    compressed_int4,
    compressed_nvfp4,
    gptq,
    modelopt_mxfp8,
    modelopt_nvfp4,
    mxfp4_experts,
    mxfp8_experts,
)
from ._method import served_method
from ._plugin import serve, served_names
from ._refusals import activation_of
from .options import (
    AWQ_NAMES,
    GPTQ_NAMES,
    KEY,
    MODELOPT_NAMES,
    OP,
    requested_options,
    require_supported,
)

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase
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
    """The error for routed experts that are quantised, but not as mxpert reads them."""
    remedy = f'remove "{KEY}" from --additional-config: vLLM has kernels for these experts'
    return UnsupportedError(message(OP, prefix, FORMATS, got, remedy))


class Served:
    """Mixed into a config of vLLM: routed experts get mxpert's method if it is asked for.

    vLLM's own answer is returned without the option, and for every other layer.
    """

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer; vLLM calls this."""
        in_tree = super().get_quant_method  # type: ignore[misc]
        vllm_config = get_current_vllm_config()
        options = requested_options(vllm_config.additional_config)
        if options is None:
            return in_tree(layer, prefix)
        require_supported(vllm.__version__)
        experts = self.experts(layer, prefix) if hasattr(layer, "moe_config") else None
        if experts is None:
            return in_tree(layer, prefix)
        activation_of(layer.moe_config, layer)  # refused here, before weights are loaded
        method = served_method(experts.method)
        return method(layer.moe_config, options, prefix, vllm_config, experts)

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
        """Return how vLLM creates and loads the layer's weights.

        Args:
            layer: the routed experts. prefix: the layer's name.

        Returns:
            None if the checkpoint leaves these experts unquantised.

        Raises:
            UnsupportedError: the experts are quantised to something else.
        """
        raise NotImplementedError


class GptOss(Served):
    """gpt-oss checkpoints: gate and up rows interleaved, with biases."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts:
        return mxfp4_experts(layer, mxfp4.GptOssMxfp4MoEMethod)


class Mxfp4(Served):
    """Other models with ``"quant_method": "mxfp4"``."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts:
        one_method = not hasattr(mxfp4.Mxfp4Config, "_make_moe_method")  # vLLM 0.20, 0.26
        method = mxfp4.GptOssMxfp4MoEMethod if one_method else mxfp4.Mxfp4MoEMethod
        return mxfp4_experts(layer, method)


class DeepSeekV4(Served):
    """DeepSeek-V4: FP8 linear layers, experts in MXFP4 ("fp4"), in FP8, or in NVFP4."""

    ignored_layers: list[str]
    packed_modules_mapping: dict[str, list[str]]
    expert_dtype: str

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
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
            raise unsupported_experts(prefix, "NVFP4 in DeepSeek-V4's container")
        return mxfp4_experts(layer, mxfp4.Mxfp4MoEMethod)


class CompressedTensors(Served):
    """compressed-tensors checkpoints in MXFP4, MXFP8, NVFP4 and INT4.

    The option chooses the activation format, whatever the checkpoint declares for activations.
    """

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
        config: CompressedTensorsConfig = self
        config._add_fused_moe_to_target_scheme_map()
        roles = "gate", "up", "down"
        names = [getattr(layer, f"ckpt_{role}_proj_name", f"{role}_proj") for role in roles]
        schemes = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name]
        scheme = schemes[0]
        if any(each != scheme for each in schemes):
            raise unsupported_experts(prefix, "other schemes in gate, up and down projections")
        if scheme is None:
            return None
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        if config._is_mxfp4(weights):
            is_a8 = getattr(config, "_is_mxfp4_w4a8_fp8", None)  # from vLLM 0.32 on
            bits = 8 if is_a8 is not None and is_a8(weights, inputs) else 4
            return mxfp4_experts(layer, _compressed(f"w4a{bits}_mxfp4", f"W4A{bits}Mxfp4"))
        if config._is_mxfp8(weights):
            return mxfp8_experts(_compressed("w8a8_mxfp8", "W8A8Mxfp8"), {})
        if config._is_nvfp4_format(weights):
            return compressed_nvfp4(_compressed("w4a4_nvfp4", "W4A4Nvfp4"))
        stored_as = scheme.get("format") or getattr(config, "quant_format", None)
        if is_packed_int4(weights, stored_as) and inputs is None:
            try:
                method = _compressed("wna16_marlin", "WNA16Marlin")  # below vLLM 0.32
            except ModuleNotFoundError:
                method = _compressed("wna16", "WNA16")
            return compressed_int4(method, weights, prefix)
        raise unsupported_experts(prefix, f"a compressed-tensors scheme of {weights}")


def _compressed(module: str, name: str) -> type:
    """The method that vLLM has for experts of compressed-tensors' schemes."""
    found = importlib.import_module(
        f"{quantization.__name__}.compressed_tensors.compressed_tensors_moe"
        f".compressed_tensors_moe_{module}"
    )
    method: type = getattr(found, f"CompressedTensors{name}MoEMethod")
    return method


class ModelOpt(Served):
    """ModelOpt's NVFP4 and MXFP8, MiniMax's MXFP8, and ModelOpt's lists of layers."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
        config: ModelOptQuantConfigBase = self
        if config.is_layer_excluded(prefix):
            return None
        if not hasattr(config, "quantized_layers"):
            is_mxfp8 = config.get_name() == "modelopt_mxfp8"
            return modelopt_mxfp8(config) if is_mxfp8 else modelopt_nvfp4(config)
        algorithm = config._resolve_quant_algo(prefix)
        if algorithm is None:
            return None
        make = {"NVFP4": modelopt_nvfp4, "W4A16_NVFP4": modelopt_nvfp4, "MXFP8": modelopt_mxfp8}
        part = getattr(config, f"{str(algorithm).lower()}_config", None)
        if algorithm not in make or part is None:
            raise unsupported_experts(prefix, f"quant_algo {algorithm!r}")
        return make[algorithm](part)


class Awq(Served):
    """AWQ checkpoints."""

    modules_to_not_convert: list[str]

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
        if any(name in prefix for name in self.modules_to_not_convert or ()):
            return None
        return awq(self, prefix)


class Gptq(Served):
    """GPTQ checkpoints."""

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
        from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override

        return (
            None if get_dynamic_override(self, layer_name=prefix) is False else gptq(self, prefix)
        )


class Quark(Served):
    """Quark checkpoints whose experts have MXFP4 weights, alone or with dynamic activations."""

    packed_modules_mapping: dict[str, list[str]]
    quant_config: dict[str, Any]

    def experts(self, layer: torch.nn.Module, prefix: str) -> Experts | None:
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
        return mxfp4_experts(layer, QuarkOCP_MX_MoEMethod)


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
        **dict.fromkeys(MODELOPT_NAMES, ModelOpt),
        **dict.fromkeys(AWQ_NAMES, Awq),
        **dict.fromkeys(GPTQ_NAMES, Gptq),
    }
    made: dict[str, type] = {}
    for name in served_names():
        in_tree, mixin = in_tree_config(name), mixins[name]
        found = (each for each in made.values() if each.__bases__ == (mixin, in_tree))
        made[name] = next(found, None) or _served(mixin, in_tree)
    return made


def _served(mixin: type, in_tree: type) -> type:
    config = type(f"Mxpert{in_tree.__name__}", (mixin, in_tree), {"__module__": __name__})
    globals()[config.__name__] = config
    return config


SERVED = _served_configs()
serve(True)  # a worker gets its config by pickle, and no check runs there
