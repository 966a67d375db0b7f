"""`mxpert doctor`: what works on this machine, what does not, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from ...core.target import detect_target
from ...distributed.links import find_links, kernel_refusal, transports
from .. import bench
from ..measure import GateError
from ..options import DEFAULT_FORMATS, JsonFile, check_target, parse_formats
from ..report import (
    Row,
    best_device,
    environment,
    make_console,
    print_table,
    result_console,
    write_report,
)
from .executed import EMULATED, emulation_of, execute, failures, show
from .findings import (
    BROKEN,
    INFO,
    OK,
    WARNING,
    Finding,
    examine_device,
    examine_links,
    examine_toolchain,
    examine_versions,
    require_cache,
)
from .operations import examine_operations, operation_lines, unused_backends
from .verdict import Verdict, judge

MEASURED_MODEL, MEASURED_TOKENS = "gpt-oss-120b", (1, 16, 128, 1024)
"""What --measure times."""
CPU = torch.device("cpu")
EMULATE_HELP = (
    "Execute small problems through this architecture's own code, instruction by instruction, on "
    f"the CPU: {', '.join(EMULATED)}."
)
MEASURE_HELP = (
    "Execute the same problems on this machine's own device, and time a model's layer as "
    "`mxpert bench` does."
)
NARROW = 80
"""Columns of the narrowest terminal that the report fits."""


def _print_findings(console: Console, findings: list[Finding]) -> None:
    """A section each; a note that does not fit beside its finding goes below it, whole."""
    marks = {OK: "[green]ok[/]", INFO: "", WARNING: "[yellow]warning[/]", BROKEN: "[red]broken[/]"}
    for section in dict.fromkeys(finding.section for finding in findings):
        console.print(f"\n[bold]{section}[/]")
        for finding in [each for each in findings if each.section == section]:
            name, note = finding.name, finding.note
            line = f"  {name:13} {finding.value:16} {marks[finding.state]}".rstrip()
            if note and len(Text.from_markup(line)) + 2 + len(note) <= NARROW:
                line, note = f"{line}  {escape(note)}", ""
            console.print(line, highlight=False, soft_wrap=True)
            if note:
                console.print(Padding(Text(note), (0, 0, 0, 16), expand=False), width=NARROW)


def _print(console: Console, facts: Row, findings: list[Finding], operations: list[Row]) -> None:
    console.print(
        f"[bold]{facts['device']}[/] ({facts['arch']}, {facts['num_sms']} "
        f"{'threads' if facts['kind'] == 'cpu' else 'multiprocessors'})"
    )
    _print_findings(console, findings)
    console.print()
    print_table(
        console,
        "Operations",
        ("operation", "runs on", "can also run on"),
        operation_lines(operations),
    )
    reasons = unused_backends(operations)
    if reasons:
        console.print("\n[bold]Backends that are not used[/]")
    for reason in reasons:
        console.print(Padding(Text(reason, style="dim"), (0, 0, 0, 2), expand=False), width=NARROW)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    """The last words, so that a reader who starts at the end knows what to do."""
    console.print("\n[bold]Verdict[/]")
    for name, text in verdict.lines():
        console.print(Padding(Text(f"{name:13} {text}"), (0, 0, 0, 2), expand=False), width=NARROW)


def measure(device: torch.device, console: Console) -> Row:
    """The document of `mxpert bench` for `MEASURED_MODEL`, or why it measured nothing."""
    scale = 1 if device.type == "cuda" else bench.CPU_SCALE
    request = bench.Request(
        models=[bench.Model.named(MEASURED_MODEL, scale)],
        tokens=list(MEASURED_TOKENS),
        formats=parse_formats(DEFAULT_FORMATS, "doctor", "--measure"),
        stages=list(bench.STAGES),
        routing="uniform",
        backend=None,
    )
    try:
        return bench.run_bench(request, device, console)
    except GateError as error:
        return {"kind": "bench", "rows": [], "fault": str(error)}


def doctor(
    emulate: Annotated[str | None, typer.Option(metavar="ARCH", help=EMULATE_HELP)] = None,
    measured: Annotated[bool, typer.Option("--measure", help=MEASURE_HELP)] = False,
    json_to: JsonFile = None,
) -> None:
    """Say what works on this machine, what does not, and why.

    Compares versions with the tested ranges, and names the GPU and its driver, the compiler, the
    links between GPUs with the transports of expert parallelism that can use them, and the backends
    that can serve each operation here. The last lines are the verdict: what has fast kernels on
    this machine, what runs plain torch, and the next command.
    The exit code is 1 if something needed is broken, or if something executed is wrong.

    Examples:
        mxpert doctor
        mxpert doctor --json - | jq .operations
        mxpert doctor --emulate gfx950
        mxpert doctor --measure --json device.json
    """
    check_target(json_to, "doctor")
    emulation = emulation_of(emulate) if emulate is not None else None
    if emulation is not None:
        require_cache()
    device = best_device()
    target = detect_target(device)
    facts = environment(device)
    links = find_links()
    states = transports(links, kernel_refusal(target))
    findings = [
        examine_device(target, facts),
        *examine_versions(target, facts),
        *examine_toolchain(target),
        *examine_links(links, states),
    ]
    operations = examine_operations(target)
    console, errors = result_console(json_to), make_console(stderr=True)
    _print(console, facts, findings, operations)
    document: Row = {
        **facts,
        "findings": [asdict(finding) for finding in findings],
        "links": asdict(links),
        "transports": [asdict(state) for state in states],
        "operations": operations,
    }
    wrong: list[str] = []
    if emulation is not None:
        document["emulated"] = {"arch": emulate, "cases": execute(errors, CPU, emulation)}
        show(console, f"Executed by emulation of {emulate}", document["emulated"]["cases"])
        wrong += failures(document["emulated"]["cases"])
    if measured:
        document["executed"] = execute(errors, device)
        show(console, f"Executed on {facts['device']}", document["executed"])
        wrong += failures(document["executed"])
        document["bench"] = measure(device, errors)
        wrong += ["bench"] if "fault" in document["bench"] else []
        _print_bench(console, document["bench"])
    verdict = judge(target, findings, operations, wrong)
    _print_verdict(console, verdict)
    document |= {"verdict": asdict(verdict), "healthy": not verdict.broken}
    write_report(json_to, document)
    if verdict.broken:
        raise typer.Exit(1)


def _print_bench(console: Console, document: Row) -> None:
    if "fault" in document:
        console.print(document["fault"], highlight=False, markup=False)
    else:
        bench.show(document, console)
