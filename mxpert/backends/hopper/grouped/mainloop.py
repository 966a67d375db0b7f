"""Main loops of the grouped GEMM: wgmma, scaling, and promotion to float32.

The tensor core adds fp8 products with about 14 bits. Sums that are promoted are added in float32
from there on. A consumer has 64 rows. It keeps 256 columns in the wgmma accumulator, or computes
two halves of 128 one after the other in the same registers and promotes them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..lib.pipeline import next_slot
from .epilogue import scale_value


@gluon.constexpr_function
def sums_layout(COLUMNS, DEPTH):
    """wgmma accumulator [64, COLUMNS]; an instruction covers a quarter of a stage's depth."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH // 4])


@gluon.jit
def _slot_before(slot, STAGES: gl.constexpr):
    return gl.where(slot == 0, STAGES, slot) - 1


@gluon.jit
def _operands(ring, slot, PARTITION: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Operands of a stage: this consumer's rows of a, and COLUMNS columns of b from FIRST on.

    b is stored as [columns, depth], or with rank 3 as [1, depth, columns].
    """
    a = ring[0].index(slot).slice(PARTITION * 64, 64, 0)
    b = ring[1].index(slot)
    if b.rank == 3:
        b = b.reshape([b.shape[1], b.shape[2]]).slice(FIRST, COLUMNS, 1)
    else:
        b = b.slice(FIRST, COLUMNS, 0).permute((1, 0))
    return a, b


@gluon.constexpr_function
def _slice_layout(BYTES):
    """Layout of [rows, 32] values of `BYTES` bytes each, 16 bytes a thread."""
    return gl.BlockedLayout([1, 16 // BYTES], [16 // BYTES, 2 * BYTES], [4, 1], [1, 0])


@gluon.jit
def _clear_from(stage, first):
    """Clear slices of 32 values from slice `first` on; they belong to the next group."""
    BYTES: gl.constexpr = stage.dtype.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = _slice_layout(BYTES)
    ROWS: gl.constexpr = stage.shape[0]
    zeros = gl.zeros((ROWS, 32), gl.float32, LAYOUT).to(stage.dtype)
    for index in gl.static_range(1, stage.shape[1] // 32):
        if index >= first:
            stage.slice(index * 32, 32, 1).store(zeros)


@gluon.jit
def _await_stage(
    ring, slot, phase, left, DEPTH: gl.constexpr, PARTITION: gl.constexpr, WGRAD: gl.constexpr
):
    """Wait for a stage, of which the first `left` values belong to the group."""
    mbarrier.wait(ring[2].index(slot), phase)
    # Without WGRAD the tensor ends at `left`, and TMA fills the rest with zeros.
    if WGRAD and left < DEPTH:
        # Both consumers clear the shared operand b, each before its own wgmma; both write zeros.
        _clear_from(ring[0].index(slot).slice(PARTITION * 64, 64, 0), left // 32)
        _clear_from(ring[1].index(slot), left // 32)
        fence_async_shared()


@gluon.jit
def accumulate(
    ring,
    slot,
    phase,
    depth,
    DEPTH: gl.constexpr,
    COLUMNS: gl.constexpr,
    PARTITION: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
):
    """Sum [64, COLUMNS] in the wgmma accumulator; return it with the next stage and phase."""
    free = ring[3]
    total = gl.zeros((64, COLUMNS), gl.float32, sums_layout(COLUMNS, DEPTH))
    for k in range(0, depth, DEPTH):
        _await_stage(ring, slot, phase, depth - k, DEPTH, PARTITION, WGRAD)
        a, b = _operands(ring, slot, PARTITION, 0, COLUMNS)
        total = warpgroup_mma(a, b, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        if k > 0:
            mbarrier.arrive(free.index(_slot_before(slot, STAGES)), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    total = warpgroup_mma_wait(0, deps=(total,))
    if depth > 0:
        mbarrier.arrive(free.index(_slot_before(slot, STAGES)), count=1)
    return total, slot, phase


@gluon.jit
def accumulate_scaled(
    ring,
    slot,
    phase,
    depth,
    scales,
    HALVES: gl.constexpr,
    PARTITION: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
):
    """Sums of one or two halves [64, 128] of fp8 products, scaled every 128 values.

    Each row has one scale byte per 128 values, 4 bytes apart in memory.
    """
    free = ring[3]
    LAYOUT: gl.constexpr = sums_layout(128, 128)
    left = gl.zeros((64, 128), gl.float32, LAYOUT)
    right = left
    partial = left
    rows = gl.minimum(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), scales[4] - 1)
    scale_ptrs = scales[0] + rows * scales[2]
    byte = gl.load(scale_ptrs)
    for k in range(0, depth, 128):
        _await_stage(ring, slot, phase, depth - k, 128, PARTITION, WGRAD)
        a, b = _operands(ring, slot, PARTITION, 0, 128)
        # Pass the old partial sums as the unused addend: zeros would take more registers.
        partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
        scale = gl.expand_dims(scale_value(byte), 1)
        byte = gl.load(scale_ptrs + gl.minimum(k + 128, (depth - 1) // 128 * 128) // 32)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        left += partial * scale
        if HALVES == 2:
            a, b = _operands(ring, slot, PARTITION, 128, 128)
            partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
            partial = warpgroup_mma_wait(0, deps=(partial,))
        mbarrier.arrive(free.index(slot), count=1)
        if HALVES == 2:
            right += partial * scale
        slot, phase = next_slot(slot, phase, STAGES)
    return left, right, slot, phase


@gluon.jit
def accumulate_promoted(
    ring,
    slot,
    phase,
    depth,
    HALVES: gl.constexpr,
    PARTITION: gl.constexpr,
    STAGES: gl.constexpr,
    WGRAD: gl.constexpr,
):
    """Sums of one or two halves [64, 128] of fp8 products, promoted to float32 every two stages."""
    free = ring[3]
    left = gl.zeros((64, 128), gl.float32, sums_layout(128, 128))
    right = left
    partial = left
    stages = gl.cdiv(depth, 128)
    for pair in range(stages // 2):
        behind = depth - pair * 256
        after, after_phase = next_slot(slot, phase, STAGES)
        _await_stage(ring, slot, phase, behind, 128, PARTITION, WGRAD)
        a, b = _operands(ring, slot, PARTITION, 0, 128)
        partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
        _await_stage(ring, after, after_phase, behind - 128, 128, PARTITION, WGRAD)
        a, b = _operands(ring, after, PARTITION, 0, 128)
        partial = warpgroup_mma(a, b, partial, is_async=True)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        left += partial
        if HALVES == 2:
            a, b = _operands(ring, slot, PARTITION, 128, 128)
            partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
            a, b = _operands(ring, after, PARTITION, 128, 128)
            partial = warpgroup_mma(a, b, partial, is_async=True)
            partial = warpgroup_mma_wait(0, deps=(partial,))
        mbarrier.arrive(free.index(slot), count=1)
        mbarrier.arrive(free.index(after), count=1)
        if HALVES == 2:
            right += partial
        slot, phase = next_slot(after, after_phase, STAGES)
    if stages % 2 == 1:
        _await_stage(ring, slot, phase, (depth - 1) % 128 + 1, 128, PARTITION, WGRAD)
        a, b = _operands(ring, slot, PARTITION, 0, 128)
        partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        left += partial
        if HALVES == 2:
            a, b = _operands(ring, slot, PARTITION, 128, 128)
            partial = warpgroup_mma(a, b, partial, use_acc=False, is_async=True)
            partial = warpgroup_mma_wait(0, deps=(partial,))
            right += partial
        mbarrier.arrive(free.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    return left, right, slot, phase
