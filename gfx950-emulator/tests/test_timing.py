"""The cycle model on programs whose time can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gfx950_support.assembler import read_instruction
from gfx950emu.program import Program
from gfx950emu.timing import MI355X, Execution, LoopError, LoopReport, model_loop
from gfx950emu.timing.classes import CLASSES, classify, matrix_cycles
from gfx950emu.timing.costs import decode
from gfx950emu.timing.execution import find_loop, repeat
from gfx950emu.timing.loads import LoadPath, Request
from gfx950emu.timing.unit import ComputeUnit
from gfx950emu.trace import WaveTrace

MFMA = "v_mfma_f32_16x16x32_f16 a[{0}:{1}], v[0:3], v[4:7], a[{0}:{1}]"
SCALED = (
    "v_mfma_scale_f32_16x16x128_f8f6f4 a[{0}:{1}], v[0:{3}], v[8:{4}], a[{0}:{1}], v16, v17 "
    "op_sel_hi:[0,0,0] cbsz:{2} blgp:{2}"
)
LOAD = "buffer_load_dwordx4 v[20:23], v40, s[0:3], 0 offen"
READ = "ds_read_b128 v[24:27], v41"
BRANCH = "s_cbranch_scc1 loop"


def program(lines: Sequence[str], **labels: int) -> Program:
    """A program of these instructions, for the model alone; the loop begins with the first."""
    instructions = tuple(map(read_instruction, lines))
    return Program("micro", instructions, {"loop": 0} | labels, (), {}, 0, {}, {})


def execution(
    body: Sequence[str],
    waves: int = 4,
    *,
    bank_cycles: Mapping[int, int] | None = None,
    half_lines: Mapping[int, Sequence[int]] | None = None,
    streamed: Sequence[range] = (),
) -> Execution:
    """Four iterations of a loop, the same in every wave.

    Args:
        bank_cycles, half_lines: of an instruction of the body, in each iteration.
    """
    lines, turns = [*body, BRANCH], 4
    traces = []
    for wave in range(waves):
        trace = WaveTrace(0, wave, list(range(len(lines))) * turns)
        for turn in range(turns):
            for index, cycles in (bank_cycles or {}).items():
                trace.bank_cycles[turn * len(lines) + index] = cycles
            for index, halves in (half_lines or {}).items():
                moved = np.array(halves) + 1000 * turn
                trace.half_lines[turn * len(lines) + index] = moved
        traces.append(trace)
    return Execution(program(lines), traces, 512, 0, streamed)


def model(body: Sequence[str], waves: int = 4, **options: object) -> LoopReport:
    """One workgroup of a loop on one compute unit."""
    return model_loop(execution(body, waves, **options), workgroups=1)  # type: ignore[arg-type]


def mfmas(number: int, text: str = MFMA, *more: int) -> list[str]:
    """Independent MFMAs: each adds to its own accumulators."""
    return [text.format(4 * k, 4 * k + 3, *more) for k in range(number)]


def test_independent_mfmas_saturate_the_matrix_cores() -> None:
    report = model(mfmas(32))
    assert report.limit == "mfma"
    assert report.mfma_efficiency > 0.99
    assert report.cycles == pytest.approx(32 * 16, rel=0.01)


def test_an_mfma_that_adds_to_its_own_result_follows_at_once_but_a_reader_waits() -> None:
    chained = model([MFMA.format(0, 3)] * 32)
    assert chained.cycles == pytest.approx(32 * 16, rel=0.01)
    pair = [MFMA.format(0, 3), "v_accvgpr_read_b32 v30, a0"]
    read = model(pair * 8)
    assert read.cycles / 8 >= 16 + MI355X.mfma_to_vector


@pytest.mark.parametrize(("format", "cycles"), [(0, 32), (4, 16)], ids=["fp8", "fp4"])
def test_scaled_mfmas_take_the_time_of_their_format(format: int, cycles: int) -> None:
    last = 3 if format == 4 else 7  # registers of 32 values in 4 or 8 bits
    report = model(mfmas(16, SCALED, format, last, 8 + last))
    assert report.cycles == pytest.approx(16 * cycles, rel=0.02)


def test_vector_instructions_hide_behind_mfmas_up_to_the_window() -> None:
    """Of 16 cycles an MFMA reads for 8, so two vector instructions fit and a third does not."""
    others = "v_add_u32_e32 v{0}, v{0}, v50"
    for fitting, extra in ((2, 0), (4, 8)):
        body = [
            line
            for index, mfma in enumerate(mfmas(16))
            for line in (mfma, *(others.format(60 + 4 * index + k) for k in range(fitting)))
        ]
        cycles = model(body).cycles - MI355X.branch_cycles
        assert cycles == pytest.approx(16 * (16 + extra), rel=0.03)


def test_loads_are_bound_by_bytes_in_flight_over_latency() -> None:
    """Each wave waits for its load at once: 4 KiB a round trip."""
    body = [LOAD, "s_waitcnt vmcnt(0)", *mfmas(1)]
    report = model(body)
    assert report.limit == "load latency"
    round_trip = MI355X.l2_latency + 4 * 1024 / MI355X.load_bytes_per_cycle
    assert report.cycles == pytest.approx(round_trip, rel=0.1)
    faster = model_loop(execution(body), workgroups=1, chip=replace(MI355X, l2_latency=365))
    assert faster.cycles < 0.65 * report.cycles


def test_a_full_tcp_stops_loads() -> None:
    """With nothing to wait for, 32 KiB are under way at a time."""
    report = model([*[LOAD] * 16, "s_waitcnt vmcnt(48)", *mfmas(1)])
    assert report.limit == "load queue"
    rate = 16 * 4 * 1024 / report.cycles
    assert rate == pytest.approx(MI355X.cache_bytes / (MI355X.l2_latency + 16), rel=0.1)


def test_a_wait_for_older_loads_lets_newer_ones_fly() -> None:
    pipelined = model([LOAD, "s_waitcnt vmcnt(3)", *mfmas(1)])
    serial = model([LOAD, "s_waitcnt vmcnt(0)", *mfmas(1)])
    assert pipelined.cycles < 0.3 * serial.cycles


def test_streams_are_bound_by_hbm_and_its_latency_grows_with_load() -> None:
    halves = {index: range(16 * index, 16 * index + 16) for index in range(8)}
    body = [*[LOAD] * 8, "s_waitcnt vmcnt(8)", *mfmas(1)]
    made = [
        execution([*body], half_lines=halves, streamed=streamed)
        for streamed in ((), (range(1 << 40),))
    ]
    for wave, trace in enumerate(made[1].waves):  # each wave its own part
        for step in trace.half_lines:
            trace.half_lines[step] = trace.half_lines[step] + (wave << 32)
    cached, streamed = (model_loop(each, workgroups=1) for each in made)
    assert cached.streamed_bytes == 0
    assert streamed.streamed_bytes == pytest.approx(32 * 1024, rel=0.01)
    rate = streamed.terabytes_per_second(streamed.streamed_bytes)
    assert 4 < rate < MI355X.stream_bytes_per_second / 1e12
    alone = model_loop(made[1], workgroups=1, active_units=32)
    assert alone.cycles < 0.8 * streamed.cycles


def test_a_line_that_two_waves_load_is_asked_for_once() -> None:
    report = model([LOAD, "s_waitcnt vmcnt(0)", *mfmas(1)], half_lines={0: range(16)})
    assert report.loaded_bytes == pytest.approx(1024, rel=0.01)
    assert model([LOAD, "s_waitcnt vmcnt(0)", *mfmas(1)]).loaded_bytes > 4000


def test_half_a_line_costs_a_whole_one() -> None:
    report = model([LOAD, *mfmas(1)], waves=1, half_lines={0: range(0, 64, 4)})
    assert report.loaded_bytes == pytest.approx(16 * MI355X.line_bytes, rel=0.01)


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_bank_conflicts_multiply_the_time_of_reads(ways: int) -> None:
    """AMD measured 16 cycles a read and SIMD without conflicts, 32 and 64 with 2 and 4 ways."""
    reads = 16
    report = model([*[READ] * reads, *mfmas(1)], bank_cycles=dict.fromkeys(range(reads), 4 * ways))
    assert report.cycles / reads == pytest.approx(16 * ways, rel=0.1)


def test_one_wave_reads_at_the_rate_of_its_bus() -> None:
    """AMD measured 8 cycles a read with a single wave, also with 2-way conflicts."""
    for cycles in (4, 8):
        report = model([*[READ] * 32, *mfmas(1)], 1, bank_cycles=dict.fromkeys(range(32), cycles))
        assert report.cycles / 32 == pytest.approx(8, rel=0.1)


def test_a_barrier_waits_for_the_slowest_wave() -> None:
    slow = 60
    body = ["s_barrier", *mfmas(1), *["v_mov_b32_e32 v1, v2"] * slow]
    lines = [*body, BRANCH]
    fast_path = [0, 1, len(lines) - 1]
    traces = [WaveTrace(0, 0, list(range(len(lines))) * 4)]
    traces += [WaveTrace(0, wave, fast_path * 4) for wave in (1, 2, 3)]
    report = model_loop(Execution(program(lines), traces, 512, 0), workgroups=1)
    assert report.cycles >= 4 * slow
    assert report.waits["barrier"] > 0.5
    assert report.limit == "barrier"


def test_waves_of_higher_priority_issue_first() -> None:
    """Two waves of one SIMD compete for it; the one of higher priority is done first."""
    lines = ["s_setprio 0", "s_setprio 3", *["v_mov_b32_e32 v1, v2"] * 64]
    costs, rest = decode(program(lines), MI355X), list(range(2, len(lines)))
    for first, second in ((0, 1), (1, 0)):
        paths = [[first, *rest], [0], [0], [0], [second, *rest]]
        waves = [WaveTrace(0, wave, path) for wave, path in enumerate(paths)]
        nothing: list[dict[int, Request]] = [{} for _ in waves]
        unit = ComputeUnit(MI355X, costs, waves, 1, nothing, LoadPath(MI355X, 1000, 64))
        unit.run()
        ends = [unit.waves[wave].issued[-1] for wave in (0, 4)]
        assert (ends[0] < ends[1]) == (first > second)
        assert max(ends) == pytest.approx(2 * 64 * 4, rel=0.05)
        assert min(ends) == pytest.approx(64 * 4, rel=0.1)


def test_workgroups_share_a_compute_unit() -> None:
    assert MI355X.workgroups(waves=4, vector_registers=128, lds_bytes=0) == 4
    assert MI355X.workgroups(waves=8, vector_registers=128, lds_bytes=0) == 2
    assert MI355X.workgroups(waves=4, vector_registers=65, lds_bytes=60 * 1024) == 2
    body = [LOAD, "s_waitcnt vmcnt(0)", *mfmas(8)]
    one, two = (model_loop(execution(body), workgroups=number) for number in (1, 2))
    assert two.cycles < 1.3 * one.cycles  # of one workgroup, while the other runs beside it
    assert two.mfma_efficiency > 1.5 * one.mfma_efficiency


def test_a_loop_that_is_repeated_asks_for_fresh_lines() -> None:
    made = execution([LOAD, *mfmas(1)], 1, half_lines={0: [4, 5]})
    longer, loop = repeat(made, find_loop(made), 20)
    steps = [step for step in longer.waves[0].half_lines if step > loop.steps[0][3]]
    lines = {int(half) // 2 for step in steps for half in longer.waves[0].half_lines[step]}
    assert len(lines) == len(steps)
    assert loop.iterations == 20


LOOPS = [
    "v_mov_b32_e32 v1, v2",  # head of the loop over tiles
    "v_mov_b32_e32 v1, v2",  # head of the loop over k
    *mfmas(2),  # head of an inner loop
    "s_cbranch_scc1 inner",
    "s_cbranch_scc1 depth",
    "global_store_dword v[0:1], v2, off",
    "s_cbranch_scc1 tiles",
]


def traced_loops(turns: int) -> Execution:
    """Two tiles of `turns` steps of k with two inner turns each."""
    depth = [1, 2, 3, 4, 2, 3, 4, 5]
    path = [0, *depth * turns, 6, 7] * 2
    made = program(LOOPS, tiles=0, depth=1, inner=2)
    return Execution(made, [WaveTrace(0, 0, path)], 512, 0)


def test_the_loop_is_the_outermost_over_k() -> None:
    """Inner loops belong to it; the loop over tiles, which stores, does not."""
    found = find_loop(traced_loops(4))
    assert found.branch == 5
    assert found.iterations == 2  # the fourth turn does not jump back
    assert found.steps[0][1] - found.steps[0][0] == 8


def test_a_loop_that_turned_too_few_times_is_refused() -> None:
    for made in (
        traced_loops(3),
        Execution(program(mfmas(4)), [WaveTrace(0, 0, [0, 1, 2, 3])], 512, 0),
    ):
        with pytest.raises(LoopError, match="need a loop with MFMA that jumps back 3 times"):
            model_loop(made)


def test_every_class_has_a_source_and_is_reached() -> None:
    names = (
        "v_mfma_f32_16x16x32_f16",
        "buffer_load_dword",
        "global_store_dword",
        "ds_write_b64",
        "s_load_dwordx4",
        "s_waitcnt",
        "s_barrier",
        "s_nop",
        "s_cbranch_scc0",
        "s_setprio",
        "s_endpgm",
        "s_add_u32",
        "v_exp_f32",
        "v_mul_lo_u32",
        "v_mad_u64_u32",
        "v_pk_mul_f32",
        "v_add_f32",
        "buffer_inv",
    )
    assert {classify(name) for name in names} == set(CLASSES)
    assert all(each.source for each in CLASSES)


def test_matrix_cycles_of_all_shapes_are_known() -> None:
    shapes = {
        ("16x16x32_f16", 3, 3): 16,
        ("32x32x16_bf16", 15, 3): 32,
        ("16x16x16_f16", 3, 1): 16,
        ("32x32x8_f16", 15, 1): 32,
    }
    for (shape, result, source), cycles in shapes.items():
        text = f"v_mfma_f32_{shape} a[0:{result}], v[0:{source}], v[4:{4 + source}], a[0:{result}]"
        assert matrix_cycles(read_instruction(text)) == cycles
