"""Tables of layers without pauses, from the JSON of `benchmarks.moe.run --sustained` alone.

    python -m benchmarks.moe.run --sustained --tokens 8192 --stages layer --peers DIR \\
        --output benchmarks/results/nvidia-h200/sustained.json
    python -m benchmarks.moe.sustained benchmarks/results/nvidia-h200/sustained.json

writes sustained.md beside the JSON: for each T, implementations down and models across. Speed-up is
the best peer's time over ours, as in moe.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.tables import Report, absences, bullets, conditions, page, pivot
from benchmarks.moe.figures import format_rank, model_rank, speed_ups
from benchmarks.moe.layers import means_table, time_text
from benchmarks.moe.render import failures_of
from benchmarks.moe.rows import SCHEMA


def time_table(rows: Sequence[Row]) -> str:
    """Times of layers of one T, uniform routing; in brackets the speed-up over the best peer."""
    text = time_text(rows)
    cells = {
        (f"{row['impl']} {row['activation']}", row["model"]): text(row)
        for row in sorted(rows, key=lambda row: format_rank(row["activation"]))
    }
    models = sorted({row["model"] for row in rows}, key=model_rank)
    return pivot(f"T = {rows[0]['T']}, µs", cells, models)


def full(document: Mapping[str, Any]) -> str:
    """Everything: times of each T, means, what was not measured."""
    meta = document["meta"]
    layers = [
        row for row in document["rows"] if (row["stage"], row["routing"]) == ("layer", "uniform")
    ]
    tokens = sorted({row["T"] for row in layers})
    return page(
        "# MoE layers without pauses",
        conditions(meta),
        bullets(meta["protocol"]),
        *(time_table([row for row in layers if row["T"] == count]) for count in tokens),
        means_table(speed_ups(layers)) if layers else "",
        absences("Not measured", failures_of(meta), meta.get("left", ())),
    )


REPORT = Report(__doc__, SCHEMA, full, {})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
