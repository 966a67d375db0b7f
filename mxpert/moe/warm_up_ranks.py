"""The steps of warm_up() for a layer whose experts lie on several ranks.

A rank must not compile while others wait for it in an exchange, whose waits end after a time-out.
So each rank first compiles by itself. Then all ranks run the layer together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..core.compilation import compile_together
from ..core.problem import MoEProblem
from ..quantize.op import quantize
from .inputs import FusedMoEInputs
from .local_weights import require_ranks
from .op import fused_moe_received
from .weights import MoEWeights

if TYPE_CHECKING:
    from ..distributed import ExpertParallel

Run = Callable[[int], object]
"""Runs the layer with this number of tokens."""

Step = Callable[[int], object]
"""Called with a number of tokens or rows before they run."""


def exchanged_counts(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens of a rank whose layers together use every binary of 0 … max_tokens.

    Most kernels depend on the number of slots or of received rows. Those that quantise a rank's own
    rows may change at powers of two.
    """
    powers = (1 << n for n in range(max_tokens.bit_length()))
    return tuple(sorted({0, max_tokens, *powers}))


@contextlib.contextmanager
def errors_reach_all(ranks: ExpertParallel) -> Iterator[None]:
    """Raise an error of the block on this rank, and one that names it on all others.

    The others learn of it in their next call of `agree`.
    """
    require_ranks("warm_up", ranks)
    try:
        yield
    except Exception as error:
        ranks.agree(error)
        raise


def compile_alone(
    ranks: ExpertParallel,
    weights: MoEWeights,
    problem: MoEProblem,
    run: Run,
    tokens: Sequence[int],
    alone: Sequence[int],
    step: Step,
) -> None:
    """Compile what this rank will launch, without an exchange.

    Args:
        problem: of the local layer.
        run: the layer over the ranks.
        tokens: numbers of tokens of a rank.
        alone: the same with SYMMETRIC, whose host code sends nothing; else numbers of received rows
            to run the local layer with.
    """
    if ranks.transport.name == "SYMMETRIC":
        for num_tokens in alone:
            step(num_tokens)
            with compile_together():
                run(num_tokens)
        return
    assert problem.local_top_k is not None  # for the type checker: a problem of several ranks
    is_quantised = ranks.wire_format == "mxfp8"
    if is_quantised:
        for num_tokens in tokens:
            quantize(_zeros(ranks, num_tokens), "mxfp8")
    for num_rows in alone:
        step(num_rows)
        x, shape = _zeros(ranks, num_rows), (num_rows, ranks.top_k)
        slots = torch.arange(num_rows * ranks.top_k, device=ranks.device).view(shape)
        received = FusedMoEInputs(
            quantize(x, "mxfp8") if is_quantised else x,
            weights,
            torch.full(shape, 1 / ranks.top_k, dtype=torch.float32, device=ranks.device),
            ranks.expert_map[slots % ranks.placement.num_experts],
        )
        fused_moe_received(received, problem.options, problem.local_top_k)


def _zeros(ranks: ExpertParallel, num_rows: int) -> torch.Tensor:
    shape = num_rows, ranks.hidden_size
    return torch.zeros(shape, dtype=torch.bfloat16, device=ranks.device)


def run_together(ranks: ExpertParallel, run: Run, tokens: Sequence[int], step: Step) -> None:
    """Run the layer on all ranks, and end on all of them at the same time."""
    for num_tokens in tokens:
        step(num_tokens)
        run(num_tokens)
    ranks.check()
    ranks.agree({})
