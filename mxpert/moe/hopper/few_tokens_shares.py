"""How CTAs share a layer of a few tokens, and its routing, which every CTA works out by itself.

The unit of work is an item: 64 weight rows × 128 codes. Items of stage 1 have the order (range of
the depth, expert, row unit, depth unit), those of stage 2 the order (expert, group of depth units,
row unit, depth unit). A CTA takes a run of each. Experts are counted by their rank among the
experts that the tokens hit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.compat import aggregate, reinterpret
from ...device.hopper_ptx import from_lanes, group_lanes
from .few_tokens_split import SLOTS


@aggregate
class Sizes:
    """Units of both weights: rows1, rows2 of 64 rows; depth1, depth2 of 128 codes. And CTAs."""

    rows1: gl.tensor
    depth1: gl.tensor
    rows2: gl.tensor
    depth2: gl.tensor
    workers: gl.tensor
    SPLIT: gl.constexpr

    @gluon.jit
    def first_unit(self, part):
        """First depth unit of a range of stage 1."""
        return part * self.depth1 // self.SPLIT.ranges

    @gluon.jit
    def first_worker(self, part):
        """First CTA of a range of stage 1; ranges have CTAs in proportion to their units."""
        return self.workers * self.first_unit(part) // self.depth1

    @gluon.jit
    def length1(self, hit, part):
        """Items of a CTA in a range of stage 1: so many that two share a row unit at most."""
        units = self.first_unit(part + 1) - self.first_unit(part)
        team = self.first_worker(part + 1) - self.first_worker(part)
        return gl.maximum(gl.cdiv(hit * self.rows1 * units, team), units - 1)

    @gluon.jit
    def groups(self):
        """Groups of depth units of an expert in stage 2."""
        return gl.cdiv(self.depth2, self.SPLIT.depth)

    @gluon.jit
    def length2(self, hit):
        """Items of a CTA in stage 2: so many that two share a group of a row unit at most."""
        items = hit * self.groups() * self.rows2 * self.SPLIT.depth
        return gl.maximum(gl.cdiv(items, self.workers), self.SPLIT.depth)


@aggregate
class FirstShare:
    """A CTA's items of stage 1, [first, last) of a range.

    part: the range. first_unit, units: its depth units. member: number of this CTA in the range's
    team. length: items of a CTA of the team.
    """

    part: gl.tensor
    first_unit: gl.tensor
    units: gl.tensor
    member: gl.tensor
    length: gl.tensor
    first: gl.tensor
    last: gl.tensor


@gluon.jit
def first_share(sizes, hit):
    """This CTA's share of stage 1. Its range does not depend on `hit`."""
    RANGES: gl.constexpr = sizes.SPLIT.ranges
    program = gl.program_id(0)
    part = 0
    for index in gl.static_range(1, RANGES):
        part += (program >= sizes.first_worker(index)).to(gl.int32)
    start = sizes.first_unit(part)
    units = sizes.first_unit(part + 1) - start
    member = program - sizes.first_worker(part)
    length = sizes.length1(hit, part)
    items = hit * sizes.rows1 * units
    first = gl.minimum(member * length, items)
    last = gl.minimum(first + length, items)
    return FirstShare(part, start, units, member, length, first, last)


@gluon.jit
def second_share(sizes, hit):
    """First item of this CTA in stage 2, and the end of its items."""
    length = sizes.length2(hit)
    items = hit * sizes.groups() * sizes.rows2 * sizes.SPLIT.depth
    first = gl.minimum(gl.program_id(0) * length, items)
    return first, gl.minimum(first + length, items)


# ---- Routing. A warp holds one slot of a token in each lane.

_SLOTS = gl.constexpr(SLOTS)


@gluon.jit
def lane_value(values, lane):
    """Element `lane` of int32 [32] as a scalar; every warp holds all elements."""
    return gl.sum(gl.where(gl.arange(0, _SLOTS, values.type.layout) == lane, values, 0), 0)


@gluon.constexpr_function
def slot_layout(WARPS):
    """32 values, one a lane, in each warp; or one value, which every thread holds."""
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.constexpr_function
def flat_layout(rank):
    """Shared memory in row-major order."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@aggregate
class Routing:
    """Slots of the tokens. topk_ids, topk_weights: [num_tokens, top_k].

    expert_map: local expert of each of num_global ids, −1 for those of other ranks; or None.
    """

    topk_ids: gl.tensor
    topk_weights: gl.tensor
    expert_map: gl.tensor | gl.constexpr
    num_tokens: gl.tensor
    top_k: gl.tensor
    num_global: gl.tensor
    SPLIT: gl.constexpr

    @gluon.jit
    def place(self, slot):
        """Where slots lie in topk_ids, and which of them exist."""
        PER_TOKEN: gl.constexpr = self.SPLIT.slots
        token = slot // PER_TOKEN
        exists = (slot % PER_TOKEN < self.top_k) & (token < self.num_tokens)
        return token * self.top_k + slot % PER_TOKEN, exists

    @gluon.jit
    def load_experts(self, place, exists):
        """Local expert at each place of topk_ids, −1 for none."""
        ids = gl.load(self.topk_ids + place, mask=exists, other=-1).to(gl.int32)
        valid = exists & (ids >= 0) & (ids < self.num_global)
        if self.expert_map is not None:
            ids = gl.load(self.expert_map + ids, mask=valid, other=-1).to(gl.int32)
            valid = valid & (ids >= 0)
        return gl.where(valid, ids, -1)


@aggregate
class Tables:
    """Routing in shared memory.

    experts: int32 [32, 1], by rank. slots, weights: [tokens * 32, 1], of the token's first slot
    with the expert of each rank: its number, −1 if there is none, and the sum of the weights of all
    such slots. ranks: int32 [32], of each slot's expert; −1 without an expert, and for later slots
    of a token with the same one.
    """

    experts: gl.shared_memory_descriptor
    slots: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    ranks: gl.shared_memory_descriptor


@gluon.jit
def make_tables(TOKENS: gl.constexpr):
    """Allocate the tables."""
    FLAT: gl.constexpr = flat_layout(1)
    return Tables(
        experts=gl.allocate_shared_memory(gl.int32, [_SLOTS, 1], FLAT),
        slots=gl.allocate_shared_memory(gl.int32, [TOKENS * _SLOTS, 1], FLAT),
        weights=gl.allocate_shared_memory(gl.float32, [TOKENS * _SLOTS, 1], FLAT),
        ranks=gl.allocate_shared_memory(gl.int32, [_SLOTS], FLAT),
    )


@gluon.jit
def number(table, index):
    """A number of a table, as a scalar."""
    return gl.max(table.index(index).load(slot_layout(4)), 0)


@gluon.jit
def of_columns(table, u, column, OTHER: gl.constexpr, TOKENS: gl.constexpr):
    """table[token, u] for each token's column; OTHER for other columns."""
    values = gl.zeros_like(column).to(table.dtype) + OTHER
    for t in gl.static_range(TOKENS):
        values = gl.where(column == t, number(table, t * _SLOTS + u), values)
    return values


@gluon.jit
def fill_tables(tables, routing):
    """Fill the tables (four warps, before a barrier); return the number of hit experts."""
    PER_TOKEN: gl.constexpr = routing.SPLIT.slots
    TOKENS: gl.constexpr = routing.SPLIT.tokens
    LAYOUT: gl.constexpr = slot_layout(4)
    FLAT: gl.constexpr = flat_layout(1)
    slot = gl.arange(0, _SLOTS, LAYOUT)
    place, exists = routing.place(slot)
    experts = routing.load_experts(place, exists)
    weight = gl.load(routing.topk_weights + place, mask=exists, other=0.0)
    groups = group_lanes(experts)
    hit = gl.max(groups.count, 0)
    total = gl.zeros([_SLOTS], gl.float32, LAYOUT)
    first = slot
    for i in gl.static_range(PER_TOKEN - 1, -1, -1):
        lane = slot // PER_TOKEN * PER_TOKEN + i
        same = (groups.peers >> lane & 1) != 0
        total += gl.where(same, from_lanes(weight, lane), 0.0)
        first = gl.where(same, lane, first)
    tables.ranks.store(gl.where((experts >= 0) & (first == slot), groups.rank, -1))
    reinterpret(tables.experts, gl.int32, [_SLOTS], FLAT).store(groups.key)
    slots = reinterpret(tables.slots, gl.int32, [TOKENS, _SLOTS], FLAT)
    weights = reinterpret(tables.weights, gl.float32, [TOKENS, _SLOTS], FLAT)
    for t in gl.static_range(TOKENS):
        found = gl.full([_SLOTS], -1, gl.int32, LAYOUT)
        for i in gl.static_range(PER_TOKEN - 1, -1, -1):
            member = (groups.members >> (t * PER_TOKEN + i) & 1) != 0
            found = gl.where(member & (slot < hit), t * PER_TOKEN + i, found)
        slots.index(t).store(found)
        weights.index(t).store(from_lanes(total, gl.maximum(found, 0)))
    return hit
