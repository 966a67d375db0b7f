"""Plan how a checkpoint goes into another container: what is lossless, and what goes where."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...core.files import short
from ...errors import UnsupportedError, message, require
from .container_kinds import Container, PerExpertContainer
from .containers import container_of
from .expert_matrices import Exact, MatrixFormat
from .expert_sources import SOURCE_DTYPES
from .nvfp4_casts import NotACast
from .per_expert import ExpertModule, check_matrix, other_weights, read_matrix
from .plan import MAX_COPY_BYTES
from .safetensors_files import CheckpointReader
from .stated_quantization import Statement
from .written_containers import LOSSLESS, TARGETS, Target

OP = "convert_checkpoint"

_WHY = {
    ("MXFP4", "INT4"): "e2m1 codes are no evenly spaced integers",
    ("NVFP4", "MXFP8"): "its scales are no powers of two",
    ("NVFP4", "INT4"): "e2m1 codes are no evenly spaced integers",
    ("MXFP8", "MXFP4"): "8-bit codes do not fit in 4 bits",
    ("MXFP8", "NVFP4"): "8-bit codes do not fit in 4 bits",
    ("MXFP8", "INT4"): "8-bit codes do not fit in 4 bits",
    ("INT4", "MXFP4"): "16 evenly spaced integers are no e2m1 codes",
    ("INT4", "NVFP4"): "16 evenly spaced integers are no e2m1 codes",
    ("INT4", "MXFP8"): "its scales are no powers of two",
}
"""Why a format cannot be held exactly in another."""


@dataclass(frozen=True)
class Unit:
    """Matrices that are converted together: one expert's, or that of another layer.

    Args:
        names: of each matrix in the destination by part, without suffixes; part "" is another
            layer's, whose name is the same in both checkpoints.
        source_bytes: of its tensors. path, expert: of the expert's module, and its index.
    """

    names: Mapping[str, str]
    source_bytes: int
    path: str = ""
    expert: int = 0


@dataclass(frozen=True)
class Shard:
    """One file of the destination.

    Args:
        name: of the file. units: converted. copied: names of tensors that stay as they are.
        source_bytes: of both.
    """

    name: str
    units: tuple[Unit, ...]
    copied: tuple[str, ...]
    source_bytes: int


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint with quantised experts, whose matrices are read one by one.

    Args:
        reader, container, statement: of `container_of`. modules: checked, by path.
        others: how matrices of other layers are stored, by name.
    """

    reader: CheckpointReader
    container: Container
    statement: Statement
    modules: Mapping[str, ExpertModule]
    others: Mapping[str, MatrixFormat] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | str, as_format: str) -> QuantizedCheckpoint:
        """Find and check the experts; reads headers only.

        Args:
            path: of the checkpoint. as_format: "MXFP4" reads NVFP4 as casts of it.
        """
        reader = CheckpointReader(path, OP)
        container, statement = container_of(reader)
        found = container.check(reader, statement, container.paths(reader, statement))
        modules = {
            each.path: replace(each, stored=_exact(each.stored, as_format)) for each in found
        }
        others = _other_matrices(reader, container, statement, modules)
        others = {name: _exact(stored, as_format) or stored for name, stored in others.items()}
        return cls(reader, container, statement, modules, others)

    def matrices(self, unit: Unit) -> dict[str, Exact]:
        """The matrices of a unit by part.

        Raises:
            ValueError, UnsupportedError: bad content, or NVFP4 that is no cast of MXFP4.
        """
        if unit.path:
            found = self.container.parts(self.reader, self.modules[unit.path], unit.expert)
        else:
            name = unit.names[""]
            found = {"": read_matrix(self.reader, name, self.others[name])}
        exact: dict[str, Exact] = {}
        for part, matrix in found.items():
            if isinstance(matrix, NotACast):
                need = "a cast of MXFP4: scales that are powers of two, equal in both halves of 32"
                got = f"NVFP4 with {matrix.casts} of {matrix.blocks} blocks so"
                remedy = "choose a container of NVFP4"
                raise ValueError(message(OP, unit.names[part], need, got, remedy))
            exact[part] = matrix
        return exact

    def biases(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The biases of an expert by part; those of other layers are tensors like any other."""
        if not unit.path:
            return {}
        return self.container.biases(self.reader, self.modules[unit.path], unit.expert)


@dataclass(frozen=True)
class ConversionPlan:
    """All decisions, made before the first byte is written.

    Args:
        source: what is read. destination: the directory. target: its container.
        shards: its files. left_out: names of scales of activations.
    """

    source: QuantizedCheckpoint
    destination: Path
    target: Target
    shards: list[Shard]
    left_out: list[str]

    @property
    def total_bytes(self) -> int:
        return sum(shard.source_bytes for shard in self.shards)


def plan_conversion(source: Path | str, destination: Path | str, container: str) -> ConversionPlan:
    """Check source and arguments, and decide which tensor goes into which file; writes nothing."""
    need = f"one of {', '.join(TARGETS)}"
    require(container in TARGETS, OP, "container", need=need, got=short(container))
    target, destination = TARGETS[container], Path(destination)
    found = QuantizedCheckpoint.open(source, target.weight_format)
    reader, place = found.reader, str(found.reader.path)
    require(reader.path.is_dir(), OP, place, need="a checkpoint directory", got="a file")
    _check_pair(found.container, target)
    _check_rest(found, target)
    inside, outer = destination.resolve(), reader.path.resolve()
    require(
        inside != outer and outer not in inside.parents,
        OP,
        str(destination),
        need="a destination outside of the source",
        got=place,
        remedy="name another directory",
    )
    left_out = _activation_scales(found)
    taken = {*left_out}
    below = tuple(f"{path}." for path in found.modules)
    taken |= {name for name in reader.names if name.startswith(below)}
    for name, stored in found.others.items():
        taken |= {f"{name}.{part.suffix}" for part in stored.parts}
    copied = [name for name in reader.names if name not in taken]
    return ConversionPlan(found, destination, target, _shards(found, target, copied), left_out)


def _exact(stored: MatrixFormat | None, as_format: str) -> MatrixFormat | None:
    """How NVFP4 is read: with its own codes and scales, or as MXFP4 where it is to become so."""
    if stored is None or stored.otherwise is None or as_format == "MXFP4":
        return stored
    return stored.otherwise


def _check_pair(source: Container, target: Target) -> None:
    """Refuse a container that is the source's own, or holds another format of weights."""
    need = "another container than the source's"
    require(source.name != target.container, OP, "container", need=need, got=target.name)
    if source.weight_format in LOSSLESS[target.weight_format]:
        return
    why = _WHY[source.weight_format, target.weight_format]
    fits = [name for name, each in TARGETS.items() if each.weight_format == source.weight_format]
    need = f"one that holds {source.weight_format} exactly, for example {fits[0]}"
    remedy = f"{why}; this needs the dense weights (`mxpert quantize`)"
    got = f"{target.name} ({target.weight_format})"
    raise ValueError(message(OP, "container", need, got, remedy))


def _check_rest(found: QuantizedCheckpoint, target: Target) -> None:
    """Refuse other quantised layers, and a KV cache, that the target's config cannot state."""
    name = next(iter(found.others), None)
    need = f"experts alone quantised, for {target.name}"
    if target.is_stacked or found.container.weight_format != target.weight_format:
        require(name is None, OP, str(name), need=need, got="another quantised layer")
    cache = found.statement.entry.get("kv_cache_scheme")
    cache = cache or found.statement.entry.get("kv_cache_quant_algo")
    remedy = "remove it from the config: the cache stays in the model's dtype"
    where = f"{found.statement.where}.kv_cache_scheme"
    require(not cache, OP, where, need="none", got=short(cache), remedy=remedy)


def _other_matrices(
    reader: CheckpointReader, container: Container, statement: Statement, modules: Collection[str]
) -> dict[str, MatrixFormat]:
    """Quantised layers beside the experts, in the same container; others are refused."""
    others = {}
    for info in other_weights(reader, modules, SOURCE_DTYPES):
        base, _, suffix = info.name.rpartition(".")
        stored = _stored_alike(reader, container, statement, base)
        if stored is None or suffix != stored.parts[0].suffix:
            need = f"dense layers, or layers in {container.name}, beside the experts"
            remedy = "they have no place in another container"
            raise UnsupportedError(message(OP, info.name, need, info.dtype, remedy))
        check_matrix(reader, base, stored)
        others[base] = stored
    return others


def _stored_alike(
    reader: CheckpointReader, container: Container, statement: Statement, base: str
) -> MatrixFormat | None:
    """How a matrix is stored; None where it is not stored as the experts are."""
    if not isinstance(container, PerExpertContainer):
        return None
    if not container.stated.fits(statement.method, statement.format_of(base)):
        return None
    stored = container.stored(statement, base)
    names = [f"{base}.{part.suffix}" for part in stored.parts]
    if any(name not in reader.names for name in names):
        return None
    is_codes = reader.info(names[0]).dtype in stored.parts[0].dtypes
    return stored if is_codes else None


def _activation_scales(found: QuantizedCheckpoint) -> list[str]:
    """Names of the scales of activations beside quantised matrices."""
    matrices = dict(found.others)
    for module in found.modules.values():
        if module.stored is not None:
            matrices |= dict.fromkeys(module.matrices.values(), module.stored)
    names = (f"{base}.{suffix}" for base, stored in matrices.items() for suffix in stored.unread)
    return [name for name in names if name in found.reader.names]


def _shards(found: QuantizedCheckpoint, target: Target, copied: list[str]) -> list[Shard]:
    """Units and copied tensors in files of at most MAX_COPY_BYTES; stacked experts in one each."""
    groups: list[tuple[list[Unit], list[str], int]] = []
    for module in found.modules.values():
        units = list(_units(found, module))
        size = sum(unit.source_bytes for unit in units)
        if target.is_stacked:
            groups.append((units, [], size))
        else:
            groups += [(part, [], size) for part, size in _limited(units)]
    reader = found.reader
    others = [
        Unit({"": name}, sum(reader.info(f"{name}.{part.suffix}").nbytes for part in stored.parts))
        for name, stored in found.others.items()
    ]
    groups += [(part, [], size) for part, size in _limited(others)]
    rest = [Unit({"": name}, reader.info(name).nbytes) for name in copied]
    groups += [([], [each.names[""] for each in part], size) for part, size in _limited(rest)]
    return [
        Shard(
            f"model-{index:05d}-of-{len(groups):05d}.safetensors", tuple(units), tuple(names), size
        )
        for index, (units, names, size) in enumerate(groups, start=1)
    ]


def _limited(units: list[Unit]) -> Iterator[tuple[list[Unit], int]]:
    """Units in groups of at most MAX_COPY_BYTES, or one larger one, and the bytes of each group."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        if group and size + unit.source_bytes > MAX_COPY_BYTES:
            yield group, size
            group, size = [], 0
        group.append(unit)
        size += unit.source_bytes
    if group:
        yield group, size


def _units(found: QuantizedCheckpoint, module: ExpertModule) -> Iterator[Unit]:
    """The experts of a module."""
    reader, parts = found.reader, [part for stage in module.stages for part in stage]
    below = [name for name in reader.names if name.startswith(f"{module.path}.")]
    size = sum(reader.info(name).nbytes for name in below) // module.num_experts
    for expert in range(module.num_experts):
        names = {
            part: module.matrices.get((expert, part), f"{module.path}.{expert}.{part}_proj")
            for part in parts
        }
        yield Unit(names, size, module.path, expert)
