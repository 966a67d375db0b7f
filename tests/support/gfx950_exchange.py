"""Two ranks of a SYMMETRIC exchange that take turns in one process, on gfx950 code.

What kernels of a rank wait for, the other rank has done before, or `Turns.announce` says so in its
name. `planted` changes a kernel's code or its arguments.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from gfx950emu import CodeObject
from gfx950emu.machine import Machine
from mxpert.core.target import current_device
from mxpert.device.exchange_wait import EPOCHS, TAG_BITS
from mxpert.distributed import DispatchedTokens
from mxpert.distributed.exchange import host
from mxpert.distributed.exchange.schedule import Schedule
from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.testing.gfx950 import Emulation, emulate
from support.exchange import (
    Case,
    Experts,
    Tokens,
    exchanges_of_one_process,
    expected,
    multiply,
    random_tokens,
    send,
    values,
)
from support.gfx950_mutants import Launch

CPU = torch.device("cpu")
CASE = Case(max_tokens=4, timeout_s=0.5)
COUNT = 4
"""Tokens of each rank."""


def two_waves(*_: object) -> Schedule:
    """Two CTAs of two waves, each with several tiles of two rows."""
    return Schedule(ctas=2, rows=2, block=32, num_warps=4)


@dataclass
class Turns:
    """The two ranks; make and use it inside of `emulate`.

    Args:
        case: the exchange. few: whether `two_waves` is the schedule.
    """

    case: Case = CASE
    ranks: list[SymmetricExchange] = field(init=False)
    received: list[DispatchedTokens] = field(init=False)
    arrivals: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = exchanges_of_one_process([self.case.spec(r) for r in range(2)], CPU)
        for each in self.ranks:
            each._sections["partials"].view(torch.uint8).fill_(0xFF)  # NaN
            each._sections["rows"].view(torch.uint8).fill_(0xFF)
        self.received = [None, None]  # type: ignore[list-item]
        self.arrivals = [None, None]

    def tokens(self, rank: int) -> Tokens:
        """Tokens of a rank, most of which need experts of both."""
        return random_tokens(self.case, rank, 3 - rank, COUNT)

    def dispatch(self, rank: int, *, waits: bool = False) -> None:
        """Dispatch; if it `waits`, the other rank has dispatched before."""
        given = self.ranks[rank], self.tokens(rank), self.case.max_tokens
        self.received[rank], self.arrivals[rank] = send(*given, waits=waits)

    def sort(self, rank: int) -> torch.Tensor:
        """Wait for tokens in the sort; returns the rows that the local experts make of them."""
        return Experts(self.case, rank, CPU)(self.received[rank], self.arrivals[rank])

    def rows(self, rank: int) -> torch.Tensor:
        """The rows that the local experts make of tokens that were waited for."""
        factors = Experts(self.case, rank, CPU).factors
        return multiply(self.case, factors, self.received[rank])

    def combine(self, rank: int) -> torch.Tensor:
        """Combine; returns the result."""
        tokens = self.tokens(rank)
        out = torch.full((COUNT, self.case.hidden_size), torch.nan)
        rows = self.rows(rank)
        self.ranks[rank].combine(rows, self.received[rank], out)
        assert tokens.x.shape == out.shape
        return out

    def announce(self, rank: int) -> None:
        """Store the partial rows of `rank` on the other one, and set all its flags for combine."""
        other, epoch = self.ranks[1 - rank], int(self.ranks[rank]._words[EPOCHS.value])
        slots = slice(rank * self.case.max_tokens, (rank + 1) * self.case.max_tokens)
        theirs = slice((1 - rank) * self.case.max_tokens, (2 - rank) * self.case.max_tokens)
        other._sections["partials"][slots] = self.rows(rank)[theirs]
        other._sections["returned"][rank] = epoch

    def received_ids(self, rank: int) -> torch.Tensor:
        """Local ids [COUNT, k] of the other one's tokens."""
        return self.received[rank].topk_ids[self._slots_of_other(rank)]

    def _slots_of_other(self, rank: int) -> slice:
        first = (1 - rank) * self.case.max_tokens
        return slice(first, first + COUNT)

    def rows_are_right(self, rank: int) -> bool:
        """Whether a rank has received the other one's rows."""
        theirs = self.tokens(1 - rank)
        got = values(self.received[rank].x)[self._slots_of_other(rank)]
        sent = (self.received_ids(rank) >= 0).any(1)
        return bool(sent.any()) and torch.equal(got[sent], theirs.x.float()[sent])

    def result_is_right(self, rank: int, out: torch.Tensor) -> bool:
        return torch.equal(out, expected(self.case, self.tokens(rank)))


@contextlib.contextmanager
def turns(case: Case = CASE) -> Iterator[Turns]:
    """Two ranks with `two_waves` as their schedule."""
    with mock.patch.multiple(host, dispatch_schedule=two_waves, combine_schedule=two_waves):
        _forget_launches()
        try:
            yield Turns(case)
        finally:
            _forget_launches()


def _forget_launches() -> None:
    host.dispatch_launch.cache_clear()
    host.combine_launch.cache_clear()


@contextlib.contextmanager
def planted(
    kernel: str,
    *,
    code: Callable[[CodeObject], CodeObject] = lambda code: code,
    arguments: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda given: given,
) -> Iterator[None]:
    """Change the code or the arguments of all launches of a kernel, inside of `emulate`."""
    emulation = current_device().executor
    assert isinstance(emulation, Emulation)
    run = emulation.run

    def changed(compiled: Any, grid: Any, given: Mapping[str, Any]) -> Any:
        original = CodeObject.of(compiled)
        if original.executable.program.name != kernel:
            return run(compiled, grid, given)
        return run(code(original), grid, arguments(dict(given)))

    with mock.patch.object(emulation, "run", changed):
        yield


@contextlib.contextmanager
def at_the_third_poll(happens: Callable[[], object]) -> Iterator[None]:
    """Let something happen when a kernel inside the block reads the clock for the third time."""
    clock, reads = Machine.clock, itertools.count(1)

    def counted(machine: Machine) -> int:
        if next(reads) == 3:
            happens()
        return clock(machine)

    with mock.patch.object(Machine, "clock", counted):
        yield


class _CapturedError(Exception):
    """The launch that is wanted was captured."""


def captured(kernel: str) -> Launch:
    """A launch of rank 0: what it waits for is there. Keeps the memory of both ranks."""
    found: list[Launch] = []

    def spy(compiled: Any, grid: Any, arguments: Mapping[str, Any]) -> Any:
        code = CodeObject.of(compiled)
        if code.executable.program.name != kernel:
            return execute(compiled, grid, arguments)
        memory, binary = tuple(emulation.reachable), compiled.asm["hsaco"]
        found.append(Launch(kernel, code, grid, arguments, binary, memory))
        raise _CapturedError

    with emulate() as emulation, turns() as pair, contextlib.suppress(_CapturedError):
        execute = emulation.run
        pair.dispatch(1)
        with mock.patch.object(emulation, "run", spy):
            pair.dispatch(0, waits=kernel == "_exchange_dispatch_kernel")
            pair.sort(0)
            pair.announce(1)
            pair.combine(0)
    return found[0]


def earlier(words: torch.Tensor) -> torch.Tensor:
    """An exchange's words in a copy, one epoch before."""
    copy = words.clone()
    copy[EPOCHS.value :] -= 1 << TAG_BITS.value
    return copy


def longer(case: Case, seconds: float) -> Case:
    return replace(case, timeout_s=seconds)
