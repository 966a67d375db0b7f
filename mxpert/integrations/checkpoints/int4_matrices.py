"""How checkpoints store a matrix of 4-bit integers: compressed-tensors, AWQ and GPTQ.

All of them have codes 0 to 15, ``w = (code - zero) · scale``, in words of int32. They differ in the
axis that a word runs along, in the order of its nibbles, and in how zero points are written. A
config states the size of groups and more; what is not served is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ...core.files import short
from ...errors import UnsupportedError, message
from ...formats.codec import unpack_codes
from ...formats.weight_tensor import (
    INT4_G32,
    INT4_G64,
    INT4_G128,
    INT4_ZERO,
    WeightFormat,
    WeightTensor,
)
from .expert_matrices import BadMatrixError, MatrixFormat, Part
from .stated_quantization import Statement

_FORMATS = {each.group_size: each for each in (INT4_G32, INT4_G64, INT4_G128)}
_SCALES = ("BF16", "F16", "F32")
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that each of its 8 columns is in."""
_INCONSISTENT = "config and tensors do not belong together"
_IN_ORDER = (None, False, "weight", "static")
"""Values of ``actorder`` that leave the weights of a group side by side."""


def pack_quantized_matrix(
    statement: Statement, linear: str, *, is_share: bool = False
) -> MatrixFormat:
    """compressed-tensors ``pack-quantized``: words along K, each with 8 codes ``q + 8`` in order.

    ``weight_packed`` int32 [N, K/8], ``weight_scale`` [N, K/g], ``weight_shape`` int64 [2], and
    without ``symmetric`` ``weight_zero_point`` int32 [N/8, K/g], words along N.

    Args:
        statement: of the checkpoint. linear: path of the layer.
        is_share: the tensors are a rank's share of a matrix, whose ``weight_shape`` is not theirs.

    Raises:
        UnsupportedError: other bits, groups or orders.

    Source:
        compressed-tensors 0.20, ``PackedQuantizationCompressor`` and ``pack_to_int32``.
    """
    stated = statement.weights_of(linear)
    for key, served in (
        ("num_bits", (4,)),
        ("type", ("int", None)),
        ("strategy", ("group", None)),  # which follows from group_size
        ("actorder", _IN_ORDER),
    ):
        _require_served(statement, f"weights.{key}", served, stated.get(key))
    format = _format(statement, "weights.group_size", stated.get("group_size"))
    is_symmetric = stated.get("symmetric", True) is True
    zeros = () if is_symmetric else (Part("weight_zero_point", ("I32",), ("N/8", _per(format))),)
    shape = () if is_share else (Part("weight_shape", ("I64", "I32"), ("2",)),)
    decode = partial(_pack_quantized, format)
    return MatrixFormat(
        (
            Part("weight_packed", ("I32",), ("N", "K/8"), "qdata"),
            Part("weight_scale", _SCALES, ("N", _per(format)), "scale"),
            *shape,
            *zeros,
        ),
        decode if is_share else partial(_of_shape, decode),
        group=format.group_size,
    )


def awq_matrix(statement: Statement, linear: str) -> MatrixFormat:
    """AWQ's ``gemm``: words along N whose columns 0 to 7 are nibbles 0, 4, 1, 5, 2, 6, 3, 7.

    ``qweight`` int32 [K, N/8], ``qzeros`` int32 [K/g, N/8] alike, ``scales`` [K/g, N].

    Raises:
        UnsupportedError: other bits, groups or versions, or no zero points.

    Source:
        AutoAWQ, ``awq/utils/packing_utils.py`` (``AWQ_REVERSE_ORDER``).
    """
    entry = statement.entry
    _require_served(statement, "bits", (4,), entry.get("bits", entry.get("w_bit")))
    _require_served(statement, "version", ("gemm",), str(entry.get("version") or "gemm").lower())
    _require_served(statement, "zero_point", (True,), entry.get("zero_point", True))
    group = entry.get("group_size", entry.get("q_group_size"))
    format = _format(statement, "group_size", group)
    return MatrixFormat(
        (
            Part("qweight", ("I32",), ("K", "N/8")),
            Part("qzeros", ("I32",), (_per(format), "N/8")),
            Part("scales", _SCALES, (_per(format), "N")),
        ),
        partial(_awq, format),
        group=format.group_size,
        takes_codes=True,
    )


def gptq_matrix(statement: Statement, linear: str, *, is_share: bool = False) -> MatrixFormat:
    """GPTQ: words along K; zero points are words along N, less 1 except in ``gptq_v2``.

    ``qweight`` int32 [K/8, N], ``qzeros`` int32 [K/g, N/8], ``scales`` [K/g, N], ``g_idx`` int32
    [K], which has to be ``k // g``. With ``sym`` all zero points are 8.

    Args:
        statement: of the checkpoint. linear: path of the layer.
        is_share: the tensors are a rank's share of a matrix in an engine, which does not keep the
            zero points of ``sym``, and whose ``g_idx`` is not theirs.

    Raises:
        UnsupportedError: other bits, groups or forms, ``desc_act``, or settings for single layers.

    Source:
        AutoGPTQ and GPTQModel, ``QuantLinear``; Transformers' ``GPTQConfig``.
    """
    entry = statement.entry
    form = entry.get("checkpoint_format") or entry.get("format") or "gptq"  # GPTQModel has both
    _require_served(statement, "bits", (4,), entry.get("bits"))
    _require_served(statement, "desc_act", (False,), entry.get("desc_act", False))
    _require_served(statement, "checkpoint_format", ("gptq", "gptq_v2"), form)
    _require_served(statement, "dynamic", (None, {}), statement.dynamic_of(linear))
    format = _format(statement, "group_size", entry.get("group_size"))
    is_symmetric = entry.get("sym", True) is True
    zeros = (Part("qzeros", ("I32",), (_per(format), "N/8")),)
    order = () if is_share else (Part("g_idx", ("I32",), ("K",)),)
    decode = partial(_gptq, format, is_symmetric, form == "gptq")
    return MatrixFormat(
        (
            Part("qweight", ("I32",), ("K/8", "N")),
            Part("scales", _SCALES, (_per(format), "N")),
            *(() if is_share and is_symmetric else zeros),
            *order,
        ),
        decode if is_share else partial(_in_order, format, decode),
        group=format.group_size,
        takes_codes=True,
    )


def _of_shape(
    decode: Callable[..., WeightTensor],
    packed: torch.Tensor,
    scale: torch.Tensor,
    shape: torch.Tensor,
    *zeros: torch.Tensor,
) -> WeightTensor:
    wanted, got = [packed.shape[0], 8 * packed.shape[1]], shape.tolist()
    if got != wanted:
        need = f"{wanted}, the shape of weight_packed"
        raise BadMatrixError("weight_shape", need, got, _INCONSISTENT)
    return decode(packed, scale, *zeros)


def _pack_quantized(
    format: WeightFormat,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> WeightTensor:
    codes = packed.view(torch.uint8)  # int32 is stored little-endian: nibble i is code i
    if zeros is None:
        return WeightTensor(codes, scale, format)
    zero_point = unpack_codes(zeros.t().contiguous().view(torch.uint8)).t().contiguous()
    return WeightTensor(codes, scale, format, zero_point)


_LOW_NIBBLES, _BOTH_NIBBLES = 0x0F0F0F0F, 0x11


def _awq(
    format: WeightFormat,
    packed: torch.Tensor,
    zeros: torch.Tensor,
    scale: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
) -> WeightTensor:
    if codes is None:
        codes = packed.new_empty((8 * packed.shape[1], packed.shape[0] // 2), dtype=torch.uint8)
    _awq_pairs(packed, codes)
    return WeightTensor(codes, scale.t().contiguous(), format, _codes(zeros, awq=True))


def _awq_pairs(words: torch.Tensor, codes: torch.Tensor) -> None:
    """Write codes two a byte, uint8 [N, K/2], of words int32 [K, N/8].

    Four nibbles of a word at a time, those at even places and those at odd ones. Every pass but the
    transposition, which torch has in blocks, reads and writes memory in order.
    """
    half, width = words.shape[0] // 2, words.shape[1]
    low, high = words.reshape(half, 2 * width).t().contiguous().chunk(2)  # [N/8, K/2]: k even, odd
    even = (high & _LOW_NIBBLES).bitwise_left_shift_(4).bitwise_or_(low & _LOW_NIBBLES)
    odd = low.bitwise_right_shift_(4).bitwise_and_(_LOW_NIBBLES)
    odd |= high.bitwise_and_(~_LOW_NIBBLES)
    shifted, columns = torch.empty_like(odd), codes.view(width, 8, half)
    for column, nibble in enumerate(AWQ_NIBBLES):
        torch.bitwise_right_shift((even, odd)[nibble % 2], 8 * (nibble // 2), out=shifted)
        columns[:, column] = shifted  # its low byte


def _codes(words: torch.Tensor, *, awq: bool) -> torch.Tensor:
    """uint8 [N, R] of words int32 [R, N/8]. awq: columns are in `AWQ_NIBBLES`, and not in order."""
    rows, width = words.shape
    pairs = words.contiguous().view(torch.uint8).t().contiguous()
    pairs = pairs.view(width, 2, 2, rows)  # byte 2 i + j of a word
    codes = pairs.new_empty((width, 2, 2, 2, rows))  # columns of a word: i j half, AWQ's j half i
    if awq:
        lows, highs = codes[:, :, 0].transpose(1, 2), codes[:, :, 1].transpose(1, 2)
    else:
        lows, highs = codes[:, :, :, 0], codes[:, :, :, 1]
    torch.bitwise_and(pairs, 15, out=lows)
    torch.bitwise_right_shift(pairs, 4, out=highs)
    return codes.view(8 * width, rows)


def _in_order(
    format: WeightFormat,
    decode: Callable[..., WeightTensor],
    packed: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    *,
    codes: torch.Tensor | None = None,
) -> WeightTensor:
    columns = torch.arange(groups.numel(), dtype=groups.dtype)
    if not torch.equal(groups, columns // format.group_size):
        need, remedy = f"k // {format.group_size}", "columns in another order are not supported"
        raise BadMatrixError("g_idx", need, "another order", remedy, is_known=True)
    return decode(packed, scale, zeros, codes=codes)


def _gptq(
    format: WeightFormat,
    is_symmetric: bool,
    is_less_one: bool,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    codes: torch.Tensor | None = None,
) -> WeightTensor:
    zero_point = None if zeros is None else _gptq_zero_point(zeros, is_symmetric, is_less_one)
    if codes is None:
        codes = packed.new_empty((packed.shape[1], 4 * packed.shape[0]), dtype=torch.uint8)
    codes.view(torch.int32).copy_(packed.t())  # nibbles as in _pack_quantized
    return WeightTensor(codes, scale.t().contiguous(), format, zero_point)


def _gptq_zero_point(
    zeros: torch.Tensor, is_symmetric: bool, is_less_one: bool
) -> torch.Tensor | None:
    """uint8 [N, K/g] of words [K/g, N/8]; None where all of them are `INT4_ZERO`, as stated."""
    usual = _BOTH_NIBBLES * (INT4_ZERO - is_less_one)
    if is_symmetric and bool((zeros.view(torch.uint8) == usual).all()):
        return None
    zero_point = _codes(zeros, awq=False)
    if is_less_one:
        if bool((zero_point == 15).any()):
            need, remedy = "0 to 14, zero points less 1", "readers disagree on 15: save as gptq_v2"
            raise BadMatrixError("qzeros", need, 15, remedy, is_known=True)
        zero_point += 1
    if not is_symmetric:
        return zero_point
    other = zero_point[zero_point != INT4_ZERO]
    if other.numel():
        need = f"{INT4_ZERO}, as sym states"
        raise BadMatrixError("qzeros", need, int(other[0]), _INCONSISTENT)
    return None


def _per(format: WeightFormat) -> str:
    return f"K/{format.group_size}"


def _format(statement: Statement, key: str, size: object) -> WeightFormat:
    _require_served(statement, key, tuple(_FORMATS), size)
    assert isinstance(size, int)  # for the type checker
    return _FORMATS[size]


def _require_served(
    statement: Statement, key: str, served: tuple[object, ...], got: object
) -> None:
    """Raise UnsupportedError for a value that has no decoder; ``4`` is not ``True``."""
    if any(got == each and type(got) is type(each) for each in served):
        return
    need = " or ".join("none" if each is None else repr(each) for each in served)
    remedy = "see docs/which-checkpoints-run.md"
    where = f"{statement.where}: {key}"
    raise UnsupportedError(message(statement.op, where, need, short(got), remedy))
