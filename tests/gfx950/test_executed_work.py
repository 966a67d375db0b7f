"""What kernels execute beside right results: cache bits, the order of tiles, atomics, padding.

Results do not depend on any of these. Each test is shown to fail with the fault planted.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mxpert
from gfx950emu import Fault, Report
from mxpert import Combine
from mxpert.configs import Cdna4GemmConfig
from mxpert.core.backend import BACKENDS
from mxpert.core.problem import GemmConfig, Op
from mxpert.core.registry import kernel_of
from mxpert.moe.cdna4 import decode, host, prefill, prefill_mainloop
from mxpert.moe.cdna4.config import prefill_config
from mxpert.testing import gfx950
from mxpert.testing.gfx950 import emulate
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from support.layers import plan_of
from tests.gfx950.test_planted import copy_of

DECODE = Cdna4GemmConfig("decode", block_m=16, block_n=256)
PORTABLE = GemmConfig(16, 64, 128)
NUM_DIES = 8
SHAPE = MoEShape(160, 96, 1, 1, has_bias=False)


def down(
    inputs: MoEInputs, backend: str, config: Any, combine: Combine, unit: int = 0
) -> list[Report]:
    """Reports of the launches of stage 2 with MXFP8 rows of ones."""
    plan = plan_of(inputs, unit or config.block_m)
    ones = torch.ones(plan.capacity, inputs.weights.intermediate_size, dtype=torch.bfloat16)
    h = mxpert.quantize(ones, "mxfp8")
    weights = inputs.weights
    if backend == "cdna4":
        weights = weights.prepare(device="cpu", layout="cdna4_fragment")
    with mxpert.override(backend=backend, config=config), emulate(trace=True) as emulation:
        mxpert.moe_down(h, weights, plan, combine=combine)
    return emulation.reports


def executed(reports: list[Report], pattern: str) -> int:
    """Wave-instructions whose text matches."""
    return sum(
        count
        for report in reports
        for instruction, count in zip(report.program.instructions, report.executed, strict=True)
        if re.search(pattern, instruction.text)
    )


# --- cache bits ----------------------------------------------------------------------------------


WEIGHTS, ROWS = ("w_ptr", "w_scale_ptr"), ("x_ptr", "x_scale_ptr")


def hints(report: Report, parameters: tuple[str, ...]) -> set[bool]:
    """Whether the executed loads of these tensors carry the non-temporal hint."""
    regions = [report.regions[name] for name in parameters]
    return {
        bool(re.search(r"\bnt\b", text))
        for trace in report.traces
        for position, lines in trace.half_lines.items()
        for text in [report.program.instructions[trace.instructions[position]].text]
        if "load" in text and lines.size and any(int(lines[0]) * 64 in each for each in regions)
    }


def check_streaming(backend: str, unit: int, num_tokens: int, config: Any = None) -> bool:
    """Whether all loads of weights stream; none of rows may, and no part of the weights alone."""
    reports = down(exact_moe_problem(SHAPE, num_tokens), backend, config, Combine.FLAT, unit)
    report = next(each for each in reports if "w_ptr" in each.regions)
    assert hints(report, ROWS) == {False}
    found = [hints(report, (name,)) for name in WEIGHTS]
    assert found in ([{True}] * 2, [{False}] * 2)
    return found[0] == {True}


def check_rule(unit: int) -> None:
    """Weights of an expert with one row block are streamed; with two they are kept."""
    assert check_streaming("cdna4", unit, unit)
    assert not check_streaming("cdna4", unit, unit + 1)


units = pytest.mark.parametrize("unit", [16, 64], ids=["decode", "prefill"])


@units
def test_weights_are_streamed_unless_they_are_read_again(unit: int) -> None:
    check_rule(unit)


@pytest.mark.parametrize("cache", ["keep", "stream"])
@pytest.mark.parametrize(
    ("backend", "config"),
    [("cdna4", DECODE), ("cdna4", prefill_config(64)), ("triton", PORTABLE)],
    ids=["decode", "prefill", "portable"],
)
def test_a_pinned_cache_policy_is_obeyed(backend: str, config: Any, cache: str) -> None:
    """Whatever the rows: the rule would stream 16 rows and keep 80."""
    pinned = replace(config, weight_cache=cache)
    for num_tokens in (16, 80):
        assert check_streaming(backend, 64, num_tokens, pinned) is (cache == "stream")


# --- the order of tiles --------------------------------------------------------------------------


def tiles_of(report: Report, width: int, block_m: int) -> list[list[tuple[int, int]]]:
    """The row blocks and weight tiles that each workgroup stores, in its order."""
    region = report.regions["out_ptr"]
    found: list[list[tuple[int, int]]] = [[] for _ in range(report.grid[0])]
    for trace in report.traces:
        for position, lines in sorted(trace.half_lines.items()):
            text = report.program.instructions[trace.instructions[position]].text
            stores = trace.wave == 0 and "store" in text and lines.size
            if stores and int(lines[0]) * 64 in region:
                row, column = divmod((int(lines[0]) * 64 - region.start) // 2, width)
                tile = row // block_m, column // 256
                if found[trace.workgroup][-1:] != [tile]:
                    found[trace.workgroup].append(tile)
    return found


def expected_tiles(
    tiles_m: int, tiles_n: int, group_m: int, num_runs: int
) -> list[tuple[int, int]]:
    """The order of the kernel's documentation: runs in turn, of groups of row blocks."""
    tiles = [
        (first + m, n)
        for first in range(0, tiles_m, group_m)
        for n in range(tiles_n)
        for m in range(min(group_m, tiles_m - first))
    ]
    each, more = divmod(len(tiles), num_runs)
    starts = [run * each + min(run, more) for run in range(num_runs)]
    return [tiles[starts[p % num_runs] + p // num_runs] for p in range(len(tiles))]


def check_order(group_m: int, num_runs: int, persistent: bool = False) -> None:
    """Eleven row blocks times three weight tiles: 33 are no multiple of the runs."""
    shape = replace(SHAPE, hidden_size=672)
    inputs = exact_moe_problem(shape, 11 * 64 - 5)
    chosen = replace(prefill_config(64), group_m=group_m, num_runs=num_runs, persistent=persistent)
    with mock.patch.object(gfx950, "MI355X", replace(gfx950.MI355X, num_sms=4)):
        reports = down(inputs, "cdna4", chosen, Combine.FLAT)
    report = next(each for each in reports if "prefill" in each.kernel)
    found = tiles_of(report, 672, 64)
    wanted = expected_tiles(11, 3, group_m, num_runs)
    if persistent:  # two workgroups on each of four CUs
        assert found == [wanted[p::8] for p in range(8)]
    else:
        assert found[: len(wanted)] == [[tile] for tile in wanted]
        assert not any(found[len(wanted) :])


RASTERS = {
    "the heuristic's": (8, 8),
    "row by row": (1, 1),
    "of the reference": (2, 4),
    "odd": (3, 5),
}
rasters = pytest.mark.parametrize("raster", RASTERS.values(), ids=RASTERS)


@pytest.mark.parametrize("persistent", [False, True], ids=["one-shot", "persistent"])
@rasters
def test_tiles_are_computed_in_the_order_of_the_config(
    raster: tuple[int, int], persistent: bool
) -> None:
    check_order(*raster, persistent)


def test_a_persistent_grid_executes_less_for_the_same_products() -> None:
    """36 tiles in a grid of 48: twelve workgroups start for nothing, or eight compute them all."""
    inputs = exact_moe_problem(MoEShape(768, 512, 8, 1, has_bias=False), 8 * 64)
    found = []
    for persistent in (False, True):
        chosen = replace(prefill_config(64), persistent=persistent)
        with mock.patch.object(gfx950, "MI355X", replace(gfx950.MI355X, num_sms=4)):
            reports = down(inputs, "cdna4", chosen, Combine.FLAT)
        report = next(each for each in reports if "prefill" in each.kernel)
        tiles = tiles_of(report, 768, 64)
        found.append((report.grid[0], sum(map(len, tiles)), sum(map(bool, tiles))))
        found.append((executed([report], "v_mfma"), report.instructions))
    assert found[0::2] == [(48, 36, 36), (8, 36, 8)]
    (products, one_shot), (same_products, persistent_grid) = found[1::2]
    assert products == same_products
    assert persistent_grid < 0.95 * one_shot


def test_the_heuristic_gives_each_die_a_run_of_tiles_in_groups() -> None:
    chosen = prefill_config(64)
    assert (chosen.group_m, chosen.num_runs, chosen.persistent) == (8, NUM_DIES, False)


# --- atomic additions ----------------------------------------------------------------------------


def check_atomics() -> None:
    """ATOMIC adds in memory, a wave's lanes at once; REDUCE never does."""
    shape = replace(SHAPE, num_experts=3, top_k=2)
    inputs = exact_moe_problem(shape, 20)
    for backend, config in (("cdna4", DECODE), ("triton", PORTABLE)):
        for combine in (Combine.ATOMIC, Combine.REDUCE):
            reports = down(inputs, backend, config, combine)
            atomics = executed(reports, r"(global|buffer)_atomic_(pk_)?add_f32")
            assert (atomics > 0) is (combine is Combine.ATOMIC), (backend, combine, atomics)


def test_atomic_adds_and_reduce_does_not() -> None:
    check_atomics()


# --- padding -------------------------------------------------------------------------------------


def check_padding() -> None:
    """Blocks of a plan's unit that hold no row are not multiplied: the unit changes no work."""
    inputs = exact_moe_problem(replace(SHAPE, num_experts=2), 9)
    for backend, config in (("cdna4", DECODE), ("triton", PORTABLE)):
        small, large = (
            executed(down(inputs, backend, config, Combine.FLAT, unit), r"v_mfma")
            for unit in (16, 64)
        )
        assert small == large > 0, backend


def test_padding_of_a_larger_unit_is_skipped() -> None:
    check_padding()


# --- planted faults ------------------------------------------------------------------------------


@contextlib.contextmanager
def launched_with(module: Any, **changes: Any) -> Iterator[None]:
    """Launches of `module` get other constants, or another kernel where `kernel` is given."""
    original = module.Launch

    def launch(kernel: Any, *rest: Any, **constants: Any) -> Any:
        present = {name: value for name, value in changes.items() if name in constants}
        return original(changes.get("kernel", kernel), *rest, **(constants | present))

    caches = [each for each in vars(module).values() if hasattr(each, "cache_clear")]
    with mock.patch.object(module, "Launch", launch):
        for each in caches:
            each.cache_clear()
        yield
    for each in caches:
        each.cache_clear()


@contextlib.contextmanager
def source_with(module: Any, kernel: str, old: str, new: str, folder: Path) -> Iterator[Any]:
    """The kernel of a copy of a module in which one line is another."""
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    name = f"copied_{module.__name__.rpartition('.')[2]}"
    try:
        yield getattr(copy_of(name, source.replace(old, new), folder, made), kernel)
    finally:
        for each in made:
            del sys.modules[each]


def as_reduce(backend: str) -> Any:
    """Stage 2 of a backend sums ATOMIC's rows as REDUCE does."""
    kernel = kernel_of(BACKENDS[backend], Op.MOE_DOWN)
    assert not isinstance(kernel, str)
    original = kernel.launch

    def launch(problem: Any, config: Any, inputs: Any) -> torch.Tensor:
        if problem.options.combine is Combine.ATOMIC:
            options = replace(problem.options, combine=Combine.REDUCE)
            problem = replace(problem, options=options)
        found: torch.Tensor = original(problem, config, inputs)
        return found

    return mock.patch.object(kernel, "launch", launch)


@pytest.mark.parametrize("streams", [True, False], ids=["always", "never"])
@units
def test_a_constant_cache_policy_is_seen(unit: int, streams: bool) -> None:
    with launched_with(host, STREAM=streams), pytest.raises(AssertionError):
        check_rule(unit)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("offsets, variant.STREAM)", "offsets, False)"),
        ("outside, STREAM=variant.STREAM", "outside, STREAM=False"),
        ("of_rows, step, 0, False)", "of_rows, step, 0, True)"),
    ],
    ids=["codes", "scales of weights", "scales of rows"],
)
def test_streaming_of_the_wrong_part_is_seen(old: str, new: str, tmp_path: Path) -> None:
    name, module = "_moe_gemm_prefill_cdna4_kernel", "from .{}prefill_mainloop import"
    with (
        source_with(prefill_mainloop, "multiply_tile", old, new, tmp_path),
        source_with(prefill, name, module.format(""), module.format("copied_"), tmp_path) as kernel,
        launched_with(host, kernel=kernel),
        pytest.raises(AssertionError),
    ):
        check_streaming("cdna4", 64, 64)


@pytest.mark.parametrize("constants", [{"GROUP_M": 1}, {"NUM_RUNS": 1}], ids=str)
@rasters
def test_a_constant_order_is_seen(raster: tuple[int, int], constants: dict[str, int]) -> None:
    """A kernel that ignores a part of the config, unless that is what it says."""
    same = dict(zip(("GROUP_M", "NUM_RUNS"), raster, strict=True)) | constants
    outcome = contextlib.nullcontext() if raster == (1, 1) else pytest.raises(AssertionError)
    assert (tuple(same.values()) == raster) is (raster == (1, 1))
    with launched_with(host, **constants), outcome:
        check_order(*raster)


RUN = "run * (total // NUM_RUNS) + gl.minimum(run, total % NUM_RUNS) + program // NUM_RUNS"
ROW_BLOCK = "gl.where(program < total, group * GROUP_M + place % group_size, -1)"
WRONG_ORDERS = {
    "none": (RUN, "program"),
    "weight tiles apart": (ROW_BLOCK, ROW_BLOCK.replace("place % group_size", "place % 1")),
    "neighbours": ("gl.program_id(0), total, gl.num_programs(0)", "gl.program_id(0) * 4, total, 1"),
}


@pytest.mark.parametrize("name", WRONG_ORDERS)
def test_another_order_is_seen(name: str, tmp_path: Path) -> None:
    kernel_name = "_moe_gemm_prefill_cdna4_kernel"
    with (
        source_with(prefill, kernel_name, *WRONG_ORDERS[name], tmp_path) as kernel,
        launched_with(host, kernel=kernel),
        pytest.raises((AssertionError, Fault)),
    ):
        check_order(8, 8, persistent=name == "neighbours")


@pytest.mark.parametrize("backend", ["cdna4", "triton"])
def test_atomic_done_as_reduce_is_seen(backend: str) -> None:
    with as_reduce(backend), pytest.raises(AssertionError):
        check_atomics()


def test_padding_that_is_multiplied_is_seen(tmp_path: Path) -> None:
    used = "(expert < self.num_experts) & (self.tokens(first_row) < self.num_tokens)"
    name = "_moe_gemm_decode_cdna4_kernel"
    with (
        source_with(decode, name, used, "expert < self.num_experts", tmp_path) as kernel,
        launched_with(host, kernel=kernel),
        pytest.raises(AssertionError),
    ):
        check_padding()
