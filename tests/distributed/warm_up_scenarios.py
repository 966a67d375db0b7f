"""What ranks do with mxpert.warm_up; each function runs on all of them at the same time.

The reference backend compiles nothing. `compiling` makes it run as a backend that compiles does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import mxpert
from mxpert.distributed import ExpertParallel, Transport
from mxpert.moe import warm_up as module
from mxpert.testing.numerics import assert_close_relative
from tests.distributed.ranked_layer import (
    FLOAT32,
    MAX_TOKENS,
    SHAPE,
    TRANSPORTS,
    judge,
    make,
    part_of,
    rank,
    refused,
    run,
    size,
    tokens,
    whole_layer,
)

COUNTS = (0, 1, 2, 4, MAX_TOKENS)
OTHERS_WAIT_S = 1.0
"""Time-out of an exchange, far below what one rank takes to compile here."""


@contextlib.contextmanager
def compiling(seconds: float = 0.0) -> Iterator[None]:
    """A backend that compiles. seconds: how long that takes on the last rank."""
    compile_alone = module.compile_alone

    def slowly(*arguments: Any) -> None:
        compile_alone(*arguments)
        time.sleep(seconds * (rank() == size() - 1))

    with (
        mock.patch.object(module, "_choice", lambda explanation: ("compiled", explanation.problem)),
        mock.patch.object(module, "compile_alone", slowly),
    ):
        yield


def warm(ep: ExpertParallel, max_tokens: int = MAX_TOKENS, **options: Any) -> tuple[int, ...]:
    given: dict[str, Any] = dict(top_k=SHAPE.top_k, activation=SHAPE.activation)
    mine = part_of(whole_layer(), ep)
    return mxpert.warm_up(mine, max_tokens, expert_parallel=ep, **given | options)


def check_clean(ep: ExpertParallel) -> None:
    """The exchange computes what one rank does, and all ranks are in step."""
    weights, given = whole_layer(), tokens()
    for _ in range(2):
        found = run(ep, part_of(weights, ep), given)
        assert_close_relative(found, judge(weights, given), FLOAT32, "after warm_up")
    ep.check()


def ranks_run_the_same_counts() -> None:
    for transport in TRANSPORTS:
        for format, wire in (("bf16", "bf16"), ("mxfp8", "mxfp8")):
            ep = make(transport=transport, wire_format=wire)
            assert warm(ep, activation_format=format) == ()  # the reference compiles nothing
            seen: list[tuple[int, ...]] = []
            with compiling():
                counts = warm(
                    ep,
                    activation_format=format,
                    progress=lambda *step, seen=seen: seen.append(step),
                )
            assert counts == COUNTS
            rows = size() * MAX_TOKENS
            alone = [rows] if transport is Transport.GATHER else [0, *range(1, rows + 1)]
            wanted = [*alone, *COUNTS, COUNTS[-1]]
            total = len(alone) + len(COUNTS)
            assert seen == [(done, total, count) for done, count in enumerate(wanted)]
            if wire == "bf16":
                check_clean(ep)


def views_are_warmed_up() -> None:
    ep = make()
    with compiling():
        assert warm(ep.with_max_tokens(2), 2) == (0, 1, 2)
        assert warm(ep.with_max_tokens(5), 3) == (0, 1, 2, 3)
    check_clean(ep)


def slow_compilation_loses_nobody() -> None:
    """One rank compiles for longer than an exchange waits."""
    for transport in TRANSPORTS:
        ep = make(transport=transport, timeout_s=OTHERS_WAIT_S)
        started = time.monotonic()
        with compiling(3 * OTHERS_WAIT_S):
            warm(ep, 2)
        assert time.monotonic() - started > 3 * OTHERS_WAIT_S
        check_clean(ep)


def ranks_end_together() -> None:
    """A rank whose last run takes long holds the others in warm_up."""
    ep = make()
    together = module.run_together
    delay = 1.0

    def check() -> None:
        time.sleep(delay * (rank() == 0))

    def last(ranks: Any, run: Any, counts: Any, step: Any) -> None:
        with mock.patch.object(ranks, "check", check):
            together(ranks, run, counts, step)

    started = time.monotonic()
    with compiling(), mock.patch.object(module, "run_together", last):
        warm(ep, 1)
    assert time.monotonic() - started >= delay
    check_clean(ep)


def nothing_is_sent_before_the_checks() -> None:
    ep, weights = make(), whole_layer()
    same: dict[str, Any] = dict(top_k=SHAPE.top_k, activation=SHAPE.activation)
    mine = part_of(weights, ep)
    for changes, text in (
        (dict(max_tokens=MAX_TOKENS + 1), f"warm_up: max_tokens — need at most {MAX_TOKENS}"),
        (dict(max_tokens=0), "warm_up: max_tokens"),
        (dict(top_k=2), r"topk_ids.shape\[1\] — need 3, got 2"),
        (dict(weights=weights), "experts of rank"),
        (dict(expert_map=ep.expert_map), "expert_map — need None with expert_parallel"),
        (dict(activation_format="a3w4"), "activation_format"),
    ):
        options = dict(weights=mine, max_tokens=1, expert_parallel=ep) | same | changes
        with refused(text):
            mxpert.warm_up(**options)
    with refused("warm_up: expert_parallel — need an mxpert.distributed.Expert", TypeError):
        mxpert.warm_up(mine, 1, expert_parallel="ep", **same)  # type: ignore[arg-type]
    narrow = make(wire_format="mxfp8")
    with refused("activation_format — need 'mxfp8' with wire_format='mxfp8'"):
        warm(narrow)
    check_clean(ep)


def errors_reach_every_rank() -> None:
    ep = make()
    with refused("warm_up: max_tokens — need the same on every rank"):
        warm(ep, 1 + rank())
    with refused("warm_up: slots a rank — need the same on every rank"):
        warm(ep.with_max_tokens(1 + rank()), 1)
    last = size() - 1
    if rank() == last:
        with refused("warm_up: max_tokens — need at least 1"):
            warm(ep, 0)
    else:
        with refused(f"rank {last} — need arguments that every rank accepts, got .*max_tokens"):
            warm(ep)

    def fail(*_: Any) -> None:
        raise RuntimeError("ptxas failed")

    with compiling():
        if rank() == last:
            with (
                mock.patch.object(module, "compile_alone", fail),
                pytest.raises(RuntimeError, match="ptxas failed"),
            ):
                warm(ep)
        else:
            with refused(f"rank {last} — need .*, got an error there: ptxas failed"):
                warm(ep)
    dist.barrier()
    check_clean(ep)
