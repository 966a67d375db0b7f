"""What both phases of the exchange share: sections of a rank's memory, and setting flags."""

from __future__ import annotations

import triton
import triton.language as tl

from .exchange_gcn import write_back
from .exchange_words import DIFFERS, MAX_CTAS, POISON, TWO_STREAMS

_LANES = tl.constexpr(64)
"""Ranks whose flags are set together: no fewer than MAX_RANKS."""


@triton.jit
def section(address, offset, DTYPE: tl.constexpr):
    """Pointer to a section of the memory at `address`, aligned to 16 bytes."""
    # The hint stands behind the cast: before it it is lost, and stores shrink to 8 bytes.
    return tl.multiple_of((address + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_addresses(table, num_ranks):
    """Addresses of the ranks' memories, [_LANES]. They never change: load them ahead of time."""
    peer = tl.arange(0, _LANES)
    return tl.load(table + peer, mask=peer < num_ranks, other=0)


@triton.jit
def set_flags(addresses, flags_offset, rank, num_ranks, value, KIND: tl.constexpr):
    """Set this CTA's flag of this rank to `value` on all ranks: release, system scope.

    Everything that the CTA stored and loaded before comes first. addresses: of `load_addresses`.
    """
    if KIND == "hip":
        write_back()
    tl.debug_barrier()
    peer = tl.arange(0, _LANES)
    mask = peer < num_ranks
    flags = (addresses + flags_offset).to(tl.pointer_type(tl.int64))
    flags += rank * MAX_CTAS + tl.program_id(0)
    value = tl.zeros([_LANES], tl.int64) + value
    tl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")


@triton.jit
def flag_or_poison(flag, decided, rank):
    """`flag`, or if `decided` is negative the flag that names what is lost: a rank, or this one."""
    misused = tl.where(decided <= DIFFERS, DIFFERS - rank, -1 - rank).to(tl.int64)
    code = tl.where(decided <= TWO_STREAMS, misused, decided)
    return tl.where(decided < 0, POISON - code, flag)
