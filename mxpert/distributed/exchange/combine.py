"""Combine of the exchange: return partial rows to the tokens' ranks, and sum them there.

The package's docstring has the protocol.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...device.exchange_wait import (
    DECIDED,
    EPOCHS,
    NO_WAIT,
    RETURN_OFF,
    RUNNING,
    SEND_OFF,
    TIMEOUT,
    TWO_STREAMS,
    flag_or_poison,
    load_addresses,
    load_volatile,
    load_words,
    note_loss,
    section,
    set_flags,
    wait_for_flags,
    word_of,
)
from ...device.pdl import grid_dependency_wait, launch_dependents

_RANKS = tl.constexpr(4)
"""Ranks whose partial rows are loaded together."""
_ONCE = tl.constexpr(".cg")
"""Cache modifier of rows that are read once: bypass L1."""

COMBINE_SIZES = (
    "partials_offset",
    "flags_offset",
    "rank",
    "num_ranks",
    "num_tokens",
    "bound",
    "top_k",
    "num_blocks",
)
"""Sizes of the model and the batch, which Triton must not specialise on."""


class Share(NamedTuple):
    """Slots of a rank, ranks, and the tiles of ROWS slots and BLOCK columns that they have."""

    rank: tl.tensor
    num_ranks: tl.tensor
    bound: tl.tensor
    tiles: tl.tensor
    width: tl.tensor


class Peers(NamedTuple):
    """Addresses of the ranks' memories, int64 [N]; the offset of partial rows there.

    alive: whether nothing is lost. Else a rank that is late may still sum what this one returned.
    """

    table: tl.tensor
    partials: tl.tensor
    alive: tl.tensor


class Tile(NamedTuple):
    """A tile: slots [ROWS] of a rank, and columns [1, BLOCK]."""

    slot: tl.tensor
    columns: tl.tensor


@triton.jit
def _tile(share, item, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    slot = item // share.tiles * ROWS + tl.arange(0, ROWS)
    return Tile(slot, item % share.tiles * BLOCK + tl.arange(0, BLOCK)[None, :])


@triton.jit
def _places(share, tile, source):
    """Indices of a tile's elements in rows of all ranks' slots: those of rank `source`."""
    row = (source * share.bound + tile.slot).to(tl.int64)
    return row[:, None] * share.width + tile.columns


@triton.jit
def _return_rows(peers, rows, topk_ids, share, tile, top_k, SLOTS: tl.constexpr):
    """Store a tile of partial rows on each rank whose tokens had an expert here."""
    slot = tl.arange(0, SLOTS)[None, :]
    for step in range(1, share.num_ranks):
        peer = (share.rank + step) % share.num_ranks
        address = tl.load(peers.table + peer)
        place = (peer * share.bound + tile.slot)[:, None] * top_k + slot
        mask = (tile.slot < share.bound)[:, None] & (slot < top_k)
        ids = tl.load(topk_ids + place, mask=mask, other=-1)
        # All rows, so that they are on their way together with the ids.
        inside = (tile.slot < share.bound)[:, None] & (tile.columns < share.width)
        part = tl.load(
            rows + _places(share, tile, peer), mask=inside, other=0.0, cache_modifier=_ONCE
        )
        computed = (tl.max(ids, 1) >= 0) & peers.alive
        partials = section(address, peers.partials, rows.dtype.element_ty)
        place = _places(share, tile, share.rank)
        tl.store(partials + place, part, mask=computed[:, None] & inside)


@triton.jit
def _sum_rows(rows, partials, ranks, complete, share, tile):
    """Sum a tile of this rank's tokens over the ranks that computed them, in rank order.

    A tile of one row loads the rows of all ranks and drops those that `ranks` leaves out, because
    with few tokens latency decides. A tile of several rows loads only what it sums.

    Args:
        ranks: int64 [ROWS], a bit for each rank; 0 where not `complete`.
        complete: bool [ROWS], tokens whose rows are all here. Nothing is loaded of the others.
    """
    total = tl.zeros([tile.slot.shape[0], tile.columns.shape[1]], tl.float32)
    inside = tile.columns < share.width
    for first in range(0, share.num_ranks, _RANKS):
        parts = ()
        for place in tl.static_range(_RANKS):
            owner = first + place
            # What this rank computed itself was not copied.
            own = owner == share.rank
            address = tl.where(own, rows.to(tl.int64), partials.to(tl.int64))
            source = section(address, 0, rows.dtype.element_ty)
            computed = ((ranks >> owner) & 1)[:, None] != 0
            mask = computed & inside
            if ranks.shape[0] == 1:
                mask = complete[:, None] & inside & (owner < share.num_ranks)
            part = tl.load(
                source + _places(share, tile, owner), mask=mask, other=0.0, cache_modifier=_ONCE
            )
            if ranks.shape[0] == 1:
                part = tl.where(computed, part, 0.0)
            parts += (part,)
        for place in tl.static_range(_RANKS):
            total += parts[place].to(tl.float32)
    return total


@triton.jit
def _verdict(state, seen, epoch):
    """words[DECIDED] in `seen`, negative after a loss or a call that breaks the protocol."""
    decided = word_of(seen, DECIDED)
    found = decided
    if (decided >= 0) & (decided < epoch):
        found = decided * 0 + NO_WAIT
    running = word_of(seen, RUNNING)
    if (tl.program_id(0) == 0) & (running != 1):  # that program counts the call's end, too
        found = decided * 0 + TWO_STREAMS
    if found != decided:
        tl.atomic_min(state + DECIDED, found, sem="relaxed", scope="gpu")
    return found


@triton.jit
def _await_rows(state, returned, epoch, num_ranks, timeout, KIND: tl.constexpr):
    """Wait for this CTA's flags of all ranks; return a negative number if one is lost."""
    flags = returned + tl.program_id(0)
    verdict = wait_for_flags(flags, epoch, num_ranks, 1, timeout, KIND)
    if verdict < 0:
        tl.atomic_min(state + DECIDED, verdict, sem="relaxed", scope="gpu")
    return verdict


@triton.jit(do_not_specialize=COMBINE_SIZES)
def _exchange_combine_kernel(
    out,
    state,
    table,
    rows,
    partials,
    returned,
    topk_ids,
    destinations,
    partials_offset,
    flags_offset,
    rank,
    num_ranks,
    num_tokens,
    bound,
    top_k,
    num_blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Return partial rows and sum what the other ranks return; step 4 of the protocol.

    ``out[t] = Σ_r rows that rank r computed for token t``, in rank order, in float32. After a loss
    the kernel stores NaN in `out`, and nothing on other ranks but poisoned flags.

    Grid: (CTAs,), the same number on all ranks. The programs take tiles of ROWS slots and BLOCK
    columns in turn, the same ones for storing and for summing. A program therefore waits for one
    program of each rank.

    Args:
        out: [T, 32 · num_blocks]. state: this rank's int64 words. table: int64 [N], addresses.
        rows: [N · bound, 32 · num_blocks], what this rank computed. partials: this rank's section.
        returned: this rank's flags. topk_ids: int32 [N · bound, top_k], as received.
        destinations: int64 [max_tokens], ranks that each of this rank's tokens was sent to.
    """
    addresses, timeout = load_addresses(table, num_ranks), tl.load(state + TIMEOUT)
    if USE_PDL:
        grid_dependency_wait()
    pid, num_ctas = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state + EPOCHS)
    seen = load_words(state, KIND)
    peers = Peers(table, partials_offset, tl.load(state + RETURN_OFF) == 0)
    tiles = tl.cdiv(num_blocks * 32, BLOCK)
    share = Share(rank, num_ranks, bound, tiles, num_blocks * 32)
    for item in range(pid, tl.cdiv(bound, ROWS) * tiles, num_ctas):
        tile = _tile(share, item, ROWS, BLOCK)
        _return_rows(peers, rows, topk_ids, share, tile, top_k, SLOTS)
    decided = _verdict(state, seen, epoch)
    flag = flag_or_poison(epoch, decided, rank)
    set_flags(addresses, flags_offset, rank, num_ranks, flag, KIND)
    if decided >= 0:
        decided = _await_rows(state, returned, epoch, num_ranks, timeout, KIND)
    note_loss(state + SEND_OFF, decided)
    if USE_PDL:
        launch_dependents()
    # What other programs have found. Each warp loads it, and none waits for it before the sum.
    found = load_volatile(state + DECIDED, None, None, KIND)
    for item in range(pid, tl.cdiv(num_tokens, ROWS) * tiles, num_ctas):
        tile = _tile(share, item, ROWS, BLOCK)
        exists = tile.slot < num_tokens
        complete = exists & (decided >= 0)  # after a loss other ranks may still be storing
        ranks = tl.load(destinations + tile.slot, mask=complete, other=0)
        total = _sum_rows(rows, partials, ranks, complete, share, tile)
        total = tl.where((decided < 0) | (found < 0), float("nan"), total)
        place = tile.slot.to(tl.int64)[:, None] * share.width + tile.columns
        mask = exists[:, None] & (tile.columns < share.width)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
    if pid == 0:
        tl.atomic_add(state + RUNNING, -1, sem="relaxed", scope="gpu")
