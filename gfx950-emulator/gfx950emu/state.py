"""Registers of the waves that run together, and which of them execute the current instruction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .program import ACCUMULATORS, EXEC

LANES = 64

Words = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
Lanes = npt.NDArray[np.bool_]

VECTORS = 2 * ACCUMULATORS
SCALARS = 128

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def spread(values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """`np.broadcast_to`, which costs as much as an addition, where the shape is another one."""
    return values if values.shape == shape else np.broadcast_to(values, shape)


class WaveState:
    """Registers of all waves of a batch of workgroups.

    An instruction reads and writes the registers of the selected waves. Reads may return views:
    they hold until the register is written, so an instruction reads all its sources first.

    Args:
        waves: how many. garbage: makes the initial content of registers, the same in each wave.
        mode: initial MODE register. used: vector registers that get content; None for all.

    Attributes:
        vector: uint32 [512, waves, 64]; accumulator registers from 256 on.
        scalar: uint32 [128, waves]; vcc at 106, m0 at 124, exec at 126.
        scc: bool [waves]. mode: uint32 [waves], the MODE register.
        selected: indices of the selected waves as a slice or an array. count: how many they are.
        active: bool [count, 64], EXEC of the selected waves. all_active: whether all bits are set.
    """

    def __init__(
        self,
        waves: int,
        garbage: np.random.Generator,
        mode: int = 0,
        used: Iterable[int] | None = None,
    ) -> None:
        self.waves = waves
        self.vector: Words = np.empty((VECTORS, waves, LANES), np.uint32)
        content = garbage.integers(0, 1 << 32, (VECTORS, 1, LANES), np.uint32)
        for register in range(VECTORS) if used is None else used:
            self.vector[register] = content[register]
        self.scalar: Words = np.empty((SCALARS, waves), np.uint32)
        self.scalar[:] = garbage.integers(0, 1 << 32, (SCALARS, 1), np.uint32)
        self.scc: Lanes = np.zeros(waves, np.bool_)
        self.mode: Words = np.full(waves, mode, np.uint32)
        self.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF
        self._exec: Lanes = np.ones((waves, LANES), np.bool_)
        self.select(np.arange(waves))

    def select(self, waves: Indices) -> None:
        """Let these waves, in ascending order, execute the next instructions."""
        first, last = int(waves[0]), int(waves[-1])
        self.selected: slice | Indices = waves
        if last - first + 1 == waves.size:
            self.selected = slice(first, last + 1)
        self.indices = waves
        self.count = waves.size
        self.active: Lanes = self._exec[self.selected]
        self.all_active = bool(self.active.all())

    # -- vector registers --------------------------------------------------------------------------

    def read_vector(self, register: int) -> Words:
        """A vector register: uint32 [count, 64]."""
        value: Words = self.vector[register][self.selected]
        return value

    def write_vector(self, register: int, value: npt.ArrayLike, lanes: Lanes | None = None) -> None:
        """Write the active lanes of a vector register, or other `lanes`, bool [count, 64]."""
        target = self.vector[register]
        if lanes is None:
            if self.all_active:
                target[self.selected] = value
                return
            lanes = self.active
        if isinstance(self.selected, slice):
            np.copyto(target[self.selected], value, where=lanes, casting="unsafe")
        else:
            target[self.selected] = np.where(lanes, value, target[self.selected])

    # -- scalar registers --------------------------------------------------------------------------

    def read_scalar(self, register: int) -> Words:
        """A scalar register: uint32 [count]."""
        value: Words = self.scalar[register][self.selected]
        return value

    def read_scalar64(self, register: int) -> Doubles:
        """A pair of scalar registers: uint64 [count]."""
        low, high = self.read_scalar(register), self.read_scalar(register + 1)
        return low.astype(np.uint64) | high.astype(np.uint64) << _HALF

    def write_scalar(self, register: int, value: npt.ArrayLike) -> None:
        """Write a scalar register; a write to EXEC takes effect at once."""
        self.scalar[register][self.selected] = value
        if register >= EXEC:
            self._exec_changed()

    def write_scalar64(self, register: int, value: Doubles) -> None:
        """Write a pair of scalar registers; a write to EXEC takes effect at once."""
        self.scalar[register][self.selected] = (value & _LOW).astype(np.uint32)
        self.scalar[register + 1][self.selected] = (value >> _HALF).astype(np.uint32)
        if register >= EXEC - 1:
            self._exec_changed()

    def read_mask(self, register: int) -> Lanes:
        """A pair of scalar registers as one bit a lane: bool [count, 64]."""
        pair = np.ascontiguousarray(self.scalar[register : register + 2][:, self.selected].T)
        return np.unpackbits(pair.view(np.uint8), axis=1, bitorder="little").view(np.bool_)

    def write_mask(self, register: int, lanes: Lanes) -> None:
        """Write one bit a lane into a pair of scalar registers; inactive lanes get 0."""
        bits = np.packbits(lanes & self.active, axis=1, bitorder="little").view(np.uint32)
        self.scalar[register][self.selected] = bits[:, 0]
        self.scalar[register + 1][self.selected] = bits[:, 1]
        if register == EXEC:
            self._exec_changed()

    def write_exec(self, value: Doubles) -> None:
        """Set EXEC of the selected waves: uint64 [count]."""
        self.write_scalar64(EXEC, value)

    def _exec_changed(self) -> None:
        self.active = self.read_mask(EXEC)
        self._exec[self.selected] = self.active
        self.all_active = bool(self.active.all())

    def read_scc(self) -> Lanes:
        """The scalar condition code: bool [count]."""
        return self.scc[self.selected]

    def write_scc(self, value: npt.ArrayLike) -> None:
        """Set the scalar condition code."""
        self.scc[self.selected] = value
