"""How operands of the grouped GEMMs lie in memory.

Rows of codes are whole lines of 128 bytes apart, so that a step of the reduction reads whole lines.
Scales lie in planes: plane j holds a byte for each row, the scale of its block j of 32 values. An
`MXTensor` describes both by its strides, so every backend can read it. Scales in another order are
copied to planes by a launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..core.launch import CACHED_LAUNCHES, Launch
from ..formats.spec import MX_BLOCK_SIZE, MXFormat
from ..formats.tensor import MXTensor
from .cdna4 import decode_e2m1, decode_e4m3

# ---- Register and LDS layouts of the GEMMs whose weights come in fragment order.
#
# A workgroup has SLICES * WAVES waves. WAVES of them have weight rows of their own, 64 each; SLICES
# of them share rows and have units of depth of their own. A step is SLICES units of 128 elements of
# depth. MFMA multiplies weight fragments (operand A) by activation fragments (operand B), both
# batched over slices:
#
#     codes    [SLICES, 4 * WAVES, 64, 16] uint8, as loaded: fragment, lane, byte; or four
#     uint32. e4m3: [SLICES, 8 * WAVES, 64, 16], halves of fragments
#     scales   [SLICES, WAVES, 64] uint32, as loaded: unit of 64 rows, lane; a byte per
#     fragment. e4m3 that is decoded: [SLICES, 2 * WAVES, 64], those of both halves
#     x        [SLICES * chunks, ROWS, 16 bytes] in LDS: 16-byte chunks of depth, activation
#     rows
#     x_scales [SLICES, ROWS, STEPS] uint32 in LDS: a byte per MX block of a unit of depth
#     sums     [SLICES, 64 * WAVES, ROWS] float32
#
# Each function that starts with `as_` renames elements of registers; it moves no data.

STEPS = gl.constexpr(4)
"""Steps of an iteration."""

_ONE = gl.constexpr(127)
"""The E8M0 byte of 1."""


@gluon.constexpr_function
def chunks_per_unit(FORMAT):
    """16-byte chunks of an activation row in a unit of 128 elements."""
    return {"e2m1": 4, "e4m3": 8, "bf16": 16}[FORMAT]


@gluon.constexpr_function
def elements_per_chunk(FORMAT):
    """Elements of memory in 16 bytes: bfloat16 values, or bytes of codes."""
    return 8 if FORMAT == "bf16" else 16


@gluon.constexpr_function
def _bases(size, axis, rank, first=1):
    """Bases of a linear layout that count from `first` up to `size` along an axis."""
    found = []
    while first < size:
        found.append([first if place == axis else 0 for place in range(rank)])
        first *= 2
    return found


@gluon.constexpr_function
def _linear(registers, lanes, warps, shape):
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def items_per_lane(FORMAT):
    """Elements of codes that a lane loads of a fragment: bytes, or words to decode to bfloat16."""
    return 4 if FORMAT == "bf16" else 16


@gluon.constexpr_function
def loads_per_unit(W_FORMAT):
    """Loads of 16 bytes a lane that bring a unit of weights: one for each 64 bytes of a row."""
    return 8 if W_FORMAT == "e4m3" else 4


@gluon.constexpr_function
def words_per_lane(FORMAT, W_FORMAT):
    """Words of weight scales that a lane loads of a unit.

    A lane holds chunks b and b + 4 of e4m3 weights, which MFMA expects and which belong to two MX
    blocks. Scaled MFMA takes the scale of block b from it, the decoder those of both chunks.
    """
    return 2 if FORMAT == "bf16" and W_FORMAT == "e4m3" else 1


@gluon.constexpr_function
def code_layout(SLICES, WAVES, FORMAT, W_FORMAT):
    """Layout of codes as loaded: a thread's 16 bytes of each fragment, or half of one."""
    items, loads = items_per_lane(FORMAT), loads_per_unit(W_FORMAT)
    warps = _bases(loads * WAVES, 1, 4, loads) + _bases(SLICES, 0, 4)
    registers = _bases(items, 3, 4) + _bases(loads, 1, 4)
    return _linear(registers, _bases(64, 2, 4), warps, [SLICES, loads * WAVES, 64, items])


@gluon.constexpr_function
def scale_layout(SLICES, WAVES, WORDS):
    """Layout of weight scales as loaded: `words_per_lane` words a thread."""
    warps = _bases(WORDS * WAVES, 1, 3, WORDS) + _bases(SLICES, 0, 3)
    return _linear(_bases(WORDS, 1, 3), _bases(64, 2, 3), warps, [SLICES, WORDS * WAVES, 64])


@gluon.constexpr_function
def x_layout(SLICES, WAVES, ROWS, FORMAT, W_FORMAT):
    """Layout of a step's activations as read from LDS; waves of a slice read the same.

    Lane 16 b + r has block b of row r, as chunk b of e2m1, chunks b and b + 4 of e4m3, or chunks
    4 b to 4 b + 3 of bf16. With e4m3 weights it has those of bf16 that its weights are multiplied
    by: 2 b, 2 b + 1 and 2 b + 8, 2 b + 9.
    """
    chunks, elements = chunks_per_unit(FORMAT), elements_per_chunk(FORMAT)
    rows, inside = _bases(16, 1, 3), _bases(elements, 2, 3)
    if words_per_lane(FORMAT, W_FORMAT) == 2:
        own, lanes = _bases(2, 0, 3) + _bases(16, 0, 3, 8), _bases(8, 0, 3, 2)
    elif FORMAT == "bf16":
        own, lanes = _bases(4, 0, 3), _bases(16, 0, 3, 4)
    else:
        own, lanes = _bases(chunks, 0, 3, 4), _bases(4, 0, 3)
    registers = inside + own + _bases(ROWS, 1, 3, 16)
    warps = [[0, 0, 0]] * len(_bases(WAVES, 0, 3)) + _bases(SLICES * chunks, 0, 3, chunks)
    return _linear(registers, rows + lanes, warps, [SLICES * chunks, ROWS, elements])


@gluon.constexpr_function
def sum_layout(SLICES, WAVES, FORMAT):
    """Layout of the accumulator: scaled MFMA, or with bf16 activations the bfloat16 one."""
    return gl.amd.AMDMFMALayout(
        version=4,
        instr_shape=[16, 16, 32 if FORMAT == "bf16" else 128],
        transposed=False,
        warps_per_cta=[SLICES, WAVES, 1],
        tiles_per_warp=[1, 4, 1],
    )


@gluon.constexpr_function
def _mfma_scale_layout(rows, own, WAVES, SLICES):
    """Layout of E8M0 bytes [SLICES, rows, 4] of an operand.

    own: rows of a wave; all waves of a slice have the same ones if it is `rows`.
    """
    lanes = _bases(16, 1, 3) + _bases(4, 2, 3)
    waves = _bases(rows, 1, 3, own) if own < rows else [[0, 0, 0]] * len(_bases(WAVES, 0, 3))
    return _linear(_bases(own, 1, 3, 16), lanes, waves + _bases(SLICES, 0, 3), [SLICES, rows, 4])


@gluon.constexpr_function
def x_scale_layout(SLICES, WAVES, ROWS):
    """Layout of an iteration's activation scales as read from LDS: a row's words of all steps."""
    waves = [[0, 0, 0]] * len(_bases(WAVES, 0, 3)) + _bases(SLICES, 0, 3)
    registers = _bases(STEPS.value, 2, 3) + _bases(ROWS, 1, 3, 16)
    return _linear(registers, _bases(16, 1, 3) + [[0, 0, 0]] * 2, waves, [SLICES, ROWS, STEPS])


@gluon.jit
def as_operand(codes, SUMS: gl.constexpr, W_FORMAT: gl.constexpr):
    """Codes as operand A of scaled MFMA, [SLICES, 64 * WAVES, 64 bytes, or 128 of e4m3]."""
    SLICES: gl.constexpr = codes.shape[0]
    HALVES: gl.constexpr = loads_per_unit(W_FORMAT) // 4
    TILES: gl.constexpr = codes.shape[1] // HALVES
    if HALVES == 2:
        split = codes.reshape(SLICES, TILES, 2, 4, 16, 16).permute(0, 1, 4, 2, 3, 5)
    else:
        split = codes.reshape(SLICES, TILES, 4, 16, 16).permute(0, 1, 3, 2, 4)
    return gl.convert_layout(
        split.reshape(SLICES, TILES * 16, 64 * HALVES),
        gl.DotOperandLayout(0, SUMS, 16),
        assert_trivial=True,
    )


@gluon.jit
def as_scale_operand(scales):
    """Scales as bytes [SLICES, 64 * WAVES, 4] of operand A; MFMA selects bytes by op_sel."""
    SLICES: gl.constexpr = scales.shape[0]
    WAVES: gl.constexpr = scales.shape[1]
    even = gl.join(scales.to(gl.uint8), (scales >> 16).to(gl.uint8))
    odd = gl.join((scales >> 8).to(gl.uint8), (scales >> 24).to(gl.uint8))
    split = gl.join(even, odd).reshape(SLICES, WAVES, 4, 16, 4).permute(0, 1, 4, 3, 2)
    return gl.convert_layout(
        split.reshape(SLICES, 64 * WAVES, 4),
        _mfma_scale_layout(64 * WAVES, 64, WAVES, SLICES),
        assert_trivial=True,
    )


@gluon.jit
def as_x_operand(
    x, SLICES: gl.constexpr, SUMS: gl.constexpr, FORMAT: gl.constexpr, W_FORMAT: gl.constexpr
):
    """Activations as operand B, [SLICES, 128 elements of depth, ROWS] (e2m1: 64 bytes).

    bf16: the depth of each of the four MFMA is eight elements of each block, with e4m3 weights of
    each lane's chunk.
    """
    CHUNKS: gl.constexpr = chunks_per_unit(FORMAT)
    ROWS: gl.constexpr = x.shape[1]
    WIDTH: gl.constexpr = x.shape[2]
    if words_per_lane(FORMAT, W_FORMAT) == 2:
        split = x.reshape(SLICES, 2, 4, 2, ROWS, WIDTH).permute(0, 1, 3, 2, 5, 4)
    elif FORMAT == "bf16":
        split = x.reshape(SLICES, 4, 4, ROWS, WIDTH).permute(0, 2, 1, 4, 3)
    else:
        split = x.reshape(SLICES, CHUNKS, ROWS, WIDTH).permute(0, 1, 3, 2)
    K_WIDTH: gl.constexpr = 8 if FORMAT == "bf16" else 16
    return gl.convert_layout(
        split.reshape(SLICES, CHUNKS * WIDTH, ROWS),
        gl.DotOperandLayout(1, SUMS, K_WIDTH),
        assert_trivial=True,
    )


@gluon.jit
def as_x_scale_operand(words, step: gl.constexpr, WAVES: gl.constexpr):
    """A step's words of [SLICES, ROWS, STEPS] as bytes [SLICES, ROWS, 4] of operand B's scales."""
    SLICES: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    LAYOUT: gl.constexpr = _mfma_scale_layout(ROWS, ROWS, WAVES, SLICES)
    even, odd = gl.split(words.reshape(SLICES, ROWS, 2, 2))
    first, second = gl.split(odd if step % 2 else even)
    word = gl.convert_layout(
        second if step >= 2 else first, gl.SliceLayout(2, LAYOUT), assert_trivial=True
    )
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))).to(gl.uint32)
    shift = gl.expand_dims(gl.expand_dims(block * 8, 0), 1)
    return (gl.expand_dims(word, 2) >> shift).to(gl.uint8)


@gluon.jit
def unit_x_scales(SLICES: gl.constexpr, WAVES: gl.constexpr, ROWS: gl.constexpr):
    """Scales of 1 for operand B."""
    return gl.full((SLICES, ROWS, 4), _ONE, gl.uint8, _mfma_scale_layout(ROWS, ROWS, WAVES, SLICES))


@gluon.jit
def decode_operand(codes, scales, SUMS: gl.constexpr, W_FORMAT: gl.constexpr):
    """Weights as bfloat16 operand A, [SLICES, 64 * WAVES, 128]; depth as in `as_x_operand`."""
    SLICES: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = words_per_lane("bf16", W_FORMAT)
    WAVES: gl.constexpr = scales.shape[1] // WORDS
    # The exponent field of float32 holds the E8M0 byte as it is.
    first = gl.join((scales & 0xFF) << 23, ((scales >> 16) & 0xFF) << 23)
    second = gl.join(((scales >> 8) & 0xFF) << 23, ((scales >> 24) & 0xFF) << 23)
    if WORDS == 2:  # wave, half, lane, fragment
        factors = gl.join(first, second).reshape(SLICES, WAVES, 2, 64, 4).permute(0, 1, 4, 2, 3)
    else:
        factors = gl.join(first, second).reshape(SLICES, WAVES, 64, 4).permute(0, 1, 3, 2)
    factors = factors.reshape(SLICES, codes.shape[1], 64, 1).to(gl.float32, bitcast=True)
    factors = gl.convert_layout(factors, codes.type.layout, assert_trivial=True)
    if WORDS == 2:
        values = decode_e4m3(codes, factors.broadcast_to(codes.shape))
        chunks = values.reshape(SLICES, 4 * WAVES, 2, 4, 16, 2, 8)  # half, lane, row, octet
        blocks = chunks.permute(0, 1, 4, 2, 5, 3, 6)
    else:
        values = decode_e2m1(codes, factors.broadcast_to(codes.shape))
        blocks = values.reshape(SLICES, 4 * WAVES, 4, 16, 4, 8).permute(0, 1, 3, 4, 2, 5)
    return gl.convert_layout(
        blocks.reshape(SLICES, 64 * WAVES, 128),
        gl.DotOperandLayout(0, SUMS, 8),
        assert_trivial=True,
    )


LINE = 128
"""Bytes of a line: the distance of rows of codes and of planes is a multiple."""

WORD = 4
"""Bytes that a lane copies: rows of a matrix are whole words of a plane."""

MAX_ROWS = 1 << 28
"""Rows of an operand: offsets of eight planes fit into int32."""

MAX_PITCH = 1 << 23
"""Distance of rows of codes in bytes: offsets of 256 rows fit into int32."""

_COPY_BYTES = 16
"""Bytes of codes that a lane copies."""

_BLOCK_ROWS, _BLOCK_PLANES = 128, 32


def code_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of codes [..., rows, K] whose rows begin at lines."""
    return _strides(shape, -(-shape[-1] // LINE) * LINE, 1)


def scale_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of scales [..., rows, K / 32] in planes."""
    *leading, rows, _ = shape
    matrix = -(-rows // WORD) * WORD
    pitch = -(-math.prod(leading) * matrix // LINE) * LINE
    return (*_strides((*leading, matrix, 1), 1, 1)[:-2], 1, pitch)


def _strides(shape: Sequence[int], row: int, element: int) -> tuple[int, ...]:
    """Strides of dense matrices whose rows are `row` apart."""
    strides = [element, row]
    for size in reversed(shape[1:-1]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Operand:
    """Codes and scales of one operand, and their distances.

    Args:
        codes: uint8, rows `pitch` bytes apart. scale: uint8, planes `scale_pitch` words apart.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    pitch: int
    scale_pitch: int

    @classmethod
    def of(cls, value: MXTensor) -> Operand:
        """The operand as it lies in memory; what the kernel cannot read is copied."""
        codes, scale = value.qdata, value.scale
        if not _are_rows(codes):
            codes = codes.contiguous()
        if not _are_planes(scale):
            scale = to_planes(scale)
        return cls(codes, scale, codes.stride(-2), scale.stride(-1) // WORD)

    @classmethod
    def across(cls, value: MXTensor) -> Operand:
        """The same of an operand [G, K, N] that was quantised along K: planes follow each other.

        Rows that end within 16 bytes of codes or a word of scales are copied.
        """
        codes, scale = value.qdata, value.scale
        if codes.shape[-1] % _COPY_BYTES or not _are_rows(codes):
            codes = _with_lines(codes)
        if scale.shape[-1] % WORD or not _are_rows(scale, WORD):
            scale = _with_lines(scale)
        return cls(codes, scale, codes.stride(-2), scale.stride(-2) // WORD)


def _with_lines(matrices: torch.Tensor) -> torch.Tensor:
    """A copy of [G, rows, bytes] whose rows are whole lines."""
    *leading, width = matrices.shape
    lines = matrices.new_empty((*leading, -(-width // LINE) * LINE))
    return lines[..., :width].copy_(matrices)


def _are_rows(codes: torch.Tensor, unit: int = MX_BLOCK_SIZE) -> bool:
    """Whether the kernel can read codes [..., rows, K] in place. unit: bytes between rows."""
    *leading, row, element = codes.stride()
    collapses = not leading or leading[0] == codes.shape[-2] * row
    fits = codes.shape[-1] <= row < MAX_PITCH and row % unit == 0
    return element == 1 and fits and collapses and codes.data_ptr() % min(unit, _COPY_BYTES) == 0


def _are_planes(scale: torch.Tensor) -> bool:
    """Whether the kernel can read scales [..., rows, K / 32] in place."""
    *leading, row, pitch = scale.stride()
    matrix = -(-scale.shape[-2] // WORD) * WORD
    collapses = not leading or leading[0] == matrix
    fits = pitch % WORD == 0 and pitch >= math.prod(scale.shape[:-2]) * matrix
    return row == 1 and fits and collapses and scale.data_ptr() % WORD == 0


def empty_operand(like: torch.Tensor, shape: tuple[int, ...], format: MXFormat) -> MXTensor:
    """An uninitialised MXTensor of this shape on the device of `like`, without checks."""
    qdata = like.new_empty_strided(shape, code_strides(shape), dtype=torch.uint8)
    scale = _empty_scale(like, (*shape[:-1], shape[-1] // MX_BLOCK_SIZE))
    return MXTensor.unchecked(qdata, scale, format)


def _empty_scale(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialised scales [..., rows, K / 32] in planes, all of whose words are allocated."""
    strides = scale_strides(shape)
    storage = like.new_empty((shape[-1], strides[-1]), dtype=torch.uint8)
    return storage.as_strided(tuple(shape), strides)


def to_planes(scale: torch.Tensor) -> torch.Tensor:
    """Copy scales [..., rows, K / 32] of any strides to planes; at most one leading dimension."""
    planes = _empty_scale(scale, scale.shape)
    matrices = scale if scale.dim() == 3 else scale.unsqueeze(0)
    strides = matrices.stride(), planes.stride()[-3:]
    _planes_launch(tuple(matrices.shape), *strides)(planes_ptr=planes, scale_ptr=scale)
    return planes


@triton.jit(
    do_not_specialize=("num_rows", "num_planes", "matrix_planes_stride", "planes_pitch"),
    do_not_specialize_on_alignment=("planes_ptr", "scale_ptr"),
)
def _scale_planes_kernel(
    planes_ptr,
    scale_ptr,
    num_rows,
    num_planes,
    matrix_planes_stride,
    planes_pitch,
    scale_stride_matrix,
    scale_stride_row,
    scale_stride_block,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PLANES: tl.constexpr,
):
    """Copy scale [matrices, num_rows, num_planes] to planes [num_planes, matrices, num_rows].

    Grid: (row tiles · plane tiles · matrices,), BLOCK_ROWS x BLOCK_PLANES scales a program.
    """
    row_tiles, plane_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_planes, BLOCK_PLANES)
    matrix = (tl.program_id(0) // (row_tiles * plane_tiles)).to(tl.int64)
    row = tl.program_id(0) % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    plane = tl.program_id(0) // row_tiles % plane_tiles * BLOCK_PLANES + tl.arange(0, BLOCK_PLANES)
    mask = (row < num_rows)[:, None] & (plane < num_planes)[None, :]
    source = row.to(tl.int64)[:, None] * scale_stride_row + plane[None, :] * scale_stride_block
    target = plane.to(tl.int64)[None, :] * planes_pitch + row[:, None]
    scale = tl.load(scale_ptr + matrix * scale_stride_matrix + source, mask=mask)
    tl.store(planes_ptr + matrix * matrix_planes_stride + target, scale, mask=mask)


@functools.lru_cache(CACHED_LAUNCHES)
def _planes_launch(
    shape: tuple[int, ...], scale_strides: tuple[int, ...], planes_strides: tuple[int, ...]
) -> Launch:
    num_matrices, num_rows, num_planes = shape
    tiles = triton.cdiv(num_rows, _BLOCK_ROWS) * triton.cdiv(num_planes, _BLOCK_PLANES)
    return Launch(
        _scale_planes_kernel,
        (tiles * num_matrices,),
        num_rows=num_rows,
        num_planes=num_planes,
        matrix_planes_stride=planes_strides[0] if len(planes_strides) == 3 else 0,
        planes_pitch=planes_strides[-1],
        scale_stride_matrix=scale_strides[0],
        scale_stride_row=scale_strides[1],
        scale_stride_block=scale_strides[2],
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_PLANES=_BLOCK_PLANES,
        num_warps=4,
    )
