"""Reading the experts of a module: each matrix into its place in the stacked projections.

A few threads each read a matrix and decode it. A tensor that is a field of the decoded matrix is
read into its place, others into memory that is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...moe.weights import MoEWeights
from .expert_matrices import Decoded, Exact, MatrixFormat, Part
from .nvfp4_casts import NotACast
from .per_expert import ExpertModule, decode_matrix, is_cast, tensors_of
from .safetensors_files import TORCH_DTYPES, CheckpointReader, TensorInfo


def read_module(
    reader: CheckpointReader,
    module: ExpertModule,
    device: torch.device | str,
    experts: Sequence[int] | None = None,
) -> MoEWeights:
    """The weights of a module, or of some of its experts, read matrix by matrix.

    NVFP4 is MXFP4 where every matrix of the module is a cast of it, also those of experts that are
    not asked for: all ranks of a layer have one format.

    Args:
        reader: the checkpoint. module: of `check_module`.
        device: of the weights; besides them, a few matrices are held at a time.
        experts: indices in the wanted order; None is all of them.

    Raises:
        ValueError, UnsupportedError: as `read_matrix`.
    """
    every = range(module.num_experts)
    chosen = every if experts is None else experts
    stored = module.stored
    assert stored is not None  # for the type checker: one matrix per expert
    others = [expert for expert in every if expert not in chosen]
    if stored.otherwise is not None and not all(
        is_cast(reader, module, stored, expert, stage) for expert in others for stage in (0, 1)
    ):
        stored = stored.otherwise
    found = _read_projections(reader, module, stored, chosen, device)
    if found is None:
        assert stored.otherwise is not None  # for the type checker: the last format decodes all
        found = _read_projections(reader, module, stored.otherwise, chosen, device)
    assert found is not None  # for the type checker: as above
    first, second = (_read_bias(reader, module, parts, chosen, device) for parts in module.stages)
    return MoEWeights(*found, first, second, gate_up_order=module.order)


class _Stacked:
    """One projection [E, N, K] that is filled matrix by matrix.

    num_experts, num_rows: E and N. device: of the result.
    """

    def __init__(self, num_experts: int, num_rows: int, device: torch.device | str) -> None:
        self._sizes, self._device = (num_experts, num_rows), torch.device(device)
        self._lock = threading.Lock()
        self._fields: dict[str, torch.Tensor] = {}
        self.weights: Exact | None = None

    def place(self, part: Part, info: TensorInfo, at: tuple[int, slice]) -> torch.Tensor | None:
        """Where a tensor of a matrix is read to; None where its matrix has to be decoded first."""
        if not part.field:
            return None
        return self._place(part.field, info.shape[1], TORCH_DTYPES[info.dtype], at)

    def codes(
        self, stored: MatrixFormat, shape: tuple[int, ...], at: tuple[int, slice]
    ) -> torch.Tensor | None:
        """Where a matrix decodes its codes to, as far as it takes that. shape: as stored."""
        if not stored.takes_codes:
            return None
        return self._place("qdata", stored.parts[0].sizes(shape)[1] // 2, torch.uint8, at)

    def _place(
        self, field: str, width: int, dtype: torch.dtype, at: tuple[int, slice]
    ) -> torch.Tensor | None:
        if self._device.type != "cpu":
            return None
        with self._lock:
            if field not in self._fields:
                shape = *self._sizes, width
                self._fields[field] = torch.empty(shape, dtype=dtype, device=self._device)
        return self._fields[field][at]

    def add(self, matrix: Exact, at: tuple[int, slice]) -> None:
        """Copy what is not in its place."""
        with self._lock:
            if self.weights is None:
                self.weights = self._like(matrix)
        for name in tensors_of(matrix):
            place, found = getattr(self.weights, name)[at], getattr(matrix, name)
            if place.data_ptr() != found.data_ptr():
                place.copy_(found)

    def _like(self, matrix: Exact) -> Exact:
        """Tensors of the kind that `matrix` [n, K] has, uninitialised but for the fields."""
        made: dict[str, Any] = {}  # fields of any type that a matrix may have
        for name in tensors_of(matrix):
            found, field = getattr(matrix, name), self._fields.get(name)
            shape = (*self._sizes, *found.shape[1:])
            made[name] = (
                torch.empty(shape, dtype=found.dtype, device=self._device)
                if field is None
                else field.view(found.dtype)
            )
        return replace(matrix, **made)


def stack_matrices(
    experts: Iterable[Iterable[Decoded]],
    num_experts: int,
    num_rows: int,
    device: torch.device | str,
) -> Exact | None:
    """One projection [E, N, K] of the matrices of each expert, above one another.

    Args:
        experts: of each expert its matrices [n, K]; each is copied before the next is asked for.
        num_experts, num_rows: E and N. device: of the result.

    Returns:
        The projection; None as soon as a matrix is no cast of MXFP4.
    """
    stacked = _Stacked(num_experts, num_rows, device)
    for expert, matrices in enumerate(experts):
        first = 0
        for matrix in matrices:
            if isinstance(matrix, NotACast):
                return None
            last = first + matrix.shape[0]
            stacked.add(matrix, (expert, slice(first, last)))
            first = last
    assert stacked.weights is not None  # for the type checker: there are experts
    return stacked.weights


@dataclass(frozen=True)
class _Wanted:
    """A matrix of a module. stacked, at: where it belongs. name: its name."""

    stacked: _Stacked
    at: tuple[int, slice]
    name: str


def _read_projections(
    reader: CheckpointReader,
    module: ExpertModule,
    stored: MatrixFormat,
    experts: Sequence[int],
    device: torch.device | str,
) -> tuple[Exact, Exact] | None:
    """Both projections; None where a matrix is no cast of MXFP4."""
    first, second = (_Stacked(len(experts), module.sizes(each)[0], device) for each in (0, 1))
    wanted = []
    for stacked, parts in zip((first, second), module.stages, strict=True):
        for place, expert in enumerate(experts):
            row = 0
            for part in parts:
                at = place, slice(row, row + module.rows(part))
                wanted.append(_Wanted(stacked, at, module.matrices[expert, part]))
                row += module.rows(part)
    cuda = torch.device(device).type == "cuda"
    fill = partial(
        _fill,
        reader,
        stored,
        threading.local(),
        torch.cuda.current_stream(device) if cuda else None,
    )
    filling = [reader.threads.submit(fill, each) for each in wanted]
    try:
        if not all(each.result() for each in filling):
            return None
    finally:
        for each in filling:
            each.cancel()
        wait(filling)
    assert first.weights is not None  # for the type checker: there are experts
    assert second.weights is not None  # for the type checker: as above
    return first.weights, second.weights


def _fill(
    reader: CheckpointReader,
    stored: MatrixFormat,
    local: threading.local,
    stream: torch.cuda.Stream | None,
    wanted: _Wanted,
) -> bool:
    """Read and decode one matrix into its place; False for no cast of MXFP4.

    local: memory of this thread. stream: of the device; None on a CPU.
    """
    tensors = _read(reader, stored, wanted, vars(local))
    codes = wanted.stacked.codes(stored, tuple(tensors[0].shape), wanted.at)
    matrix = decode_matrix(reader.op, wanted.name, stored, tensors, codes)
    if isinstance(matrix, NotACast):
        return False
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        wanted.stacked.add(matrix, wanted.at)
    return True


def _read(
    reader: CheckpointReader, stored: MatrixFormat, wanted: _Wanted, spare: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of one matrix. spare: memory for those without a place, by their suffix."""
    tensors = []
    for part in stored.parts:
        name = f"{wanted.name}.{part.suffix}"
        info = reader.info(name)
        memory = wanted.stacked.place(part, info, wanted.at)
        if memory is None:
            if part.suffix not in spare or spare[part.suffix].numel() < info.nbytes:
                spare[part.suffix] = torch.empty(info.nbytes, dtype=torch.uint8, device="cpu")
            own = spare[part.suffix][: info.nbytes]
            memory = own.view(TORCH_DTYPES[info.dtype]).view(info.shape)
        reader.read_into(name, memory)
        tensors.append(memory)
    return tensors


def _read_bias(
    reader: CheckpointReader,
    module: ExpertModule,
    parts: Sequence[str],
    experts: Sequence[int],
    device: torch.device | str,
) -> torch.Tensor | None:
    """float32 [E, N] of one stage; None without."""
    if not module.biased.intersection(parts):
        return None
    rows = [
        torch.cat([reader.read(f"{module.matrices[expert, part]}.bias") for part in parts])
        for expert in experts
    ]
    return torch.stack(rows).to(device, torch.float32)
