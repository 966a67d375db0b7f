"""One to four tokens: depth split among CTAs of two stages, beside the layer in one launch.

    python -m benchmarks.moe.few_tokens --output benchmarks/results/nvidia-h100/few_tokens.json

Two stages have decode tiles of 8 rows, whose depth 1 to 6 CTAs share (`k_splits`) in stage 1, in
stage 2 or in both. The layer in one launch deals items of 64 rows and 128 of depth to all CTAs.
Every config is compared with float64 before it is timed. The dry run compiles the kernels and
launches nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import mxpert
from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.run import Run
from benchmarks.harness.script import Script, machine, parse_list, parse_tokens
from benchmarks.harness.tables import closing, conditions, page, row_table
from benchmarks.moe import warm_up
from benchmarks.moe.cells import FORMATS, NAMED, Cell, Inputs, Model, mean_hit, random_inputs
from benchmarks.moe.ours import ACTIVATION, Call, Truth, random_weights
from benchmarks.moe.protocol import DATA, DECODE_IDLE_SECONDS
from mxpert.cli.measure import RunWeights, check_gate, intermediate_sizes
from mxpert.configs import MoEConfig
from mxpert.core.describe import describe
from mxpert.core.problem import MoEProblem
from mxpert.moe.hopper import config as hopper
from mxpert.moe.weights import MoEWeights
from mxpert.testing.timing import time_graph

TOKENS = (1, 2, 4)
SPLITS = range(1, 7)
ONE_LAUNCH, HEURISTIC = "one launch", "heuristic"
REPEATS = 20
PROTOCOL = {
    "data": DATA,
    "power": "replays of a few milliseconds",
    "timing": f"CUDA-graph replays of 8 // T routings, in turns, L2 swept before each; medians of "
    f"{REPEATS}",
    "layer": "from logits, top-k and sort included",
    "a,b": "k_splits of stage 1 and of stage 2",
}


def configs_of(problem: MoEProblem) -> tuple[dict[str, MoEConfig], str | None]:
    """Configs by name, and why the layer does not fit into one launch."""
    first, tile = hopper.two_stage_heuristic(problem), hopper.tiles_of(problem)["decode8"]
    steps = [hopper._tiles_and_steps(problem, op)[1] for op in hopper.STAGE_OPS]
    own: Any = (first.gate_up, first.down)
    split = tuple(stage.k_splits for stage in own)
    pairs = [split, *((n, split[1]) for n in SPLITS), *((split[0], n) for n in SPLITS)]
    pairs += [(n, n) for n in SPLITS]
    found = {HEURISTIC: first}
    for pair in dict.fromkeys(pairs):
        if all(n <= most for n, most in zip(pair, steps, strict=True)):
            gate_up, down = (replace(tile, k_splits=n) for n in pair)
            found[f"{pair[0]},{pair[1]}"] = MoEConfig.of(gate_up, down)
    refused = hopper.few_tokens.unsupported(problem)
    if refused is None:
        found[ONE_LAUNCH] = hopper.few_tokens_config(problem)
    return found, refused


def call_of(
    config: MoEConfig, inputs: Inputs, weights: MoEWeights, k: int, activation: str
) -> Call:
    """A layer with a config, from logits."""

    def call() -> torch.Tensor:
        options: Any = dict(activation=ACTIVATION, activation_format=activation)
        with mxpert.override(backend="hopper", config=config):
            return mxpert.fused_moe_from_logits(inputs.x, weights, inputs.logits, k, **options)

    return call


def right_calls(
    run: Run,
    cell: Cell,
    calls: dict[str, list[Call]],
    weights: RunWeights,
    inputs: Inputs,
    activation: str,
) -> dict[str, list[Call]]:
    """Calls whose result of the first batch passes its gate; the others have failed."""
    truth = Truth.of(weights.plain, inputs, cell.model.k, activation)
    sizes = intermediate_sizes(truth.tokens.numel(), cell.model.k, weights.plain.intermediate_size)
    found = {}
    for name, each in calls.items():
        with run.blaming(str(cell), activation, name):
            result: Any = each[0]()
            error = truth.layer_error(result)
            check_gate(f"{cell} {activation} {name}", error, "layer", activation, sizes)
            found[name] = each
    return found


def measure_cell(run: Run, cell: Cell, weights: RunWeights, activation: str) -> None:
    """One row: times of all configs whose results are right, in turns."""
    model, batches = cell.model, random_inputs(cell, run.device)
    options: Any = dict(activation=ACTIVATION, activation_format=activation)
    layer = batches[0].x, weights.prepared, batches[0].logits, model.k
    problem = describe(mxpert.fused_moe_from_logits, *layer, **options)
    assert isinstance(problem, MoEProblem)
    configs, refused = configs_of(problem)
    calls = {
        name: [call_of(config, each, weights.prepared, model.k, activation) for each in batches]
        for name, config in configs.items()
    }
    row: Row = model.columns | dict(T=cell.tokens, activation=activation, refused=refused)
    row |= dict(us={}, us_spread={}, hit=None)
    if run.dry:
        for each in calls.values():
            each[0]()
        run.add(row | {"us": dict.fromkeys(calls)})
        return
    row["hit"] = mean_hit(batches, model.k)
    calls = right_calls(run, cell, calls, weights, batches[0], activation)
    time.sleep(DECODE_IDLE_SECONDS)
    failed: dict[str, Exception] = {}
    timings = time_graph(calls, device=run.device, repeats=REPEATS, failures=failed)
    for name, failure in failed.items():
        run.fail((str(cell), activation, name), failure)
    row["us"] = {name: each.us for name, each in timings.items()}
    row["us_spread"] = {name: each.high_us - each.low_us for name, each in timings.items()}
    run.add(row)


def measure(
    run: Run, models: Sequence[Model], tokens: Sequence[int], formats: Sequence[str]
) -> None:
    """All cells until the time limit."""
    for name in run.each([model.name for model in models]):
        model = NAMED[name]
        weights = _unwritten(model) if run.dry else random_weights(model, run.device)
        for cell in (Cell(model, count) for count in tokens):
            for activation in formats:
                with run.blaming(str(cell), activation, "*"):
                    measure_cell(run, cell, weights, activation)


def _unwritten(model: Model) -> RunWeights:
    weights = warm_up.unwritten_weights(model)
    return RunWeights(weights, weights)


# --- tables -------------------------------------------------------------------------------------


def best_split(row: Row) -> tuple[str, float]:
    """The fastest two-stage config and its µs."""
    two = {name: us for name, us in row["us"].items() if name not in (ONE_LAUNCH, HEURISTIC)}
    name = min(two, key=two.__getitem__)
    return name, two[name]


def ratio(row: Row) -> str:
    """Time of one launch over that of the fastest two stages."""
    one = row["us"].get(ONE_LAUNCH)
    return "–" if one is None else f"{one / best_split(row)[1]:.2f}"


COLUMNS: dict[str, Any] = {
    "layer": "{model}",
    "format": "{activation}",
    "T": "{T}",
    "heuristic, µs": lambda row: f"{row['us'][HEURISTIC]:.1f}",
    "best k_splits": lambda row: best_split(row)[0],
    "µs": lambda row: f"{best_split(row)[1]:.1f}",
    "one launch, µs": lambda row: (
        f"{row['us'][ONE_LAUNCH]:.1f}" if ONE_LAUNCH in row["us"] else row["refused"] or "wrong"
    ),
    "one launch / best": ratio,
}


def markdown(document: Row) -> str:
    """One line a cell, the protocol, what is missing."""
    meta = document["meta"]
    return page(
        "# One to four tokens",
        conditions(meta),
        row_table(document["rows"], COLUMNS),
        closing(meta, "{cell} {activation} {config}"),
    )


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--models", default=",".join(NAMED), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--formats", default="bf16,mxfp8", help="default: %(default)s")


def prepare(options: argparse.Namespace) -> tuple[Run, list[Model], list[int], list[str]]:
    """The document, models, token counts and formats."""
    run = Run.of(
        options,
        machine(options, *FACTS, protocol=PROTOCOL, ceilings={}),
        ("model", "T", "activation"),
        ("cell", "activation", "config"),
    )
    models = [NAMED[name] for name in parse_list(options.models, list(NAMED), "--models")]
    formats = parse_list(options.formats, FORMATS, "--formats")
    return run, models, parse_tokens(options.tokens), formats


def execute(
    options: argparse.Namespace, prepared: tuple[Run, list[Model], list[int], list[str]]
) -> int:
    """Measure; 0 if every config gave right results and has a time."""
    run, *what = prepared
    warm_up.measure_compiled(run, options, lambda: measure(run, *what))
    if not run.dry:
        print(row_table(list(run.rows.values()), COLUMNS))
    return run.end(SCRIPT, options, "models")


SCRIPT = Script(
    "few_tokens", __doc__, execute, prepare, add_options, limit=150.0, markdown=markdown
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
