"""Rows of models/run.py, one an implementation, phase, mode and batch; the form of its JSON."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.document import FACTS, NUMBER, OPTIONAL, Row, Schema, Section

KEY_COLUMNS = ("impl", "format", "phase", "mode", "batch", "tokens")
TEXTS = ("impl", "format", "phase", "mode")
NUMBERS = ("ms", "ms_spread", "tokens_per_s")
MAYBE = ("moe_ms", "moe_share", "layer_cosine", "logits_cosine")
"""The blocks of a compiled step cannot be timed apart. Transformers' MXFP4 path has no cosine of
its layers, and a model without experts has no cosine at all."""
META = (*FACTS, "read_tbs", "model", "protocol", "failures")
PHASES = {"decode": ("generate", "static", "graph"), "prefill": ("forward",)}
SECTION = Section(
    dict.fromkeys(TEXTS, (str,))
    | dict.fromkeys(("batch", "tokens"), (int,))
    | dict.fromkeys(NUMBERS, NUMBER)
    | dict.fromkeys(MAYBE, OPTIONAL),
    KEY_COLUMNS,
    {"mode": lambda row: PHASES.get(row["phase"], ())},
    time="ms",
)
SCHEMA = Schema("models.run", {"rows": SECTION}, META)


def make_row(
    impl: str,
    format: str,
    phase: str,
    mode: str,
    batch: int,
    tokens: int,
    times: Mapping[str, float],
    cosines: Mapping[str, float | None],
) -> Row:
    """One row; decode makes `batch` tokens in `ms`, prefill reads `batch · tokens`.

    Args:
        times: ms, ms_spread; moe_ms within a pass that took step_ms_hooked, where it is known.
        cosines: layer_cosine, logits_cosine.
    """
    made = batch if phase == "decode" else batch * tokens
    return {
        **dict(zip(KEY_COLUMNS, (impl, format, phase, mode, batch, tokens), strict=True)),
        "ms": times["ms"],
        "ms_spread": times["ms_spread"],
        "tokens_per_s": 1e3 * made / times["ms"],
        "moe_ms": times.get("moe_ms"),
        "moe_share": times["moe_ms"] / times["step_ms_hooked"] if "moe_ms" in times else None,
        **cosines,
    }
