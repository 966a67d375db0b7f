"""Markdown and figures of the benchmarks, and the command line of the scripts that render."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.document import Row, Schema
from benchmarks.harness.script import bare_parser
from mxpert.cli.plots import INK, figure, legend_outside, save
from mxpert.cli.report import PLOT_HINT

Column = str | Callable[[Any], str]
OPEN_ROWS = 12
"""What a reader sees of a long list before unfolding it."""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned.

    >>> print(markdown_table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def row_table(rows: Iterable[Any], columns: Mapping[str, Column]) -> str:
    """One line a row; a column is a format of the row's values, or a function of the row.

    >>> print(row_table([{"op": "plan", "us": 2.5}], {"op": "{op}", "µs": "{us:.1f}"}))
    | op | µs |
    |---|---:|
    | plan | 2.5 |
    """
    lines = (
        [text.format(**row) if isinstance(text, str) else text(row) for text in columns.values()]
        for row in rows
    )
    return markdown_table(list(columns), lines)


def pivot(corner: str, cells: Mapping[tuple[str, str], str], columns: Sequence[str]) -> str:
    """(line, column) → text as a table; the lines in their order."""
    body = [
        [line, *(cells.get((line, column), "–") for column in columns)]
        for line in dict.fromkeys(line for line, _ in cells)
    ]
    return markdown_table([corner, *columns], body)


def optional(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def span(values: Sequence[float], form: str) -> str:
    """Smallest and largest; a dash without any."""
    texts = [format(value, form) for value in (min(values), max(values))] if values else ["–"]
    return " to ".join(dict.fromkeys(texts))


def folded(title: str, text: str) -> str:
    """Text that a reader unfolds."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def bullets(lines: Iterable[str] | Mapping[str, Any]) -> str:
    """A list; of a mapping "name: text"."""
    if isinstance(lines, Mapping):
        lines = [f"{name}: {text}" for name, text in lines.items()]
    return "\n".join(f"- {line}" for line in lines)


def paragraphs(*parts: str) -> str:
    """Parts with empty lines between them; those that are empty are left out."""
    return "\n\n".join(part for part in parts if part)


def page(*parts: str) -> str:
    """A whole file of `paragraphs`."""
    return paragraphs(*parts) + "\n"


def absences(title: str, failures: Iterable[str], left: Sequence[str] = ()) -> str:
    """A part for what has no result; empty if nothing lacks one."""
    lines = [*failures, *([f"out of time: {', '.join(left)}"] if left else [])]
    return f"## {title}\n\n{bullets(lines)}" if lines else ""


def failures_of(meta: Mapping[str, Any], name: str = "") -> list[str]:
    """ "name: error" of each failure; `name` is a format of the columns that it blames, if any."""
    found = meta["failures"]
    if name:
        return [f"{name.format(**each)}: {each['error']}" for each in found]
    return [f"{name}: {text}" for name, text in found.items()]


def closing(meta: Mapping[str, Any], name: str = "") -> str:
    """The end of a page: the protocol, and what was not measured, named as in `failures_of`."""
    failures = failures_of(meta, name)
    absent = absences("Not measured", failures, meta["left"])
    return paragraphs("## Protocol", bullets(meta["protocol"]), absent)


def where(meta: Mapping[str, Any], names: Sequence[str] | None = None) -> str:
    """Device, date, commit and versions, all of them or those named."""
    versions = {name: text for name, text in meta["versions"].items() if text}
    named = ", ".join(
        f"{name} {versions[name]}" for name in names or versions if versions.get(name)
    )
    return f"{meta['device']}, {meta['date']}, commit `{str(meta['commit'])[:12]}`, {named}"


def conditions(meta: Mapping[str, Any], power: str | None = None) -> str:
    """One paragraph: on what, when and how it was measured."""
    limits = meta["ceilings"]
    return (
        f"{where(meta, ('torch', 'triton', 'cuda', 'driver'))}. "
        f"Ceilings of the same run: {limits['read_tbs']:.2f} TB/s read, cuBLAS "
        f"{limits['bf16_tflops']:.0f} TFLOP/s bf16 and {limits['fp8_tflops']:.0f} fp8. "
        f"Power: {power or meta['protocol']['power']}."
    )


def make_panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A matplotlib figure without a display, and its panels [rows][columns]."""
    return figure("", rows, columns, size=size, dpi=110)


def save_figure(
    drawing: Any, panels: Iterable[Any], document: Mapping[str, Any], path: Path, *, columns: int
) -> None:
    """One legend of all panels below them, the device and the day above, and the file."""
    legend_outside(drawing, panels, columns=columns)
    drawing.suptitle(f"{document['meta']['device']}, {document['meta']['date'][:10]}")
    save(drawing, path)


def draw_cublas(axes: Any, limits: Mapping[str, float]) -> None:
    """The rates of cuBLAS as lines across a panel."""
    axes.axhline(limits["bf16_tflops"], color=INK, label="cuBLAS bf16")
    axes.axhline(limits["fp8_tflops"], color=INK, linestyle="--", label="cuBLAS fp8")


@dataclass(frozen=True)
class Report:
    """What a script's JSON becomes, and the command line that writes it.

    Args:
        description: for --help. schema: the JSON's.
        full, summary: Markdown of a document; without `summary` all of it is printed.
        plots: file name → what draws it; an empty name takes the JSON's.
        fill: replaces the measured blocks of a file.
    """

    description: str | None
    schema: Schema
    full: Callable[[Row], str]
    plots: Mapping[str, Callable[[Row, Path], None]]
    summary: Callable[[Row], str] | None = None
    fill: Callable[[Row, Path], None] | None = None

    def write(self, document: Row, folder: Path, stem: str) -> str:
        """Write every file; the summary, or all of it, and what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {f"{stem}.md": self.full(document)}
        if self.summary is not None:
            texts[f"{stem}-summary.md"] = self.summary(document)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        written = list(texts)
        try:
            for name, plot in self.plots.items():
                written.append(f"{name or stem}.png")
                plot(document, folder / written[-1])
        except ImportError:
            print(PLOT_HINT, file=sys.stderr)
        return f"{text}\nwrote {', '.join(written)} in {folder}"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Write what follows from a JSON file; 2 if it is not the schema's."""
        parser = bare_parser(self.description)
        parser.add_argument("json_file", type=Path)
        parser.add_argument("--folder", type=Path, help="write there (default: beside the JSON)")
        if self.fill is not None:
            text = "replace the measured blocks of this file; may be repeated"
            parser.add_argument("--page", type=Path, action="append", default=[], help=text)
        options = parser.parse_args(arguments)
        try:
            document = self.schema.load(options.json_file)
            if self.fill is not None:
                for path in options.page:
                    self.fill(document, path)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        folder = options.folder or options.json_file.parent
        print(self.write(document, folder, options.json_file.stem))
        return 0
