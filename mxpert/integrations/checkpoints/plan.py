"""Plan how a checkpoint is quantised: check the source, assign tensors to output shards."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsupportedError, message, require
from ...formats.codec import dequantize_blocks, quantize_blocks
from ...formats.spec import MXFP4, ScaleRule, ScaleRuleLike
from ...moe.published_tensors import BLOCK_BYTES
from ..models.experts import FoundExperts
from .convertible import converter_experts, stacked_order
from .expert_sources import ExpertSource, find_expert_sources
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

    def tensor_names(self) -> list[str]:
        if self.layer is None:
            return list(self.copied)
        names = [
            f"{self.layer.prefix}.{projection}_{kind}"
            for projection in self.layer.projections
            for kind in ("blocks", "scales")
        ]
        return names + list(self.layer.biases)


@dataclass(frozen=True)
class QuantizePlan:
    """All decisions, made before the first byte is written."""

    reader: CheckpointReader
    destination: Path
    config: dict[str, Any]
    rule: ScaleRule
    device: torch.device
    shards: list[OutputShard]

    @property
    def total_bytes(self) -> int:
        return sum(shard.source_bytes for shard in self.shards)


def plan_quantization(
    source: Path | str,
    destination: Path | str,
    *,
    scale_rule: ScaleRuleLike,
    device: torch.device | str,
) -> QuantizePlan:
    """Check source and arguments, and decide which tensor goes into which shard; writes nothing."""
    scale_rule = ScaleRule.parse(scale_rule, OP, "scale_rule")
    reader, destination = CheckpointReader(source, OP), Path(destination)
    source = reader.path
    require(source.is_dir(), OP, str(source), need="a checkpoint directory", got="a file")
    config = reader.config()
    layers = _loadable_layers(reader, config)
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
    return QuantizePlan(reader, destination, config, scale_rule, _device(device), shards)


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
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Read and quantise one expert's projection.

    Returns:
        (blocks uint8 [N, K/32, 16], scales uint8 [N, K/32], signal, noise), tensors on the CPU.
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
    blocks, scales = [], []
    signal = noise = 0.0
    for part in matrix.split(max(1, CHUNK_ELEMENTS // matrix.shape[1])):
        quantized = quantize_blocks(part, MXFP4, axis=-1, rule=plan.rule)
        part = part.to(torch.float32)
        signal += float(part.square().sum(dtype=torch.float64))
        noise += float((part - dequantize_blocks(quantized)).square().sum(dtype=torch.float64))
        blocks.append(quantized.qdata.view(*quantized.scale.shape, BLOCK_BYTES).cpu())
        scales.append(quantized.scale.cpu())
    return torch.cat(blocks), torch.cat(scales), signal, noise


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:  # unknown name, or a device not present
        raise UnsupportedError(
            message(OP, "device", "a device of this machine", repr(str(device)), "use cpu")
        ) from error
    return found
