"""The JSON of models.py: one row for each implementation, phase, mode and batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from document import read

from mxpert.errors import require

META_KEYS = {
    "device",
    "clocks",
    "versions",
    "commit",
    "date",
    "read_tbs",
    "model",
    "protocol",
    "failures",
}
ROW_TYPES: dict[str, tuple[type, ...]] = {
    "impl": (str,),
    "format": (str,),
    "phase": (str,),
    "mode": (str,),
    "batch": (int,),
    "tokens": (int,),
    "ms": (int, float),
    "ms_spread": (int, float),
    "tokens_per_s": (int, float),
    "moe_ms": (int, float),
    "moe_share": (int, float),
    "layer_cosine": (int, float, type(None)),
    "logits_cosine": (int, float),
}
KEY = ("impl", "format", "phase", "mode", "batch", "tokens")
PHASES = {"decode": ("generate", "graph"), "prefill": ("forward",)}


def make_row(
    impl: str,
    format: str,
    phase: str,
    mode: str,
    batch: int,
    tokens: int,
    times: Mapping[str, float],
    cosines: Mapping[str, float | None],
) -> dict[str, Any]:
    """One row; decode makes `batch` tokens in `ms`, prefill reads `batch · tokens`.

    Args:
        times: ms, ms_spread; moe_ms within a pass that took step_ms_hooked.
        cosines: layer_cosine, logits_cosine.
    """
    made = batch if phase == "decode" else batch * tokens
    return {
        "impl": impl,
        "format": format,
        "phase": phase,
        "mode": mode,
        "batch": batch,
        "tokens": tokens,
        "ms": times["ms"],
        "ms_spread": times["ms_spread"],
        "tokens_per_s": 1e3 * made / times["ms"],
        "moe_ms": times["moe_ms"],
        "moe_share": times["moe_ms"] / times["step_ms_hooked"],
        **cosines,
    }


def validate(document: Any, source: str = "document") -> None:
    """Refuse what is not a document of models.py.

    Raises:
        ValueError: names the first key or row that is missing, unknown or of the wrong kind.
    """
    require(
        isinstance(document, dict) and set(document) == {"meta", "rows"},
        source,
        "keys",
        need="meta and rows",
        got=sorted(document) if isinstance(document, dict) else "none",
    )
    require(
        set(document["meta"]) == META_KEYS,
        source,
        "meta",
        need=sorted(META_KEYS),
        got=sorted(document["meta"]),
    )
    seen = set()
    for index, row in enumerate(document["rows"]):
        place = f"rows[{index}]"
        require(set(row) == set(ROW_TYPES), source, place, need=sorted(ROW_TYPES), got=sorted(row))
        for name, types in ROW_TYPES.items():
            good = isinstance(row[name], types) and not isinstance(row[name], bool)
            require(
                good,
                source,
                f"{place}.{name}",
                got=repr(row[name]),
                need=" or ".join(kind.__name__ for kind in types),
            )
        require(
            row["mode"] in PHASES.get(row["phase"], ()),
            source,
            f"{place}.mode",
            need=f"one of {PHASES}",
            got=f"{row['phase']}, {row['mode']}",
        )
        require(row["ms"] > 0, source, f"{place}.ms", need="more than 0", got=row["ms"])
        key = tuple(row[name] for name in KEY)
        require(
            key not in seen, source, place, need="one row for each measurement", got=f"{key} twice"
        )
        seen.add(key)


def load(path: Path) -> dict[str, Any]:
    """Read and check a document."""
    return read(path, "models.py", validate)
