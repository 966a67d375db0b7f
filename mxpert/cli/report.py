"""Output that all commands share: progress, the machine's facts, JSON, tables, plots."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import __version__
from ..core.files import write_atomically
from ..core.target import detect_target
from ..errors import message
from .plots import has_matplotlib

Row = dict[str, Any]
Advance = Callable[[float, float, str], None]
"""Called with (work done, work in all, what comes next)."""
LINE_SECONDS = 5.0
"""Seconds between two lines of progress where standard error is no terminal."""
FORESEEN = 0.05
"""Part of the work after which the time left can be told."""
PLAIN_WIDTH = 120
UNBOUNDED_WIDTH = 10_000
PLOT_HINT = "no plot: matplotlib is not installed; pip install matplotlib"
_NVIDIA_SMI = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def best_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def package_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command_output(*command: str) -> str | None:
    """Output of a command, or None where it does not exist or fails."""
    try:
        return subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str | None:
    """The commit of the checkout that this package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return None
    found = _command_output("git", "-C", str(root), "rev-parse", "HEAD")
    dirty = _command_output("git", "-C", str(root), "status", "--porcelain", "--", "mxpert")
    return f"{found}+changes" if found and dirty else found


def gpu_facts(device: torch.device) -> Row:
    """Driver, clocks (MHz) and power limit (W) as nvidia-smi tells them; empty without it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    text = _command_output(
        "nvidia-smi",
        f"--id={index}",
        "--format=csv,noheader,nounits",
        f"--query-gpu={','.join(_NVIDIA_SMI)}",
    )
    values = [value.strip() for value in text.split(",")] if text else []
    return dict(zip(_NVIDIA_SMI, values, strict=True)) if len(values) == len(_NVIDIA_SMI) else {}


def environment(device: torch.device) -> Row:
    """Everything needed to judge a number later: device, clocks, versions, commit, date."""
    target = detect_target(device)
    facts: Row = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": target.name,
        "arch": target.arch,
        "kind": target.kind,
        "num_sms": target.num_sms,
        "cpu_threads": torch.get_num_threads(),
        "versions": {
            "mxpert": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": package_version("triton"),
            "numpy": package_version("numpy"),
            "transformers": package_version("transformers"),
        },
    }
    if device.type == "cuda":
        facts["gpu"] = gpu_facts(device)
    return facts


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document whole or not at all; NaN and infinity become null.

    The file's mode follows the umask. A pipe or a device is written to, never replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _as_text(document)
    if path.is_file() or not path.exists():
        write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails where a pipe has no reader
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ValueError(
            message("write_json", str(path), "a file that can be written", error.strerror)
        ) from error


def write_report(target: str | None, document: Mapping[str, Any]) -> None:
    """Destination of --json: none for None, standard output for "-", else a file."""
    if target == "-":
        sys.stdout.write(_as_text(document))
        sys.stdout.flush()
    elif target is not None:
        write_json(Path(target), document)


def write_results(
    folder: Path, json_name: str, plot_name: str, document: Row, draw: Callable[[Path], None] | None
) -> None:
    """Write a document and, where matplotlib is installed, its plot; name them on stderr.

    draw: None where there is nothing to plot; a plot of an earlier run is removed then.
    """
    console, written = make_console(stderr=True), [str(folder / json_name)]
    write_json(folder / json_name, document)
    if draw is None:
        (folder / plot_name).unlink(missing_ok=True)
    elif has_matplotlib():
        draw(folder / plot_name)
        written.append(str(folder / plot_name))
    else:
        console.print(PLOT_HINT, markup=False)
    console.print(f"wrote {', '.join(written)}", markup=False, highlight=False, soft_wrap=True)


def _as_text(document: Mapping[str, Any]) -> str:
    return json.dumps(_plain(document), indent=1, allow_nan=False, default=str) + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def make_console(*, stderr: bool = False) -> Console:
    """A console. Text in a file or pipe has PLAIN_WIDTH columns, unless $COLUMNS says otherwise."""
    console = Console(stderr=stderr)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, width=shutil.get_terminal_size((PLAIN_WIDTH, 25)).columns)


def result_console(json_target: str | None) -> Console:
    """Where tables and verdicts go: standard error where standard output is for JSON."""
    return make_console(stderr=json_target == "-")


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print plain prose: wrapped at words in a terminal, a line in a file or pipe."""
    options: Row = {"markup": False, "highlight": False, "soft_wrap": not console.is_terminal}
    console.print(text, **options, style=style)


class Column(NamedTuple):
    """A table's column.

    rank: columns of the highest rank go first where a terminal is too narrow; those of rank 0 stay.
        A column that tells rows apart has rank 0.
    """

    name: str
    rank: int = 0


def print_table(
    console: Console, title: str, columns: Sequence[str | Column], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table: first column left-aligned, the others right-aligned.

    On a narrow terminal columns are left out, by rank, and named below the table; a file or pipe
    gets them all. No cell is cut. Cells are rich markup; the title is plain text.
    """
    named = [column if isinstance(column, Column) else Column(column) for column in columns]
    shown = list(range(len(named)))
    table = _table(named, rows, shown)
    width = console.width
    if not console.is_terminal:
        console.width = max(width, _width(console, table))
    while _width(console, table) > console.width and any(named[index].rank for index in shown):
        shown.remove(max(reversed(shown), key=lambda index: named[index].rank))
        table = _table(named, rows, shown)
    say(console, title, style="bold")
    console.print(table)
    if not console.is_terminal:
        console.width = width
    left_out = [column.name for index, column in enumerate(named) if index not in shown]
    if left_out:
        say(console, f"left out at {console.width} columns: {', '.join(left_out)}", style="dim")


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for index in shown:
        table.add_column(columns[index].name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def _width(console: Console, table: Table) -> int:
    """Columns that a table needs to show each cell on one line."""
    options = console.options.update(width=UNBOUNDED_WIDTH)
    return Measurement.get(console, options, table).maximum


@contextmanager
def progress(console: Console, title: str) -> Iterator[Advance]:
    """Show how far a command is and how long it still takes.

    Args:
        console: standard error. title: what the command does, for example "quantising".

    Yields:
        The function to call as the work advances.
    """
    if not console.is_terminal:
        yield _Lines(console, title).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{title}: {escape(what)}"
        )


class _Lines:
    """Prints the first call and then at most one line every LINE_SECONDS.

    Time left follows from the work done since the first call: what precedes it is no such work.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.began: float | None = None
        self.printed: float | None = None

    def advance(self, done: float, total: float, what: str) -> None:
        now = time.monotonic()
        self.began = now if self.began is None else self.began
        if self.printed is not None and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        line = f"{self.title}: {100 * done / max(total, 1):.0f} %, {what}"
        if done >= FORESEEN * total > 0:
            line += f", {duration((now - self.began) * (total - done) / done)} left"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A rough duration in words.

    >>> duration(4.2), duration(100), duration(7000)
    ('about 5 s', 'about 2 min', 'about 2 h')
    """
    if seconds < 90:
        return f"about {max(1, 5 * round(seconds / 5))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.0f} h"


def format_time(us: float) -> str:
    """Microseconds, or milliseconds from 10 000 µs on.

    >>> format_time(12.34), format_time(56789.0)
    ('12.3 µs', '56.8 ms')
    """
    return f"{us:.1f} µs" if us < 10_000 else f"{us / 1e3:.1f} ms"


def format_rate(row: Mapping[str, Any]) -> str:
    """Bytes per second where reading weights sets the floor, else operations per second.

    >>> format_rate({"tbs": 0.0012, "tflops": 0.5, "memory_bound": False})
    '500 GFLOP/s'
    """
    value, unit = (row["tbs"], "B/s") if row["memory_bound"] else (row["tflops"], "FLOP/s")
    return f"{value:.2f} T{unit}" if value >= 1 else f"{value * 1e3:.3g} G{unit}"
