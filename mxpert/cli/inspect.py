"""`mxpert inspect`: MX statistics of a quantised checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..integrations.inspect_checkpoint import ProjectionStatistics, inspect_checkpoint
from .quantize import (
    byte_progress,
    check_summary_target,
    output_console,
    short_name,
    write_summary,
)

_BARS = "▁▂▃▄▅▆▇█"
_MAX_COLUMNS = 12


def inspect(
    path: Annotated[Path, typer.Argument(
        help="Checkpoint directory in gpt-oss's format, or one .safetensors file.",
        show_default=False)],
    source: Annotated[Path | None, typer.Option(
        help="The bf16 checkpoint that it came from: adds the SQNR to it.")] = None,
    layer: Annotated[int | None, typer.Option(help="Only this decoder layer.")] = None,
    json: Annotated[str | None, typer.Option(
        metavar="FILE", help="Write everything as JSON to FILE, or to standard output for '-'.",
    )] = None,
) -> None:
    """Show scale histograms, zero blocks, exact-fold certificates and, with a source, the SQNR.

    A tensor folds exactly if each row's scales lie within 15 binades: then its codes become FP8
    without rounding; otherwise the table counts the blocks that do not. Exit code 2 on bad input.

    Examples:

        mxpert inspect ./gpt-oss-20b --layer 0

        mxpert inspect ./mixtral-mxfp4 --source ./mixtral-bf16 --json -
    """
    check_summary_target(json, "inspect")
    with byte_progress("inspecting") as advance:
        found = inspect_checkpoint(path, source=source, layer=layer, on_progress=advance)
    if json != "-":
        output_console().print(_table(found, with_source=source is not None))
    if json is not None:
        write_summary(json, {"path": str(path), "source": None if source is None else str(source),
                             "projections": [entry.as_json() for entry in found]})


def sparkline(histogram: dict[int, int]) -> str:
    """A bar per exponent, lowest to highest; neighbours share one where the range is wide.

    Example:
        >>> sparkline({-3: 1, -2: 8, 0: 4})
        '▁█ ▄'
    """
    if not histogram:
        return ""
    low, high = min(histogram), max(histogram)
    width = -(-(high - low + 1) // _MAX_COLUMNS)
    columns = [0] * ((high - low) // width + 1)
    for exponent, count in histogram.items():
        columns[(exponent - low) // width] += count
    top = max(columns)
    return "".join(_BARS[-(-count * len(_BARS) // top) - 1] if count else " " for count in columns)


def _table(found: list[ProjectionStatistics], *, with_source: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left",
                  title="MXFP4 tensors; scales as exponents of two, minimum/median/maximum")
    has_nan = any(entry.nan_scales for entry in found)
    table.add_column("tensor", no_wrap=True)
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("MiB", justify="right")
    table.add_column("scales", justify="right", no_wrap=True)
    table.add_column("histogram", no_wrap=True)
    table.add_column("zero", justify="right")
    if has_nan:
        table.add_column("NaN", justify="right")
    table.add_column("folds", no_wrap=True)
    table.add_column("span", justify="right")
    if with_source:
        table.add_column("SQNR dB", justify="right")
    for entry in found:
        scales = (entry.min_exponent, entry.median_exponent, entry.max_exponent)
        cells = [short_name(entry.layer, entry.projection),
                 "×".join(str(size) for size in entry.shape), f"{entry.bytes / 2**20:.2f}",
                 "/".join("–" if value is None else f"{value:d}" for value in scales),
                 sparkline(entry.scale_histogram), str(entry.zero_blocks),
                 *([str(entry.nan_scales)] if has_nan else []),
                 "exactly" if entry.exact_fold else f"not {entry.blocks_outside}",
                 str(entry.widest_span), *([_sqnr(entry)] if with_source else [])]
        table.add_row(*cells)
    return table


def _sqnr(entry: ProjectionStatistics) -> str:
    if entry.sqnr_db is not None:
        return f"{entry.sqnr_db:.2f}"
    return "exact" if entry.relative_l2 == 0 else "–"
