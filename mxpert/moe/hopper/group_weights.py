"""INT4, NVFP4 and MXFP8 weights in registers, and main loops with a scale for each group.

The memory order is HOPPER_GROUPS of `group_layout.py`. A k32 step of wgmma lies in one group, since
K keeps its order; for groups of 16 it is multiplied twice, once with each half of the weights
replaced by zeros. The float32 sum of a group is multiplied by the group's scale and added to the
accumulator. Codes are exact e4m3 numbers, times a power of two (`GroupWeights.exponent`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.hopper_ptx import decode_nibbles
from .mainloop import num_columns
from .weight_fragments import accumulator_layout, code_layout, join_hi_lo


@gluon.constexpr_function
def _byte_layout():
    """e4m3 codes [64, 128] of a row unit and depth unit; a 16-byte load is two k32 steps' own."""
    flat = [1, 2, 4, 8, 2048, 4096], [16, 32, 64, 128, 256], [512, 1024]
    bases = [[[0, bit] if bit < 128 else [bit // 128, 0] for bit in bits] for bits in flat]
    return gl.DistributedLinearLayout(bases[0], bases[1], bases[2], [], [64, 128])


@gluon.constexpr_function
def _scale_layout(GROUPS):
    """Scales [GROUPS, 64 rows]: a thread holds those of its two rows."""
    registers = [[0, 1], *[[1 << bit, 0] for bit in range(GROUPS.bit_length() - 1)]]
    lanes = [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16], [0, 32]], [], [GROUPS, 64])


@gluon.jit
def _columns(values):
    """The columns of [64, …], a power of two of them, as a tuple of [64]."""
    COUNT: gl.constexpr = values.shape[1]
    if COUNT == 1:
        return (values.reshape([64]),)
    else:
        even, odd = values.reshape([64, COUNT // 2, 2]).split()
        evens = _columns(even)
        odds = _columns(odd)
        columns = ()
        for index in gl.static_range(COUNT // 2):
            columns += (evens[index], odds[index])
        return columns


@gluon.jit
def _scale_values(scales, WEIGHTS: gl.constexpr):
    """Scales as float32: INT4's, e4m3 bytes of NVFP4, E8M0 bytes (1 to 254, or 0) of MXFP8."""
    if WEIGHTS.codes == "int4_zero":
        return (scales & -8192).to(gl.float32, bitcast=True)
    elif WEIGHTS.codes == "e2m1":
        return scales.to(gl.float8e4nv, bitcast=True).to(gl.float32)
    elif WEIGHTS.codes == "e4m3":
        return (scales.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        return scales.to(gl.float32)


@gluon.jit
def load_scales(scales_smem):
    """The scales of depth units, [groups, 64 rows]."""
    return scales_smem.load(_scale_layout(scales_smem.shape[0]))


@gluon.jit
def _of_group(scales, group, WEIGHTS: gl.constexpr, ACCUMULATOR: gl.constexpr):
    """The scale of one of `_columns`, float32 [64] in the accumulator's row order."""
    rows = scales[group].reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])  # w g r to w r g
    rows = gl.convert_layout(rows, gl.SliceLayout(1, ACCUMULATOR), assert_trivial=True)
    return _scale_values(rows, WEIGHTS)


@gluon.constexpr_function
def _groups_of_steps(WEIGHTS):
    """Groups of a unit that whole k32 steps have."""
    return min(4, WEIGHTS.groups)


@gluon.constexpr_function
def _words_at_once(WEIGHTS):
    """Words of a row that are decoded together: those with one zero point, or all."""
    return 4 // WEIGHTS.groups if WEIGHTS.codes == "int4_zero" else 4


@gluon.jit
def _load_nibbles(codes_smem, scales, WEIGHTS: gl.constexpr):
    """4-bit codes of a unit as e4m3, first and second halves of steps: [2, 4, 8, 4, groups, …].

    scales: of the unit, [groups, 64]; with zero points their words have them.
    """
    # Axes: r row half of a warp, w warp, g row of eight, t thread of a row, p group, q k32 step,
    # j byte.
    GROUPS: gl.constexpr = _groups_of_steps(WEIGHTS)
    WORDS: gl.constexpr = _words_at_once(WEIGHTS)
    CODES: gl.constexpr = WEIGHTS.codes
    codes = codes_smem.load(code_layout(1)).reshape([2, 4, 8, 4, GROUPS, 4 // GROUPS, 4])
    if WEIGHTS.codes == "int4_zero":
        NESTED: gl.constexpr = codes.type.layout
        OF_ROWS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, gl.SliceLayout(6, NESTED)))
        zeros = (scales & 255).reshape([GROUPS, 4, 8, 2]).permute((3, 1, 2, 0))  # r w g p
        zeros = gl.convert_layout(zeros, OF_ROWS, assert_trivial=True)
        zeros = gl.expand_dims(gl.expand_dims(gl.expand_dims(zeros, 3), 5), 6)
        return decode_nibbles(codes, zeros, CODES, WORDS)
    else:
        return decode_nibbles(codes, None, CODES, WORDS)


@gluon.jit
def _join_halves(first, second):
    """Halves of steps as e4m3 [64 rows, 32 codes, 4 k32 steps]."""
    weights = gl.join(first, second).reshape([2, 4, 8, 4, 4, 4, 2])  # r w g t q j h
    return weights.permute((1, 0, 2, 6, 3, 5, 4)).reshape([64, 32, 4])


@gluon.jit
def _load_bytes(codes_smem):
    """MXFP8 codes of a unit, e4m3 [64 rows, 32 codes, 4 k32 steps]."""
    codes = codes_smem.load(_byte_layout()).to(gl.float8e4nv, bitcast=True)
    codes = codes.reshape([2, 2, 4, 8, 4, 2, 2, 4])  # p r w g t q h j; k32 step 2 p + q
    return codes.permute((2, 1, 3, 6, 4, 7, 0, 5)).reshape([64, 32, 4])


@gluon.jit
def _steps_of(weights, ACCUMULATOR: gl.constexpr):
    """Four register operands [64, 32] of weights [64, 32, 4]."""
    even, odd = weights.reshape([64, 32, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACCUMULATOR, 4)
    return (
        gl.convert_layout(first, OPERAND, assert_trivial=True),
        gl.convert_layout(second, OPERAND, assert_trivial=True),
        gl.convert_layout(third, OPERAND, assert_trivial=True),
        gl.convert_layout(fourth, OPERAND, assert_trivial=True),
    )


@gluon.jit
def decode_steps(codes_smem, scales, WEIGHTS: gl.constexpr, ACCUMULATOR: gl.constexpr):
    """A row unit × depth unit in shared memory as register operands, e4m3 [64, 32], in order of K.

    Four operands; with groups of 16 two for each k32 step, one half of each zeros.
    """
    if WEIGHTS.codes == "e4m3":
        return _steps_of(_load_bytes(codes_smem), ACCUMULATOR)
    else:
        first, second = _load_nibbles(codes_smem, scales, WEIGHTS)
        if WEIGHTS.group < 32:
            nothing = gl.zeros_like(first)
            firsts = _steps_of(_join_halves(first, nothing), ACCUMULATOR)
            seconds = _steps_of(_join_halves(nothing, second), ACCUMULATOR)
            operands = ()
            for step in gl.static_range(4):
                operands += (firsts[step], seconds[step])  # type: ignore[assignment]
            return operands
        else:
            return _steps_of(_join_halves(first, second), ACCUMULATOR)


@gluon.jit
def _multiply_group(
    weights, x, GROUP: gl.constexpr, SIZE: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr
):
    """Issue the wgmma of group number GROUP of SIZE codes of a unit's operands.

    x: e4m3 [COLUMNS, K] in shared memory; the unit begins at code FIRST.
    """
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    STEPS: gl.constexpr = max(1, SIZE // 32)
    sums = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
    for step in gl.static_range(STEPS):
        sums = warpgroup_mma(
            gl.convert_layout(weights[GROUP * STEPS + step], OPERAND, assert_trivial=True),
            x.slice(FIRST + GROUP * SIZE // 32 * 32 + 32 * step, 32, 1).permute((1, 0)),
            sums,
            use_acc=step > 0,
            is_async=True,
        )
    return sums


@gluon.jit
def accumulate_decode_groups(pipe, state, steps, PARTITION: gl.constexpr, COLUMNS: gl.constexpr):
    """As `mainloop.accumulate_decode`, with a scale for each group of a row."""
    WEIGHTS: gl.constexpr = pipe.WEIGHTS
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    CODE_ROWS: gl.constexpr = WEIGHTS.code_rows
    GROUPS: gl.constexpr = WEIGHTS.groups
    accumulator = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        own = 2 * state.stage + PARTITION
        codes = pipe.codes.index(own).reshape([2 * CODE_ROWS, 128])
        both = load_scales(pipe.shifts.index(own).reshape([2 * GROUPS, 64]))
        scales = both.reshape([2, GROUPS, 64]).permute((1, 2, 0)).split()  # of each unit
        x = pipe.x.index(state.stage).slice(0, COLUMNS, 0)
        for unit in gl.static_range(2):
            own_codes = codes.slice(CODE_ROWS * unit, CODE_ROWS, 0)
            weights = decode_steps(own_codes, scales[unit], WEIGHTS, LAYOUT)
            columns = _columns(scales[unit].permute((1, 0)))
            for group in gl.static_range(GROUPS):
                sums = _multiply_group(weights, x, group, WEIGHTS.group, 128 * unit, COLUMNS)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                accumulator += sums * _of_group(columns, group, WEIGHTS, LAYOUT)[:, None]
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        state = state.advance()
    return accumulator, state


@gluon.constexpr_function
def _holds_both(LEFT, RIGHT, CONSUMERS):
    """Whether registers hold the sums of both groups of columns beside the accumulators."""
    return RIGHT > 0 and (128 if CONSUMERS == 2 else 64) >= LEFT + RIGHT


@gluon.jit
def accumulate_prefill_groups(
    pipe, state, steps, PARTITION: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """As `mainloop.accumulate_prefill`, with a scale for each group of a row, and without an order.

    LEFT, RIGHT: rows of both groups of a tile; 0 if there is no right one.
    """
    WEIGHTS: gl.constexpr = pipe.WEIGHTS
    HI_LO: gl.constexpr = pipe.HI_LO
    COLUMNS: gl.constexpr = num_columns(LEFT, HI_LO)
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32  # unused without a right group
    LAYOUT: gl.constexpr = accumulator_layout(LEFT)
    RIGHT_LAYOUT: gl.constexpr = accumulator_layout(WIDTH)
    AT_ONCE: gl.constexpr = _holds_both(LEFT, RIGHT, pipe.CONSUMERS)
    CODE_ROWS: gl.constexpr = WEIGHTS.code_rows
    GROUPS: gl.constexpr = WEIGHTS.groups
    SIZE: gl.constexpr = WEIGHTS.group
    left = gl.zeros((64, LEFT), gl.float32, LAYOUT)
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        for unit in range(2):  # no static loop: registers do not hold both units' weights
            own = 2 * (state.stage * pipe.CONSUMERS + PARTITION) + unit
            half = 2 * state.stage + unit
            scales = load_scales(pipe.shifts.index(own).reshape([GROUPS, 64]))
            codes = pipe.codes.index(own).reshape([CODE_ROWS, 128])
            weights = decode_steps(codes, scales, WEIGHTS, accumulator_layout(COLUMNS))
            columns = _columns(scales.permute((1, 0)))
            for group in gl.static_range(GROUPS):
                x = pipe.x.view(half, 0, COLUMNS)
                sums = _multiply_group(weights, x, group, SIZE, 0, COLUMNS)
                if AT_ONCE:
                    other = pipe.x.view(half, LEFT, RIGHT)
                    more = _multiply_group(weights, other, group, SIZE, 0, RIGHT)
                    sums, more = warpgroup_mma_wait(0, deps=(sums, more))
                else:
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                if HI_LO:
                    sums = join_hi_lo(sums, pipe.BLOCK_M)
                left += sums * _of_group(columns, group, WEIGHTS, LAYOUT)[:, None]
                if RIGHT > 0:
                    if not AT_ONCE:
                        other = pipe.x.view(half, LEFT, RIGHT)
                        more = _multiply_group(weights, other, group, SIZE, 0, RIGHT)
                        more = warpgroup_mma_wait(0, deps=(more,))
                    right += more * _of_group(columns, group, WEIGHTS, RIGHT_LAYOUT)[:, None]
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        state = state.advance()
    return left, right, state
