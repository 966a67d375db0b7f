"""Bounded waits for flags of other ranks; mxpert.distributed.exchange has the protocol."""

from __future__ import annotations

import time
from typing import NamedTuple

import triton
import triton.language as tl

from .pdl import grid_dependency_wait, launch_dependents

# ---- Constants of the exchange, which kernels and host share.

MAX_CTAS = tl.constexpr(128)
"""Flags of a rank in each phase, and epoch words: the largest number of CTAs."""
MAX_RANKS = tl.constexpr(60)
"""An int64 mask holds as many; combine shifts it by multiples of four ranks."""

# Indices of an exchange's private int64 words.
DECIDED = tl.constexpr(0)
"""The last epoch whose tokens have all arrived; negative for good once something is lost:
−1 − r for rank r, or one of the codes below."""
RUNNING = tl.constexpr(1)
"""Calls between the start of dispatch and the end of combine; more than one are two streams."""
TIMEOUT = tl.constexpr(2)
"""Ticks of `wait.clock` after which a wait ends."""
SEND_OFF = tl.constexpr(3)
"""Not 0 once a combine has known of a loss: later dispatches store no tokens on other ranks."""
RETURN_OFF = tl.constexpr(4)
"""Not 0 once a kernel before combine has known of a loss: combine stores no rows on other ranks.
These two words do not change while the kernel that reads them runs, as words[DECIDED] may."""
EPOCHS = tl.constexpr(16)
"""First of MAX_CTAS copies of the epoch. A CTA of dispatch reads its own copy before it writes."""
NUM_WORDS = 16 + 128

TAG_BITS = tl.constexpr(20)
"""Low bits of epochs and flags: a tag of the call. Ranks that make other calls have other tags."""

TWO_STREAMS = tl.constexpr(-(1 << 30))
"""words[DECIDED] after a dispatch that started while another call of the exchange was running."""
NO_WAIT = tl.constexpr(-(1 << 30) - 1)
"""words[DECIDED] after a combine whose tokens no kernel had waited for."""

DIFFERS = tl.constexpr(-(1 << 31))
"""words[DECIDED] is DIFFERS − r after a call in which rank r has made another one."""

POISON = tl.constexpr(1 << 62)
"""Flags above are poisoned: POISON − d has the meaning of words[DECIDED] = d on another rank."""

# Indices of the int64 words of `arrivals`, which tell the sort kernels what to wait for.
ARRIVED_ADDRESS = tl.constexpr(0)
WORDS_ADDRESS = tl.constexpr(1)
NUM_RANKS = tl.constexpr(2)
NUM_CTAS = tl.constexpr(3)
NUM_ARRIVALS = 16
"""Words of one `arrivals` tensor; a row of them keeps the alignment of 16 bytes."""


# ---- Inline PTX of the exchange: loads with acquire semantics, and the clock.


@triton.jit
def load_acquire(pointers):
    """Load int64 words: acquire, system scope."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l",
        [pointers],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def global_timer():
    """Nanoseconds since an arbitrary start, int64."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


# ---- Inline assembly of the exchange on AMD: completion of stores, and the clock.


@triton.jit
def real_time():
    """Ticks of 10 ns since an arbitrary start, int64.

    Triton's own function waits for the wrong counter: the result of a scalar instruction is there
    when lgkmcnt is 0.
    """
    return tl.inline_asm_elementwise(
        "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def write_back():
    """Wait until all memory accesses of this wave are complete for every device.

    A barrier does not wait for stores of the other waves, and LLVM leaves out the wait behind the
    write-back of a release.
    """
    tl.inline_asm_elementwise(
        "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
        "=v,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# ---- What both phases of the exchange share: sections of a rank's memory, and setting flags.

_FLAG_LANES = tl.constexpr(64)
"""Ranks whose flags are set together: no fewer than MAX_RANKS."""


@triton.jit
def section(address, offset, DTYPE: tl.constexpr):
    """Pointer to a section of the memory at `address`, aligned to 16 bytes."""
    # The hint stands behind the cast: before it it is lost, and stores shrink to 8 bytes.
    return tl.multiple_of((address + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_addresses(table, num_ranks):
    """Addresses of the ranks' memories, [_FLAG_LANES]. They never change: load them early."""
    peer = tl.arange(0, _FLAG_LANES)
    return tl.load(table + peer, mask=peer < num_ranks, other=0)


@triton.jit
def set_flags(addresses, flags_offset, rank, num_ranks, value, KIND: tl.constexpr):
    """Set this CTA's flag of this rank to `value` on all ranks: release, system scope.

    Everything that the CTA stored and loaded before comes first. addresses: of `load_addresses`.
    """
    if KIND == "hip":
        write_back()
    tl.debug_barrier()
    peer = tl.arange(0, _FLAG_LANES)
    mask = peer < num_ranks
    flags = (addresses + flags_offset).to(tl.pointer_type(tl.int64))
    flags += rank * MAX_CTAS + tl.program_id(0)
    value = tl.zeros([_FLAG_LANES], tl.int64) + value
    tl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")


@triton.jit
def flag_or_poison(flag, decided, rank):
    """`flag`, or if `decided` is negative the flag that names what is lost: a rank, or this one."""
    misused = tl.where(decided <= DIFFERS, DIFFERS - rank, -1 - rank).to(tl.int64)
    code = tl.where(decided <= TWO_STREAMS, misused, decided)
    return tl.where(decided < 0, POISON - code, flag)


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

    arrivals: int64 [NUM_ARRIVALS], what to wait for.
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
        arrivals: int64 [NUM_ARRIVALS], what to wait for.

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
