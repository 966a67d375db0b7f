"""Run the test suite in three processes and print one summary line.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tier needs its own
process. The third runs the same tests on gfx950 code, the tests of gfx950's own kernels, and
the emulator's. All
pytest runs get the same arguments. The exit status is 0 only if all pass.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFORMANCE = "tests/conformance"
"""Cases of every backend: the reference (and a GPU's kernels) in the first process, interpreted
kernels in the second, gfx950 code in the third."""
GFX950 = (
    "gfx950-emulator/tests",
    "tests/gfx950",
    "tests/grouped/test_cdna4.py",
    "tests/moe/cdna4",
    "tests/quantize/test_dual_cdna4.py",
)
"""Tests that execute gfx950 code on the CPU."""
DEFAULTS = {"PYTHONDONTWRITEBYTECODE": ""}
"""Variables of all processes. Where images forbid bytecode files, each of the suite's processes
would compile the package and its tests again: a fifth of what tests of imports cost."""
CLOSING = re.compile(r"^=* ?(?P<counts>\d+ [a-z].*) in [\d.]+s.*$")
NO_TESTS_COLLECTED = 5


def gpu_memory() -> int:
    """Free memory of the first GPU in GiB, 0 without a GPU.

    A separate process reads it, so that this one creates no CUDA context.
    """
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; print(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >> 30)",
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    return int(answer[-1]) if answer and answer[-1].isdecimal() else 0


def workers(memory: int) -> int:
    """Number of pytest workers: one per core, or on a GPU one per 24 GiB and at most four.

    24 GiB hold the largest model's layer and float64 copies of its experts. On a GPU most of the
    time is compilation.
    """
    cores = os.cpu_count() or 1
    return cores if memory == 0 else max(1, min(4, cores, memory // 24))


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, Counter[str]]:
    """Run one pytest process and print its lines; return its status and its counts."""
    command = [sys.executable, "-m", "pytest", "--color=no", *arguments]
    print("$", *command[1:], flush=True)
    counts: Counter[str] = Counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | DEFAULTS | environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            closing = CLOSING.match(line)
            if closing:
                counts = Counter(
                    {
                        name: int(number)
                        for number, name in re.findall(r"(\d+) ([a-z]+)", closing["counts"])
                    }
                )
    return process.returncode, counts


def main(arguments: list[str]) -> int:
    """Run all processes, then print ``==== 12 passed, 1 skipped in 3.45s ====``."""
    started = time.monotonic()
    memory = gpu_memory()
    spread = ["-n", str(workers(memory)), "--dist", "worksteal"]
    # Without a GPU each worker uses one thread; otherwise the workers compete for the cores.
    threads = {} if memory else {"OMP_NUM_THREADS": "1"}
    ignored = [f"--ignore={place}" for place in GFX950]
    status, total = run([*spread, *ignored, "tests", *arguments], threads)
    parts = (
        ([CONFORMANCE], {"TRITON_INTERPRET": "1"}),
        (["--gfx950", CONFORMANCE, *GFX950], {"OMP_NUM_THREADS": "1"}),
    )
    for selection, environment in parts:
        code, counts = run([*spread, *selection, *arguments], threads | environment)
        status = status or (0 if code == NO_TESTS_COLLECTED and arguments else code)
        total += counts
    order = (
        "failed",
        "passed",
        "skipped",
        "deselected",
        "xfailed",
        "xpassed",
        "warnings",
        "errors",
    )
    total["errors"] += total.pop("error", 0)
    total["warnings"] += total.pop("warning", 0)
    text = ", ".join(f"{total[name]} {name}" for name in order if total[name]) or "no tests ran"
    print(f" {text} in {time.monotonic() - started:.2f}s ".center(80, "="), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
