"""Choose the configs of the cdna4 MoE layer with the cycle model; needs no GPU.

    python -m benchmarks.gfx950.choose
    python -m benchmarks.gfx950.choose --execute       # all loops again: minutes

A row is kept where the best config saves a larger part of the heuristic's time than the model's
worst residual on bandwidths; elsewhere the heuristic answers. Writes the table of the MI355X and
the rates of the loops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import mxpert
from benchmarks.gfx950.choice import (
    FORMATS,
    SHAPES,
    TARGET,
    TOKENS,
    Choice,
    best_config,
    is_modelled,
    problem,
)
from benchmarks.gfx950.rates import RATES, Rates
from benchmarks.gfx950.render import SCHEMA
from benchmarks.gfx950.run import OUTPUT as MODEL
from benchmarks.harness.document import Row
from benchmarks.harness.script import bare_parser
from mxpert.cli.report import environment
from mxpert.core.files import write_atomically
from mxpert.core.tables import TunedRow, format_table, parse_table, table_name

OUTPUT = Path(mxpert.__file__).parent / "core/tables" / table_name(TARGET)


def main(arguments: Sequence[str] | None = None) -> int:
    """Model all layers, and write the rows that gain."""
    parser = bare_parser(__doc__)
    parser.add_argument("--execute", action="store_true", help="do not take recorded rates")
    parser.add_argument("--commit", help="where the checkout has no history")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    if options.execute:
        RATES.unlink(missing_ok=True)
    residual, rates = worst_residual(), Rates()
    head = provenance(options.commit, residual)
    found = list(choices(rates))
    rows = [table_row(choice, head, residual) for choice in found if choice.gain > residual]
    text = format_table(head, rows)
    parse_table(text, str(options.output))
    write_atomically(
        options.output, lambda partial: partial.write_text(text, encoding="utf-8"), shared=True
    )
    gains = sorted(choice.gain for choice in found if choice.gain > residual)
    print(f"{len(rows)} rows of {len(found)} layers beyond {residual:.1%}; modelled, not measured")
    if gains:
        print(f"they save {gains[0]:.1%} to {gains[-1]:.1%}, median {gains[len(gains) // 2]:.1%}")
    print(f"wrote {options.output}")
    return 0


def choices(rates: Rates) -> Iterator[Choice]:
    """The best config of each layer that is modelled; shapes with the same sizes count once."""
    layers = (
        problem(shape, tokens, name)
        for shape in SHAPES.values()
        for name in FORMATS
        for tokens in TOKENS
    )
    for layer in filter(is_modelled, dict.fromkeys(layers)):
        yield best_config(layer, rates)


def worst_residual() -> float:
    """The worst residual of the recorded calibration on measured bandwidths, as a part.

    Bandwidth limits these layers. The mean residual would be too narrow: a gain compares two
    modelled times, and their rounds of tiles are not calibrated.
    """
    return float(SCHEMA.load(MODEL)["meta"]["residuals"]["bandwidth"]["worst"]) / 100


def provenance(commit: str | None, residual: float) -> Row:
    """The head of the table."""
    facts = environment(torch.device("cpu"))
    versions = facts["versions"]
    return {
        "device": TARGET.name,
        "arch": TARGET.arch,
        "date": facts["date"],
        "commit": commit or facts["commit"] or f"v{mxpert.__version__}",
        **{name: versions[name] for name in ("mxpert", "python", "torch", "triton")},
        "source": "model",
        "residual": round(residual, 4),
        "protocol": "cycle model of executed loops, modelled, not measured: docs/gfx950-model.md",
    }


def table_row(choice: Choice, head: Row, residual: float) -> TunedRow:
    """The row of a layer that another config than the heuristic's is faster for."""
    layer = choice.layer
    return TunedRow(
        layer.formats,
        layer.num_experts,
        layer.top_k,
        layer.hidden_size,
        layer.intermediate_size,
        layer.num_tokens,
        "cdna4",
        choice.best,
        us=round(choice.seconds * 1e6, 3),
        heuristic_us=round(choice.heuristic_seconds * 1e6, 3),
        spread=round(residual, 4),
        source="model",
        note=f"modelled {choice.gain:.1%} faster than the heuristic's choice, "
        f"residual {residual:.1%}",
        rel_l2=None,
        tried=choice.candidates,
        valid=choice.candidates,
        commit=head["commit"],
        date=head["date"],
    )


if __name__ == "__main__":
    sys.exit(main())
