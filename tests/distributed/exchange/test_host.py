"""Host work of a layer over SYMMETRIC, on the mock driver.

``python tests/distributed/exchange/test_host.py`` times it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, SiLU
from mxpert.core.launch import Launch
from mxpert.core.target import on_device
from mxpert.distributed import ExpertParallel, Transport
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.launches import H200, without_device
from support.replays import Launches, check_interleaved, check_replay, watched_replays

SHAPE = MoEShape(256, 128, 8, 2, SiLU(), GateUpOrder.CONCATENATED, True)
MAX_TOKENS = 8


@contextlib.contextmanager
def on_mock_driver(*, record: bool) -> Iterator[Launches]:
    with without_device(record=record) as launches, on_device(H200):
        yield launches


def one_rank() -> ExpertParallel:
    return ExpertParallel(
        num_experts=SHAPE.num_experts,
        top_k=SHAPE.top_k,
        hidden_size=SHAPE.hidden_size,
        max_tokens=MAX_TOKENS,
        transport=Transport.SYMMETRIC,
        wire_format="mxfp8",
        device="cpu",
    )


class Layer:
    """Arguments of the layer, in newly allocated memory, and the memory of the exchange."""

    def __init__(self, ranks: ExpertParallel, num_tokens: int = 4) -> None:
        problem = random_moe_problem(SHAPE, num_tokens, device=torch.device("cpu"))
        self.weights = problem.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
        self.x, self.routing, self.ids = problem.x, problem.topk_weights, problem.topk_ids
        self.wide_ids, self.narrow = self.ids.long(), self.routing.bfloat16()
        self.codes = mxpert.quantize(self.x, "mxfp8")
        self.out = torch.empty_like(self.x)
        self.ranks = ranks
        self.resident = tuple(ranks.exchange.resident)  # type: ignore[attr-defined]

    def run(self, **changes: Any) -> torch.Tensor:
        given = dict(x=self.x, topk_weights=self.routing, topk_ids=self.ids) | changes
        options = dict(activation=SHAPE.activation, activation_format="mxfp8")
        return mxpert.fused_moe(
            weights=self.weights, **options, **dict(expert_parallel=self.ranks) | given
        )


CASES: dict[str, Callable[[Layer], torch.Tensor]] = {
    "bf16": Layer.run,
    "out": lambda layer: layer.run(out=layer.out),
    "codes": lambda layer: layer.run(x=layer.codes),
    "router-dtypes": lambda layer: layer.run(topk_weights=layer.narrow, topk_ids=layer.wide_ids),
    "float32": lambda layer: layer.run(out_dtype=torch.float32),
}


@pytest.fixture(autouse=True)
def launches() -> Iterator[Launches]:
    with on_mock_driver(record=True) as made:
        yield made


@pytest.fixture
def ranks() -> ExpertParallel:
    return one_rank()


@pytest.mark.parametrize("name", CASES)
def test_a_warm_layer_is_one_replay(ranks: ExpertParallel, launches: Launches, name: str) -> None:
    """The launches of dispatch, local layer and combine, with the exchange's own addresses."""
    with watched_replays() as seen:
        check_replay(launches, seen, lambda: Layer(ranks), CASES[name])
        assert len(launches) > 2
        layer = Layer(ranks)
        seen.clear()
        CASES[name](layer)
    assert len(seen) == 1


def test_views_and_token_counts_have_replays_of_their_own(
    ranks: ExpertParallel, launches: Launches
) -> None:
    other = one_rank()
    layers = [
        Layer(each, num_tokens)
        for each in (ranks, ranks.with_max_tokens(4), other)
        for num_tokens in (0, 1, 4)
    ]
    with watched_replays() as seen:
        check_interleaved(launches, seen, [(layer, layer.run) for layer in layers])


def test_a_warm_layer_builds_no_launch(ranks: ExpertParallel) -> None:
    layer = Layer(ranks)
    for _ in range(3):
        layer.run()
    with mock.patch.object(Launch, "__init__", side_effect=AssertionError("built a launch")):
        layer.run()


def test_a_warm_layer_still_checks_the_order(ranks: ExpertParallel) -> None:
    layer = Layer(ranks)
    for _ in range(3):
        layer.run()
    received = ranks.dispatch(layer.x, layer.routing, layer.ids)
    with pytest.raises(ValueError, match="dispatch and combine in turn"):
        layer.run()
    ranks.combine(torch.zeros(received.x.shape, dtype=torch.bfloat16), received)
    layer.run()
    ranks.close()
    with pytest.raises(ValueError, match="an open ExpertParallel"):
        layer.run()


def test_replays_do_not_keep_the_memory_of_the_exchange() -> None:
    ranks = one_rank()
    layer = Layer(ranks)
    for _ in range(3):
        layer.run()
    memory = weakref.ref(ranks.exchange)
    del ranks, layer
    assert memory() is None


def test_rows_with_gaps_are_not_recorded(ranks: ExpertParallel) -> None:
    """Their copies are made anew in every call."""
    layer = Layer(ranks)
    wide = torch.zeros(4, 2 * SHAPE.hidden_size, dtype=torch.bfloat16)
    with watched_replays() as seen:
        for _ in range(4):
            layer.run(x=wide[:, : SHAPE.hidden_size])
    assert not seen


def _microseconds(call: Callable[[], object], repeats: int = 500) -> float:
    """CPU time of a call: the least of 40 blocks."""
    best = float("inf")
    for _ in range(40):
        start = time.thread_time()
        for _ in range(repeats):
            call()
        best = min(best, time.thread_time() - start)
    return best / repeats * 1e6


if __name__ == "__main__":
    with on_mock_driver(record=False):
        layer = Layer(one_rank())
        calls = layer.run, lambda: layer.run(expert_parallel=None)
        for call in calls:
            for _ in range(10):
                call()
        times = [_microseconds(call) for call in calls]
    print(f"layer over ranks {times[0]:.1f} µs, fused_moe {times[1]:.1f} µs")
