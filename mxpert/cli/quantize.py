"""`mxpert quantize`: a bf16 MoE checkpoint becomes an MXFP4 one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..formats.spec import ScaleRule
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
    scale_rule: Annotated[
        ScaleRule, typer.Option(help="How a block's scale follows from its largest magnitude.")
    ] = ScaleRule.RCEIL,
    device: Annotated[str, typer.Option(help="Where to quantise, for example cuda.")] = "cpu",
    json_to: JsonFile = None,
) -> None:
    """Quantise the experts of a bf16 MoE checkpoint to MXFP4, in the format gpt-oss publishes.

    DESTINATION gets the quantised experts, every other tensor unchanged, config.json, the tokenizer
    files, and mxpert_quantize.json, which records the finished shards: after an interruption run
    the same command again to continue. Everything that was written is read back and compared with
    the source; exit code 1 means that it differs. SOURCE is never changed. A model that mxpert
    cannot load afterwards is refused before anything is written.

    Examples:
        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4
        mxpert quantize ./mixtral-bf16 ./mixtral-mxfp4 --scale-rule floor --json report.json
    """
    check_target(json_to, "quantize")
    with progress(make_console(stderr=True), "quantize") as advance:
        report = quantize_checkpoint(
            source, destination, scale_rule=scale_rule, device=device, on_progress=advance
        )
    _print_report(result_console(json_to), report)
    facts = environment(torch.device(device))
    write_report(json_to, {"kind": "quantize", "environment": facts, **report.as_json()})
    if not report.verified:
        for failure in report.failures:
            typer.echo(f"error: quantize: {failure}", err=True)
        raise typer.Exit(EXIT_NOT_VERIFIED)


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
        "Quantised to MXFP4",
        ("layer, experts", Column("shape", 2), Column("MiB before", 1), "MiB after", "SQNR dB"),
        rows,
    )
    console.print(
        f"{report.destination}: {report.shards_written} shards written, {report.shards_resumed} "
        f"resumed, {report.source_bytes / 2**20:.1f} MiB became {report.bytes / 2**20:.1f} MiB, "
        f"scale rule {report.scale_rule}, gate and up rows {report.gate_up_order}; "
        + ("verified." if report.verified else "verification FAILED."),
        markup=False,
        soft_wrap=True,
    )
