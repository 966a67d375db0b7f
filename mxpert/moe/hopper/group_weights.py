"""INT4 and MXFP8 weights in registers: loads, decoding, and main loops with a scale for each group.

The memory order is HOPPER_GROUPS of `group_layout.py`. A k32 step of wgmma lies in one group, since
K keeps its order. The float32 sum of a group is multiplied by the group's scale and added to the
accumulator. Codes are exact e4m3 numbers: those of MXFP8 as they are, an INT4 integer v as v / 256.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .weight_fragments import accumulator_layout, code_layout


def _zigzag_assembly() -> str:
    """PTX that turns 32 INT4 codes of a row to e4m3, 7 instructions per 8 codes.

    A code is 2v for an integer v from 0 and -2v - 1 below. Bytes 0 to 16 are the e4m3 numbers
    0 to 16 * 2^-9 in order, so 2v is v / 256 already. An odd code n becomes the byte n + 0x81: the
    sign, and -2v. Outputs and inputs as in `hopper_ptx.decode_words`: $0..$3 first halves, $4..$7
    second halves, $8..$11 packed words.
    """
    lines = ["{ .reg .b32 n, odd;"]
    for step in range(4):
        for half in range(2):
            target, word = f"${4 * half + step}", f"${8 + step}"
            if half:
                lines.append(f"shr.u32 n, {word}, 4;")
                word = "n"
            lines += [
                f"and.b32 odd, {word}, 0x01010101;",
                f"and.b32 n, {word}, 0x0F0F0F0F;",
                f"mad.lo.u32 {target}, odd, 0x81, n;",
            ]
    return "\n".join(lines) + " }"


_ZIGZAG_ASSEMBLY = gl.constexpr(_zigzag_assembly())
_ZIGZAG_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))


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
def _scale_values(scales):
    """Scales as float32; E8M0 bytes from 1 to 254, and 0 for padding."""
    if scales.dtype == gl.uint8:
        return (scales.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        return scales.to(gl.float32)


@gluon.jit
def load_scales(scales_smem, ACCUMULATOR: gl.constexpr):
    """The scales of a stage, one tensor [64] for each group, in the accumulator's row order."""
    GROUPS: gl.constexpr = scales_smem.shape[0]
    raw = _columns(scales_smem.load(_scale_layout(GROUPS)).permute((1, 0)))
    ROWS: gl.constexpr = gl.SliceLayout(1, ACCUMULATOR)
    result = ()
    for index in gl.static_range(GROUPS):
        rows = raw[index].reshape([4, 8, 2]).permute((0, 2, 1)).reshape([64])  # w g r to w r g
        rows = gl.convert_layout(rows, ROWS, assert_trivial=True)
        result += (rows,)  # type: ignore[assignment]
    return result


@gluon.jit
def _decode_integers(codes_smem):
    """INT4 codes of a unit as e4m3 [64 rows, 32 codes, 4 k32 steps]."""
    # Axes: r row half of a warp, w warp, g row of eight, t thread of a row, q k32 step, j byte,
    # h half of a step.
    codes = codes_smem.load(code_layout(1)).reshape([2, 4, 8, 4, 4, 4])  # r w g t q j
    first, second = gl.inline_asm_elementwise(
        _ZIGZAG_ASSEMBLY,
        _ZIGZAG_CONSTRAINTS,
        [codes],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=16,
    )
    weights = gl.join(first, second)  # r w g t q j h
    return weights.permute((1, 0, 2, 6, 3, 5, 4)).reshape([64, 32, 4])


@gluon.jit
def _load_bytes(codes_smem):
    """MXFP8 codes of a unit, e4m3 [64 rows, 32 codes, 4 k32 steps]."""
    codes = codes_smem.load(_byte_layout()).to(gl.float8e4nv, bitcast=True)
    codes = codes.reshape([2, 2, 4, 8, 4, 2, 2, 4])  # p r w g t q h j; k32 step 2 p + q
    return codes.permute((2, 1, 3, 6, 4, 7, 0, 5)).reshape([64, 32, 4])


@gluon.jit
def decode_steps(codes_smem, WEIGHTS: gl.constexpr, ACCUMULATOR: gl.constexpr):
    """A row unit × depth unit in shared memory as four register operands, e4m3 [64, 32]."""
    if WEIGHTS.is_integer:
        weights = _decode_integers(codes_smem)
    else:
        weights = _load_bytes(codes_smem)
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
def _multiply_group(
    weights,
    x,
    FIRST_STEP: gl.constexpr,
    STEPS: gl.constexpr,
    FIRST_CODE: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Issue the wgmma of one group: STEPS operands of `weights` from FIRST_STEP on.

    x: e4m3 [COLUMNS, K] in shared memory; the unit begins at FIRST_CODE.
    """
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4)
    sums = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
    for step in gl.static_range(FIRST_STEP, FIRST_STEP + STEPS):
        sums = warpgroup_mma(
            gl.convert_layout(weights[step], OPERAND, assert_trivial=True),
            x.slice(FIRST_CODE + 32 * step, 32, 1).permute((1, 0)),
            sums,
            use_acc=step > FIRST_STEP,
            is_async=True,
        )
    return sums


@gluon.jit
def accumulate_decode_groups(pipe, state, steps, PARTITION: gl.constexpr, COLUMNS: gl.constexpr):
    """As `mainloop.accumulate_decode`, with a scale for each group of a row."""
    WEIGHTS: gl.constexpr = pipe.WEIGHTS
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    CODE_ROWS: gl.constexpr = WEIGHTS.code_rows
    STEPS: gl.constexpr = WEIGHTS.group // 32
    GROUPS: gl.constexpr = WEIGHTS.groups
    accumulator = gl.zeros((64, COLUMNS), gl.float32, LAYOUT)
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        own = 2 * state.stage + PARTITION
        codes = pipe.codes.index(own).reshape([2 * CODE_ROWS, 128])
        scales = load_scales(pipe.shifts.index(own).reshape([2 * GROUPS, 64]), LAYOUT)
        x = pipe.x.index(state.stage).slice(0, COLUMNS, 0)
        for unit in gl.static_range(2):
            weights = decode_steps(codes.slice(CODE_ROWS * unit, CODE_ROWS, 0), WEIGHTS, LAYOUT)
            for group in gl.static_range(GROUPS):
                sums = _multiply_group(weights, x, group * STEPS, STEPS, 128 * unit, COLUMNS)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                accumulator += sums * _scale_values(scales[unit * GROUPS + group])[:, None]
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

    LEFT, RIGHT: columns of both groups of a tile; 0 if there is no right one.
    """
    WEIGHTS: gl.constexpr = pipe.WEIGHTS
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32  # unused without a right group
    LAYOUT: gl.constexpr = accumulator_layout(LEFT)
    RIGHT_LAYOUT: gl.constexpr = accumulator_layout(WIDTH)
    ROWS_OF_RIGHT: gl.constexpr = gl.SliceLayout(1, RIGHT_LAYOUT)
    RIGHT_AT: gl.constexpr = pipe.BLOCKS * pipe.BLOCK_M if pipe.HI_LO else LEFT
    AT_ONCE: gl.constexpr = _holds_both(LEFT, RIGHT, pipe.CONSUMERS)
    CODE_ROWS: gl.constexpr = WEIGHTS.code_rows
    STEPS: gl.constexpr = WEIGHTS.group // 32
    GROUPS: gl.constexpr = WEIGHTS.groups
    left = gl.zeros((64, LEFT), gl.float32, LAYOUT)
    right = gl.zeros((64, WIDTH), gl.float32, RIGHT_LAYOUT)
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        for unit in range(2):  # no static loop: registers do not hold both units' weights
            own = 2 * (state.stage * pipe.CONSUMERS + PARTITION) + unit
            half = 2 * state.stage + unit
            scales = load_scales(pipe.shifts.index(own).reshape([GROUPS, 64]), LAYOUT)
            weights = decode_steps(pipe.codes.index(own).reshape([CODE_ROWS, 128]), WEIGHTS, LAYOUT)
            for group in gl.static_range(GROUPS):
                scale = _scale_values(scales[group])
                x = pipe.x.view(half, 0, LEFT)
                sums = _multiply_group(weights, x, group * STEPS, STEPS, 0, LEFT)
                if AT_ONCE:
                    other = pipe.x.view(half, RIGHT_AT, RIGHT)
                    more = _multiply_group(weights, other, group * STEPS, STEPS, 0, RIGHT)
                    sums, more = warpgroup_mma_wait(0, deps=(sums, more))
                else:
                    sums = warpgroup_mma_wait(0, deps=(sums,))
                left += sums * scale[:, None]
                if RIGHT > 0:
                    if not AT_ONCE:
                        other = pipe.x.view(half, RIGHT_AT, RIGHT)
                        more = _multiply_group(weights, other, group * STEPS, STEPS, 0, RIGHT)
                        more = warpgroup_mma_wait(0, deps=(more,))
                    of_right = gl.convert_layout(scale, ROWS_OF_RIGHT, assert_trivial=True)
                    right += more * of_right[:, None]
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        state = state.advance()
    return left, right, state
