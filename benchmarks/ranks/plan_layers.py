"""The measured layers that `mxpert bench --plan` ships, taken from results of other scripts.

    python -m benchmarks.ranks.plan_layers

reads results/nvidia-h200/moe.json and routing.json, and writes
mxpert/distributed/planner/measured_layers.json. It measures nothing.

A layer of moe.json starts from router logits. The time of top-k (routing.json, by nearest E and k,
between its token counts) is taken off, because `fused_moe` starts from its result.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from benchmarks.harness.document import Row
from benchmarks.harness.script import RESULTS, bare_parser
from mxpert.core.files import write_atomically
from mxpert.formats.token import FP8_TOKEN
from mxpert.moe.hopper.config import ONE_LAUNCH_TOKENS

SOURCES = ("nvidia-h200/moe.json", "nvidia-h200/routing.json")
TARGET = ROOT / "mxpert" / "distributed" / "planner" / "measured_layers.json"
COLUMNS = ("model", "activation", "E", "k", "H", "F", "T", "hit", "us")


def topk_us(rows: Sequence[Row], num_experts: int, top_k: int, num_tokens: int) -> float:
    """Time of top-k, by nearest E and k, linear in T between measured counts."""
    near = min(
        {(row["E"], row["k"]) for row in rows},
        key=lambda shape: (
            abs(math.log(shape[0] / num_experts)) + abs(math.log(shape[1] / top_k)),
            shape,
        ),
    )
    points = sorted((row["T"], row["us"]) for row in rows if (row["E"], row["k"]) == near)
    for (low, low_us), (high, high_us) in itertools.pairwise(points):
        if low <= num_tokens <= high:
            return low_us + (high_us - low_us) * (num_tokens - low) / (high - low)
    raise ValueError(f"plan_layers: T — need {points[0][0]} to {points[-1][0]}, got {num_tokens}")


def sort_ns(rows: Sequence[Row]) -> float:
    """Time that one more id takes in `make_routing_plan`: the slope at its largest counts."""
    slopes = []
    for shape in {(row["E"], row["k"]) for row in rows}:
        points = sorted((row["T"], row["us"]) for row in rows if (row["E"], row["k"]) == shape)
        (low, low_us), (high, high_us) = points[-2:]
        slopes.append(1e3 * (high_us - low_us) / ((high - low) * shape[1]))
    return max(slopes)


def collect(layers: Row, routing: Row) -> Row:
    """The document that the planner reads.

    Layers in one launch tell nothing of layers in two stages, which ranks that receive rows run.
    So layers of up to ONE_LAUNCH_TOKENS are left out, but with FP8_TOKEN, which has two stages.
    """
    by_op = {
        name: [row for row in routing["device_rows"] if row["op"] == name]
        for name in ("route_topk", "make_routing_plan")
    }
    found = []
    for row in layers["rows"]:
        if (row["impl"], row["stage"], row["routing"]) != ("mxpert", "layer", "uniform"):
            continue
        if row["T"] <= ONE_LAUNCH_TOKENS and row["activation"] != FP8_TOKEN:
            continue
        us = row["us"] - topk_us(by_op["route_topk"], row["E"], row["k"], row["T"])
        found.append([*(row[name] for name in COLUMNS[:-1]), round(us, 2)])
    limits = layers["meta"]["ceilings"]
    names = ("device", "commit", "date")
    return {
        "device": layers["meta"]["device"],
        "sources": [
            {"file": name, **{key: document["meta"][key] for key in names}}
            for name, document in zip(SOURCES, (layers, routing), strict=True)
        ],
        "read_tbs": limits["read_tbs"],
        "bf16_tflops": limits["bf16_tflops"],
        "fp8_tflops": limits["fp8_tflops"],
        "sort_ns": round(sort_ns(by_op["make_routing_plan"]), 4),
        "columns": list(COLUMNS),
        "layers": found,
    }


def as_text(document: Row) -> str:
    """JSON with one layer a line."""
    head = {name: value for name, value in document.items() if name != "layers"}
    lines = ",\n  ".join(json.dumps(row) for row in document["layers"])
    return json.dumps(head, indent=1)[:-2] + ',\n "layers": [\n  ' + lines + "\n ]\n}\n"


def text_from(results: Path) -> str:
    """What the shipped file contains, from a folder of results."""
    return as_text(collect(*(json.loads((results / name).read_text("utf-8")) for name in SOURCES)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = bare_parser(__doc__)
    parser.add_argument("--output", type=Path, default=TARGET)
    options = parser.parse_args(arguments)
    text = text_from(RESULTS)
    write_atomically(options.output, lambda partial: partial.write_text(text, encoding="utf-8"))
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
