"""Tables and plots of a comparison, from its JSON alone.

    python benchmarks/render.py benchmarks/results/nvidia-h200/moe.json

writes moe.md (everything), moe-summary.md (for a README) and moe.png beside the JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import _checkout  # noqa: F401 - finds the library
from cells import DECODE_TOKENS, MODELS, STAGES, WIDTHS
from document import Row, load

OURS = "mxpert"
SUMMARY_TOKENS = (1, 16, 128, 1024, 8192)
COLORS = {"mxpert": "tab:red", "triton_kernels": "tab:blue", "marlin": "tab:green",
          "humming": "tab:purple"}


@dataclass(frozen=True)
class Ratio:
    """Our time over the best peer's of the same activation width, in one cell."""

    model: str
    tokens: int
    routing: str
    stage: str
    width: str
    us: float
    peer: str
    peer_us: float

    @property
    def value(self) -> float:
        return self.us / self.peer_us

    @property
    def regime(self) -> str:
        return "decode" if self.tokens <= DECODE_TOKENS else "prefill"

    def __str__(self) -> str:
        return (f"{self.model} T={self.tokens} {self.routing} {self.width} {self.stage}: "
                f"{self.us:.1f} µs, {self.peer} {self.peer_us:.1f} µs, {self.value:.2f}×")


def model_rank(name: str) -> tuple[int, str]:
    """Models in the order of importance, unknown ones last."""
    return (list(MODELS).index(name) if name in MODELS else len(MODELS)), name


def ratios(rows: Iterable[Mapping[str, Any]]) -> list[Ratio]:
    """One Ratio for each (model, T, routing, stage, width) that both we and a peer have."""
    best: dict[tuple[Any, ...], dict[bool, Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["model"], row["T"], row["routing"], row["stage"], WIDTHS[row["activation"]])
        sides = best.setdefault(key, {})
        is_ours = row["impl"] == OURS
        if is_ours not in sides or row["us"] < sides[is_ours]["us"]:
            sides[is_ours] = row
    found = [Ratio(*key, sides[True]["us"], sides[False]["impl"], sides[False]["us"])
             for key, sides in best.items() if len(sides) == 2]
    return sorted(found, key=lambda each: (model_rank(each.model), each.routing, each.width,
                                           STAGES.index(each.stage), each.tokens))


def geometric_means(found: Iterable[Ratio]) -> dict[tuple[str, str, str], tuple[float, int, float]]:
    """(width, stage, regime) → geometric mean, number of cells, worst ratio."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        groups.setdefault((each.width, each.stage, each.regime), []).append(each.value)
    order = sorted(groups, key=lambda key: (key[0], STAGES.index(key[1]), key[2]))
    return {key: (geometric_mean(groups[key]), len(groups[key]), max(groups[key]))
            for key in order}


def slower_cells(found: Iterable[Ratio]) -> list[Ratio]:
    """Cells in which a peer is faster, the worst first."""
    return sorted((each for each in found if each.value > 1), key=lambda each: -each.value)


def layer_overheads(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str, str], float]:
    """(model, T, routing, activation) → our layer's time over the sum of its two GEMMs'."""
    times: dict[tuple[str, int, str, str], dict[str, float]] = {}
    for row in rows:
        if row["impl"] == OURS:
            key = (row["model"], row["T"], row["routing"], row["activation"])
            times.setdefault(key, {})[row["stage"]] = row["us"]
    return {key: each["layer"] / (each["gate_up_gemm"] + each["down_gemm"])
            for key, each in times.items()
            if {"layer", "gate_up_gemm", "down_gemm"} <= set(each)}


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned.

    >>> print(markdown_table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def conditions(meta: Mapping[str, Any]) -> str:
    """One paragraph: on what, when and how it was measured."""
    limits, versions = meta["ceilings"], meta["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "driver")
                      if versions.get(name))
    return (f"{meta['device']}, {meta['date']}, commit `{str(meta['commit'])[:12]}`, {named}. "
            f"Ceilings of the same run: {limits['read_tbs']:.2f} TB/s read, cuBLAS "
            f"{limits['bf16_tflops']:.0f} TFLOP/s bf16 and {limits['fp8_tflops']:.0f} fp8. "
            f"Power: {meta['protocol']['power']}.")


def means_table(found: Sequence[Ratio]) -> str:
    """Geometric means by width, stage and regime."""
    rows = [(f"{width} {stage}", regime, f"{mean:.2f}", f"{worst:.2f}", str(count))
            for (width, stage, regime), (mean, count, worst) in geometric_means(found).items()]
    return markdown_table(("our time / best peer's", "regime", "geometric mean", "worst", "cells"),
                          rows)


def summary(document: Mapping[str, Any]) -> str:
    """The short form: whole layers at a few token counts, and the geometric means."""
    rows = document["rows"]
    found = {(each.model, each.width, each.tokens): each.value for each in ratios(rows)
             if each.stage == "layer" and each.routing == "uniform"}
    times = {(row["model"], WIDTHS[row["activation"]], row["T"]): row["us"] for row in rows
             if (row["impl"], row["stage"], row["routing"]) == (OURS, "layer", "uniform")}
    columns = [count for count in SUMMARY_TOKENS if any(key[2] == count for key in times)]
    names = sorted({key[:2] for key in times}, key=lambda name: (model_rank(name[0]), name[1]))
    body = []
    for name in names:
        line = [f"{name[0]} {name[1]}w4"]
        for count in columns:
            us, value = times.get((*name, count)), found.get((*name, count))
            ratio = f" ({value:.2f}×)" if value else ""
            line.append(f"{us:.0f}{ratio}" if us else "–")
        body.append(line)
    table = markdown_table(["whole layer, µs (× best peer)", *(f"T = {n}" for n in columns)], body)
    return "\n\n".join([conditions(document["meta"]), table, means_table(ratios(rows))]) + "\n"


def detail_table(rows: Sequence[Row]) -> str:
    """Every measurement of one model."""
    order = sorted(rows, key=lambda row: (row["routing"], STAGES.index(row["stage"]), row["T"],
                                          WIDTHS[row["activation"]], row["us"]))
    body = [(row["stage"], row["routing"], str(row["T"]), f"{row['hit']:.0f}", row["impl"],
             row["activation"], f"{row['us']:.1f}", f"{row['us_spread']:.1f}",
             f"{row['tbs']:.2f}", f"{row['tflops']:.0f}", f"{row['percent_of_roof']:.0f} %",
             "–" if row["rel_l2"] is None else f"{row['rel_l2']:.1e}") for row in order]
    return markdown_table(("stage", "routing", "T", "hit", "impl", "activation", "µs",
                           "10–90 %", "TB/s", "TFLOP/s", "of roof", "rel L2"), body)


def full(document: Mapping[str, Any]) -> str:
    """Everything: means, slower cells, layer overheads, ratios, measurements, absences."""
    meta, rows = document["meta"], document["rows"]
    found = ratios(rows)
    slower = [f"- {each}" for each in slower_cells(found)] or ["None."]
    overheads = [(model, routing, activation, str(tokens), f"{value:.2f}")
                 for (model, tokens, routing, activation), value in layer_overheads(rows).items()]
    ratio_rows = [(each.model, each.width, each.stage, each.routing, str(each.tokens),
                   f"{each.us:.1f}", each.peer, f"{each.peer_us:.1f}", f"{each.value:.2f}")
                  for each in found]
    parts = [
        "# MoE with MXFP4 weights: measurements", conditions(meta),
        "\n".join(f"- {name}: {text}" for name, text in meta["protocol"].items()),
        "## Against the best peer of the same activation width", means_table(found),
        "### Cells slower than a peer", "\n".join(slower),
        "## Whole layer over the sum of its two GEMMs",
        markdown_table(("model", "routing", "activation", "T", "ratio"), overheads),
        "## Ratios", markdown_table(("model", "width", "stage", "routing", "T", "µs", "best peer",
                                     "its µs", "ratio"), ratio_rows)]
    for model in sorted({row["model"] for row in rows}, key=model_rank):
        mine = [row for row in rows if row["model"] == model]
        first = mine[0]
        parts += [f"## {model} (E {first['E']}, k {first['k']}, H {first['H']}, F {first['F']})",
                  detail_table(mine)]
    absent = [f"- {name}: {text}" for name, text in meta.get("peers", {}).items()
              if text != "present"]
    failures = dict.fromkeys(f"- {each['impl']}/{each['activation']} {each['model']} "
                             f"T={each['T']} {each['stage']}: {each['error']}"
                             for each in meta.get("failures", []))
    if absent or failures:
        parts += ["## Not measured", "\n".join([*absent, *failures])]
    return "\n\n".join(parts) + "\n"


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Weight bandwidth and arithmetic rate of both GEMMs against T, a row of panels per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in document["rows"] if row["routing"] == "uniform"]
    limits = document["meta"]["ceilings"]
    models = sorted({row["model"] for row in rows}, key=model_rank)
    stages = [stage for stage in ("gate_up_gemm", "down_gemm")
              if any(row["stage"] == stage for row in rows)] or ["layer"]
    columns = [(stage, rate) for stage in stages for rate in ("tbs", "tflops")]
    figure, panels = pyplot.subplots(
        max(1, len(models)), len(columns), squeeze=False, layout="constrained",
        figsize=(4 * len(columns), 2.6 * max(1, len(models))))
    for line, model in zip(panels, models, strict=False):
        for axes, (stage, rate) in zip(line, columns, strict=True):
            chosen = [row for row in rows if (row["model"], row["stage"]) == (model, stage)]
            draw(axes, chosen, rate, limits)
            axes.set_title(f"{model}, {stage}", fontsize="small")
            axes.set_ylabel("TB/s of weights" if rate == "tbs" else "TFLOP/s")
            axes.set_xlabel("tokens")
    save_figure(figure, panels.flat, document, path, columns=4)


def save_figure(figure: Any, panels: Iterable[Any], document: Mapping[str, Any], path: Path, *,
                columns: int) -> None:
    """One legend of all panels below them, the device and the day above, and the file."""
    from matplotlib import pyplot

    handles = {label: handle for axes in panels
               for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns,
                  fontsize="small")
    figure.suptitle(f"{document['meta']['device']}, {document['meta']['date'][:10]}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(axes: Any, rows: Sequence[Row], rate: str, limits: Mapping[str, float]) -> None:
    """One panel: a line for each implementation and activation, and the roof."""
    for impl, activation in dict.fromkeys((row["impl"], row["activation"]) for row in rows):
        points = sorted((row["T"], row[rate]) for row in rows
                        if (row["impl"], row["activation"]) == (impl, activation))
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".",
                  color=COLORS.get(impl), label=f"{impl} {activation}",
                  linestyle="-" if WIDTHS[activation] == "a16" else "--")
    if rate == "tbs":
        axes.axhline(limits["read_tbs"], color="gray", label="read ceiling")
    else:
        axes.axhline(limits["bf16_tflops"], color="gray", label="cuBLAS bf16")
        axes.axhline(limits["fp8_tflops"], color="gray", linestyle="--", label="cuBLAS fp8")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def render(arguments: Sequence[str] | None, description: str | None, *,
           load: Callable[[Path], Any], full: Callable[[Any], str],
           plot: Callable[[Any, Path], None],
           summary: Callable[[Any], str] | None = None) -> int:
    """The command line of a render script: Markdown, a summary if there is one, and a plot.

    Args:
        arguments: None for those of the process. description: for --help.
        load: JSON file → document, ValueError if it is another script's.
        full, summary, plot: what the document becomes; without `summary` all of it is printed.

    Returns:
        The exit code: 2 if the file is not the document.
    """
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json_file", type=Path)
    parser.add_argument("--folder", type=Path, help="write there (default: beside the JSON)")
    options = parser.parse_args(arguments)
    try:
        document = load(options.json_file)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder, stem = options.folder or options.json_file.parent, options.json_file.stem
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{stem}.md": full(document)}
    if summary is not None:
        texts[f"{stem}-summary.md"] = summary(document)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    written = list(texts)
    try:
        plot(document, folder / f"{stem}.png")
        written.append(f"{stem}.png")
    except ImportError:
        print("no plot: matplotlib is not installed; pip install 'mxpert[plot]'", file=sys.stderr)
    print(text)  # the last: the shortest
    print(f"wrote {', '.join(written)} in {folder}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the three files; 2 if the JSON is not a comparison."""
    return render(arguments, __doc__, load=load, full=full, plot=plot, summary=summary)


if __name__ == "__main__":
    sys.exit(main())
