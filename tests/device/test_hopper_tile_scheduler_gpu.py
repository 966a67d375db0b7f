"""Stage tags of the tile scheduler alone: one warp writes, two warpgroups read, as in the GEMMs."""

from __future__ import annotations

import pytest
import torch

from mxpert.testing.numerics import assert_exact

pytest.importorskip("triton.experimental.gluon", reason="needs Gluon")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mxpert.device.hopper import make_tile_tags, next_slot, publish_tile, read_tile

PROGRAMS = 264
STEPS = 20_000


@gluon.jit
def _write(ring, steps, STAGES: gl.constexpr):
    ready, free, tags = ring
    slot = 0
    phase = 1
    for step in range(steps):
        mbarrier.wait(free.index(slot), phase)
        publish_tile(tags, slot, (step, step + 1, step + 2, step + 3))
        mbarrier.arrive(ready.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _read(ring, num_wrong, steps, PARTITION: gl.constexpr, STAGES: gl.constexpr):
    ready, free, tags = ring
    slot = 0
    phase = 0
    wrong = 0
    for step in range(steps):
        tag = read_tile(tags, slot, ready.index(slot), phase)
        for index in gl.static_range(4):
            wrong += (tag[index] != step + index).to(gl.int32)
        mbarrier.wait(ready.index(slot), phase)  # as in the first step of a tile
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    gl.store(num_wrong + 2 * gl.program_id(0) + PARTITION, wrong)


@gluon.jit
def _labels_kernel(num_wrong, steps, STAGES: gl.constexpr, num_warps: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    ring = (ready, free, make_tile_tags(STAGES))
    gl.warp_specialize(
        [
            (_read, (ring, num_wrong, steps, 0, STAGES)),
            (_read, (ring, num_wrong, steps, 1, STAGES)),
            (_write, (ring, steps, STAGES)),
        ],
        [4, 1],
        [104, 24],
    )


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_label_is_read_as_it_was_written(stages: int, device: torch.device) -> None:
    """Both warpgroups of every program read every tag as it was written."""
    num_wrong = torch.full((PROGRAMS, 2), -1, dtype=torch.int32, device=device)
    _labels_kernel[(PROGRAMS,)](num_wrong, STEPS, stages, num_warps=4, enable_fp_fusion=True)
    assert_exact(num_wrong, torch.zeros_like(num_wrong), "numbers of another step")
