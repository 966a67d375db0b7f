"""Main loop of a consumer of the grouped GEMM: wgmma, scaling, and promotion to float32.

The tensor core adds fp8 products with about 14 bits. Sums that are promoted are added in float32
from there on. `SUMS` names where the sums of a tile [64, 128 or 256] are kept:

IN_TENSOR_CORE: in the wgmma accumulator, all columns at once. One wgmma stays in flight, so the
    stage before the current one is released.
PROMOTED: in float32 registers, two halves of 128 columns. The products of two stages are summed in
    one wgmma accumulator, first for the left half and then, in the same registers, for the right.
SCALED: as PROMOTED after every stage; the products are multiplied by the rows' scales first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..device.compat import aggregate
from .hopper_epilogue import HALF_COLUMNS, scale_value
from .hopper_pipeline import CONSUMER_ROWS
from .hopper_scheduler import MX_BLOCK

IN_TENSOR_CORE = gl.constexpr("in_tensor_core")
PROMOTED = gl.constexpr("promoted")
SCALED = gl.constexpr("scaled")


@gluon.constexpr_function
def sums_layout(COLUMNS, DEPTH):
    """Wgmma accumulator [64, COLUMNS]; an instruction covers a quarter of a stage's depth."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEPTH // 4])


@aggregate
class MainLoop:
    """Compile-time choices of a main loop.

    SUMS, WGRAD: as in the kernel. CONSUMER (0, 1): which rows of the tile. HALVES (1, 2): width of
    the tile in 128 columns. DEPTH: values of a stage.
    """

    SUMS: gl.constexpr
    WGRAD: gl.constexpr
    CONSUMER: gl.constexpr
    HALVES: gl.constexpr
    DEPTH: gl.constexpr


@aggregate
class Sums:
    """Sums of a tile while they are computed, float32.

    left, right: [64, 128]; IN_TENSOR_CORE has all columns in `left`, and `right` is not used.
    partial: [64, 128] products of the latest step. scale_bytes: [64] uint8, the rows' scales in the
    next stage if SCALED, else None.
    """

    left: gl.tensor
    right: gl.tensor
    partial: gl.tensor
    scale_bytes: gl.tensor | gl.constexpr


@gluon.jit
def _multiply(
    pipe, state, sums, loop, FIRST: gl.constexpr, COLUMNS: gl.constexpr, USE_ACC: gl.constexpr
):
    """Start the wgmma of a stage into sums [64, COLUMNS], for the columns from FIRST on."""
    a, b = pipe.operands(state, CONSUMER=loop.CONSUMER, FIRST=FIRST, COLUMNS=COLUMNS)
    return warpgroup_mma(a, b, sums, use_acc=USE_ACC, is_async=True)


@gluon.jit
def _multiply_half(pipe, state, sums, loop, HALF: gl.constexpr, USE_ACC: gl.constexpr):
    """Start the wgmma of a stage into sums [64, 128] of the left (0) or right (1) half."""
    return _multiply(
        pipe, state, sums, loop, FIRST=HALF * HALF_COLUMNS, COLUMNS=HALF_COLUMNS, USE_ACC=USE_ACC
    )


@gluon.jit
def _release_previous(pipe, state):
    """Release the stage before `state`'s."""
    pipe.release(gl.where(state.stage == 0, state.STAGES, state.stage) - 1)


@gluon.jit
def _step_in_tensor_core(pipe, state, sums, k, depth, loop):
    """Multiply the stage that starts at value k; return the sums and the next pipeline state."""
    COLUMNS: gl.constexpr = loop.HALVES * HALF_COLUMNS
    pipe.wait(state, depth - k, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
    total = _multiply(pipe, state, sums.left, loop, FIRST=0, COLUMNS=COLUMNS, USE_ACC=True)
    total = warpgroup_mma_wait(1, deps=(total,))  # the previous stage's wgmma has ended
    if k > 0:
        _release_previous(pipe, state)
    return Sums(total, sums.right, sums.partial, sums.scale_bytes), state.advance()


@gluon.jit
def _step_promoted(pipe, state, sums, scale_ptrs, k, depth, loop, STAGES: gl.constexpr):
    """Multiply STAGES (1, 2) stages from value k on, and add their sums in float32.

    The first wgmma of a half does not add its accumulator, which holds the old partial sums: zeros
    in their place would take more registers.
    """
    left = sums.left
    right = sums.right
    scale_bytes = sums.scale_bytes
    last = state
    if STAGES == 2:
        last = state.advance()
    pipe.wait(state, depth - k, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
    partial = _multiply_half(pipe, state, sums.partial, loop, HALF=0, USE_ACC=False)
    if STAGES == 2:
        pipe.wait(last, depth - k - loop.DEPTH, CONSUMER=loop.CONSUMER, WGRAD=loop.WGRAD)
        partial = _multiply_half(pipe, last, partial, loop, HALF=0, USE_ACC=True)
    if loop.SUMS == SCALED:  # while wgmma runs: convert this stage's scales, load the next ones
        scale = gl.expand_dims(scale_value(scale_bytes), 1)
        last_k = (depth - 1) // loop.DEPTH * loop.DEPTH
        scale_bytes = gl.load(scale_ptrs + gl.minimum(k + loop.DEPTH, last_k) // MX_BLOCK)
    partial = warpgroup_mma_wait(0, deps=(partial,))
    left += partial * scale if loop.SUMS == SCALED else partial
    if loop.HALVES == 2:
        partial = _multiply_half(pipe, state, partial, loop, HALF=1, USE_ACC=False)
        if STAGES == 2:
            partial = _multiply_half(pipe, last, partial, loop, HALF=1, USE_ACC=True)
        partial = warpgroup_mma_wait(0, deps=(partial,))
    pipe.release(state.stage)
    if STAGES == 2:
        pipe.release(last.stage)
    if loop.HALVES == 2:  # after the release: the producer need not wait for these additions
        right += partial * scale if loop.SUMS == SCALED else partial
    return Sums(left, right, partial, scale_bytes), last.advance()


@gluon.jit
def _start_sums(scale_ptrs, loop):
    """Zeros, and the scales of the first stage."""
    KEPT: gl.constexpr = loop.SUMS == IN_TENSOR_CORE
    COLUMNS: gl.constexpr = loop.HALVES * HALF_COLUMNS if KEPT else HALF_COLUMNS
    zeros = gl.zeros((CONSUMER_ROWS, COLUMNS), gl.float32, sums_layout(COLUMNS, loop.DEPTH))
    return Sums(zeros, zeros, zeros, gl.load(scale_ptrs) if loop.SUMS == SCALED else None)


@gluon.jit
def _halves(total, LAYOUT: gl.constexpr):
    """Split sums [64, 256] into two of [64, 128]; every thread keeps its registers."""
    left, right = total.reshape([64, 2, 128]).permute((0, 2, 1)).split()
    return (
        gl.convert_layout(left, LAYOUT, assert_trivial=True),
        gl.convert_layout(right, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def accumulate(pipe, state, depth, scales, loop):
    """Sum the products of a tile over `depth` values.

    scales: the tile's `TileScales`, used if SCALED. Returns the left and the right half of the sums
    [64, 128] (twice the left half if HALVES is 1), and the pipeline state after the tile.
    """
    gl.static_assert(loop.DEPTH == 128 or loop.SUMS == IN_TENSOR_CORE, "only fp8 is promoted")
    HALF: gl.constexpr = sums_layout(HALF_COLUMNS, loop.DEPTH)
    STAGES: gl.constexpr = 2 if loop.SUMS == PROMOTED else 1  # stages a step
    scale_ptrs = None
    if loop.SUMS == SCALED:
        scale_ptrs = scales.row_pointers(HALF)
    sums = _start_sums(scale_ptrs, loop)
    end = depth
    if STAGES == 2:  # an odd last stage has a step of its own
        end = gl.cdiv(depth, loop.DEPTH) // STAGES * (STAGES * loop.DEPTH)
    for k in range(0, end, STAGES * loop.DEPTH):
        if loop.SUMS == IN_TENSOR_CORE:
            sums, state = _step_in_tensor_core(pipe, state, sums, k, depth, loop)
        else:
            sums, state = _step_promoted(pipe, state, sums, scale_ptrs, k, depth, loop, STAGES)
    if STAGES == 2 and end < depth:
        sums, state = _step_promoted(pipe, state, sums, scale_ptrs, end, depth, loop, STAGES=1)
    left = sums.left
    right = sums.right
    if loop.SUMS == IN_TENSOR_CORE:
        left = warpgroup_mma_wait(0, deps=(left,))
        if depth > 0:
            _release_previous(pipe, state)
        right = left
        if loop.HALVES == 2:
            left, right = _halves(left, HALF)
    return left, right, state
