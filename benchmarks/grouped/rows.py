"""Rows of grouped/run.py, and the form of its JSON."""

from __future__ import annotations

import math

from benchmarks.grouped.cells import BALANCES, OPS, Shape
from benchmarks.grouped.ours import Variant
from benchmarks.harness.document import META, NUMBER, OPTIONAL, Row, Schema, Section
from benchmarks.harness.run import times_of
from mxpert.testing.timing import Timing

KEY_COLUMNS = ("shape", "balance", "impl", "mode", "op", "with_quant")
ROWS = Section(
    dict.fromkeys(("shape", "balance", "impl", "mode", "op"), (str,))
    | dict.fromkeys(("G", "rows", "N", "K"), (int,))
    | dict.fromkeys(("us", "us_spread", "tflops"), NUMBER)
    | dict.fromkeys(("snr_db", "rel_l2"), OPTIONAL)
    | {"with_quant": (bool,)},
    KEY_COLUMNS,
    {"balance": BALANCES, "op": OPS},
)
QUANTISER_KEY = ("shape", "operand", "op", "mode", "dtype")
QUANTISER = Section(
    dict.fromkeys(QUANTISER_KEY, (str,))
    | dict.fromkeys(("width", "bytes_ideal"), (int,))
    | dict.fromkeys(("us", "tbs", "of_copy"), NUMBER),
    QUANTISER_KEY,
)
SCHEMA = Schema(
    "grouped.run",
    {"rows": ROWS, "quantiser": QUANTISER},
    META,
    optional_meta=("kernels", "peers", "failures"),
)


def make_row(
    shape: Shape,
    balance: str,
    variant: Variant,
    timing: Timing,
    snr_db: float,
    rel_l2: float | None,
) -> Row:
    """One measurement; µs, and the width of the band from the 10th to the 90th percentile."""
    return {
        "shape": str(shape),
        **{name: getattr(shape, name) for name in ("G", "rows", "N", "K")},
        "balance": balance,
        **{name: getattr(variant, name) for name in ("impl", "mode", "op", "with_quant")},
        **times_of(timing),
        "tflops": shape.flops(variant.op) / timing.us / 1e6,
        "snr_db": snr_db if math.isfinite(snr_db) else None,
        "rel_l2": rel_l2,
    }
