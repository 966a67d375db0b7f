"""MX statistics of a quantised checkpoint: scales, empty blocks, exact folds, error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import require
from ...formats.codec import dequantize_blocks
from ...formats.folding import fold_certificate
from ...formats.spec import E8M0_BIAS, E8M0_NAN, MX_BLOCK_SIZE, MXFP4
from ...formats.tensor import MXTensor
from ...moe.published_tensors import BLOCK_BYTES
from ...moe.weights import GateUpOrder, interleaved_rows
from ...moe.weights_state import PROJECTIONS
from ..module_paths import choose_modules, layer_number, match_modules, module_order
from .expert_sources import ExpertSource, find_expert_sources
from .plan import CHUNK_ELEMENTS
from .published_experts import stored_gate_up_order
from .safetensors_files import CONFIG_FILE, CheckpointReader

OP = "inspect_checkpoint"
_STORED = re.compile(r"^(?P<module>.+)\.(?P<projection>[^.]+)_(?:blocks|scales)$")

ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ProjectionStatistics:
    """MX statistics of one quantised tensor [E, N, K].

    Args:
        module: full module path. projection: name of the tensor below it, without ``_blocks``.
        layer: number of the layer, -1 where the path has none; several modules may share it.
        shape: [E, N, K]; bytes: codes and scales; blocks: number of blocks.
        zero_blocks: blocks whose codes are all zero; nan_scales: scale bytes of 255.
        scale_histogram: blocks by scale exponent (byte - 127), zero blocks and NaN left out.
        min_exponent, median_exponent, max_exponent: of that histogram; None if it is empty.
        blocks_outside: blocks outside the 15 binades of their row; widest_span: in binades.
        rows_outside: rows with such a block, of E·N.
        sqnr_db: to the source; None without a source, or if the error is zero.
        relative_l2: ``|w - dequantised| / |w|`` to the source; None without one.
    """

    module: str
    projection: str
    layer: int
    shape: tuple[int, int, int]
    bytes: int
    blocks: int
    zero_blocks: int
    nan_scales: int
    scale_histogram: dict[int, int]
    min_exponent: int | None
    median_exponent: int | None
    max_exponent: int | None
    blocks_outside: int
    rows_outside: int
    widest_span: int
    sqnr_db: float | None = None
    relative_l2: float | None = None

    @property
    def exact_fold(self) -> bool:
        """Whether every block folds exactly into e4m3."""
        return self.blocks_outside == 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"exact_fold": self.exact_fold}


def inspect_checkpoint(
    path: Path | str,
    *,
    source: Path | str | None = None,
    layer: int | str | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[ProjectionStatistics]:
    """Compute the MX statistics of every MXFP4 tensor of a checkpoint.

    Args:
        path: checkpoint directory in gpt-oss's format, one safetensors file of it, or the id of a
            model on the Hugging Face Hub.
        source: the unquantised checkpoint that it came from, for SQNR. Modules are matched by
            their full paths, or by layer number where that fits one module in both checkpoints.
        layer: only this module, by full path, or all modules of this layer, by number.
        on_progress: called with (bytes done, bytes in all, tensor name) after every expert.

    Returns:
        One ProjectionStatistics per tensor, in the order of the modules' paths.

    Raises:
        ValueError: no MXFP4 tensors, no such layer, bad shapes, or a source that does not fit.

    Example:
        >>> inspect_checkpoint("/nowhere")
        Traceback (most recent call last):
        ValueError: inspect_checkpoint: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    reader = CheckpointReader(path, OP)
    matches = [match for name in reader.names if (match := _STORED.match(name))]
    found = list(dict.fromkeys((match["module"], match["projection"]) for match in matches))
    require(
        bool(found),
        OP,
        str(path),
        need="tensors named *_blocks with *_scales",
        got="none",
        remedy="convert a bf16 checkpoint with `mxpert quantize`",
    )
    if isinstance(layer, str):
        modules = choose_modules(sorted({module for module, _ in found}), [layer], OP)
        found = [entry for entry in found if entry[0] in modules]
    elif layer is not None:
        layers = sorted({layer_number(module) for module, _ in found})
        require(layer in layers, OP, "layer", need=f"one of {layers}", got=layer)
        found = [entry for entry in found if layer_number(entry[0]) == layer]
    found.sort(key=lambda entry: (module_order(entry[0]), entry[1] == PROJECTIONS[1]))
    shapes = {entry: _check(reader, *entry) for entry in found}
    comparison = _Comparison.open(reader, source, shapes) if source is not None else None
    progress = on_progress or (lambda done, total, what: None)
    total = sum(_nbytes(shape) for shape in shapes.values())
    done = 0
    statistics = []
    for (module, projection), shape in shapes.items():
        collector = _Collector(module, projection, shape)
        name = f"{module}.{projection}"
        for expert in range(shape[0]):
            quantized = MXTensor(
                reader.read_row(f"{name}_blocks", expert).flatten(-2),
                reader.read_row(f"{name}_scales", expert),
                MXFP4,
            )
            original = None
            if comparison is not None:
                original, quantized = comparison.pair(module, projection, expert, quantized)
            step = max(1, CHUNK_ELEMENTS // shape[2])
            for row in range(0, shape[1], step):
                part = quantized[row : row + step]
                collector.add(part)
                if original is not None:
                    collector.compare(
                        original[row : row + step].to(torch.float32), dequantize_blocks(part)
                    )
            progress(done + _nbytes(shape) * (expert + 1) // shape[0], total, name)
        done += _nbytes(shape)
        statistics.append(collector.result())
    return statistics


class _Collector:
    """Running sums over the experts of one tensor."""

    def __init__(self, module: str, projection: str, shape: tuple[int, int, int]) -> None:
        self.module, self.projection, self.shape = module, projection, shape
        self.counts = torch.zeros(256, dtype=torch.int64)
        self.zero_blocks = self.nan_scales = 0
        self.blocks_outside = self.rows_outside = self.widest_span = 0
        self.compared = False
        self.signal = self.noise = 0.0

    def add(self, quantized: MXTensor) -> None:
        scale = quantized.scale
        codes = quantized.qdata.unflatten(-1, (scale.shape[-1], BLOCK_BYTES))
        zero = ((codes & 0x77) == 0).all(-1)
        nan = scale == E8M0_NAN
        self.zero_blocks += int(zero.sum())
        self.nan_scales += int(nan.sum())
        self.counts += torch.bincount(scale[~zero & ~nan].to(torch.int64), minlength=256)
        certificate = fold_certificate(quantized)
        self.blocks_outside += certificate.total_outside
        self.rows_outside += int(certificate.rows_outside.sum())
        self.widest_span = max(self.widest_span, certificate.widest_span)

    def compare(self, original: torch.Tensor, values: torch.Tensor) -> None:
        self.compared = True
        self.signal += float(original.square().sum(dtype=torch.float64))
        self.noise += float((original - values).square().sum(dtype=torch.float64))

    def result(self) -> ProjectionStatistics:
        present = self.counts.nonzero().flatten()
        below = self.counts.cumsum(0)
        total = int(below[-1])
        low, middle, high = (
            (None, None, None)
            if total == 0
            else (
                int(present[0]) - E8M0_BIAS,
                int(torch.searchsorted(below, (total + 1) // 2)) - E8M0_BIAS,
                int(present[-1]) - E8M0_BIAS,
            )
        )
        measurable = self.compared and math.isfinite(self.noise) and self.signal > 0
        ratio = self.noise / self.signal if measurable else None
        return ProjectionStatistics(
            module=self.module,
            projection=self.projection,
            layer=layer_number(self.module),
            shape=self.shape,
            bytes=_nbytes(self.shape),
            blocks=math.prod(self.shape) // 32,
            zero_blocks=self.zero_blocks,
            nan_scales=self.nan_scales,
            scale_histogram={int(byte) - E8M0_BIAS: int(self.counts[byte]) for byte in present},
            min_exponent=low,
            median_exponent=middle,
            max_exponent=high,
            blocks_outside=self.blocks_outside,
            rows_outside=self.rows_outside,
            widest_span=self.widest_span,
            sqnr_db=-10 * math.log10(ratio) if ratio else None,
            relative_l2=None if ratio is None else math.sqrt(ratio),
        )


@dataclass(frozen=True)
class _Comparison:
    """The unquantised checkpoint and the row order of the quantised one.

    `layers` has the source's experts by module path of the quantised checkpoint.
    """

    reader: CheckpointReader
    layers: dict[str, ExpertSource]
    order: GateUpOrder

    @classmethod
    def open(
        cls,
        quantized: CheckpointReader,
        source: Path | str,
        shapes: dict[tuple[str, str], tuple[int, int, int]],
    ) -> _Comparison:
        order = stored_gate_up_order(quantized.config(), quantized.directory / CONFIG_FILE, OP)
        reader = CheckpointReader(source, OP)
        found = {layer.prefix: layer for layer in find_expert_sources(reader, reader.config())}
        matched = match_modules(sorted({module for module, _ in shapes}), list(found))
        layers = {module: found[prefix] for module, prefix in matched.items()}
        for (module, projection), shape in shapes.items():
            require(
                module in layers and projection in layers[module].projections,
                OP,
                f"source {source}",
                need=f"the experts of {module}, {projection}",
                got=f"{sorted(found)}",
                remedy="give the checkpoint that was quantised",
            )
            wanted = layers[module].shape(projection)
            require(
                wanted == shape,
                OP,
                f"{module}.{projection}",
                need=f"the source's {wanted}",
                got=shape,
                remedy="give the checkpoint that was quantised",
            )
        return cls(reader, layers, order)

    def pair(
        self, module: str, projection: str, expert: int, quantized: MXTensor
    ) -> tuple[torch.Tensor, MXTensor]:
        """Source and quantised matrix of one expert, the rows of both INTERLEAVED."""
        layer = self.layers[module]
        if projection == "gate_up_proj" and self.order is not GateUpOrder.INTERLEAVED:
            rows = interleaved_rows(self.order, layer.intermediate_size)
            quantized = replace(quantized, qdata=quantized.qdata[rows], scale=quantized.scale[rows])
        return layer.read(self.reader, projection, expert), quantized


def _check(reader: CheckpointReader, module: str, projection: str) -> tuple[int, int, int]:
    """Check one blocks/scales pair by its headers; returns [E, N, K]."""
    name = f"{module}.{projection}"
    info = reader.info(f"{name}_blocks")
    require(
        len(info.shape) == 4 and info.shape[-1] == BLOCK_BYTES and 0 not in info.shape,
        OP,
        f"{info.file}: {info.name}.shape",
        need=f"[E, N, K/{MX_BLOCK_SIZE}, {BLOCK_BYTES}]",
        got=list(info.shape),
    )
    remedy = "download the file again"
    reader.require(info.name, dtypes=["U8"], shape=info.shape, remedy=remedy)
    reader.require(f"{name}_scales", dtypes=["U8"], shape=info.shape[:-1], remedy=remedy)
    return info.shape[0], info.shape[1], info.shape[2] * MX_BLOCK_SIZE


def _nbytes(shape: tuple[int, int, int]) -> int:
    elements = math.prod(shape)
    return elements // MXFP4.codes_per_byte + elements // MX_BLOCK_SIZE
