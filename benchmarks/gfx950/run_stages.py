"""Model whole stages on the shapes that the reference systems publish; needs no GPU.

    python -m benchmarks.gfx950.run_stages

Every figure is *modelled*: `benchmarks.gfx950.stages` says what it contains. Takes six minutes.
Writes stages.json and stages.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from benchmarks.gfx950.published import STAGES
from benchmarks.gfx950.render import SCHEMA as MODEL_SCHEMA
from benchmarks.gfx950.run import OUTPUT as MODEL
from benchmarks.gfx950.stage_tables import REPORT, summary
from benchmarks.gfx950.stages import grouped_cells, grouped_row, moe_row
from benchmarks.harness.document import Row
from benchmarks.harness.script import RESULTS, bare_parser
from mxpert.cli.report import environment, write_json

OUTPUT = RESULTS / "gfx950-model/stages.json"
BUSY = 80.0
"""Measured MFMA efficiency from which on a kernel of the calibration is limited by MFMA."""


def errors() -> dict[str, float]:
    """Worst residual of the calibration in percent: on bandwidths, and where MFMA are the limit."""
    rows = MODEL_SCHEMA.load(MODEL)["calibration"]
    matrix = [row for row in rows if row["unit"] == "% MFMA" and row["published"] >= BUSY]
    return {
        "decode": max(abs(row["residual"]) for row in rows if row["kind"] == "bandwidth"),
        "prefill": max(100 * abs(row["residual"]) / row["published"] for row in matrix),
    }


def with_error(row: Row, known: dict[str, float]) -> Row:
    """A row and the known error of what it was modelled with."""
    kind = "decode" if "Cdna4Kernel.DECODE" in row["config"] else "prefill"
    return {**row, "error_percent": round(known[kind], 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Model, write the JSON and the tables."""
    parser = bare_parser(__doc__)
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    known, rows = errors(), []
    for row in chain(map(moe_row, STAGES), map(grouped_row, grouped_cells())):
        rows.append(with_error(row, known))
        print(f"{row['shape']}, {row['tokens']}, {row['what']}: {row['us']} µs", flush=True)
    facts = environment(torch.device("cpu"))
    meta = {
        "what": "modelled, not measured",
        "commit": options.commit or facts["commit"],
        "date": facts["date"],
        "versions": facts["versions"],
    }
    document = {"meta": meta, "rows": rows}
    write_json(options.output, document)
    REPORT.write(document, options.output.parent, options.output.stem)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
