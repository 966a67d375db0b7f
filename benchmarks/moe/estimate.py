"""How long a comparison will take, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.moe.cells import Cell
from benchmarks.moe.protocol import WARMUP, idle_seconds, num_repeats
from benchmarks.moe.rows import work_of

READ_RATE, MULTIPLY_RATE = 4.5e12, 780e12
ROOF_SHARE = 0.6
"""An implementation's share of the roof, for want of a better one."""

LAUNCH_US = 10.0
SWEEP_US = 100.0
"""L2 sweep before a replay, and waiting for its end."""

START_SECONDS = 15.0
HOST_SECONDS = 0.114
"""A variant's share of weights, compilation, gate and capture in one stage of one cell: a run of
54 cells with two formats of ours took 255 s on an H200 host (2026-11-21, commit edd8d1f)."""


def estimate(cells: Sequence[Cell], stages: Sequence[str], num_variants: int) -> dict[str, float]:
    """Seconds by cause; a compiler that a cell waits for is in "host" as it was in that run.

    >>> from cells import MODELS
    >>> sorted(estimate([Cell(MODELS["dsv3-ep8"], 1)], ["layer"], 7))
    ['host', 'idle', 'replays']
    """
    idle = replays = num_stages = 0.0
    for cell in cells:
        model = cell.model
        hit = model.E * (1 - (1 - model.k / model.E) ** cell.tokens)
        num_stages += len(cell.stages(stages))
        for stage in cell.stages(stages):
            work = work_of(model, cell.tokens, stage, round(hit))
            floor = work.floor_us(READ_RATE, MULTIPLY_RATE)
            us = cell.rotations * (floor / ROOF_SHARE + LAUNCH_US) + SWEEP_US
            replays += num_variants * (WARMUP + num_repeats(cell.rotations * floor)) * us / 1e6
            idle += idle_seconds(cell.tokens)
    host = START_SECONDS + HOST_SECONDS * num_variants * num_stages
    return {"host": host, "replays": replays, "idle": idle}
