"""MoE GEMM kernels whose mutants are judged, and the record of what is caught.

``python tests/gfx950/mutation_cases.py`` judges all mutants of all cases and writes `RECORD`; with
names of cases it replaces theirs. It takes minutes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mxpert
from mxpert.backends.cdna4.moe.config import prefill_config
from mxpert.testing.problems import MoEInputs, MoEShape, random_moe_problem
from support.gfx950_mutants import Launch, Trial, capture, tally

RECORD = Path(__file__).with_name("mutants.json")
"""Case → number of mutants by kind and verdict, and the labels of those that survived."""

GEMMS = ("_moe_gate_up_kernel", "_moe_down_kernel", "_moe_gemm_")
"""How the names of the kernels begin."""


class Case(NamedTuple):
    """One GEMM of a layer with one expert, whose rows fill a tile.

    Args:
        backend: "triton" or "cdna4". a_format: of the activations. block_m: rows of the expert
            and of a tile. depth: H and F. stage: 1 or 2.
    """

    backend: str
    a_format: str
    block_m: int
    depth: int
    stage: int


CASES = {
    "triton decode a8w4 stage 1": Case("triton", "mxfp8", 16, 1024, 1),
    "triton decode a4w4 stage 2": Case("triton", "mxfp4", 16, 1024, 2),
    "triton prefill a8w4 stage 1": Case("triton", "mxfp8", 128, 768, 1),
    "cdna4 decode a8w4 stage 1": Case("cdna4", "mxfp8", 16, 1024, 1),
    "cdna4 decode a4w4 stage 2": Case("cdna4", "mxfp4", 16, 1024, 2),
    "cdna4 decode a16w4 stage 1": Case("cdna4", "bf16", 16, 1024, 1),
}


def inputs_of(case: Case) -> MoEInputs:
    """Random data whose block scales differ, so that a wrong scale byte changes the result."""
    shape = MoEShape(case.depth, case.depth, 1, 1, mxpert.SiLU(), has_bias=True)
    inputs = random_moe_problem(shape, case.block_m, seed=3)
    draw = torch.Generator().manual_seed(4)
    blocks = torch.randint(-2, 3, (case.block_m, case.depth // 32), generator=draw)
    return replace(inputs, x=inputs.x * torch.exp2(blocks).repeat_interleave(32, 1).bfloat16())


def launch_of(case: Case) -> Launch:
    """The launch of a case's GEMM."""
    inputs, portable = inputs_of(case), case.backend == "triton"
    config = None
    if case.block_m > 16 and not portable:
        config = mxpert.MoEConfig(case.block_m, *[prefill_config(case.block_m)] * 2)
    with capture() as launches, mxpert.override(backend=case.backend, config=config):
        mxpert.fused_moe(
            inputs.x,
            inputs.weights if portable else inputs.weights.prepare(device="cpu"),
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            activation_format=case.a_format,
        )
    gemms = [each for each in launches if each.name.startswith(GEMMS)]
    return gemms[case.stage - 1]


def record(name: str) -> dict[str, Any]:
    """Judge all mutants of a case."""
    launch = launch_of(CASES[name])
    trial = Trial(launch)
    judged = [(mutant, trial.judge(mutant)) for mutant in trial.mutants]
    survivors = sorted({mutant.label for mutant, verdict in judged if verdict == "survived"})
    return {"kernel": launch.name, "counts": tally(judged), "survivors": survivors}


def main(names: list[str]) -> None:
    """Record the named cases, or all."""
    found = json.loads(RECORD.read_text("utf-8")) if names and RECORD.exists() else {}
    for name in names or CASES:
        start = time.monotonic()
        found[name] = record(name)
        total = sum(sum(row.values()) for row in found[name]["counts"].values())
        survived = sum(row["survived"] for row in found[name]["counts"].values())
        seconds = time.monotonic() - start
        print(f"{name}: {total - survived} of {total} caught, {seconds:.0f} s", flush=True)
        text = json.dumps({key: found[key] for key in CASES if key in found}, indent=1)
        RECORD.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
