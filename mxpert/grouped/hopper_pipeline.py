"""Operand pipeline of the grouped GEMM: stages in shared memory and their mbarriers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..device.compat import aggregate, async_load
from .hopper_scheduler import MX_BLOCK

STAGE_ROW_BYTES = gl.constexpr(128)
"""Bytes of a stage's row: the widest TMA swizzle, 128 fp8 or 64 bf16 values."""

CONSUMERS = gl.constexpr(2)
CONSUMER_ROWS = gl.constexpr(64)
"""Consumer warpgroups of a CTA, and the rows of the tile that each computes (wgmma's M)."""


@gluon.constexpr_function
def _clear_layout(BYTES):
    """Layout of [rows, 32] values of `BYTES` bytes each, 16 bytes a thread."""
    return gl.BlockedLayout([1, 16 // BYTES], [16 // BYTES, 2 * BYTES], [4, 1], [1, 0])


@gluon.jit
def _clear_from(stage, first):
    """Clear MX blocks of stage [rows, depth] from block `first` on; they are the next group's."""
    BYTES: gl.constexpr = stage.dtype.primitive_bitwidth // 8
    ROWS: gl.constexpr = stage.shape[0]
    zeros = gl.zeros((ROWS, MX_BLOCK), gl.float32, _clear_layout(BYTES)).to(stage.dtype)
    for block in gl.static_range(1, stage.shape[1] // MX_BLOCK):
        if block >= first:
            stage.slice(block * MX_BLOCK, MX_BLOCK, 1).store(zeros)


@aggregate
class Pipeline:
    """Ring of stages with a tile of each operand, filled by TMA and read by wgmma.

    a: [STAGES, BLOCK_M, depth]. b: [STAGES, BLOCK_N, depth], or [STAGES, 1, depth, BLOCK_N] for b
    of shape [G, K, N]. ready: one arrival a stage, by TMA. free: one arrival of each consumer.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, state, tile, k, a_desc, b_desc):
        """Wait until the stage is free, then start the loads of values k … of both operands."""
        mbarrier.wait(self.free.index(state.stage), state.phase)
        ready = self.ready.index(state.stage)
        mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        async_load(a_desc, [tile.a_row, k], ready, self.a.index(state.stage))
        if self.b.rank == 3:
            async_load(b_desc, [tile.b_row, k], ready, self.b.index(state.stage))
        else:
            async_load(b_desc, [tile.group, k, tile.column], ready, self.b.index(state.stage))

    @gluon.jit
    def wait(self, state, remaining, CONSUMER: gl.constexpr, WGRAD: gl.constexpr):
        """Wait for a stage, of which the first `remaining` values belong to the group."""
        mbarrier.wait(self.ready.index(state.stage), state.phase)
        # Without WGRAD the tensor ends there, and TMA fills the rest with zeros.
        if WGRAD and remaining < self.a.shape[2]:
            # Both consumers clear the shared operand b, each before its wgmma; both write zeros.
            a = self.a.index(state.stage).slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS, 0)
            _clear_from(a, remaining // MX_BLOCK)
            _clear_from(self.b.index(state.stage), remaining // MX_BLOCK)
            fence_async_shared()  # wgmma reads through the async proxy

    @gluon.jit
    def operands(self, state, CONSUMER: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
        """Views of a stage: a consumer's rows of a [64, depth], columns of b [depth, COLUMNS]."""
        a = self.a.index(state.stage).slice(CONSUMER * CONSUMER_ROWS, CONSUMER_ROWS, 0)
        b = self.b.index(state.stage)
        if b.rank == 3:
            b = b.reshape([b.shape[1], b.shape[2]]).slice(FIRST, COLUMNS, 1)
        else:
            b = b.slice(FIRST, COLUMNS, 0).permute((1, 0))
        return a, b

    @gluon.jit
    def release(self, stage):
        """Tell the producer that this consumer has read a stage."""
        mbarrier.arrive(self.free.index(stage), count=1)


@gluon.jit
def allocate_pipeline(a_desc, b_desc, STAGES: gl.constexpr):
    """Allocate a `Pipeline` for the tiles of both TMA descriptors."""
    gl.static_assert(STAGES >= 2, "a consumer may hold two stages at once")
    A_ROW: gl.constexpr = a_desc.block_type.shape[1] * a_desc.dtype.primitive_bitwidth
    gl.static_assert(A_ROW == 8 * STAGE_ROW_BYTES)
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    return Pipeline(a, b, ready, free)
