"""Plan how a checkpoint is quantised: check the source, assign tensors to output shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsupportedError, message, require
from ...formats.codec import quantize_blocks
from ...formats.spec import MXFormat, ScaleRule, ScaleRuleLike
from ...formats.tensor import TENSOR_FIELDS
from ...formats.weight_quantize import quantize_weight
from ...formats.weight_tensor import (
    NVFP4,
    AnyWeightFormat,
    WeightFormatName,
    WeightLike,
    parse_weight_format,
)
from ..models.experts import FoundExperts
from .convertible import converter_experts, stacked_order
from .expert_sources import ExpertSource, find_expert_sources
from .expert_writers import ExpertWriter, writer_of
from .safetensors_files import CheckpointReader

OP = "quantize_checkpoint"
MAX_COPY_BYTES = 4 << 30
"""Largest shard of unchanged tensors, to bound memory; lower for smaller layers."""

CHUNK_ELEMENTS = 1 << 20
"""Weights quantised at a time: float32 temporaries of 4 MB stay in cache. This is six times as fast
as whole 4096 × 4096 matrices (one x86 core, torch 2.13)."""


@dataclass(frozen=True)
class OutputShard:
    """One file of the destination: the experts of `layer`, or the unchanged tensors `copied`."""

    name: str
    layer: ExpertSource | None
    copied: tuple[str, ...]
    source_bytes: int


@dataclass(frozen=True)
class QuantizePlan:
    """All decisions, made before the first byte is written."""

    reader: CheckpointReader
    destination: Path
    config: dict[str, Any]
    writer: ExpertWriter
    rule: ScaleRule | None
    device: torch.device
    shards: list[OutputShard]

    @property
    def format(self) -> AnyWeightFormat:
        """Of the experts that are written."""
        return self.writer.format

    @property
    def total_bytes(self) -> int:
        return sum(shard.source_bytes for shard in self.shards)

    def tensor_names(self, shard: OutputShard) -> list[str]:
        """Names of a shard's tensors."""
        return list(shard.copied) if shard.layer is None else self.writer.names(shard.layer)


def plan_quantization(
    source: Path | str,
    destination: Path | str,
    *,
    weight_format: WeightFormatName = "mxfp4",
    scale_rule: ScaleRuleLike | None,
    device: torch.device | str,
) -> QuantizePlan:
    """Check source and arguments, and decide which tensor goes into which shard; writes nothing."""
    format = parse_weight_format(weight_format, OP)
    rule = _scale_rule(scale_rule, format)
    reader, destination = CheckpointReader(source, OP), Path(destination)
    source = reader.path
    require(source.is_dir(), OP, str(source), need="a checkpoint directory", got="a file")
    config = reader.config()
    layers = _loadable_layers(reader, config)
    for layer in layers:
        _check_groups(layer, format)
    inside = destination.resolve()
    require(
        inside != source.resolve() and source.resolve() not in inside.parents,
        OP,
        str(destination),
        need="a destination outside of the source",
        got=str(source),
        remedy="name another directory",
    )
    replaced = {name for layer in layers for name in (*layer.tensors, *layer.biases)}
    rest = [reader.info(name) for name in reader.names if name not in replaced]
    largest = max(math.prod(layer.shape(p)) for layer in layers for p in layer.projections)
    limit = min(MAX_COPY_BYTES, largest)
    groups: list[list[str]] = []
    sizes: list[int] = []
    for info in rest:
        if not groups or sizes[-1] + info.nbytes > limit:
            groups.append([])
            sizes.append(0)
        groups[-1].append(info.name)
        sizes[-1] += info.nbytes
    count = len(layers) + len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    shards = [
        OutputShard(name, layer, (), layer.source_bytes)
        for name, layer in zip(names, layers, strict=False)
    ]
    shards += [
        OutputShard(name, None, tuple(group), size)
        for name, group, size in zip(names[len(layers) :], groups, sizes, strict=True)
    ]
    writer = writer_of(format)
    return QuantizePlan(reader, destination, config, writer, rule, _device(device), shards)


def _scale_rule(rule: ScaleRuleLike | None, format: AnyWeightFormat) -> ScaleRule | None:
    """The rule of E8M0 scales, RCEIL where none is named; None for formats with other scales."""
    if isinstance(format, MXFormat):
        return ScaleRule.RCEIL if rule is None else ScaleRule.parse(rule, OP, "scale_rule")
    require(
        rule is None,
        OP,
        "scale_rule",
        need=f"none for {format.name}",
        got=rule.value if isinstance(rule, ScaleRule) else rule,
        remedy="rules are for scales that are powers of two, in mxfp4 and mxfp8",
    )
    return None


def _check_groups(layer: ExpertSource, format: AnyWeightFormat) -> None:
    """Raise ValueError for sizes that are no whole groups of INT4; others have blocks of 32."""
    if isinstance(format, MXFormat):
        return
    for what, size in (
        ("hidden_size", layer.hidden_size),
        ("intermediate_size", layer.intermediate_size),
    ):
        require(
            size % format.group_size == 0,
            OP,
            f"{layer.prefix}: {what}",
            need=f"a multiple of {format.group_size}, the group of {format.name}",
            got=size,
            remedy="choose a smaller group size",
        )


def _loadable_layers(reader: CheckpointReader, config: dict[str, Any]) -> list[ExpertSource]:
    """The experts of a checkpoint by name, if the converter can load the result.

    Raises:
        ValueError, UnsupportedError: as `find_expert_sources` and `converter_experts`.
    """

    @functools.cache
    def converter() -> list[FoundExperts]:
        return converter_experts(reader.directory, config, OP)

    layers = find_expert_sources(reader, config, lambda: stacked_order(converter()))
    converter()  # raises for a model that nothing could load
    return layers


def quantize_expert(
    plan: QuantizePlan, layer: ExpertSource, projection: str, expert: int
) -> tuple[WeightLike, float, float]:
    """Read and quantise one expert's projection.

    Returns:
        (weights [N, K] on the CPU with gate and up rows INTERLEAVED, signal, noise).
    """
    matrix = layer.read(plan.reader, projection, expert).to(plan.device)
    require(
        bool(matrix.isfinite().all()),
        OP,
        f"{layer.prefix}: expert {expert} {projection}",
        need="finite weights",
        got="NaN or infinity",
        remedy="repair the source; a NaN would blank its whole block",
    )
    parts: list[WeightLike] = []
    signal = noise = 0.0
    for part, quantized in _quantized_parts(plan, matrix):
        part = part.to(torch.float32)
        signal += float(part.square().sum(dtype=torch.float64))
        noise += float((part - quantized.dequantize()).square().sum(dtype=torch.float64))
        parts.append(quantized)
    fields: dict[str, Any] = {  # tensors that a matrix may have
        name: torch.cat([getattr(part, name).cpu() for part in parts])
        for name in TENSOR_FIELDS[type(parts[0])]
        if getattr(parts[0], name) is not None
    }
    return replace(parts[0], **fields), signal, noise


def _quantized_parts(
    plan: QuantizePlan, matrix: torch.Tensor
) -> Iterator[tuple[torch.Tensor, WeightLike]]:
    """Some rows of a matrix at a time, with their quantised weights."""
    format, step = plan.format, max(1, CHUNK_ELEMENTS // matrix.shape[1])
    # NVFP4 has a factor for the whole matrix. In other formats rows do not depend on each other.
    whole = quantize_weight(matrix, format) if format == NVFP4 else None
    for start in range(0, len(matrix), step):
        rows = slice(start, start + step)
        part = matrix[rows]
        if whole is not None:
            yield part, whole[rows]
        elif isinstance(format, MXFormat):
            assert plan.rule is not None  # for the type checker: E8M0 scales have one
            yield part, quantize_blocks(part, format, axis=-1, rule=plan.rule)
        else:
            yield part, quantize_weight(part, format)


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:  # unknown name, or a device not present
        raise UnsupportedError(
            message(OP, "device", "a device of this machine", repr(str(device)), "use cpu")
        ) from error
    return found
