"""What two options cost: fewer SMs (`num_sms`) and stochastic rounding.

    python -m benchmarks.grouped.options --output benchmarks/results/nvidia-h200/options.json

Grouped GEMMs and MoE layers with 1, half and all SMs; quantisers that round to nearest and
stochastically. Results with fewer SMs are compared bit for bit with those of all before they are
timed; the mean of 64 stochastic roundings is compared with the value.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mxpert
from benchmarks.grouped.cells import SHAPES, Operands, tiny
from benchmarks.grouped.ours import recipe_of
from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.run import Run, times_of
from benchmarks.harness.script import Script, machine, within
from benchmarks.harness.tables import absences, bullets, conditions, failures_of, page, row_table
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe.cells import NAMED, Cell, random_inputs
from benchmarks.moe.cells import tiny as tiny_model
from benchmarks.moe.ours import ACTIVATION, random_weights
from mxpert.core.target import detect_target
from mxpert.errors import message
from mxpert.testing.numerics import relative_l2
from mxpert.testing.timing import time_graph

MODELS = ("gpt-oss-120b", "dsv3-ep8")
TOKENS = (128, 1024)
FORMATS = ("bf16", "mxfp8")
GROUPED = (SHAPES[0], SHAPES[8])
ROUNDINGS = 64
REPEATS, FEW_REPEATS = 12, 3
PROTOCOL = {
    "timing": f"CUDA-graph replays in turns, L2 swept before each; median of {REPEATS}, and of "
    f"{FEW_REPEATS} with one SM, which has its turns alone",
    "power": "replays without pauses",
    "num_sms": "same bits as with all SMs, or no time",
    "stochastic": f"the mean of {ROUNDINGS} roundings of a slice is nearer to it than one rounding "
    "to nearest, or no time",
}


@dataclass(frozen=True)
class Case:
    """Variants of one call. check: raises where results are wrong."""

    op: str
    shape: str
    calls: Mapping[str, Callable[[], Any]]
    check: Callable[[], None]


def sms_of(device: torch.device) -> dict[str, int | None]:
    """The limits by name; none on a CPU, where no grid could keep to them."""
    count = detect_target(device).num_sms
    if device.type == "cpu":
        return dict.fromkeys(("no limit", "all", "half", "1"))
    return {"no limit": None, "all": count, "half": count // 2, "1": 1}


def check_same(name: str, calls: Mapping[str, Callable[[], torch.Tensor]]) -> None:
    """All variants give the same bits."""
    first, *others = (call() for call in calls.values())
    for limit, other in zip([*calls][1:], others, strict=True):
        if not torch.equal(first, other):
            raise ValueError(
                message("options", f"{name} num_sms={limit}", "the same bits", "others")
            )


def grouped_cases(device: torch.device) -> Iterator[Case]:
    """Forward GEMMs of two layers."""
    for wanted in GROUPED:
        shape = tiny(wanted) if device.type == "cpu" else wanted
        data = Operands.random(shape, "balanced", device)
        spans = recipe_of("row").spans(device)
        x = mxpert.quantize_dual(data.x, group_offsets=data.group_offsets, scale_span=spans.x)[0]
        w = mxpert.quantize_dual(data.weight, scale_span=spans.weight)[0]
        calls = {
            name: functools.partial(mxpert.grouped_gemm, x, w, data.group_offsets, num_sms=limit)
            for name, limit in sms_of(device).items()
        }
        yield Case(
            "grouped_gemm", str(wanted), calls, functools.partial(check_same, str(shape), calls)
        )


def layer_cases(device: torch.device) -> Iterator[Case]:
    """Layers of two models at few and many tokens."""
    for name in MODELS:
        model = tiny_model(NAMED[name]) if device.type == "cpu" else NAMED[name]
        weights = random_weights(model, device).prepared
        for tokens in TOKENS:
            inputs = random_inputs(Cell(model, 16 if device.type == "cpu" else tokens), device)[0]
            routed = mxpert.route_topk(inputs.logits, model.k)
            for activation in FORMATS:
                layer = functools.partial(
                    mxpert.fused_moe,
                    inputs.x,
                    weights,
                    *routed,
                    activation=ACTIVATION,
                    activation_format=activation,
                )
                calls = {
                    limit: functools.partial(layer, num_sms=number)
                    for limit, number in sms_of(device).items()
                }
                place = f"{name} T={tokens} {activation}"
                yield Case("fused_moe", place, calls, functools.partial(check_same, place, calls))


def check_mean(name: str, x: torch.Tensor, quantize: Callable[..., Any]) -> None:
    """The mean of many roundings is nearer to the values than one rounding to nearest."""
    values = x[:64].contiguous()
    mean = torch.zeros_like(values, dtype=torch.float64)
    for seed in range(ROUNDINGS):
        mean += quantize(values, stochastic_seed=seed).dequantize(torch.float64) / ROUNDINGS
    nearest = relative_l2(quantize(values).dequantize(torch.float64), values.double())
    found = relative_l2(mean, values.double())
    if not found < nearest:
        need = f"a relative L2 below {nearest:.1e}"
        raise ValueError(message("options", f"{name}: mean of roundings", need, f"{found:.1e}"))


def rounding_cases(device: torch.device) -> Iterator[Case]:
    """quantize and quantize_dual of the rows of a layer."""
    shape = tiny(SHAPES[0]) if device.type == "cpu" else SHAPES[0]
    data = Operands.random(shape, "balanced", device)
    seed = torch.ones(1, dtype=torch.int64, device=device)
    place = f"bfloat16 {list(data.x.shape)}"
    for format in ("mxfp4", "mxfp8"):
        one = functools.partial(mxpert.quantize, format=format)
        calls = {"nearest": functools.partial(one, data.x)}
        calls["stochastic"] = functools.partial(one, data.x, stochastic_seed=seed)
        check = functools.partial(check_mean, format, data.x, one)
        yield Case(f"quantize {format}", place, calls, check)
    both = functools.partial(mxpert.quantize_dual, data.x, group_offsets=data.group_offsets)
    calls = {"nearest": both, "stochastic": functools.partial(both, stochastic_seed=seed)}
    yield Case("quantize_dual", place, calls, lambda: None)


def measure_case(run: Run, case: Case) -> None:
    """Check, then time in turns; one SM apart, since it rests the others for milliseconds."""
    case.check()
    timings = {}
    for alone, repeats in ((False, REPEATS), (True, FEW_REPEATS)):
        calls = {name: [call] for name, call in case.calls.items() if (name == "1") is alone}
        repeats = repeats if run.device.type == "cuda" else 1
        if calls:
            timings |= time_graph(calls, device=run.device, repeats=repeats, warmup=1)
    base = next(iter(timings.values())).us
    for name, timing in timings.items():
        over = timing.us / base if base else math.nan
        row = {"op": case.op, "shape": case.shape, "option": name}
        run.add(row | times_of(timing) | {"over_default": over})


def measure(options: argparse.Namespace, run: Run) -> int:
    """All cases until the time limit; 0 if all that were started are right and have a time."""
    makers = {each.__name__: each for each in (grouped_cases, rounding_cases, layer_cases)}
    for name in run.each(makers):
        skipped: list[Case] = []
        for case in within(makers[name](run.device), run.deadline, skipped):
            with run.blaming(f"{case.op} {case.shape}"):
                measure_case(run, case)
        run.left += [f"{case.op} {case.shape}" for case in skipped]
    return run.end(SCRIPT, options)


def markdown(document: Row) -> str:
    """One table, the protocol, what is missing."""
    meta = document["meta"]
    columns = {
        "op": "{op}",
        "shape": "{shape}",
        "option": "{option}",
        "µs": "{us:.1f}",
        "over the first": "{over_default:.2f}",
    }
    return page(
        "# Fewer SMs, stochastic rounding",
        conditions(meta),
        row_table(document["rows"], columns),
        bullets(meta["protocol"]),
        absences("Not measured", failures_of(meta), meta["left"]),
    )


def prepare(options: argparse.Namespace) -> Run:
    """The document."""
    meta = machine(options, *FACTS, protocol=PROTOCOL, ceilings=measure_ceilings(options.device))
    return Run.of(options, meta, ("op", "shape", "option"))


SCRIPT = Script("options", __doc__, measure, prepare, limit=60.0, markdown=markdown)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
