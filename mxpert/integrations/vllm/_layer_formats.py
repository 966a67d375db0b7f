"""How vLLM's methods hold the experts of each format until they are prepared.

The constructors of these methods choose one of vLLM's back ends, or fail, so they do not run. Each
function names the attributes that ``create_weights`` reads of its method instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization import modelopt, mxfp4

from ...errors import UnsupportedError, message
from ...formats.spec import MX_BLOCK_SIZE
from ..serving import shares
from .options import OP

if TYPE_CHECKING:
    import torch

    from ..checkpoints.expert_matrices import MatrixFormat

_CODES_PER_WORD = 8


@dataclass(frozen=True)
class Experts:
    """How vLLM holds a layer's experts until they are prepared.

    Args:
        format: of the weights, for messages: "MXFP4", "MXFP8", "NVFP4" or "INT4".
        method: vLLM's class, which creates and loads the parameters.
        state: what its ``create_weights`` reads of the method.
        stored: how the parameters hold each matrix; None for MXFP4 and MXFP8, whose parameters
            kernels read as they are.
    """

    format: str
    method: type
    state: Mapping[str, object] = field(default_factory=dict)
    stored: MatrixFormat | None = None


def mxfp4_experts(layer: torch.nn.Module, method: type) -> Experts:
    """MXFP4 in any container; vLLM's loaders ask for ``weight_dtype``."""
    is_gpt_oss = issubclass(method, mxfp4.GptOssMxfp4MoEMethod)
    state: dict[str, object] = {
        "weight_dtype": "gpt_oss_mxfp4" if is_gpt_oss else "mxfp4",
        "mxfp4_backend": Mxfp4MoeBackend.EMULATION,  # weights as the checkpoint has them
        "group_size": MX_BLOCK_SIZE,  # compressed-tensors
        "static_input_scales": False,  # quark
        "has_bias": layer.moe_config.has_bias,  # type: ignore[union-attr]
    }
    return Experts("MXFP4", method, state)


def mxfp8_experts(method: type, state: Mapping[str, object]) -> Experts:
    """MXFP8: e4m3 codes and E8M0 scales."""
    return Experts("MXFP8", method, {"weight_block_size": [1, MX_BLOCK_SIZE], **state})


def modelopt_mxfp8(config: object) -> Experts:
    """MXFP8 of ModelOpt and of MiniMax. config: vLLM's ModelOptMxFp8Config."""
    return mxfp8_experts(modelopt.ModelOptMxFp8FusedMoE, {"quant_config": config})


def modelopt_nvfp4(config: object) -> Experts:
    """NVFP4 of ModelOpt. config: vLLM's ModelOptNvFp4Config."""
    state = {"quant_config": config, "use_a16": True, "use_global_sf": False}
    return Experts("NVFP4", modelopt.ModelOptNvFp4FusedMoE, state, shares.MODELOPT_NVFP4)


def compressed_nvfp4(method: type) -> Experts:
    """NVFP4 of compressed-tensors."""
    state = {"group_size": 16, "use_a16": True, "use_global_sf": False}
    return Experts("NVFP4", method, state, shares.COMPRESSED_NVFP4)


def compressed_int4(method: type, weights: Any, prefix: str) -> Experts:
    """INT4 of compressed-tensors, created with rows as in the checkpoint.

    Args:
        method: vLLM's. weights: as `shares.compressed_int4` takes them. prefix: the layer's name.

    Raises:
        UnsupportedError: a group or an order that mxpert does not read, or zero points in a vLLM
            that does not load them so.
    """
    stored = shares.compressed_int4(weights, prefix, OP)
    names = "num_bits", "strategy", "group_size", "actorder", "symmetric"
    state: dict[str, object] = {name: getattr(weights, name) for name in names}
    state["packed_factor"] = _CODES_PER_WORD
    if method.__name__.endswith("MarlinMoEMethod"):  # below vLLM 0.32
        if not weights.symmetric:
            need, remedy = "vllm 0.32 or newer for zero points", "install it"
            raise UnsupportedError(message(OP, prefix, need, vllm.__version__, remedy))
        state["kernel_backend"] = "Flashinfer"  # the one whose weights keep their rows
        oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.int_wna16")
        backends: Any = getattr(oracle, "WNA16MoEBackend", None)  # Any: of these versions alone
        state["wna16_backend"] = getattr(backends, "FLASHINFER_TRTLLM", None)
    return Experts("INT4", method, state, stored)


# Any: classes whose names differ between versions
def awq(config: Any, prefix: str) -> Experts:
    """INT4 of AWQ; config is vLLM's. Raises as `shares.awq`."""
    method = _first(("auto_awq", "AutoAWQMoEMethod"), ("awq_marlin", "AWQMarlinMoEMethod"))
    state = {"quant_config": config, "input_dtype": None}
    return Experts("INT4", method, state, shares.awq(config.full_config, prefix, OP))


def gptq(config: Any, prefix: str) -> Experts:
    """INT4 of GPTQ; config is vLLM's. Raises as `shares.gptq`."""
    method = _first(("auto_gptq", "AutoGPTQMoEMethod"), ("gptq_marlin", "GPTQMarlinMoEMethod"))
    state = {"quant_config": config, "input_dtype": None}
    return Experts("INT4", method, state, shares.gptq(config.full_config, prefix, OP))


def _first(*candidates: tuple[str, str]) -> type:
    """The first class that this vLLM has."""
    for module, name in candidates:
        try:
            found = importlib.import_module(f"{quantization.__name__}.{module}")
        except ModuleNotFoundError:
            continue
        method: type = getattr(found, name)
        return method
    raise ModuleNotFoundError(candidates)
