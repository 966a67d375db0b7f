"""What ranks do in test_groups_lost.py: some die, some are late, and the others go on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from mxpert.distributed import ExpertParallel, PeerLostError, Transport
from mxpert.testing.numerics import assert_close_relative
from tests.distributed.ranked_layer import (
    FLOAT32,
    judge,
    make,
    part_of,
    rank,
    run,
    tokens,
    whole_layer,
)

TIMEOUT_S = 4.0
MARGIN_S = 4.0
"""What a busy machine may add to the time-out and the roll call of one second."""


def check_refusal(ep: ExpertParallel, lost: tuple[int, ...], out: torch.Tensor) -> None:
    """A call ends in time, names the lost ranks, writes nothing; later ones fail at once."""
    mine, given, started = part_of(whole_layer(), ep), tokens(2), time.monotonic()
    with pytest.raises(PeerLostError, match=r"need an answer within 4 s, got none") as caught:
        run(ep, mine, given, out=out)
    assert time.monotonic() - started < TIMEOUT_S + 1 + MARGIN_S
    assert caught.value.ranks == lost
    assert out.isnan().all()
    started = time.monotonic()
    for call in (ep.check, lambda: run(ep, mine, given, out=out)):
        with pytest.raises(PeerLostError) as again:
            call()
        assert again.value.ranks == lost
    assert time.monotonic() - started < 1
    ep.close()


def check_layer(ep: ExpertParallel) -> None:
    weights, given = whole_layer(), tokens(3, seed=4)
    actual = run(ep, part_of(weights, ep), given)
    assert_close_relative(actual, judge(weights, given), FLOAT32, "the group that is left")


def nan_result() -> torch.Tensor:
    return torch.full((2, 64), torch.nan)


def a_rank_is_late() -> None:
    """Rank 2 arrives after the time-out; afterwards all four make a new object."""
    ep = make(transport=Transport.GATHER, timeout_s=TIMEOUT_S)
    check_layer(ep)
    if rank() == 2:
        time.sleep(TIMEOUT_S + 2.5)
        with pytest.raises(PeerLostError):
            check_layer(ep)
        ep.close()
    else:
        check_refusal(ep, (2,), nan_result())
    dist.barrier()
    fresh = make(transport=Transport.GATHER)
    check_layer(fresh)
    fresh.close()


def a_rank_dies_before_it_sends() -> None:
    """Rank 3 dies after a layer; the other three make a new group."""
    ep = make(transport=Transport.ALL_TO_ALL, timeout_s=TIMEOUT_S)
    check_layer(ep)
    if rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    check_refusal(ep, (3,), nan_result())
    fresh = make(group=dist.new_group([0, 1, 2], use_local_synchronization=True))
    check_layer(fresh)
    fresh.close()


def a_rank_dies_between_dispatch_and_combine() -> None:
    """Of the three that are left rank 1 dies; ranks 0 and 2 go on."""
    group = dist.new_group([0, 1, 2], use_local_synchronization=True)
    ep = make(group=group, transport=Transport.GATHER, timeout_s=TIMEOUT_S)
    check_layer(ep)
    given = tokens(2)
    sent = ep.dispatch(given.x, given.weights, given.ids)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = torch.zeros(sent.topk_ids.shape[0], ep.hidden_size)
    with pytest.raises(PeerLostError) as caught:
        ep.combine(rows, sent)
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerLostError):
        ep.check()
    ep.close()
    fresh = make(group=dist.new_group([0, 2], use_local_synchronization=True))
    check_layer(fresh)
    fresh.close()


def rank_1_fails() -> None:
    """The others are busy, in no collective that could notice it."""
    if rank() == 1:
        raise ValueError("the cause")
    time.sleep(60)
