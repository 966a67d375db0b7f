"""Quantise the experts of a bf16 MoE checkpoint, in a container that inference engines read.

One output shard per experts module holds its quantised weights; further shards hold all other
tensors unchanged. A manifest in the destination records the checksum of each finished shard, so an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from ... import __version__
from ...core.files import JSONReader, partial_name, write_atomically
from ...errors import Checks
from ...formats.spec import ScaleRuleLike
from ...formats.weight_tensor import WeightFormatName
from .expert_sources import ExpertSource, source_directory_files
from .plan import OP, OutputShard, QuantizePlan, plan_quantization, quantize_expert
from .safetensors_files import (
    CONFIG_FILE,
    INDEX_FILE,
    read_json,
    sha256_of,
    write_json,
    write_tensors,
)
from .verify import verify_quantized

MANIFEST_FILE = "mxpert_quantize.json"
ProgressCallback = Callable[[int, int, str], None]
"""Called with (source bytes done, source bytes in all, what is being done)."""


@dataclass(frozen=True)
class ProjectionReport:
    """Sizes and error of one quantised projection.

    Args:
        module: full module path. projection: "gate_up_proj" or "down_proj". shape: [E, N, K].
        source_bytes: bytes before. bytes: bytes of codes and scales.
        signal, noise: ``sum w^2`` and ``sum (w - dequantised)^2``.
    """

    module: str
    projection: str
    shape: tuple[int, int, int]
    source_bytes: int
    bytes: int
    signal: float
    noise: float

    @property
    def sqnr_db(self) -> float | None:
        """``10 log10(signal / noise)``; None if either is zero (no error, or no signal)."""
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"sqnr_db": self.sqnr_db}


class _Settings(TypedDict):
    """Fields of a report and of a manifest."""

    weight_format: str
    container: str
    scale_rule: str | None
    gate_up_order: str | None


@dataclass(frozen=True)
class _FinishedShard:
    """The manifest's entry of a shard that is complete."""

    sha256: str
    bytes: int
    projections: list[ProjectionReport]


@dataclass(frozen=True)
class QuantizeReport:
    """Outcome of `quantize_checkpoint`.

    Args:
        source, destination: directories.
        weight_format: name of the experts' format. container: how they are stored.
        scale_rule: of E8M0 scales; None for other formats.
        gate_up_order: of stacked gate and up rows; None where they are tensors of their own.
        projections: sizes and errors. shards_written, shards_resumed: numbers of files.
        source_bytes, bytes: of all tensors, before and after.
        failures: what verification found.
    """

    source: str
    destination: str
    weight_format: str
    container: str
    scale_rule: str | None
    gate_up_order: str | None
    projections: list[ProjectionReport]
    shards_written: int
    shards_resumed: int
    source_bytes: int
    bytes: int
    failures: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        content = asdict(self) | {"verified": self.verified}
        content["projections"] = [projection.as_json() for projection in self.projections]
        return content


def quantize_checkpoint(
    source: Path | str,
    destination: Path | str,
    *,
    weight_format: WeightFormatName = "mxfp4",
    scale_rule: ScaleRuleLike | None = None,
    device: torch.device | str = "cpu",
    on_progress: ProgressCallback | None = None,
) -> QuantizeReport:
    """Quantise the experts of a bf16 MoE checkpoint and verify what was written.

    Experts get the bits of `mxpert.quantize_weights`. MXFP4 is written as gpt-oss publishes it,
    stacked, with alternating gate and up rows. MXFP8, NVFP4 and INT4 are written as
    compressed-tensors stores them (``mxfp8-quantized``, ``nvfp4-pack-quantized``,
    ``pack-quantized``), one matrix per expert and projection; gate and up of an expert share
    NVFP4's global scale, which is stored as its reciprocal, rounded once to float32. All other
    tensors and side files (tokenizer, templates) are copied bit for bit. Memory holds one quantised
    layer and one expert of the source at a time.

    An interrupted run continues when it is called again with the same arguments. A file under its
    final name is complete. ``config.json`` is written last, so an unfinished destination does not
    load.

    Args:
        source: directory with ``config.json`` and safetensors in Mixtral's, Qwen-MoE's, DeepSeek's
            or GraniteMoe's naming, or stacked as transformers 5 and gpt-oss do; or the id of such a
            model on the Hugging Face Hub.
        destination: directory to write; absent, empty, or left by an interrupted run.
        weight_format: "mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g64" or "int4_g128".
        scale_rule: how a block's scale follows from its maximum, in MXFP4 and MXFP8; a ScaleRule or
            its name. None is RCEIL, and the only choice in NVFP4 and INT4.
        device: device that quantises.
        on_progress: called after every expert and every copied shard.

    Returns:
        QuantizeReport; `failures` lists what verification found.

    Raises:
        ValueError: bad source, a destination that would be overwritten, sizes that are no whole
            groups, or NaN or infinity among the weights. TypeError: wrong types.
        UnsupportedError: a naming that is not known, or a model that `mxpert.convert` refuses, so
            that nothing could load the result; nothing is written then.

    Example:
        >>> quantize_checkpoint("/nowhere", "/tmp/out")
        Traceback (most recent call last):
        ValueError: quantize_checkpoint: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    plan = plan_quantization(
        source, destination, weight_format=weight_format, scale_rule=scale_rule, device=device
    )
    manifest = _prepare_destination(plan)
    progress = on_progress or (lambda done, total, what: None)
    done = resumed = 0
    for shard in plan.shards:
        if _is_finished(plan, shard, manifest):
            resumed += 1
        else:
            _write_shard(plan, shard, manifest, partial(_advance, progress, plan, done))
        done += shard.source_bytes
        progress(done, plan.total_bytes, f"{shard.name} finished")
    _write_side_files(plan, manifest)
    progress(done, plan.total_bytes, "verifying")
    failures = verify_quantized(plan, manifest)
    projections = [
        ProjectionReport(**entry | {"shape": tuple(entry["shape"])})
        for shard in plan.shards
        for entry in manifest["shards"][shard.name]["projections"]
    ]
    return QuantizeReport(
        source=str(plan.reader.path),
        destination=str(plan.destination),
        **_settings(plan),
        projections=projections,
        shards_written=len(plan.shards) - resumed,
        shards_resumed=resumed,
        source_bytes=plan.total_bytes,
        bytes=sum(manifest["shards"][shard.name]["bytes"] for shard in plan.shards),
        failures=failures,
    )


def _advance(
    progress: ProgressCallback, plan: QuantizePlan, before: int, done: int, what: str
) -> None:
    progress(before + done, plan.total_bytes, what)


def _quantize_layer(
    plan: QuantizePlan, layer: ExpertSource, advance: Callable[[int, str], None]
) -> tuple[dict[str, torch.Tensor], list[ProjectionReport]]:
    tensors: dict[str, torch.Tensor] = {}
    reports = []
    steps = len(layer.projections) * layer.num_experts
    for index, projection in enumerate(layer.projections):
        experts, rows, columns = layer.shape(projection)
        signal = noise = 0.0
        num_bytes = 0
        for expert in range(experts):
            weights, s, n = quantize_expert(plan, layer, projection, expert)
            signal, noise = signal + s, noise + n
            parts = plan.writer.tensors_of(OP, layer, projection, expert, weights)
            num_bytes += sum(part.nbytes for part in parts.values())
            if plan.writer.is_stacked:
                _put(tensors, parts, expert, experts)
            else:
                tensors |= parts
            step = index * experts + expert + 1
            advance(layer.source_bytes * step // steps, f"{layer.prefix}.{projection}")
        share = layer.source_bytes * experts * rows * columns // layer.numel
        shape = experts, rows, columns
        reports.append(
            ProjectionReport(layer.prefix, projection, shape, share, num_bytes, signal, noise)
        )
    return tensors | plan.writer.biases(plan.reader, layer), reports


def _put(
    stacked: dict[str, torch.Tensor], parts: dict[str, torch.Tensor], place: int, count: int
) -> None:
    """Copy tensors into `place` of stacked ones with `count` places, which are made when needed."""
    for name, part in parts.items():
        if name not in stacked:
            stacked[name] = torch.empty(count, *part.shape, dtype=part.dtype)
        stacked[name][place] = part


def _write_shard(
    plan: QuantizePlan,
    shard: OutputShard,
    manifest: dict[str, Any],
    advance: Callable[[int, str], None],
) -> None:
    """Fill one shard, rename it to its final name, then record it in the manifest."""
    reports: list[ProjectionReport] = []
    if shard.layer is None:
        tensors = {name: plan.reader.read(name).contiguous() for name in shard.copied}
    else:
        tensors, reports = _quantize_layer(plan, shard.layer, advance)
    path = plan.destination / shard.name
    write_tensors(path, tensors)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    manifest["shards"][shard.name] = asdict(_FinishedShard(sha256_of(path), num_bytes, reports))
    write_json(plan.destination / MANIFEST_FILE, manifest)


def _is_finished(plan: QuantizePlan, shard: OutputShard, manifest: dict[str, Any]) -> bool:
    entry = manifest["shards"].get(shard.name)
    path = plan.destination / shard.name
    return entry is not None and path.is_file() and sha256_of(path) == entry["sha256"]


def _identity(plan: QuantizePlan) -> dict[str, Any]:
    """Source files, settings and version; a run continues another one if they are equal."""
    files = [plan.reader.directory / CONFIG_FILE, *plan.reader.files]
    return {
        "version": __version__,
        **_settings(plan),
        "source": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }


def _prepare_destination(plan: QuantizePlan) -> dict[str, Any]:
    """Create the destination or recognise an interrupted run; returns the manifest."""
    need = Checks(OP)
    destination, identity = plan.destination, _identity(plan)
    path = destination / MANIFEST_FILE
    remedy = "name another destination, or empty this one yourself"
    need(
        destination.is_dir() or not destination.exists(),
        str(destination),
        "a directory",
        "a file",
        remedy,
    )
    own_partials = [partial_name(destination / name) for name in _output_names(plan)]
    present = (
        []
        if not destination.exists()
        else [entry for entry in destination.iterdir() if entry not in own_partials]
    )
    if present:
        need(
            path.is_file(),
            str(destination),
            "an absent or empty directory",
            f"{len(present)} entries, for example {present[0].name}",
            remedy,
        )
        manifest = read_json(path, OP)
        found = {key: manifest.get(key) for key in identity}
        differs = sorted(key for key in identity if found[key] != identity[key])
        need(
            not differs,
            str(destination),
            "the unfinished output of the same source, settings and version",
            f"another run's ({', '.join(differs)} differ)",
            remedy,
        )
        reader = JSONReader(OP, "empty the destination and run again")
        reader.value(dict, manifest.get("shards"), f"{path}: shards")
        for name, entry in manifest["shards"].items():
            reader.value(_FinishedShard, entry, f"{path}: shards.{name}")
    else:
        manifest = {**identity, "shards": {}}
        destination.mkdir(parents=True, exist_ok=True)
        write_json(path, manifest)
    for leftover in own_partials:
        leftover.unlink(missing_ok=True)
    return manifest


def _output_names(plan: QuantizePlan) -> list[str]:
    side = [file.name for file in source_directory_files(plan.reader.directory)]
    return [*(shard.name for shard in plan.shards), *side, MANIFEST_FILE, INDEX_FILE, CONFIG_FILE]


def _write_side_files(plan: QuantizePlan, manifest: dict[str, Any]) -> None:
    """Copy tokenizer and templates, then write the index and, last of all, the config."""
    for file in source_directory_files(plan.reader.directory):
        if file.name != MANIFEST_FILE:
            write_atomically(plan.destination / file.name, partial(shutil.copyfile, file))
    total = sum(manifest["shards"][shard.name]["bytes"] for shard in plan.shards)
    weight_map = {name: shard.name for shard in plan.shards for name in plan.tensor_names(shard)}
    write_json(
        plan.destination / INDEX_FILE,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    copied = [plan.reader.info(name) for shard in plan.shards for name in shard.copied]
    stated = plan.writer.config_entries(plan.config, copied, plan.rule)
    write_json(plan.destination / CONFIG_FILE, plan.config | stated)


def _settings(plan: QuantizePlan) -> _Settings:
    """What was asked for, and what follows from it."""
    order = plan.writer.gate_up_order
    return {
        "weight_format": plan.format.name,
        "container": plan.writer.container,
        "scale_rule": None if plan.rule is None else plan.rule.value,
        "gate_up_order": None if order is None else order.value,
    }
