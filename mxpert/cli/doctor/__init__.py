"""`mxpert doctor`: what works on this machine, what does not, and why."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from ...dispatch import detect_target, explain_problem, override
from ...dispatch.registry import BACKENDS
from ...distributed.links import Links, TransportState, find_links, kernel_refusal, transports
from ...errors import UnsupportedError
from ...formats.spec import MXFP4, MXFP8_E4M3, ScaleRule
from ...formats.tensor import Layout
from ...problem import (
    ACTIVATION_FORMATS,
    DualProblem,
    GroupedProblem,
    MoEOptions,
    MoEProblem,
    Op,
    Problem,
    QuantizeProblem,
    RoutingProblem,
    SiLU,
    Target,
    TopKOptions,
    TopKProblem,
)
from ...runtime.toolchain import toolchain
from .. import bench
from ..measure import GateError
from ..options import DEFAULT_FORMATS, FORMAT_NAMES, JsonFile, check_target, parse_formats
from ..report import (
    Row,
    best_device,
    environment,
    make_console,
    package_version,
    print_table,
    result_console,
    write_report,
)
from .executed import EMULATED, emulation_of, execute, show

MINIMUM_VERSIONS = {"torch": "2.11", "triton": "3.6", "numpy": "1.26", "safetensors": "0.5"}
"""As in pyproject.toml; a test compares the two."""
TESTED_UP_TO = {"torch": "2.15", "triton": "3.9"}
"""Newest release series that the kernels were compiled with; pyproject.toml admits no later one."""
OPTIONAL = {"transformers": "5.7", "matplotlib": "3.8"}
MINIMUM_PYTHON = (3, 11)
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
OK, WARNING, BROKEN = "ok", "warning", "broken"
PACKAGES, COMPILER, DEVICE, LINKS = "Packages", "Compiler", "Device", "Several GPUs"
NARROW = 80
"""Columns of the narrowest terminal that the report fits."""


@dataclass(frozen=True)
class Finding:
    """One line of the examination. state: "ok", "warning" or "broken"."""

    name: str
    value: str
    state: str
    note: str = ""
    section: str = PACKAGES


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison.

    >>> release("2.13.0+cpu") >= release("2.11")
    True
    """
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def installed_version(name: str) -> str | None:
    """Version of a package, or of the distribution that brings its module under another name.

    The ROCm build of torch brings Triton so. None if neither is there.
    """
    found = package_version(name)
    if found is None:
        others = importlib.metadata.packages_distributions().get(name, ())
        found = next((package_version(other) for other in others), None)
    return found


def examine_version(name: str, minimum: str, *, needed: bool, remedy: str) -> Finding:
    """Whether a package is there, new enough, and not newer than what was tested."""
    found = installed_version(name)
    if found is None:
        return Finding(name, "absent", BROKEN if needed else WARNING, remedy)
    if release(found) < release(minimum):
        return Finding(name, found, BROKEN if needed else WARNING, f"need {minimum} or newer")
    if name not in TESTED_UP_TO:
        return Finding(name, found, OK)
    newest = TESTED_UP_TO[name]
    if release(found)[:2] > release(newest):
        return Finding(
            name,
            found,
            WARNING,
            f"newer than the tested {minimum} to {newest}; pip install '{requirement(name)}'",
        )
    return Finding(name, found, OK, f"tested: {minimum} to {newest}")


def requirement(name: str) -> str:
    """What pip is asked for, as in pyproject.toml.

    >>> requirement("triton"), requirement("numpy")
    ('triton>=3.6,<3.10', 'numpy>=1.26')
    """
    minimum = f"{name}>={MINIMUM_VERSIONS[name]}"
    if name not in TESTED_UP_TO:
        return minimum
    major, minor = release(TESTED_UP_TO[name])
    return f"{minimum},<{major}.{minor + 1}"


def examine_versions(target: Target) -> list[Finding]:
    """Python and packages against the supported ranges; Triton is needed where a GPU is."""
    fits = sys.version_info >= MINIMUM_PYTHON
    findings = [
        Finding(
            "python",
            platform.python_version(),
            OK if fits else BROKEN,
            "" if fits else "need 3.11 or newer",
        )
    ]
    for name, minimum in MINIMUM_VERSIONS.items():
        needed = name != "triton" or target.kind != "cpu"
        remedy = f"pip install '{requirement(name)}'"
        if name == "triton" and target.kind == "hip":
            remedy = "install the ROCm build of torch again: it brings Triton"
        findings.append(examine_version(name, minimum, needed=needed, remedy=remedy))
    for name, minimum in OPTIONAL.items():
        findings.append(
            examine_version(
                name, minimum, needed=False, remedy=f"optional: pip install '{name}>={minimum}'"
            )
        )
    return findings


def examine_toolchain(target: Target) -> list[Finding]:
    """The assembler's known hazard, and where compiled kernels are kept."""
    try:
        tools = toolchain()
    except ImportError as error:
        state = BROKEN if target.kind != "cpu" else WARNING
        return [Finding("triton", "cannot be imported", state, str(error), COMPILER)]
    note = (
        "may reuse the registers of a wgmma A operand before they are read (fixed in CUDA "
        "13.3); kernels that feed A from registers are race-tested"
        if tools.register_operand_hazard and target.arch == "sm_90"
        else ""
    )
    state = WARNING if note else OK
    return [
        Finding("ptxas", tools.ptxas or "absent", state if tools.ptxas else OK, note, COMPILER),
        Finding("triton cache", tools.cache_directory, OK, section=COMPILER),
    ]


def examine_device(target: Target, facts: Row) -> Finding:
    """GPUs that torch sees, and their driver."""
    if target.kind == "cpu":
        return Finding("gpu", "none", OK, "every operation runs on the CPU", DEVICE)
    driver = facts.get("gpu", {}).get("driver_version", "unknown")
    return Finding("gpu", f"{torch.cuda.device_count()} visible", OK, f"driver {driver}", DEVICE)


def examine_links(links: Links, states: Sequence[TransportState]) -> list[Finding]:
    """What joins the GPUs, which transport AUTO takes, and why not the others."""
    findings = [Finding("backends", ", ".join(links.backends) or "none", OK, section=LINKS)]
    hidden = (links.num_host_gpus or links.num_gpus) - links.num_gpus
    note = f"{hidden} more on this host are hidden from this process" if hidden > 0 else ""
    state = OK
    if links.num_gpus < 2:
        value = "one GPU" if links.num_gpus else "no GPU"
    elif links.nvlink_gbs is None:
        value = "unknown"
    else:
        rate = f"NVLink, {links.nvlink_gbs:.0f} GB/s a direction"
        value = rate if links.nvlink_gbs else "no NVLink"
    if links.unreachable:
        pairs = links.num_gpus * (links.num_gpus - 1)
        note, state = f"no peer access in {len(links.unreachable)} of {pairs} directions", WARNING
    findings.append(Finding("link", value, state, note, LINKS))
    if links.multicast is not None:
        value = "on" if links.multicast else "off"
        findings.append(Finding("multicast", value, OK, "no transport needs it", LINKS))
    for each in states:
        value = "AUTO" if each.is_auto else "can run" if each.refusal is None else "cannot run"
        findings.append(Finding(each.name, value, OK, each.refusal or each.note, LINKS))
    return findings


def small_problems(target: Target) -> list[Problem]:
    """One small problem for each operation; MoE operations once for each activation format."""
    problems: list[Problem] = [
        QuantizeProblem(op, target, (32, 64), -1, torch.bfloat16, MXFP4)
        for op in (Op.QUANTIZE, Op.DEQUANTIZE)
    ]
    problems.append(TopKProblem(Op.ROUTE_TOPK, target, 16, 4, 32, TopKOptions()))
    problems.append(RoutingProblem(Op.ROUTING_PLAN, target, 16, 4, 32, 32, 16))
    for op in (Op.MOE_GATE_UP, Op.MOE_DOWN, Op.FUSED_MOE):
        unit = 0 if op is Op.FUSED_MOE else 64
        problems += [
            MoEProblem(
                op, target, 16, 4, 32, 512, 512, MoEOptions(SiLU(), name), Layout.ROW_MAJOR, unit
            )
            for name in ACTIVATION_FORMATS
        ]
    problems.append(
        DualProblem(
            Op.QUANTIZE_DUAL, target, (64, 64), torch.bfloat16, MXFP8_E4M3, ScaleRule.RCEIL, 4, True
        )
    )
    name = MXFP8_E4M3.name
    problems += [
        GroupedProblem(
            op, target, 256, 4, 512, 512, name, name, op is Op.GROUPED_GEMM, torch.bfloat16
        )
        for op in (Op.GROUPED_GEMM, Op.GROUPED_WGRAD)
    ]
    return problems


def problem_name(problem: Problem) -> str:
    """Name of the op, and the format where there is one: "fused_moe a16w4"."""
    if not isinstance(problem, MoEProblem):
        return problem.op.value
    return f"{problem.op.value} {FORMAT_NAMES[problem.options.activation_format]}"


def variants(problem: Problem) -> list[Problem]:
    """The problem with its weights in every layout, a backend's own before the common one."""
    if not isinstance(problem, MoEProblem):
        return [problem]
    return [replace(problem, weight_layout=layout) for layout in reversed(Layout)]


def serving_backend(problem: Problem, backend: str | None) -> tuple[str | None, str]:
    """The backend that serves a problem in some layout, or None and the reason."""
    reasons: list[str] = []
    for variant in variants(problem):
        try:
            with override(backend=backend), warnings.catch_warnings(action="ignore"):
                return explain_problem(variant).resolution.kernel.backend, ""
        except UnsupportedError as error:
            # "op: backend — need …, got 'BACKEND', which REASON; remedy"
            got = str(error).partition(", got ")[2].rpartition("; ")[0]
            reasons.append(got.removeprefix(f"{backend!r}, which "))
    return None, "; ".join(dict.fromkeys(reasons))


def examine_operations(target: Target) -> list[Row]:
    """For each operation: which backends serve it here, why others do not, which one answers."""
    rows: list[Row] = []
    for problem in small_problems(target):
        answers = {backend: serving_backend(problem, backend) for backend in BACKENDS}
        rows.append(
            {
                "op": problem_name(problem),
                "chosen": serving_backend(problem, None)[0],
                "served_by": [backend for backend, (served, _) in answers.items() if served],
                "refused": {
                    backend: why for backend, (served, why) in answers.items() if not served
                },
            }
        )
    return rows


def short_names(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Operations by name; formats only of those that are named in part.

    >>> short_names(["a x", "a y", "b x"], ["a x", "a y", "b x", "b y", "c"])
    ['a', 'b (x)']
    """
    formats: dict[str, list[str]] = {}
    for name in names:
        op, _, a_format = name.partition(" ")
        formats.setdefault(op, []).append(a_format)
    counts = Counter(name.partition(" ")[0] for name in every)
    return [
        op if len(found) == counts[op] else f"{op} ({', '.join(found)})"
        for op, found in formats.items()
    ]


def unused_backends(operations: Sequence[Row]) -> list[str]:
    """A sentence for each reason why a backend serves no operation, or not all that it has."""
    found: dict[tuple[str, str], list[str]] = {}
    has: dict[str, list[str]] = {}
    for row in operations:
        for backend in (*row["served_by"], *row["refused"]):
            reason = row["refused"].get(backend, "")
            if reason.startswith("has no "):  # what a backend never had is no news
                continue
            has.setdefault(backend, []).append(row["op"])
            if reason:
                found.setdefault((backend, reason), []).append(row["op"])
    return [
        f"{backend} {reason}"
        + ("" if names == has[backend] else f": not {', '.join(short_names(names, has[backend]))}")
        for (backend, reason), names in found.items()
    ]


def _operation_lines(operations: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Lines of the table: formats of an operation with the same answer share one."""
    answers: dict[tuple[str, str, str], list[str]] = {}
    for row in operations:
        others = ", ".join(each for each in row["served_by"] if each != row["chosen"]) or "–"
        key = row["op"].partition(" ")[0], row["chosen"] or "[red]nothing[/]", others
        answers.setdefault(key, []).append(row["op"])
    every = [row["op"] for row in operations]
    return [
        (short_names(names, every)[0], chosen, others)
        for (_, chosen, others), names in answers.items()
    ]


def _print_findings(console: Console, findings: list[Finding]) -> None:
    """A section each; a note that does not fit beside its finding goes below it, whole."""
    marks = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", BROKEN: "[red]broken[/]"}
    for section in dict.fromkeys(finding.section for finding in findings):
        console.print(f"\n[bold]{section}[/]")
        for finding in [each for each in findings if each.section == section]:
            name, note = finding.name, finding.note
            line = f"  {name:13} {finding.value:16} {marks[finding.state]}"
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
        _operation_lines(operations),
    )
    reasons = unused_backends(operations)
    if reasons:
        console.print("\n[bold]Backends that are not used[/]")
    for reason in reasons:
        console.print(Padding(Text(reason, style="dim"), (0, 0, 0, 2), expand=False), width=NARROW)


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

    Compares versions with the tested ranges, and names the GPU and its driver, the compiler and
    its known hazard, the links between GPUs with the transports of expert parallelism that can use
    them, and the backends that can serve each operation here.
    The exit code is 1 if something needed is broken, or if something executed is wrong.

    Examples:
        mxpert doctor

        mxpert doctor --json - | jq .operations

        mxpert doctor --emulate gfx950

        mxpert doctor --measure --json device.json
    """
    check_target(json_to, "doctor")
    emulation = emulation_of(emulate) if emulate is not None else None
    device = best_device()
    target = detect_target(device)
    facts = environment(device)
    links = find_links()
    states = transports(links, kernel_refusal(target))
    findings = [
        examine_device(target, facts),
        *examine_versions(target),
        *examine_toolchain(target),
        *examine_links(links, states),
    ]
    operations = examine_operations(target)
    broken = any(finding.state == BROKEN for finding in findings) or any(
        row["chosen"] is None for row in operations
    )
    console, errors = result_console(json_to), make_console(stderr=True)
    _print(console, facts, findings, operations)
    document: Row = {
        **facts,
        "findings": [asdict(finding) for finding in findings],
        "links": asdict(links),
        "transports": [asdict(state) for state in states],
        "operations": operations,
    }
    if emulation is not None:
        document["emulated"] = {"arch": emulate, "cases": execute(errors, CPU, emulation)}
        show(console, f"Executed by emulation of {emulate}", document["emulated"]["cases"])
        broken |= not all(row["passed"] for row in document["emulated"]["cases"])
    if measured:
        document["executed"] = execute(errors, device)
        show(console, f"Executed on {facts['device']}", document["executed"])
        broken |= not all(row["passed"] for row in document["executed"])
        document["bench"] = measure(device, errors)
        broken |= "fault" in document["bench"]
        _print_bench(console, document["bench"])
    write_report(json_to, {**document, "healthy": not broken})
    if broken:
        raise typer.Exit(1)


def _print_bench(console: Console, document: Row) -> None:
    if "fault" in document:
        console.print(document["fault"], highlight=False, markup=False)
    else:
        bench.show(document, console)
