"""Dynamic tile scheduler of the persistent MoE GEMMs.

Tiles differ in width and SMs in speed. With a static schedule the busiest CTA has up to 10 % more
work than the mean (gpt-oss-120b at T = 8192, H200). The first tile of a CTA is its program id. Its
producer warp claims each further tile from an atomic counter in global memory, shortly before the
loads of the current tile end. It publishes the tile with every pipeline stage that it fills: the
stage's tag in shared memory describes the tile. Consumer warps read the tag of the stage after a
tile's last one. Results do not depend on which CTA computes a tile.

The kernel that encodes a GEMM's rows sets the GEMM's counter to 0 (`reset_tile_counter`). Every CTA
claims until no tile is left, so there are as many claims as tiles. The last claim resets the
counter to 0, so that the GEMM can be launched again on its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

CLAIM_LEAD = gl.constexpr(2)
"""The producer claims the next tile this many steps before the end of the current one. Later claims
balance better, but the atomic and the loads that depend on it take one or two steps."""

_TAG_NUMBERS = gl.constexpr(4)
"""Numbers of a tag; int32 each."""


@gluon.jit
def reset_tile_counter(tile_counter):
    """Set the tile counter of the next GEMM to 0."""
    if gl.program_id(0) == 0:
        gl.store(tile_counter, 0)


@gluon.jit
def claim_tile(tile, tile_counter, num_tiles):
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
def _one_element_layout(WARPS):
    """Layout of one element that every thread holds."""
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def make_tile_tags(STAGES: gl.constexpr):
    """Allocate the tags: four int32 in shared memory for each pipeline stage."""
    return gl.allocate_shared_memory(
        gl.int32, [_TAG_NUMBERS * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def publish_tile(tags, stage, numbers):
    """Write the four numbers of a tile to a free stage's tag (one warp).

    The arrival at the stage's `ready` mbarrier comes later and makes the tag visible.
    """
    for index in gl.static_range(_TAG_NUMBERS):
        value = gl.full([1], 0, gl.int32, _one_element_layout(1)) + numbers[index]
        tags.index(_TAG_NUMBERS * stage + index).store(value)


@gluon.jit
def publish_end(tags, state, numbers, ready, free, READY_PER_STAGE: gl.constexpr):
    """Publish the tile that stops the consumers, in the stage after the last one (one warp).

    state: PipelineState of the producer. READY_PER_STAGE: mbarriers in `ready` of a stage.
    """
    mbarrier.wait(free.index(state.stage), state.phase)
    publish_tile(tags, state.stage, numbers)
    mbarrier.arrive(ready.index(state.stage * READY_PER_STAGE), count=1)


@gluon.jit
def _number(tags, index):
    return gl.max(tags.index(index).load(_one_element_layout(4)), 0)


@gluon.jit
def read_tile(tags, stage, ready, phase):
    """Wait on the mbarrier `ready`, then return the four numbers of a stage's tag (a warpgroup)."""
    mbarrier.wait(ready, phase)
    first = _TAG_NUMBERS * stage
    return (
        _number(tags, first),
        _number(tags, first + 1),
        _number(tags, first + 2),
        _number(tags, first + 3),
    )
