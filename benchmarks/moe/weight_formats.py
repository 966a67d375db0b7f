"""Layers with MXFP4, MXFP8, NVFP4 and INT4 weights, beside peers with weights of the same format.

    python -m benchmarks.moe.weight_formats --peers peers --time-limit 240
    python -m benchmarks.moe.weight_formats --peers peers --time-limit 240 --resume

A layer goes from router logits to the output. Marlin multiplies bfloat16 activations, Humming these
and e4m3 ones with a scale a token. Humming gets our weights and passes the gate, too; Marlin gets
random ones of the format, since its packer is in another library. Kernels are compiled before the
first cell: ours by processes that use no GPU (`warm_up`), Humming's in the background. With
--no-warm-up, Triton's cache has ours already.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.faults import describe
from benchmarks.harness.run import Run, times_of
from benchmarks.harness.script import Script, machine, parse_list, parse_tokens
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe import warm_up
from benchmarks.moe.cells import (
    Cell,
    Inputs,
    Model,
    mean_hit,
    named,
    parse_activations,
    random_inputs,
    tiny,
)
from benchmarks.moe.ours import Ours, Truth, random_weights
from benchmarks.moe.peers import Call, Marlin, Peer, Variants, add_to_path
from benchmarks.moe.protocol import DATA, LEAST_REPEATS, WARMUP, idle_seconds
from mxpert.cli.measure import RunWeights, check_gate, intermediate_sizes
from mxpert.moe.weights import MoEWeights
from mxpert.testing.timing import time_graph

MODELS = named(
    "qwen3-30b", "minimax-m3-tp4", "kimi-k2-tp4", "kimi-k2-tp8", "dsv4-flash", "kimi-k3-ep8"
)
"""In order of importance."""
FORMATS = ("mxfp4", "int4_g128", "mxfp8_e4m3", "nvfp4", "int4_g32")
ACTIVATIONS = ("bf16", "mxfp8")
TOKENS = (1, 16, 128, 1024, 8192)
REPEATS = 12
FEW_REPEATS_FROM = 8192
COMPILE_SECONDS = 120.0
"""How long the first cell waits for our kernels, and each for Humming's."""
PEERS = {"marlin": ("bf16",), "humming": ("bf16", "fp8_token")}
PROTOCOL = {
    "data": DATA,
    "layer": "from logits, top-k and sort included",
    "power": "idle 50 ms (10 ms at T ≤ 256) before each cell",
    "timing": "CUDA-graph replays, all implementations in turns, L2 swept before each; us is the "
    "median; T < 8 rotates among 8 // T routings",
    "gate": "relative L2 to float64 on the same weights, ours and Humming's",
}


def bytes_of_expert(weights: MoEWeights) -> float:
    """Bytes of the codes and scales of one expert, as stored."""
    parts = (weights.gate_up_proj, weights.down_proj)
    return sum(each.qdata.nbytes + each.scale.nbytes for each in parts) / weights.num_experts


@dataclass(kw_only=True)
class FormatRun(Run):
    """What one invocation works with, and what it has found.

    Args:
        folder: of the peers. activations: ours. compiler: Humming's, or why there is none.
    """

    folder: Path | None
    activations: list[str]
    compiler: Any = "no --peers"


def make_peers(run: FormatRun, model: Model, weights: RunWeights) -> list[Peer]:
    """Those that can hold the weights; `meta` has why others are absent."""
    if run.folder is None:
        return []
    from benchmarks.moe.humming import Humming

    form, made = weights.plain.weight_format, []

    def seconds_left() -> float:
        return min(COMPILE_SECONDS, run.deadline - time.monotonic())

    for impl, activations in PEERS.items():
        for activation in activations:
            try:
                if impl == "marlin":
                    made.append(Marlin(run.folder, model, run.device, form))
                elif isinstance(run.compiler, str):
                    raise RuntimeError(run.compiler)
                else:
                    each = Humming(
                        *(run.folder, model, weights.plain, activation, run.compiler, seconds_left)
                    )
                    made.append(each)
            except Exception as error:
                run.meta["peers"][f"{impl}/{activation}/{form}"] = describe(error)
    return made


@dataclass(frozen=True)
class Built:
    """Implementations of one model with one format of weights."""

    weights: RunWeights
    ours: list[Ours]
    peers: list[Peer]

    @classmethod
    def of(cls, run: FormatRun, model: Model, weight_format: str) -> Built:
        weights = random_weights(model, run.device, weight_format)
        ours = [Ours(model, weights, name) for name in run.activations]
        return cls(weights, ours, make_peers(run, model, weights))


Calls = dict[tuple[str, str, str], list[Call]]
"""(impl, activation, variant) → a call for each batch."""


def calls_of(
    run: FormatRun, cell: Cell, built: Built, batches: Sequence[Inputs]
) -> tuple[Calls, dict[tuple[str, str], float]]:
    """Calls of all that are right, and their errors; the others are noted as failures."""
    calls: Calls = {}
    errors: dict[tuple[str, str], float] = {}
    plain = built.weights.plain
    form = plain.weight_format
    truth_of = functools.cache(functools.partial(Truth.of, plain, batches[0], cell.model.k))
    for ours in built.ours:
        with run.blaming(str(cell), form, ours.impl, ours.activation):
            truth = truth_of(ours.activation)
            made, found = ours.prepare(cell, batches, ("layer",), truth)
            calls[ours.impl, ours.activation, ""] = made["layer"]
            errors[ours.impl, ours.activation] = found["layer"]
    for peer in built.peers:
        with run.blaming(str(cell), form, peer.impl, peer.activation):
            variants = peer.prepare(cell, batches)
            if peer.same_weights:
                truth = truth_of(peer.activation)
                errors[peer.impl, peer.activation] = gate(cell, peer, truth, plain, variants)
            for name, stages in variants.items():
                calls[peer.impl, peer.activation, name] = stages["layer"]
    return calls, errors


def gate(cell: Cell, peer: Peer, truth: Truth, plain: MoEWeights, variants: Variants) -> float:
    """A peer's relative L2 to float64.

    Raises:
        GateError: another layer came out.
    """
    sizes = intermediate_sizes(truth.tokens.numel(), cell.model.k, plain.intermediate_size)
    error = max(truth.layer_error(stages["layer"][0]()) for stages in variants.values())
    check_gate(f"{cell} {peer.impl}", error, "layer", peer.activation, sizes)
    return error


def measure_cell(run: FormatRun, cell: Cell, built: Built) -> None:
    """One row for each implementation: whole layers, all in turns."""
    batches, plain = random_inputs(cell, run.device), built.weights.plain
    calls, errors = calls_of(run, cell, built, batches)
    hit = mean_hit(batches, cell.model.k)
    if not run.dry:
        torch.cuda.synchronize()
        time.sleep(idle_seconds(cell.tokens))
    repeats = LEAST_REPEATS if cell.tokens >= FEW_REPEATS_FROM else REPEATS
    names = {"/".join(key): key for key in calls}
    failed: dict[str, Exception] = {}
    timings = time_graph(
        {name: calls[key] for name, key in names.items()},
        device=run.device,
        repeats=1 if run.dry else repeats,
        warmup=0 if run.dry else WARMUP,
        failures=failed,
    )
    for name, error in failed.items():
        run.fail((str(cell), plain.weight_format, *names[name][:2]), error)
    fastest: dict[tuple[str, str], Any] = {}
    for name, timing in timings.items():
        key = names[name][:2]
        if key not in fastest or timing.us < fastest[key].us:
            fastest[key] = timing
    for (impl, activation), timing in fastest.items():
        model, weight_bytes = cell.model, hit * bytes_of_expert(plain)
        row: Row = model.columns | dict(T=cell.tokens, hit=hit, weights=plain.weight_format)
        row |= dict(impl=impl, activation=activation, rel_l2=errors.get((impl, activation)))
        run.add(row | times_of(timing) | dict(tbs=weight_bytes / timing.us / 1e6))


def has_rows(run: FormatRun, model: Model, weight_format: str, tokens: Sequence[int]) -> bool:
    """Whether an earlier run measured all of ours."""
    return all(
        run.is_done((model.name, count, weight_format, "mxpert", activation))
        for count in tokens
        for activation in run.activations
    )


def measure(run: FormatRun, groups: Sequence[tuple[Model, str]], tokens: Sequence[int]) -> None:
    """A model and a format after the other, until the time limit."""
    named = {f"{model.name} {each}": (model, each) for model, each in groups}
    for name in run.each(named):
        model, weight_format = named[name]
        with run.blaming(model.name, weight_format, "", ""):
            built = Built.of(run, model, weight_format)
            for count in tokens:
                with run.blaming(f"{model.name} T={count}", weight_format, "", ""):
                    measure_cell(run, Cell(model, count), built)
            del built


# --- kernels ------------------------------------------------------------------------------------


def start_compilers(
    run: FormatRun, groups: Sequence[tuple[Model, str]], tokens: Sequence[int]
) -> list[subprocess.Popen[str]]:
    """Processes that compile our kernels of all groups, without the GPU."""
    cells = [Cell(model, count) for model, _ in groups for count in tokens]
    return warm_up.start(cells, run.activations, list(dict.fromkeys(each for _, each in groups)))


def start_peer_compiler(
    run: FormatRun, groups: Sequence[tuple[Model, str]], tokens: Sequence[int]
) -> None:
    """Begin to compile Humming's kernels."""
    try:
        from benchmarks.moe.humming import Compiler

        run.compiler = Compiler(PEERS["humming"])
        for model, weight_format in groups:
            run.compiler.start([Cell(model, count) for count in tokens], weight_format)
    except Exception as error:
        run.compiler = describe(error)


# --- command line -------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--peers", type=Path, help="directory with the unpacked peers")
    add("--models", default=",".join(MODELS), help="default: %(default)s")
    add("--tokens", default=",".join(map(str, TOKENS)))
    add("--formats", default=",".join(FORMATS), help="of the weights; default: %(default)s")
    names = "ours: widths, or formats such as a8w4; default: %(default)s"
    add("--activations", default=",".join(ACTIVATIONS), help=names)
    warm_up.add_option(parser)


def prepare(options: argparse.Namespace) -> tuple[FormatRun, list[tuple[Model, str]], list[int]]:
    """The document, models with formats, and token counts."""
    models = [MODELS[name] for name in parse_list(options.models, list(MODELS), "--models")]
    formats = parse_list(options.formats, FORMATS, "--formats")
    tokens = parse_tokens(options.tokens)
    if options.dry_run:
        models, tokens = [replace(tiny(each), H=256, F=128) for each in models], tokens[:2]
    if options.peers is not None:
        add_to_path(options.peers)
    run = FormatRun.of(
        options,
        machine(options, *FACTS, protocol=PROTOCOL, ceilings={}, peers={}),
        ("model", "T", "weights", "impl", "activation"),
        ("cell", "weights", "impl", "activation"),
        folder=options.peers,
        activations=parse_activations(options.activations),
    )
    groups = [(model, each) for model in models for each in formats]
    return run, [each for each in groups if not has_rows(run, *each, tokens)], tokens


def execute(
    options: argparse.Namespace, prepared: tuple[FormatRun, list[tuple[Model, str]], list[int]]
) -> int:
    """Measure; 0 if every implementation that is present gave the right layers."""
    run, groups, tokens = prepared
    if not run.dry:
        run.meta["ceilings"] = measure_ceilings(run.device)
        if run.folder is not None:
            start_peer_compiler(run, groups, tokens)
        if not options.no_warm_up:
            warm_up.wait(start_compilers(run, groups, tokens), COMPILE_SECONDS)
    measure(run, groups, tokens)
    if hasattr(run.compiler, "stop"):
        run.compiler.stop()
    return run.end(SCRIPT, options, "groups")


SCRIPT = Script("weight_formats", __doc__, execute, prepare, add_options, limit=240.0, resumes=True)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
