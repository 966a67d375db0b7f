"""The main loop of the prefill kernel with rows of 16 bits, bfloat16 or float16.

A code times the scale of its group is exact in 16 bits. The scale is therefore multiplied in
registers, and no sum of a group leaves the tensor cores.

- NVFP4: such a product has at most six significant bits and lies between 2^-10 and 2688. It is a
  float16 number, and so are the rows.
- INT4 in HOPPER_GROUPS_FLOAT16: a bfloat16 scale has eight bits, an integer of -8 to 7 three. The
  product is a float16 number.
- MXFP8: scales are powers of two of a wider range, and rows are bfloat16.
- MXFP4: a code times its block's power of two, which is at most 14 binades below the row's, is a
  float16 number (`weight_fragments.decode_float16_weights`).

The memory order is HOPPER_FRAGMENT for MXFP4, else HOPPER_GROUPS. Thread t of a row has the codes
4 t + j of 16 in a word there; wgmma of 16 bits wants 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in its
place, so rows are stored in that order (`encode`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.hopper_ptx import (
    bfloat16_bytes,
    float16_nibbles,
    float16_pairs,
    float16_pairs_of_e4m3,
)
from .group_layout import FLOAT16_EXPONENT
from .group_weights import load_scales
from .weight_fragments import accumulator_layout, code_layout, decode_float16_weights

_BYTE_SCALE = gl.constexpr(2.0**-8)
"""Factor of MXFP8 operands, so that 448 times the largest scale is a bfloat16 number. They are
exact from scales of 2^-116 on; below, the error of a weight is at most 2^-126."""

_FLOAT16_SCALE = gl.constexpr(2.0**FLOAT16_EXPONENT)
"""Factor of INT4 operands, which float16 then holds (`HOPPER_GROUPS_FLOAT16`)."""


@gluon.jit
def _pairs_of_halves(scales, LAYOUT: gl.constexpr):
    """Scales of groups of 16 [8, 64 rows] of a unit, as four tensors [r, w, g, 1, q, 1].

    Of the first and the second halves of k32 steps: those of the unit's first half, then of its
    second half. LAYOUT: of the codes [r, w, g, t, q, j] of half a unit.
    """
    OF_ROWS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, LAYOUT))
    rows = scales.reshape([2, 2, 2, 4, 8, 2])  # half q h w g r
    firsts, seconds = rows.permute((5, 3, 4, 1, 0, 2)).split()
    first_0, first_1 = firsts.split()
    second_0, second_1 = seconds.split()
    return (
        _beside_codes(first_0, OF_ROWS),
        _beside_codes(second_0, OF_ROWS),
        _beside_codes(first_1, OF_ROWS),
        _beside_codes(second_1, OF_ROWS),
    )


@gluon.jit
def _of_halves(scales, LAYOUT: gl.constexpr):
    """Scales of groups of 32 [4, 64 rows] of a unit, as one tensor for each half; see above."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, LAYOUT))
    half_0, half_1 = scales.reshape([2, 2, 4, 8, 2]).permute((4, 2, 3, 1, 0)).split()
    return _beside_codes(half_0, OF_ROWS), _beside_codes(half_1, OF_ROWS)


@gluon.jit
def _of_long_groups(scales, LAYOUT: gl.constexpr):
    """Scales of groups of 64 or 128 [2 or 1, 64 rows] of a unit, as one tensor for each half."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, LAYOUT))
    GROUPS: gl.constexpr = scales.shape[0]
    rows = scales.reshape([GROUPS, 4, 8, 2]).permute((3, 1, 2, 0))  # r w g half
    if GROUPS == 1:
        both = _beside_codes(rows, OF_ROWS)
        return both, both
    else:
        half_0, half_1 = rows.split()
        return (
            _beside_codes(gl.expand_dims(half_0, 3), OF_ROWS),
            _beside_codes(gl.expand_dims(half_1, 3), OF_ROWS),
        )


@gluon.jit
def _beside_codes(values, OF_ROWS: gl.constexpr):
    """Values [r, w, g, q] beside codes [r, w, g, t, q, j]: the threads of a row have the same."""
    values = gl.convert_layout(values, OF_ROWS, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(values, 3), 5)


@gluon.jit
def _as_operand(values, LAYOUT: gl.constexpr):
    """Values [r, w, g, t, q, h, j] of half a unit as operand A, [64 rows, 64 codes]."""
    split = values.reshape([2, 4, 8, 4, 2, 2, 2, 2])  # r w g t q h, and j as pair and place
    rows = split.permute((1, 0, 2, 4, 5, 6, 3, 7)).reshape([64, 64])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _joined_operand(first, second, LAYOUT: gl.constexpr):
    """An operand from the first and second halves of k32 steps, [r, w, g, t, q, j] each."""
    return _as_operand(gl.join(first, second).permute((0, 1, 2, 3, 4, 6, 5)), LAYOUT)


@gluon.jit
def _load_nibbles(codes_smem):
    """Bytes of two 4-bit codes of both halves of a unit, uint8 [r, w, g, t, q, j] each."""
    codes = codes_smem.load(code_layout(1)).reshape([2, 4, 8, 4, 2, 2, 4])  # r w g t half q j
    return codes.permute((0, 1, 2, 3, 5, 6, 4)).split()


@gluon.jit
def _nibble_halves(codes_smem, scales, CODES: gl.constexpr, LAYOUT: gl.constexpr):
    """Codes of a unit times their scales as two operands of float16.

    Of NVFP4 over 2^6, of INT4 times _FLOAT16_SCALE.
    """
    codes_0, codes_1 = _load_nibbles(codes_smem)
    OF_CODES: gl.constexpr = codes_0.type.layout
    if CODES == "e2m1":
        pairs = float16_pairs_of_e4m3(scales)
        lows_0, highs_0, lows_1, highs_1 = _pairs_of_halves(pairs, OF_CODES)
    else:
        pairs = float16_pairs(scales, 2**8 * _FLOAT16_SCALE)
        if scales.shape[0] == 4:
            lows_0, lows_1 = _of_halves(pairs, OF_CODES)
        else:
            lows_0, lows_1 = _of_long_groups(pairs, OF_CODES)
        highs_0, highs_1 = lows_0, lows_1
    first, second = float16_nibbles(codes_0, lows_0, highs_0, CODES)
    operand_0 = _joined_operand(first, second, LAYOUT)
    first, second = float16_nibbles(codes_1, lows_1, highs_1, CODES)
    return operand_0, _joined_operand(first, second, LAYOUT)


@gluon.jit
def _load_half(codes_smem, HALF: gl.constexpr):
    """MXFP8 codes of half a unit, uint8 [r, w, g, t, q, h, j]."""
    codes = codes_smem.slice(32 * HALF, 32, 0).load(code_layout(1))
    return codes.reshape([2, 4, 8, 4, 2, 2, 4])


@gluon.jit
def _byte_halves(codes_smem, scales, LAYOUT: gl.constexpr):
    """MXFP8 codes of a unit, times their scales and _BYTE_SCALE, as two operands."""
    codes_0 = _load_half(codes_smem, 0)
    codes_1 = _load_half(codes_smem, 1)
    powers = (scales.to(gl.int32) << 23).to(gl.float32, bitcast=True) * _BYTE_SCALE
    OF_CODES: gl.constexpr = gl.SliceLayout(5, codes_0.type.layout)
    powers_0, powers_1 = _of_halves(powers, OF_CODES)
    first = bfloat16_bytes(codes_0, gl.expand_dims(powers_0, 5))
    second = bfloat16_bytes(codes_1, gl.expand_dims(powers_1, 5))
    return _as_operand(first, LAYOUT), _as_operand(second, LAYOUT)


@gluon.jit
def _decode_halves(pipe, own, tables, LAYOUT: gl.constexpr):
    """A unit as two operands of 64 codes, times their scales and over `_left_out`."""
    WEIGHTS: gl.constexpr = pipe.WEIGHTS
    if WEIGHTS is None:
        return decode_float16_weights(pipe.codes.index(own), pipe.shifts.index(own), tables, LAYOUT)
    else:
        CODES: gl.constexpr = WEIGHTS.codes
        codes = pipe.codes.index(own).reshape([WEIGHTS.code_rows, 128])
        scales = load_scales(pipe.shifts.index(own).reshape([WEIGHTS.groups, 64]))
        if CODES == "e4m3":
            return _byte_halves(codes, scales, LAYOUT)
        else:
            return _nibble_halves(codes, scales, CODES, LAYOUT)


@gluon.constexpr_function
def _left_out(WEIGHTS):
    """Factor of the sums that operands leave out, beside 2^exponent of the rows' reference."""
    if WEIGHTS is None:
        return 1.0
    if WEIGHTS.codes == "int4":
        return 2.0**-WEIGHTS.exponent / _FLOAT16_SCALE.value
    return 1.0 if WEIGHTS.codes == "e2m1" else 1 / _BYTE_SCALE.value


@gluon.jit
def _multiply(weights, x, sums, COLUMNS: gl.constexpr):
    """Issue the wgmma of weights [64, 64 codes] with rows of x [COLUMNS, 64]."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(COLUMNS, DEPTH=16), 2)
    return warpgroup_mma(
        gl.convert_layout(weights, OPERAND, assert_trivial=True),
        x.permute((1, 0)),
        sums,
        is_async=True,
    )


@gluon.jit
def accumulate_16_bits(
    pipe, tables, state, steps, PARTITION: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """As `mainloop.accumulate_prefill`, with rows of 16 bits and one depth unit a stage.

    LEFT, RIGHT: columns of both groups of a tile; 0 if there is no right one. The wgmma of a unit's
    first half run while its second half is decoded, and while the other consumers decode.
    """
    UNIT: gl.constexpr = _left_out(pipe.WEIGHTS)
    WIDTH: gl.constexpr = RIGHT if RIGHT > 0 else 32  # unused without a right group
    LAYOUT: gl.constexpr = accumulator_layout(LEFT, DEPTH=16)
    left = gl.zeros((64, LEFT), gl.float32, LAYOUT)
    right = gl.zeros((64, WIDTH), gl.float32, accumulator_layout(WIDTH, DEPTH=16))
    for _ in range(steps):
        mbarrier.wait(pipe.ready.index(state.stage), state.phase)
        own = state.stage * pipe.CONSUMERS + PARTITION
        halves = _decode_halves(pipe, own, tables, LAYOUT)
        for half in gl.static_range(2):
            rows = 2 * state.stage + half
            left = _multiply(halves[half], pipe.x.view(rows, 0, LEFT), left, LEFT)
            if RIGHT > 0:
                other = pipe.x.view(rows, LEFT, RIGHT)
                right = _multiply(halves[half], other, right, RIGHT)
        if RIGHT > 0:
            left, right = warpgroup_mma_wait(0, deps=(left, right))
        else:
            left = warpgroup_mma_wait(0, deps=(left,))
        mbarrier.arrive(pipe.free.index(state.stage), count=1)
        state = state.advance()
    return left * UNIT, right * UNIT, state
