"""Tables of whole stages beside published times, from their JSON alone; all are modelled.

python -m benchmarks.gfx950.stage_tables benchmarks/results/gfx950-model/stages.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.gfx950.published import BOARD_WATTS
from benchmarks.harness.document import NUMBER, Row, Schema, Section
from benchmarks.harness.tables import Report, optional, page, row_table

TEXT = (str,)
WHOLE = (int,)
LIMITS = ("cycles", "memory", "power")
"""Of a GEMM: compute units, HBM, or the chip's power."""
SCHEMA = Schema(
    "gfx950.run_stages",
    {
        "rows": Section(
            {
                **dict.fromkeys(
                    ("kind", "source", "shape", "what", "whose", "ratio", "config", "limit"), TEXT
                ),
                **dict.fromkeys(("tokens", "workgroups", "launches"), WHOLE),
                "published_us": (int, float, type(None)),
                **dict.fromkeys(
                    ("tiles", "start_cycles", "end_cycles", "tile_cycles", "mfma_percent"), NUMBER
                ),
                **dict.fromkeys(
                    ("cycles_us", "memory_us", "power_us", "others_us", "us", "error_percent"),
                    NUMBER,
                ),
            },
            ("source", "shape", "tokens", "what"),
            choices={"kind": ("moe", "grouped"), "limit": LIMITS},
        )
    },
    meta=("what", "commit", "date", "versions"),
)


def ratio(row: Row) -> float | None:
    """Modelled time over the published one; None where none is published."""
    published = row["published_us"]
    return None if published is None else float(row["us"] / published)


def word(row: Row) -> str:
    """ "faster", "level" (within the model's known error) or "slower"; a dash without a time."""
    found, error = ratio(row), row["error_percent"] / 100
    if found is None:
        return "–"
    return "faster" if found < 1 - error else "slower" if found > 1 + error else "level"


def kilowatts(row: Row) -> float:
    """Power of the GEMM if it grows with matrix work: AMD's best GEMM has the whole board's."""
    return float(row["power_us"] / max(row[f"{name}_us"] for name in LIMITS)) * BOARD_WATTS / 1000


def power(row: Row) -> str:
    """Whether the matrix work alone takes more than a kilowatt."""
    return f"yes ({kilowatts(row):.1f} kW)" if kilowatts(row) > 1 else "no"


COLUMNS = {
    "published, µs": lambda row: optional(row["published_us"], ".1f"),
    "modelled, µs": "{us:.1f}",
    "model's error": "±{error_percent:.0f} %",
    "ours is": word,
    "limit": "{limit}",
    "above 1 kW": power,
}


def moe_table(rows: Sequence[Row]) -> str:
    """One line a stage of an MoE layer."""
    return row_table(
        [row for row in rows if row["kind"] == "moe"],
        {
            "source": lambda row: row["source"] + ("" if row["whose"] == "FlyDSL" else " (aiter)"),
            "shape": "{shape}",
            "T": "{tokens}",
            "stage": "{what}",
            **COLUMNS,
            "published beside it": lambda row: row["ratio"] or "–",
        },
    )


def grouped_table(rows: Sequence[Row]) -> str:
    """One line a grouped GEMM."""
    return row_table(
        [row for row in rows if row["kind"] == "grouped"],
        {"shape": "{shape}", "op": "{what}", **COLUMNS, "published as": "{ratio}"},
    )


def parts_table(rows: Sequence[Row]) -> str:
    """What the modelled times are made of."""
    return row_table(
        rows,
        {
            "shape": "{shape}",
            "T": "{tokens}",
            "stage": "{what}",
            "tiles": "{tiles:.0f}",
            "side by side": "{workgroups}",
            "cycles of a tile": "{tile_cycles}",
            "until the first MFMA": "{start_cycles}",
            "after the last": "{end_cycles}",
            "compute units, µs": "{cycles_us}",
            "HBM, µs": "{memory_us}",
            "power limit, µs": "{power_us}",
            "other kernels, µs": "{others_us}",
            "launches": "{launches}",
            "% of MFMA's peak": "{mfma_percent}",
            "config": "`{config}`",
        },
    )


def summary(rows: Sequence[Row]) -> str:
    """How many rows are faster, level and slower, in one sentence."""
    texts = []
    for kind, name in (("moe", "MoE stages"), ("grouped", "grouped GEMMs")):
        words = [word(row) for row in rows if row["kind"] == kind]
        counts = [f"{words.count(each)} {each}" for each in ("faster", "level", "slower")]
        texts.append(f"{len(words) - words.count('–')} {name}: {', '.join(counts)}")
    return f"By the model, beside published times: {'; '.join(texts)}."


def markdown(document: Row) -> str:
    """Everything."""
    meta, rows = document["meta"], document["rows"]
    return page(
        "# gfx950: whole stages, modelled, not measured",
        f"{summary(rows)} {meta['date'][:10]}, commit `{str(meta['commit'])[:12]}`, Triton "
        f"{meta['versions']['triton']}.",
        "## MoE stages (modelled)\n\n" + moe_table(rows),
        "## Grouped GEMMs (modelled)\n\n" + grouped_table(rows),
        "## What the times are made of (modelled)\n\n" + parts_table(rows),
    )


REPORT = Report(__doc__, SCHEMA, markdown, {})
main = REPORT.main


if __name__ == "__main__":
    sys.exit(main())
