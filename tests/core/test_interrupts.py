"""Ctrl-C in the command, in real processes: one line and 130, whatever is running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mxpert.core import interrupts
from mxpert.core.interrupts import EXIT_INTERRUPTED

Popen = subprocess.Popen[str]
SCRIPT = "import sys\nfrom mxpert.cli.main import app\nif __name__ == '__main__':\n    app()\n"
"""What pip writes for the entry point."""


def interrupted(arguments: list[str], folder: Path, wait: Callable[[Popen], None]) -> list[str]:
    """Interrupt a process and its ranks after `wait`; return the lines printed since then."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        text=True,
        start_new_session=True,
    ) as process:
        wait(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read().splitlines()
    assert process.returncode == EXIT_INTERRUPTED, rest
    assert not ranks_of(process)
    return rest


def until(sign: str) -> Callable[[Popen], None]:
    """Wait until a process prints `sign`."""

    def wait(process: Popen) -> None:
        assert process.stdout is not None
        next(line for line in process.stdout if sign in line)

    return wait


def ranks_of(process: Popen) -> list[int]:
    """Processes that it has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_rank = b"--multiprocessing-fork" in (path / "cmdline").read_bytes()
            if is_rank and os.getpgid(int(path.name)) == process.pid:
                found.append(int(path.name))
    return found


def until_ranks_import(process: Popen) -> None:
    """Wait until both ranks have mapped torch's libraries, which they import after interrupts."""
    while sum("libtorch" in Path(f"/proc/{i}/maps").read_text() for i in ranks_of(process)) < 2:
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("form", "sign"), [("module", "torch._"), ("script", "mxpert.errors"), ("script", "rich.table")]
)
def test_while_a_command_is_imported(form: str, sign: str, tmp_path: Path) -> None:
    (tmp_path / "mxpert").write_text(SCRIPT, encoding="utf-8")
    start = ["-m", "mxpert"] if form == "module" else [str(tmp_path / "mxpert")]
    rest = interrupted(["-X", "importtime", *start, "doctor"], tmp_path, until(sign))
    assert rest[-1] == interrupts.INTERRUPTED
    assert not [line for line in rest[:-1] if not line.startswith("import time:")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "wait", [until_ranks_import, until("making weights")], ids=["import", "work"]
)
def test_while_ranks(wait: Callable[[Popen], None], tmp_path: Path) -> None:
    arguments = ["-m", "mxpert", "bench", "--expert-parallel", "2", "--tokens", "16"]
    rest = interrupted(arguments, tmp_path, wait)
    said = [line for line in rest if not line.startswith("bench: ")]
    assert said == [interrupts.INTERRUPTED]


SLOW_START = """
import sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    open("a rank starts", "w").close()
    time.sleep(1)
"""
SLOW_LAUNCH = """
import sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    open("a rank starts", "w").close()
else:
    from multiprocessing import util
    spawn = util.spawnv_passfds
    def spawn_and_wait(*arguments):
        pid = spawn(*arguments)
        time.sleep(1)
        return pid
    util.spawnv_passfds = spawn_and_wait
"""
"""Two of sitecustomize.py, which Python imports before it runs anything of ours. In the second a
rank waits for its start data."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("customize", [SLOW_START, SLOW_LAUNCH], ids=["rank", "launcher"])
def test_while_python_starts_in_ranks(
    customize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(customize, encoding="utf-8")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), path])))

    def wait(process: Popen) -> None:
        while not (tmp_path / "a rank starts").exists():
            assert process.poll() is None
            time.sleep(0.01)

    arguments = ["-m", "mxpert", "bench", "--expert-parallel", "2", "--tokens", "16"]
    assert interrupted(arguments, tmp_path, wait) == [interrupts.INTERRUPTED]


@pytest.mark.parametrize(
    ("argv", "original", "found"),
    [
        (["-m"], ["python", "-m", "mxpert", "doctor"], True),
        (["-m"], ["python", "-X", "dev", "-m", "mxpert"], True),
        (["-m"], ["python", "-m", "pytest"], False),
        (["/usr/bin/mxpert", "doctor"], ["python", "/usr/bin/mxpert", "doctor"], True),
        (["/x/mxpert/__main__.py"], ["python", "-c", "…", "--multiprocessing-fork"], True),
        (["train.py", "-m", "mxpert"], ["python", "train.py", "-m", "mxpert"], False),
        (["/x/mxpert/train.py"], ["python", "/x/mxpert/train.py"], False),
        ([""], ["python"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_handles_interrupts(
    argv: list[str], original: list[str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert interrupts.is_command() is found


def test_importing_the_library_leaves_interrupts_alone() -> None:
    assert signal.getsignal(signal.SIGINT) is not interrupts.end_at_once


def test_raising_is_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, interrupts.end_at_once)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.raising():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is interrupts.end_at_once
    finally:
        signal.signal(signal.SIGINT, before)
    with interrupts.raising():
        assert signal.getsignal(signal.SIGINT) is before


def test_a_deferred_interrupt_comes_after_its_block() -> None:
    done = []

    @interrupts.deferred()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all of it"]
