"""The cycle model on whole workgroups whose time can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gfx950_support.assembler import read_instruction
from gfx950emu.program import Program
from gfx950emu.timing import MI355X, Execution, TileReport, model_tiles
from gfx950emu.trace import WaveTrace

MFMA = "v_mfma_f32_16x16x32_f16 a[0:3], v[0:3], v[4:7], a[0:3]"
LOAD = "buffer_load_dwordx4 v[20:23], v40, s[0:3], 0 offen"
STORE = "buffer_store_dwordx4 v[24:27], v40, s[0:3], 0 offen"
WAIT = "s_waitcnt vmcnt(0)"
HALVES = 1 << 40
"""Half lines that all come from HBM."""
ROUND_TRIP = MI355X.l2_latency + 1024 / MI355X.load_bytes_per_cycle


def tiles(lines: Sequence[str], turns: int = 1, workgroups: int = 1) -> TileReport:
    """A workgroup of one wave whose loads come from HBM where they name lines, else from L2."""
    body = [*lines, "s_endpgm"]
    program = Program("micro", tuple(map(read_instruction, body)), {}, (), {}, 0, {}, {})
    wave = WaveTrace(0, 0, list(range(len(body))))
    execution = Execution(program, [wave], 64, 0)
    return model_tiles(execution, workgroups=workgroups, turns=turns)


def streaming(loads: int) -> Execution:
    """A workgroup that loads 1 KiB from HBM so many times, and waits for all."""
    body = [*[LOAD] * loads, WAIT, MFMA, "s_endpgm"]
    program = Program("micro", tuple(map(read_instruction, body)), {}, (), {}, 0, {}, {})
    wave = WaveTrace(0, 0, list(range(len(body))))
    wave.half_lines = {step: np.arange(16 * step, 16 * step + 16) for step in range(loads)}
    return Execution(program, [wave], 64, 0, [range(HALVES)])


def test_a_workgroup_has_a_start_a_middle_and_an_end() -> None:
    report = tiles([LOAD, WAIT, *[MFMA] * 100, *[STORE] * 3])
    assert report.start == pytest.approx(ROUND_TRIP, rel=0.05)
    assert report.end < 100
    assert report.cycles == pytest.approx(ROUND_TRIP + 100 * 16, rel=0.05)
    assert report.busy == pytest.approx(100 * 16 / 4 / report.cycles, rel=0.01)


def test_workgroups_without_a_loop_or_mfma_are_modelled() -> None:
    report = tiles([LOAD, WAIT, STORE])
    assert (report.start, report.busy) == (0.0, 0.0)
    assert report.cycles == pytest.approx(ROUND_TRIP, rel=0.05)


def test_turns_follow_each_other_and_wait_for_no_store_of_the_one_before() -> None:
    body = [*[MFMA] * 10, WAIT, *[MFMA] * 10, STORE]
    one, three = tiles(body), tiles(body, 3)
    assert three.cycles == pytest.approx(3 * one.cycles, rel=0.1)


def test_side_by_side_latencies_overlap() -> None:
    body = [LOAD, WAIT, *[MFMA] * 10]
    assert tiles(body, workgroups=4).cycles < 1.3 * tiles(body).cycles


def test_each_turn_streams_lines_of_its_own() -> None:
    """And HBM's latency is that of the load, as in `model_loop`."""
    one, four = (model_tiles(streaming(32), workgroups=1, turns=turns) for turns in (1, 4))
    assert (one.streamed_bytes, four.streamed_bytes) == (32 * 1024, 4 * 32 * 1024)
    idle = MI355X.stream_latency + 32 * 1024 / MI355X.stream_bytes_per_cycle
    assert one.cycles > idle
    alone = model_tiles(streaming(32), workgroups=1, active_units=16)
    assert alone.cycles < one.cycles


def test_what_a_compute_unit_leaves_of_hbm_it_gets_back() -> None:
    """A long epilogue ahead of the next start: HBM's rate is the limit of both together."""
    body = [*[LOAD] * 32, WAIT, *[MFMA] * 2000, "s_endpgm"]
    program = Program("micro", tuple(map(read_instruction, body)), {}, (), {}, 0, {}, {})
    wave = WaveTrace(0, 0, list(range(len(body))))
    wave.half_lines = {step: np.arange(16 * step, 16 * step + 16) for step in range(32)}
    execution = Execution(program, [wave], 64, 0, [range(HALVES)])
    one, two = (model_tiles(execution, workgroups=1, turns=turns) for turns in (1, 2))
    saved = 2 * one.cycles - two.cycles
    assert saved == pytest.approx(32 * 1024 / MI355X.stream_bytes_per_cycle, rel=0.4)
