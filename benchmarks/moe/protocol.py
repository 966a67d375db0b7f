"""How long the GPU rests, how often a variant is replayed, and the meta of a comparison."""

from __future__ import annotations

import argparse

from benchmarks.harness.document import FACTS, Row
from benchmarks.harness.script import machine
from benchmarks.moe.cells import DECODE_TOKENS

IDLE_SECONDS = 0.05
DECODE_IDLE_SECONDS = 0.01
"""Decode replays of a stage last a few milliseconds, at a power far from the limit."""

BUDGET_US = 30_000
"""Device time of one variant's replays: long cells get fewer of them."""

LEAST_REPEATS, MOST_REPEATS = 5, 12
FEW_REPEATS_FROM = 8192
"""From so many tokens on, scripts that measure mxpert alone take the least repeats."""

WARMUP = 3
IDLE = (
    f"idle {1000 * IDLE_SECONDS:.0f} ms ({1000 * DECODE_IDLE_SECONDS:.0f} ms at T ≤ "
    f"{DECODE_TOKENS}), {WARMUP} warm-up replays, then timed replays"
)
SUSTAINED = "each variant alone: 1 s of idling, 2 s of replays, of which the last fifth is timed"
_FIGURES = (
    "us is the median, us_spread the width of the 10-90 % band; T < 8 rotates among 8 // T routings"
)
TIMING_OF_LOAD = f"CUDA-graph replays without a sweep of L2; {_FIGURES}; cuBLAS under the same load"
DATA = (
    "normal x, uniformly random codes, scales with a deviation of one binade, "
    "SwiGLU with interleaved gate and up, no biases"
)
PROTOCOL = {
    "timing": "CUDA-graph replays, implementations in turns of changing order, L2 "
    f"swept before each; {_FIGURES}",
    "data": f"{DATA}; marlin: own random codes",
    "stages": "*_gemm: GEMM kernel with its epilogue; gate_up, down: whole stage on a "
    "ready routing; layer: from logits, top-k and sort included. The "
    "intermediate is quantised in gate_up by mxpert/mxfp8, mxpert/mxfp4 and "
    "humming, in down by mxpert/fp8_token",
    "rel_l2": "sampled tokens; mxpert: to float64 on the same quantised operands; "
    "triton_kernels: to float64 with bf16 activations; humming: the largest of its steps, each to "
    "float64 on what the step before gave",
}


def idle_seconds(tokens: int) -> float:
    """How long the GPU rests before a stage."""
    return DECODE_IDLE_SECONDS if tokens <= DECODE_TOKENS else IDLE_SECONDS


def num_repeats(us: float) -> int:
    """Timed replays of a variant that takes so many µs."""
    return min(MOST_REPEATS, max(LEAST_REPEATS, int(BUDGET_US / us)))


def repeats_of(tokens: int) -> int:
    """Timed replays of a variant, where its time is not estimated."""
    return LEAST_REPEATS if tokens >= FEW_REPEATS_FROM else MOST_REPEATS


def make_meta(options: argparse.Namespace) -> Row:
    """Everything but the ceilings."""
    protocol = {"power": IDLE, **PROTOCOL}
    if options.sustained:
        protocol |= {"power": SUSTAINED, "timing": TIMING_OF_LOAD}
    return machine(options, *FACTS, ceilings={}, peers={}, protocol=protocol)
