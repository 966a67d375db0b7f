"""Dynamic tile scheduler of the persistent GEMMs.

Tiles differ in width and SMs in speed. With a static schedule the busiest CTA has up to 10 % more
work than the mean (gpt-oss-120b at T = 8192, H200). The first tile of a CTA is its program id. Its
producer warp takes each further tile from an atomic counter in global memory, shortly before the
loads of the current tile end. It tags each pipeline stage with its tile; consumer warps read the
tag. Results do not depend on which CTA computes a tile.

The kernel that encodes a GEMM's rows sets the GEMM's counter to 0 (`reset_tile_counter`). Every CTA
claims until no tile is left, so there are as many claims as tiles. The last claim resets the
counter to 0, so that the GEMM can be launched again on its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

LEAD = gl.constexpr(2)
"""The producer claims the next tile this many steps before the end of the current one. Later claims
balance better, but the atomic and the loads that depend on it take one or two steps."""

_NUMBERS = gl.constexpr(4)


@gluon.jit
def reset_tile_counter(tile_counter):
    """Set the tile counter of the next GEMM to 0."""
    if gl.program_id(0) == 0:
        gl.store(tile_counter, 0)


@gluon.jit
def next_tile(tile, tile_counter, num_tiles):
    """Claim the CTA's next tile after `tile`. No tile is left if the result is >= num_tiles."""
    programs = gl.num_programs(0)
    tile += programs
    if num_tiles > programs:
        before = gl.atomic_add(tile_counter, 1, sem="relaxed")
        if before == num_tiles - 1:
            gl.store(tile_counter, 0)
        tile = programs + before
    return tile


@gluon.constexpr_function
def _everywhere(WARPS):
    """Layout of one element that every thread holds."""
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def make_labels(STAGES: gl.constexpr):
    """Allocate the tags: four int32 in shared memory for each pipeline stage."""
    return gl.allocate_shared_memory(
        gl.int32, [_NUMBERS * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def write_label(labels, slot, tile):
    """Tag a free stage with the four numbers of its tile, before any arrival at its mbarrier."""
    for index in gl.static_range(_NUMBERS):
        value = gl.full([1], 0, gl.int32, _everywhere(1)) + tile[index]
        labels.index(_NUMBERS * slot + index).store(value)


@gluon.jit
def write_last_label(labels, slot, phase, tile, ready, free, ARRIVALS: gl.constexpr):
    """Tag the stage after the last one with a tile number that tells consumers to stop.

    ARRIVALS: mbarriers in `ready` per stage.
    """
    mbarrier.wait(free.index(slot), phase)
    write_label(labels, slot, tile)
    mbarrier.arrive(ready.index(slot * ARRIVALS), count=1)


@gluon.jit
def _number(labels, index):
    return gl.max(labels.index(index).load(_everywhere(4)), 0)


@gluon.jit
def read_label(labels, slot, ready, phase):
    """Wait on the mbarrier `ready`, then return the four numbers of a stage's tag (a warpgroup)."""
    mbarrier.wait(ready, phase)
    first = _NUMBERS * slot
    return (
        _number(labels, first),
        _number(labels, first + 1),
        _number(labels, first + 2),
        _number(labels, first + 3),
    )
