"""The containers that experts are written to: their tensors, and what a config says of them.

`mxpert convert` and `mxpert quantize` write weights alone: no scales of activations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...formats.spec import MXFP4, MXFP8_E4M3, MXFormat
from ...formats.weight_tensor import NVFP4, AnyWeightFormat, WeightTensor
from .expert_matrices import Exact
from .matrix_encoders import Encoder, awq, gptq, mx_encoder, nvfp4_encoder, pack_quantized
from .safetensors_files import TensorInfo

_E4M3 = torch.float8_e4m3fn
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}


@dataclass(frozen=True)
class Form:
    """What a config has to say of weights besides their container.

    Args:
        format: of the weights. has_zeros: whether INT4 has zero points.
    """

    format: AnyWeightFormat
    has_zeros: bool = False

    @classmethod
    def of(cls, matrix: Exact) -> Form:
        """The form of a matrix."""
        zeros = isinstance(matrix, WeightTensor) and matrix.zero_point is not None
        return cls(matrix.format, zeros)

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        format = self.format
        return format.block_size if isinstance(format, MXFormat) else format.group_size


ConfigEntry = Callable[[Form, list[str]], dict[str, Any]]
"""Makes ``quantization_config`` for a form and the names of modules that stay dense."""


@dataclass(frozen=True)
class Target:
    """A container that can be written.

    Args:
        name: short, as ``--container`` takes it. container: its name among those that load.
        weight_format: what it holds. encode: makes the tensors of one matrix by suffix; None for
            stacked experts.
        entry: of the config; None for stacked experts.
    """

    name: str
    container: str
    weight_format: str
    encode: Encoder | None = None
    entry: ConfigEntry | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether a tensor holds all experts of a layer."""
        return self.encode is None


def compressed_arguments(form: Form) -> tuple[str, dict[str, Any]]:
    """Name of compressed-tensors' format and the weights' ``QuantizationArgs``.

    Source:
        compressed-tensors 0.20: ``QuantizationArgs``, ``PRESET_SCHEMES``.

    Example:
        >>> compressed_arguments(Form(MXFP4))[0]
        'mxfp4-pack-quantized'
    """
    grouped = {"group_size": form.group_size}
    if form.format == MXFP4:
        more = {"strategy": "group", **grouped, "scale_dtype": "torch.uint8"}
        return "mxfp4-pack-quantized", _FLOAT4 | more
    if form.format == MXFP8_E4M3:
        more = {"num_bits": 8, "strategy": "group", **grouped, "scale_dtype": "torch.uint8"}
        return "mxfp8-quantized", _FLOAT4 | more
    if form.format == NVFP4:
        more = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        return "nvfp4-pack-quantized", _FLOAT4 | grouped | more
    more = {"type": "int", "strategy": "group", "symmetric": not form.has_zeros}
    return "pack-quantized", _FLOAT4 | grouped | more


def compressed_tensors_entry(form: Form, dense: list[str]) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors."""
    format, arguments = compressed_arguments(form)
    group = {
        "targets": ["Linear"],
        "weights": arguments,
        "input_activations": None,
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": dense,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _modelopt(algorithm: str, form: Form, dense: list[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "type": "float", "group_size": form.group_size}
    weights["num_bits"] = 8 if form.format == MXFP8_E4M3 else 4
    group = {"input_activations": None, "weights": weights, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": form.group_size,
        "config_groups": {"group_0": group},
        "ignore": dense,
        "kv_cache_scheme": None,
    }


def _quark(form: Form, dense: list[str]) -> dict[str, Any]:
    weight = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": form.group_size,
        "scale_format": "e8m0",
        "scale_calculation_mode": "even",
        "is_dynamic": False,
    }
    whole = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "global_quant_config": whole,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": dense,
        "export": {
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "kv_cache_group": [],
        },
    }


def _minimax(form: Form, dense: list[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp8", "ignored_layers": dense}


def _awq(form: Form, dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": form.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": dense,
    }


def _gptq(form: Form, dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": form.group_size,
        "desc_act": False,
        "sym": not form.has_zeros,
        "checkpoint_format": "gptq_v2" if form.has_zeros else "gptq",
        "lm_head": False,
        "modules_to_not_convert": dense,
    }


_COMPRESSED = "compressed-tensors"
TARGETS: dict[str, Target] = {
    each.name: each
    for each in (
        Target("gpt-oss", "gpt-oss", "MXFP4"),
        Target(
            "mxfp4-pack-quantized",
            f"{_COMPRESSED} mxfp4-pack-quantized",
            "MXFP4",
            mx_encoder("weight_packed", "weight_scale"),
            compressed_tensors_entry,
        ),
        Target("quark", "Quark OCP MX", "MXFP4", mx_encoder("weight", "weight_scale"), _quark),
        Target(
            "modelopt-nvfp4",
            "ModelOpt NVFP4",
            "NVFP4",
            nvfp4_encoder("weight", "weight_scale", "weight_scale_2", is_divisor=False),
            partial(_modelopt, "W4A16_NVFP4"),
        ),
        Target(
            "nvfp4-pack-quantized",
            f"{_COMPRESSED} nvfp4-pack-quantized",
            "NVFP4",
            nvfp4_encoder("weight_packed", "weight_scale", "weight_global_scale", is_divisor=True),
            compressed_tensors_entry,
        ),
        Target(
            "minimax-mxfp8",
            "MiniMax MXFP8",
            "MXFP8",
            mx_encoder("weight", "weight_scale_inv", _E4M3),
            _minimax,
        ),
        Target(
            "modelopt-mxfp8",
            "ModelOpt MXFP8",
            "MXFP8",
            mx_encoder("weight", "weight_scale", _E4M3),
            partial(_modelopt, "MXFP8"),
        ),
        Target(
            "mxfp8-quantized",
            f"{_COMPRESSED} mxfp8-quantized",
            "MXFP8",
            mx_encoder("weight", "weight_scale", _E4M3),
            compressed_tensors_entry,
        ),
        Target(
            "pack-quantized",
            f"{_COMPRESSED} pack-quantized",
            "INT4",
            pack_quantized,
            compressed_tensors_entry,
        ),
        Target("awq", "AWQ", "INT4", awq, _awq),
        Target("gptq", "GPTQ", "INT4", gptq, _gptq),
    )
}
"""Every container that `mxpert convert` writes, by its short name."""


LOSSLESS: dict[str, tuple[str, ...]] = {
    "MXFP4": ("MXFP4", "NVFP4"),
    "NVFP4": ("NVFP4", "MXFP4"),
    "MXFP8": ("MXFP8", "MXFP4"),
    "INT4": ("INT4",),
}
"""For what is written: formats whose weights it holds, all of them or those of some checkpoints."""


def dense_modules(copied: Iterable[TensorInfo]) -> list[str]:
    """Names of the modules whose matrices stay dense, for a config; ``lm_head`` may be tied."""
    names = {"lm_head"}
    for info in copied:
        if len(info.shape) > 1:
            stacked = re.search(r"\.experts\.[a-z_]+$", info.name)
            is_weight = info.name.endswith(".weight")
            if is_weight or stacked:
                names.add(info.name.rpartition(".")[0])
    return sorted(names)
