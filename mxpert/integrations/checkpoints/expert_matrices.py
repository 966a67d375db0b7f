"""How a checkpoint stores one matrix of one expert: names, dtypes, shapes, and what they mean.

Formats of floating point are here, integers in mxpert.integrations.checkpoints.int4_matrices.
4-bit floating-point codes are two a byte along K, the earlier one in the low nibble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...formats.spec import MX_BLOCK_SIZE, MXFP4, MXFP8_E4M3, MXFormat
from ...formats.tensor import MXTensor
from ...formats.weight_tensor import NVFP4, WeightTensor
from .nvfp4_casts import NotACast, mxfp4_of_cast

Exact = MXTensor | WeightTensor
"""A matrix [N, K] as kernels read it."""
Decoded = Exact | NotACast
"""What the stored tensors of a matrix stand for."""

_ACTIVATIONS = ("input_scale", "input_global_scale")
"""Scales of activations, which say nothing about weights."""


class BadMatrixError(Exception):
    """A tensor that its header allows and its content does not.

    Args:
        suffix: of the tensor. need, got, remedy: for the message of whoever knows the matrix.
        is_known: whether the content is a form that is known and not served.
    """

    def __init__(
        self, suffix: str, need: str, got: object, remedy: str, *, is_known: bool = False
    ) -> None:
        super().__init__(suffix, need, got, remedy)
        self.suffix, self.need, self.got, self.remedy = suffix, need, got, remedy
        self.is_known = is_known


@dataclass(frozen=True)
class Part:
    """One stored tensor of a matrix [N, K].

    Args:
        suffix: its name after that of the matrix.
        dtypes: as safetensors writes them ("U8", "F8_E4M3").
        shape: its dimensions, ``("N", "K/2")`` for example; () is one number for the whole matrix,
            of shape [] or [1].
        field: of the decoded matrix, where that is the tensor itself, seen as bytes or not: such a
            tensor is read into its place.

    Example:
        >>> Part("qweight", ("I32",), ("K", "N/8")).shapes(64, 32)
        [(32, 8)]
    """

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    field: str = ""

    def shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """The shapes that the tensor of a matrix [rows, columns] may have."""
        sizes = {"N": rows, "K": columns}
        found = []
        for dimension in self.shape:
            name, _, divisor = dimension.partition("/")
            found.append(int(name) if name.isdigit() else sizes[name] // int(divisor or 1))
        return [tuple(found)] if found else [(), (1,)]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """N and K of the matrix whose codes have this shape; the inverse of `shapes`."""
        sizes = {}
        for dimension, size in zip(self.shape, shape, strict=True):
            name, _, divisor = dimension.partition("/")
            sizes[name] = size * int(divisor or 1)
        return sizes["N"], sizes["K"]


@dataclass(frozen=True)
class MatrixFormat:
    """How one matrix is stored.

    Args:
        parts: its tensors; the first holds the codes.
        decode: makes the matrix of them, in the order of `parts`; it may raise `BadMatrixError`.
        unread: suffixes of tensors that say nothing about weights, which are left alone.
        otherwise: how every matrix of a module decodes where `decode` finds a NotACast in it.
        group: N and K are multiples of this.
        takes_codes: whether `decode` also takes ``codes``, memory [N, K/2] that it writes them to.
    """

    parts: tuple[Part, ...]
    decode: Callable[..., Decoded]
    unread: tuple[str, ...] = ()
    otherwise: MatrixFormat | None = None
    group: int = MX_BLOCK_SIZE
    takes_codes: bool = False


def _mx(format: MXFormat, codes: torch.Tensor, scale: torch.Tensor) -> MXTensor:
    """Codes and E8M0 scales as bytes, whatever dtype they are stored in."""
    return MXTensor(codes.view(torch.uint8), scale.view(torch.uint8), format)


def _e8m0(suffix: str) -> Part:
    return Part(suffix, ("U8", "F8_E8M0"), ("N", "K/32"), "scale")


def mxfp4_matrix(codes: str, scale: str) -> MatrixFormat:
    """MXFP4 under these two suffixes: bytes of codes [N, K/2], E8M0 scales [N, K/32].

    Codes may be stored as uint8 or int8 (DeepSeek-V4), scales as bytes or in torch's E8M0 dtype.
    """
    return MatrixFormat(
        (Part(codes, ("U8", "I8"), ("N", "K/2"), "qdata"), _e8m0(scale)),
        partial(_mx, MXFP4),
        _ACTIVATIONS,
    )


def mxfp8_matrix(codes: str, scale: str) -> MatrixFormat:
    """MXFP8 under these two suffixes: e4m3 codes [N, K], E8M0 scales [N, K/32]."""
    return MatrixFormat(
        (Part(codes, ("F8_E4M3",), ("N", "K"), "qdata"), _e8m0(scale)),
        partial(_mx, MXFP8_E4M3),
        _ACTIVATIONS,
    )


def nvfp4_matrix(codes: str, scale: str, global_scale: str, *, is_divisor: bool) -> MatrixFormat:
    """NVFP4 under these three suffixes: MXFP4 where a whole module is a cast of it, else exact.

    Args:
        codes: uint8 [N, K/2]. scale: e4m3 [N, K/16].
        global_scale: one float32, by which values are multiplied, or divided with `is_divisor`.
    """
    first, whole = Part(codes, ("U8",), ("N", "K/2"), "qdata"), Part(global_scale, ("F32",), ())
    scales = Part(scale, ("F8_E4M3",), ("N", "K/16"))
    exact = partial(nvfp4_of, suffix=global_scale, is_divisor=is_divisor)
    return MatrixFormat(
        (first, scales, whole),
        partial(mxfp4_of_cast, is_divisor=is_divisor),
        _ACTIVATIONS,
        MatrixFormat((first, replace(scales, field="scale"), whole), exact, _ACTIVATIONS),
    )


def nvfp4_of(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    suffix: str,
    is_divisor: bool,
) -> WeightTensor:
    """The NVFP4 matrix of stored tensors, with the stored codes and scales.

    ``row_scale`` is the global scale in every row. Of a divisor g it is the float32 next to 1/g:
    values then differ from ``code · scale / g`` by at most 2^-24 of them, and not at all where g is
    a power of two. compressed-tensors rounds ``scale / g`` and the product to float32 and then to
    bfloat16, so its own value is farther away.

    Args:
        codes: uint8 [N, K/2]. scale: float8_e4m3fn [N, K/16]. global_scale: one float32.
        suffix: name of `global_scale`, for an error.
        is_divisor: whether values are divided by it.

    Raises:
        BadMatrixError: a global scale that is no positive number, or has no reciprocal.

    Source:
        compressed-tensors 0.20 ``NVFP4PackedCompressor.decompress``; NVIDIA ModelOpt NVFP4.

    Example:
        >>> codes = torch.full((1, 16), 0x42, dtype=torch.uint8)  # 1 and 2
        >>> scale = torch.tensor([[3.0, 5.0]]).to(torch.float8_e4m3fn)
        >>> found = nvfp4_of(codes, scale, torch.tensor(4.0), suffix="g", is_divisor=True)
        >>> found.dequantize()[0, 14:18].tolist(), found.row_scale.tolist()
        ([0.75, 1.5, 1.25, 2.5], [0.25])
    """
    factor = global_scale.reshape(())
    factor = factor.reciprocal() if is_divisor else factor
    if not (bool(factor > 0) and bool(factor.isfinite())):
        need, got = "a positive number", float(global_scale)
        raise BadMatrixError(suffix, need, got, "the checkpoint is damaged: download it again")
    rows = factor.expand(codes.shape[0]).contiguous()
    return WeightTensor(codes, scale.view(torch.uint8), NVFP4, row_scale=rows)
