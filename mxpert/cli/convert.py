"""`mxpert convert`: a checkpoint with quantised experts in another container, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..integrations.checkpoints.change_container import ConversionReport, convert_checkpoint
from ..integrations.checkpoints.written_containers import TARGETS
from .options import JsonFile, check_target
from .report import (
    environment,
    make_console,
    print_table,
    progress,
    result_console,
    say,
    write_report,
)

EXIT_NOT_VERIFIED = 1


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of a checkpoint with quantised experts, or the id of one on the "
            "Hugging Face Hub.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(help="Directory to write; it must not exist.", show_default=False)
    ],
    container: Annotated[
        str, typer.Option(metavar="NAME", help=f"What to write: {', '.join(TARGETS)}.")
    ],
    json_to: JsonFile = None,
) -> None:
    """Write a checkpoint with quantised experts in another container; no weight changes.

    Codes, scales and zero points are stored in another order alone. MXFP4 also becomes MXFP8 or
    NVFP4 with the same values, and NVFP4 that is a cast of MXFP4 becomes MXFP4 again. What a
    container does not hold exactly is refused. Dense tensors, tokenizer and templates are copied.
    Scales of activations are left out.

    DESTINATION appears when it is complete: everything is read back and compared with the source
    first. Exit code 1 means that it differed, and that nothing was kept. SOURCE is never changed.

    Examples:
        mxpert convert ./gpt-oss-20b ./gpt-oss-20b-ct --container mxfp4-pack-quantized
        mxpert convert ./kimi-k2-int4 ./kimi-k2-gptq --container gptq --json report.json
    """
    check_target(json_to, "convert")
    with progress(make_console(stderr=True), "convert") as advance:
        report = convert_checkpoint(source, destination, container=container, on_progress=advance)
    _print_report(result_console(json_to), report)
    facts = environment(torch.device("cpu"))
    write_report(json_to, {"kind": "convert", "environment": facts, **report.as_json()})
    if not report.verified:
        for failure in report.failures:
            typer.echo(f"error: convert: {failure}", err=True)
        raise typer.Exit(EXIT_NOT_VERIFIED)


def _print_report(console: Console, report: ConversionReport) -> None:
    mebibytes = [f"{size / 2**20:.2f}" for size in (report.source_bytes, report.bytes)]
    print_table(
        console,
        f"Converted {report.matrices} matrices of {report.modules} layers with experts",
        ("", "before", "after"),
        (
            ("container", report.source_container, report.container),
            ("weights", report.source_format, report.weight_format),
            ("MiB", *mebibytes),
        ),
    )
    left_out = f" {report.activation_scales} scales of activations are left out."
    outcome = (
        f"{report.destination}: every weight has the bits of the source."
        if report.verified
        else f"{report.destination}: verification FAILED; nothing was kept."
    )
    say(console, outcome + (left_out if report.activation_scales else ""))
