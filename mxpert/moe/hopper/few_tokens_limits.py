"""Which layers one launch serves for a few tokens, and the memory that such a launch takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...core.cuda_compiler import missing_compiler
from ...core.problem import Combine, MoEProblem, Scoring, compares_scores
from ...formats.layouts import UNIT_CODE_BYTES, UNIT_CODES, UNIT_ROWS, UNIT_SCALE_BYTES
from ...formats.token import FP8_TOKEN
from ..inputs import LogitsInputs
from .group_layout import group_weights
from .tile_limits import uses_hi_lo

ACTIVATIONS = ("silu", "swiglu", "gelu", "gelu_tanh", "clamped_silu", "situ_v2")
"""Names of those that the kernel has, in the order of its macros."""
LANES = 32
"""Of a warp."""
SLOTS = LANES
"""Slots of all tokens at most, a lane each."""
_MOST_CHOSEN = 16
"""Experts of a token at most, where the kernel chooses them."""
_MOST_HELD_SCORES = 16
"""Experts whose scores a lane holds in registers at most."""
TEAM = 4
"""CTAs that share the rows of stage 2."""
WARPGROUPS = 4
"""Of consumers; a stage of the ring has a unit for each."""
WARPS = 4 * WARPGROUPS + 4
"""Of a CTA: consumers, producer, activation, two encoders."""
_MOST_TEAMS = 64
"""The kernel keeps a bit for each."""
_COLUMNS = 8
"""Of an operand of wgmma: of each token one, or two with high and low parts."""
_FOLDED_BYTES = UNIT_CODE_BYTES + UNIT_SCALE_BYTES + UNIT_ROWS
"""Codes, shifts and row references of a unit of MXFP4 weights."""
_OPERAND_BYTES = _COLUMNS * UNIT_CODES
_CONSUMERS = 32 * 4 * WARPGROUPS
_GROUP = 4
"""Tokens whose x is in registers at once."""
_MOST_HELD = 16
"""Sets of four values of x that a thread holds at most: 32 registers."""


@dataclass(frozen=True)
class Sizes:
    """What the kernel takes as constants, by the problem.

    Args:
        tokens: columns for tokens, a power of two.
        pairs: of tokens.
        quads: sets of four values of a token's x that a thread encodes.
        items: of a team in stage 2 at most.
        tables: bytes of shared memory for barriers, routing, scales and sums of stage 1.
        shared: all bytes of shared memory but those of the ring.
    """

    tokens: int
    pairs: int
    quads: int
    items: int
    tables: int
    shared: int


def units_of(problem: MoEProblem) -> dict[str, int]:
    """Units of both weights, as the kernel takes them: of 64 rows, and of 128 codes of depth."""
    hidden, features = problem.hidden_size, problem.intermediate_size
    return dict(
        units_1=-(-2 * features // UNIT_ROWS),
        depth_1=-(-hidden // UNIT_CODES),
        units_2=-(-hidden // UNIT_ROWS),
        depth_2=-(-features // UNIT_CODES),
    )


def num_ctas(problem: MoEProblem) -> int:
    """CTAs of the launch: one an SM, all of them resident."""
    return problem.target.num_sms


def num_teams(problem: MoEProblem) -> int:
    """Teams of stage 2."""
    return num_ctas(problem) // TEAM


@functools.lru_cache(1024)
def sizes_of(problem: MoEProblem) -> Sizes:
    """Constants of the kernel for a problem, or for the first of its launches."""
    units, tokens = units_of(problem), 1 << max(0, tokens_of_launch(problem) - 1).bit_length()
    hit = min(problem.num_experts, tokens * problem.top_k, SLOTS)
    items = max(1, -(-hit * units["depth_2"] // num_teams(problem)))
    depth = -(-units["depth_1"] // WARPGROUPS) * WARPGROUPS  # a stage has whole units
    columns = max(4, tokens)  # for tokens, of sums of stage 1
    tables = 1024  # barriers of stages and sums, numbers
    tables += 2 * WARPGROUPS * 32 * columns * 8  # sums of stage 1
    tables += items * (8 + 4 * tokens)  # barriers of items, scales of their features
    tables += SLOTS * (12 + 4 * tokens)  # experts twice, members, weights
    tables += tokens * (8 * problem.top_k + 4)  # what is chosen from logits
    tables += tokens * 12 + min(tokens, _GROUP) * 4 * WARPS  # scales and maxima of x, teams
    return Sizes(
        tokens=tokens,
        pairs=(tokens + 1) // 2,
        quads=-(-depth * (UNIT_CODES // 4) // _CONSUMERS),
        items=items,
        tables=tables,
        shared=(depth + items) * _OPERAND_BYTES + tables,
    )


def _stage_bytes(weight_format: str) -> int:
    """Bytes of a stage of the ring at most: a unit of weights for each warpgroup."""
    weights = group_weights(weight_format)
    if weights is None:
        return WARPGROUPS * _FOLDED_BYTES
    factors = 4 * UNIT_ROWS if weights.codes == "e2m1" else 0
    return WARPGROUPS * (weights.unit_bytes + factors)


def shared_bytes(problem: MoEProblem, num_stages: int) -> int:
    """Shared memory of a CTA."""
    return num_stages * _stage_bytes(problem.weight_format) + sizes_of(problem).shared


def most_stages(problem: MoEProblem) -> int:
    """Stages of the ring that fit in shared memory."""
    room = problem.target.shared_memory - sizes_of(problem).shared
    return room // _stage_bytes(problem.weight_format)


def _has_halves(problem: MoEProblem) -> bool:
    """Whether groups are halves of k32 steps."""
    weights = group_weights(problem.weight_format)
    return weights is not None and weights.group < 32


def _most_of_launch(problem: MoEProblem) -> int:
    """Tokens that the columns of an operand hold.

    A token has a column for each of its parts, and with groups of 16 four columns: those of first
    and of second halves of k32 steps.
    """
    if _has_halves(problem):
        return _COLUMNS // 4
    return _COLUMNS // 2 if uses_hi_lo(problem) else _COLUMNS


def tokens_of_launch(problem: MoEProblem) -> int:
    """Tokens of a layer's first launch; others have as many or fewer."""
    return min(problem.num_tokens, _most_of_launch(problem))


def most_tokens(problem: MoEProblem) -> int:
    """Tokens of a layer at most; with groups of 16 they take two launches, one after the other."""
    return _most_of_launch(problem) * (2 if _has_halves(problem) else 1)


def unsupported(problem: MoEProblem) -> str | None:
    """Why a layer that the Hopper kernels serve needs two stages, as a phrase; None if not."""
    options = problem.options
    most = most_tokens(problem)
    if not 1 <= problem.num_tokens <= most:
        return f"serves 1 to {most} tokens"
    if tokens_of_launch(problem) * problem.top_k > SLOTS:
        return f"serves at most {SLOTS} slots"
    if options.activation_format == FP8_TOKEN:
        return "sees no whole row of features, whose scale fp8_token needs"
    if options.activation.name not in ACTIVATIONS:
        return f"has the activations {', '.join(ACTIVATIONS)}"
    if options.combine is Combine.FLAT:
        return "adds up the rows of a token"
    if options.apply_router_weight_on_input and problem.top_k > 1:
        return "adds the weights of equal ids, which apply_router_weight_on_input does not allow"
    if not 1 <= num_teams(problem) <= _MOST_TEAMS:
        return f"needs {TEAM} to {TEAM * _MOST_TEAMS} SMs"
    sizes = sizes_of(problem)
    if sizes.quads * min(sizes.tokens, _GROUP) > _MOST_HELD or most_stages(problem) < 2:
        return "has no room for a layer of this size"
    return missing_compiler()


def group_lanes(num_groups: int) -> int:
    """Lanes that share the experts of a group, a power of two; 0 if there are too many groups."""
    return LANES >> (num_groups - 1).bit_length()


def lane_experts(num_experts: int, num_groups: int) -> int:
    """Experts that a lane chooses from. With groups they are all of one group."""
    return -(-num_experts // num_groups // group_lanes(num_groups))


def chooses_experts(problem: MoEProblem, inputs: LogitsInputs) -> bool:
    """Whether the launch itself chooses the experts; if not, `route_topk` runs before it.

    It chooses at most 16 of at most 512 experts, in at most 32 groups. Groups whose number is no
    power of two have the lanes of the next one: 12 groups hold at most 32 experts each. It does not
    choose by the scores of a softmax with clamp_nan: weights that `route_topk` sums up in another
    order would differ in their last bits.
    """
    options, num_experts = problem.routing, inputs.logits.shape[1]
    if options is None:
        return False
    by_score = compares_scores(options, inputs.correction_bias is not None)
    is_clamped = options.clamp_nan and options.scoring is Scoring.SOFTMAX and by_score
    return (
        not is_clamped
        and problem.top_k <= _MOST_CHOSEN
        and group_lanes(options.num_groups) > 0
        and lane_experts(num_experts, options.num_groups) <= _MOST_HELD_SCORES
        and inputs.logits.stride(1) == 1
    )
