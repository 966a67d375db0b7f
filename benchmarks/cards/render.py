"""Which card gave which figure: pages of a folder of results, and the tables of README and docs.

    python -m benchmarks.cards.render benchmarks/results/nvidia-h100

renders every JSON of the folder that has a renderer, then the measured blocks of README.md and
docs that tell the cards apart, from all folders. Without a folder only the blocks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks import ROOT
from benchmarks.grouped.ours import OURS
from benchmarks.harness.document import Row
from benchmarks.harness.script import RESULTS, bare_parser
from benchmarks.harness.tables import paragraphs, row_table, span
from benchmarks.moe.cells import NAMED
from benchmarks.moe.figures import speed_ups
from benchmarks.moe.row_encoding import share_table
from benchmarks.moe.weight_format_tables import means_table
from benchmarks.serving.render import decode_text, summary_table

SERVING = ("serving.json", "serving_vllm_0.26.json")
"""What pages show, vLLM's newest release first."""
REPORTS = {
    "moe.json": "moe.render",
    "grouped_gemm.json": "grouped.render",
    "models.json": "models.render",
    **dict.fromkeys((*SERVING, "serving_again.json"), "serving.render"),
    "expert_parallel.json": "ranks.render",
    "weight_formats.json": "moe.weight_format_tables",
    "sustained.json": "moe.sustained",
}
"""JSON → the script that renders it."""
RENDERERS = REPORTS | {
    "at_size.json": "moe.at_size",
    "hunts.json": "hunts.run",
    "cliffs.json": "moe.cliffs",
    "row_encoding.json": "moe.row_encoding",
    "few_tokens.json": "moe.few_tokens",
    "fp8_copies.json": "moe.fp8_copies",
    "options.json": "grouped.options",
    "loading.json": "models.loading",
}
"""Also those that render with --render what they have measured."""
PAGES = {
    "README.md": ("cards", "decode in vLLM"),
    "docs/performance.md": ("serving", "files", "row encoding"),
    "docs/serve-with-vllm.md": ("serving, ours",),
    "docs/formats.md": ("weight formats",),
}
"""Page → its blocks."""


@dataclass(frozen=True)
class Result:
    """A JSON of a card, with what it says of its run."""

    path: Path
    document: Row

    @property
    def meta(self) -> Row:
        """Of a benchmark, or of a report of `mxpert bench`."""
        found: Row = self.document.get("meta") or self.document["environment"]
        return found

    @property
    def read_tbs(self) -> float | None:
        """Memory's rate in its run, if it was measured."""
        for place in (self.meta.get("ceilings"), self.document.get("ceilings"), self.meta):
            if place and "read_tbs" in place:
                return float(place["read_tbs"])
        return None


def results(folder: Path = RESULTS) -> dict[str, list[Result]]:
    """Results of each NVIDIA card, by the name of its folder; new ones last."""
    found: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("nvidia-*/*.json")):
        found.setdefault(path.parent.name, []).append(Result(path, json.loads(path.read_text())))
    return {
        card: sorted(each, key=lambda result: str(result.meta.get("date")))
        for card, each in sorted(found.items(), reverse=True)
    }


def named(every: Sequence[Result], name: str) -> Row | None:
    """The document of one benchmark."""
    return next((each.document for each in every if each.path.name == name), None)


def layer_means(document: Row | None) -> list[float]:
    """Mean speed-ups of named models' layers over the best peer, for each format and T."""
    cells: dict[tuple[str, int], list[float]] = {}
    for each in speed_ups(document["rows"]) if document else ():
        ours = each.ours
        if (ours["routing"], ours["stage"]) == ("uniform", "layer") and ours["model"] in NAMED:
            cells.setdefault((each.activation, ours["T"]), []).append(each.value)
    return [geometric_mean(values) for values in cells.values() if len(values) == len(NAMED)]


def training_rates(document: Row | None) -> list[float]:
    """Mean TFLOP/s of the kernels of the default recipe, for each GEMM, groups of equal size."""
    wanted = (OURS, "auto", "balanced", False)
    cells: dict[str, list[float]] = {}
    for row in document["rows"] if document else ():
        if (row["impl"], row["mode"], row["balance"], row["with_quant"]) == wanted:
            cells.setdefault(row["op"], []).append(row["tflops"])
    return [geometric_mean(values) for op, values in cells.items() if op != "wgrad_accumulate"]


def cards(every: Mapping[str, Sequence[Result]], place: str) -> str:
    """One line a card; `place` leads to benchmarks/results."""
    lines = []
    for card, found in every.items():
        if card.endswith("-x2"):
            continue
        reads = [rate for each in found if (rate := each.read_tbs) is not None]
        lines.append(
            {
                "card": f"[{found[-1].meta['device']}]({place}/{card})",
                "read": f"{median(reads):.1f}" if reads else "–",
                "layers": span(layer_means(named(found, "moe.json")), ".2f"),
                "training": span(training_rates(named(found, "grouped_gemm.json")), ".0f"),
            }
        )
    columns = {
        "one card": "{card}",
        "memory, TB/s": "{read}",
        "layers: speed-up": "{layers}",
        "training GEMMs, TFLOP/s": "{training}",
    }
    return paragraphs(
        "Each card in runs of its own ([which figures](docs/performance.md"
        "#which-card-gave-which-figure)); – is not measured:",
        row_table(lines, columns),
    )


def files(every: Mapping[str, Sequence[Result]], place: str) -> str:
    """One line a file: card, day and commit."""
    rows = [
        {
            "file": f"[{each.path.stem}]({place}/{card}/{each.path.name})",
            "card": each.meta["device"] + (" ×2" if card.endswith("-x2") else ""),
            "day": str(each.meta.get("date") or "–")[:10],
            "commit": f"`{str(each.meta.get('commit'))[:7]}`",
        }
        for card, found in every.items()
        for each in sorted(found, key=lambda result: result.path.name)
    ]
    return row_table(
        rows, {"figures": "{file}", **{n: f"{{{n}}}" for n in ("card", "day", "commit")}}
    )


def on_each_card(
    every: Mapping[str, Sequence[Result]],
    place: str,
    name: str,
    text: Callable[[Row, str, str], str],
) -> str:
    """What a benchmark says, card by card; text: of a document, its models and links to it."""
    parts = []
    for card, found in every.items():
        document = named(found, f"{name}.json")
        if document is not None:
            models = ", ".join(dict.fromkeys(row["model"] for row in document["rows"]))
            link = f"{place}/{card}/{name}"
            parts.append(text(document, models, f"[JSON]({link}.json), [all cells]({link}.md)"))
    return paragraphs(*parts)


def row_encoding(every: Mapping[str, Sequence[Result]], place: str) -> str:
    """What goes of a layer's time where stage 2 finds its rows encoded, on each card."""

    def text(document: Row, models: str, links: str) -> str:
        head = f"One {document['meta']['device']}, {models} ({links}):"
        return paragraphs(head, share_table(document["rows"]))

    return on_each_card(every, place, "row_encoding", text) or "No card has measured it yet."


def weight_formats(every: Mapping[str, Sequence[Result]], place: str) -> str:
    """Layers by the format of their weights, beside the best peer with the same, on each card."""

    def text(document: Row, models: str, links: str) -> str:
        device = document["meta"]["device"]
        head = f"Best peer's time over ours, layers of {models} on one {device}, geometric means"
        return paragraphs(f"{head} ({links}):", means_table(document["rows"]))

    return on_each_card(every, place, "weight_formats", text)


def decode_in_vllm(every: Mapping[str, Sequence[Result]], place: str) -> str:
    """One sentence a card on the decode rates of gpt-oss."""
    parts = []
    for card, found in every.items():
        document = named(found, SERVING[0])
        if document is not None and (text := decode_text(document)):
            meta = document["meta"]
            parts.append(
                f"In vLLM {meta['versions']['vllm']} on one {meta['device']}, gpt-oss with mxpert "
                f"decodes {text} ([results]({place}/{card}/serving.md))."
            )
    return paragraphs(*parts) or "No card has measured gpt-oss in vLLM yet."


def serving(every: Mapping[str, Sequence[Result]], place: str, *, brief: bool = False) -> str:
    """gpt-oss in vLLM, on each card; brief: in its newest release, rows of mxpert alone."""
    parts, names = [], SERVING[:1] if brief else SERVING
    for card, name in itertools.product(every, names):
        document = named(every[card], name)
        if document is not None:
            meta, link = document["meta"], f"{place}/{card}/{name.removesuffix('.json')}"
            head = (
                f"vLLM {meta['versions']['vllm']}, gpt-oss with random weights on one "
                f"{meta['device']}: tokens/s, and in brackets the ratio to the best of vLLM's own "
                "kernels, for a16w4 of those with bfloat16 activations. [All formats and rounds, "
                f"which kernels were measured, first token, memory, load time]({link}.md); "
                f"[JSON]({link}.json), [plot]({link}.png)."
            )
            parts.append(paragraphs(head, summary_table(document, ours_only=brief)))
    return paragraphs(*parts) or "No card has measured it yet."


BLOCKS = {
    "cards": cards,
    "decode in vLLM": decode_in_vllm,
    "serving": serving,
    "serving, ours": functools.partial(serving, brief=True),
    "files": files,
    "row encoding": row_encoding,
    "weight formats": weight_formats,
}


def filled(page: str, every: Mapping[str, Sequence[Result]]) -> str:
    """A page's text with its blocks written anew."""
    text, place = (ROOT / page).read_text("utf-8"), "../" * page.count("/") + "benchmarks/results"
    for name in PAGES[page]:
        begin, end = (f"<!-- measured {name}: {side} -->" for side in ("begin", "end"))
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{BLOCKS[name](every, place)}\n{end}{tail}"
    return text


def rendered(folder: Path, renderers: Mapping[str, str] = RENDERERS) -> list[Path]:
    """A folder's documents with a renderer; reports of `mxpert bench` have none."""
    return [
        path
        for path in sorted(folder.glob("*.json"))
        if path.name in renderers and "environment" not in json.loads(path.read_text("utf-8"))
    ]


def render(folder: Path) -> list[str]:
    """Write the pages of a folder's documents; names of those that failed."""
    failed = []
    for path in rendered(folder):
        option = [] if path.name in REPORTS else ["--render"]
        main_of: Any = importlib.import_module(f"benchmarks.{RENDERERS[path.name]}").main
        failed += [path.name] if main_of([*option, str(path)]) else []
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Render; 1 if a document could not be rendered."""
    parser = bare_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a card's folder of results")
    options = parser.parse_args(arguments)
    failed = render(options.folder) if options.folder else []
    every = results()
    for page in PAGES:
        (ROOT / page).write_text(filled(page, every), encoding="utf-8")
    print(f"wrote {', '.join(PAGES)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
