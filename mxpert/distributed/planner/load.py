"""Expected load of ranks and experts: how often a token chooses them.

Routing is modelled as `top_k` draws without replacement with given weights, which is what the k
largest of ``log weight + Gumbel noise`` are. Such draws are the first k arrivals of independent
exponential clocks with these weights as rates (Yellott, 1977), so probabilities are integrals over
the time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from ...errors import message, require

ROUTINGS = ("uniform", "zipf")
_STEP = 0.1
"""Step of the logarithm of time. The integrands are smooth, so the sum's error is below 1e-9."""


@functools.lru_cache(maxsize=64)
def choice_probabilities(
    num_experts: int, top_k: int, bounds: tuple[int, ...], routing: str = "uniform"
) -> torch.Tensor:
    """Probability that a token chooses at least one expert of each group of consecutive experts.

    Args:
        num_experts: E. top_k: distinct experts of a token.
        bounds: first expert of each group, and E at the end.
        routing: "uniform", or "zipf": expert e has the weight 1 / (e + 1).

    Returns:
        float64 [groups].

    Raises:
        ValueError: another routing, or top_k is not in 1 to E.

    Example:
        >>> choice_probabilities(2, 1, (0, 1, 2), "zipf")  # weights 1 and 1/2
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    op = "choice_probabilities"
    if routing not in ROUTINGS:
        raise ValueError(message(op, "routing", f"one of {', '.join(ROUTINGS)}", repr(routing)))
    require(1 <= top_k <= num_experts, op, "top_k", need=f"1 to {num_experts}", got=top_k)
    if top_k == num_experts:
        return torch.ones(len(bounds) - 1, dtype=torch.float64)
    index = torch.arange(num_experts, dtype=torch.float64)
    weight = 1 / (index + 1) if routing == "zipf" else torch.ones_like(index)
    first = math.log(1e-12 / float(weight.sum()))
    last = math.log(40 / float(weight.min()))
    time = torch.exp(torch.arange(first, last, _STEP, dtype=torch.float64))  # [points]
    arrived = -torch.expm1(-weight[:, None] * time)  # [E, points]: the clock has rung
    before = _arrivals(arrived, top_k, bounds[:-1])
    after = _arrivals(arrived.flip(0), top_k, [num_experts - bound for bound in bounds[1:]])
    at_most = torch.stack(after).cumsum(-1).flip(-1)  # [groups, points, k]
    fewer = (torch.stack(before) * at_most).sum(-1)  # others that have rung: fewer than k
    rate = torch.stack([weight[a:b].sum() for a, b in itertools.pairwise(bounds)])
    density = rate[:, None] * time * torch.exp(-rate[:, None] * time)
    return (density * fewer).sum(-1) * _STEP


def _arrivals(arrived: torch.Tensor, most: int, counts: Sequence[int]) -> list[torch.Tensor]:
    """Distribution of how many of the first `count` clocks have rung, for each of `counts`.

    Returns:
        float64 [points, most] each: probabilities of 0 to most - 1.
    """
    state = torch.zeros((arrived.shape[1], most), dtype=torch.float64)
    state[:, 0] = 1
    found = {0: state}
    for index, rung in enumerate(arrived):
        moved = torch.nn.functional.pad(state[:, :-1], (1, 0))
        state = state + rung[:, None] * (moved - state)
        if index + 1 in counts:
            found[index + 1] = state
    return [found[count] for count in counts]


def expected_maximum(means: torch.Tensor, deviations: torch.Tensor) -> float:
    """Expected maximum of independent normal variables.

    Args:
        means: float64 [n]. deviations: standard deviations, float64 [n]; they may be 0.

    Example:
        >>> round(expected_maximum(torch.zeros(2), torch.ones(2)), 4)  # 1 / √π
        0.5642
    """
    means, deviations = means.double(), deviations.double()
    low = float((means - 8 * deviations).max())  # the maximum is above this
    high = float((means + 8 * deviations).max())
    if high == low:
        return high
    x = torch.linspace(low, high, 2001, dtype=torch.float64)
    scaled = (x[:, None] - means) / deviations.clamp(min=1e-300)
    below = torch.special.ndtr(scaled).prod(-1)
    return high - float(torch.trapezoid(below, x))
