"""Sums that CTAs exchange in the layer for a few tokens: partial sums, features, outputs.

A CTA publishes a float32 sum together with the number of the launch, 8 bytes in one store. A reader
loads until it finds that number. Nothing has to be cleared: what earlier launches have left has
another number, whatever their sizes. Sums are added in the order of their places, so results have
the same bits always. All CTAs must be resident, since each waits for others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...device.activation import gated_activation
from ...device.compat import aggregate, barrier, reinterpret
from .encode import encode_step, row_maximum, row_scale, statistic_of
from .epilogue import ActivationParameters, row_factor
from .few_tokens_shares import Sizes, Tables, flat_layout, number, slot_layout

COLUMNS = gl.constexpr(8)
"""Columns of an operand of wgmma: of each token one, or two with high and low parts."""

UNIT = gl.constexpr(128)
"""Codes of a depth unit."""

_ROWS = gl.constexpr(64)
_SLOTS = gl.constexpr(32)


@aggregate
class Exchange:
    """Where sums are published: int64, float32 bits below the launch's number.

    parts: [parts, slots, rows of W1], sums of stage 1. sums: [2, groups, slots, rows of W2], sums
    of stage 2; a CTA that begins within a group stores to the second half.
    """

    parts: gl.tensor
    sums: gl.tensor


@aggregate
class FirstEpilogue:
    """What follows the sums of stage 1. reference: uint8 [E, rows]. bias: [E, 2F], or None."""

    reference: gl.tensor
    bias: gl.tensor | gl.constexpr
    features: gl.tensor
    parameters: ActivationParameters
    ACTIVATION: gl.constexpr
    WEIGHT_FIRST: gl.constexpr


@aggregate
class SecondEpilogue:
    """What follows the sums of stage 2. reference: uint8 [E, rows]. bias: [E, H], or None."""

    out: gl.tensor
    reference: gl.tensor
    bias: gl.tensor | gl.constexpr
    hidden: gl.tensor


@gluon.jit
def publish(pointers, values, mask, launch):
    """Store float32 values with the number of the launch."""
    bits = values.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    gl.store(pointers, bits | (launch.to(gl.int64) << 32), mask=mask)


@gluon.jit
def _any(flags):
    SIZE: gl.constexpr = flags.numel
    return gl.max(flags.to(gl.int32).reshape([SIZE]), 0)


@gluon.jit
def _collect(pointers, mask, launch):
    """Load published values, float32; 0 where masked. Waits until all are of this launch."""
    words = gl.load(pointers, mask=mask, other=0, volatile=True)
    while _any(mask & ((words >> 32).to(gl.int32) != launch)) != 0:
        words = gl.load(pointers, mask=mask, other=0, volatile=True)
    return gl.where(mask, words.to(gl.int32), 0).to(gl.float32, bitcast=True)


# ---- Operands of wgmma in shared memory.


@gluon.constexpr_function
def operand_layout():
    """An operand [columns, 128] e4m3."""
    return gl.NVMMASharedLayout(128, 8, 2)


@gluon.constexpr_function
def chunk_layout(CHUNKS, WORDS=False):
    """The same bytes, or 32-bit words, as [chunks of 16 bytes of depth, columns, 16 or 4].

    The eight chunks of a column have an order of its own: `operand_layout` swizzles 128 bytes.
    """
    inner = [[0, 0, 1 << i] for i in range(2 if WORDS else 4)]
    chunks = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    columns = [[1, 1, 0], [2, 2, 0], [4, 4, 0]]
    units = [[8 << i, 0, 0] for i in range((CHUNKS // 8).bit_length() - 1)]
    return gl.SharedLinearLayout([*inner, *chunks, *columns, *units], [], 1024)


@gluon.jit
def _by_chunks(column, CHUNKS: gl.constexpr):
    """A column [chunks, 16 bytes or four words]."""
    WIDTH: gl.constexpr = column.numel // CHUNKS
    return column.reshape([CHUNKS, WIDTH])


@gluon.jit
def store_operand(chunks, columns):
    """Store encoded columns to `chunks` (see `chunk_layout`). Columns that no row has are copies.

    columns: a tuple of results of `encode_step`, with all chunks each.
    """
    CHUNKS: gl.constexpr = chunks.shape[0]
    COUNT: gl.constexpr = len(columns)
    pairs = ()
    for pair in gl.static_range(COLUMNS // 2):
        left, right = columns[(2 * pair) % COUNT], columns[(2 * pair + 1) % COUNT]
        pairs += (gl.join(_by_chunks(left, CHUNKS), _by_chunks(right, CHUNKS)),)
    first, second, third, fourth = pairs
    joined = gl.join(gl.join(first, third), gl.join(second, fourth))
    WIDTH: gl.constexpr = joined.shape[1]
    # Axes: chunk, width, then bits 0, 2 and 1 of the column.
    values = joined.permute((0, 3, 4, 2, 1)).reshape([CHUNKS, COLUMNS, WIDTH])
    if WIDTH == 4:
        LAYOUT: gl.constexpr = chunk_layout(CHUNKS, WORDS=True)
        reinterpret(chunks, gl.int32, [CHUNKS, COLUMNS, 4], LAYOUT).store(values)
    else:
        chunks.store(values)


# ---- Features: the operand of stage 2.


@aggregate
class Features:
    """What makes features of the sums of stage 1.

    chunks: e4m3 [depth, 8, columns, 16], the operand of a group; scales: float32 [depth, tokens],
    of its columns. FORMAT: a `RowFormat`. STEPS: of one depth unit.
    """

    exchange: Exchange
    tables: Tables
    sizes: Sizes
    epilogue: FirstEpilogue
    chunks: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    FORMAT: gl.constexpr
    STEPS: gl.constexpr


@gluon.jit
def _exists(sizes, hit, unit, part):
    """Which partial sums the row units `unit` (counted over experts) have, [parts, units]."""
    RANGES: gl.constexpr = sizes.SPLIT.ranges
    exists = (part[:, None] < 0) & (unit[None, :] < 0)
    for index in gl.static_range(RANGES):
        units = sizes.first_unit(index + 1) - sizes.first_unit(index)
        length = sizes.length1(hit, index)
        two = (unit * units + units - 1) // length != unit * units // length
        own = (part // 2 == index)[:, None] & ((part % 2 == 0)[:, None] | two[None, :])
        exists = exists | own
    return exists


@gluon.jit
def _collect_features(args, u, unit, hit, launch):
    """Features of a depth unit of the expert of rank u: a tuple of bfloat16 [1, 8, 4, 4] by token.

    Axes as those of a step in `encode`. A token without the expert has zeros.
    """
    sizes, epilogue = args.sizes, args.epilogue
    PARTS: gl.constexpr = sizes.SPLIT.parts
    TOKENS: gl.constexpr = sizes.SPLIT.tokens
    # A thread holds gate and up of a feature, of all parts.
    TILE: gl.constexpr = gl.BlockedLayout([PARTS, 1, 2], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    FEATURE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, TILE))
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    STEP: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [4, 1, 1, 1], [3, 1, 2, 0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 1)
    feature = unit * UNIT + gl.arange(0, UNIT, FEATURE)
    inside = feature < epilogue.features
    there = _exists(sizes, hit, u * sizes.rows1 + feature // 32, part) & inside[None, :]
    there = gl.expand_dims(there, 2) & (pair < 2)
    rows = 2 * gl.expand_dims(gl.expand_dims(feature, 0), 2) + pair
    given = epilogue.parameters
    found = ()
    for t in gl.static_range(TOKENS):
        slot = number(args.tables.slots, t * _SLOTS + u)
        h = gl.zeros([1, 8, 4, 4], gl.bfloat16, STEP)
        if slot >= 0:
            row = (part * sizes.SPLIT.all_slots + slot) * (sizes.rows1 * _ROWS)
            place = args.exchange.parts + gl.expand_dims(gl.expand_dims(row, 1), 2) + rows
            gate, up = gl.sum(_collect(place, there, launch), 0).split()
            value = gated_activation(gate, up, given.p0, given.p1, given.p2, epilogue.ACTIVATION)
            value = gl.convert_layout(value, FEATURE, assert_trivial=True)
            value = gl.where(inside, value, 0.0).to(gl.bfloat16)
            value = gl.convert_layout(value, FOUR).reshape([1, 4, 8, 4]).permute((0, 2, 1, 3))
            h = gl.convert_layout(value, STEP, assert_trivial=True)
        found += (h,)
    return found


@gluon.jit
def build_operand(args, u, group, hit, launch):
    """Store the encoded features of a group of depth units, and their scales."""
    FORMAT: gl.constexpr = args.FORMAT
    DEPTH: gl.constexpr = args.sizes.SPLIT.depth
    TOKENS: gl.constexpr = args.sizes.SPLIT.tokens
    barrier()  # the products with the last operand are complete
    for d in gl.static_range(DEPTH):
        rows = _collect_features(args, u, group * DEPTH + d, hit, launch)
        columns = ()
        for t in gl.static_range(TOKENS):
            scale, encoding = row_scale(row_maximum(statistic_of(rows[t], FORMAT)), FORMAT)
            columns += encode_step(rows[t], encoding, FORMAT, args.STEPS)
            if not args.epilogue.WEIGHT_FIRST:
                scale *= number(args.tables.weights, t * _SLOTS + u)
            value = gl.full([1], 0.0, gl.float32, slot_layout(4)) + scale
            args.scales.index(d).slice(t, 1, 0).store(value)
        store_operand(args.chunks.index(d), columns)
    fence_async_shared()
    barrier()


# ---- Outputs: each CTA sums up `width` columns of one token.


@aggregate
class OutputTerms:
    """Terms of this CTA's outputs, float32 [slots, width]: row factors, and weighted biases."""

    factor: gl.tensor
    bias: gl.tensor


@gluon.constexpr_function
def _sum_layout(WIDTH):
    """Sums [slots, pieces, columns]: lanes along columns first."""
    lanes = min(WIDTH, 32)
    return gl.BlockedLayout([1, 1, 1], [1, 32 // lanes, lanes], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _token_and_column(sizes, hidden):
    """Token and first column of this CTA's outputs; such a token may not exist."""
    blocks = gl.cdiv(hidden, sizes.SPLIT.width)
    return gl.program_id(0) // blocks, gl.program_id(0) % blocks * sizes.SPLIT.width


@gluon.jit
def load_output_terms(epilogue, routing, sizes, WEIGHT_FIRST: gl.constexpr):
    """Load this CTA's OutputTerms. They come from memory: load them long before they are used."""
    PER_TOKEN: gl.constexpr = sizes.SPLIT.slots
    WIDTH: gl.constexpr = sizes.SPLIT.width
    FLAT: gl.constexpr = gl.SliceLayout(1, _sum_layout(WIDTH))
    SLOT: gl.constexpr = gl.SliceLayout(1, FLAT)
    token, first = _token_and_column(sizes, epilogue.hidden)
    place, exists = routing.place(token * PER_TOKEN + gl.arange(0, PER_TOKEN, SLOT))
    expert = routing.load_experts(place, exists)
    column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, FLAT))
    inside = (expert >= 0)[:, None] & (column < epilogue.hidden)[None, :]
    row = (expert * (sizes.rows2 * _ROWS))[:, None] + column[None, :]
    factor = row_factor(gl.load(epilogue.reference + row, mask=inside, other=127))
    bias = gl.zeros([PER_TOKEN, WIDTH], gl.float32, FLAT)
    if epilogue.bias is not None:
        row = (expert * epilogue.hidden)[:, None] + column[None, :]
        bias = gl.load(epilogue.bias + row, mask=inside, other=0.0).to(gl.float32)
        if not WEIGHT_FIRST:
            weight = gl.load(routing.topk_weights + place, mask=exists, other=0.0)
            bias *= weight[:, None]
    return OutputTerms(factor, bias)


@gluon.jit
def store_outputs(epilogue, terms, exchange, tables, sizes, num_tokens, hit, launch):
    """Sum this CTA's outputs over slots, groups and CTAs, and store them."""
    DEPTH: gl.constexpr = sizes.SPLIT.depth
    PER_TOKEN: gl.constexpr = sizes.SPLIT.slots
    WIDTH: gl.constexpr = sizes.SPLIT.width
    PIECES: gl.constexpr = 2 * sizes.SPLIT.groups
    TOKENS: gl.constexpr = _SLOTS // PER_TOKEN
    TILE: gl.constexpr = _sum_layout(WIDTH)
    FLAT: gl.constexpr = gl.SliceLayout(1, TILE)
    SLOT: gl.constexpr = gl.SliceLayout(1, FLAT)
    token, first = _token_and_column(sizes, epilogue.hidden)
    if token < num_tokens:
        ranks = reinterpret(tables.ranks, gl.int32, [TOKENS, PER_TOKEN], flat_layout(1))
        rank = gl.expand_dims(gl.expand_dims(ranks.index(token).load(SLOT), 1), 1)
        slot = token * PER_TOKEN + gl.arange(0, PER_TOKEN, SLOT)
        slot = gl.expand_dims(gl.expand_dims(slot, 1), 1)
        piece = gl.arange(0, PIECES, gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
        piece = gl.expand_dims(gl.expand_dims(piece, 0), 2)
        group, half = piece // 2, piece % 2
        column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, FLAT))
        columns = gl.expand_dims(gl.expand_dims(column, 0), 1)
        groups, length = sizes.groups(), sizes.length2(hit)
        # The group's first item, and whether its last one belongs to another CTA.
        item = ((rank * groups + group) * sizes.rows2 + columns // _ROWS) * DEPTH
        two = item // length != (item + DEPTH - 1) // length
        mask = (rank >= 0) & (group < groups) & (columns < epilogue.hidden) & (two | (half == 0))
        row = (half * groups + group) * sizes.SPLIT.all_slots + slot
        place = exchange.sums + row * (sizes.rows2 * _ROWS) + columns
        total = gl.sum(_collect(place, mask, launch), 1)  # [slots, columns]
        value = gl.sum(total * terms.factor + terms.bias, 0)
        gl.store(
            epilogue.out + token * epilogue.hidden + column,
            value.to(epilogue.out.dtype.element_ty),
            mask=column < epilogue.hidden,
        )
