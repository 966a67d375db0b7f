"""Cases in which each value of one parameter meets each value of every other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any


def latin(
    first: Collection[Any], second: Collection[Any], third: Sequence[Any], shift: int = 0
) -> list[tuple[Any, Any, Any]]:
    """All pairs of `first` and `second`, with values of `third` as in a Latin square.

    Raises:
        ValueError: `third` has more values than `first` or `second`, so pairs would be missing.

    >>> latin("ab", "cd", (0, 1))
    [('a', 'c', 0), ('a', 'd', 1), ('b', 'c', 1), ('b', 'd', 0)]
    """
    if len(third) > min(len(first), len(second)):
        raise ValueError(f"latin: third — need at most as many values as the others, got {third}")
    return [
        (one, other, third[(i + j + shift) % len(third)])
        for (i, one), (j, other) in itertools.product(enumerate(first), enumerate(second))
    ]
