"""Dispatch of the exchange: quantise this rank's tokens and store them on their experts' ranks.

The package's docstring has the protocol.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...device.exchange_wait import (
    DECIDED,
    EPOCHS,
    MAX_CTAS,
    RETURN_OFF,
    RUNNING,
    SEND_OFF,
    TAG_BITS,
    TWO_STREAMS,
    flag_or_poison,
    load_addresses,
    load_awaited,
    load_volatile,
    load_words,
    note_loss,
    section,
    set_flags,
    wait_alone,
    word_of,
)
from ...device.mx_codec import quantize_tile
from ...device.pdl import grid_dependency_wait, launch_dependents, launch_dependents_and_wait

_FILL = tl.constexpr(256)
"""Ids of slots without a token that a program stores at once."""

DISPATCH_SIZES = (
    "rows_offset",
    "scales_offset",
    "ids_offset",
    "weights_offset",
    "flags_offset",
    "calls_offset",
    "call",
    "tag",
    "rank",
    "num_ranks",
    "num_tokens",
    "bound",
    "top_k",
    "num_experts",
    "num_blocks",
)
"""Sizes of the model and the batch, which Triton must not specialise on."""


class Sections(NamedTuple):
    """Offsets in bytes of the sections of a rank's memory, and this rank's first slot there."""

    rows: tl.tensor
    scales: tl.tensor
    ids: tl.tensor
    weights: tl.tensor
    first_slot: tl.tensor


class Routing(NamedTuple):
    """Routing of this rank's tokens, and who owns each expert under which local id."""

    topk_ids: tl.tensor
    topk_weights: tl.tensor
    owners: tl.tensor
    local_ids: tl.tensor
    top_k: tl.tensor
    num_experts: tl.tensor


class Slots(NamedTuple):
    """Some tokens' slots, [ROWS, SLOTS]: index, mask, global expert or −1, weight."""

    place: tl.tensor
    mask: tl.tensor
    expert: tl.tensor
    weight: tl.tensor


class Loaded(NamedTuple):
    """Loaded parts of a tile: slots, rows [ROWS, BLOCK], their scales [ROWS, BLOCK/32] or 0."""

    slots: Slots
    rows: tl.tensor
    scales: tl.tensor | tl.constexpr


class Routed(NamedTuple):
    """Slots [ROWS, SLOTS], and where they go: owning rank or −1, and the expert's id there."""

    slots: Slots
    owner: tl.tensor
    local_id: tl.tensor


class Tokens(NamedTuple):
    """This rank's tokens: their number, the blocks of 32 columns of a row, and its tiles."""

    count: tl.tensor
    num_blocks: tl.tensor
    tiles: tl.tensor


class Tile(NamedTuple):
    """A tile of rows: tokens [ROWS] and which exist, columns [1, BLOCK], blocks [1, BLOCK/32].

    is_first: whether it holds the first columns of its rows.
    """

    token: tl.tensor
    exists: tl.tensor
    columns: tl.tensor
    blocks: tl.tensor
    num_blocks: tl.tensor
    is_first: tl.tensor


class Peers(NamedTuple):
    """Addresses of the ranks' memories, int64 [N], and this rank."""

    table: tl.tensor
    rank: tl.tensor
    num_ranks: tl.tensor


class Source(NamedTuple):
    """Rows x [T, 32 · num_blocks]; their E8M0 scales or None; constants of the scale rule.

    `emax` is None if rows travel as they are; else they are quantised to MXFP8.
    """

    x: tl.tensor
    scale: tl.tensor | None
    emax: tl.constexpr
    threshold: tl.constexpr


class Sending(NamedTuple):
    """Rows that a rank sends, with their targets; `destinations` gets the ranks of each token.

    alive: whether nothing is lost. Else a rank that is late may read what earlier calls stored.
    """

    alive: tl.tensor
    tokens: Tokens
    routing: Routing
    peers: Peers
    sections: Sections
    destinations: tl.tensor


@triton.jit
def _tile(tokens, item, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tile number `item`."""
    first = item % tokens.tiles
    token = item // tokens.tiles * ROWS + tl.arange(0, ROWS)
    return Tile(
        token=token,
        exists=token < tokens.count,
        columns=first * BLOCK + tl.arange(0, BLOCK)[None, :],
        blocks=first * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[None, :],
        num_blocks=tokens.num_blocks,
        is_first=first == 0,
    )


@triton.jit
def _load_slots(routing, tile, SLOTS: tl.constexpr):
    """Load experts and weights of a tile's tokens."""
    slot = tl.arange(0, SLOTS)[None, :]
    place = tile.token[:, None] * routing.top_k + slot
    mask = tile.exists[:, None] & (slot < routing.top_k)
    expert = tl.load(routing.topk_ids + place, mask=mask, other=-1)
    weight = tl.load(routing.topk_weights + place, mask=mask, other=0.0)
    return Slots(place, mask, expert, weight)


@triton.jit
def _route(routing, slots):
    """Look up the owners of the slots' experts."""
    expert = slots.expert
    known = (expert >= 0) & (expert < routing.num_experts)  # others never index memory
    owner = tl.load(routing.owners + expert, mask=known, other=-1)
    local_id = tl.load(routing.local_ids + expert, mask=known, other=-1)
    return Routed(slots, owner, local_id)


@triton.jit
def _store_routing(address, sections, top_k, routed, mine, alive):
    """Store ids and weights of tokens on one rank: local ids where `mine`, else −1."""
    slots = routed.slots
    mask = slots.mask & alive
    place = sections.first_slot * top_k + slots.place
    ids = section(address, sections.ids, tl.int32)
    tl.store(ids + place, tl.where(mine, routed.local_id, -1), mask=mask)
    weights = section(address, sections.weights, tl.float32)
    tl.store(weights + place, slots.weight.to(tl.float32), mask=mask & mine)


@triton.jit
def _store_rows(address, sections, tile, sent, rows, scales):
    """Store a tile of rows, and of their scales if they have some, on one rank where `sent`."""
    slot = (sections.first_slot + tile.token).to(tl.int64)[:, None]
    width = tile.num_blocks * 32
    out = section(address, sections.rows, rows.dtype)
    inside = sent[:, None] & (tile.columns < width)
    tl.store(out + slot * width + tile.columns, rows, mask=inside)
    if scales is not None:
        out = section(address, sections.scales, tl.uint8)
        inside = sent[:, None] & (tile.blocks < tile.num_blocks)
        tl.store(out + slot * tile.num_blocks + tile.blocks, scales, mask=inside)


@triton.jit
def _either(left, right):
    return left | right


@triton.jit
def _send(sending, tile, routed, rows, scales):
    """Store a tile on the ranks of its tokens' experts, and the routing with the first one."""
    peers, sections = sending.peers, sending.sections
    owner = routed.owner.to(tl.int64)
    ranks = tl.reduce(tl.where(owner >= 0, tl.full([], 1, tl.int64) << owner, 0), 1, _either)
    for step in range(1, peers.num_ranks + 1):  # this rank's own memory last
        peer = (peers.rank + step) % peers.num_ranks
        address = tl.load(peers.table + peer)
        sent = (((ranks >> peer) & 1) != 0) & sending.alive
        _store_rows(address, sections, tile, sent, rows, scales)
        if tile.is_first:
            mine = routed.owner == peer
            top_k, alive = sending.routing.top_k, sending.alive
            _store_routing(address, sections, top_k, routed, mine, alive)
    if tile.is_first:
        tl.store(sending.destinations + tile.token, ranks, mask=tile.exists)


@triton.jit
def _clear_unused(sending, num_used, num_ids):
    """Store −1 in this rank's ids from `num_used` to `num_ids` on all ranks, a share of them."""
    peers, sections = sending.peers, sending.sections
    step = tl.num_programs(0) * _FILL
    for first in range(num_used + tl.program_id(0) * _FILL, num_ids, step):
        place = first + tl.arange(0, _FILL)
        for peer in range(peers.num_ranks):
            ids = section(tl.load(peers.table + peer), sections.ids, tl.int32)
            ids += sections.first_slot * sending.routing.top_k
            mask = (place < num_ids) & sending.alive
            tl.store(ids + place, tl.full([_FILL], -1, tl.int32), mask=mask)


@triton.jit
def _store_call(addresses, calls_offset, peers, call, alive):
    """Tell all ranks in full which call this is; flags hold a tag of it."""
    if tl.program_id(0) == 0:
        peer = tl.arange(0, addresses.shape[0])
        calls = (addresses + calls_offset).to(tl.pointer_type(tl.int64)) + peers.rank
        value = tl.zeros([addresses.shape[0]], tl.int64) + call
        tl.store(calls, value, mask=(peer < peers.num_ranks) & alive)


@triton.jit
def _begin(state, tag, KIND: tl.constexpr):
    """Count this call; return its epoch with the tag, whether to store tokens, words[DECIDED]."""
    pid = tl.program_id(0)
    epoch = ((tl.load(state + EPOCHS + pid) >> TAG_BITS) + 1 << TAG_BITS) | tag
    alive = tl.load(state + SEND_OFF) == 0
    decided = load_volatile(state + DECIDED, None, None, KIND)
    if pid == 0:  # nobody waits for it here
        tl.atomic_add(state + RUNNING, 1, sem="relaxed", scope="gpu")
        note_loss(state + RETURN_OFF, decided)
    return epoch, alive, decided


@triton.jit
def _end(state, epoch):
    """Store the copies of the epoch. Note a second stream if another call runs, too."""
    copy = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MAX_CTAS)
    tl.store(state + EPOCHS + copy, tl.zeros([MAX_CTAS], tl.int64) + epoch, mask=copy < MAX_CTAS)
    if tl.program_id(0) == 0:
        running = tl.atomic_add(state + RUNNING, 0, sem="relaxed", scope="gpu")
        if running != 1:
            tl.atomic_min(state + DECIDED, TWO_STREAMS, sem="relaxed", scope="gpu")


@triton.jit
def _load_rows(x, tile):
    """A tile of this rank's rows, [ROWS, BLOCK]; zero beyond the last token and column."""
    width = tile.num_blocks * 32
    inside = tile.exists[:, None] & (tile.columns < width)
    return tl.load(
        x + tile.token.to(tl.int64)[:, None] * width + tile.columns, mask=inside, other=0
    )


@triton.jit
def _load_scales(scale, tile):
    """The scales of a tile of rows, [ROWS, BLOCK/32]."""
    inside = tile.exists[:, None] & (tile.blocks < tile.num_blocks)
    place = tile.token.to(tl.int64)[:, None] * tile.num_blocks + tile.blocks
    return tl.load(scale + place, mask=inside, other=0)


@triton.jit
def _load(source, routing, tile, SLOTS: tl.constexpr):
    """Load a tile; nothing of a tile behind the last token."""
    slots, rows = _load_slots(routing, tile, SLOTS), _load_rows(source.x, tile)
    if source.scale is None:
        return Loaded(slots, rows, 0)
    else:
        return Loaded(slots, rows, _load_scales(source.scale, tile))


@triton.jit
def _send_tokens(source, sending, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Send this program's tiles. A tile is loaded while the one before is stored."""
    tokens, routing = sending.tokens, sending.routing
    pid, num_ctas = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(tokens.count, ROWS) * tokens.tiles
    ahead = _load(source, routing, _tile(tokens, pid, ROWS, BLOCK), SLOTS)
    for item in range(pid, num_tiles, num_ctas):
        tile = _tile(tokens, item, ROWS, BLOCK)
        loaded, after = ahead, item + num_ctas
        if after < num_tiles:
            ahead = _load(source, routing, _tile(tokens, after, ROWS, BLOCK), SLOTS)
        if ROWS == 1:  # keeps these loads ahead of the owners' loads, which wait for the ids
            tl.debug_barrier()
        routed = _route(routing, loaded.slots)
        rows, scales = loaded.rows, None
        if source.emax is not None:
            rows, scales = quantize_tile(rows.to(tl.float32), "e4m3", source.emax, source.threshold)
        elif source.scale is not None:
            scales = loaded.scales
        _send(sending, tile, routed, rows, scales)


@triton.jit(do_not_specialize=DISPATCH_SIZES)
def _exchange_dispatch_kernel(
    state,
    destinations,
    table,
    x,
    scale,
    topk_weights,
    topk_ids,
    owners,
    local_ids,
    arrivals,
    rows_offset,
    scales_offset,
    ids_offset,
    weights_offset,
    flags_offset,
    calls_offset,
    call,
    tag,
    rank,
    num_ranks,
    num_tokens,
    bound,
    top_k,
    num_experts,
    num_blocks,
    EMAX: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Send tokens; step 1 of the protocol, and with `arrivals` also step 2, in the last program.

    After a loss it stores nothing but poisoned flags: a rank that is late may still read what this
    one stored in an earlier call.

    Grid: (CTAs,), the same number on all ranks. The programs take tiles of ROWS tokens and BLOCK
    columns in turn, the column tiles of a token one after another.

    Args:
        state: this rank's int64 words. destinations: int64 [max_tokens], ranks of each token.
        table: int64 [N], addresses of the ranks' memories.
        x: [T, 32 · num_blocks]. scale: its E8M0 scales, or None.
        owners, local_ids: int32 [num_experts], of this rank as the source.
        arrivals: int64 [NUM_ARRIVALS], what to wait for; None if the next kernel waits.
        call: int64, what all ranks must call alike; tag: TAG_BITS bits that follow from it.
        EMAX, THRESHOLD: scale rule; None if rows travel as they are.
    """
    addresses = load_addresses(table, num_ranks)
    if arrivals is None:
        launch_dependents_and_wait(USE_PDL)
    else:
        awaited = load_awaited(arrivals)
        if USE_PDL:
            grid_dependency_wait()
    epoch, alive, decided = _begin(state, tag, KIND)
    if arrivals is not None:
        seen = load_words(state, KIND)
    peers = Peers(table, rank, num_ranks)
    sections = Sections(rows_offset, scales_offset, ids_offset, weights_offset, rank * bound)
    routing = Routing(topk_ids, topk_weights, owners, local_ids, top_k, num_experts)
    tokens = Tokens(num_tokens, num_blocks, tl.cdiv(num_blocks * 32, BLOCK))
    sending = Sending(alive, tokens, routing, peers, sections, destinations)
    source = Source(x, scale, EMAX, THRESHOLD)
    _send_tokens(source, sending, ROWS, BLOCK, SLOTS)
    _clear_unused(sending, num_tokens * top_k, bound * top_k)
    _store_call(addresses, calls_offset, peers, call, sending.alive)
    flag = flag_or_poison(epoch, decided, rank)
    set_flags(addresses, flags_offset, rank, num_ranks, flag, KIND)
    _end(state, epoch)
    if arrivals is not None:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            wait_alone(awaited, word_of(seen, DECIDED), epoch, KIND)
        if USE_PDL:
            launch_dependents()
