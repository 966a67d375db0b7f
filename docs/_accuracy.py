"""Writes the table of accuracies of docs/formats.md: `python docs/_accuracy.py`.

The figures are those of benchmarks/results/cpu/eval_weight_formats.json, which `mxpert eval` wrote.
tests/cli/test_eval_page.py fails if the page has another table.
"""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).with_name("formats.md")
RESULTS = PAGE.parent.parent / "benchmarks" / "results" / "cpu" / "eval_weight_formats.json"
BEGIN, END = "<!-- accuracy: python docs/_accuracy.py -->", "<!-- end of accuracy -->"
SHORT = {"a16w4": ("bf16", "mxfp4"), "a8w4": ("mxfp8", "mxfp4")}
"""Formats of activations and weights of the names that have no weights' format in them."""
ROUNDED = "nvfp4-e4m3"


def pair_of(name: str) -> tuple[str, str]:
    """Formats of activations and weights by a report's name.

    >>> pair_of("a8w4"), pair_of("mxfp8xint4_g32")
    (('mxfp8', 'mxfp4'), ('mxfp8', 'int4_g32'))
    """
    if name in SHORT:
        return SHORT[name]
    activation = "mxfp8" if name.startswith("mxfp8x") else "bf16"
    return activation, name.removeprefix(f"{activation}x")


def table(document: dict) -> str:
    """A row for each format of weights: difference of the loss, and SQNR of the worst layer."""
    baseline, *results = document["formats"]
    rows: dict[str, dict[str, tuple[str, str]]] = {}
    for result in results:
        activation, weights = pair_of(result["name"])
        worst = min(layer["sqnr_db"][result["name"]] for layer in document["layers"])
        loss = f"{result['delta']:+.4f} ± {result['delta_error']:.4f}"
        rows.setdefault(weights, {})[activation] = loss, f"{worst:.1f} dB"
    lines = [
        "| weights | Δ loss, bf16 activations | SQNR | Δ loss, MXFP8 activations | SQNR |",
        "|---|---:|---:|---:|---:|",
    ]
    for weights, cells in rows.items():
        name = '`"nvfp4"` rounded to e4m3' if weights == ROUNDED else f'`"{weights}"`'
        lines.append(f"| {' | '.join((name, *cells['bf16'], *cells['mxfp8']))} |")
    lines.append("")
    lines.append(
        f"The loss in bf16 is {baseline['loss']:.4f}, over {document['tokens']:,} bytes in "
        f"{document['windows']} windows."
    )
    return "\n".join(lines)


def with_table(text: str, document: dict) -> str:
    """The page's text with today's table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
