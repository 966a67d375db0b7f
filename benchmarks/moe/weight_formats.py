"""Layers with MXFP4, MXFP8, NVFP4 and INT4 weights, beside Humming and Marlin in the same format.

    python -m benchmarks.moe.weight_formats --peers DIR --time-limit 540
    python -m benchmarks.moe.weight_formats --peers DIR --time-limit 540 --resume
    python -m benchmarks.moe.weight_format_tables FILE

A cell is a model, a format of weights and a number of tokens. In each, our layer is compared with
float64 on the decoded weights before it is timed, and so is Humming's, which gets the same weights;
Marlin has random codes of its own. What is left then takes turns in CUDA-graph replays. The JSON is
whole after every cell, and --resume measures the rest.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.document import Document, Row
from benchmarks.harness.faults import FATAL, FatalError, check_alive, describe
from benchmarks.harness.script import Script, parse_list, parse_tokens, restart
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe.cells import WIDTHS, Cell, Inputs, Model, mean_hit, random_inputs
from benchmarks.moe.ours import Ours, Truth, random_weights
from benchmarks.moe.peers import Marlin, Peer, add_to_path
from benchmarks.moe.protocol import PROTOCOL, WARMUP, idle_seconds, make_meta, num_repeats
from benchmarks.moe.weight_format_tables import (
    ACTIVATIONS,
    KEY_COLUMNS,
    REPORT,
    SCHEMA,
    WEIGHTS,
    Key,
)
from mxpert.cli.measure import GateError, RunWeights
from mxpert.testing.timing import Timing, Work, time_graph

MODELS = {
    each.name: each
    for each in (
        Model("kimi-k2-tp8", 384, 8, 7168, 256),
        Model("kimi-k2-tp4", 384, 8, 7168, 512),
        Model("kimi-k3-ep8", 112, 2, 3584, 3072),  # of 896 experts and 16 a token
        Model("minimax-m3-tp4", 128, 4, 6144, 768),
        Model("qwen3-30b", 128, 8, 2048, 768),
        Model("dsv4-flash", 256, 6, 4096, 2048),
    )
}
TOKENS = (1, 16, 64, 128, 1024, 8192)
DRY_TOKENS = (1, 16)
PEER_KEYS = (("humming", "bf16"), ("humming", "fp8_token"), ("marlin", "bf16"))
PEER_LIMIT = 0.1
"""Largest relative L2 of a peer's layer to float64 with bf16 activations: rows of 8 bits err by
0.04, a wrong scale or order by 0.3 and more."""
COMPILE_SECONDS = 45.0
"""A cell waits so long for a peer's compiler; the second pass asks again."""


@dataclass
class Run:
    """What one invocation works with. held: the newest weights, and who holds them."""

    device: torch.device
    document: Document
    activations: list[str]
    peers: list[tuple[str, str]]
    folder: Path | None
    deadline: float
    compiler: Any = None
    held: tuple[tuple[str, str], RunWeights, dict[tuple[str, str], Peer | str]] | None = None


def key_of(cell: Cell, impl: str, activation: str) -> Key:
    return cell.model.name, cell.weights, cell.tokens, impl, activation


def wanted_keys(run: Run, cell: Cell) -> list[tuple[str, str]]:
    """(impl, activation) of all that takes part in a cell where something is missing."""
    keys = [(Ours.impl, name) for name in run.activations] + run.peers
    if all(run.document.is_done(key_of(cell, *key)) for key in keys):
        return []
    return [key for key in keys if key_of(cell, *key) not in run.document.failures]


def weights_of(run: Run, cell: Cell) -> tuple[RunWeights, dict[tuple[str, str], Peer | str]]:
    """Weights of a cell and the peers that hold them; those of the last cells are kept."""
    name = cell.model.name, cell.weights
    if run.held is None or run.held[0] != name:
        run.held = None  # before the next ones are made
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.held = name, random_weights(cell.model, run.device, cell.weights), {}
    return run.held[1], run.held[2]


def make_peer(run: Run, cell: Cell, key: tuple[str, str], weights: RunWeights) -> Peer:
    """A peer with weights of this cell's format."""
    folder = run.folder
    assert folder is not None  # for the type checker: peers were asked for
    if key[0] == "marlin":
        return Marlin(folder, cell.model, run.device, cell.weights)
    from benchmarks.moe.humming import Humming

    if isinstance(run.compiler, str):
        raise RuntimeError(run.compiler)

    def seconds_left() -> float:
        return min(COMPILE_SECONDS, run.deadline - time.monotonic())

    return Humming(folder, cell.model, weights.plain, key[1], run.compiler, seconds_left)


def check_peer(error: float) -> float:
    """Refuse to time a peer's wrong layer.

    Raises:
        GateError: the error is above PEER_LIMIT, or NaN.
    """
    if not error <= PEER_LIMIT:
        raise GateError(f"relative L2 to float64 is {error:.2e}, at most {PEER_LIMIT}")
    return error


def attempt(
    run: Run, cell: Cell, batches: Sequence[Inputs], keys: Sequence[tuple[str, str]]
) -> tuple[dict[str, list[Callable[[], object]]], dict[tuple[str, str], float | None]]:
    """Calls of all that passed, by ``impl/activation/variant``, and their errors to float64."""
    weights, peers = weights_of(run, cell)
    timed: dict[str, list[Callable[[], object]]] = {}
    errors: dict[tuple[str, str], float | None] = {}

    @functools.cache
    def truth(activation: str) -> Truth:
        return Truth.of(weights.plain, batches[0], cell.model.k, activation)

    def add_ours(key: tuple[str, str]) -> None:
        ours = Ours(cell.model, weights, key[1])
        calls, found = ours.prepare(cell, batches, ["layer"], truth(key[1]))
        timed["/".join((*key, ""))] = calls["layer"]
        errors[key] = found["layer"]

    def add_peer(key: tuple[str, str]) -> None:
        if key not in peers:
            peers[key] = make_peer(run, cell, key, weights)
        peer = peers[key]
        if isinstance(peer, str):
            raise RuntimeError(peer)
        variants = peer.prepare(cell, batches)
        errors[key] = None
        if peer.same_weights:
            y: Any = next(iter(variants.values()))["layer"][0]()
            errors[key] = check_peer(truth("bf16").layer_error(y))
        for variant, calls in variants.items():
            timed["/".join((*key, variant))] = calls["layer"]

    for key in keys:
        try:
            (add_ours if key[0] == Ours.impl else add_peer)(key)
            check_alive(run.device)
        except Exception as error:
            if not isinstance(error, (GateError, RuntimeError)):
                traceback.print_exc()
            print(f"  {'/'.join(key)}: {describe(error)}", flush=True)
            if not isinstance(error, TimeoutError):  # its compiler may be ready next time
                run.document.fail(key_of(cell, *key), describe(error))
            if isinstance(error, FatalError):
                raise
            check_alive(run.device)
    return timed, errors


def work_of(cell: Cell, hit: float, weights: RunWeights) -> Work:
    """Traffic and arithmetic of a layer that hits so many experts."""
    model, plain = cell.model, weights.plain
    return Work.of_stage(
        "layer",
        hit_experts=math.ceil(hit),
        routed_rows=cell.tokens * model.k,
        hidden_size=model.H,
        intermediate_size=model.F,
        bytes_per_weight=plain.nbytes / plain.numel(),
    )


def make_row(
    run: Run, cell: Cell, hit: float, key: tuple[str, str], timing: Timing, rel_l2: float | None
) -> Row:
    """One measurement beside the ceilings of its run; times in µs."""
    model, ceilings = cell.model, run.document.meta["ceilings"]
    work = work_of(cell, hit, weights_of(run, cell)[0])
    rate = ceilings["bf16_tflops" if WIDTHS[key[1]] == "a16" else "fp8_tflops"]
    floor = work.floor_us(ceilings["read_tbs"] * 1e12, rate * 1e12)
    return {
        "model": model.name,
        "weights": cell.weights,
        **{name: getattr(model, name) for name in "EkHF"},
        "T": cell.tokens,
        "hit": hit,
        "impl": key[0],
        "activation": key[1],
        "us": timing.us,
        "us_spread": timing.high_us - timing.low_us,
        "rel_l2": rel_l2 if rel_l2 is not None and math.isfinite(rel_l2) else None,
        "tbs": work.weight_bytes / timing.us / 1e6,
        "tflops": work.flops / timing.us / 1e6,
        "percent_of_roof": 100 * floor / timing.us,
    }


def run_cell(run: Run, cell: Cell) -> None:
    """Measure what is missing of one cell, and save."""
    keys = wanted_keys(run, cell)
    if not keys:
        return
    began, on_gpu = time.monotonic(), run.device.type == "cuda"
    try:
        batches = random_inputs(cell, run.device)
        hit = mean_hit(batches, cell.model.k)
        timed, errors = attempt(run, cell, batches, keys)
        failed: dict[str, Exception] = {}
        if on_gpu:
            time.sleep(idle_seconds(cell.tokens))
        ceilings = run.document.meta["ceilings"]
        work = work_of(cell, hit, weights_of(run, cell)[0])
        floor = work.floor_us(ceilings["read_tbs"] * 1e12, ceilings["bf16_tflops"] * 1e12)
        repeats = num_repeats(floor * cell.rotations) if on_gpu else 1
        timings = time_graph(
            timed,
            device=run.device,
            failures=failed,
            repeats=repeats,
            warmup=WARMUP if on_gpu else 0,
        )
        check_alive(run.device)
        best: dict[tuple[str, str], Timing] = {}
        for name, timing in timings.items():
            impl, activation, _ = name.split("/")
            if (impl, activation) not in best or timing.us < best[impl, activation].us:
                best[impl, activation] = timing
        for key, timing in best.items():
            run.document.add(make_row(run, cell, hit, key, timing, errors[key]))
        for name, error in failed.items():
            impl, activation, _ = name.split("/")
            if (impl, activation) not in best:
                run.document.fail(key_of(cell, impl, activation), describe(error))
    finally:
        run.document.save()
    print(f"{cell}: {time.monotonic() - began:.1f} s", flush=True)


def run_cells(run: Run, cells: Sequence[Cell]) -> None:
    """All cells until the time limit, then again what waited for a compiler."""
    start_compiler(run, cells)
    longest = 0.0
    for cell in (*cells, *cells):
        began = time.monotonic()
        if began + longest > run.deadline:
            break
        run_cell(run, cell)
        longest = max(longest, time.monotonic() - began)
    left = run.document.left = [str(cell) for cell in cells if wanted_keys(run, cell)]
    if left:
        print(f"time limit: {len(left)} cells left; continue with --resume", flush=True)
    if hasattr(run.compiler, "stop"):
        run.compiler.stop()


def start_compiler(run: Run, cells: Sequence[Cell]) -> None:
    """Let Humming compile the kernels of all cells in the background."""
    activations = [activation for impl, activation in run.peers if impl == "humming"]
    if not activations:
        return
    try:
        from benchmarks.moe.humming import Compiler

        run.compiler = Compiler(activations)
        run.compiler.start([cell for cell in cells if wanted_keys(run, cell)])
    except Exception as error:
        run.compiler = describe(error)
        traceback.print_exc()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help="default: %(default)s")
    add("--weights", default=",".join(WEIGHTS), help="default: %(default)s")
    add("--activations", default=",".join(ACTIVATIONS), help="default: %(default)s")
    add("--tokens", help=f"default: {','.join(map(str, TOKENS))}")
    add("--peers", type=Path, help="directory with the unpacked peers")
    add("--only-peers", default="humming,marlin", help="default: %(default)s")


def tiny(model: Model) -> Model:
    """A model's top k and name with sizes of whole groups that a CPU multiplies quickly."""
    return replace(model, E=max(model.k, 8), H=128, F=128)


def prepare(options: argparse.Namespace) -> tuple[Run, list[Cell]]:
    """Checked options, the document and the cells."""
    names = parse_list(options.models, list(MODELS), "--models")
    weights = parse_list(options.weights, WEIGHTS, "--weights")
    activations = parse_list(options.activations, ACTIVATIONS, "--activations")
    chosen = parse_list(options.only_peers, ("humming", "marlin"), "--only-peers")
    default = DRY_TOKENS if options.dry_run else TOKENS
    tokens = default if options.tokens is None else parse_tokens(options.tokens)
    cells = [
        Cell(tiny(MODELS[name]) if options.dry_run else MODELS[name], count, weights=held)
        for name in names
        for held in weights
        for count in tokens
    ]
    if options.peers is not None:
        add_to_path(options.peers)
    options.sustained = False
    meta = make_meta(options)
    meta["protocol"] = {name: PROTOCOL[name] for name in ("timing", "data", "rel_l2")} | {
        "power": meta["protocol"]["power"],
        "peers": f"humming: the same weights, timed if rel_l2 is at most {PEER_LIMIT}; marlin: "
        "random codes of the same format",
    }
    document = Document(options.path, meta, KEY_COLUMNS, KEY_COLUMNS)
    if options.resume and options.path.is_file():
        old = SCHEMA.load(options.path)
        document.resume(old)
        document.meta = old["meta"]
        for each in old["meta"].get("failures", []):
            document.fail(tuple(each[name] for name in KEY_COLUMNS), each["error"])
    else:
        document.meta["ceilings"] = measure_ceilings(options.device)
    peers = [key for key in PEER_KEYS if key[0] in chosen and options.peers is not None]
    document.meta["peers"] = {"/".join(key): str(key in peers) for key in PEER_KEYS}
    run = Run(options.device, document, activations, peers, options.peers, options.deadline)
    return run, cells


def measure(options: argparse.Namespace, prepared: tuple[Run, list[Cell]]) -> int:
    """Run it; 0 if all of ours has a time or was out of time."""
    run, cells = prepared
    document = run.document
    try:
        run_cells(run, cells)
    except FatalError as error:
        print(describe(error), file=sys.stderr)
        if not options.owns_process:
            return FATAL
        restart(options, "time_limit")
    document.save()
    print(REPORT.write(document.as_json(), document.path.parent, document.path.stem))
    red = [key for key in document.failures if key[3] == Ours.impl]
    for key in red:
        print(f"no time for {key}: {document.failures[key]}", file=sys.stderr)
    print(f"wrote {document.path}: {len(document.rows)} rows, {len(document.failures)} failures")
    return 1 if red else 0


SCRIPT = Script("weight_formats", __doc__, measure, prepare, add_options, limit=540.0, resumes=True)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
