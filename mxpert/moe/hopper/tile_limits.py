"""Shapes of prefill tiles, and up to how many rows an expert each tile is the fastest on Hopper."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

from ...core.problem import MoEProblem, Target
from .group_layout import HOPPER_GROUPS_FLOAT16, GroupWeights, group_weights


class PrefillShape(NamedTuple):
    """Shape of a prefill tile.

    Args:
        block_m: rows of a routing block. consumers: row units of a tile. blocks: most blocks of it.
        rows: the dtype of 16 bits in which rows are stored; None for e4m3.
    """

    block_m: int
    consumers: int
    blocks: int
    rows: torch.dtype | None = None


_SHAPES_OF_HI_LO = {"triple": PrefillShape(32, 3, 2), "wide": PrefillShape(64, 2, 2)}
"""Prefill tiles by name, ordered by rows, for rows with a high and a low part in e4m3 and weights
with a scale for each 128.

Wide tiles decode each weight for more rows. Narrow tiles leave room for more stages. Registers hold
the sums of up to 256 rows with two consumers and 96 with three; with hi and lo 128 and 64.
"""

_SHAPES = {
    "short": PrefillShape(32, 3, 2),
    "triple": PrefillShape(32, 3, 3),
    "narrow": PrefillShape(32, 2, 4),
    "middle": PrefillShape(64, 2, 3),
    "wide": PrefillShape(64, 2, 4),
}
"""The same for other rows, in e4m3 or of 16 bits."""

_SHAPES_OF_BF16 = {"short": _SHAPES["short"]} | {
    name: _SHAPES[name]._replace(rows=torch.float16) for name in ("triple", "narrow", "middle")
}
"""The same for bfloat16 activations and MXFP4 weights. With few rows an expert e4m3 is the faster,
with a high and a low part of each row. Tensor cores take as long for these as for float16, and
weights are decoded to e4m3 in 7 instructions for 8 codes, to float16 in 11; but float16 sums stay
in the tensor cores, and clocks higher."""

_SHAPES_OF_SMALL_GROUPS = {
    True: {"narrow": PrefillShape(32, 2, 2)},
    False: {"short": PrefillShape(32, 3, 2), "narrow": PrefillShape(32, 2, 4)},
}
"""The same by hi_lo for e4m3 rows and weights with a scale for each 32 or 64. Sums of a group need
registers beside those of the tile several times a depth unit: wider tiles have 20 to 200 spills in
the main loop."""

FP8_SHAPES = {
    "fp8_narrow": PrefillShape(32, 2, 4),
    "fp8_triple": PrefillShape(64, 3, 2),
    "fp8_middle": PrefillShape(64, 2, 3),
    "fp8_wide": PrefillShape(64, 2, 4),
}
"""The same of PREFILL_FP8. Without decoded weights, three consumers hold the sums of 128 rows."""

Limits = tuple[tuple[str, float], ...]


def _limits(
    *, decode: float = 26, short: float = 48, triple: float = 84, narrow: float = 110, middle: float
) -> Limits:
    """Most rows of an expert for tiles of these names; the widest has no limit."""
    return (
        ("decode8", 1.5),
        ("decode32", decode),
        ("short", short),
        ("triple", triple),
        ("narrow", narrow),
        ("middle", middle),
        ("wide", math.inf),
    )


_LIMITS = {
    True: _limits(short=56, middle=math.inf),
    False: _limits(short=56, triple=88, narrow=104, middle=192),
}
"""Tile names with the largest number of rows per hit expert at which each is the fastest, by hi_lo.

The limits are somewhat below a tile's rows, since experts with more rows than the average need a
second tile. A decode tile of 32 rows loads only its block's real rows. It is within 1 % (a8w4) or
3 % (a16w4) of narrower tiles if tokens spread evenly, and up to 20 % faster if they do not. The
tile of 16 rows is used only for plans with routing_block_m = 16.

Measured on an H200 with 1 to 2000 rows an expert, on gpt-oss-120b, kimi-k2 TP4, deepseek-v3 EP8 and
qwen3-235b. They are limits of the tiles' rows, not of the card, where reading takes longer than
multiplying 32 rows.
"""

_DECODE_LONG_GROUPS = 48
_LIMITS_OF_LONG_GROUPS = (
    ("decode8", 1.5),
    ("decode32", _DECODE_LONG_GROUPS),
    ("triple", 84),
    ("wide", math.inf),
)
"""The same for bfloat16 activations and weights with a scale for each 128: with 32 rows an expert
prefill tiles take 2 to 6 % more time than the decode tile, with 64 rows 3 to 5 % less."""

_LIMITS_OF_16_BIT_ROWS = {
    ("e2m1", True): _limits(decode=11, middle=192),
    ("e2m1", False): _limits(middle=192),
    ("e4m3", True): _limits(middle=math.inf),
    ("int4", True): _limits(decode=24, middle=math.inf),
}
"""The same of weights that prefill tiles multiply with rows of 16 bits, by codes and hi_lo. Decode
tiles take e4m3 rows: of NVFP4 with hi and lo they multiply four times as much. Of INT4 they scale
the sums of a group; with groups of 128 they are the faster up to _DECODE_LONG_GROUPS rows.

Measured on an H200 with 4 to 512 rows an expert, on qwen3-30b, minimax-m3 TP4 and kimi-k2 TP4."""

_LIMITS_WHERE_MULTIPLYING_COSTS = (
    ("decode8", 1.5),
    ("decode32", 200),
    ("narrow", 320),
    ("triple", 320),
    ("wide", math.inf),
)
"""The same on cards that need as long to multiply 32 rows as to read their weights, such as an H20.

Derived, not measured. A second tile of an expert costs there no more than the columns that it
multiplies, so the tile counts that adds fewest. On average these are 5.5 in decode tiles, which are
8, 16 or 32 columns wide, 15.5 in blocks of 32 rows and 31.5 in blocks of 64. A tile with more rows
follows where that costs 5 %: from (15.5 - 5.5) / 0.05 and (31.5 - 15.5) / 0.05 rows on.
"""

FP8_FROM_ROWS = 160
_FP8_LIMITS = (("fp8_middle", 192), ("fp8_triple", math.inf))
"""Rows per hit expert from which tiles with FP8 weights are used where there are such weights, and
up to which each of them is.

Measured on an H200 with 21 to 2048 rows, on gpt-oss-120b, kimi-k2 TP4, qwen3-235b and dsv4-flash
(benchmarks/moe/fp8_copies.py, 4cbca3f): with 128 rows layers take 0.98 (gpt-oss) to 1.03 (qwen3) of
the time of the tiles that decode, with 171 and 192 rows 0.95 to 0.99, with 256 and more 0.80 to
0.92."""

_DECODE_ROWS = 32
"""Rows of the widest decode tile."""

_TENSOR_FLOPS = 8192
"""e4m3 operations that the tensor cores of an SM finish in a clock."""

_DATA_SHEETS = {r"\bH20\b": (296e12, 4.0e12)}
"""e4m3 operations and bytes a second of cards whose tensor cores are slowed down, by their name:
the driver does not tell the first."""


def uses_hi_lo(problem: MoEProblem) -> bool:
    """Whether activations are encoded as hi and lo rows (bf16 activations)."""
    return problem.options.activation_format == "bf16"


def _rows_of_groups(weights: GroupWeights, hi_lo: bool, float16: bool) -> torch.dtype | None:
    """The dtype of 16 bits in which prefill tiles multiply rows; None if they multiply e4m3.

    The dtype holds a weight times the scale of its group, so that no sum of a group has to be
    scaled. FP8 tensor cores take half as long with 8-bit activations, and as long with weights in
    groups of 16, which they multiply twice.
    """
    if weights.codes == "e2m1" or (hi_lo and float16):
        return torch.float16
    return torch.bfloat16 if hi_lo and weights.codes == "e4m3" else None


def holds_float16(problem: MoEProblem) -> bool:
    """Whether a problem's weights are INT4 that float16 holds."""
    return problem.weight_layout is HOPPER_GROUPS_FLOAT16


def prefill_shapes(
    hi_lo: bool, weight_format: str, float16: bool = False
) -> dict[str, PrefillShape]:
    """Shapes of the tiles for weights of a format, by name.

    Args:
        hi_lo: whether activations are bfloat16.
        float16: whether float16 holds the weights, if they are INT4.
    """
    weights = group_weights(weight_format)
    if weights is None:
        return _SHAPES_OF_BF16 if hi_lo else _SHAPES
    rows = _rows_of_groups(weights, hi_lo, float16)
    if rows is not None:
        return {name: shape._replace(rows=rows) for name, shape in _SHAPES.items()}
    if weights.group < 128:
        return _SHAPES_OF_SMALL_GROUPS[hi_lo]
    return _SHAPES_OF_HI_LO if hi_lo else _SHAPES


def balanced_rows(target: Target, hi_lo: bool, bytes_per_weight: float) -> float:
    """Rows of an expert that a card multiplies in the time in which it reads the weights.

    Infinite where the card's rates are not known. With MXFP4 weights an H200 has 116 (58 with hi
    and lo), an H20 19 (10).
    """
    flops, bandwidth = target.num_sms * target.clock * _TENSOR_FLOPS, target.bandwidth
    for name, (its_flops, its_bandwidth) in _DATA_SHEETS.items():
        if re.search(name, target.name):
            flops, bandwidth = its_flops, bandwidth or its_bandwidth
    if not flops or not bandwidth:
        return math.inf
    return flops / bandwidth * bytes_per_weight / (4 if hi_lo else 2)


def tile_limits(problem: MoEProblem, hi_lo: bool, bytes_per_weight: float) -> Limits:
    """Names of tiles in the order of their rows, each with the most rows of an expert."""
    weights = group_weights(problem.weight_format)
    if balanced_rows(problem.target, hi_lo, bytes_per_weight) <= _DECODE_ROWS:
        return _LIMITS_WHERE_MULTIPLYING_COSTS
    if weights is None:
        return _LIMITS[hi_lo]
    if _rows_of_groups(weights, hi_lo, holds_float16(problem)) is not None:
        limits = _LIMITS_OF_16_BIT_ROWS[weights.codes, hi_lo]
        if weights.group < 128:
            return limits
        return limits[0], ("decode32", _DECODE_LONG_GROUPS), *limits[2:]
    return _LIMITS_OF_LONG_GROUPS if hi_lo and weights.group >= 128 else _LIMITS[hi_lo]


def fp8_tile(problem: MoEProblem) -> str | None:
    """The tile for weights with an FP8 copy; None where the 4-bit weights are the faster."""
    rows = problem.rows_per_expert
    if rows < FP8_FROM_ROWS:
        return None
    return next(name for name, limit in _FP8_LIMITS if rows <= limit)
