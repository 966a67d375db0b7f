"""Verify a quantised checkpoint: checksums, codes of a sample, copied tensors."""

from __future__ import annotations

from typing import Any

import torch

from .expert_sources import ExpertSource
from .plan import OP, OutputShard, QuantizePlan, quantize_expert
from .safetensors_files import CheckpointReader, sha256_of


def verify_quantized(plan: QuantizePlan, manifest: dict[str, Any]) -> list[str]:
    """Re-read a destination and compare it with its source.

    Every shard's checksum; names and dtypes of all tensors; the first, middle and last expert of
    every projection against a fresh quantisation, code for code; every copied tensor byte for byte.

    Args:
        plan: the plan that was carried out.
        manifest: its manifest, with a checksum per shard.

    Returns:
        What was found wrong, one line each; empty if all is well.
    """
    failures = []
    for shard in plan.shards:
        path = plan.destination / shard.name
        expected = manifest["shards"][shard.name]["sha256"]
        if not path.is_file() or sha256_of(path) != expected:
            failures.append(f"{path}: checksum differs from the manifest; run again to redo it")
    if failures:
        return failures
    try:
        written = CheckpointReader(plan.destination, "verify_quantized")
        for shard in plan.shards:
            failures += _verify_shard(plan, shard, written)
    except ValueError as error:  # an unreadable or incomplete destination
        failures.append(str(error))
    return failures


def _verify_shard(plan: QuantizePlan, shard: OutputShard, written: CheckpointReader) -> list[str]:
    if shard.layer is not None:
        return _verify_experts(plan, shard.layer, written)
    return [
        f"{written.info(name).file}: {name} differs from the source"
        for name in shard.copied
        if not same_bytes(plan.reader.read(name), written.read(name))
    ]


def _verify_experts(
    plan: QuantizePlan, layer: ExpertSource, written: CheckpointReader
) -> list[str]:
    failures = []
    sample = sorted({0, layer.num_experts // 2, layer.num_experts - 1})
    is_stacked = plan.writer.is_stacked
    for projection in layer.projections:
        for expert in sample:
            weights, _, _ = quantize_expert(plan, layer, projection, expert)
            fresh = plan.writer.tensors_of(OP, layer, projection, expert, weights)
            for name, tensor in fresh.items():
                if not same_bytes(
                    tensor, written.read_row(name, expert) if is_stacked else written.read(name)
                ):
                    what = f"{name}[{expert}]" if is_stacked else name
                    failures.append(
                        f"{written.info(name).file}: {what} differs from a "
                        "fresh quantisation; delete this file and run again"
                    )
    for name, bias in plan.writer.biases(plan.reader, layer).items():
        if not same_bytes(bias, written.read(name)):
            failures.append(f"{written.info(name).file}: {name} differs from the source")
    return failures


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaN included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
