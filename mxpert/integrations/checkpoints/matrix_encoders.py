"""A matrix of one expert as a container stores it: the inverse of each `MatrixFormat`'s decoder.

An encoder takes a matrix [N, K] on the CPU and gives its tensors by suffix. No bit of codes, scales
and zero points is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...formats.codec import pack_codes, unpack_codes
from ...formats.weight_tensor import INT4_ZERO, WeightTensor
from .expert_matrices import BadMatrixError, Exact
from .int4_matrices import AWQ_NIBBLES

Encoded = dict[str, torch.Tensor]
Encoder = Callable[[Exact], Encoded]


def mx_encoder(codes: str, scale: str, dtype: torch.dtype = torch.uint8) -> Encoder:
    """MXFP4 or MXFP8 under these two suffixes; `dtype` is that of the codes.

    Example:
        >>> from mxpert.formats import quantize_blocks
        >>> encode = mx_encoder("weight_packed", "weight_scale")
        >>> list(encode(quantize_blocks(torch.ones(2, 64), "mxfp4")))
        ['weight_packed', 'weight_scale']
    """

    def encode(matrix: Exact) -> Encoded:
        return {codes: matrix.qdata.view(dtype), scale: matrix.scale}

    return encode


def nvfp4_encoder(codes: str, scale: str, factor: str, *, is_divisor: bool) -> Encoder:
    """NVFP4 under these three suffixes; the factor is a number [], or a divisor [1].

    Raises:
        BadMatrixError: from the encoder, for a factor that no float32 divisor gives.
    """

    def encode(matrix: Exact) -> Encoded:
        assert isinstance(matrix, WeightTensor)  # for the type checker: NVFP4 has a row_scale
        assert matrix.row_scale is not None  # for the type checker: as above
        whole = matrix.row_scale[0].clone()
        if is_divisor:
            whole = exact_divisor(whole, factor).reshape(1)
        return {codes: matrix.qdata, scale: matrix.scale.view(torch.float8_e4m3fn), factor: whole}

    return encode


def exact_divisor(factor: torch.Tensor, suffix: str) -> torch.Tensor:
    """The float32 whose reciprocal, rounded to float32, is `factor`.

    Readers multiply by that reciprocal. Between 1 and 2 each factor below the square root of 2 has
    one; above it, where reciprocals lie wider than float32, some have none.

    Args:
        factor: float32 []. suffix: name of the divisor, for an error.

    Raises:
        BadMatrixError: there is none.

    Example:
        >>> exact_divisor(torch.tensor(0.25), "weight_global_scale")
        tensor(4.)
    """
    near = factor.reciprocal()
    infinity = torch.tensor(float("inf"))
    for found in (near, near.nextafter(infinity), near.nextafter(-infinity)):
        if bool(found.isfinite()) and bool(found.reciprocal() == factor):
            return found
    need, got = "a factor that is the reciprocal of a float32 number", repr(float(factor))
    remedy = "compressed-tensors divides by its global scale: choose modelopt-nvfp4"
    raise BadMatrixError(suffix, need, got, remedy)


def pack_quantized(matrix: Exact) -> Encoded:
    """INT4 of compressed-tensors: words along K, zero points in words along N.

    Nibble i of a word is code 8 j + i: on a little-endian machine the bytes of `WeightTensor`.
    """
    assert isinstance(matrix, WeightTensor)  # for the type checker: INT4
    zeros = {}
    if matrix.zero_point is not None:
        zeros = {"weight_zero_point": _words(matrix.zero_point.t()).t()}
    return {
        "weight_packed": matrix.qdata.contiguous().view(torch.int32),
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor(matrix.shape, dtype=torch.int64),
        **zeros,
    }


def awq(matrix: Exact) -> Encoded:
    """INT4 of AWQ: words along N in AWQ's order of nibbles; without zero points all are 8."""
    assert isinstance(matrix, WeightTensor)  # for the type checker: INT4
    return {
        "qweight": _awq_words(unpack_codes(matrix.qdata)),
        "qzeros": _awq_words(stated_zeros(matrix)),
        "scales": matrix.scale.t(),
    }


def gptq(matrix: Exact) -> Encoded:
    """INT4 of GPTQ: words along K; zero points less 1 where all are 8, else those of gptq_v2."""
    assert isinstance(matrix, WeightTensor)  # for the type checker: INT4
    less = 1 if matrix.zero_point is None else 0
    columns = torch.arange(matrix.shape[-1], dtype=torch.int32)
    return {
        "qweight": matrix.qdata.contiguous().view(torch.int32).t(),
        "qzeros": _words((stated_zeros(matrix) - less).t()),
        "scales": matrix.scale.t(),
        "g_idx": columns // matrix.format.group_size,
    }


def stated_zeros(matrix: WeightTensor) -> torch.Tensor:
    """The zero points of INT4, uint8 [N, K/g]: 8 where none are stored."""
    if matrix.zero_point is not None:
        return matrix.zero_point
    return torch.full(matrix.scale.shape, INT4_ZERO, dtype=torch.uint8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [R, C/8] of codes [R, C], the first one in the lowest nibble."""
    return pack_codes(codes.contiguous()).view(torch.int32)


def _awq_words(codes: torch.Tensor) -> torch.Tensor:
    """int32 [C, N/8] of codes [N, C]."""
    columns = codes.t().unflatten(-1, (-1, len(AWQ_NIBBLES)))
    nibbles = torch.empty_like(columns)
    nibbles[..., list(AWQ_NIBBLES)] = columns
    return _words(nibbles.flatten(-2))
