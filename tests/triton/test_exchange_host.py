"""Host work of a layer over SYMMETRIC, on the mock driver.

``python tests/triton/test_exchange_host.py`` times it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, SiLU
from mxpert.distributed import ExpertParallel, Transport, symmetric
from mxpert.distributed.symmetric import SymmetricExchange
from mxpert.formats.tensor import Layout
from mxpert.runtime.launch import Launch
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.launches import H200, as_if_on_h200, without_device
from support.replays import watched_replays

SHAPE = MoEShape(256, 128, 8, 2, SiLU(), GateUpOrder.CONCATENATED, True)
TOKENS = 4


@contextlib.contextmanager
def one_rank() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """The layer over SYMMETRIC with one rank, and `fused_moe` on the same tokens."""
    with (
        mock.patch.object(symmetric, "detect_target", return_value=H200),
        mock.patch.object(SymmetricExchange, "unavailable", return_value=None),
        without_device(record=False),
        as_if_on_h200(),
    ):
        ep = ExpertParallel(
            num_experts=SHAPE.num_experts,
            top_k=SHAPE.top_k,
            hidden_size=SHAPE.hidden_size,
            max_tokens=TOKENS,
            transport=Transport.SYMMETRIC,
            wire_format="mxfp8",
            device="cpu",
        )
        problem = random_moe_problem(SHAPE, TOKENS, device=torch.device("cpu"))
        weights = problem.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
        routed = problem.x, weights, problem.topk_weights, problem.topk_ids
        options = dict(activation=problem.activation, activation_format="mxfp8")
        yield (
            lambda: mxpert.fused_moe(*routed, **options, expert_parallel=ep),
            lambda: mxpert.fused_moe(*routed, **options),
        )


@pytest.fixture
def layer() -> Iterator[Callable[[], object]]:
    with one_rank() as (over_ranks, _):
        yield over_ranks


def test_the_local_layer_is_replayed(layer: Callable[[], object]) -> None:
    """Received rows are views of one buffer; a recording tells them apart."""
    for _ in range(3):
        layer()
    with watched_replays() as seen:
        layer()
    assert len(seen) == 1


def test_a_warm_layer_builds_no_launch(layer: Callable[[], object]) -> None:
    for _ in range(3):
        layer()
    with mock.patch.object(Launch, "__init__", side_effect=AssertionError("built a launch")):
        layer()


def _microseconds(call: Callable[[], object], repeats: int = 2000) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, time.perf_counter() - start)
    return best / repeats * 1e6


if __name__ == "__main__":
    with one_rank() as (over_ranks, alone):
        for call in (over_ranks, alone):
            for _ in range(10):
                call()
        times = _microseconds(over_ranks), _microseconds(alone)
    print(f"layer over ranks {times[0]:.1f} µs, fused_moe {times[1]:.1f} µs")
