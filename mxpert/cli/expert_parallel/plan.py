"""`mxpert bench --plan`: a layer over several GPUs, on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from ...core.files import short
from ...distributed.planner import LINKS, ExpertLayer, plan_layer
from ...distributed.planner.load import ROUTINGS
from ...distributed.planner.plan import MeasuredLayers
from ...distributed.transport import WireFormat
from ...errors import message, require
from ...formats.names import OwnFormat
from ...testing.problems import MoEShape
from ..options import FORMAT_NAMES, open_folder
from ..plots import FILLS, figure, legend_outside, line_style, log_scale, save, styled
from ..report import (
    Column,
    Row,
    environment,
    format_time,
    make_console,
    print_table,
    progress,
    result_console,
    say,
    write_report,
    write_results,
)

MAX_RANKS = 1024


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks: a list, or a range whose steps double.

    >>> parse_ranks("8..72"), parse_ranks("2,4")
    ([8, 16, 32, 64, 72], [2, 4])
    """
    first, is_range, last = (part.strip() for part in text.partition(".."))
    parts = [first, last] if is_range else [part.strip() for part in text.split(",")]
    valid = all(
        part.isascii()
        and part.isdigit()
        and len(part) <= len(str(MAX_RANKS))
        and 0 < int(part) <= MAX_RANKS
        for part in parts
    )
    if not valid or (is_range and int(first) > int(last)):
        need = f"a range or integers from 1 to {MAX_RANKS}"
        raise ValueError(message("bench", "--ranks", need, short(text), "for example 8..72 or 2,8"))
    if not is_range:
        return list(dict.fromkeys(map(int, parts)))
    counts = [int(first)]
    while 2 * counts[-1] < int(last):
        counts.append(2 * counts[-1])
    return list(dict.fromkeys([*counts, int(last)]))


@dataclass(frozen=True)
class PlanRequest:
    """What `mxpert bench --plan` asks for.

    Args:
        shapes: by model name. tokens: T of each rank. formats: activation formats.
        routing, ranks, link: as on the command line.
    """

    shapes: dict[str, MoEShape]
    tokens: list[int]
    formats: list[OwnFormat]
    routing: str
    ranks: str
    link: str


def bench_plan(request: PlanRequest, output: Path, json_to: str | None) -> None:
    """`mxpert bench --plan`: print, write and plot."""
    layers = [expert_layer(name, shape) for name, shape in request.shapes.items()]
    counts = check_plan(request.link, request.ranks, request.routing, layers)
    open_folder(output, "bench", "--output")
    document = run_plan(request, layers, counts, make_console(stderr=True))
    show_plan(document, result_console(json_to))
    write_report(json_to, document)
    write_results(output, "plan.json", "plan.png", document, lambda path: plot_plan(path, document))


def check_plan(link: str, ranks: str, routing: str, layers: Sequence[ExpertLayer]) -> list[int]:
    """Numbers of ranks; refuse what the planner cannot answer."""
    known = ", ".join(LINKS)
    require(link in LINKS, "bench", "--link", need=f"one of {known}", got=short(link))
    require(
        routing in ROUTINGS,
        "bench",
        "--routing",
        need=f"one of {', '.join(ROUTINGS)} with --plan",
        got=short(routing),
    )
    counts = parse_ranks(ranks)
    for layer in layers:
        require(
            min(counts) <= layer.num_experts,
            "bench",
            "--ranks",
            need=f"at most {layer.num_experts}, the experts of {layer.name}",
            got=min(counts),
        )
    return counts


def expert_layer(name: str, shape: MoEShape) -> ExpertLayer:
    """The dimensions that the planner needs."""
    sizes = shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size
    return ExpertLayer(name, *sizes)


def wire_of(activation_format: str) -> WireFormat:
    """Format of dispatched rows: MXFP8 where the layer multiplies MXFP8, else bf16."""
    return "mxfp8" if activation_format == "mxfp8" else "bf16"


def run_plan(
    request: PlanRequest, layers: Sequence[ExpertLayer], ranks: Sequence[int], console: Console
) -> Row:
    """The whole document: link, provenance of the measured layers, rows."""
    cases = [
        (layer, name, count, num_tokens)
        for layer in layers
        for name in request.formats
        for count in ranks
        if count <= layer.num_experts
        for num_tokens in request.tokens
    ]
    link, rows = LINKS[request.link], list[Row]()
    with progress(console, "plan") as advance:
        for layer, name, count, num_tokens in cases:
            advance(len(rows), len(cases), f"{layer.name} on {count} ranks")
            plan = plan_layer(
                layer,
                num_ranks=count,
                num_tokens=num_tokens,
                link=link,
                activation_format=name,
                wire_format=wire_of(name),
                routing=request.routing,
            )
            found = asdict(plan)
            rows.append(
                {
                    "model": layer.name,
                    "E": layer.num_experts,
                    "k": layer.top_k,
                    "H": layer.hidden_size,
                    "F": layer.intermediate_size,
                    "N": found.pop("num_ranks"),
                    "T": found.pop("num_tokens"),
                    "hit": found.pop("hit_experts"),
                    "routing": request.routing,
                    "activation": name,
                    "wire": wire_of(name),
                    "us": plan.us,
                    **found,
                    "tokens_per_s": num_tokens / plan.us * 1e6,
                }
            )
    shipped = MeasuredLayers.shipped()
    return {
        "kind": "plan",
        "environment": environment(torch.device("cpu")),
        "link": asdict(link),
        "ranks": list(ranks),
        "measured_layers": {"device": shipped.device, "sources": shipped.sources},
        "rows": rows,
    }


def show_plan(document: Row, console: Console) -> None:
    """The table of a plan, and what it stands on."""
    link = document["link"]
    between = (
        f", then {link['network_gbs']:g} GB/s and {link['network_latency_us']:g} µs"
        if link["network_gbs"]
        else ""
    )
    say(
        console,
        f"On paper: layers measured on one {document['measured_layers']['device']}; {link['name']}:"
        f" {link['gbs']:g} GB/s a direction and {link['latency_us']:g} µs among "
        f"{link['domain']} ranks{between}.",
    )
    print_table(
        console,
        "mxpert bench --plan",
        (
            "model",
            "format",
            "ranks",
            "T a rank",
            Column("hit", 6),
            Column("rows/expert", 5),
            Column("dispatch", 1),
            Column("local", 1),
            Column("combine", 1),
            "layer",
            Column("exchange", 2),
            Column("balance", 3),
            Column("tokens/s a GPU", 3),
        ),
        [_cells(row) for row in document["rows"]],
    )
    for note in notes(document):
        say(console, note)


def _cells(row: Row) -> tuple[str, ...]:
    exchange = row["dispatch_us"] + row["combine_us"]
    return (
        row["model"],
        FORMAT_NAMES[row["activation"]],
        str(row["N"]),
        str(row["T"]),
        f"{row['hit']:.0f}",
        f"{row['rows_per_expert']:.1f}",
        format_time(row["dispatch_us"]),
        format_time(row["local_us"]),
        format_time(row["combine_us"]),
        format_time(row["us"]),
        f"{100 * exchange / row['us']:.0f} %",
        f"{100 * row['balance']:.0f} %",
        f"{row['tokens_per_s']:,.0f}",
    )


def notes(document: Row) -> list[str]:
    """What a reader of the table has to know."""
    link, rows = document["link"], document["rows"]
    found = [
        "exchange: share of dispatch and combine, which nothing hides; balance: mean local layer "
        "over the slowest rank's"
    ]
    experts = {row["model"]: row["E"] for row in rows}
    found += [
        f"{model} has {count} experts: no more ranks than that"
        for model, count in experts.items()
        if count < max(document["ranks"])
    ]
    scaled = {row["model"]: row["measured"] for row in rows if row["is_scaled"]}
    found += [
        f"{model}: experts of this size were not measured; scaled from {', '.join(measured)}"
        for model, measured in scaled.items()
    ]
    if link["network_gbs"] is None and any(row["N"] > link["domain"] for row in rows):
        found.append(
            f"{link['name']} joins {link['domain']} ranks; rows with more assume one larger domain"
        )
    return found


@styled
def plot_plan(path: Path, document: Row) -> None:
    """Time of a layer by tokens of a rank: a panel for each model, a line for each N.

    A colour and the filled part of the marker for each number of ranks; marker and dashes for each
    format.
    """
    rows = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    formats = list(FORMAT_NAMES)
    drawing, (panels,) = figure(f"On paper: {document['link']['name']}", 1, len(models))
    for axes, model in zip(panels, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for index, count in enumerate(dict.fromkeys(row["N"] for row in mine)):
            for name in dict.fromkeys(row["activation"] for row in mine):
                line = [row for row in mine if (row["N"], row["activation"]) == (count, name)]
                axes.plot(
                    [row["T"] for row in line],
                    [row["us"] for row in line],
                    label=f"{count} ranks, {FORMAT_NAMES[name]}",
                    **line_style(index, formats.index(name), fill=FILLS[index % len(FILLS)]),
                )
        axes.set(title=model, xlabel="tokens of a rank", ylabel="µs a layer")
        log_scale(axes, x=2, y=10)
        axes.grid()
    legend_outside(drawing, panels, columns=3 * len(models))
    save(drawing, path)
