"""TMA descriptors of the Hopper kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..core.launch import DescriptorSpec

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
