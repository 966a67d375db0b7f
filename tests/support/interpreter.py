"""Correct low-precision numerics for Triton's interpreter (``TRITON_INTERPRET=1``), for tests.

The stock interpreter (Triton 3.6) keeps bf16 and fp8 values as raw integers and computes on those
integers. `install` replaces the affected builder methods, so that a kernel on CPU tensors gives the
same results as the GPU instructions. A comment at each replacement says what the stock one does.

Not covered, as in the stock interpreter: inline assembly, bf16 atomics, grid barriers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from mxpert.formats.spec import E2M1, E8M0_BIAS, E8M0_NAN
from support import triton_speed

TensorHandle = stock.TensorHandle

# Types that the interpreter stores as integers: Triton type → torch type and largest finite value
# (None: overflow gives infinity). GPU conversions to fp8 saturate; infinity becomes the largest
# finite value too.
_STORED_AS_BITS: dict[tl.dtype, tuple[torch.dtype, float | None]] = {
    tl.bfloat16: (torch.bfloat16, None),
    tl.float8e4nv: (torch.float8_e4m3fn, 448.0),
    tl.float8e5: (torch.float8_e5m2, 57344.0),
}
_FP8_NAN = 0x7F  # the canonical NaN of cvt.satfinite, for both fp8 types
_E8M0_STORAGE = tl.uint8
_QUIET = functools.partial(np.errstate, all="ignore")  # NaN and overflow are data here, not errors


def _is_bits(handle: Any) -> bool:
    """Whether the array holds bf16 or fp8 codes; a bool array is the result of a comparison."""
    return handle.dtype.scalar in _STORED_AS_BITS and handle.data.dtype != np.bool_


@functools.cache
def _fp8_values(dtype: tl.dtype) -> np.ndarray:
    torch_dtype = _STORED_AS_BITS[dtype][0]
    return torch.arange(256, dtype=torch.uint8).view(torch_dtype).float().numpy()


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Values of an interpreter array: float32 for bf16 and fp8 codes, unchanged otherwise."""
    if dtype not in _STORED_AS_BITS or data.dtype == np.bool_:
        return data
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return _fp8_values(dtype)[data.view(np.uint8)]


def encode(values: np.ndarray, dtype: tl.dtype, rounding: object = None) -> np.ndarray:
    """Codes of `values` in `dtype`, rounded to nearest even, or to zero if `rounding` is RTZ."""
    if dtype not in _STORED_AS_BITS:
        codes = values.astype(stock._get_np_dtype(dtype))
        bits = codes.view(f"u{codes.itemsize}")
    else:
        torch_dtype, largest = _STORED_AS_BITS[dtype]
        exact = torch.from_numpy(np.array(values, dtype=np.float32))
        clamped = exact if largest is None else exact.clamp(-largest, largest)
        width = torch.int16 if torch_dtype.itemsize == 2 else torch.uint8
        codes = bits = clamped.to(torch_dtype).view(width).numpy().view(stock._get_np_dtype(dtype))
        if largest is not None:
            bits[np.isnan(values)] = _FP8_NAN
    if rounding == ir.ROUNDING_MODE.RTZ:
        # Codes ascend with the magnitude: the code minus one is the next value towards zero.
        bits -= (np.abs(decode(codes, dtype)) > np.abs(values)).astype(bits.dtype)
    return codes


def _wide(handle: Any) -> Any:
    """The handle with bf16 or fp8 codes decoded to float32."""
    return TensorHandle(decode(handle.data, handle.dtype.scalar), tl.float32)


def _convert(handle: Any, dtype: tl.dtype, rounding: object = None) -> Any:
    values = decode(handle.data, handle.dtype.scalar)
    with _QUIET():
        return TensorHandle(encode(values, dtype, rounding), dtype)


def _narrow(values: np.ndarray, dtype: tl.dtype) -> Any:
    """Wrap the result of an operation: a bool array stays a mask, values are rounded to codes."""
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    return TensorHandle(encode(values, dtype), dtype)


# Stock: bf16 and fp8 arithmetic and comparisons work on the integer codes.
def _binary_op(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., np.ndarray]) -> Any:
        with _QUIET():
            if not (_is_bits(lhs) and _is_bits(rhs)):
                return original(self, lhs, rhs, op)
            return _narrow(op(_wide(lhs).data, _wide(rhs).data), lhs.dtype.scalar)

    return binary_op


# Stock: unary functions of bf16 work on the integer codes.
def _unary_op(original: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, arg: Any, op: Callable[..., np.ndarray]) -> Any:
        if not _is_bits(arg):
            return original(self, arg, op)
        with _QUIET():
            return _narrow(op(_wide(arg).data), arg.dtype.scalar)

    return unary_op


# Stock: clamping bf16 compares integer codes, in which every negative value is large.
def _create_clampf(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_clampf(self: Any, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if not _is_bits(arg):
            return original(self, arg, low, high, propagate_nans)
        clipped = np.clip(_wide(arg).data, _wide(low).data, _wide(high).data)
        return _narrow(clipped, arg.dtype.scalar)

    return create_clampf


# Stock: fma rounds twice and reads bf16 codes as integers; the instruction rounds once. The product
# of two float32 is exact in float64.
def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    with _QUIET():
        a, b, c = (decode(h.data, h.dtype.scalar).astype(np.float64) for h in (x, y, z))
        return TensorHandle(encode(a * b + c, z.dtype.scalar), z.dtype.scalar)


# Stock: minnum and maxnum propagate NaN; the instructions return the other operand.
def _create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmin)


def _create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmax)


# Stock: float32 → bf16 truncates, and integers become bf16 by taking their low bits.
def _cast_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bits(src) or dst_type.scalar in _STORED_AS_BITS:
            return _convert(src, dst_type.scalar)
        with _QUIET():
            return original(self, src, dst_type)

    return cast_impl


# Stock: fp8 rounding is wrong in up to 13 % of codes, overflow wraps, NaN and Inf decode as finite.
def _create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: object) -> Any:
    return _convert(src, dst_type.scalar, rounding_mode)


# Stock: absent; bf16 constants (tl.full) fail.
def _get_bf16(self: Any, value: float) -> Any:
    return TensorHandle(encode(np.array([value], dtype=np.float32), tl.bfloat16), tl.bfloat16)


# Stock: bf16 operands multiply as integers and fp8 NaN and Inf as finite values. Float32 holds
# every product of these operands exactly.
def _create_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        widen = [_wide(h) if _is_bits(h) else h for h in (a, b)]
        return original(self, *widen, d, *options)

    return create_dot


def _unpack_e2m1(packed: np.ndarray, axis: int) -> np.ndarray:
    """Values of e2m1 codes packed two a byte along `axis`, low nibble first."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, E2M1.max_value]
    table = np.array(magnitudes + [-m for m in magnitudes])
    moved = np.moveaxis(packed.view(np.uint8), axis, -1)
    codes = np.stack([moved & 0xF, moved >> 4], axis=-1).reshape(*moved.shape[:-1], -1)
    return np.moveaxis(table[codes], -1, axis)


def _operand(handle: Any, fmt: object, scale: Any, k_axis: int, k_pack: bool) -> np.ndarray:
    """Float64 values of one dot_scaled operand; code times scale is exact in float64."""
    if fmt == ir.ScaleDotElemTypeTY.E2M1:
        packed_axis = k_axis if k_pack else (-1 if k_axis == -2 else -2)
        values = _unpack_e2m1(handle.data, packed_axis)
    else:
        values = decode(handle.data, handle.dtype.scalar).astype(np.float64)
    if scale is None:
        return values
    if scale.dtype.scalar == _E8M0_STORAGE:
        byte = scale.data.astype(np.int32)
        factor = np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, byte - E8M0_BIAS))
    else:
        factor = decode(scale.data, scale.dtype.scalar).astype(np.float64)
    # Scales are [rows, K/group] for both operands; values of the right operand are [K, columns].
    factor = np.repeat(factor, values.shape[k_axis] // factor.shape[-1], axis=-1)
    result: np.ndarray = values * (factor if k_axis == -1 else np.swapaxes(factor, -1, -2))
    return result


# Stock: absent before Triton 3.8. This one accumulates in float64 and rounds to float32 once.
def _create_dot_scaled(
    self: Any,
    lhs: Any,
    lhs_scale: Any,
    lhs_format: object,
    rhs: Any,
    rhs_scale: Any,
    rhs_format: object,
    fast_math: bool,
    lhs_k_pack: bool,
    rhs_k_pack: bool,
    acc: Any,
) -> Any:
    a = _operand(lhs, lhs_format, lhs_scale, -1, lhs_k_pack)
    b = _operand(rhs, rhs_format, rhs_scale, -2, rhs_k_pack)
    with _QUIET():
        return TensorHandle((a @ b + acc.data).astype(np.float32), tl.float32)


# Stock: the interpreter passes formats as plain strings, but the semantic reads their `.value`.
def _dot_scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot_scaled(
        self: Any,
        lhs: Any,
        lhs_scale: Any,
        lhs_format: Any,
        rhs: Any,
        rhs_scale: Any,
        rhs_format: Any,
        *options: Any,
    ) -> Any:
        formats = [
            f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lhs_format, rhs_format)
        ]
        return original(self, lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *options)

    return dot_scaled


# Stock: reductions and scans of bf16 add and compare integer codes.
def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduction(self: Any, operand: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = operand.dtype
        if dtype not in _STORED_AS_BITS:
            return original(self, operand, *args, **kwargs)
        wide = tl.tensor(_wide(operand.handle), tl.block_type(tl.float32, operand.shape))
        result = original(self, wide, *args, **kwargs)
        if isinstance(result, (list, tuple)):
            return type(result)(narrow(part, dtype) for part in result)
        return narrow(result, dtype)

    def narrow(part: Any, dtype: tl.dtype) -> Any:
        if part.dtype != tl.float32:  # an index
            return part
        type_ = tl.block_type(dtype, part.shape) if part.type.is_block() else dtype
        return tl.tensor(_convert(part.handle, dtype), type_)

    return reduction


def install() -> None:
    """Patch Triton's interpreter in this process; a second call does nothing.

    Compiled kernels are not affected: only the interpreter's classes change, and
    `TritonSemantic.dot_scaled` accepts plain strings.
    """
    builder = stock.InterpreterBuilder
    if getattr(builder, "_mxpert_installed", False):
        return
    for name, wrap in (
        ("binary_op", _binary_op),
        ("unary_op", _unary_op),
        ("create_clampf", _create_clampf),
        ("cast_impl", _cast_impl),
        ("create_dot", _create_dot),
    ):
        setattr(builder, name, wrap(getattr(builder, name)))
    for name, replacement in (
        ("create_fma", _create_fma),
        ("create_minnumf", _create_minnumf),
        ("create_maxnumf", _create_maxnumf),
        ("create_fp_to_fp", _create_fp_to_fp),
        ("get_bf16", _get_bf16),
        ("create_dot_scaled", _create_dot_scaled),
    ):
        setattr(builder, name, replacement)
    for operations, names in (
        (stock.ReduceOps, ("min_max", "sum")),
        (stock.ScanOps, ("cumsum", "cumprod")),
    ):
        for name in names:
            setattr(operations, name, _reduction(getattr(operations, name)))
    TritonSemantic.dot_scaled = _dot_scaled(TritonSemantic.dot_scaled)
    triton_speed.install_interpreter()
    builder._mxpert_installed = True
