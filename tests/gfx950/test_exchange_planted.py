"""Errors planted into the exchange's kernels, or into their launches: each is caught, by name.

What only the binary can have wrong (caches, waits, scopes) is a fault that names the instruction;
an error of the protocol gives wrong rows, or a lost rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gfx950emu import AcquireFault, CodeObject, Fault, ReleaseFault
from gfx950emu.faults import SharedBytesFault
from mxpert.device import exchange_wait
from mxpert.device.exchange_wait import MAX_CTAS, NUM_CTAS
from mxpert.distributed.exchange import host
from mxpert.testing.gfx950 import emulate
from support.gfx950_exchange import CASE, Turns, at_the_third_poll, earlier, longer, planted, turns
from support.gfx950_mutants import Mutant, changed, mutants
from support.gfx950_suite import SCHEDULES

DISPATCH, COMBINE = "_exchange_dispatch_kernel", "_exchange_combine_kernel"
SORT = "_routing_plan_expert_kernel"


def lines_of(*functions: Any) -> set[int]:
    """Lines of compiled functions in their file."""
    found = (inspect.getsourcelines(function.fn) for function in functions)
    return {first + place for source, first in found for place in range(len(source))}


WRITE_BACK = lines_of(exchange_wait.write_back)
SET_FLAGS = lines_of(exchange_wait.set_flags)
WAIT = lines_of(
    *(exchange_wait.load_flags, exchange_wait.load_volatile, exchange_wait._poll),
    *(exchange_wait.wait_for_flags, exchange_wait.wait_alone, exchange_wait._wait_for_tokens),
)


def dropped(kind: str, lines: set[int], text: str) -> Callable[[CodeObject], CodeObject]:
    """A change of the instructions with this kind of mutant, lines of the waits' file and text."""

    def change(code: CodeObject) -> CodeObject:
        found = [
            each
            for each in mutants(code.executable)
            if each.kind == kind and _is_in(each, lines) and each.original.text.startswith(text)
        ]
        assert found, [each.label for each in mutants(code.executable) if each.kind == kind]
        for each in found:
            code = changed(code, each)
        return code

    return change


def _is_in(mutant: Mutant, lines: set[int]) -> bool:
    file, _, rest = mutant.original.line.partition(":")
    return file == "exchange_wait.py" and int(rest.partition(":")[0]) in lines


BEFORE_FLAG = {
    "write-back": dropped("dropped write-back", WRITE_BACK, "buffer_wbl2 sc0 sc1"),
    "wait": dropped("dropped wait", WRITE_BACK, "s_waitcnt vmcnt(0)"),
    "barrier": dropped("dropped barrier", SET_FLAGS, "s_barrier"),
    "scope of the flag": dropped("narrow scope", SET_FLAGS, "global_atomic_swap_x2"),
}
MISSING = {
    "write-back": "without a buffer_wbl2 sc0 sc1: ",
    "wait": r"without an s_waitcnt vmcnt\(0\) behind buffer_wbl2: ",
    "barrier": "without an s_barrier behind the wait for it: ",
    "scope of the flag": r"without sc1 \(system scope\)",
}
# Without its barrier combine sets the flag before the other wave writes back.
MISSING_IN_COMBINE = MISSING | {"barrier": MISSING["write-back"]}


def caught(turn: Callable[[], Any], kernel: str, kind: type[Fault], what: str) -> None:
    with pytest.raises(kind, match=what) as found:
        turn()
    assert found.value.place.kernel == kernel
    assert found.value.place.line
    assert found.value.place.workgroup is not None


def ready_to_combine(pair: Turns) -> None:
    pair.dispatch(1)
    pair.dispatch(0, waits=True)
    pair.announce(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_that_take_turns_are_exact(schedule: str) -> None:
    with emulate(schedule=schedule, seed=7), turns() as pair:  # type: ignore[arg-type]
        ready_to_combine(pair)
        assert pair.rows_are_right(0)
        assert pair.result_is_right(0, pair.combine(0))
        assert host.lost(pair.ranks[0]._words) == host.Loss()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", BEFORE_FLAG)
def test_a_flag_ahead_of_its_data(missing: str, schedule: str) -> None:
    with emulate(schedule=schedule, seed=1), turns() as pair:  # type: ignore[arg-type]
        ready_to_combine(pair)
        pair.ranks[1]._is_dispatched = False
        with planted(DISPATCH, code=BEFORE_FLAG[missing]):
            caught(lambda: pair.dispatch(1), DISPATCH, ReleaseFault, MISSING[missing])
        with planted(COMBINE, code=BEFORE_FLAG[missing]):
            caught(lambda: pair.combine(0), COMBINE, ReleaseFault, MISSING_IN_COMBINE[missing])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_ahead_of_the_invalidation(schedule: str) -> None:
    change = dropped("dropped invalidation", WAIT, "buffer_inv sc0 sc1")
    what = "is loaded behind a flag without a buffer_inv sc0 sc1"
    with emulate(schedule=schedule, seed=1), turns() as pair:  # type: ignore[arg-type]
        ready_to_combine(pair)
        with planted(COMBINE, code=change):
            caught(lambda: pair.combine(0), COMBINE, AcquireFault, what)
        with planted(SORT, code=change):
            caught(lambda: pair.sort(1), SORT, AcquireFault, what)


@pytest.mark.parametrize("kernel", [SORT, COMBINE])
def test_polls_of_a_cache(kernel: str) -> None:
    """Without a scope, polls may see the old flag for ever: a fault, once the flag changes."""
    load = "buffer_load_dwordx2" if kernel == COMBINE else "global_load_dwordx2"
    change = dropped("narrow scope", WAIT, load)
    with emulate(), turns(longer(CASE, 60.0)) as pair:
        if kernel == COMBINE:
            pair.dispatch(1)
        pair.dispatch(0, waits=kernel == COMBINE)
        flags = pair.ranks[0]._sections["returned" if kernel == COMBINE else "arrived"]
        step = {SORT: pair.sort, COMBINE: pair.combine}[kernel]
        late = at_the_third_poll(lambda: flags[1].fill_(100))
        with planted(kernel, code=change), late:
            what = "has changed since this workgroup loaded it"
            caught(lambda: step(0), kernel, AcquireFault, what)


def test_dispatch_polls_a_cache() -> None:
    """It polls the flags of its own CTAs, too: a load without a scope races with them."""
    change = dropped("narrow scope", WAIT, "global_load_dwordx2")
    with emulate(), turns() as pair, planted(DISPATCH, code=change):
        what = "which another workgroup updated without order"
        caught(lambda: pair.dispatch(0, waits=True), DISPATCH, SharedBytesFault, what)


# ---- the protocol -------------------------------------------------------------------------------


def of_rank_0(key: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change an argument of rank 0's launches."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        return given if given["rank"] else {**given, key: value(given[key])}

    return change


def test_wrong_slot_is_seen() -> None:
    row = CASE.hidden_size  # bytes of an MXFP8 row
    with emulate(), turns() as pair:
        with planted(DISPATCH, arguments=of_rank_0("rows_offset", lambda start: start + row)):
            pair.dispatch(0)
        pair.dispatch(1, waits=True)
        assert not pair.rows_are_right(1)


FLAGS = {
    "in another rank's place": of_rank_0("flags_offset", lambda at: at + 8 * MAX_CTAS.value),
    "of an earlier epoch": of_rank_0("state", earlier),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_wrong_dispatch_flags_are_seen(flag: str) -> None:
    """Rank 1 loses rank 0, and uses none of the tokens."""
    with emulate(), turns() as pair:
        with planted(DISPATCH, arguments=FLAGS[flag]):
            pair.dispatch(0)
        pair.dispatch(1, waits=True)
        assert (pair.received_ids(1) == -1).all()
        assert host.lost(pair.ranks[1]._words) == host.Loss(rank=0)


@pytest.mark.parametrize("flag", FLAGS)
def test_wrong_combine_flags_are_seen(flag: str) -> None:
    """Rank 1 loses rank 0, and its result is NaN."""
    with emulate(), turns() as pair:
        ready_to_combine(pair)
        pair.sort(1)
        with planted(COMBINE, arguments=FLAGS[flag]):
            pair.combine(0)
        assert pair.combine(1).isnan().all()
        assert host.lost(pair.ranks[1]._words) == host.Loss(rank=0)


def test_missing_wait_is_seen() -> None:
    """Rank 0 waits for no flag: rank 1's tokens are not there yet."""

    def no_flags(given: dict[str, Any]) -> dict[str, Any]:
        arrivals: torch.Tensor = given["arrivals"].clone()
        arrivals[NUM_CTAS.value] = 0
        return {**given, "arrivals": arrivals}

    with emulate(), turns() as pair:
        with planted(DISPATCH, arguments=no_flags):
            pair.dispatch(0, waits=True)
        assert host.lost(pair.ranks[0]._words) == host.Loss()
        assert not pair.rows_are_right(0)


def test_a_lost_rank_gives_nan() -> None:
    """Rank 1 never comes: rank 0 names it, drops every row and returns NaN."""
    with emulate(), turns() as pair:
        pair.dispatch(0, waits=True)
        assert (pair.received_ids(0) == -1).all()
        assert pair.combine(0).isnan().all()
        assert host.lost(pair.ranks[0]._words) == host.Loss(rank=1)
