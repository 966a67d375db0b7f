"""`mxpert quantize`: a bf16 MoE checkpoint becomes an MXFP4 one."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..errors import require
from ..formats.spec import ScaleRule
from ..integrations.quantize_checkpoint import QuantizeReport, quantize_checkpoint
from ..integrations.module_paths import layer_number
from ..integrations.safetensors_files import write_json

EXIT_NOT_VERIFIED = 1


def quantize(
    source: Annotated[Path, typer.Argument(
        help="Directory of a bf16 MoE checkpoint (Mixtral, Qwen-MoE, DeepSeek, gpt-oss naming).",
        show_default=False)],
    destination: Annotated[Path, typer.Argument(
        help="Directory to write; absent, empty, or left by an interrupted run.",
        show_default=False)],
    scale_rule: Annotated[ScaleRule, typer.Option(
        help="How a block's scale follows from its largest magnitude.")] = ScaleRule.RCEIL,
    device: Annotated[str, typer.Option(help="Where to quantise, for example cuda.")] = "cpu",
    json: Annotated[str | None, typer.Option(
        metavar="FILE", help="Write a summary as JSON to FILE, or to standard output for '-'.",
    )] = None,
) -> None:
    """Quantise the experts of a bf16 MoE checkpoint to MXFP4, in the format gpt-oss publishes.

    Everything else is copied unchanged. Run the same command again to continue after an
    interruption. What was written is read back and compared with the source. Exit code 0: verified;
    1: verification failed; 2: bad input or a destination that would be overwritten.

    Examples:

        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4

        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4 --scale-rule floor --json report.json
    """
    check_summary_target(json, "quantize")
    with byte_progress("quantising") as advance:
        report = quantize_checkpoint(source, destination, scale_rule=scale_rule, device=device,
                                     on_progress=advance)
    if json != "-":
        _print_report(output_console(), report)
    if json is not None:
        write_summary(json, report.as_json())
    if not report.verified:
        for failure in report.failures:
            typer.echo(f"error: quantize: {failure}", err=True)
        raise typer.Exit(EXIT_NOT_VERIFIED)


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, moved by calls of (bytes done, bytes in all, what)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=what)


def output_console() -> Console:
    """Standard output; wide enough for every table where it is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def short_name(layer: int, projection: str) -> str:
    """Layer and projection for a table row.

    Example:
        >>> short_name(3, "gate_up_proj")
        '3 gate_up'
    """
    return f"{'–' if layer < 0 else layer} {projection.removesuffix('_proj')}"


def check_summary_target(target: str | None, command: str) -> None:
    """Refuse a --json file that could not be written, before the work starts."""
    if target is not None and target != "-":
        require(Path(target).parent.is_dir() and not Path(target).is_dir(), command, "--json",
                need="a file in an existing directory, or -", got=target)


def write_summary(target: str, content: dict[str, Any]) -> None:
    """Write JSON to a file (complete or not at all), or to standard output for "-"."""
    if target == "-":
        typer.echo(json_module.dumps(content, indent=2, allow_nan=False))
    else:
        write_json(Path(target), content)


def _print_report(console: Console, report: QuantizeReport) -> None:
    table = Table(box=box.SIMPLE, title="Quantised to MXFP4", title_justify="left")
    table.add_column("experts")
    for heading in ("shape", "MiB", "of", "SQNR dB"):
        table.add_column(heading, justify="right")
    for entry in report.projections:
        sqnr = "–" if entry.signal == 0 else "exact" if entry.sqnr_db is None else (
            f"{entry.sqnr_db:.2f}")
        table.add_row(short_name(layer_number(entry.module), entry.projection),
                      "×".join(str(size) for size in entry.shape),
                      f"{entry.bytes / 2**20:.2f}", f"{entry.source_bytes / 2**20:.2f}", sqnr)
    console.print(table)
    console.print(
        f"{report.destination}: {report.shards_written} shards written, {report.shards_resumed} "
        f"resumed, {report.source_bytes / 2**20:.1f} MiB became {report.bytes / 2**20:.1f} MiB, "
        f"scale rule {report.scale_rule}, gate and up rows {report.gate_up_order}; "
        + ("verified." if report.verified else "verification FAILED."),
        markup=False, soft_wrap=True)
