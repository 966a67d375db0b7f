"""Under what conditions a comparison was made: ceilings of this run, protocol, environment."""

from __future__ import annotations

from typing import Any

import torch
from cells import DECODE_TOKENS

from mxpert.cli.report import environment
from mxpert.testing.timing import matmul_rate, read_bandwidth, time_graph

IDLE_SECONDS = 0.05
DECODE_IDLE_SECONDS = 0.01
"""Decode replays of a stage last a few milliseconds, at a power far from the limit."""

SUSTAINED_US = 500_000
BUDGET_US = 30_000
"""Device time of one variant's replays: long cells get fewer of them."""

LEAST_REPEATS, MOST_REPEATS = 5, 12
WARMUP = 3
IDLE = (
    f"idle {1000 * IDLE_SECONDS:.0f} ms ({1000 * DECODE_IDLE_SECONDS:.0f} ms at T ≤ "
    f"{DECODE_TOKENS}), {WARMUP} warm-up replays, then timed replays"
)
SUSTAINED = f"{SUSTAINED_US / 1e6} s of replays, then timed replays"


def idle_seconds(tokens: int) -> float:
    """How long the GPU rests before a stage."""
    return DECODE_IDLE_SECONDS if tokens <= DECODE_TOKENS else IDLE_SECONDS


def num_repeats(us: float) -> int:
    """Timed replays of a variant that takes so many µs."""
    return min(MOST_REPEATS, max(LEAST_REPEATS, int(BUDGET_US / us)))


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:  # a kernel: captured, copy_() is a memcpy node, 2.8 TB/s on an H200
        torch.bitwise_not(source, out=target)

    timing = time_graph({"copy": [copy]}, device=device, repeats=10)
    return 2 * size / timing["copy"].us * 1e6


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU can do at most, in this run: TB/s and TFLOP/s."""
    on_gpu = device.type == "cuda"
    ceilings = {"read_tbs": read_bandwidth(device) / 1e12}
    ceilings["copy_tbs"] = copy_rate(device, (1 << 32) if on_gpu else (1 << 26)) / 1e12
    for name, format in (("bf16", "bf16"), ("fp8", "mxfp8")):
        rates = {
            size: matmul_rate(device, format, size) / 1e12
            for size in ((4096, 8192) if on_gpu else (256, 512))
        }
        ceilings |= {f"{name}_{size}_tflops": rate for size, rate in rates.items()}
        ceilings[f"{name}_tflops"] = max(rates.values())
    return ceilings


def make_meta(device: torch.device, commit: str | None, sustained: bool) -> dict[str, Any]:
    """Everything but the ceilings."""
    facts = environment(device)
    versions = facts["versions"] | {"driver": facts.get("gpu", {}).get("driver_version")}
    return {
        "device": facts["device"],
        "clocks": facts.get("gpu", {}),
        "versions": versions,
        "commit": commit or facts["commit"],
        "date": facts["date"],
        "ceilings": {},
        "peers": {},
        "protocol": {
            "power": SUSTAINED if sustained else IDLE,
            "timing": "CUDA-graph replays, implementations in turns of changing order, L2 "
            "swept before each; us is the median, us_spread the width of the "
            "10-90 % band; T < 8 rotates among 8 // T routings",
            "data": "normal x, uniformly random codes, scales with a deviation of one binade, "
            "SwiGLU with interleaved gate and up, no biases; marlin: own random codes",
            "stages": "*_gemm: GEMM kernel with its epilogue; gate_up, down: whole stage on a "
            "ready routing; layer: from logits, top-k and sort included. The "
            "intermediate is quantised in gate_up by mxpert/mxfp8, mxpert/mxfp4 and "
            "humming/fp8_token, in down by mxpert/fp8_token",
            "rel_l2": "sampled tokens; mxpert: to float64 on the same quantised operands; "
            "peers (layer): to float64 with bf16 activations",
        },
    }
