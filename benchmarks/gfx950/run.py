"""Cycle model of gfx950 kernels: calibration on AMD's ladder, our kernels on reference shapes.

    python -m benchmarks.gfx950.run [--ladder DIR] [--backend triton --backend cdna4]

Needs no GPU. Every figure that it writes is *modelled*: real gfx950 code is executed on a CPU, and
`gfx950emu.timing` replays the traces on one modelled compute unit. It is the steady
state of the hot loop, without start, epilogue and launch. --ladder names a checkout of
ROCm/gfx950-gluon-tutorials, whose kernels (compiled by Triton 3.9 or later) calibrate the model;
without it the earlier rows of the JSON are kept. Run each backend's kernels under the Triton that
their figures are for. Writes model.json, model.md and model.png.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gfx950.calibration import calibrate, residuals
from benchmarks.gfx950.cells import BACKENDS, cells, run_cell
from benchmarks.gfx950.render import REPORT, SCHEMA, worst_residuals
from benchmarks.harness.document import Row
from benchmarks.harness.script import RESULTS, bare_parser
from gfx950emu.timing import MI355X, LoopError
from mxpert.cli.report import environment, write_json
from mxpert.errors import UnsupportedError

OUTPUT = RESULTS / "gfx950-model/model.json"
NEWEST = OUTPUT.with_name("newest.json")
"""The same with the newest Triton, of which the tests watch the rates, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Model, write the JSON, the tables and the plot."""
    options = _parser().parse_args(arguments)
    try:
        document = _measure(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path: Path = options.output
    write_json(path, document)
    REPORT.write(document, path.parent, path.stem)
    print(worst_residuals(document["meta"]["residuals"]))
    print(f"wrote {path} and its tables")
    return 0


def _parser() -> Any:
    parser = bare_parser(__doc__)
    parser.add_argument("--ladder", type=Path, help="checkout of ROCm/gfx950-gluon-tutorials")
    parser.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="model this backend's kernels; repeat for more (default: all)",
    )
    parser.add_argument("--only", help="cells whose name contains this text")
    parser.add_argument("--no-kernels", action="store_true", help="calibrate, keep other rows")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--commit", help="where the checkout has no history")
    return parser


def _measure(options: Any) -> Row:
    """The document of this run; what it leaves out is kept from the file."""
    old = SCHEMA.load(options.output) if options.output.is_file() else None
    calibration = calibrate(options.ladder)
    if options.ladder is None and old is not None:
        new = {row["name"] for row in calibration}
        calibration += [row for row in old["calibration"] if row["name"] not in new]
    rows = [] if options.no_kernels else _rows(options.backend or BACKENDS, options.only or "")
    if old is not None:
        new = {(row["cell"], row["backend"]) for row in rows}
        rows += [row for row in old["rows"] if (row["cell"], row["backend"]) not in new]
    facts = environment(torch.device("cpu"))
    meta = {
        "what": "modelled, not measured",
        "chip": asdict(MI355X),
        "commit": options.commit or facts["commit"],
        "date": facts["date"],
        "versions": facts["versions"],
        "residuals": residuals(calibration),
    }
    order = [cell.name for cell in cells()]
    rows.sort(key=lambda row: (order.index(row["cell"]), row["backend"]))
    return {"meta": meta, "calibration": calibration, "rows": rows}


def _rows(backends: Sequence[str], only: str) -> list[Row]:
    rows = []
    for backend in backends:
        for cell in cells():
            if only not in cell.name:
                continue
            start = time.perf_counter()
            try:
                row = run_cell(cell, backend)
            except (UnsupportedError, LoopError) as error:
                print(f"{backend}: {cell.name}: {error}", flush=True)
                continue
            rows.append(row)
            seconds = time.perf_counter() - start
            print(f"{backend}: {cell.name}: {row['limit']}, {seconds:.1f} s", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
