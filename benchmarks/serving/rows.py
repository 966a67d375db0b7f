"""The form of serving.json: rounds of each engine, the engines, the gates."""

from __future__ import annotations

from benchmarks.harness.document import FACTS, NUMBER, Schema, Section
from benchmarks.serving.backends import BACKENDS

TEXT = (str,)
WHOLE = (int,)
KEY_COLUMNS = ("model", "backend", "phase", "concurrency", "round")
ENGINE_KEY = ("model", "backend")
_OF_ENGINE = {"model": TEXT, "backend": TEXT}
_CHOICES = {"backend": tuple(BACKENDS)}
ROWS = Section(
    {
        **_OF_ENGINE,
        "phase": TEXT,
        **dict.fromkeys(("concurrency", "round", "prompt_tokens", "new_tokens"), WHOLE),
        **dict.fromkeys(("seconds", "first_s", "tokens_per_s"), NUMBER),
    },
    KEY_COLUMNS,
    _CHOICES | {"phase": ("decode", "prefill")},
    time="seconds",
)
ENGINES = Section(
    {
        **_OF_ENGINE,
        "moe_method": TEXT,
        "together": WHOLE,
        **dict.fromkeys(
            ("load_s", "first_request_s", "warm_request_s", "weights_gib", "peak_gib"), NUMBER
        ),
    },
    ENGINE_KEY,
    _CHOICES,
    time="load_s",
)
GATES = Section(
    {
        **_OF_ENGINE,
        **dict.fromkeys(("difference", "bound", "first_request_s", "warm_request_s"), NUMBER),
        "passed": (bool,),
    },
    ENGINE_KEY,
    _CHOICES,
    time="warm_request_s",
)
SCHEMA = Schema(
    "serving.run",
    {"rows": ROWS, "engines": ENGINES, "gates": GATES},
    (*FACTS, "protocol", "failures", "left"),
)
