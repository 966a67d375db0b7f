"""Time route_topk and make_routing_plan on the device, and what an op call costs the host.

    python -m benchmarks.routing.run --output benchmarks/results/nvidia-h200/routing.json [--sweep]
    python -m benchmarks.routing.run --host-only [--dry-run]

Host times come with the number of launches, with what the same call costs where nothing is replayed
(mxpert/core/replay.py), and where every launch goes through Triton's own path, too. With
--dry-run they are those of a machine without a GPU: kernels are compiled for sm_90 (a minute, the
first time) and launched into nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import mxpert
from benchmarks.harness.document import Row
from benchmarks.harness.run import times_of
from benchmarks.harness.script import Script, machine, parse_tokens
from benchmarks.harness.tables import paragraphs, pivot, row_table
from mxpert.cli.report import write_json
from mxpert.core.describe import describe
from mxpert.core.registry import resolve
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.moe.weights import MoEWeights
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from mxpert.testing.timing import time_graph
from support.launches import H200, count_launches, through_triton, without_device
from support.replays import without_replay

ROUTERS = ((128, 4), (128, 8), (384, 4), (384, 8))
"""(experts, top k)."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
UNIT = 16
CALLS_PER_REPLAY = 8
"""A launch alone in its replay would be timed with the replay's own start."""

HOST_CALLS = 200
HOST_TOKENS = 16
HOST_SHAPE = MoEShape(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, activation=mxpert.SwiGLU()
)
"""Small, so that the device keeps up with the host and no call waits for room in the queue."""


def device_rows(
    experts: int, top_k: int, tokens: int, device: torch.device, sweep: bool
) -> list[Row]:
    """µs of top-k, of the plan, and of both in one graph; with `sweep` of every plan config."""
    generator = torch.Generator(device).manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    weights, ids = mxpert.route_topk(logits, top_k)

    options = dict(num_experts=experts, routing_block_m=UNIT)
    calls: dict[str, Callable[[], object]] = {
        "route_topk": lambda: mxpert.route_topk(logits, top_k),
        "make_routing_plan": lambda: mxpert.make_routing_plan(weights, ids, **options),
        "both": lambda: mxpert.make_routing_plan(*mxpert.route_topk(logits, top_k), **options),
    }
    if sweep:
        problem = describe(mxpert.make_routing_plan, weights, ids, **options)
        kernel = resolve(problem)[0]
        tensors = dict(topk_ids=ids, topk_weights=weights, expert_map=None, num_local_tokens=None)
        for config in kernel.configs(problem):
            launch = functools.partial(kernel.launch, problem, config, **tensors)
            calls[f"make_routing_plan {config}"] = launch
    failures: dict[str, Exception] = {}
    timings = time_graph(
        {name: [call] * CALLS_PER_REPLAY for name, call in calls.items()},
        device=device,
        failures=failures,
        repeats=20 if device.type == "cuda" else 1,
    )
    for name, error in failures.items():
        print(f"E={experts} k={top_k} T={tokens} {name}: {error}", file=sys.stderr)
    place = {"E": experts, "k": top_k, "T": tokens}
    return [{"op": name, **place, **times_of(timing)} for name, timing in timings.items()]


def host_us(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Median host time of a warm eager call: nothing waits for the device."""
    for _ in range(10):
        call()
    samples = []
    for index in range(calls):
        if device.type == "cuda" and index % 20 == 0:
            torch.cuda.synchronize()  # outside the timed part; keeps the launch queue short
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)


def host_rows(device: torch.device, calls: int) -> list[Row]:
    """Host µs of each public op, as it launches and through Triton's own path."""
    with contextlib.ExitStack() as stack:
        problem = random_moe_problem(HOST_SHAPE, HOST_TOKENS, device=device)
        layout = None if device.type == "cuda" else Layout.HOPPER_FRAGMENT
        weights = problem.weights.prepare(device=device, layout=layout)
        if device.type != "cuda":
            stack.enter_context(without_device(record=False))
            stack.enter_context(on_device(H200))
        rows = []
        for name, call in host_calls(problem, weights).items():
            row = {"op": name, "launches": count_launches(call)}
            row["host_us"] = host_us(call, device, calls)
            with without_replay():
                row["not_replayed_us"] = host_us(call, device, calls)
            with through_triton():
                row["through_triton_us"] = host_us(call, device, calls)
            rows.append(row)
        return rows


def host_calls(problem: MoEInputs, weights: MoEWeights) -> dict[str, Callable[[], object]]:
    """The public ops on a small layer, for both activation widths; the layer for one token, too."""
    device = problem.x.device
    experts, top_k = HOST_SHAPE.num_experts, HOST_SHAPE.top_k
    logits = torch.randn(HOST_TOKENS, experts, device=device)
    x, ids, routing_weights = problem.x, problem.topk_ids, problem.topk_weights
    plan = mxpert.make_routing_plan(routing_weights, ids, num_experts=experts, routing_block_m=UNIT)
    ops: dict[str, Callable[[], object]] = {
        "route_topk": lambda: mxpert.route_topk(logits, top_k),
        "make_routing_plan": lambda: mxpert.make_routing_plan(
            routing_weights, ids, num_experts=experts, routing_block_m=UNIT
        ),
        "quantize mxfp8": lambda: mxpert.quantize(x, "mxfp8"),
    }
    for name in ("bf16", "mxfp8"):
        options: dict[str, Any] = {"activation": problem.activation, "activation_format": name}
        h = mxpert.moe_gate_up(x, weights, plan, **options)
        ops[f"moe_gate_up {name}"] = lambda options=options: mxpert.moe_gate_up(
            x, weights, plan, **options
        )
        ops[f"moe_down {name}"] = lambda h=h: mxpert.moe_down(h, weights, plan)
        for tokens in (HOST_TOKENS, 1):
            given = x[:tokens], weights, routing_weights[:tokens], ids[:tokens]
            ops[f"fused_moe {name}, T = {tokens}"] = functools.partial(
                mxpert.fused_moe, *given, **options
            )
    return ops


HOST = {
    "warm eager call": "{op}",
    "launches": "{launches}",
    "host µs": "{host_us:.1f}",
    "not replayed": "{not_replayed_us:.1f}",
    "through Triton": "{through_triton_us:.1f}",
}


def tables(document: Row) -> str:
    """Both tables in Markdown."""
    rows = document["device_rows"]
    cells = {
        ("{op} E={E} k={k}".format(**row), f"T = {row['T']}"): f"{row['us']:.1f}" for row in rows
    }
    columns = [f"T = {count}" for count in sorted({row["T"] for row in rows})]
    times = pivot("device µs", cells, columns) if rows else ""
    return paragraphs(times, row_table(document["host_rows"], HOST))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="every config of the sort, too")
    text = "host times alone; a file is written to --output, if it is given"
    parser.add_argument("--host-only", action="store_true", help=text)


def counts_of(options: argparse.Namespace) -> list[int]:
    return parse_tokens(options.tokens)


def measure(options: argparse.Namespace, counts: Sequence[int]) -> int:
    """Measure, write the JSON, print the tables."""
    device, path = options.device, options.path
    calls = HOST_CALLS if device.type == "cuda" or options.host_only else 5
    document: Row = {
        "meta": machine(options),
        "device_rows": [],
        "host_rows": host_rows(device, calls),
    }
    if options.host_only:
        print(tables(document))
        if options.output:
            write_json(options.output, document)
        return 0
    for (experts, top_k), tokens in itertools.product(ROUTERS, counts):
        document["device_rows"] += device_rows(experts, top_k, tokens, device, options.sweep)
        write_json(path, document)
    print(f"{tables(document)}\nwrote {path}")
    return 0


SCRIPT = Script("routing", __doc__, measure, counts_of, add_options)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
