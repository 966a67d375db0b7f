"""Tables of whole layers: the summary of a comparison, and the README's measured block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.document import Row
from harness.tables import conditions, folded, page, paragraphs, pivot

from moe.cells import NAMED, REFERENCE, REFERENCE_TOKENS
from moe.figures import (
    OURS,
    SpeedUp,
    geometric_means,
    line_name,
    our_rows,
    peer_width,
    speed_ups,
    token_columns,
)
from mxpert.errors import message

SUMMARY_TOKENS = (1, 16, 128, 1024, 8192)
NAMES = {"bf16": "a16w4", "mxfp8": "a8w4", "mxfp4": "a4w4"}
"""Our formats in a README."""
OPEN_MODELS = 3
"""What a reader sees of the named models before unfolding them."""


def means_table(found: Sequence[SpeedUp]) -> str:
    """Geometric means by our format, stage and regime."""
    cells = {}
    for (activation, stage, regime), (mean, count, worst) in geometric_means(found).items():
        line = f"{activation}, {peer_width(activation)} peers, {stage}"
        texts = f"{mean:.2f}", f"{worst:.2f}", str(count)
        cells |= {(line, name): text for name, text in zip(_columns(regime), texts, strict=True)}
    columns = [*_columns("decode"), *_columns("prefill")]
    return pivot("speed-up: best peer's time / ours", cells, columns)


def _columns(regime: str) -> tuple[str, str, str]:
    return regime, f"worst {regime}", f"{regime} cells"


def layer_table(rows: Iterable[Row], tokens: Sequence[int], name: Callable[[Row], str]) -> str:
    """Times and speed-ups of whole layers under uniform routing; empty if there are none.

    Args:
        tokens: the columns. name: the first column of a row.
    """
    rows = [
        row
        for row in rows
        if (row["routing"], row["stage"]) == ("uniform", "layer") and row["T"] in tokens
    ]
    found = {id(each.ours): f" ({each.value:.2f}×)" for each in speed_ups(rows)}
    cells = {
        (name(row), f"T = {row['T']}"): f"{row['us']:.0f}{found.get(id(row), '')}"
        for row in our_rows(rows)
    }
    columns = token_columns(row["T"] for row in rows)
    return pivot("whole layer, µs (speed-up over the best peer)", cells, columns) if cells else ""


def summary(document: Mapping[str, Any]) -> str:
    """The short form: whole layers at a few token counts, and the geometric means."""
    rows = document["rows"]
    named = [row for row in rows if row["model"] not in REFERENCE]
    others = [row for row in rows if row["model"] in REFERENCE]
    return page(
        conditions(document["meta"]),
        layer_table(named, SUMMARY_TOKENS, line_name),
        layer_table(others, REFERENCE_TOKENS, line_name),
        means_table(speed_ups(rows)),
    )


def readme_block(document: Mapping[str, Any]) -> str:
    """Layers of the named models and of the reference systems' shapes, all but three folded."""
    rows = [row for row in document["rows"] if row["activation"] in NAMES or row["impl"] != OURS]

    def table(models: Sequence[str], tokens: Sequence[int]) -> str:
        chosen = [row for row in rows if row["model"] in models]
        return layer_table(chosen, tokens, lambda row: f"{row['model']} {NAMES[row['activation']]}")

    repository = "https://github.com/mxpert/mxpert/blob/main"  # the package index shows it, too
    folder = f"{repository}/benchmarks/results/nvidia-h200"
    named = list(NAMED)
    others = paragraphs(
        table(named[OPEN_MODELS:], SUMMARY_TOKENS),
        table([*REFERENCE, "gpt-oss-120b"], REFERENCE_TOKENS),
    )
    return paragraphs(
        "Whole MoE layer from logits on one NVIDIA H200, µs. In brackets the speed-up, the "
        "best peer's time over ours: above 1 mxpert is faster. a16w4 is compared with a16 "
        "peers, a8w4 and a4w4 with a8 peers (theirs has one scale per token, ours 1×32; no peer "
        f"multiplies a4). [JSON]({folder}/moe.json), [all cells]({folder}/moe.md), "
        f"[plot]({folder}/moe.png), [what limits it]({repository}/docs/performance.md).",
        table(named[:OPEN_MODELS], SUMMARY_TOKENS),
        folded("other models and the reference systems' shapes", others) if others else "",
    )


def write_readme(document: Mapping[str, Any], path: Path) -> None:
    """Replace the block between the markers of a file.

    Raises:
        ValueError: the file does not have both markers.
    """
    begin, end = (f"<!-- measured: {name} -->" for name in ("begin", "end"))
    text = path.read_text(encoding="utf-8")
    if not text.count(begin) == text.count(end) == 1:
        need = f"one {begin} and one {end}"
        raise ValueError(message("render", f"--readme {path}", need, "another number"))
    head, tail = text.split(begin)[0], text.split(end)[1]
    path.write_text(f"{head}{begin}\n{readme_block(document)}\n{end}{tail}", encoding="utf-8")
