"""The form of expert_parallel.json: times, and the planner's predictions."""

from __future__ import annotations

from benchmarks.harness.document import FACTS, NUMBER, Schema, Section

TEXT, WHOLE = (str,), (int,)
CELL = ("model", "routing", "wire", "T")
KEY_COLUMNS = (*CELL, "impl", "stage")
STAGES = ("dispatch", "combine", "exchange", "local", "layer", "host")
ONE_GPU = "one GPU"
"""The same layer on one rank: all experts, the tokens of all ranks."""
COLLECTIVES = "all_gather + reduce_scatter"
_CELL = {
    **dict.fromkeys(("model", "routing", "wire", "activation"), TEXT),
    **dict.fromkeys(("E", "k", "H", "F", "N", "T"), WHOLE),
}
ROWS = Section(
    {
        **_CELL,
        **dict.fromkeys(("hit", "rows", "balance"), NUMBER),
        "impl": TEXT,
        "stage": TEXT,
        "captured": (bool,),
        **dict.fromkeys(("us", "us_spread", "rel_l2"), NUMBER),
        "samples": (list,),
    },
    KEY_COLUMNS,
    {"stage": STAGES, "wire": ("mxfp8", "bf16"), "routing": ("uniform", "zipf")},
)
PLANS = Section(
    {
        **_CELL,
        "link": TEXT,
        "measured": (list,),
        **dict.fromkeys(("dispatch_us", "local_us", "combine_us", "us", "balance"), NUMBER),
    },
    CELL,
)
SCHEMA = Schema(
    "ranks.run",
    {"rows": ROWS, "plans": PLANS},
    (*FACTS, "ranks", "links", "nccl", "explain", "protocol", "failures", "left"),
)
