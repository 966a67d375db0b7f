"""Tables of whole layers: the summary of a comparison, and the measured blocks of documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.document import Row
from benchmarks.harness.script import RESULTS, device_folder
from benchmarks.harness.tables import conditions, folded, page, paragraphs, pivot
from benchmarks.moe.cells import NAMED, RECENT, REFERENCE, REFERENCE_TOKENS, TOKENS
from benchmarks.moe.figures import (
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

FIRST_CARD = "nvidia-h200"
SUMMARY_TOKENS = (1, 16, 128, 1024, 8192)
NAMES = {"bf16": "a16w4", "mxfp8": "a8w4", "mxfp4": "a4w4"}
"""Our formats in a document."""
PEER_NAMES = {
    "triton_kernels": "triton_kernels",
    "marlin": "Marlin",
    "humming": "Humming",
    "flashinfer": "FlashInfer",
}
"""Peers in a document."""
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


def time_text(rows: Iterable[Row]) -> Callable[[Row], str]:
    """What a cell says of one of these rows: µs, and for ours the speed-up over the best peer."""
    found = {id(each.ours): f" ({each.value:.2f}×)" for each in speed_ups(rows)}
    return lambda row: f"{row['us']:.0f}{found.get(id(row), '')}"


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
    text = time_text(rows)
    cells = {(name(row), f"T = {row['T']}"): text(row) for row in our_rows(rows)}
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


def peers_of(rows: Iterable[Row]) -> str:
    """The peers that were measured, in a sentence; all that there are if none was."""
    found = {row["impl"] for row in rows} & set(PEER_NAMES)
    *others, last = [name for impl, name in PEER_NAMES.items() if impl in found or not found]
    return f"{', '.join(others)} and {last}" if others else last


def speed_up_block(document: Mapping[str, Any], folder: str) -> str:
    """Geometric means over the named models, by format and token count; `folder` has the JSON.

    Token counts that an unfinished run has of some models alone are left out.
    """
    found: dict[tuple[str, str], list[float]] = {}
    uniform = ("uniform", "layer")
    for each in speed_ups(document["rows"]):
        ours = each.ours
        chosen = ours["model"] in NAMED and ours["T"] in TOKENS and each.activation in NAMES
        if chosen and (ours["routing"], ours["stage"]) == uniform:
            key = NAMES[each.activation], f"T = {ours['T']}"
            found.setdefault(key, []).append(each.value)
    most = max(map(len, found.values()), default=0)
    found = {key: values for key, values in found.items() if len(values) == most}
    columns = token_columns(int(name.removeprefix("T = ")) for _, name in found)
    cells = {key: f"{geometric_mean(values):.2f}" for key, values in found.items()}
    return paragraphs(
        f"Speed-up of whole MoE layers on one {document['meta']['device']}, from router logits to "
        f"the output, over the best of {peers_of(document['rows'])} with activations of the "
        "same width: geometric means over six models, by the number of tokens T "
        f"([JSON]({folder}/moe.json), [all cells]({folder}/moe.md)). Above 1 mxpert is faster. "
        "a16w4 has bf16 activations, a8w4 MXFP8, a4w4 MXFP4, with MXFP4 weights. No peer "
        "multiplies MXFP4 activations, so a4w4 is compared with 8-bit ones.",
        pivot("speed-up", cells, columns),
    )


def layer_block(document: Mapping[str, Any], folder: str) -> str:
    """Layers of the named models and of the reference systems' shapes, all but three folded."""
    rows = [row for row in document["rows"] if row["activation"] in NAMES or row["impl"] != OURS]

    def table(models: Sequence[str], tokens: Sequence[int]) -> str:
        chosen = [row for row in rows if row["model"] in models]
        return layer_table(chosen, tokens, lambda row: f"{row['model']} {NAMES[row['activation']]}")

    named = list(NAMED)
    grouped = any(row["activation"] == "fp8_group" for row in rows)
    scales = "one scale for each token" + (" or for 128 values" if grouped else "")
    others = paragraphs(
        table([*named[OPEN_MODELS:], *RECENT], SUMMARY_TOKENS),
        table([*REFERENCE, "gpt-oss-120b"], REFERENCE_TOKENS),
    )
    return paragraphs(
        f"Whole MoE layers from router logits on one {document['meta']['device']}, µs. In brackets "
        "the speed-up, the best peer's time over ours: above 1 mxpert is faster. a16w4 is compared "
        "with peers of 16-bit activations, a8w4 and a4w4 with peers of 8-bit ones, which have "
        f"{scales} ([JSON]({folder}/moe.json), [all cells]({folder}/moe.md), "
        f"[plot]({folder}/moe.png)).",
        table(named[:OPEN_MODELS], SUMMARY_TOKENS),
        folded("other models and the reference systems' shapes", others) if others else "",
    )


BLOCKS: Mapping[str, Callable[[Mapping[str, Any], str], str]] = {
    "speed-ups": speed_up_block,
    "layers": layer_block,
}
"""What stands between the markers of a document, by their name."""


def filled(document: Mapping[str, Any], path: Path) -> str:
    """The text of a file with its measured blocks written anew.

    The blocks of an H200 have no name of a card, those of others its folder: "layers, nvidia-h100".

    Raises:
        ValueError: the file has no pair of markers, or one that is not whole.
    """
    text = path.read_text(encoding="utf-8")
    card = device_folder(document["meta"]["device"])
    results = os.path.relpath(RESULTS / card, path.resolve().parent)
    blocks = {name if card == FIRST_CARD else f"{name}, {card}": BLOCKS[name] for name in BLOCKS}
    found = 0
    for name, block in blocks.items():
        begin, end = (f"<!-- measured {name}: {side} -->" for side in ("begin", "end"))
        pair = text.count(begin), text.count(end)
        if pair == (0, 0):
            continue
        if pair != (1, 1):
            need = f"one {begin} and one {end}"
            raise ValueError(message("render", f"--page {path}", need, "another number"))
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{block(document, Path(results).as_posix())}\n{end}{tail}"
        found += 1
    if not found:
        names = " or ".join(f"<!-- measured {name}: begin -->" for name in blocks)
        raise ValueError(message("render", f"--page {path}", names, "neither"))
    return text


def write_page(document: Mapping[str, Any], path: Path) -> None:
    """Replace the measured blocks of a file; a ValueError leaves it as it is."""
    path.write_text(filled(document, path), encoding="utf-8")
