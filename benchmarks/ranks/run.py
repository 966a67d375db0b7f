"""MoE layers over several GPUs: exchange, local layer and the whole, beside NCCL's collectives.

    python -m benchmarks.ranks.run --dry-run               # two processes on a CPU, gloo
    python -m benchmarks.ranks.run --time-limit 540        # two GPUs of one host
    python -m benchmarks.ranks.run --time-limit 540 --resume
    python -m benchmarks.ranks.render \\
        benchmarks/results/nvidia-h200-x2/expert_parallel.json

Starts one process for each rank. Each cell is first compared with float64 on one rank with all
experts; then all ways to run it take turns. Times are of the slower rank, and all rounds are kept.
`--resume` measures what the time limit left out.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks.harness.document import FACTS
from benchmarks.harness.script import Script, machine, parse_list
from benchmarks.ranks.cells import DRY_MODEL, DRY_TOKENS, MODELS, TOKENS, WIRES, cells_of
from benchmarks.ranks.work import Order, work
from mxpert.errors import require
from mxpert.testing.ranks import RankFailedError, start_ranks

PROTOCOL = {
    "ranks": "one process and one GPU each; the experts are split in order",
    "timing": "CUDA-graph replays, implementations in turns of changing order. Before each replay "
    "every rank sweeps its L2 cache and takes part in a small all-reduce, so that all start "
    "together. A sample is the time of the slower rank; us is the median, us_spread the width of "
    "the 10-90 % band, samples holds every round. all_to_all waits on the host and is called, not "
    "captured. T < 64 rotates among up to 8 routings",
    "stages": "dispatch, combine: one after the other in graphs of their own, whose replays cost "
    "several microseconds; exchange: both, 16 times in one graph; local: the layer of received "
    "rows; layer: the whole; host: until 50 eager calls return",
    "gate": "relative L2 to float64 on one rank with all experts, first 64 tokens of each rank",
    "formats": "wire mxfp8: a8w4; wire bf16: a16w4; combine in bf16",
    "data": "normal x, uniformly random codes; zipf: expert e has the weight 1 / (e + 1)",
    "one GPU": "all experts and the tokens of all ranks on each GPU",
    "plans": "mxpert bench --plan --link nvlink4, from layers measured on one H200",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The script's own options."""
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="default: %(default)s")
    add("--models", default=",".join(MODELS), help="default: %(default)s")
    add("--wires", default=",".join(WIRES), help="default: %(default)s")
    add("--repeats", type=int, default=12, help="rounds; default: %(default)s")


def prepare(options: argparse.Namespace) -> None:
    """Check the options; those of a dry run are tiny."""
    options.wires = parse_list(options.wires, tuple(WIRES), "--wires")
    options.tokens = TOKENS
    if options.dry_run:
        options.models, options.tokens, options.repeats = [DRY_MODEL], DRY_TOKENS, 2
        return
    options.models = parse_list(options.models, MODELS, "--models")
    count = torch.cuda.device_count()
    need = f"1 to {count}, the GPUs that are visible here"
    op, valid = "expert_parallel", 1 <= options.ranks <= count
    require(valid, op, "--ranks", need=need, got=options.ranks)


def run(options: argparse.Namespace, _: None) -> int:
    """Measure and write; 1 if a rank failed, a result was wrong or nothing was measured."""
    meta = machine(options, *FACTS, protocol=PROTOCOL, ranks=options.ranks)
    order = Order(
        cells=cells_of(options.models, options.tokens, options.wires),
        path=options.path,
        meta=meta,
        deadline=options.deadline,
        repeats=options.repeats,
        resume=options.resume,
        max_tokens=max(options.tokens),
    )
    try:
        ((count, wrong), *_) = start_ranks(work, options.ranks, order)
    except RankFailedError as error:
        print(f"{error}\nwhat was measured before is in {options.path}", file=sys.stderr)
        return 1
    print(f"wrote {options.path} after {time.monotonic() - options.began:.0f} s: {count} rows")
    if wrong:
        print(f"wrong, and not timed: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong or not count else 0


SCRIPT = Script(
    "expert_parallel",
    __doc__,
    run,
    prepare=prepare,
    add_options=add_options,
    limit=540.0,
    resumes=True,
    suffix="-x2",
)
main = SCRIPT.main


if __name__ == "__main__":
    sys.exit(main())
