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
from gfx950emu import Report
from mxpert import Combine
from mxpert.configs import Cdna4GemmConfig
from mxpert.core.backend import BACKENDS
from mxpert.core.problem import GemmConfig, Op
from mxpert.core.registry import kernel_of
from mxpert.moe.cdna4 import decode, host, prefill, prefill_mainloop
from mxpert.moe.cdna4.config import PREFILL_GROUP_M, prefill_config
from mxpert.testing.gfx950 import emulate
from mxpert.testing.problems import MoEInputs, MoEShape
from support.exact import exact_moe_problem
from tests.gfx950.test_planted import copy_of

DECODE = Cdna4GemmConfig("decode", block_m=16, block_n=256)
PORTABLE = GemmConfig(16, 64, 128)
NUM_DIES = 8
SHAPE = MoEShape(160, 96, 1, 1, has_bias=False)


def down(
    inputs: MoEInputs, backend: str, config: Any, combine: Combine, unit: int = 0
) -> list[Report]:
    """Reports of the launches of stage 2 with MXFP8 rows of ones."""
    plan = mxpert.make_routing_plan(
        inputs.topk_weights,
        inputs.topk_ids,
        num_experts=inputs.weights.num_experts,
        routing_block_m=unit or config.block_m,
    )
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


def tiles_of(report: Report, width: int, block_m: int) -> list[tuple[int, int] | None]:
    """The row block and weight tile that each workgroup stores."""
    region = report.regions["out_ptr"]
    found: list[tuple[int, int] | None] = [None] * report.grid[0]
    for trace in report.traces:
        for position, lines in sorted(trace.half_lines.items()):
            text = report.program.instructions[trace.instructions[position]].text
            if "store" in text and lines.size and int(lines[0]) * 64 in region:
                row, column = divmod((int(lines[0]) * 64 - region.start) // 2, width)
                found[trace.workgroup] = row // block_m, column // 256
                break
    return found


def expected_tiles(tiles_m: int, tiles_n: int) -> list[tuple[int, int]]:
    """The order of the kernel's documentation: dies in turn, a run of tiles each."""
    runs = [
        (first + m, n)
        for first in range(0, tiles_m, PREFILL_GROUP_M)
        for n in range(tiles_n)
        for m in range(min(PREFILL_GROUP_M, tiles_m - first))
    ]
    each, more = divmod(len(runs), NUM_DIES)
    starts = [die * each + min(die, more) for die in range(NUM_DIES)]
    return [runs[starts[p % NUM_DIES] + p // NUM_DIES] for p in range(len(runs))]


def check_order() -> None:
    """Eleven blocks of rows are a group of eight and one of three; three weight tiles."""
    shape = replace(SHAPE, hidden_size=672)
    inputs = exact_moe_problem(shape, 11 * 64 - 5)
    report = next(
        each
        for each in down(inputs, "cdna4", prefill_config(64), Combine.FLAT)
        if "prefill" in each.kernel
    )
    found = tiles_of(report, 672, 64)
    wanted = expected_tiles(11, 3)
    assert found[: len(wanted)] == wanted
    assert set(found[len(wanted) :]) <= {None}


def test_each_die_has_a_run_of_tiles_in_groups() -> None:
    check_order()


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
        ("        variant.STREAM,\n    )", "        False,\n    )"),
        ("pair, steps, False)", "pair, steps, True)"),
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


def test_tiles_without_groups_are_seen() -> None:
    with launched_with(host, GROUP_M=1), pytest.raises(AssertionError):
        check_order()


def test_tiles_dealt_to_dies_one_by_one_are_seen(tmp_path: Path) -> None:
    mapping = (
        "tile = die * (total // NUM_XCDS) + gl.minimum(die, total % NUM_XCDS) + program // NUM_XCDS"
    )
    name = "_moe_gemm_prefill_cdna4_kernel"
    with (
        source_with(prefill, name, mapping, "tile = program", tmp_path) as kernel,
        launched_with(host, kernel=kernel),
        pytest.raises(AssertionError),
    ):
        check_order()


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
