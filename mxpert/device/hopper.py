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

import functools
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.launch import DescriptorSpec
from .compat import aggregate

# ---- Position in a ring of pipeline stages, which a producer fills and consumers empty.


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """Return the stage after `slot`, and the phase of its mbarriers."""
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return slot, phase


@aggregate
class PipelineState:
    """Position of a producer or of a consumer in a ring of STAGES pipeline stages.

    stage: int32, index of the stage. phase: int32, parity to wait for at the stage's mbarriers.
    """

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self):
        """Return the position of the next stage."""
        stage, phase = next_slot(self.stage, self.phase, self.STAGES)
        return PipelineState(stage, phase, self.STAGES)


@gluon.jit
def producer_start(STAGES: gl.constexpr):
    """A producer's first position: waits of phase 1 pass at once, since all stages are free."""
    return PipelineState(0, 1, STAGES)


@gluon.jit
def consumer_start(STAGES: gl.constexpr):
    """A consumer's first position: waits of phase 0 pass after the producer's first loads."""
    return PipelineState(0, 0, STAGES)


# ---- TMA descriptors of the Hopper kernels.

_GLUON_TYPES = {
    torch.uint8: gl.uint8,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


@dataclass(frozen=True)
class GluonDescriptorSpec(DescriptorSpec):
    """A descriptor for a Gluon kernel, with the layout of the tile in shared memory."""

    layout: gl.NVMMASharedLayout | None = None

    def from_rows(self, rows: torch.Tensor, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(rows, block, self.layout)


@functools.lru_cache
def _tile(block: tuple[int, ...], dtype: torch.dtype, width: int | None) -> DescriptorSpec:
    """Spec with the widest shared-memory swizzle that fits the block."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])
    return GluonDescriptorSpec(block, width, layout)


def rows_descriptor(
    rows: int, columns: int, dtype: torch.dtype, width: int | None = None
) -> DescriptorSpec:
    """TMA tile of rows × columns of `dtype`; `width` as in DescriptorSpec."""
    return _tile((rows, columns), dtype, width)


def matrix_descriptor(rows: int, columns: int, dtype: torch.dtype) -> DescriptorSpec:
    """TMA tile of rows × columns of one matrix of a tensor of matrices, each `columns` wide.

    Reads past the end of a matrix give zeros.
    """
    return _tile((1, rows, columns), dtype, columns)


def matrices_descriptor(rows: int, columns: int, dtype: torch.dtype) -> DescriptorSpec:
    """TMA tile of rows × columns of one matrix of a tensor [..., all rows, all columns].

    Reads past the last row or column of a matrix give zeros.
    """
    return _tile((1, rows, columns), dtype, None)


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
def publish_end(tags, state, numbers, ready, free):
    """Publish the tile that stops the consumers, in the stage after the last one (one warp).

    state: PipelineState of the producer.
    """
    mbarrier.wait(free.index(state.stage), state.phase)
    publish_tile(tags, state.stage, numbers)
    mbarrier.arrive(ready.index(state.stage), count=1)


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
