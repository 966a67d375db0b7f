"""Event timing of calls of a millisecond and more, in turns, at a stated load; and ceilings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch

from mxpert.testing.timing import Timing, matmul_rate, read_bandwidth, time_graph

Call = Callable[[], object]
PAUSE = 3.0
"""A call is followed by this many times its own duration of idling, so that the power limit does
not decide: an H200 multiplies about 15 % slower under unbroken load."""

SPIN_HZ = 2.0e9
"""A spinning kernel of this many cycles a second hides the host's part of a call."""
LONGEST_SPIN_SECONDS = 5e-3


def time_calls(
    variants: Mapping[str, Call],
    *,
    device: torch.device,
    repeats: int,
    pause: float = PAUSE,
    failures: dict[str, Exception] | None = None,
) -> dict[str, Timing]:
    """Median times of eager calls that take turns in changing order; on a CPU plain calls.

    The order changes because a call's clock depends on what ran before it: in a fixed order the
    same kernel came out 10 % slower behind itself than behind a slow one.

    A call is timed by events around it. A kernel that spins for as long as the host needs to
    enqueue the call runs before, so that host time is not measured. Operands are larger than L2.

    Args:
        variants: name → call. repeats: timed calls of each. pause: see PAUSE; 0 is sustained load.
        failures: takes the error of a variant that cannot run.
    """
    if device.type != "cuda":
        calls = {name: [call] for name, call in variants.items()}
        return time_graph(calls, device=device, repeats=repeats, warmup=0, failures=failures)
    spins: dict[str, int] = {}
    for name, call in variants.items():
        try:
            call()  # compiles
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            seconds = min(time.perf_counter() - start, LONGEST_SPIN_SECONDS)
            torch.cuda.synchronize()
            spins[name] = int(1.5 * seconds * SPIN_HZ)
        except Exception as error:
            if failures is None:
                raise
            failures[name] = error
    samples: dict[str, list[float]] = {name: [] for name in spins}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(spins), len(spins)):
            us = _time_once(variants[name], spins[name])
            samples[name].append(us)
            time.sleep(pause * us * 1e-6)
    return {name: Timing.of(values) for name, values in samples.items()}


def _time_once(call: Call, spin: int) -> float:
    """Microseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(spin)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:  # a kernel: captured, copy_() is a memcpy node, 2.8 TB/s on an H200
        torch.bitwise_not(source, out=target)

    timing = time_graph({"copy": [copy]}, device=device, repeats=10)
    return 2 * size / timing["copy"].us * 1e6


def measure_ceilings(device: torch.device, *, sustained: bool = False) -> dict[str, float]:
    """What this GPU can do at most, in this run: TB/s and TFLOP/s.

    sustained: whether it multiplies under unbroken load.
    """
    on_gpu = device.type == "cuda"
    ceilings = {"read_tbs": read_bandwidth(device) / 1e12}
    ceilings["copy_tbs"] = copy_rate(device, (1 << 32) if on_gpu else (1 << 26)) / 1e12
    for name, format in (("bf16", "bf16"), ("fp8", "mxfp8")):
        rates = {
            size: matmul_rate(device, format, size, sustained=sustained) / 1e12
            for size in ((4096, 8192) if on_gpu else (256, 512))
        }
        ceilings |= {f"{name}_{size}_tflops": rate for size, rate in rates.items()}
        ceilings[f"{name}_tflops"] = max(rates.values())
    return ceilings
