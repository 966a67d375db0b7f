"""Set mxpert beside its peers: same GPU, same process, same routings, same clock.

    python -m benchmarks.moe.run --peers DIR --output benchmarks/results/nvidia-h200/moe.json

Each cell (model, T) is gated against float64, then every implementation that is there is captured
into CUDA graphs and replayed in turns. The JSON is whole after every cell; --resume continues it.
"""

from __future__ import annotations

import argparse
import functools
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.document import Document
from benchmarks.harness.faults import FATAL, FatalError, check_alive, describe
from benchmarks.harness.script import Script, Seconds, parse_list, parse_tokens, restart
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe import cells as plan
from benchmarks.moe import warm_up
from benchmarks.moe.cells import ACTIVATION_FORMATS, MODELS, STAGES, Cell, Inputs, Model
from benchmarks.moe.estimate import estimate
from benchmarks.moe.figures import line_name
from benchmarks.moe.layers import SUMMARY_TOKENS, layer_table
from benchmarks.moe.ours import Ours, Truth, random_weights
from benchmarks.moe.peer_gate import PeerGate
from benchmarks.moe.peers import (
    PEER_KEYS,
    PEERS,
    Peer,
    TritonKernels,
    add_to_path,
    asked_peers,
    make,
)
from benchmarks.moe.protocol import WARMUP, idle_seconds, make_meta, num_repeats
from benchmarks.moe.rows import KEY_COLUMNS, SCHEMA, Key, make_row, work_of
from mxpert.cli.measure import GateError, RunWeights
from mxpert.errors import require
from mxpert.testing.timing import BYTES_PER_MX_WEIGHT, Timing, time_graph, time_sustained

GPU_BYTES_FREE = 40 << 30
"""What results and graphs of a cell may take."""
WEIGHT_COPIES = 2 + len(PEER_KEYS)
"""Ours as stored and as prepared, and one for each peer."""
COMPILE_SECONDS = 45.0
"""A cell waits so long for a peer's compiler; the peer is then left to the second pass."""
NO_STAGE = "absent: one call computes the whole layer"
NO_GEMM = "absent: only the hopper backend has a GEMM that starts from encoded rows"
Timed = dict[str, list[Callable[[], object]]]


@dataclass
class Run:
    """What one invocation works with."""

    device: torch.device
    document: Document
    stages: list[str]
    formats: list[str]
    folder: Path | None
    peer_names: list[str]
    deadline: float
    peer_deadline: float
    sustained: bool
    compiler: Any = None
    warming: list[subprocess.Popen[str]] = field(default_factory=list)
    models: dict[str, ModelRun] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=Seconds)


@dataclass
class ModelRun:
    """Weights of one model, and the implementations that hold them."""

    weights: RunWeights
    ours: list[Ours]
    peers: dict[tuple[str, str], Peer | str]
    """(impl, activation) → the peer, or why it is absent."""


def make_room(run: Run, model: Model) -> None:
    """Drop weights of other models, the newest first, until those of this one fit."""
    stored = WEIGHT_COPIES * 3 * model.E * model.H * model.F * BYTES_PER_MX_WEIGHT
    while run.device.type == "cuda" and run.models:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] >= GPU_BYTES_FREE + stored:
            break
        run.models.popitem()


def build_model(run: Run, model: Model) -> ModelRun:
    """Weights and implementations of a model, made once."""
    if model.name in run.models:
        return run.models[model.name]
    make_room(run, model)
    with run.seconds.clock("our weights"):
        weights = random_weights(model, run.device)
    ours = [Ours(model, weights, name) for name in run.formats]
    built = run.models[model.name] = ModelRun(weights, ours, {})
    return built


def peer_keys(run: Run) -> list[tuple[str, str]]:
    """(impl, activation) of every peer that was asked for and has a requested width."""
    if run.folder is None:
        return []
    return asked_peers(run.formats, run.peer_names)


def make_peer(run: Run, model: Model, key: tuple[str, str]) -> Peer:
    """One peer with this model's weights."""
    folder, weights = run.folder, run.models[model.name].weights.plain
    require(folder is not None, "compare", "--peers", need="a directory", got=None)

    def seconds_left() -> float:
        return min(COMPILE_SECONDS, run.deadline - time.monotonic())

    return make(key, folder, model, weights, run.compiler, seconds_left)


def get_peer(run: Run, model: Model, key: tuple[str, str]) -> Peer:
    """A peer made before, or now; one that could not be made is not tried again.

    Raises:
        RuntimeError: why it is absent.
    """
    known = run.models[model.name].peers
    if key not in known:
        try:
            with run.seconds.clock(f"of which {key[0]}'s weights"):
                known[key] = make_peer(run, model, key)
            note = ": ".join(filter(None, ("present", getattr(known[key], "note", ""))))
            run.document.meta["peers"].setdefault("/".join(key), note)
        except Exception as error:
            check_alive(run.device)
            known[key] = f"absent: {describe(error)}"
            run.document.meta["peers"].setdefault("/".join(key), known[key])
            traceback.print_exc()
    found = known[key]
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def cell_key(cell: Cell, impl: str, activation: str, stage: str) -> Key:
    return cell.model.name, cell.tokens, cell.routing, impl, activation, stage


def blame(
    run: Run, cell: Cell, stage: str, timed: Timed, failed: dict[str, Exception], error: Exception
) -> None:
    """Note who may have stopped a whole stage, so that a restarted run goes on without them: the
    variants that failed, else every peer, else ours."""
    peers = [name for name in timed if not name.startswith(Ours.impl + "/")]
    for name in list(failed) or peers or list(timed):
        impl, activation, _ = name.split("/")
        run.document.fail(cell_key(cell, impl, activation, stage), describe(error))


def time_stage(
    run: Run, cell: Cell, stage: str, hit: float, timed: Timed, errors: dict[tuple[str, str], float]
) -> None:
    """Rows of one stage: all variants in turns, or each alone under load; the fastest of an
    implementation counts.

    Names of variants are ``impl/activation/variant``.
    """
    if not timed:
        return
    ceilings = run.document.meta["ceilings"]
    work = work_of(cell.model, cell.tokens, stage, math.ceil(hit))
    floor = work.floor_us(ceilings["read_tbs"] * 1e12, ceilings["bf16_tflops"] * 1e12)
    floor *= cell.rotations
    repeats, warmup = 1, 0
    if run.device.type == "cuda":
        repeats, warmup = num_repeats(floor), WARMUP
        torch.cuda.synchronize()
        time.sleep(idle_seconds(cell.tokens))
    failed: dict[str, Exception] = {}
    try:
        with run.seconds.clock("capture and replay"):
            if run.sustained:
                timings = time_sustained(timed, device=run.device, failures=failed)
            else:
                timings = time_graph(
                    timed, device=run.device, repeats=repeats, warmup=warmup, failures=failed
                )
            check_alive(run.device)
    except Exception as error:
        blame(run, cell, stage, timed, failed, error)
        check_alive(run.device)
        return
    best: dict[tuple[str, str], Timing] = {}
    for name, timing in timings.items():
        impl, activation, _ = name.split("/")
        if (impl, activation) not in best or timing.us < best[impl, activation].us:
            best[impl, activation] = timing
    for (impl, activation), timing in best.items():
        rel_l2 = errors.get((impl, activation))
        run.document.add(make_row(cell, hit, impl, activation, stage, timing, rel_l2, ceilings))
    for name, error in failed.items():
        impl, activation, _ = name.split("/")
        if (impl, activation) not in best:
            run.document.fail(cell_key(cell, impl, activation, stage), describe(error))


def attempt_one(
    run: Run,
    cell: Cell,
    impl: str,
    activation: str,
    stages: Sequence[str],
    prepare: Callable[[], None],
) -> None:
    """Prepare one implementation; what goes wrong is noted for each of its stages."""
    try:
        with run.seconds.clock(f"compile and check {impl}/{activation}"):
            prepare()
            check_alive(run.device)
    except Exception as error:
        fatal = isinstance(error, FatalError)
        if not isinstance(error, (GateError, RuntimeError)) or fatal:
            traceback.print_exc()
        print(f"  {impl}/{activation}: {describe(error)}", flush=True)
        if not isinstance(error, TimeoutError):  # a compiler that is late may be ready next time
            for stage in stages:
                run.document.fail(cell_key(cell, impl, activation, stage), describe(error))
        if fatal:
            raise
        check_alive(run.device)


def collect(
    run: Run, cell: Cell, batches: list[Inputs], wanted: dict[tuple[str, str], list[str]]
) -> tuple[dict[str, Timed], dict[str, dict[tuple[str, str], float]]]:
    """Calls by stage and variant, and relative L2 by stage and implementation."""
    built = build_model(run, cell.model)
    timed: dict[str, Timed] = {stage: {} for stage in cell.stages(run.stages)}
    errors: dict[str, dict[tuple[str, str], float]] = {stage: {} for stage in timed}

    @functools.cache
    def truth(activation: str) -> Truth:
        return Truth.of(built.weights.plain, batches[0], cell.model.k, activation)

    def add_ours(ours: Ours, stages: list[str]) -> None:
        calls, found = ours.prepare(cell, batches, stages, truth(ours.activation))
        for stage in set(stages) - set(calls):
            run.document.fail(cell_key(cell, ours.impl, ours.activation, stage), NO_GEMM)
        for stage, each in calls.items():
            timed[stage][f"{ours.impl}/{ours.activation}/"] = each
            errors[stage][ours.impl, ours.activation] = found[stage]

    def add_peer(key: tuple[str, str], stages: list[str]) -> None:
        peer = get_peer(run, cell.model, key)
        variants = peer.prepare(cell, batches)
        if peer.same_weights:
            gate = PeerGate(cell, key[1], built.weights.plain, batches[0])
            own = key[1] if key[1] in plan.FORMATS else "bf16"
            error = gate.checked(truth(own), list(variants.values()))
            errors.setdefault("layer", {})[key] = error
        for variant, calls in variants.items():
            for stage in set(stages) & set(calls):
                timed[stage]["/".join((*key, variant))] = calls[stage]
            for stage in set(stages) - set(calls):
                run.document.fail(cell_key(cell, *key, stage), NO_STAGE)

    by_key = {(ours.impl, ours.activation): ours for ours in built.ours}
    for key, stages in wanted.items():
        make = functools.partial(add_peer, key)
        if key in by_key:
            make = functools.partial(add_ours, by_key[key])
        attempt_one(run, cell, *key, stages, functools.partial(make, stages))
    return timed, errors


def wanted_stages(run: Run, cell: Cell) -> dict[tuple[str, str], list[str]]:
    """(impl, activation) → stages to measure: those of the cell in which something is neither
    measured nor failed, with all that did not fail, so that it is timed in the same turns."""
    keys = [(Ours.impl, name) for name in run.formats]
    if time.monotonic() < run.peer_deadline:
        keys += peer_keys(run)
    missing = [
        stage
        for stage in cell.stages(run.stages)
        if not all(run.document.is_done(cell_key(cell, *key, stage)) for key in keys)
    ]
    wanted, failed = {}, run.document.failures
    for key in keys:
        stages = [stage for stage in missing if cell_key(cell, *key, stage) not in failed]
        if stages:
            wanted[key] = stages
    return wanted


def run_cell(run: Run, cell: Cell) -> None:
    """Measure what is missing of one cell, and save."""
    wanted = wanted_stages(run, cell)
    if not wanted:
        return
    began = time.monotonic()
    try:
        batches = plan.random_inputs(cell, run.device)
        hit = plan.mean_hit(batches, cell.model.k)
        timed, errors = collect(run, cell, batches, wanted)
        for stage, variants in timed.items():
            time_stage(run, cell, stage, hit, variants, errors[stage])
    finally:
        run.document.save()
    if run.device.type == "cuda" and cell.tokens >= 1024:
        torch.cuda.empty_cache()
    layer = [
        f"{row['impl']}/{row['activation']} {row['us']:.0f}"
        for key, row in run.document.rows.items()
        if key[:3] == cell_key(cell, "", "", "")[:3] and key[5] == "layer"
    ]
    print(f"{cell}: {time.monotonic() - began:.1f} s; layer us: {', '.join(layer)}", flush=True)


def wanted_cells(run: Run, cells: Sequence[Cell], impl: str) -> list[Cell]:
    """Cells in which this implementation is still to be measured."""
    return [cell for cell in cells if any(key[0] == impl for key in wanted_stages(run, cell))]


def start_compiler(run: Run, cells: Sequence[Cell]) -> None:
    """Begin to compile the kernels of the peer that compiles at run time."""
    activations = [activation for impl, activation in peer_keys(run) if impl == "humming"]
    if not activations:
        return
    try:
        from benchmarks.moe.humming import Compiler

        run.compiler = Compiler(activations)
        run.compiler.start(wanted_cells(run, cells, "humming"))
    except Exception as error:
        run.compiler = describe(error)
        traceback.print_exc()


def run_cells(run: Run, cells: Sequence[Cell]) -> None:
    """All cells until the time limit, which a cell as long as the longest so far must still fit;
    then what had to wait for a compiler."""
    start_compiler(run, cells)
    if run.device.type == "cuda" and run.folder is not None:  # the ceilings had the GPU alone
        run.warming += warm_up.start_peer(wanted_cells(run, cells, TritonKernels.impl), run.folder)
    with run.seconds.clock("warm-up"):
        warm_up.wait(run.warming)
    longest = 0.0
    first_compiles = True
    for index, cell in enumerate([*cells, *cells]):
        began = time.monotonic()
        if began + longest > run.deadline:
            break
        measures = bool(wanted_stages(run, cell))
        run_cell(run, cell)
        if measures and not first_compiles:
            longest = max(longest, time.monotonic() - began)
        first_compiles = first_compiles and not measures
        if all(cell.model != other.model for other in cells[index + 1 :]):
            run.models.pop(cell.model.name, None)
    left = run.document.left = [str(cell) for cell in cells if wanted_stages(run, cell)]
    if left:
        text = f"time limit: {len(left)} cells left: {', '.join(left)}; continue with --resume"
        print(text, flush=True)
    if hasattr(run.compiler, "stop"):
        run.compiler.stop()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    counts, others = (",".join(map(str, each)) for each in (plan.TOKENS, plan.REFERENCE_TOKENS))
    also = f"default: %(default)s; also {', '.join(plan.RECENT)}"
    add("--models", default=",".join(MODELS), help=also)
    add("--tokens", help=f"default: {counts}, of the reference systems' shapes {others}")
    names = "widths, or formats such as a8w4; default: %(default)s"
    add("--activations", default=",".join(ACTIVATION_FORMATS), help=names)
    add("--stages", default=",".join(STAGES), help="default: %(default)s")
    add("--routings", default="uniform", help="some of " + ", ".join(plan.ROUTINGS))
    add("--peers", type=Path, help="directory with the unpacked peers")
    add("--only-peers", default=",".join(PEERS), help="default: %(default)s")
    seconds: dict[str, Any] = dict(type=float, default=math.inf, metavar="SECONDS")
    add("--peer-time-limit", help="after this, measure mxpert alone", **seconds)
    add("--sustained", action="store_true", help="each alone, two seconds without a pause")


def prepare_run(options: argparse.Namespace) -> tuple[Run, list[Cell]]:
    """Checked options, the document and the cells."""
    device, path = options.device, options.path
    names = parse_list(options.models, list(plan.OFFERED), "--models")
    models = [
        plan.tiny(plan.OFFERED[name]) if options.dry_run else plan.OFFERED[name] for name in names
    ]
    tokens = None if options.tokens is None else parse_tokens(options.tokens)
    cells = plan.ordered_cells(
        models, tokens, parse_list(options.routings, plan.ROUTINGS, "--routings")
    )
    formats = plan.parse_activations(options.activations)
    chosen = parse_list(options.stages, STAGES, "--stages")
    stages = [stage for stage in STAGES if stage in chosen]
    peer_names = parse_list(options.only_peers, PEERS, "--only-peers")
    if options.peers is not None:
        add_to_path(options.peers)
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    warming = warm_up.start(cells, formats) if on_hopper else []
    document = Document(path, make_meta(options), KEY_COLUMNS, KEY_COLUMNS)
    if options.resume and path.is_file():
        old = SCHEMA.load(path)
        document.resume(old)
        document.meta = old["meta"]
        document.keep_failures(old)
    else:
        document.meta["ceilings"] = measure_ceilings(device, sustained=options.sustained)
        if options.peers is None:
            document.meta["peers"] = dict.fromkeys(PEERS, "absent: no --peers directory")
    return Run(
        device,
        document,
        stages,
        formats,
        options.peers,
        peer_names,
        options.deadline,
        options.began + options.peer_time_limit,
        options.sustained,
        warming=warming,
    ), cells


def print_estimate(run: Run, cells: Sequence[Cell]) -> None:
    """What a dry run would have taken on a GPU, with every peer that was asked for."""
    real = [replace(cell, model=plan.OFFERED[cell.model.name]) for cell in cells]
    variants = len(run.formats) + len(asked_peers(run.formats, run.peer_names))
    found = estimate(real, run.stages, variants)
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found.items())
    print(
        f"estimate for an H200, {len(real)} cells, {variants} variants: "
        f"{sum(found.values()):.0f} s ({parts})",
        flush=True,
    )


def measure(options: argparse.Namespace, prepared: tuple[Run, list[Cell]]) -> int:
    """Run it; 0 if every cell of mxpert has a time or was out of time."""
    run, cells = prepared
    document = run.document
    print(f"{document.meta['device']}: {document.meta['ceilings']}", flush=True)
    if options.dry_run:
        print_estimate(run, cells)
    try:
        run_cells(run, cells)
    except FatalError as error:
        print(describe(error), file=sys.stderr)
        if not options.owns_process:
            return FATAL
        restart(options, "time_limit", "peer_time_limit")
    document.save()
    table = layer_table(document.rows.values(), SUMMARY_TOKENS, line_name)
    print(f"\n{table}\n\n{run.seconds}")
    failures = document.failures.items()
    red = [key for key, error in failures if key[3] == Ours.impl and error != NO_GEMM]
    for key in red:
        print(f"no time for {key}: {document.failures[key]}", file=sys.stderr)
    print(
        f"wrote {document.path}: {len(document.rows)} rows, "
        f"{len(failures)} failures, {time.monotonic() - options.began:.0f} s"
    )
    return 1 if red else 0


SCRIPT = Script(
    "compare",
    __doc__,
    measure,
    prepare_run,
    add_options,
    limit=math.inf,
    resumes=True,
    output="moe.json",
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
