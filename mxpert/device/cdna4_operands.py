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

from ..core.launch import CACHED_LAUNCHES, Launch
from ..formats.spec import MX_BLOCK_SIZE, MXFormat
from ..formats.tensor import MXTensor

LINE = 128
"""Bytes of a line: the distance of rows of codes and of planes is a multiple."""

WORD = 4
"""Bytes that a lane copies: rows of a matrix are whole words of a plane."""

MAX_ROWS = 1 << 28
"""Rows of an operand: offsets of eight planes fit into int32."""

_MAX_PITCH = 1 << 23
"""Distance of rows of codes in bytes: offsets of 256 rows fit into int32."""

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


def _are_rows(codes: torch.Tensor) -> bool:
    """Whether the kernel can read codes [..., rows, K] in place."""
    *leading, row, element = codes.stride()
    collapses = not leading or leading[0] == codes.shape[-2] * row
    fits = codes.shape[-1] <= row < _MAX_PITCH and row % MX_BLOCK_SIZE == 0
    return element == 1 and fits and collapses and codes.data_ptr() % 16 == 0


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
