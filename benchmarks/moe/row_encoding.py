"""What the kernel between the stages costs: layers with and without it, and the kernel alone.

    python -m benchmarks.moe.row_encoding --output benchmarks/results/nvidia-h100/row_encoding.json

Stage 1 writes bfloat16 rows; a kernel encodes them for stage 2. `without_us` is a layer whose
stage 2 reads rows that were encoded before the clock started: what a stage 1 that writes encoded
rows could reach at most. The results of both are compared with `mxpert.fused_moe` bit for bit. A
layer that splits the depth of stage 1 has no such kernel: its sums are encoded as they are added.
The dry run compiles the kernels and launches nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

import mxpert
from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.run import Run, times_of
from benchmarks.harness.script import Script, machine, parse_list
from benchmarks.harness.tables import closing, conditions, page, paragraphs, pivot
from benchmarks.moe import warm_up
from benchmarks.moe.cells import (
    FORMATS,
    NAMED,
    NAMES,
    Cell,
    Inputs,
    Model,
    mean_hit,
    parse_cells,
    random_inputs,
)
from benchmarks.moe.figures import token_columns
from benchmarks.moe.ours import ACTIVATION, Call, random_weights
from benchmarks.moe.protocol import DATA, WARMUP, idle_seconds, repeats_of
from mxpert.configs import HopperKernel, MoEConfig
from mxpert.core.describe import describe
from mxpert.core.problem import MoEProblem, Op
from mxpert.errors import message
from mxpert.moe.hopper.config import two_stage_heuristic
from mxpert.moe.hopper.encode import SortedRows, encode_rows
from mxpert.moe.hopper.host import DOWN, GATE_UP
from mxpert.moe.inputs import GateUpInputs
from mxpert.moe.weights import MoEWeights
from mxpert.routing.plan import RoutingPlan
from mxpert.testing.timing import time_graph

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 8192, 32768)
PROTOCOL = {
    "data": DATA,
    "power": "idle 50 ms (10 ms at T ≤ 256) before each format of a cell",
    "timing": "CUDA-graph replays, the three variants in turns, L2 swept before each; us is the "
    "median; T < 8 rotates among 8 // T routings",
    "layer": "from logits, top-k and sort included, with dependent launches",
    "without": "the same, but stage 2 reads rows that were encoded before; same bits",
    "rows": "the row kernel of stage 2 alone, its input not in L2",
}


@dataclass(frozen=True)
class Layer:
    """One batch's layer, launched stage by stage.

    Args:
        rows: of stage 2, encoded ahead; None encodes them in the layer.
    """

    problem: MoEProblem
    config: MoEConfig
    weights: MoEWeights
    inputs: Inputs
    rows: SortedRows | None = None

    @classmethod
    def of(cls, weights: MoEWeights, inputs: Inputs, top_k: int, activation: str) -> Layer:
        """With the config of two stages that `mxpert.fused_moe` takes.

        Raises:
            ValueError: another backend than hopper would run.
        """
        routed = mxpert.route_topk(inputs.logits, top_k)
        options: dict[str, Any] = dict(activation=ACTIVATION, activation_format=activation)
        call = mxpert.fused_moe, inputs.x, weights, *routed
        chosen = mxpert.explain(*call, **options).resolution
        if chosen.kernel.backend != "hopper":
            text = message("row_encoding", activation, "the hopper backend", chosen.kernel.backend)
            raise ValueError(text)
        problem = describe(*call, **options)
        assert isinstance(problem, MoEProblem)
        config = chosen.config
        if config.gate_up.kernel is HopperKernel.FEW_TOKENS:
            config = two_stage_heuristic(problem)
        return cls(problem, config, weights, inputs)

    def plan(self) -> RoutingPlan:
        routed = mxpert.route_topk(self.inputs.logits, self.problem.top_k)
        unit = self.config.routing_block_m
        return mxpert.make_routing_plan(
            *routed, num_experts=self.problem.num_experts, routing_block_m=unit
        )

    def first(self, plan: RoutingPlan, schedules: dict[Any, Any]) -> torch.Tensor | SortedRows:
        """Stage 1, as the layer runs it."""
        tokens = GateUpInputs(self.inputs.x, self.weights, plan)
        num_rows = plan.max_blocks * plan.routing_block_m
        config: Any = self.config.gate_up
        return GATE_UP.run(self.problem, config, tokens, num_rows, schedules)

    def encode(self, h: torch.Tensor, plan: RoutingPlan) -> SortedRows:
        """The row kernel of stage 2, as the layer runs it."""
        num_rows = plan.max_blocks * plan.routing_block_m
        options = self.problem.options
        return encode_rows(h, plan, num_rows, options, scatter=False, release_first=True)

    def run(self) -> torch.Tensor:
        """[T, H], from logits."""
        plan, schedules, config = self.plan(), {}, self.config.down
        second: Any = config
        h = self.first(plan, schedules)
        rows = h if self.rows is None else self.rows
        return DOWN.run(self.problem, second, rows, self.weights, plan, None, schedules)


def variants_of(layers: Sequence[Layer]) -> dict[str, list[Call]]:
    """Calls by variant; none where stage 1 encodes its sums itself."""
    found: dict[str, list[Call]] = {"layer": [], "without": [], "rows": []}
    for layer in layers:
        plan = layer.plan()
        h = layer.first(plan, {})
        if isinstance(h, SortedRows):
            return {}
        ready = Layer(
            layer.problem, layer.config, layer.weights, layer.inputs, layer.encode(h, plan)
        )
        found["layer"].append(layer.run)
        found["without"].append(ready.run)
        found["rows"].append(functools.partial(layer.encode, h, plan))
    return found


def check_same(layer: Layer, calls: dict[str, list[Call]]) -> None:
    """Both forms of the layer give the bits of `mxpert.fused_moe` with its config.

    Raises:
        ValueError: they do not.
    """
    options = layer.problem.options
    routed = mxpert.route_topk(layer.inputs.logits, layer.problem.top_k)
    with mxpert.override(backend="hopper", config=layer.config):
        right = mxpert.fused_moe(
            layer.inputs.x,
            layer.weights,
            *routed,
            activation=ACTIVATION,
            activation_format=options.activation_format,
        )
    for name in ("layer", "without"):
        mine = calls[name][0]()
        assert isinstance(mine, torch.Tensor)
        if not torch.equal(mine, right):
            raise ValueError(message("row_encoding", name, "the bits of fused_moe", "others"))


def measure_format(run: Run, cell: Cell, weights: MoEWeights, activation: str) -> None:
    """One row: times of the variants, in turns."""
    batches = random_inputs(cell, run.device)
    layers = [Layer.of(weights, inputs, cell.model.k, activation) for inputs in batches]
    calls = variants_of(layers)
    row: Row = {
        **cell.model.columns,
        **dict(T=cell.tokens, activation=activation, op=Op.FUSED_MOE.value),
        "hit": None if run.dry else mean_hit(batches, cell.model.k),
        "config": str(layers[0].config),
        "times": {},
    }
    if run.dry:
        for each in (call for of_variant in calls.values() for call in of_variant):
            each()
    elif calls:
        check_same(layers[0], calls)
        torch.cuda.synchronize()
        time.sleep(idle_seconds(cell.tokens))
        repeats = repeats_of(cell.tokens)
        timings = time_graph(calls, device=run.device, repeats=repeats, warmup=WARMUP)
        row["times"] = {name: times_of(timing) for name, timing in timings.items()}
    run.add(row)


def measure(run: Run, cells: Sequence[Cell], formats: Sequence[str]) -> None:
    """All cells until the time limit; a format that fails leaves the others."""
    for model, wanted in itertools.groupby(run.each(cells), lambda cell: cell.model):
        weights = warm_up.unwritten_weights(model) if run.dry else _prepared(model)
        for cell in wanted:
            for activation in formats:
                with run.blaming(str(cell), activation):
                    measure_format(run, cell, weights, activation)
        del weights


def _prepared(model: Model) -> MoEWeights:
    return random_weights(model, torch.device("cuda")).prepared


# --- tables -------------------------------------------------------------------------------------


def gain_table(rows: Sequence[Row], activation: str) -> str:
    """Model by T: µs of the layer, and the share that goes without the row kernel."""
    chosen = [row for row in rows if row["activation"] == activation]
    cells = {(row["model"], f"T = {row['T']}"): gain_text(row["times"]) for row in chosen}
    columns = token_columns(row["T"] for row in chosen)
    return pivot(f"{NAMES[activation]}: layer, µs (without the row kernel)", cells, columns)


def gain_text(times: Row) -> str:
    """Time of the layer, and how much less it takes without the kernel."""
    if not times:
        return "no such kernel"
    layer, without = times["layer"]["us"], times["without"]["us"]
    return f"{layer:.0f} ({100 * (without / layer - 1):+.1f} %)"


def share_table(rows: Sequence[Row]) -> str:
    """Format by T: percent of a layer's time that goes without the kernel, mean and largest."""
    shares: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["times"]:
            layer, without = (row["times"][name]["us"] for name in ("layer", "without"))
            shares.setdefault((row["activation"], row["T"]), []).append(100 * (1 - without / layer))
    cells = {
        (NAMES[activation], f"T = {tokens}"): f"{fmean(found):.1f} ({max(found):.1f})"
        for (activation, tokens), found in sorted(
            shares.items(), key=lambda each: (FORMATS.index(each[0][0]), each[0][1])
        )
    }
    columns = token_columns(tokens for _, tokens in shares)
    return pivot("less time, %: mean over models (largest)", cells, columns)


def kernel_table(rows: Sequence[Row], activation: str) -> str:
    """Model by T: µs of the row kernel alone."""
    chosen = [row for row in rows if row["activation"] == activation and row["times"]]
    cells = {
        (row["model"], f"T = {row['T']}"): f"{row['times']['rows']['us']:.1f}" for row in chosen
    }
    columns = token_columns(row["T"] for row in chosen)
    return pivot(f"{NAMES[activation]}: the row kernel alone, µs", cells, columns)


def markdown(document: Row) -> str:
    """Both tables of every format, the protocol, what is missing."""
    rows, meta = document["rows"], document["meta"]
    formats = [each for each in FORMATS if any(row["activation"] == each for row in rows)]
    return page(
        "# The kernel between the stages",
        conditions(meta),
        paragraphs(*(gain_table(rows, each) for each in formats)),
        paragraphs(*(kernel_table(rows, each) for each in formats)),
        closing(meta, "{cell} {activation}"),
    )


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    parser.add_argument("--models", default=",".join(NAMED), help="default: %(default)s")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: %(default)s")
    warm_up.add_option(parser)


def prepare(options: argparse.Namespace) -> tuple[Run, list[Cell], list[str]]:
    """The document, the cells and the formats."""
    cells = parse_cells(options.models, options.tokens)
    run = Run.of(
        options,
        machine(options, *FACTS, protocol=PROTOCOL, ceilings={}),
        ("model", "T", "activation"),
        ("cell", "activation"),
    )
    return run, cells, parse_list(options.formats, FORMATS, "--formats")


def execute(options: argparse.Namespace, prepared: tuple[Run, list[Cell], list[str]]) -> int:
    """Measure; 0 if every cell that was started has its times."""
    run, cells, formats = prepared
    warm_up.measure_compiled(
        run, options, lambda: measure(run, cells, formats), lambda: warm_up.start(cells, formats)
    )
    return run.end(SCRIPT, options)


SCRIPT = Script(
    "row_encoding", __doc__, execute, prepare, add_options, limit=240.0, markdown=markdown
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
