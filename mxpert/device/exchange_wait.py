"""Bounded waits for flags of other ranks; see the package's docstring for the protocol."""

from __future__ import annotations

import time
from typing import NamedTuple

import triton
import triton.language as tl

from .exchange_gcn import real_time
from .exchange_ptx import global_timer, load_acquire
from .exchange_words import (
    ARRIVED_ADDRESS,
    DECIDED,
    DIFFERS,
    EPOCHS,
    MAX_CTAS,
    NUM_CTAS,
    NUM_RANKS,
    POISON,
    RETURN_OFF,
    TAG_BITS,
    TIMEOUT,
    WORDS_ADDRESS,
)
from .pdl import grid_dependency_wait, launch_dependents

_LANES = tl.constexpr(128)
"""Flags that a program polls at once."""
_THERE, _LATE, _TIMED_OUT, _OTHER = (tl.constexpr(state) for state in range(4))
"""What a poll finds. Of several flags the largest counts."""

_INTERPRETED_PAUSE_S = 2e-4
TICKS_PER_SECOND = {"cuda": 10**9, "hip": 10**8, "cpu": 10**9}
"""Rate of `clock` by kind of target."""


def _interpreted_clock() -> int:
    """Nanoseconds. Lets other processes run first: interpreted ranks share the cores."""
    time.sleep(_INTERPRETED_PAUSE_S)
    return time.monotonic_ns()


_interpreted_clock.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def clock(KIND: tl.constexpr):
    """Ticks since an arbitrary start, int64. KIND is that of the target: "cuda", "hip", "cpu"."""
    if KIND == "cuda":
        return global_timer()
    elif KIND == "hip":
        return real_time()
    else:
        return _interpreted_clock()


@triton.jit
def load_flags(pointers, mask, KIND: tl.constexpr):
    """Load int64 flags: acquire, system scope. Lanes off `mask` are undefined."""
    if KIND == "cuda":
        return load_acquire(pointers)
    else:
        return tl.atomic_add(
            pointers, tl.zeros(pointers.shape, tl.int64), mask=mask, sem="acquire", scope="sys"
        )


@triton.jit
def load_volatile(pointers, mask, other, KIND: tl.constexpr):
    """Load what other programs or ranks change meanwhile, not from a cache that may hold it."""
    if KIND == "hip":  # Triton's compiler for AMD ignores `volatile`
        return tl.load(pointers, mask=mask, other=other, cache_modifier=".cv")
    else:
        return tl.load(pointers, mask=mask, other=other, volatile=True)


@triton.jit
def load_words(state, KIND: tl.constexpr):
    """Load an exchange's words before the copies of the epoch, for `word_of`."""
    word = tl.arange(0, _LANES)
    return load_volatile(state + word, word < EPOCHS, POISON, KIND)


@triton.jit
def word_of(seen, word):
    """One of the words that `load_words` has loaded, with the same result in all warps.

    Other programs change words[DECIDED] at any time. A scalar load is made by each warp, and warps
    that disagree would meet in different barriers. A reduction goes through shared memory.
    """
    return tl.min(tl.where(tl.arange(0, _LANES) == word, seen, POISON), 0)


@triton.jit
def note_loss(word, decided):
    """Set words[SEND_OFF] or words[RETURN_OFF] after a loss; several programs may."""
    one = tl.full([], 1, tl.int64)
    tl.atomic_max(word, one, mask=decided < 0, sem="relaxed", scope="gpu")


@triton.jit
def _poll(pointers, mask, KIND: tl.constexpr):
    """Load flags that other ranks change; acquires where a load can."""
    if KIND == "cuda":
        return load_acquire(pointers)
    else:
        return load_volatile(pointers, mask, 0, KIND)


@triton.jit
def wait_for_flags(flags, target, num_ranks, num_ctas, timeout, KIND: tl.constexpr):
    """Wait until ``flags[r, c] == target`` for all ranks r and CTAs c below `num_ctas`.

    A flag of this epoch or a later one that is not `target` ends the wait at once: it is poisoned,
    or the tag of another call. After `timeout` ticks it gives up. Warps read different clocks; the
    reduction makes one decision of them.

    Args:
        flags: int64 [num_ranks, MAX_CTAS], on this rank.
        target: int64, at least 0: an epoch and the tag of its call.

    Returns:
        int64: `target`; DIFFERS − r for a rank r that has made another call; or −1 − r for a rank r
        that is late or that a poisoned flag names.
    """
    total = num_ranks * num_ctas
    least = target >> TAG_BITS << TAG_BITS
    verdict = target
    start = clock(KIND)
    for first in range(0, total, _LANES):
        place = first + tl.arange(0, _LANES)
        mask = place < total
        source = tl.where(mask, place // num_ctas, num_ranks)
        pointers = flags + tl.where(mask, source * MAX_CTAS + place % num_ctas, 0)
        state = tl.full([], _LATE, tl.int32)
        while state == _LATE:
            seen = _poll(pointers, mask, KIND)
            in_time = clock(KIND) - start < timeout
            found = tl.where(seen < least, tl.where(in_time, _LATE, _TIMED_OUT), _OTHER)
            found = tl.where(seen == target, _THERE, found)  # _OTHER ends the wait for the rest
            state = tl.max(tl.where(mask, found, _THERE), 0)
        if KIND != "cuda" or state != _THERE:
            seen = tl.where(mask, load_flags(pointers, mask, KIND), target)
            late = tl.min(tl.where(seen < least, source, num_ranks), 0).to(tl.int64)
            other = (seen >= least) & (seen != target) & (seen < POISON)
            caller = tl.min(tl.where(other, source, num_ranks), 0).to(tl.int64)
            poison = tl.max(seen, 0)
            if verdict >= 0:
                if caller < num_ranks:
                    verdict = DIFFERS - caller
                elif poison > POISON:
                    verdict = POISON - poison
                elif late < num_ranks:
                    verdict = -1 - late
    tl.debug_barrier()  # what any thread acquired is ordered before what the program reads next
    return verdict


class Awaited(NamedTuple):
    """What never changes: the flags, the words, ranks, CTAs of a rank, and the time-out."""

    flags: tl.tensor
    state: tl.tensor
    num_ranks: tl.tensor
    num_ctas: tl.tensor
    timeout: tl.tensor


@triton.jit
def load_awaited(arrivals):
    """Load the constants of a wait; a kernel may do so before the previous one has ended.

    arrivals: int64 [NUM_ARRIVALS]; see words.py.
    """
    state = tl.load(arrivals + WORDS_ADDRESS).to(tl.pointer_type(tl.int64))
    return Awaited(
        flags=tl.load(arrivals + ARRIVED_ADDRESS).to(tl.pointer_type(tl.int64)),
        state=state,
        num_ranks=tl.load(arrivals + NUM_RANKS).to(tl.int32),
        num_ctas=tl.load(arrivals + NUM_CTAS).to(tl.int32),
        timeout=tl.load(state + TIMEOUT),
    )


@triton.jit
def _wait_for_tokens(awaited, KIND: tl.constexpr):
    """Wait for the tokens of all ranks, and agree on the verdict with all programs of this rank.

    The first program that sees all flags, or none in time, sets words[DECIDED] by a
    compare-and-swap. Every other program of this epoch adopts that verdict.

    Returns:
        Whether all tokens are there; if not, no id may be used.
    """
    flags, state, num_ranks, num_ctas, timeout = awaited
    epoch = tl.load(state + EPOCHS)
    decided = word_of(load_words(state, KIND), DECIDED)
    if decided >= 0:
        verdict = wait_for_flags(flags, epoch, num_ranks, num_ctas, timeout, KIND)
        if decided < epoch:
            found = tl.atomic_cas(state + DECIDED, decided, verdict, sem="acq_rel", scope="gpu")
            decided = tl.where(found == decided, verdict, found)
    note_loss(state + RETURN_OFF, decided)
    return decided >= 0


@triton.jit
def wait_alone(awaited, decided, epoch, KIND: tl.constexpr):
    """Wait for the tokens of all ranks, in a kernel where no other program has to agree.

    decided: words[DECIDED] as the previous kernel left it. After a loss it is negative.
    """
    flags, state, num_ranks, num_ctas, timeout = awaited
    verdict = decided
    if decided >= 0:
        verdict = wait_for_flags(flags, epoch, num_ranks, num_ctas, timeout, KIND)
        # Nothing here waits for the result, and the next kernel sees it.
        tl.atomic_cas(state + DECIDED, decided, verdict, sem="relaxed", scope="gpu")
    note_loss(state + RETURN_OFF, verdict)


@triton.jit
def wait_for_predecessor(arrivals, KIND: tl.constexpr, USE_PDL: tl.constexpr):
    """Wait for the previous kernel and for the tokens, then let the next kernel start.

    The next kernel starts only now: its CTAs must not occupy the GPU behind a wait for another
    rank.

    Args:
        arrivals: int64 [NUM_ARRIVALS]; see words.py.

    Returns:
        Whether all tokens are there; if not, no id may be used.
    """
    awaited = load_awaited(arrivals)
    if USE_PDL:
        grid_dependency_wait()
    complete = _wait_for_tokens(awaited, KIND)
    if USE_PDL:
        launch_dependents()
    return complete
