"""Hunt for races of the SYMMETRIC exchange: graph replays, each compared on the device.

    PYTHONPATH=.:tests python tests/distributed/multi_gpu/hunt.py --replays 50000
    PYTHONPATH=.:tests python tests/distributed/multi_gpu/hunt.py --replays 200 --plant  # finds it

Each rank replays graphs of an epoch in the same order. Tokens, routing and delays (up to 50 µs
before each step, on either side) change with every replay, in the graph. Received rows and partial
rows are poisoned as early as the protocol allows. Prints the number of differing results of each
rank and ends with 1 if there are any.

Sets the variables of environment.py. More ranks than GPUs (--ranks 4) share them.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from mxpert.distributed import Transport
from mxpert.testing.problems import MODEL_SHAPES
from support.exchange import Case, Experts, Tokens, expected, poison, random_tokens, send
from support.gpu_delays import spin
from tests.distributed.multi_gpu import exchange_ranks as ranks
from tests.distributed.multi_gpu.environment import gpu_environment
from tests.distributed.multi_gpu.expert_parallel_ranks import make_layer

SETS = 32
"""Tokens and delays that a graph takes in turn."""
LONGEST_DELAY_NS = 50_000
STEPS = 3
"""Steps with a delay: dispatch, experts, combine."""
CHECK_EVERY = 2000
GPT_OSS = MODEL_SHAPES["gpt-oss-20b"]

Layer = Callable[[Tokens, Callable[[int], None]], torch.Tensor]
"""Runs an epoch; calls its second argument before each step."""


class Replayed:
    """One graph: the next set of tokens, an epoch, and the count of differing results.

    Args:
        layer: what is captured. sets: tokens, SETS of the same shape. wanted: their results.
    """

    def __init__(self, layer: Layer, sets: list[Tokens], wanted: torch.Tensor, seed: int) -> None:
        device = wanted.device
        generator = torch.Generator().manual_seed(seed)
        self._stacked = Tokens(
            *(torch.stack([getattr(each, name) for each in sets]) for name in vars(sets[0]))
        )
        self._wanted = wanted
        shape = SETS, STEPS, 1
        delays = torch.randint(0, LONGEST_DELAY_NS, shape, generator=generator)
        self._delays = delays.mul(torch.rand(shape, generator=generator) < 0.5).to(device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer = layer  # the graph reads what it holds
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._run(layer)
        torch.cuda.synchronize()
        dist.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._run(layer)

    def _run(self, layer: Layer) -> None:
        self._place.add_(1).remainder_(SETS)

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values.index_select(0, self._place)[0]

        tokens = Tokens(*(pick(part) for part in vars(self._stacked).values()))
        delays = pick(self._delays)
        out = layer(tokens, lambda step: spin(delays[step]))
        self.wrong.add_((out != pick(self._wanted)).any())  # NaN differs from everything

    def replay(self) -> None:
        self._graph.replay()


def exact_graphs(case: Case, bounds: tuple[int, ...]) -> tuple[list[Replayed], Any]:
    """Graphs of one exchange whose results are known exactly; dispatch or the sort waits."""
    exchange, experts = ranks.make(case), Experts(case, ranks.rank(), ranks.device())

    def layer(bound: int, waits: bool) -> Layer:
        def run(tokens: Tokens, delay: Callable[[int], None]) -> torch.Tensor:
            exchange._sections["partials"].view(torch.uint8).fill_(0xFF)
            delay(0)
            received, arrivals = send(exchange, tokens, bound, waits=waits)
            delay(1)
            rows = experts(received, arrivals)
            poison(received)
            out = torch.full(tokens.x.shape, torch.nan, device=rows.device)
            delay(2)
            exchange.combine(rows, received, out)
            return out

        return run

    graphs = []
    for bound in bounds:
        count = random.Random(100 * bound + ranks.rank()).randint(0, bound)
        fewer = replace(case, max_tokens=bound)
        sets = [
            random_tokens(fewer, ranks.rank(), epoch, count).to(ranks.device())
            for epoch in range(SETS)
        ]
        wanted = torch.stack([expected(case, tokens) for tokens in sets])
        for waits in (False, True):
            graphs.append(Replayed(layer(bound, waits), sets, wanted, ranks.rank()))
    return graphs, exchange


def layer_graphs(counts: tuple[int, ...]) -> tuple[list[Replayed], Any]:
    """Graphs of `fused_moe`, on a problem that is exact."""
    made = make_layer(Transport.SYMMETRIC, "mxfp8", "mxfp8", shape=GPT_OSS, max_tokens=max(counts))

    def run(tokens: Tokens, delay: Callable[[int], None]) -> torch.Tensor:
        delay(0)
        return made.run(tokens.x, tokens.weights, tokens.ids)

    graphs = []
    for count in counts:
        sets = [Tokens(*made.tokens(count, seed)) for seed in range(SETS)]
        wanted = torch.stack([made.judge(each.x, each.weights, each.ids) for each in sets])
        graphs.append(Replayed(run, sets, wanted, ranks.rank()))
    return graphs, made.ep


def _hunt(rank: int, arguments: argparse.Namespace, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    made = [exact_graphs(case, (case.max_tokens, 7, 1)) for case in ranks.cases()]
    made.append(layer_graphs((1, 64, 256)))
    graphs = [graph for graphs, _ in made for graph in graphs]
    if arguments.plant and rank == 0:
        graphs[0]._wanted[3].add_(1)
    order, pauses = random.Random(0), random.Random(rank)
    started = time.monotonic()
    for number in range(1, arguments.replays + 1):
        order.choice(graphs).replay()  # the same on every rank
        if pauses.random() < 0.001:
            time.sleep(pauses.random() * 0.01)
        if number % CHECK_EVERY == 0 or number == arguments.replays:
            for _, checked in made:
                checked.check()
            if rank == 0:
                print(f"{number} replays, {time.monotonic() - started:.0f} s", flush=True)
    wrong = sum(int(graph.wrong) for graph in graphs)
    print(f"rank {rank}: {wrong} of {arguments.replays} results differ", flush=True)
    dist.barrier()
    if wrong:
        sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plant", action="store_true", help="expect a wrong result on rank 0")
    arguments = parser.parse_args()
    with gpu_environment(), tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_hunt, (arguments, f"{folder}/store"), nprocs=arguments.ranks)
        except multiprocessing.ProcessExitedException as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
