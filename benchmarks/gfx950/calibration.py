"""The model on AMD's kernels: modelled beside measured, and the residuals."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.gfx950.published import LADDER, SKINNY, SKINNY_FOLDER, TILES, Rung
from benchmarks.harness.document import Row
from gfx950_support.assembler import read_instruction
from gfx950emu import Report, WaveTrace
from gfx950emu.program import Program
from gfx950emu.timing import MI355X, Execution, model_loop
from mxpert.testing.gfx950 import emulate

STEPS = 12
"""K steps that are executed; the loop is repeated from there."""
DEPTH = {16: 64, 8: 128, 4: 256}
"""Elements of k a step, by bits."""


def calibrate(folder: Path | None) -> list[Row]:
    """A row for each published figure; without a checkout, those that need none.

    Args:
        folder: a checkout of ROCm/gfx950-gluon-tutorials.
    """
    rows = list(_tiles())
    if folder is not None:
        kernels = folder / "kernels"
        sys.path.insert(0, str(kernels / "gemm/utils"))  # what the kernels import as `common`
        rows += [*_ladder(kernels), *_skinny(kernels)]
    return rows


def residuals(rows: Sequence[Row]) -> Row:
    """Mean and worst residual by kind: points of MFMA efficiency, percent of bandwidth."""
    found: Row = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        values = [abs(row["residual"]) for row in rows if row["kind"] == kind]
        found[kind] = {
            "rungs": len(values),
            "mean": sum(values) / len(values),
            "worst": max(values),
        }
    return found


def _row(kind: str, name: str, unit: str, published: float, modelled: float, source: str) -> Row:
    residual = modelled - published if unit == "% MFMA" else 100 * (modelled / published - 1)
    return {
        "kind": kind,
        "name": name,
        "unit": unit,
        "published": published,
        "modelled": round(modelled, 2),
        "residual": round(residual, 2),
        "source": source,
    }


# -- the ladder ------------------------------------------------------------------------------------


def _ladder(kernels: Path) -> Iterator[Row]:
    for rung in LADDER:
        report = model_loop(Execution.of(_execute(kernels, rung)), workgroups=1)
        modelled = 100 * report.mfma_efficiency
        yield _row("ladder", rung.name, "% MFMA", rung.percent, modelled, rung.source)


def _module(kernels: Path, folder: str) -> ModuleType:
    path = kernels / folder / "matmul_kernel.py"
    spec = importlib.util.spec_from_file_location(folder.replace("/", "_"), path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"--ladder: need a checkout with kernels/{folder}, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _execute(kernels: Path, rung: Rung) -> Report:
    """One workgroup of a rung: a tile of 256 × 256."""
    module, depth = _module(kernels, rung.folder), DEPTH[rung.bits] * STEPS
    torch.manual_seed(0)
    with emulate(trace=True, checks=False) as emulation:
        if rung.bits == 4:
            codes = [torch.randint(0, 256, (256, depth // 2), dtype=torch.uint8) for _ in "ab"]
            scales = [torch.full((depth // 32, 256), 127, dtype=torch.uint8).t() for _ in "ab"]
            out = torch.zeros(256, 256, dtype=torch.bfloat16)
            module.matmul_kernel_only(*codes, out, *scales)
        else:
            dtype = {16: torch.float16, 8: torch.float8_e5m2}[rung.bits]
            a, b = (torch.randint(-3, 4, (256, depth)).float().to(dtype) for _ in "ab")
            out = torch.zeros(256, 256, dtype=torch.float16)
            if hasattr(module, "matmul_kernel_only"):
                module.matmul_kernel_only(a, b, out)
            else:
                module.matmul(a, b.t(), out)
    return emulation.reports[-1]


def _skinny(kernels: Path) -> Iterator[Row]:
    """The memory-bound GEMM, 32 rows, on 32 to 256 compute units."""
    module = _module(kernels, SKINNY_FOLDER)
    a, b = torch.ones(32, 64 * STEPS).half(), torch.ones(256, 64 * STEPS).half()
    with emulate(trace=True, checks=False) as emulation:
        module.matmul(a, b.t())
    execution = Execution.of(emulation.reports[-1], streamed=("b_ptr",))
    for units, published in SKINNY.items():
        report = model_loop(execution, workgroups=1, active_units=units)
        rate = report.streamed_bytes / report.cycles * units * MI355X.clock_hz / 1e9
        source = f"{SKINNY_FOLDER}/README.md"
        yield _row("bandwidth", f"skinny GEMM, {units} workgroups", "GB/s", published, rate, source)


# -- the eight tiles -------------------------------------------------------------------------------


def _tiles() -> Iterator[Row]:
    for (rows, columns), published in TILES.items():
        report = model_loop(tile_loop(rows, columns), workgroups=1)
        source = "docs/tcp_bound_tile_model.md"
        modelled = 100 * report.mfma_efficiency
        yield _row("tiles", f"{rows} × {columns}", "% MFMA", published, modelled, source)


def tile_loop(rows: int, columns: int, depth: int = 64, waves: int = 4) -> Execution:
    """The loop that the tile table describes: a K step's loads and reads spread over its MFMAs.

    fp16, copies of 1 KiB straight to LDS one step ahead, ``ds_read_b128`` without conflicts.

    Args:
        rows, columns, depth: of the tile. waves: of the workgroup, in a square.
    """
    events: list[tuple[float, str]] = []
    counts = {
        "v_mfma_f32_16x16x32_f16 a[{0}:{1}], v[0:3], v[4:7], a[{0}:{1}]": rows
        * columns
        * depth
        // 32768,
        "buffer_load_dwordx4 v8, s[0:3], 0 offen lds": (rows + columns)
        * depth
        * 2
        // 1024
        // waves,
        "ds_read_b128 v[16:19], v9": (rows + columns) // 2 * depth * 2 // 1024,
    }
    for shift, (text, count) in enumerate(counts.items()):
        events += [((number + 0.3 * shift) / count, text) for number in range(count)]
    body = [f"s_waitcnt vmcnt({list(counts.values())[1]})", "s_barrier"]
    for number, (_, text) in enumerate(sorted(events)):
        first = 4 * (number % 60)
        body.append(text.format(first, first + 3))
    body += ["s_waitcnt lgkmcnt(0)", "s_cbranch_scc1 loop"]
    program = _program(body)
    path = list(range(len(body))) * 4
    return Execution(program, [WaveTrace(0, wave, list(path)) for wave in range(waves)], 512, 0)


def _program(lines: Sequence[str]) -> Program:
    """A program of these instructions, for the model alone."""
    instructions = tuple(map(read_instruction, lines))
    return Program("tile", instructions, {"loop": 0}, (), {}, 0, {}, {})
