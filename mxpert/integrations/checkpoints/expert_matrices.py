"""How a checkpoint stores one matrix of one expert: names, dtypes, shapes, and what they mean.

All of these formats have two codes a byte along K, the earlier one in the low nibble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...formats.spec import MX_BLOCK_SIZE, MXFP4
from ...formats.tensor import MXTensor
from .nvfp4_casts import NVFP4_BLOCK_SIZE, NotACast, mxfp4_of_cast

Decoded = MXTensor | NotACast
"""What the stored tensors of a matrix stand for."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a matrix [N, K].

    Args:
        suffix: its name after that of the matrix.
        dtypes: as safetensors writes them ("U8", "F8_E4M3").
        columns: values along K that an element stands for; its shape is [N, K / columns]. 0 is one
            number for the whole matrix, of shape [] or [1].
    """

    suffix: str
    dtypes: tuple[str, ...]
    columns: int

    def shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """The shapes that the tensor of a matrix [rows, columns] may have."""
        return [(rows, columns // self.columns)] if self.columns else [(), (1,)]


@dataclass(frozen=True)
class MatrixFormat:
    """How one matrix is stored.

    Args:
        parts: its tensors; the first holds the codes.
        decode: makes the matrix of them, in the order of `parts`.
        unread: suffixes of tensors that say nothing about weights, which are left alone.
    """

    parts: tuple[Part, ...]
    decode: Callable[..., Decoded]
    unread: tuple[str, ...] = ()


def _mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> MXTensor:
    """Codes and E8M0 scales as bytes, whatever dtype they are stored in."""
    return MXTensor(codes.view(torch.uint8), scale.view(torch.uint8), MXFP4)


def mxfp4_matrix(codes: str, scale: str) -> MatrixFormat:
    """MXFP4 under these two suffixes: bytes of codes [N, K/2], E8M0 scales [N, K/32].

    Codes may be stored as uint8 or int8 (DeepSeek-V4), scales as bytes or in torch's E8M0 dtype.
    """
    return MatrixFormat(
        (
            Part(codes, ("U8", "I8"), MXFP4.codes_per_byte),
            Part(scale, ("U8", "F8_E8M0"), MX_BLOCK_SIZE),
        ),
        _mxfp4,
        ("input_scale", "input_global_scale"),
    )


def nvfp4_cast_matrix(
    codes: str, scale: str, global_scale: str, *, is_divisor: bool
) -> MatrixFormat:
    """NVFP4 under these three suffixes, which `mxfp4_of_cast` takes where it holds MXFP4 values."""
    return MatrixFormat(
        (
            Part(codes, ("U8",), MXFP4.codes_per_byte),
            Part(scale, ("F8_E4M3",), NVFP4_BLOCK_SIZE),
            Part(global_scale, ("F32",), 0),
        ),
        partial(mxfp4_of_cast, is_divisor=is_divisor),
        ("input_scale", "input_global_scale"),
    )
