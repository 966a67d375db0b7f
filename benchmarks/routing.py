"""Time route_topk and make_routing_plan on the device, and what an op call costs the host.

    python benchmarks/routing.py --output benchmarks/results/nvidia-h200/routing.json [--sweep]
    python benchmarks/routing.py --host-only [--dry-run]

Host times come with the number of launches, with what the same call costs where nothing is replayed
(mxpert/runtime/replay.py), and where every launch goes through Triton's own path, too. With
--dry-run they are those of a machine without a GPU: kernels are compiled for sm_90 (a minute, the
first time) and launched into nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from moe.cells import parse_tokens
from render import markdown_table

import mxpert
from mxpert.cli.report import environment, write_json
from mxpert.dispatch import resolve
from mxpert.errors import message
from mxpert.formats.tensor import Layout
from mxpert.ops.route import describe_routing_plan
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from mxpert.testing.timing import time_graph
from mxpert.weights import MoEWeights
from support.launches import as_if_on_h200, count_launches, through_triton, without_device
from support.replays import without_replay

ROUTERS = ((128, 4), (128, 8), (384, 4), (384, 8))
"""(experts, top k)."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
UNIT = 16
CALLS_PER_REPLAY = 8
"""A launch alone in its replay would be timed with the replay's own start."""

HOST_CALLS = 200
HOST_SHAPE = MoEShape(
    hidden_size=512, intermediate_size=256, num_experts=8, top_k=2, activation=mxpert.SwiGLU()
)
"""Small, so that the device keeps up with the host and no call waits for room in the queue."""


def device_rows(
    experts: int, top_k: int, tokens: int, device: torch.device, sweep: bool
) -> list[dict[str, Any]]:
    """µs of top-k, of the plan, and of both in one graph; with `sweep` of every plan config."""
    generator = torch.Generator(device).manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator, device=device)
    weights, ids = mxpert.route_topk(logits, top_k)

    def make_plan() -> object:
        return mxpert.make_routing_plan(weights, ids, num_experts=experts, routing_block_m=UNIT)

    def both() -> object:
        chosen = mxpert.route_topk(logits, top_k)
        return mxpert.make_routing_plan(
            chosen[0], chosen[1], num_experts=experts, routing_block_m=UNIT
        )

    calls: dict[str, Callable[[], object]] = {
        "route_topk": lambda: mxpert.route_topk(logits, top_k),
        "make_routing_plan": make_plan,
        "both": both,
    }
    if sweep:
        problem = describe_routing_plan(weights, ids, num_experts=experts, routing_block_m=UNIT)
        kernel = resolve(problem)[0]
        for config in kernel.configs(problem):
            calls[f"make_routing_plan {config}"] = lambda config=config: kernel.launch(
                problem,
                config,
                topk_ids=ids,
                topk_weights=weights,
                expert_map=None,
                num_local_tokens=None,
            )
    failures: dict[str, Exception] = {}
    timings = time_graph(
        {name: [call] * CALLS_PER_REPLAY for name, call in calls.items()},
        device=device,
        failures=failures,
        repeats=20 if device.type == "cuda" else 1,
    )
    for name, error in failures.items():
        print(f"E={experts} k={top_k} T={tokens} {name}: {error}", file=sys.stderr)
    return [
        {
            "op": name,
            "E": experts,
            "k": top_k,
            "T": tokens,
            "us": timing.us,
            "us_spread": timing.high_us - timing.low_us,
        }
        for name, timing in timings.items()
    ]


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


def host_rows(device: torch.device, calls: int) -> list[dict[str, Any]]:
    """Host µs of each public op, as it launches and through Triton's own path."""
    with contextlib.ExitStack() as stack:
        problem = random_moe_problem(HOST_SHAPE, 16, device=device)
        layout = None if device.type == "cuda" else Layout.HOPPER_FRAGMENT
        weights = problem.weights.prepare(device=device, layout=layout)
        if device.type != "cuda":
            stack.enter_context(without_device(record=False))
            stack.enter_context(as_if_on_h200())
        rows = []
        for name, call in host_calls(problem, weights).items():
            row = {
                "op": name,
                "launches": count_launches(call),
                "host_us": host_us(call, device, calls),
            }
            with without_replay():
                row["not_replayed_us"] = host_us(call, device, calls)
            with through_triton():
                row["through_triton_us"] = host_us(call, device, calls)
            rows.append(row)
        return rows


def host_calls(problem: MoEInputs, weights: MoEWeights) -> dict[str, Callable[[], object]]:
    """The public ops on a small layer, for both activation widths."""
    device = problem.x.device
    experts, top_k = HOST_SHAPE.num_experts, HOST_SHAPE.top_k
    logits = torch.randn(16, experts, device=device)
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
        ops[f"fused_moe {name}"] = lambda options=options: mxpert.fused_moe(
            x, weights, routing_weights, ids, **options
        )
    return ops


def tables(document: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    columns = sorted({row["T"] for row in document["device_rows"]})
    times = {
        (row["op"], row["E"], row["k"], row["T"]): row["us"] for row in document["device_rows"]
    }
    lines = [
        [
            f"{op} E={experts} k={top_k}",
            *(
                f"{times[op, experts, top_k, count]:.1f}"
                if (op, experts, top_k, count) in times
                else "–"
                for count in columns
            ),
        ]
        for op, experts, top_k in dict.fromkeys(key[:3] for key in times)
    ]
    host = [
        [
            row["op"],
            str(row["launches"]),
            *(f"{row[name]:.1f}" for name in ("host_us", "not_replayed_us", "through_triton_us")),
        ]
        for row in document["host_rows"]
    ]
    parts = [markdown_table(["device µs", *(f"T = {count}" for count in columns)], lines)]
    parts.append(
        markdown_table(
            ["warm eager call", "launches", "host µs", "not replayed", "through Triton"], host
        )
    )
    return "\n\n".join(parts if lines else parts[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="every config of the sort, too")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument(
        "--host-only",
        action="store_true",
        help="host times alone; a file is written to --output, if it is given",
    )
    parser.add_argument("--dry-run", action="store_true", help="a few calls on the CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    try:
        counts = parse_tokens(options.tokens)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(message("routing", "device", "a GPU", "none", "run with --dry-run"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = "reports" if options.dry_run else "benchmarks/results/nvidia-h200"
    path = options.output or ROOT / folder / "routing.json"
    facts = environment(device)
    document: dict[str, Any] = {
        "meta": facts | {"commit": options.commit or facts["commit"]},
        "device_rows": [],
        "host_rows": host_rows(
            device, HOST_CALLS if device.type == "cuda" or options.host_only else 5
        ),
    }
    if options.host_only:
        print(tables(document))
        if options.output:
            write_json(options.output, document)
        return 0
    for (experts, top_k), tokens in itertools.product(ROUTERS, counts):
        document["device_rows"] += device_rows(experts, top_k, tokens, device, options.sweep)
        write_json(path, document)
    print(tables(document))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
