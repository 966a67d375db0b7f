"""How a rank's share of each container's matrices is stored, as engines load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints.expert_matrices import MatrixFormat, nvfp4_matrix
from ..checkpoints.int4_matrices import awq_matrix, gptq_matrix, pack_quantized_matrix
from ..checkpoints.stated_quantization import Statement

MODELOPT_NVFP4 = nvfp4_matrix("weight", "weight_scale", "weight_scale_2", is_divisor=False)
COMPRESSED_NVFP4 = nvfp4_matrix(
    "weight_packed", "weight_scale", "weight_global_scale", is_divisor=True
)

_COMPRESSED = ("num_bits", "type", "strategy", "group_size", "actorder", "symmetric")


def is_packed_int4(weights: Any, stored_as: object) -> bool:
    """Whether compressed-tensors' weights are 4-bit integers in words.

    Args:
        weights: QuantizationArgs of the package compressed-tensors, which is not among this one's
            dependencies. stored_as: the ``format``.
    """
    stated = _stated_weights(weights)
    return (stated["num_bits"], stated["type"], stored_as) == (4, "int", "pack-quantized")


def compressed_int4(weights: Any, prefix: str, op: str) -> MatrixFormat:
    """INT4 of compressed-tensors.

    Args:
        weights: as in `is_packed_int4`. prefix: the layer's name. op: what messages start with.

    Raises:
        UnsupportedError: a group or an order that mxpert does not read.
    """
    group = {"targets": ["Linear"], "weights": _stated_weights(weights)}
    statement = _stated("compressed-tensors", {"config_groups": {"group_0": group}}, prefix, op)
    return pack_quantized_matrix(statement, _matrix_of(prefix), is_share=True)


def awq(config: Mapping[str, Any], prefix: str, op: str) -> MatrixFormat:
    """INT4 of AWQ.

    Args:
        config: the checkpoint's ``quantization_config``. prefix, op: as above.

    Raises:
        UnsupportedError: bits, groups or a version that mxpert does not read.
    """
    return awq_matrix(_stated("awq", config, prefix, op), _matrix_of(prefix))


def gptq(config: Mapping[str, Any], prefix: str, op: str) -> MatrixFormat:
    """INT4 of GPTQ.

    Args:
        config, prefix, op: as above.

    Raises:
        UnsupportedError: bits, groups or an order that mxpert does not read, or settings for these
            experts alone.
    """
    return gptq_matrix(_stated("gptq", config, prefix, op), _matrix_of(prefix), is_share=True)


def _stated_weights(weights: Any) -> dict[str, Any]:
    values = {name: getattr(weights, name) for name in _COMPRESSED}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _matrix_of(prefix: str) -> str:
    """A linear layer that stands for all experts of a layer in a config."""
    return f"{prefix}.0.gate_proj"


def _stated(method: str, entry: Mapping[str, Any], prefix: str, op: str) -> Statement:
    return Statement(method, entry, {}, f"{prefix}: quantization_config", op)
