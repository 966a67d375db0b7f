"""Compile the kernels that cells will launch, in processes of their own.

    python -m benchmarks.moe.warm_up --models gpt-oss-120b --tokens 1,16 --activation mxfp8
    python -m benchmarks.moe.warm_up --models qwen3-30b --tokens 1 --activation bf16 --weights nvfp4
    python -m benchmarks.moe.warm_up --models gpt-oss-120b --tokens 1,16 --peers DIR

Triton compiles in one thread; several processes fill its cache at once. Ours use no GPU, while a
comparison measures the ceilings and a peer's compiler runs; weights are never written, so that they
take no memory. So a machine without a GPU can fill the cache, too, and a script that is given
--no-warm-up counts on it. With --peers, those of triton_kernels, which are launched on the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.harness.run import Run
from benchmarks.harness.script import bare_parser
from benchmarks.harness.timing import measure_ceilings
from benchmarks.moe.cells import (
    DECODE_TOKENS,
    FORMATS,
    MODELS,
    Cell,
    Inputs,
    Model,
    named,
    parse_cells,
    random_inputs,
)
from benchmarks.moe.ours import Ours, random_weights
from benchmarks.moe.peers import TritonKernels, add_to_path
from mxpert.cli.measure import RunWeights
from mxpert.core.target import on_device
from mxpert.formats import MXFP4
from mxpert.formats.layouts import UNIT_CODES, UNIT_ROWS
from mxpert.formats.spec import MXFP8_E4M3
from mxpert.formats.weight_tensor import WEIGHT_FORMATS, WeightLike
from mxpert.moe.weights import MoEWeights
from mxpert.testing.problems import MODEL_SHAPES
from support.launches import H200, without_device

STAGES = ("gate_up", "down", "layer")
WEIGHTS = (MXFP4.name, MXFP8_E4M3.name, *WEIGHT_FORMATS)
CPU = torch.device("cpu")
SECONDS = 60.0
"""How long a comparison waits for these processes."""


def unwritten_weights(
    model: Model, weight_format: str = MXFP4.name, *, keep_fp8: bool = False
) -> MoEWeights:
    """Weights as `prepare` makes them for Hopper, with an FP8 copy or without one, whose codes and
    scales are whatever memory holds."""
    unit = replace(model, E=1, H=UNIT_CODES, F=UNIT_CODES)  # of the same parts, and soon made
    with on_device(H200):
        made = random_weights(unit, CPU, weight_format)
        weights = made.plain.prepare(device=CPU, keep_fp8=True) if keep_fp8 else made.prepared

    def grown(part: WeightLike, rows: int, depth: int) -> WeightLike:
        units, steps = -(-rows // UNIT_ROWS), -(-depth // UNIT_CODES)

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            in_units = tensor.dim() == 4  # [E, rows / 64, K / 128, unit]; others are [E, rows]
            sizes = (units, steps, tensor.shape[-1]) if in_units else (units * UNIT_ROWS,)
            return tensor.new_empty(model.E, *sizes)

        return replace(part._mapped(empty), logical_shape=(model.E, rows, depth))

    return MoEWeights(
        grown(weights.gate_up_proj, 2 * model.F, model.H),
        grown(weights.down_proj, model.H, model.F),
        gate_up_order=weights.gate_up_order,
    )


def stand_in() -> AbstractContextManager[object]:
    """A device on which kernels are compiled and launches do nothing."""
    stack = contextlib.ExitStack()
    stack.enter_context(without_device(record=False))
    stack.enter_context(on_device(H200))
    return stack


def compile_cells(
    cells: Sequence[Cell],
    activation: str,
    weight_format: str = MXFP4.name,
    *,
    keep_fp8: bool = False,
) -> None:
    """Launch every stage of the cells where launches do nothing."""
    with stand_in():
        for cell in cells:
            weights = unwritten_weights(cell.model, weight_format, keep_fp8=keep_fp8)
            mine = Ours(cell.model, RunWeights(weights, weights), activation)
            x = torch.empty(cell.tokens, cell.model.H, dtype=torch.bfloat16)
            batch = mine._batch(weights, Inputs(x, torch.empty(cell.tokens, cell.model.E)))
            for stage in STAGES:
                mine._call(stage, weights, batch)()


def compile_peer(cells: Sequence[Cell], device: torch.device) -> None:
    """Call every stage of triton_kernels; a cell that fails leaves the others, and is the
    comparison's to report."""
    for model in dict.fromkeys(cell.model for cell in cells):
        peer = TritonKernels(model, random_weights(model, device).plain)
        for cell in (each for each in cells if each.model == model):
            try:
                for calls in peer.prepare(cell, random_inputs(cell, device)[:1])[""].values():
                    calls[0]()
            except Exception as error:
                print(f"{cell}: {error}")


def start_peer(cells: Sequence[Cell], folder: Path) -> list[subprocess.Popen[str]]:
    """A process for each model; they use the GPU."""
    counts: dict[str, list[int]] = {}
    for cell in cells:
        counts.setdefault(cell.model.name, []).append(cell.tokens)
    return [_start([name], found, "--peers", str(folder)) for name, found in counts.items()]


def start(
    cells: Sequence[Cell],
    formats: Sequence[str],
    weight_formats: Sequence[str] = (MXFP4.name,),
    *,
    keep_fp8: bool = False,
) -> list[subprocess.Popen[str]]:
    """A process for each format of activations and weights, decode and prefill apart: they share
    few kernels."""
    copy = ["--keep-fp8"] if keep_fp8 else []
    models = list(dict.fromkeys(cell.model.name for cell in cells))
    counts = sorted({cell.tokens for cell in cells})
    few = [count for count in counts if count <= DECODE_TOKENS]
    many = counts[len(few) :]
    return [
        _start(models, part, "--activation", activation, "--weights", weights, *copy)
        for part in (many, few)
        if part
        for weights in weight_formats
        for activation in formats
    ]


def _start(models: Sequence[str], tokens: Sequence[int], *what: str) -> subprocess.Popen[str]:
    cells = ["--models", ",".join(models), "--tokens", ",".join(map(str, tokens))]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.moe.warm_up", *cells, *what],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(processes: Sequence[subprocess.Popen[str]], seconds: float = SECONDS) -> None:
    """Until they have ended or are late; what they leave undone is compiled when it is needed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            print("warm-up: a process is late", flush=True)
        else:
            if process.returncode:
                print(f"warm-up: {errors[-300:]}", flush=True)


def measure_compiled(
    run: Run,
    options: argparse.Namespace,
    measure: Callable[[], None],
    compilers: Callable[[], list[subprocess.Popen[str]]] = list,
) -> None:
    """Measure, after the ceilings and after other processes have compiled the kernels, unless
    --no-warm-up says that there is nothing to compile.

    A dry run compiles them itself and launches nothing.
    """
    if run.dry:
        with stand_in():
            measure()
        return
    processes = [] if getattr(options, "no_warm_up", False) else compilers()
    run.meta["ceilings"] = measure_ceilings(run.device)
    wait(processes, min(SECONDS, (options.deadline - options.began) / 2))
    measure()


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option of scripts that compile before they measure."""
    text = "start no processes that compile our kernels first: Triton's cache has them"
    parser.add_argument("--no-warm-up", action="store_true", help=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; 0 if every cell was launched."""
    parser = bare_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--activation", choices=FORMATS, help="our kernels of this format")
    what.add_argument("--peers", type=Path, help="those of triton_kernels in this directory")
    text = "with --activation: the format of the weights; default: %(default)s"
    parser.add_argument("--weights", choices=WEIGHTS, default=MXFP4.name, help=text)
    text = "with --activation: the weights have an FP8 copy"
    parser.add_argument("--keep-fp8", action="store_true", help=text)
    options = parser.parse_args(arguments)
    cells = parse_cells(options.models, options.tokens, named(*MODEL_SHAPES))
    if options.keep_fp8 and options.weights != MXFP4.name:
        parser.error("--keep-fp8 needs --weights mxfp4: others have no FP8 copy")
    if options.peers is None:
        compile_cells(cells, options.activation, options.weights, keep_fp8=options.keep_fp8)
    elif options.keep_fp8 or options.weights != MXFP4.name:
        option = "--keep-fp8" if options.keep_fp8 else "--weights"
        parser.error(f"{option} needs --activation: peers have no such weights")
    else:
        add_to_path(options.peers)
        compile_peer(cells, torch.device("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
