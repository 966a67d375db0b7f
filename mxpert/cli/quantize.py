"""`mxpert quantize`: the experts of a bf16 MoE checkpoint in MXFP4, MXFP8, NVFP4 or INT4."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..errors import require
from ..formats.spec import ScaleRule, ValueEnum
from ..formats.weight_tensor import WeightFormatName
from ..integrations.checkpoints.quantize import QuantizeReport, quantize_checkpoint
from ..integrations.module_paths import short_names
from .options import JsonFile, check_target
from .report import (
    Column,
    environment,
    make_console,
    print_table,
    progress,
    result_console,
    write_report,
)

EXIT_NOT_VERIFIED = 1


class ExpertFormat(ValueEnum):
    """Values of ``--to``."""

    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT4 = "int4"


class GroupSize(ValueEnum):
    """Values of ``--group-size``."""

    G32 = "32"
    G64 = "64"
    G128 = "128"


_WEIGHT_FORMATS: dict[ExpertFormat, WeightFormatName] = {
    ExpertFormat.MXFP4: "mxfp4",
    ExpertFormat.MXFP8: "mxfp8",
    ExpertFormat.NVFP4: "nvfp4",
}
_INT4: dict[GroupSize, WeightFormatName] = {
    GroupSize.G32: "int4_g32",
    GroupSize.G64: "int4_g64",
    GroupSize.G128: "int4_g128",
}


def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of a bf16 MoE checkpoint (Mixtral, Qwen-MoE, DeepSeek, gpt-oss names), "
            "or the id of one on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path,
        typer.Argument(
            help="Directory to write; absent, empty, or left by an interrupted run.",
            show_default=False,
        ),
    ],
    to: Annotated[ExpertFormat, typer.Option(help="Format of the experts.")] = ExpertFormat.MXFP4,
    group_size: Annotated[
        GroupSize | None,
        typer.Option(
            help="Weights that share a scale, in int4; 32 if it is left out.", show_default=False
        ),
    ] = None,
    scale_rule: Annotated[
        ScaleRule | None,
        typer.Option(
            help="How a block's scale follows from its largest magnitude, in mxfp4 and mxfp8; "
            "rceil if it is left out.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to quantise, for example cuda.")] = "cpu",
    json_to: JsonFile = None,
) -> None:
    """Quantise the experts of a bf16 MoE checkpoint to MXFP4, MXFP8, NVFP4 or INT4.

    MXFP4 is written as gpt-oss publishes it; the other formats as compressed-tensors stores them,
    for weights alone.

    DESTINATION gets the quantised experts, every other tensor unchanged, config.json, the tokenizer
    files, and mxpert_quantize.json, which records the finished shards: after an interruption run
    the same command again to continue. Everything that was written is read back and compared with
    the source; exit code 1 means that it differs. SOURCE is never changed. A model that mxpert
    cannot load afterwards is refused before anything is written.

    Examples:
        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4
        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4 --scale-rule floor --json report.json
        mxpert quantize ./mixtral-bf16 ./mixtral-int4 --to int4 --group-size 128
    """
    check_target(json_to, "quantize")
    weight_format = _weight_format(to, group_size)
    with progress(make_console(stderr=True), "quantize") as advance:
        report = quantize_checkpoint(
            source,
            destination,
            weight_format=weight_format,
            scale_rule=scale_rule,
            device=device,
            on_progress=advance,
        )
    _print_report(result_console(json_to), report)
    facts = environment(torch.device(device))
    write_report(json_to, {"kind": "quantize", "environment": facts, **report.as_json()})
    if not report.verified:
        for failure in report.failures:
            typer.echo(f"error: quantize: {failure}", err=True)
        raise typer.Exit(EXIT_NOT_VERIFIED)


def _weight_format(to: ExpertFormat, group_size: GroupSize | None) -> WeightFormatName:
    if to is ExpertFormat.INT4:
        return _INT4[group_size or GroupSize.G32]
    require(
        group_size is None,
        "quantize",
        "--group-size",
        need=f"none with --to {to.value}",
        got=group_size.value if group_size else None,
        remedy="the group of other formats than int4 is fixed",
    )
    return _WEIGHT_FORMATS[to]


def short_name(module: str, projection: str) -> str:
    """Module and projection for a table row.

    Example:
        >>> short_name("3", "gate_up_proj")
        '3 gate_up'
    """
    return f"{module} {projection.removesuffix('_proj')}"


def _print_report(console: Console, report: QuantizeReport) -> None:
    rows = []
    names = short_names(entry.module for entry in report.projections)
    for entry in report.projections:
        sqnr = (
            "–"
            if entry.signal == 0
            else "exact"
            if entry.sqnr_db is None
            else (f"{entry.sqnr_db:.2f}")
        )
        rows.append(
            (
                short_name(names[entry.module], entry.projection),
                "×".join(str(size) for size in entry.shape),
                f"{entry.source_bytes / 2**20:.2f}",
                f"{entry.bytes / 2**20:.2f}",
                sqnr,
            )
        )
    print_table(
        console,
        f"Quantised to {report.weight_format} ({report.container})",
        ("layer, experts", Column("shape", 2), Column("MiB before", 1), "MiB after", "SQNR dB"),
        rows,
    )
    console.print(
        f"{report.destination}: {report.shards_written} shards written, {report.shards_resumed} "
        f"resumed, {report.source_bytes / 2**20:.1f} MiB became {report.bytes / 2**20:.1f} MiB"
        + ("" if report.scale_rule is None else f", scale rule {report.scale_rule}")
        + ("" if report.gate_up_order is None else f", gate and up rows {report.gate_up_order}")
        + ("; verified." if report.verified else "; verification FAILED."),
        markup=False,
        soft_wrap=True,
    )
