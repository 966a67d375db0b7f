"""Tiles that CTAs claim as they go, instead of tiles dealt out beforehand.

Tiles differ in width and SMs in speed: dealt out in turns, the busiest CTA has up to 10 % more to
do than the mean (gpt-oss-120b at T = 8192). The first tile of a CTA is its own. Its producer claims
each further one from a counter in memory, shortly before it has loaded the one before, and labels
every stage of the operands' ring with the tile that the stage is of, where consumers read it.
Results do not depend on who computes a tile.

The kernel that encodes a GEMM's rows sets the GEMM's counter to 0 (`reset_claims`). It is 0 again
at the end, so that the GEMM alone can be repeated: every CTA goes on claiming until it gets
nothing, which makes one claim for each tile, and the last of them starts the counter anew.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

LEAD = gl.constexpr(2)
"""Steps before the end of a tile at which the next one is claimed. Later is fairer, but a claim and
what is then asked for take as long as a step or two."""

_NUMBERS = gl.constexpr(4)


@gluon.jit
def reset_claims(claimed):
    """Set the counter of the GEMM that follows this kernel."""
    if gl.program_id(0) == 0:
        gl.store(claimed, 0)


@gluon.jit
def next_tile(tile, claimed, num_tiles):
    """The CTA's tile after `tile`; there is none if it is num_tiles or more."""
    programs = gl.num_programs(0)
    tile += programs
    if num_tiles > programs:
        before = gl.atomic_add(claimed, 1, sem="relaxed")
        if before == num_tiles - 1:
            gl.store(claimed, 0)
        tile = programs + before
    return tile


@gluon.constexpr_function
def _everywhere(WARPS):
    """One element, held by every thread."""
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def make_labels(STAGES: gl.constexpr):
    """Room for four numbers that describe the tile of each stage."""
    return gl.allocate_shared_memory(gl.int32, [_NUMBERS * STAGES, 1],
                                     gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_label(labels, slot, tile):
    """Label a stage that is free, before anything arrives at its barrier, with four numbers."""
    for index in gl.static_range(_NUMBERS):
        value = gl.full([1], 0, gl.int32, _everywhere(1)) + tile[index]
        labels.index(_NUMBERS * slot + index).store(value)


@gluon.jit
def write_last_label(labels, slot, phase, tile, ready, free, ARRIVALS: gl.constexpr):
    """Label the stage after the last one, which holds nothing: `tile` is none. ARRIVALS: barriers
    in `ready` for each stage."""
    mbarrier.wait(free.index(slot), phase)
    write_label(labels, slot, tile)
    mbarrier.arrive(ready.index(slot * ARRIVALS), count=1)


@gluon.jit
def _number(labels, index):
    return gl.max(labels.index(index).load(_everywhere(4)), 0)


@gluon.jit
def read_label(labels, slot, ready, phase):
    """The four numbers of a stage, once it is `ready`; for a warpgroup."""
    mbarrier.wait(ready, phase)
    first = _NUMBERS * slot
    return (_number(labels, first), _number(labels, first + 1), _number(labels, first + 2),
            _number(labels, first + 3))
