"""Random layers over several ranks against one rank with all experts; for tests and long hunts.

    PYTHONPATH=.:tests python -m distributed.random_layers --ranks 3 --seconds 600
    TRITON_INTERPRET=1 PYTHONPATH=.:tests python -m distributed.random_layers \\
        --transports symmetric

Every rank draws the same problem from its number, and then its own tokens. The judge runs this
rank's tokens with all experts. A failure prints the number, so that ``--first`` repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import mxpert
from mxpert import ClampedSiLU, Combine, GateUpOrder, MoEWeights, ScaleRule, SiLU, SwiGLU
from mxpert.distributed import ExpertParallel, Placement, Transport
from mxpert.testing.numerics import assert_close_relative, assert_exact
from mxpert.testing.problems import MoEShape, random_moe_problem
from tests.distributed.ranked_layer import (
    FLOAT32,
    TRANSPORTS,
    Parts,
    Tokens,
    check_bf16,
    judge,
    make,
    part_of,
    run,
)

ACTIVATIONS = (SwiGLU(), SwiGLU(1.0, 3.0), SiLU(), ClampedSiLU())
ROUTINGS = ("any", "twice", "one rank", "foreign", "none", "half none")
SUITE = 24
"""Problems of a run of the suite."""
REPORT_EVERY = 50
CALLS = 3
"""Calls of one object; the last one repeats the one before it."""


@dataclass(frozen=True)
class Problem:
    """What all ranks of one problem agree on.

    Args:
        shape: of the layer. placement: of its experts; None is the default.
        transport, wire, combine_dtype: of the object. max_tokens: its slots; bound: those of calls.
        counts: tokens of each rank. routing: one of `ROUTINGS` for each rank.
        quantised: whether x arrives as MXFP8. strided: whether x is a view with gaps.
        wide_ids: whether ids are int64. options: of `fused_moe`.
    """

    shape: MoEShape
    placement: Placement | None
    transport: Transport
    wire: str
    combine_dtype: torch.dtype
    max_tokens: int
    bound: int
    counts: tuple[int, ...]
    routing: tuple[str, ...]
    quantised: bool
    strided: bool
    wide_ids: bool
    weights_dtype: torch.dtype
    has_out: bool
    options: dict[str, Any]


def draw(number: int, size: int, transports: tuple[Transport, ...]) -> Problem:
    """Problem `number` for `size` ranks; the same on every rank."""
    pick = random.Random(f"{number} {size}")
    experts = pick.randint(size, 12)
    shape = MoEShape(
        hidden_size=32 * pick.randint(1, 7),
        intermediate_size=32 * pick.randint(1, 3),
        num_experts=experts,
        top_k=pick.randint(1, min(8, experts)),
        activation=pick.choice(ACTIVATIONS),
        gate_up_order=pick.choice(list(GateUpOrder)),
        has_bias=pick.random() < 0.5,
    )
    wire = pick.choice(("bf16", "mxfp8"))
    formats = ("mxfp8",) if wire == "mxfp8" else ("bf16", "mxfp8", "mxfp4", "fp8_token")
    most = pick.choice((1, 2, 5, 9, 17))
    bound = pick.randint(1, most)
    counts = tuple(pick.choice((0, 1, bound, pick.randint(0, bound))) for _ in range(size))
    quantised = wire == "mxfp8" and pick.random() < 0.4
    return Problem(
        shape=shape,
        placement=pick.choice((None, _placement(pick, experts, size))),
        transport=pick.choice(transports),
        wire=wire,
        combine_dtype=pick.choice((torch.float32, torch.float32, torch.bfloat16)),
        max_tokens=most,
        bound=bound,
        counts=counts,
        routing=tuple(pick.choice(ROUTINGS) for _ in range(size)),
        quantised=quantised,
        strided=not quantised and pick.random() < 0.3,
        wide_ids=pick.random() < 0.3,
        weights_dtype=pick.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        has_out=pick.random() < 0.3,
        options=dict(
            activation=shape.activation,
            activation_format=pick.choice(formats),
            scale_rule=pick.choice(list(ScaleRule)),
            apply_router_weight_on_input=pick.random() < 0.3,
            combine=pick.choice((Combine.REDUCE, Combine.REDUCE, Combine.ATOMIC)),
        ),
    )


def _placement(pick: random.Random, experts: int, size: int) -> Placement:
    """Each expert on a random rank and sometimes on others; local ids in random order."""
    holders = [{pick.randrange(size)} for _ in range(experts)]
    for chosen in holders:
        chosen |= {rank for rank in range(size) if pick.random() < 0.15}
    for rank in range(size):
        if not any(rank in chosen for chosen in holders):
            pick.choice(holders).add(rank)
    maps = torch.full((size, experts), -1, dtype=torch.int32)
    for rank in range(size):
        mine = [expert for expert, chosen in enumerate(holders) if rank in chosen]
        pick.shuffle(mine)
        maps[rank, mine] = torch.arange(len(mine), dtype=torch.int32)
    return Placement(maps)


def own_tokens(problem: Problem, rank: int, seed: int) -> Tokens:
    """Tokens of one rank; those without an expert hold NaN, and so do weights without one."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    count, top_k = problem.counts[rank], problem.shape.top_k
    experts, hidden = problem.shape.num_experts, problem.shape.hidden_size

    def draw_ids(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count, top_k), generator=generator)

    routing = problem.routing[rank]
    ids = draw_ids(0, experts)
    if routing == "twice":
        ids[:, top_k // 2 :] = ids[:, :1]
    elif routing == "one rank":
        ids = draw_ids(0, 1) + experts - 1
    elif routing == "foreign":
        ids = draw_ids(-3, experts + 3)
        if problem.wide_ids:
            ids = ids + (draw_ids(0, 8) == 0) * (1 << 33)
    elif routing == "none":
        ids = torch.full_like(ids, -1)
    elif routing == "half none":
        ids[::2] = -1
    known = (ids >= 0) & (ids < experts)
    x = torch.randn((count, hidden), generator=generator).bfloat16()
    x[~known.any(1)] = torch.nan
    weights = torch.rand((count, top_k), generator=generator)
    weights[~known] = torch.nan
    if problem.strided:
        x = torch.cat([x, x], 1)[:, :hidden]
    rows = (
        mxpert.quantize(x, "mxfp8", scale_rule=problem.options["scale_rule"])
        if problem.quantised
        else x
    )
    ids = ids if problem.wide_ids else ids.int()
    return Tokens(rows, weights.to(problem.weights_dtype), ids)


def _judged(tokens: Tokens, problem: Problem) -> Tokens:
    """The tokens for the judge: no NaN, which `Parts` would spread by its zero weights."""
    known = (tokens.ids >= 0) & (tokens.ids < problem.shape.num_experts)
    ids = torch.where(known, tokens.ids, -1).int()
    return replace(tokens, ids=ids, weights=torch.where(known, tokens.weights, 0))


def check_problem(number: int, transports: tuple[Transport, ...]) -> None:
    """Run a problem on all ranks, and compare this rank's results.

    Raises:
        AssertionError: a result is wrong.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    problem = draw(number, size, transports)
    shape = problem.shape
    weights = random_moe_problem(shape, 0, seed=number).weights
    ep = make(
        shape,
        max_tokens=problem.max_tokens,
        placement=problem.placement,
        transport=problem.transport,
        wire_format=problem.wire,
        combine_dtype=problem.combine_dtype,
    )
    mine, view = part_of(weights, ep), ep.with_max_tokens(problem.bound)
    results: list[torch.Tensor] = []
    for call in range(CALLS):
        given = own_tokens(problem, rank, 10 * number + min(call, 1))
        out = None
        if problem.has_out:
            out = torch.full((given.ids.shape[0], shape.hidden_size), torch.nan)
        results.append(run(view, mine, given, **problem.options, out=out))
        assert out is None or results[-1] is out
        _check_result(results[-1], ep, weights, _judged(given, problem), problem)
    assert_exact(results[-1], results[-2], "the same call again")
    ep.check()
    ep.close()


def _check_result(
    actual: torch.Tensor, ep: ExpertParallel, weights: MoEWeights, given: Tokens, problem: Problem
) -> None:
    if problem.combine_dtype == torch.float32:
        expected = judge(weights, given, **problem.options)
        assert_close_relative(actual, expected, FLOAT32, "float32 wire")
    else:
        check_bf16(actual, Parts.of(ep, weights, given, **problem.options))


def random_layers() -> None:
    """The problems that every run of the suite has."""
    for number in range(SUITE):
        check_problem(number, TRANSPORTS)


def _hunt(rank: int, arguments: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.interpreter import install

        install()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    transports = tuple(map(Transport, arguments.transports.split(",")))
    started, number = time.monotonic(), arguments.first
    while True:
        more = [number < arguments.last and time.monotonic() - started < arguments.seconds]
        dist.broadcast_object_list(more)
        if not more[0]:
            break
        try:
            check_problem(number, transports)
        except BaseException:
            print(f"rank {rank}: problem {number}", file=sys.stderr, flush=True)
            raise
        number += 1
        if rank == 0 and number % REPORT_EVERY == 0:
            print(f"{number} problems, {time.monotonic() - started:.0f} s", flush=True)
    if rank == 0:
        print(f"{number - arguments.first} problems on {arguments.ranks} ranks: all right")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transports", default="gather,all_to_all")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--last", type=int, default=1 << 40, help="number after the last problem")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_hunt, (arguments, f"{folder}/store"), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
