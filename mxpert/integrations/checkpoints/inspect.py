"""Statistics of a quantised checkpoint: container, scales, empty blocks, exact folds, error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...core.files import exists, short
from ...errors import require
from ...formats.codec import dequantize_blocks
from ...formats.folding import fold_certificate
from ...formats.spec import MX_BLOCK_SIZE, MXFP4, MXFP8_E4M3
from ...formats.tensor import MXTensor
from ...formats.weight_rounding import RoundingCertificate, WeightRounding, round_to_e4m3
from ...formats.weight_tensor import NVFP4, AnyWeightFormat, WeightFormat, WeightTensor
from ...moe.published_tensors import BLOCK_BYTES, published_projections
from ...moe.weights import GateUpOrder, interleaved_rows
from ...moe.weights_state import PROJECTIONS
from ..module_paths import choose_modules, layer_number, match_modules, module_order
from .container_kinds import Container
from .containers import GPT_OSS, container_of
from .expert_matrices import Exact
from .expert_sources import ExpertSource, find_expert_sources
from .per_expert import ExpertModule
from .plan import CHUNK_ELEMENTS
from .published_experts import read_published_matrix, stored_gate_up_order
from .safetensors_files import CONFIG_FILE, CheckpointReader
from .scale_counts import exponent_of, scale_counts
from .stated_quantization import Statement

OP = "inspect_checkpoint"
_STORED = re.compile(r"^(?P<module>.+)\.(?P<projection>[^.]+)_(?:blocks|scales)$")

ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ProjectionStatistics:
    """Statistics of one quantised tensor [E, N, K].

    Args:
        module: full module path. projection: name of the tensor below it, without ``_blocks``.
        layer: number of the layer, -1 where the path has none; several modules may share it.
        shape: [E, N, K]; bytes: codes and scales; blocks: number of blocks, one scale each.
        zero_blocks: blocks whose weights are all zero; nan_scales: scales that are no number.
        scale_histogram: blocks by the exponent of their scale, ``floor(log2(scale))``, with the
            global scale of NVFP4; zero blocks and NaN are left out.
        min_exponent, median_exponent, max_exponent: of that histogram; None if it is empty.
        blocks_outside: blocks outside the 15 binades of their row; widest_span: in binades.
        rows_outside: rows with such a block, of E·N. All three are None for other weights than
            MXFP4.
        container: how the checkpoint stores its experts. weight_format: what they load as.
        gate_up_order: of the rows, as loaded; None without a gate, or where no config states it.
        experts_cast: experts whose NVFP4 weights are a cast of MXFP4; None for other formats. A
            module loads as MXFP4 where all experts of both projections are casts.
        rounding_snr_db: of NVFP4 weights rounded to one e4m3 each, to their own values, where it
            was asked for; infinite if all stay as they are.
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
    blocks_outside: int | None
    rows_outside: int | None
    widest_span: int | None
    container: str
    weight_format: str
    gate_up_order: str | None
    experts_cast: int | None
    rounding_snr_db: float | None = None
    sqnr_db: float | None = None
    relative_l2: float | None = None

    @property
    def exact_fold(self) -> bool:
        """Whether the weights are MXFP4 and every block folds exactly into e4m3."""
        return self.blocks_outside == 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"exact_fold": self.exact_fold}


def inspect_checkpoint(
    path: Path | str,
    *,
    source: Path | str | None = None,
    layer: int | str | None = None,
    weight_rounding: WeightRounding | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[ProjectionStatistics]:
    """Compute the statistics of every quantised projection of a checkpoint.

    Args:
        path: checkpoint directory in any container that `load_expert_weights` reads, one
            safetensors file in gpt-oss's format, or the id of a model on the Hugging Face Hub.
        source: the unquantised checkpoint that it came from, for SQNR. Modules are matched by
            their full paths, or by layer number where that fits one module in both checkpoints.
        layer: only this module, by full path, or all modules of this layer, by number.
        weight_rounding: "e4m3" measures what `MoEWeights.round_weights` would cost NVFP4 layers.
        on_progress: called with (bytes done, bytes in all, tensor name) after every expert.

    Returns:
        One ProjectionStatistics per projection, in the order of the modules' paths.

    Raises:
        ValueError: no quantised experts, no such layer, bad shapes, or a source that does not fit.
        UnsupportedError: another format.

    Example:
        >>> inspect_checkpoint("/nowhere")
        Traceback (most recent call last):
        ValueError: inspect_checkpoint: /nowhere — need an existing checkpoint, \
got no such file or directory
    """
    names = (None, "e4m3")
    need, got = f"one of {names}", short(weight_rounding)
    require(weight_rounding in names, OP, "weight_rounding", need=need, got=got)
    reader = CheckpointReader(path, OP)
    stored = _stored_projections(reader, layer)
    comparison = _Comparison.open(reader, source, stored) if source is not None else None
    progress = on_progress or (lambda done, total, what: None)
    total = sum(_nbytes(each.shape) for each in stored)
    done = 0
    statistics = []
    for each in stored:
        collector = _Collector(each, is_rounded=weight_rounding is not None)
        size, name = _nbytes(each.shape), f"{each.module}.{each.projection}"
        for expert in range(each.shape[0]):
            _collect(collector, each.read(expert), expert, comparison)
            progress(done + size * (expert + 1) // each.shape[0], total, name)
        done += size
        statistics.append(collector.result())
    return statistics


@dataclass(frozen=True)
class _Stored:
    """One projection of a checkpoint.

    Args:
        read: gives an expert's matrix. casts: counts the experts that are casts of MXFP4; None for
            other formats than NVFP4.
    """

    container: Container
    module: str
    projection: str
    shape: tuple[int, int, int]
    order: GateUpOrder | None
    read: Callable[[int], Exact]
    casts: Callable[[], int | None] = lambda: None


def _stored_projections(reader: CheckpointReader, layer: int | str | None) -> list[_Stored]:
    """The projections of the chosen modules, checked by their headers."""
    has_config = exists(reader.directory / CONFIG_FILE)
    statement = Statement.read(reader) if has_config else None
    if statement is None or statement.method == GPT_OSS.stated.method:
        return _published(reader, statement, layer)
    container, statement = container_of(reader)
    paths = _choose(container.paths(reader, statement), layer)
    modules = container.check(reader, statement, paths)
    return [each for module in modules for each in _of_module(reader, container, module)]


def _of_module(
    reader: CheckpointReader, container: Container, module: ExpertModule
) -> list[_Stored]:
    """Both projections of a module, whose format is found when its first matrix is read."""

    @cache
    def settled() -> tuple[ExpertModule, tuple[int, int] | None]:
        return container.settle(reader, module)

    def read(projection: str, expert: int) -> Exact:
        return container.matrix(reader, settled()[0], projection, expert)

    def casts(stage: int) -> int | None:
        found = settled()[1]
        return None if found is None else found[stage]

    return [
        _Stored(
            container,
            module.path,
            projection,
            (module.num_experts, *module.sizes(stage)),
            module.order,
            partial(read, projection),
            partial(casts, stage),
        )
        for stage, projection in enumerate(published_projections(module.order is not None))
    ]


def _published(
    reader: CheckpointReader, statement: Statement | None, layer: int | str | None
) -> list[_Stored]:
    """Blocks and scales under any name; one file of a checkpoint may have a part of them."""
    matches = [match for name in reader.names if (match := _STORED.match(name))]
    found = list(dict.fromkeys((match["module"], match["projection"]) for match in matches))
    require(
        bool(found),
        OP,
        str(reader.path),
        need="tensors named *_blocks with *_scales",
        got="none",
        remedy="convert a bf16 checkpoint with `mxpert quantize`",
    )
    modules = _choose(sorted({module for module, _ in found}), layer)
    found = [entry for entry in found if entry[0] in modules]
    found.sort(key=lambda entry: (module_order(entry[0]), entry[1] == PROJECTIONS[1]))
    order = _stated_order(reader, statement)
    stored = []
    for module, projection in found:
        shape = _check(reader, module, projection)
        of_gate = None if projection == "up_proj" else order
        read = partial(read_published_matrix, reader, module, projection)
        stored.append(_Stored(GPT_OSS, module, projection, shape, of_gate, read))
    return stored


def _stated_order(reader: CheckpointReader, statement: Statement | None) -> GateUpOrder | None:
    """The order that a config states; none is needed to count blocks."""
    if statement is None:
        return None
    if "mxpert" not in statement.entry and statement.config.get("model_type") != "gpt_oss":
        return None
    owner = {**statement.config, "quantization_config": dict(statement.entry)}
    return stored_gate_up_order(owner, reader.directory / CONFIG_FILE, OP)


def _choose(modules: list[str], layer: int | str | None) -> list[str]:
    """The modules of a layer by its number, or one module by its path."""
    if layer is None:
        return modules
    if isinstance(layer, str):
        return choose_modules(modules, [layer], OP)
    layers = sorted({layer_number(module) for module in modules})
    require(layer in layers, OP, "layer", need=f"one of {layers}", got=layer)
    return [module for module in modules if layer_number(module) == layer]


def _collect(
    collector: _Collector, matrix: Exact, expert: int, comparison: _Comparison | None
) -> None:
    """Count one expert's matrix, and compare it with the source."""
    collector.bytes += matrix.nbytes
    collector.format = matrix.format
    stored, original = collector.stored, None
    if comparison is not None:
        original, matrix = comparison.pair(stored, expert, matrix)
    step = max(1, CHUNK_ELEMENTS // stored.shape[2])
    for row in range(0, stored.shape[1], step):
        part = matrix[row : row + step]
        collector.add(part)
        if original is not None:
            rows = original[row : row + step].to(torch.float32)
            collector.compare(
                rows, dequantize_blocks(part) if isinstance(part, MXTensor) else part.dequantize()
            )


class _Collector:
    """Running sums over the experts of one projection."""

    def __init__(self, stored: _Stored, *, is_rounded: bool) -> None:
        self.stored, self.bytes = stored, 0
        self.is_rounded = is_rounded
        self.rounding: RoundingCertificate | None = None
        self.format: AnyWeightFormat = MXFP4
        self.counts = torch.zeros(0, dtype=torch.int64)
        self.zero_blocks = self.nan_scales = self.blocks = 0
        self.blocks_outside = self.rows_outside = self.widest_span = 0
        self.compared = False
        self.signal = self.noise = 0.0

    def add(self, quantized: Exact) -> None:
        found = scale_counts(quantized)
        self.zero_blocks += found.zero_blocks
        self.nan_scales += found.nan_scales
        self.counts = found.counts + self.counts if self.blocks else found.counts
        self.blocks += found.blocks
        if isinstance(quantized, MXTensor) and quantized.format == MXFP4:
            certificate = fold_certificate(quantized)
            self.blocks_outside += certificate.total_outside
            self.rows_outside += int(certificate.rows_outside.sum())
            self.widest_span = max(self.widest_span, certificate.widest_span)

        if self.is_rounded and isinstance(quantized, WeightTensor) and quantized.format == NVFP4:
            cost = round_to_e4m3(quantized)[1]
            self.rounding = cost if self.rounding is None else self.rounding + cost

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
                exponent_of(present[0]),
                exponent_of(torch.searchsorted(below, (total + 1) // 2)),
                exponent_of(present[-1]),
            )
        )
        measurable = self.compared and math.isfinite(self.noise) and self.signal > 0
        ratio = self.noise / self.signal if measurable else None
        stored, casts, is_mxfp4 = self.stored, self.stored.casts(), self.format == MXFP4
        return ProjectionStatistics(
            module=stored.module,
            projection=stored.projection,
            layer=layer_number(stored.module),
            shape=stored.shape,
            bytes=self.bytes,
            blocks=self.blocks,
            zero_blocks=self.zero_blocks,
            nan_scales=self.nan_scales,
            scale_histogram={exponent_of(each): int(self.counts[each]) for each in present},
            min_exponent=low,
            median_exponent=middle,
            max_exponent=high,
            blocks_outside=self.blocks_outside if is_mxfp4 else None,
            rows_outside=self.rows_outside if is_mxfp4 else None,
            widest_span=self.widest_span if is_mxfp4 else None,
            container=stored.container.name,
            weight_format=_shown(self.format, is_cast=casts is not None),
            gate_up_order=None if stored.order is None else stored.order.value,
            experts_cast=casts,
            rounding_snr_db=None if self.rounding is None else self.rounding.snr_db,
            sqnr_db=-10 * math.log10(ratio) if ratio else None,
            relative_l2=None if ratio is None else math.sqrt(ratio),
        )


def _shown(format: AnyWeightFormat, *, is_cast: bool) -> str:
    """What a format of weights is called; `is_cast`: MXFP4 is so of NVFP4 tensors."""
    if format == MXFP4:
        return "NVFP4, cast from MXFP4" if is_cast else "MXFP4"
    names = {MXFP8_E4M3.name: "MXFP8", NVFP4.name: "NVFP4"}
    default = f"INT4, groups of {format.group_size}" if isinstance(format, WeightFormat) else ""
    return names.get(format.name, default)


@dataclass(frozen=True)
class _Comparison:
    """The unquantised checkpoint.

    `layers` has the source's experts by module path of the quantised checkpoint.
    """

    reader: CheckpointReader
    layers: dict[str, ExpertSource]

    @classmethod
    def open(
        cls, quantized: CheckpointReader, source: Path | str, stored: list[_Stored]
    ) -> _Comparison:
        if any(each.container is GPT_OSS for each in stored):  # an order has to be stated
            stored_gate_up_order(quantized.config(), quantized.directory / CONFIG_FILE, OP)
        reader = CheckpointReader(source, OP)
        found = {layer.prefix: layer for layer in find_expert_sources(reader, reader.config())}
        matched = match_modules(sorted({each.module for each in stored}), list(found))
        layers = {module: found[prefix] for module, prefix in matched.items()}
        for each in stored:
            module, projection = each.module, each.projection
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
                wanted == each.shape,
                OP,
                f"{module}.{projection}",
                need=f"the source's {wanted}",
                got=each.shape,
                remedy="give the checkpoint that was quantised",
            )
        return cls(reader, layers)

    def pair(self, stored: _Stored, expert: int, quantized: Exact) -> tuple[torch.Tensor, Exact]:
        """Source and quantised matrix of one expert, the rows of both INTERLEAVED."""
        layer, order = self.layers[stored.module], stored.order
        if stored.projection == "gate_up_proj" and order not in (GateUpOrder.INTERLEAVED, None):
            rows = interleaved_rows(order, layer.intermediate_size)
            quantized = quantized._mapped(lambda part: part[rows])
        return layer.read(self.reader, stored.projection, expert), quantized


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
