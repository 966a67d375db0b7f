"""Which layers one launch serves for a few tokens, and how its CTAs share them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...core.problem import Combine, MoEProblem
from ...formats.layouts import UNIT_CODES, UNIT_ROWS
from ...formats.spec import MXFP4
from ...formats.token import FP8_TOKEN

SLOTS = 32
"""Slots of all tokens at most: lanes of a warp."""


@dataclass(frozen=True)
class Split:
    """How CTAs share a layer. Kernels take it as one constexpr.

    Args:
        tokens: columns for tokens, a power of two. slots: of a token, a power of two.
        ranges: parts of the depth of stage 1. A CTA has items of one of them.
        depth: depth units of a group of stage 2, which are summed in registers.
        groups: a power of two, no less than the groups of an expert.
        width: outputs that a CTA sums up, a power of two.
    """

    tokens: int
    slots: int
    ranges: int
    depth: int
    groups: int
    width: int

    @property
    def all_slots(self) -> int:
        """Slots of all tokens."""
        return self.tokens * self.slots

    @property
    def parts(self) -> int:
        """Partial sums of a row unit of stage 1 at most: two CTAs may share a range of it."""
        return 2 * self.ranges


CTAS_PER_SM = 4
"""Resident CTAs of an SM."""
REGISTERS = 64
"""Registers per thread (maxnreg): the register file then holds four CTAs of eight warps."""

_SHARED = 56 * 1024
"""Shared memory of a CTA in bytes, so that four fit on an SM."""
_OTHER_SHARED = 2 * 1024
"""Bytes of the routing tables, mbarriers and scratch of reductions."""
_ITEM_BYTES = UNIT_ROWS * UNIT_CODES // 2 + UNIT_ROWS * UNIT_CODES // 32
_UNIT_BYTES = 8 * UNIT_CODES
"""Bytes of a depth unit of an operand: eight columns."""
_RANGE_UNITS = 16
"""Depth units of a range at most. Each thread encodes one step of a token."""
_MOST_PIECES = 64
"""Sums over which an output of a token is added up at most, if groups can be made larger."""
_MOST_RANGES, _MOST_DEPTH = 4, 4
_TILE, _FEW_PIECES = 4096, 16
"""Sums that a CTA holds in registers when it adds up outputs: 32 a thread. With more pieces than
these a thread has so many of one output that the compiler spills, and half as many fit."""


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()


def units_of(problem: MoEProblem) -> dict[str, int]:
    """Units of both weights, as the kernel takes them."""
    hidden, features = problem.hidden_size, problem.intermediate_size
    return dict(
        rows1=-(-2 * features // UNIT_ROWS),
        depth1=-(-hidden // UNIT_CODES),
        rows2=-(-hidden // UNIT_ROWS),
        depth2=-(-features // UNIT_CODES),
    )


def num_ctas(problem: MoEProblem) -> int:
    """CTAs of the launch; all are resident."""
    return CTAS_PER_SM * problem.target.num_sms


def _ranges(depth: int, items: int) -> int:
    """Parts of the depth of stage 1: a CTA's items must be at least the units of a range.

    items: of a CTA.
    """
    ranges, most = 1, min(_MOST_RANGES, depth)
    while 2 * ranges <= most and -(-depth // ranges) > min(_RANGE_UNITS, items + 1):
        ranges *= 2
    return ranges


def items_of(problem: MoEProblem) -> int:
    """Items of stage 1 of a CTA, rounded down."""
    units = units_of(problem)
    return problem.hit_experts * units["rows1"] * units["depth1"] // num_ctas(problem)


@functools.lru_cache(1024)
def split_of(problem: MoEProblem) -> Split:
    """How CTAs share the layer."""
    units, workers = units_of(problem), num_ctas(problem)
    depth = 1
    while depth < _MOST_DEPTH and problem.top_k * -(-units["depth2"] // depth) > _MOST_PIECES:
        depth *= 2
    return Split(
        tokens=_power(problem.num_tokens),
        slots=_power(problem.top_k),
        ranges=_ranges(units["depth1"], items_of(problem)),
        depth=depth,
        groups=_power(-(-units["depth2"] // depth)),
        width=max(4, _power(-(-problem.num_tokens * problem.hidden_size // workers))),
    )


def range_units(problem: MoEProblem, split: Split) -> int:
    """Depth units of the longest range, as a power of two."""
    return _power(-(-units_of(problem)["depth1"] // split.ranges))


def most_stages(problem: MoEProblem) -> int:
    """Stages of the ring that fit in shared memory."""
    split = split_of(problem)
    operands = (range_units(problem, split) + split.depth) * _UNIT_BYTES
    return (_SHARED - _OTHER_SHARED - operands) // _ITEM_BYTES


def unsupported(problem: MoEProblem) -> str | None:
    """Why a layer that the Hopper kernels serve needs two stages, as a phrase; None if not."""
    options = problem.options
    if problem.weight_format != MXFP4.name:
        return "multiplies MXFP4 weights"
    columns = 4 if options.activation_format == "bf16" else 8
    if not 1 <= problem.num_tokens <= columns:
        return f"serves 1 to {columns} tokens"
    split = split_of(problem)
    if split.all_slots > SLOTS:
        return f"serves at most {SLOTS} slots"
    if options.activation_format == FP8_TOKEN:
        return "sees no whole row of features, whose scale fp8_token needs"
    if options.combine is Combine.FLAT:
        return "adds up the rows of a token"
    if options.apply_router_weight_on_input and problem.top_k > 1:
        return "adds the weights of equal ids, which apply_router_weight_on_input does not allow"
    longest = -(-units_of(problem)["depth1"] // split.ranges)
    pieces = 2 * split.groups
    fitting = _TILE if pieces <= _FEW_PIECES else _TILE // 2
    if longest > _RANGE_UNITS or pieces * split.slots * split.width > fitting:
        return "has no room for a layer of this size"
    return None
