"""Run the suite in its two processes and close with one line for both.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tier needs a process of
its own. Arguments go to both pytest runs. The exit status is 0 only where both are green.
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
INTERPRETED = "tests/interpreted"
CLOSING = re.compile(r"^=* ?(?P<counts>\d+ [a-z].*) in [\d.]+s.*$")
NO_TESTS_COLLECTED = 5


def has_gpu() -> bool:
    """Whether torch sees a GPU, asked in a process of its own so that this one holds no context."""
    return subprocess.run([sys.executable, "-c",
                           "import sys, torch; sys.exit(not torch.cuda.is_available())"],
                          check=False).returncode == 0


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, Counter[str]]:
    """One pytest process: its lines pass through, its status and its counts come back."""
    command = [sys.executable, "-m", "pytest", "--color=no", *arguments]
    print("$", *command[1:], flush=True)
    counts: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            closing = CLOSING.match(line)
            if closing:
                counts = Counter({name: int(number) for number, name in
                                  re.findall(r"(\d+) ([a-z]+)", closing["counts"])})
    return process.returncode, counts


def main(arguments: list[str]) -> int:
    """Both runs, then ``==== 12 passed, 1 skipped in 3.45s ====``."""
    started = time.monotonic()
    # One worker a core; on a GPU machine one process, so that workers do not fight for its memory.
    # Without a GPU each worker computes on one thread, or two workers would fight for two cores.
    spread = [] if has_gpu() else ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    threads = {"OMP_NUM_THREADS": "1"} if spread else {}
    status, total = run([*spread, f"--ignore={INTERPRETED}", "tests", *arguments], threads)
    if (ROOT / INTERPRETED).is_dir():
        second, counts = run([*spread, INTERPRETED, *arguments],
                             threads | {"TRITON_INTERPRET": "1"})
        status = status or (0 if second == NO_TESTS_COLLECTED and arguments else second)
        total += counts
    order = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings",
             "errors")
    total["errors"] += total.pop("error", 0)
    total["warnings"] += total.pop("warning", 0)
    text = ", ".join(f"{total[name]} {name}" for name in order if total[name]) or "no tests ran"
    print(f" {text} in {time.monotonic() - started:.2f}s ".center(80, "="), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
