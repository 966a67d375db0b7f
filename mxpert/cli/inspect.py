"""`mxpert inspect`: MX statistics of a quantised checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..integrations.checkpoints.inspect import ProjectionStatistics, inspect_checkpoint
from ..integrations.module_paths import short_names
from .options import JsonFile, check_rounding, check_target
from .quantize import short_name
from .report import (
    Column,
    environment,
    make_console,
    print_table,
    progress,
    result_console,
    write_report,
)

_BARS = "▁▂▃▄▅▆▇█"
_MAX_COLUMNS = 12


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint directory in any container that loads, one .safetensors file in "
            "gpt-oss's format, or the id of a model on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Option(help="The bf16 checkpoint that it came from: adds the SQNR to it."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Only this decoder layer.")] = None,
    weight_rounding: Annotated[
        str | None,
        typer.Option(
            metavar="e4m3",
            help="Measure what rounding NVFP4 to one e4m3 a weight would cost.",
            show_default=False,
        ),
    ] = None,
    json_to: JsonFile = None,
) -> None:
    """Show container, scale histograms, exact-fold certificates and, with a source, the SQNR.

    'scales' are the smallest, median and largest exponent of the scales. 'folds' says "exactly"
    where the scales of each row of MXFP4 lie within 15 binades: the codes then become FP8 without
    rounding. Otherwise it counts the blocks that do not fold. 'span' is the widest row, in binades.
    'casts' counts the experts of an NVFP4 checkpoint that hold MXFP4 values: a layer whose experts
    all do loads as MXFP4, another one as NVFP4. 'e4m3 dB' is the signal to noise of NVFP4 weights
    that are rounded to one e4m3 each, as load_expert_weights does on request alone. The table goes
    to standard output; a file is written for --json only.

    Examples:
        mxpert inspect ./gpt-oss-20b --layer 0
        mxpert inspect ./mixtral-mxfp4 --source ./mixtral-bf16 --json report.json
    """
    check_target(json_to, "inspect")
    with progress(make_console(stderr=True), "inspect") as advance:
        found = inspect_checkpoint(
            path,
            source=source,
            layer=layer,
            weight_rounding=check_rounding(weight_rounding, "inspect"),
            on_progress=advance,
        )
    columns, rows = _cells(found, with_source=source is not None)
    print_table(
        result_console(json_to),
        f"{_title(found)}; scales as exponents of two, minimum/median/maximum",
        columns,
        rows,
    )
    write_report(
        json_to,
        {
            "kind": "inspect",
            "environment": environment(torch.device("cpu")),
            "path": str(path),
            "source": None if source is None else str(source),
            "projections": [entry.as_json() for entry in found],
        },
    )


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


def _title(found: list[ProjectionStatistics]) -> str:
    """Container, format and gate/up order; they are those of the whole checkpoint."""
    orders = {entry.gate_up_order for entry in found} - {None}
    order = f"gate and up {' or '.join(map(str, orders))}" if orders else "no gate/up order stated"
    if any(entry.projection == "up_proj" for entry in found):
        order = "no gate"
    formats = " and ".join(sorted({entry.weight_format for entry in found}))
    return f"{found[0].container}: {formats}, {order}"


def _cells(
    found: list[ProjectionStatistics], *, with_source: bool
) -> tuple[list[Column], list[list[str]]]:
    """Columns and rows; some columns only where there is something to say."""
    has_nan = any(entry.nan_scales for entry in found)
    has_casts = any(entry.experts_cast is not None for entry in found)
    has_rounding = any(entry.rounding_snr_db is not None for entry in found)
    has_formats = len({entry.weight_format for entry in found}) > 1
    columns = [
        Column("tensor"),
        Column("shape", 2),
        *([Column("casts")] if has_casts else []),
        *([Column("loads as")] if has_formats else []),
        Column("MiB", 5),
        Column("scales"),
        Column("histogram", 4),
        Column("zero", 1),
        *([Column("NaN")] if has_nan else []),
        Column("folds"),
        Column("span", 3),
        *([Column("e4m3 dB")] if has_rounding else []),
        *([Column("SQNR dB")] if with_source else []),
    ]
    rows = []
    names = short_names(entry.module for entry in found)
    for entry in found:
        scales = (entry.min_exponent, entry.median_exponent, entry.max_exponent)
        rows.append(
            [
                short_name(names[entry.module], entry.projection),
                "×".join(str(size) for size in entry.shape),
                *([f"{entry.experts_cast}/{entry.shape[0]}"] if has_casts else []),
                *([_loads_as(entry)] if has_formats else []),
                f"{entry.bytes / 2**20:.2f}",
                "/".join("–" if value is None else f"{value:d}" for value in scales),
                sparkline(entry.scale_histogram),
                str(entry.zero_blocks),
                *([str(entry.nan_scales)] if has_nan else []),
                _folds(entry),
                "–" if entry.widest_span is None else str(entry.widest_span),
                *([_rounding(entry)] if has_rounding else []),
                *([_sqnr(entry)] if with_source else []),
            ]
        )
    return columns, rows


def _loads_as(entry: ProjectionStatistics) -> str:
    return entry.weight_format if entry.blocks_outside is None else "MXFP4"


def _folds(entry: ProjectionStatistics) -> str:
    if entry.blocks_outside is None:
        return "no MXFP4"
    return "exactly" if entry.exact_fold else f"not {entry.blocks_outside}"


def _rounding(entry: ProjectionStatistics) -> str:
    snr = entry.rounding_snr_db
    return "–" if snr is None else f"{snr:.2f}" if math.isfinite(snr) else "exact"


def _sqnr(entry: ProjectionStatistics) -> str:
    if entry.sqnr_db is not None:
        return f"{entry.sqnr_db:.2f}"
    return "exact" if entry.relative_l2 == 0 else "–"
