"""What longer scale spans cost: SNR of one MXFP8 product against float64 on unquantised operands.

    python -m benchmarks.grouped.scale_spans [--output FILE]

Needs no GPU and gives the same numbers everywhere: operands are quantised by the library and
multiplied in float64, so that the spans alone differ. The worst channel is the column of the result
(one output feature) with the least SNR, the worst row one token's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.script import RESULTS as FOLDER
from benchmarks.harness.script import bare_parser
from benchmarks.harness.tables import pivot
from mxpert.cli.report import environment, write_json
from mxpert.formats import ScaleRule, ScaleSpan, dequantize_blocks, quantize_spans
from mxpert.testing.numerics import sqnr_db

RESULTS = FOLDER / "cpu/scale_spans.json"
SIZE = (512, 512, 4096)
"""Rows of a, rows of b, values that are summed."""

SPANS = {
    "exact": (ScaleSpan.BLOCK, ScaleSpan.BLOCK),
    "block128": (ScaleSpan.SPAN128, ScaleSpan.ROW),
    "row": (ScaleSpan.ROW, ScaleSpan.ROW),
}
FORMATS = {"e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"), "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3")}
"""Of a and b; hybrid is a gradient in e5m2 by weights or activations in e4m3."""

Pair = tuple[torch.Tensor, torch.Tensor]


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64)


def plain(m: int, n: int, k: int) -> Pair:
    """Normal values."""
    return normal(m, k), normal(n, k)


def heavy_tailed(m: int, n: int, k: int) -> Pair:
    """Normal values times e^2z, z normal: a few hold most of the energy."""
    return tuple(x * torch.exp(2 * torch.randn_like(x)) for x in plain(m, n, k))


def spread(m: int, n: int, k: int, binades: float = 6) -> Pair:
    """Blocks of 32 at uniformly random powers of two within ± `binades`."""
    return tuple(x * _per_block(len(x), k, binades) for x in plain(m, n, k))


def cancelling(m: int, n: int, k: int, binades: float = 6) -> Pair:
    """The small blocks of a meet the large ones of b: every block counts alike."""
    scale = _per_block(1, k, binades)
    a, b = plain(m, n, k)
    return a * scale, b / scale


def outlier_channels(m: int, n: int, k: int) -> Pair:
    """One input channel in a hundred is 100 times as large in a, as in trained transformers."""
    a, b = plain(m, n, k)
    a[:, ::100] *= 100
    return a, b


def outlier_rows(m: int, n: int, k: int) -> Pair:
    """One token in a hundred is 100 times as large."""
    a, b = plain(m, n, k)
    a[::100] *= 100
    return a, b


def _per_block(rows: int, k: int, binades: float) -> torch.Tensor:
    exponents = (2 * torch.rand(rows, k // 32, dtype=torch.float64) - 1) * binades
    return torch.exp2(exponents.round()).repeat_interleave(32, 1)


DATA: dict[str, Callable[[int, int, int], Pair]] = {
    "normal": plain,
    "heavy-tailed": heavy_tailed,
    "blocks spread over 2^±6": spread,
    "blocks spread over 2^±10": lambda m, n, k: spread(m, n, k, 10),
    "a and b cancel, 2^±6": cancelling,
    "a and b cancel, 2^±10": lambda m, n, k: cancelling(m, n, k, 10),
    "outlier channels × 100": outlier_channels,
    "outlier rows × 100": outlier_rows,
}


def measure(size: tuple[int, int, int] = SIZE) -> list[dict[str, Any]]:
    """One row for each data set, pair of formats, rule and mode."""
    rows = []
    for data, make in DATA.items():
        torch.manual_seed(0)
        a, b = make(*size)
        wanted = a @ b.T
        for name, formats in FORMATS.items():
            for rule in (ScaleRule.RCEIL, ScaleRule.FLOOR):
                for mode, spans in SPANS.items():
                    found = product((a, b), formats, rule, spans)
                    case = {"data": data, "formats": name, "rule": rule.value, "mode": mode}
                    rows.append(case | snr(found, wanted))
    return rows


def product(
    pair: Pair, formats: tuple[str, str], rule: ScaleRule, spans: tuple[ScaleSpan, ScaleSpan]
) -> torch.Tensor:
    """``a @ b.T`` of the quantised operands in float64."""
    first, second = (
        dequantize_blocks(quantize_spans(x.float(), fmt, rule, span), torch.float64)
        for x, fmt, span in zip(pair, formats, spans, strict=True)
    )
    return first @ second.T


def snr(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Of the whole result, of its worst channel and of its worst row, in dB to two places."""
    noise, signal = (found - wanted).square(), wanted.square()
    worst = {
        name: (10 * (signal.sum(axis) / noise.sum(axis)).log10()).min().item()
        for name, axis in (("worst_channel_db", 0), ("worst_row_db", 1))
    }
    values = {"snr_db": sqnr_db(found, wanted), **worst}
    return {name: round(value, 2) for name, value in values.items()}


def table(rows: Sequence[dict[str, Any]], formats: str = "e4m3", rule: str = "rceil") -> str:
    """SNR by data set and mode, the worst channel and the worst row in brackets."""
    text = "{snr_db:.2f} ({worst_channel_db:.1f}, {worst_row_db:.1f})"
    cells = {
        (row["data"], row["mode"]): text.format(**row)
        for row in rows
        if (row["formats"], row["rule"]) == (formats, rule)
    }
    corner = f"SNR in dB, {formats}, {rule} (worst channel, worst row)"
    return pivot(corner, cells, list(SPANS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON, print the tables."""
    parser = bare_parser(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows, facts = measure(), environment(torch.device("cpu"))
    meta = {name: facts[name] for name in ("versions", "commit", "date")} | {"size": SIZE}
    write_json(options.output, {"meta": meta, "rows": rows})
    for formats in FORMATS:
        for rule in ("rceil", "floor"):
            print(table(rows, formats, rule) + "\n")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
