"""How quantised experts are written: names, tensors, and what the config says of them.

MXFP4 goes into gpt-oss' container, stacked tensors for each projection. Other formats go into that
of compressed-tensors, with a matrix for each expert and projection under the source's own names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import require
from ...formats.spec import MXFP4, ScaleRule
from ...formats.weight_tensor import NVFP4, AnyWeightFormat, WeightLike, WeightTensor
from ...moe.published_tensors import BLOCK_BYTES
from ...moe.weights import GateUpOrder
from ..models.saved_config import (
    GPT_OSS,
    GPT_OSS_UNCONVERTED,
    implementation_entry,
    quantization_config,
)
from .expert_sources import ExpertSource
from .matrix_encoders import Encoded
from .safetensors_files import CheckpointReader, TensorInfo
from .written_containers import (
    TARGETS,
    Form,
    compressed_arguments,
    compressed_tensors_entry,
    dense_modules,
)

_PARTS = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
"""Matrices of an expert by the projection that they make up."""
_SUFFIXES = {
    "mxfp8-quantized": ("weight", "weight_scale"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_scale", "weight_global_scale"),
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
}
"""Tensors of a matrix by compressed-tensors' name of its format."""


class ExpertWriter(ABC):
    """One container for the experts that are written.

    Args:
        container: its name. format: of the weights. gate_up_order: of a stacked projection's rows;
            None where gate and up are tensors of their own.
    """

    container: str
    format: AnyWeightFormat
    gate_up_order: GateUpOrder | None

    @property
    def is_stacked(self) -> bool:
        """Whether a tensor holds all experts of a layer."""
        return self.gate_up_order is not None

    @abstractmethod
    def names(self, layer: ExpertSource) -> list[str]:
        """Full names of all tensors of a layer."""

    @abstractmethod
    def tensors_of(
        self, op: str, layer: ExpertSource, projection: str, expert: int, weights: WeightLike
    ) -> dict[str, torch.Tensor]:
        """The tensors of one expert's projection by full name; of a stacked tensor its part.

        Args:
            op: name of the operation that error messages start with.
            layer, projection, expert: what `weights` are.
            weights: [N, K] on the CPU, gate and up rows INTERLEAVED.

        Raises:
            ValueError: weights that the container cannot hold.
        """

    @abstractmethod
    def biases(self, reader: CheckpointReader, layer: ExpertSource) -> dict[str, torch.Tensor]:
        """The bias tensors of a layer by full name, in the source's dtype."""

    @abstractmethod
    def config_entries(
        self, config: dict[str, Any], copied: Sequence[TensorInfo], rule: ScaleRule | None
    ) -> dict[str, Any]:
        """What ``config.json`` gets.

        Args:
            config: the source's. copied: tensors that stay as they are. rule: scale rule of the
                blocks; None for a format without one.
        """


class PublishedWriter(ExpertWriter):
    """gpt-oss' container: stacked MXFP4 blocks and scales."""

    container, format, gate_up_order = "gpt-oss", MXFP4, GateUpOrder.INTERLEAVED

    def names(self, layer: ExpertSource) -> list[str]:
        names = [
            f"{layer.prefix}.{projection}_{kind}"
            for projection in layer.projections
            for kind in ("blocks", "scales")
        ]
        return names + list(layer.biases)

    def tensors_of(
        self, op: str, layer: ExpertSource, projection: str, expert: int, weights: WeightLike
    ) -> dict[str, torch.Tensor]:
        name, scale = f"{layer.prefix}.{projection}", weights.scale
        blocks = weights.qdata.view(*scale.shape, BLOCK_BYTES)
        return {f"{name}_blocks": blocks, f"{name}_scales": scale}

    def biases(self, reader: CheckpointReader, layer: ExpertSource) -> dict[str, torch.Tensor]:
        return {name: layer.read_bias(reader, name) for name in layer.biases}

    def config_entries(
        self, config: dict[str, Any], copied: Sequence[TensorInfo], rule: ScaleRule | None
    ) -> dict[str, Any]:
        kind = config.get("model_type")
        dense = {re.sub(r"\.\d+(?=\.|$)", ".*", info.name.rpartition(".")[0]) for info in copied}
        names = GPT_OSS_UNCONVERTED if kind == GPT_OSS else sorted(dense)
        entry = {"quantization_config": quantization_config(names, rule)}
        return entry | implementation_entry(kind)


class CompressedTensorsWriter(ExpertWriter):
    """compressed-tensors' container of a format: one matrix per expert and projection.

    Stacked experts become matrices named ``gate_proj``, ``up_proj`` and ``down_proj``.

    Source:
        compressed-tensors 0.20: ``MXFP8QuantizationCompressor``, ``PackedQuantizationCompressor``,
        ``NVFP4PackedCompressor``, ``QuantizationConfig``.
    """

    gate_up_order = None

    def __init__(self, format: AnyWeightFormat) -> None:
        self.format = format
        stated, _ = compressed_arguments(Form(format))
        self.suffixes, self._encode = _SUFFIXES[stated], TARGETS[stated].encode
        self.container = f"compressed-tensors {stated}"

    def names(self, layer: ExpertSource) -> list[str]:
        matrices = [
            (projection, _matrix_name(layer, expert, part))
            for projection in layer.projections
            for expert in range(layer.num_experts)
            for part in _PARTS[projection]
        ]
        biased = {projection for projection in layer.projections if _bias_of(layer, projection)}
        return [
            f"{name}.{suffix}"
            for projection, name in matrices
            for suffix in (*self.suffixes, *(["bias"] if projection in biased else []))
        ]

    def tensors_of(
        self, op: str, layer: ExpertSource, projection: str, expert: int, weights: WeightLike
    ) -> dict[str, torch.Tensor]:
        parts = _PARTS[projection]
        tensors: dict[str, torch.Tensor] = {}
        for index, part in enumerate(parts):
            name = _matrix_name(layer, expert, part)
            rows = every_row(weights, index, len(parts))
            stored = self._weight(op, name, rows)
            tensors |= {f"{name}.{suffix}": part.contiguous() for suffix, part in stored.items()}
        return tensors

    def _weight(self, op: str, name: str, weight: WeightLike) -> Encoded:
        if isinstance(weight, WeightTensor) and weight.format == NVFP4:
            return _nvfp4(op, name, weight)
        assert self._encode is not None  # for the type checker: matrices are not stacked
        return self._encode(weight)

    def biases(self, reader: CheckpointReader, layer: ExpertSource) -> dict[str, torch.Tensor]:
        tensors = {}
        for projection in layer.projections:
            stored, parts = _bias_of(layer, projection), _PARTS[projection]
            if stored is None:
                continue
            bias = layer.read_bias(reader, stored)
            for expert in range(layer.num_experts):
                for index, part in enumerate(parts):
                    name = f"{_matrix_name(layer, expert, part)}.bias"
                    tensors[name] = bias[expert, index :: len(parts)].clone()
        return tensors

    def config_entries(
        self, config: dict[str, Any], copied: Sequence[TensorInfo], rule: ScaleRule | None
    ) -> dict[str, Any]:
        entry = compressed_tensors_entry(Form(self.format), dense_modules(copied))
        return {"quantization_config": entry}


def writer_of(format: AnyWeightFormat) -> ExpertWriter:
    """The container that experts in this format are written to.

    Example:
        >>> from mxpert.formats import NVFP4
        >>> writer_of(NVFP4).container
        'compressed-tensors nvfp4-pack-quantized'
    """
    return PublishedWriter() if format == MXFP4 else CompressedTensorsWriter(format)


def every_row(weights: WeightLike, first: int, step: int) -> WeightLike:
    """Every `step`-th row of a matrix [N, K] from `first` on, in memory of its own."""
    return weights._mapped(lambda tensor: tensor[first::step].contiguous())


def _nvfp4(op: str, name: str, weight: WeightTensor) -> Encoded:
    """Codes [N, K/2], e4m3 scales [N, K/16], float32 [1]: the rounded divisor of the matrix."""
    assert weight.row_scale is not None  # for the type checker: quantize_weight makes one
    divisor = weight.row_scale[:1].reciprocal()
    require(
        bool(divisor.isfinite()),
        op,
        name,
        need="weights of 8e-36 or more, so that the global scale has a reciprocal",
        got=f"a global scale of {float(weight.row_scale[0]):.1e}",
        remedy="write int4 or mxfp8",
    )
    tensors = weight.qdata, weight.scale.view(torch.float8_e4m3fn), divisor
    return dict(zip(_SUFFIXES["nvfp4-pack-quantized"], tensors, strict=True))


def _matrix_name(layer: ExpertSource, expert: int, part: str) -> str:
    """Full name of a matrix without the suffixes of its tensors."""
    source = layer.parts.get((expert, part))
    if source is not None:
        return source.removesuffix(".weight")
    return f"{layer.prefix}.{expert}.{part}_proj"


def _bias_of(layer: ExpertSource, projection: str) -> str | None:
    """The source's stacked bias of a projection."""
    return next((name for name in layer.biases if name.endswith(f"{projection}_bias")), None)
