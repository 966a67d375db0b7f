"""What an FP8 copy of MXFP4 weights gains in prefill, and the memory that it takes.

    python -m benchmarks.moe.fp8_copies --output benchmarks/results/nvidia-h100/fp8_copies.json

The GEMMs of both stages and the whole layer, with `prepare()` and with `prepare(keep_fp8=True)`.
Both forms of the weights are compared with float64 before they are timed, and their results with
each other bit for bit. `reads_copy` says whether all GEMMs of a row were launched on the copy: with
few rows an expert they read the 4-bit weights. The dry run compiles the kernels and launches
nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.run import Run, times_of
from benchmarks.harness.script import Script, machine, parse_list
from benchmarks.harness.tables import closing, conditions, page, pivot
from benchmarks.moe import warm_up
from benchmarks.moe.cells import (
    FORMATS,
    GEMM_STAGES,
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
from benchmarks.moe.ours import GEMM_KERNELS, Call, Ours, Truth, random_weights
from benchmarks.moe.protocol import (
    DATA,
    FEW_REPEATS_FROM,
    LEAST_REPEATS,
    MOST_REPEATS,
    WARMUP,
    idle_seconds,
    repeats_of,
)
from benchmarks.moe.rows import work_of
from mxpert.cli.measure import RunWeights
from mxpert.core.compilation import ThroughTriton
from mxpert.core.launch import record_launches
from mxpert.core.target import on_device
from mxpert.formats.tensor import MXTensor
from mxpert.moe.hopper.prefill_fp8 import _moe_gemm_prefill_fp8_kernel
from mxpert.testing.timing import Timing, time_graph

MODELS = ("gpt-oss-120b", "qwen3-235b", "dsv4-flash", "kimi-k2-tp4")
TOKENS = (1024, 2048, 4096, 8192, 32768)
ACTIVATIONS = tuple(name for name in FORMATS if name != "bf16")
"""Formats of rows with which kernels read a copy."""
STAGES = (*GEMM_STAGES, "layer")
ORDINARY, COPIES = FORMS = "ordinary", "fp8_copies"
PROTOCOL = {
    "data": DATA,
    "power": "idle 50 ms (10 ms at T ≤ 256) before each format of a cell",
    "timing": "CUDA-graph replays, stages and forms of the weights in turns, L2 swept before "
    f"each; us is the median of {MOST_REPEATS}, from T = {FEW_REPEATS_FROM} on of {LEAST_REPEATS}",
    "stages": "*_gemm: GEMM kernel with its epilogue and the list of its tiles; layer: from "
    "logits, top-k and sort included",
    "gate": "relative L2 to float64 of a few tokens, each form and stage, before it is timed",
    "same_bits": "whether both forms give the same bits: the intermediate, what stage 2 makes of "
    "it, the layer",
    "reads_copy": "whether all GEMMs were launched on the FP8 copy, where there is one",
}


def forms_of(model: Model, device: torch.device) -> dict[str, RunWeights]:
    """The same weights in both forms."""
    weights = random_weights(model, device)
    copied = weights.plain.prepare(device=device, keep_fp8=True)
    return {ORDINARY: weights, COPIES: RunWeights(weights.plain, copied)}


def unwritten_forms(model: Model) -> dict[str, RunWeights]:
    """As `forms_of`, for a dry run."""
    both = (warm_up.unwritten_weights(model, keep_fp8=form == COPIES) for form in FORMS)
    return {form: RunWeights(each, each) for form, each in zip(FORMS, both, strict=True)}


def copy_readers(mine: Ours, inputs: Inputs) -> dict[str, bool]:
    """Whether all GEMMs of a stage read the FP8 copy, as they are launched."""
    weights = mine._chosen_weights(inputs)[0]
    batch, found = mine._batch(weights, inputs), {}
    for stage in STAGES:
        with on_device(executor=ThroughTriton()), record_launches() as records:
            mine._call(stage.removesuffix("_gemm"), weights, batch)()
        names = (each.launch.kernel.__name__ for each in records)
        gemms = [name for name in names if name.startswith(GEMM_KERNELS)]
        own = _moe_gemm_prefill_fp8_kernel.__name__
        found[stage] = bool(gemms) and all(name == own for name in gemms)
    return found


def results_of(mine: Ours, inputs: Inputs) -> dict[str, list[torch.Tensor]]:
    """What each stage gives, in the order of tokens: plans of other units have other padding."""
    weights = mine._chosen_weights(inputs)[0]
    batch = mine._batch(weights, inputs)
    h, rows = batch.h, batch.plan.slot_rows.flatten().long()
    parts = [h.qdata, h.scale] if isinstance(h, MXTensor) else [h]
    down, layer = (mine._call(stage, weights, batch)() for stage in ("down", "layer"))
    assert isinstance(down, torch.Tensor)
    assert isinstance(layer, torch.Tensor)
    found = [part[rows] for part in parts], [down], [layer]
    return dict(zip(STAGES, found, strict=True))


def same_bits(ours: Mapping[str, Ours], inputs: Inputs) -> dict[str, bool]:
    """Whether both forms of the weights give the same bits, stage by stage."""
    one, other = (results_of(each, inputs) for each in ours.values())
    return {stage: all(map(torch.equal, one[stage], other[stage])) for stage in one}


Right = dict[str, tuple[dict[str, list[Call]], dict[str, float]]]
"""Form of the weights → its calls and their errors by stage."""


def right_calls(run: Run, cell: Cell, ours: Mapping[str, Ours], batches: Sequence[Inputs]) -> Right:
    """Forms of the weights whose results pass their gates; the others have failed."""
    mine, found = ours[ORDINARY], {}
    truth = Truth.of(mine.weights.plain, batches[0], cell.model.k, mine.activation)
    for form, mine in ours.items():
        with run.blaming(str(cell), mine.activation, form):
            found[form] = mine.prepare(cell, batches, STAGES, truth)
    return found


def time_right(run: Run, cell: Cell, activation: str, right: Right) -> dict[str, Timing]:
    """Times of all calls in turns, by "form stage"; a GEMM that was not found has failed."""
    calls = {
        f"{form} {stage}": each for form, (made, _) in right.items() for stage, each in made.items()
    }
    run.synchronize()
    time.sleep(idle_seconds(cell.tokens))
    repeats = repeats_of(cell.tokens)
    failed: dict[str, Exception] = {}
    timings = time_graph(calls, device=run.device, repeats=repeats, warmup=WARMUP, failures=failed)
    for name in (f"{form} {stage}" for form in right for stage in STAGES):
        if name not in timings:
            run.fail((str(cell), activation, name), failed.get(name, "no such GEMM was found"))
    return timings


def figures_of(
    cell: Cell, stage: str, hit: float, timing: Timing, error: float, ceilings: Mapping[str, float]
) -> Row:
    """Columns of one form: its time, rate and error."""
    rate = work_of(cell.model, cell.tokens, stage, hit).flops / timing.us / 1e6
    share = 100 * rate / ceilings["fp8_tflops"]
    return {**times_of(timing), "tflops": rate, "percent_of_fp8": share, "rel_l2": error}


def measure_format(run: Run, cell: Cell, forms: Mapping[str, RunWeights], activation: str) -> None:
    """One row a stage: times of both forms of the weights, in turns."""
    batches, model = random_inputs(cell, run.device), cell.model
    ours = {form: Ours(model, each, activation) for form, each in forms.items()}
    gib = {form: each.prepared.nbytes / 2**30 for form, each in forms.items()}
    rows: dict[str, Row] = {
        stage: model.columns
        | dict(T=cell.tokens, activation=activation, stage=stage, gib=gib, reads_copy=reads)
        | dict(hit=None, rows_per_expert=None, same_bits=None, times={})
        for stage, reads in copy_readers(ours[COPIES], batches[0]).items()
    }
    if run.dry:
        copy_readers(ours[ORDINARY], batches[0])  # compiles its kernels
    else:
        hit = mean_hit(batches, model.k)
        right, same = right_calls(run, cell, ours, batches), same_bits(ours, batches[0])
        timings = time_right(run, cell, activation, right)
        for stage, row in rows.items():
            row |= dict(hit=hit, rows_per_expert=cell.tokens * model.k / hit, same_bits=same[stage])
            for form, (_, errors) in right.items():
                if timing := timings.get(f"{form} {stage}"):
                    row["times"][form] = figures_of(
                        cell, stage, hit, timing, errors[stage], run.meta["ceilings"]
                    )
    for row in rows.values():
        run.add(row)


def measure(run: Run, cells: Sequence[Cell], formats: Sequence[str]) -> None:
    """All cells until the time limit; a format that fails leaves the others."""
    for model, wanted in itertools.groupby(run.each(cells), lambda cell: cell.model):
        forms = unwritten_forms(model) if run.dry else forms_of(model, run.device)
        for cell in wanted:
            for activation in formats:
                with run.blaming(str(cell), activation, "*"):
                    measure_format(run, cell, forms, activation)
        del forms


# --- tables -------------------------------------------------------------------------------------


def before_and_after(row: Row, column: str, form: str) -> str:
    """A column of both forms; a dash for a form without a time."""
    times = row["times"]
    return " → ".join(f"{times[name][column]:{form}}" if name in times else "–" for name in FORMS)


def layer_text(row: Row) -> str:
    """µs of a layer in both forms, and their ratio."""
    notes = [] if row["reads_copy"] else ["not read"]
    if row["same_bits"] is False:
        notes.append("other bits")
    if len(row["times"]) == len(FORMS):
        before, after = (row["times"][form]["us"] for form in FORMS)
        notes.insert(0, f"{after / before:.2f}")
    return before_and_after(row, "us", ".0f") + f" ({', '.join(notes)})" * bool(notes)


def layer_table(rows: Sequence[Row]) -> str:
    """Model and format by T: µs without and with the copy, and the ratio."""
    chosen = [row for row in rows if row["stage"] == "layer"]
    cells = {}
    for row in chosen:
        gib = " → ".join(f"{row['gib'][form]:.1f}" for form in FORMS)
        line = f"{row['model']}, {NAMES[row['activation']]} ({gib} GiB)"
        cells[line, f"T = {row['T']}"] = layer_text(row)
    corner = "layer, µs, without → with the copy (ratio)"
    return pivot(corner, cells, token_columns(row["T"] for row in chosen))


def gemm_table(rows: Sequence[Row]) -> str:
    """GEMM by T: TFLOP/s without and with the copy, and shares of the FP8 ceiling."""
    chosen = [row for row in rows if row["stage"] in GEMM_STAGES]
    cells = {}
    for row in chosen:
        stage = row["stage"].removesuffix("_gemm")
        line = f"{row['model']}, {NAMES[row['activation']]}, {stage}"
        shares = before_and_after(row, "percent_of_fp8", ".0f")
        cells[line, f"T = {row['T']}"] = f"{before_and_after(row, 'tflops', '.0f')} ({shares} %)"
    corner = "GEMM, TFLOP/s, without → with the copy (of cuBLAS fp8)"
    return pivot(corner, cells, token_columns(row["T"] for row in chosen))


def markdown(document: Row) -> str:
    """Both tables, how many results have the same bits, the protocol, what is missing."""
    rows, meta = document["rows"], document["meta"]
    compared = [row["same_bits"] for row in rows if row["same_bits"] is not None]
    return page(
        "# An FP8 copy of MXFP4 weights in prefill",
        conditions(meta),
        f"Both forms give the same bits in {sum(compared)} of {len(compared)} results.",
        layer_table(rows),
        gemm_table(rows),
        closing(meta, "{cell} {activation} {form}"),
    )


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    text = f"of {', '.join(NAMED)}; default: %(default)s"
    parser.add_argument("--models", default=",".join(MODELS), help=text)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    text = f"of {', '.join(ACTIVATIONS)}; default: %(default)s"
    parser.add_argument("--formats", default="mxfp8,fp8_token", help=text)
    warm_up.add_option(parser)


def prepare(options: argparse.Namespace) -> tuple[Run, list[Cell], list[str]]:
    """The document, the cells and the formats."""
    cells = parse_cells(options.models, options.tokens)
    run = Run.of(
        options,
        machine(options, *FACTS, protocol=PROTOCOL, ceilings={}),
        ("model", "T", "activation", "stage"),
        ("cell", "activation", "form"),
    )
    return run, cells, parse_list(options.formats, ACTIVATIONS, "--formats")


def execute(options: argparse.Namespace, prepared: tuple[Run, list[Cell], list[str]]) -> int:
    """Measure; 0 if both forms gave right results in every cell that was started."""
    run, cells, formats = prepared
    warm_up.measure_compiled(
        run,
        options,
        lambda: measure(run, cells, formats),
        lambda: [*warm_up.start(cells, formats), *warm_up.start(cells, formats, keep_fp8=True)],
    )
    return run.end(SCRIPT, options)


SCRIPT = Script(
    "fp8_copies", __doc__, execute, prepare, add_options, limit=240.0, markdown=markdown
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
