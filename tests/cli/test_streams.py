"""Standard output whose reader goes, and one on a full disk, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxpert.cli import main, streams

COMMAND = f"{sys.executable} -m mxpert"
PLAN = f"{COMMAND} bench --plan --ranks 8 --tokens 1,16,64 --output out"


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of bash; its exit code is the first command's."""
    line = f"{line}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("reader", ["| head -2", "2>&1 | true"])
def test_a_reader_may_go(reader: str, tmp_path: Path) -> None:
    """What was asked for is written all the same."""
    done = shell(f"{PLAN} --json report.json {reader}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    assert (tmp_path / "report.json").read_bytes() == (tmp_path / "out/plan.json").read_bytes()


def test_help_may_be_cut(tmp_path: Path) -> None:
    done = shell(f"{COMMAND} --help | true", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_at_standard_output_is_named(tmp_path: Path) -> None:
    done = shell(f"{PLAN} > /dev/full", tmp_path)
    assert done.returncode == main.EXIT_USER_ERROR
    assert done.stderr.splitlines()[-1] == (
        "error: mxpert bench: standard output — need room to write, got No space left on device"
    )


def test_streams_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    with streams.readers_may_go():
        assert isinstance(sys.stdout, streams._Stream)
        assert sys.stdout.isatty() is before[0].isatty()
    assert (sys.stdout, sys.stderr) == before
