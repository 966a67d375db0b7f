"""Reports that every command writes alike: the machine's facts, JSON, tables, plots."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..dispatch import detect_target
from ..dispatch.registry import BACKENDS
from ..errors import message, require

Row = dict[str, Any]
PLAIN_WIDTH = 120
PLOT_HINT = "no plot: matplotlib is not installed; pip install 'mxpert[plot]'"
ACTIVATION_NAMES = {"bf16": "a16w4", "mxfp8": "a8w4", "mxfp4": "a4w4",
                    "fp8_token": "a8w4 per token"}
FORMATS_HELP = f"Activation formats, out of {', '.join(ACTIVATION_NAMES)}."
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
    """What a command prints, or None where it does not exist or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20,
                              stdin=subprocess.DEVNULL).stdout.strip()
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
    text = _command_output("nvidia-smi", f"--id={index}", "--format=csv,noheader,nounits",
                           f"--query-gpu={','.join(_NVIDIA_SMI)}")
    values = [value.strip() for value in text.split(",")] if text else []
    return dict(zip(_NVIDIA_SMI, values, strict=True)) if len(values) == len(_NVIDIA_SMI) else {}


def environment(device: torch.device) -> Row:
    """Everything needed to judge a number later: device, clocks, versions, commit, date."""
    target = detect_target(device)
    facts: Row = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": target.name, "arch": target.arch, "kind": target.kind,
        "num_sms": target.num_sms, "cpu_threads": torch.get_num_threads(),
        "versions": {"mxpert": __version__, "python": platform.python_version(),
                     "torch": torch.__version__, "cuda": torch.version.cuda,
                     "hip": torch.version.hip, "triton": package_version("triton"),
                     "numpy": package_version("numpy"),
                     "transformers": package_version("transformers")},
    }
    if device.type == "cuda":
        facts["gpu"] = gpu_facts(device)
    return facts


def open_folder(folder: Path, command: str, option: str) -> None:
    """Make the folder that reports go to, before the work whose report could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(message(command, option, "a folder that can be written",
                                 f"{str(folder)!r}: {error.strerror}")) from error


def check_backend(backend: str | None, command: str) -> None:
    """Refuse an unknown --backend before the work starts."""
    require(backend is None or backend in BACKENDS, command, "--backend",
            need=f"one of {', '.join(BACKENDS)}", got=repr(backend))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document whole or not at all; NaN and infinity become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(document), indent=1, allow_nan=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False,
                                     encoding="utf-8") as handle:
        handle.write(text)
    try:
        os.replace(handle.name, path)
    except OSError:
        os.unlink(handle.name)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def make_console(*, stderr: bool = False) -> Console:
    """A console; a log file or pipe gets lines wide enough for every table."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def print_table(console: Console, title: str, columns: Sequence[str],
                rows: Sequence[Sequence[str]]) -> None:
    """One table; numbers right-aligned by convention of the caller's formatting."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


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


def parse_numbers(text: str, command: str, option: str) -> list[int]:
    """A comma-separated list of positive integers.

    >>> parse_numbers("1,16", "demo", "--tokens")
    [1, 16]
    """
    parts = [part.strip() for part in text.split(",")]
    valid = all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts)
    require(valid, command, option, need="positive integers separated by commas", got=repr(text),
            remedy=f"for example {option} 1,16,128")
    return [int(part) for part in parts]


def parse_choices(text: str, allowed: Sequence[str], command: str, option: str) -> list[str]:
    """A comma-separated list of names, each one of `allowed`.

    >>> parse_choices("bf16,mxfp8", ["bf16", "mxfp8", "mxfp4"], "bench", "--format")
    ['bf16', 'mxfp8']
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        require(part in allowed, command, option, need=f"some of {','.join(allowed)}",
                got=repr(part))
    return parts


def has_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(title: str, columns: int) -> tuple[Any, Any]:
    """A matplotlib figure with `columns` axes side by side, drawn without a display."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6.4 * columns, 4.8), dpi=120, layout="constrained")
    drawing.suptitle(title)
    return drawing, drawing.subplots(1, columns, squeeze=False)[0]


def plot_roofline(path: Path, title: str, rows: Sequence[Row], bandwidth: float,
                  rates: Mapping[str, float]) -> None:
    """Arithmetic intensity against rate, under the ceilings measured in the same run.

    Args:
        path: PNG to write. title: above the plot.
        rows: need "flops", "weight_bytes", "us", "activation", "stage".
        bandwidth: bytes/s. rates: activation format → floating-point operations/s.
    """
    drawing, (axes,) = figure(title, 1)
    points = [(row["flops"] / row["weight_bytes"], row["flops"] / row["us"] / 1e6,
               f"{ACTIVATION_NAMES[row['activation']]} {row['stage']}") for row in rows]
    intensities = [point[0] for point in points] or [1.0]
    xs = [min(intensities) / 2 * (4 * max(intensities) / min(intensities)) ** (i / 99)
          for i in range(100)]
    for name, rate in rates.items():
        axes.plot(xs, [min(x * bandwidth, rate) / 1e12 for x in xs], color="gray",
                  linestyle="-" if name == "bf16" else "--",
                  label=f"roof {ACTIVATION_NAMES[name]}: {bandwidth / 1e12:.2f} TB/s, "
                        f"{rate / 1e12:.3g} TFLOP/s")
    for label in dict.fromkeys(point[2] for point in points):
        chosen = [point for point in points if point[2] == label]
        axes.plot([p[0] for p in chosen], [p[1] for p in chosen], marker="o", linestyle="",
                  label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per weight byte", ylabel="TFLOP/s")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize="small")
    drawing.savefig(path)
