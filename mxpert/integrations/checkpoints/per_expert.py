"""Quantised experts with one matrix per expert and projection: found, checked, and read.

Below a module ``….experts`` each matrix has several tensors, ``0.gate_proj.weight_packed`` and
``0.gate_proj.weight_scale`` for example. Matrices are named ``w1`` (gate), ``w3`` (up), ``w2``
(down), or ``gate_proj``, ``up_proj``, ``down_proj``; a `MatrixFormat` says which tensors each has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import UnsupportedError, message, require
from ...formats.tensor import TENSOR_FIELDS
from ...moe.weights import GateUpOrder
from .expert_matrices import BadMatrixError, Decoded, Exact, MatrixFormat, Part
from .expert_sources import (
    PARTS,
    SOURCE_DTYPES,
    check_blocks,
    check_hidden,
    stated_experts,
    states_gate,
)
from .nvfp4_casts import NotACast
from .safetensors_files import CheckpointReader, TensorInfo

_EXPERTS = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.(?P<tail>.+)$")
_TAIL = re.compile(
    r"^(?P<expert>\d{1,9})\.(?P<matrix>w[123]|(?:gate|up|down)_proj)\.(?P<suffix>[^.]+)$"
)
_DENSE = re.compile(r"(?:^|\.)(?:weight|bias|(?:gate_up|gate|up|down)_proj(?:_bias)?)$")
_WEIGHTS = ("weight", "weight_packed", "qweight")
"""Names of the tensors that hold a linear layer's weight, dense or quantised."""
_INCOMPLETE = "the checkpoint is incomplete: download it again"


@dataclass(frozen=True)
class ExpertModule:
    """The experts of one module of a checkpoint, checked by their headers.

    Args:
        path: full module path, ``model.layers.3.mlp.experts``.
        num_experts, hidden_size, intermediate_size: E, H, F.
        order: gate/up order of the weights that are made; None where experts have no gate.
        matrices: for one matrix per expert: its name by (expert, "gate" | "up" | "down"), without
            the suffixes of its tensors; empty for stacked experts.
        biased: parts that have a bias.
        stored: how each matrix is stored; None for stacked experts.
    """

    path: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    order: GateUpOrder | None
    matrices: Mapping[tuple[int, str], str]
    biased: frozenset[str] = frozenset()
    stored: MatrixFormat | None = None

    @property
    def stages(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts of both projections, in the order of their rows."""
        return ("gate", "up") if self.order is not None else ("up",), ("down",)

    def rows(self, part: str) -> int:
        """N of a part's matrix [N, K]."""
        return self.hidden_size if part == "down" else self.intermediate_size

    def sizes(self, stage: int) -> tuple[int, int]:
        """N and K of a projection."""
        parts = self.stages[stage]
        columns = self.intermediate_size if "down" in parts else self.hidden_size
        return sum(self.rows(part) for part in parts), columns


def expert_tails(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of tensors below each experts module, by the module's path.

    Example:
        >>> expert_tails(["h.1.experts.0.w1.weight", "h.1.shared_experts.w1.weight"])
        {'h.1.experts': ['0.w1.weight']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _EXPERTS.match(name):
            found.setdefault(match["experts"], []).append(match["tail"])
    return found


def linear_of(path: str, tails: Sequence[str]) -> str:
    """The path that a config knows a module's experts by: of a matrix, or of the stacked module.

    Example:
        >>> linear_of("h.1.experts", ["0.w1.weight"]), linear_of("h.1.experts", ["down_proj"])
        ('h.1.experts.0.w1', 'h.1.experts')
    """
    match = _TAIL.match(tails[0])
    return f"{path}.{match['expert']}.{match['matrix']}" if match else path


def dense_tensor(reader: CheckpointReader, path: str, tails: Collection[str]) -> TensorInfo | None:
    """The first tensor of a module whose experts are not quantised; None for quantised ones."""
    if not all(_DENSE.search(tail) for tail in tails):
        return None
    first = reader.info(f"{path}.{next(iter(tails))}")
    return first if first.dtype in SOURCE_DTYPES else None


def other_weights(
    reader: CheckpointReader, paths: Collection[str], dtypes: Collection[str]
) -> Iterator[TensorInfo]:
    """Weights of layers beside the experts of modules at `paths` that have none of the dtypes."""
    below = tuple(f"{path}." for path in paths)
    for name in reader.names:
        if name.rpartition(".")[2] in _WEIGHTS and not name.startswith(below):
            info = reader.info(name)
            if info.dtype not in dtypes:
                yield info


def check_module(
    reader: CheckpointReader,
    config: Mapping[str, Any],
    path: str,
    tails: Collection[str],
    stored: MatrixFormat,
    container: str,
) -> ExpertModule:
    """Check one module's tensors by their headers.

    Args:
        reader: the checkpoint. config: its ``config.json``.
        path: of the module. tails: names of its tensors below it.
        stored: how each matrix is stored. container: its name, for messages.

    Raises:
        ValueError: a missing, foreign or mis-shaped tensor; the message names it.
    """
    op = reader.op
    matrices, biases = _matrices(op, path, tails, stored, container)
    has_gate = states_gate(config)
    kinds = ("gate", "up", "down") if has_gate else ("up", "down")
    experts = stated_experts(config, default=1 + max(expert for expert, _ in matrices))
    count = len(kinds) * experts
    for expert in range(experts):
        for kind in kinds:
            need = f"a {kind} projection for each of {experts} experts"
            where = f"{reader.path}: {path}.{expert}"
            fits = (expert, kind) in matrices
            require(fits, op, where, need=need, got="none", remedy=_INCOMPLETE)
    need = f"{len(kinds)} matrices for each of {experts} experts"
    remedy = "config and tensors belong to different models"
    where = f"{reader.path}: {path}"
    require(len(matrices) == count, op, where, need=need, got=len(matrices), remedy=remedy)
    first = reader.info(f"{matrices[0, kinds[0]]}.{stored.parts[0].suffix}")
    shape, need = list(first.shape), f"[{', '.join(stored.parts[0].shape)}]"
    where = f"{first.file}: {first.name}.shape"
    require(len(shape) == 2 and 0 not in shape, op, where, need=need, got=shape)
    intermediate, hidden = stored.parts[0].sizes(first.shape)
    check_blocks(op, first, hidden, intermediate)
    check_hidden(reader, config, hidden, first)
    need, got = f"multiples of the group, {stored.group}", [intermediate, hidden]
    fits = all(size % stored.group == 0 for size in got)
    require(fits, op, f"{first.file}: {first.name}: N and K", need=need, got=got)
    module = ExpertModule(
        path,
        experts,
        hidden,
        intermediate,
        GateUpOrder.CONCATENATED if has_gate else None,
        matrices,
        frozenset(biases),
        stored,
    )
    _check_tensors(reader, module, stored)
    return module


def _matrices(
    op: str, path: str, tails: Collection[str], stored: MatrixFormat, container: str
) -> tuple[dict[tuple[int, str], str], set[str]]:
    """The name of each matrix, and the parts that have a bias.

    Raises:
        ValueError: a tensor that is none of the container's, or two namings side by side.
    """
    suffixes = [part.suffix for part in stored.parts]
    known = {*suffixes, "bias", *stored.unread}
    matrices: dict[tuple[int, str], str] = {}
    biases = set()
    for tail in tails:
        match = _TAIL.match(tail)
        if match is None or match["suffix"] not in known:
            tensors = " and ".join(f"N.gate_proj.{suffix}" for suffix in suffixes)
            need = f"{tensors}, as {container} has them"
            raise ValueError(message(op, f"{path}.{tail}", need, "another tensor", _foreign(tail)))
        part, name = PARTS[match["matrix"]], f"{path}.{match['expert']}.{match['matrix']}"
        other = matrices.setdefault((int(match["expert"]), part), name)
        require(other == name, op, name, need="one naming of experts", got=f"{other} beside it")
        if match["suffix"] == "bias":
            biases.add(part)
    return matrices, biases


def _foreign(tail: str) -> str:
    if tail.endswith("pre_quant_scale"):
        return "scales of AWQ's kind on the activations are not supported"
    return "config and tensors do not belong together"


def _check_tensors(reader: CheckpointReader, module: ExpertModule, stored: MatrixFormat) -> None:
    """Check dtype and shape of every tensor; an absent one raises."""
    sizes = {
        "down": (module.hidden_size, module.intermediate_size),
        "gate": (module.intermediate_size, module.hidden_size),
        "up": (module.intermediate_size, module.hidden_size),
    }
    biased = {
        part for parts in module.stages for part in parts if module.biased.intersection(parts)
    }
    first = module.matrices[0, module.stages[0][0]]
    dtypes = {part.suffix: reader.info(f"{first}.{part.suffix}").dtype for part in stored.parts}
    for (_, kind), name in module.matrices.items():
        for part in stored.parts:
            _check_part(reader, f"{name}.{part.suffix}", part, sizes[kind])
        if kind in biased:
            shape = sizes[kind][:1]
            remedy = "one bias per row of the matrix"
            reader.require(f"{name}.bias", dtypes=SOURCE_DTYPES, shape=shape, remedy=remedy)
    for name in module.matrices.values():  # they are stacked: none is converted
        for suffix, dtype in dtypes.items():
            info = reader.info(f"{name}.{suffix}")
            if info.dtype != dtype:
                where, need = f"{info.file}: {info.name}.dtype", f"{dtype}, as {first} has"
                raise ValueError(message(reader.op, where, need, info.dtype))


def _check_part(reader: CheckpointReader, name: str, part: Part, sizes: tuple[int, int]) -> None:
    info, shapes = reader.info(name), part.shapes(*sizes)
    if info.dtype not in part.dtypes:  # messages are composed on failure alone: there are many
        need = " or ".join(part.dtypes)
        raise ValueError(message(reader.op, f"{info.file}: {name}.dtype", need, info.dtype))
    if info.shape not in shapes:
        where, need = f"{info.file}: {name}.shape", " or ".join(str(list(each)) for each in shapes)
        remedy = f"the matrix is {list(sizes)}"
        raise ValueError(message(reader.op, where, need, list(info.shape), remedy))


def check_matrix(reader: CheckpointReader, name: str, stored: MatrixFormat) -> None:
    """Check a matrix of another layer than experts by its headers.

    Raises:
        ValueError: a mis-shaped tensor or one of another dtype; the message names it.
    """
    codes = stored.parts[0]
    first = reader.info(f"{name}.{codes.suffix}")
    where, need = f"{first.file}: {first.name}.shape", f"[{', '.join(codes.shape)}]"
    require(len(first.shape) == 2, reader.op, where, need=need, got=list(first.shape))
    for part in stored.parts:
        _check_part(reader, f"{name}.{part.suffix}", part, codes.sizes(first.shape))


def read_matrix(reader: CheckpointReader, name: str, stored: MatrixFormat) -> Decoded:
    """One matrix of one expert, on the CPU.

    Raises:
        ValueError, UnsupportedError: tensors whose content does not fit; the message names one.
    """
    tensors = [reader.read(f"{name}.{part.suffix}") for part in stored.parts]
    return decode_matrix(reader.op, name, stored, tensors)


def decode_matrix(
    op: str,
    name: str,
    stored: MatrixFormat,
    tensors: Sequence[torch.Tensor],
    codes: torch.Tensor | None = None,
) -> Decoded:
    """The matrix of its tensors; raises as `read_matrix`, messages start with `op`.

    codes: memory for them, where `stored` takes it.
    """
    try:
        return stored.decode(*tensors) if codes is None else stored.decode(*tensors, codes=codes)
    except BadMatrixError as bad:
        text = message(op, f"{name}.{bad.suffix}", bad.need, bad.got, bad.remedy)
        raise (UnsupportedError if bad.is_known else ValueError)(text) from None


def is_cast(
    reader: CheckpointReader, module: ExpertModule, stored: MatrixFormat, expert: int, stage: int
) -> bool:
    """Whether the NVFP4 tensors of one expert's projection are a cast of MXFP4."""
    return not any(
        isinstance(read_matrix(reader, module.matrices[expert, part], stored), NotACast)
        for part in module.stages[stage]
    )


def settle(
    reader: CheckpointReader, module: ExpertModule
) -> tuple[ExpertModule, tuple[int, int] | None]:
    """The module with the format that its weights load in, and its casts of MXFP4.

    Returns:
        The module; of NVFP4, how many experts of both projections are casts, otherwise None.
    """
    stored = module.stored
    if stored is None or stored.otherwise is None:
        return module, None
    first, second = (
        sum(is_cast(reader, module, stored, each, stage) for each in range(module.num_experts))
        for stage in (0, 1)
    )
    are_casts = first == second == module.num_experts
    return replace(module, stored=stored if are_casts else stored.otherwise), (first, second)


def read_stage(reader: CheckpointReader, module: ExpertModule, stage: int, expert: int) -> Exact:
    """One expert's projection of a stage [N, K], gate rows before up rows; on the CPU.

    Args:
        reader: the checkpoint. module: of `settle`. stage: 0 or 1. expert: its index.
    """
    assert module.stored is not None  # for the type checker: one matrix per expert
    exact: list[Exact] = []
    for part in module.stages[stage]:
        matrix = read_matrix(reader, module.matrices[expert, part], module.stored)
        assert not isinstance(matrix, NotACast)  # for the type checker: of `settle`
        exact.append(matrix)
    joined: dict[str, Any] = {  # fields of any type that a matrix may have
        field: torch.cat([getattr(part, field) for part in exact]) for field in tensors_of(exact[0])
    }
    return replace(exact[0], **joined)


def tensors_of(matrix: Exact) -> list[str]:
    """Names of the tensors of a matrix; each has the matrix's rows first."""
    return [name for name in TENSOR_FIELDS[type(matrix)] if getattr(matrix, name) is not None]
