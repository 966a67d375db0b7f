"""Errors planted into the SYMMETRIC protocol; some rank sees each. As in exchange_ranks.py."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from mxpert.device import exchange_wait as wait
from mxpert.distributed.exchange import combine, dispatch, host
from support.exchange import Case
from tests.conformance.exchange_ranks import DELAY_S, ONE_EPOCH, make, rank, run, small_schedules


@contextlib.contextmanager
def planted(module: Any, name: str, mutant: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a kernel by ``mutant(original, *arguments)``."""
    original = getattr(module, name)

    def changed(*arguments: Any) -> Any:
        return mutant(original, *arguments)

    with mock.patch.object(module, name, changed):
        yield


def is_seen(delays: Callable[[int, int], float] | None = None, *, times_out: bool = False) -> None:
    """Some rank sees differences, or lost ranks if `times_out`; timed for the planted error."""
    case = Case(dist.get_world_size(), timeout_s=2.0 if times_out else 600.0)
    with small_schedules():
        exchange = make(case)
        wrong = run(exchange, case, 3, delays=delays, count=4, sorts=(None,))
    counts = [None] * case.size
    dist.all_gather_object(counts, (wrong, host.lost(exchange._words)[0]))
    assert any(count for count, _ in counts), counts
    assert any(lost is not None for _, lost in counts) == times_out, counts


def wrong_slot_is_seen() -> None:
    def shifted(original: Any, address: Any, sections: Any, *rest: Any) -> Any:
        return original(address, sections._replace(first_slot=sections.first_slot + 1), *rest)

    with planted(dispatch, "_store_rows", shifted):
        is_seen()


def dropped_dispatch_flag_is_seen() -> None:
    """Rank 0 leaves out one flag: the rank that waits for it loses rank 0."""
    _dropped(dispatch)


def dropped_combine_flag_is_seen() -> None:
    _dropped(combine)


def _dropped(module: Any) -> None:
    calls = itertools.count()

    def dropping(original: Any, *arguments: Any) -> None:
        if rank() or next(calls) < 3:
            original(*arguments)

    with planted(module, "set_flags", dropping):
        is_seen(times_out=True)


def stale_dispatch_flag_is_seen() -> None:
    """Rank 0 sets its flags one epoch too low."""
    _stale(dispatch)


def stale_combine_flag_is_seen() -> None:
    _stale(combine)


def _stale(module: Any) -> None:
    def stale(original: Any, peers: Any, offset: Any, own: Any, ranks: Any, value: Any, kind: Any):  # type: ignore[no-untyped-def]
        original(peers, offset, own, ranks, value if rank() else value - ONE_EPOCH, kind)

    with planted(module, "set_flags", stale):
        is_seen(times_out=True)


def stale_target_is_seen() -> None:
    """Waits for the previous epoch: data of a late rank are used before they are there."""

    def early(original: Any, flags: Any, target: Any, *rest: Any) -> Any:
        original(flags, target - ONE_EPOCH, *rest)
        return target

    with planted(combine, "wait_for_flags", early):
        is_seen(_rank_0_is_late)


def missing_wait_for_tokens_is_seen() -> None:
    with planted(wait, "wait_for_flags", _no_wait):
        is_seen(_rank_0_is_late)


def missing_wait_for_partial_rows_is_seen() -> None:
    with planted(combine, "wait_for_flags", _no_wait):
        is_seen(_rank_0_is_late)


def _no_wait(original: Any, flags: Any, target: Any, *rest: Any) -> Any:
    return target


def _rank_0_is_late(rank: int, step: int) -> float:
    return 8 * DELAY_S * (rank == 0)


def flag_before_the_rows_is_seen() -> None:
    """Rank 0 flags partial rows before it stores them."""
    held: list[Any] = []

    def hold(original: Any, *arguments: Any) -> None:
        if rank():
            original(*arguments)
        else:
            held.append(lambda: original(*arguments))

    def flag(original: Any, *arguments: Any) -> None:
        original(*arguments)
        if held:
            time.sleep(4 * DELAY_S)
        while held:
            held.pop()()

    with planted(combine, "_return_rows", hold), planted(combine, "set_flags", flag):
        is_seen()
