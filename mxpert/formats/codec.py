"""Exact MX codecs: e2m1, e4m3, e5m2 codes, E8M0 scales, packing, block quantisation.

Vectorised torch on any device, without host synchronisation. Every scaling is one product with an
exact power of two, so the only rounding is the one that the element format asks for.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 (elements), 5.4 (E8M0) and
6.3 (conversion to MX).
"""

from __future__ import annotations

import torch

from ..errors import Checks, message, require, require_dtype, require_tensor
from .spec import (
    E2M1,
    E8M0_BIAS,
    E8M0_MAX,
    E8M0_NAN,
    MX_BLOCK_SIZE,
    WIDE_DTYPES,
    ElementFormat,
    MXFormat,
    ScaleRule,
    ScaleRuleLike,
    ScaleSpan,
    ScaleSpanLike,
    get_format,
)
from .stochastic import encode_stochastic
from .tensor import Layout, MXTensor

ZERO_BLOCK_SCALE = E8M0_BIAS
"""Scale byte of a block of zeros: 2^0."""

# Integer view, mantissa bits and exponent bias of the two dtypes that the arithmetic runs in.
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def exact_power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``2^exponent`` exactly, built from bits, subnormal results included.

    Args:
        exponent: signed integers; -149..127 for float32, -1074..1023 for float64.
        dtype: torch.float32 or torch.float64.

    Returns:
        Tensor of `dtype`, shape of `exponent`.

    Raises:
        TypeError: another `dtype`.

    Example:
        >>> exact_power_of_two(torch.tensor([-127, 3]), torch.float32).tolist()
        [5.877471754111438e-39, 8.0]
    """
    require_dtype(dtype, tuple(_BITS), "exact_power_of_two")
    int_dtype, mantissa_bits, bias = _BITS[dtype]
    biased = exponent.to(int_dtype) + bias
    subnormal = torch.ones_like(biased) << (biased + mantissa_bits - 1).clamp(0, mantissa_bits)
    return torch.where(biased > 0, biased << mantissa_bits, subnormal).view(dtype)


def encode(values: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Round `values` to the nearest codes of `element`, ties to even, saturating.

    ``code = argmin_c |decode(c) - clamp(value, -max, max)|``; subnormals are kept, zeros keep their
    sign. NaN becomes the code whose magnitude bits are all ones, without a sign: the NaN 0x7F of
    e4m3 and e5m2, and the largest value 6 (code 7) of e2m1, which has no NaN (inside an MX block
    the scale byte 255 carries it). An infinity stays an infinity in e5m2, and becomes what NaN
    becomes in e4m3 and e2m1, which have none.

    Args:
        values: any shape; float32, bfloat16, float16 or float64. Read exactly, never rounded first.
        element: element format of the codes.

    Returns:
        uint8 codes, one per byte, shape of `values`.

    Raises:
        TypeError: `values` is no tensor of these dtypes, or `element` no ElementFormat.

    Source:
        OCP MX 1.0, sections 5.3.1 to 5.3.3; the conversion mode is its roundTiesToEven.

    Example:
        >>> from mxpert.formats import E2M1
        >>> encode(torch.tensor([0.25, 0.75, -0.0, 5.0, 100.0]), E2M1).tolist()
        [0, 2, 8, 6, 7]
    """
    _require_element(element, "encode")
    require_tensor(values, "encode", "values", dtype=WIDE_DTYPES)
    values = _working(values)
    int_dtype, float_mantissa, float_bias = _BITS[values.dtype]
    smallest_exponent = 1 - element.bias
    size = values.abs()
    magnitude = size.clamp(max=element.max_value)
    exponent = (magnitude.view(int_dtype) >> float_mantissa).sub_(float_bias)
    exponent.clamp_(min=smallest_exponent)
    # Adding the power of two whose last place is one step of the element at this exponent rounds to
    # whole steps, ties to even; the difference of the bit patterns is their number.
    offset = exponent + (float_mantissa - element.mantissa_bits + float_bias)
    offset <<= float_mantissa
    steps = magnitude.add_(offset.view(values.dtype)).view(int_dtype).sub_(offset)
    # A code counts the representable magnitudes below it: 2^mantissa_bits of them per exponent, so
    # a mantissa that rounds up to the next exponent carries by itself.
    code = exponent.sub_(smallest_exponent).bitwise_left_shift_(element.mantissa_bits).add_(steps)
    sign_bit = 1 << (element.bits - 1)
    code |= (values.view(int_dtype) >> (8 * values.element_size() - 1)).bitwise_and_(sign_bit)
    if element.has_inf:
        lost = values.isnan()
        code += size == float("inf")  # the code after the largest finite one
    else:
        lost = (size < float("inf")).logical_not_()
    return code.masked_fill_(lost, sign_bit - 1).to(torch.uint8)


def decode(
    codes: torch.Tensor, element: ElementFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the exact values of `codes`.

    ``value = (-1)^s * 2^(max(field, 1) - bias) * (mantissa / 2^mantissa_bits + [field > 0])``

    Args:
        codes: uint8, one code per byte, any shape. Bits above the element's width are ignored.
        element: element format of the codes.
        dtype: float32, bfloat16, float16 or float64; all hold every value exactly.

    Returns:
        Tensor of `dtype`, shape of `codes`, contiguous.

    Raises:
        TypeError: `codes` not uint8, `dtype` not one of the four, or `element` no ElementFormat.

    Source:
        OCP MX 1.0, sections 5.3.1 to 5.3.3.

    Example:
        >>> from mxpert.formats import E4M3
        >>> decode(torch.tensor([1, 126, 0x80], dtype=torch.uint8), E4M3).tolist()
        [0.001953125, 448.0, -0.0]
    """
    _require_element(element, "decode")
    require_tensor(codes, "decode", "codes", dtype=torch.uint8)
    require_dtype(dtype, WIDE_DTYPES, "decode")
    if element.bits < 8:
        codes = codes & ((1 << element.bits) - 1)
    table = _value_table(element, codes.device).to(dtype)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def pack_codes(codes: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Pack 4-bit codes two a byte along `axis`: ``byte[i] = code[2 i] | code[2 i + 1] << 4``.

    Args:
        codes: uint8, one code per byte in its low nibble (the high nibble is ignored).
        axis: axis of even length along which neighbours share a byte.

    Returns:
        uint8, contiguous, `axis` half as long.

    Raises:
        TypeError: `codes` not uint8.
        ValueError: `axis` out of range or of odd length.

    Example:
        >>> pack_codes(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist()
        [33, 243]
    """
    need = Checks("pack_codes")
    need.tensor(codes, "codes", dtype=torch.uint8)
    axis = _negative_axis(codes, axis, "pack_codes")
    size = codes.shape[axis]
    need(size % 2 == 0, f"codes.shape[{axis}]", "an even length", size, "append one zero code")
    low, high = codes.unflatten(axis, (size // 2, 2)).unbind(axis)
    result: torch.Tensor = ((low & 0xF) | (high << 4)).contiguous()
    return result


def unpack_codes(packed: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Unpack two 4-bit codes per byte along `axis`, low nibble first; inverse of `pack_codes`.

    Args:
        packed: uint8, two codes per byte.
        axis: packed axis.

    Returns:
        uint8 codes 0..15, contiguous, `axis` twice as long.

    Raises:
        TypeError: `packed` not uint8.
        ValueError: `axis` out of range.

    Example:
        >>> unpack_codes(torch.tensor([33, 243], dtype=torch.uint8)).tolist()
        [1, 2, 3, 15]
    """
    require_tensor(packed, "unpack_codes", "packed", dtype=torch.uint8)
    axis = _negative_axis(packed, axis, "unpack_codes")
    codes = torch.stack((packed & 0xF, packed >> 4), dim=packed.dim() + axis + 1)
    return codes.flatten(axis - 1, axis)


def block_scale(amax: torch.Tensor, fmt: MXFormat | str, rule: ScaleRuleLike) -> torch.Tensor:
    """Return the E8M0 byte of blocks whose largest magnitudes are `amax`.

    With ``amax = m * 2^e``, ``1 <= m < 2``, and the element's ``max = m_max * 2^emax``, the byte is
    ``clamp(127 + e - emax + up, 0, 254)`` where `up` is 0 for FLOOR, ``[m > m_max]`` for RCEIL,
    ``[m > 1]`` for CEIL, and for EVEN 1 where m rounds to 2 at the element's mantissa width. All
    from the bits of amax, hence exact (a float32 logarithm is not, just above powers of two).

    Special values: a zero amax gives 127; NaN and infinity give 255, whatever the rule.

    Args:
        amax: magnitudes (the sign is ignored); float32, bfloat16, float16 or float64, any shape.
        fmt: MX format or its name.
        rule: scale rule.

    Returns:
        uint8 scale bytes, shape of `amax`.

    Raises:
        TypeError: wrong dtype of `amax`, or `rule` no ScaleRule.
        ValueError: unknown format name.

    Source:
        OCP MX 1.0, sections 5.4.1 and 6.3; RCEIL as in the cuBLAS documentation, "block scaling".

    Example:
        >>> block_scale(torch.tensor([6.0, 6.1, 0.0]), "mxfp4", ScaleRule.RCEIL).tolist()
        [127, 128, 127]
    """
    op = "block_scale"
    require_tensor(amax, op, "amax", dtype=WIDE_DTYPES)
    element = get_format(fmt, op, "fmt").element
    rule = ScaleRule.parse(rule, op, "rule")
    amax = _working(amax).abs()
    int_dtype, mantissa_bits, bias = _BITS[amax.dtype]
    bits = amax.view(int_dtype)
    # Float32 subnormals read as 2^-127 * m here: every rule then falls below byte 0 and clamps.
    exponent = (bits >> mantissa_bits) - bias
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if rule is ScaleRule.FLOOR:
        threshold = 1 << mantissa_bits  # never reached
    elif rule is ScaleRule.CEIL:
        threshold = 1
    elif rule is ScaleRule.EVEN:
        # The tie between the last mantissa, which is odd, and 2 goes to 2.
        threshold = (1 << mantissa_bits) - (1 << (mantissa_bits - element.mantissa_bits - 1))
    else:
        threshold = int((element.max_value / 2**element.emax - 1) * (1 << mantissa_bits)) + 1
    byte = E8M0_BIAS + exponent - element.emax + (mantissa >= threshold).to(int_dtype)
    byte = torch.where(amax == 0, ZERO_BLOCK_SCALE, byte.clamp(0, E8M0_MAX))
    return torch.where(amax < float("inf"), byte, E8M0_NAN).to(torch.uint8)


def decode_scale(scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ``2^(scale - 127)`` exactly; 255 is NaN.

    Args:
        scale: uint8 E8M0 bytes, any shape.
        dtype: float32, bfloat16 or float64; each holds all 255 powers (2^-127 as a subnormal of the
            first two), which float16 does not.

    Returns:
        Tensor of `dtype`, shape of `scale`.

    Raises:
        TypeError: `scale` not uint8, or another `dtype`.

    Source:
        OCP MX 1.0, section 5.4.1.

    Example:
        >>> decode_scale(torch.tensor([127, 130, 255], dtype=torch.uint8)).tolist()
        [1.0, 8.0, nan]
    """
    op = "decode_scale"
    require_tensor(scale, op, "scale", dtype=torch.uint8)
    require_dtype(dtype, (torch.float32, torch.bfloat16, torch.float64), op)
    value = _scale_power(scale, sign=1, dtype=_working_dtype(dtype))
    return value.to(dtype)


def quantize_blocks(
    x: torch.Tensor,
    fmt: MXFormat | str,
    axis: int = -1,
    rule: ScaleRuleLike = ScaleRule.RCEIL,
    *,
    span: ScaleSpanLike = ScaleSpan.BLOCK,
    random: torch.Tensor | None = None,
) -> MXTensor:
    """Quantise blocks of 32 consecutive elements along `axis`.

    ``scale = block_scale(max |x|, fmt, rule); qdata = encode(x * 2^(127 - scale))``, with the
    maximum over a block, or with SQUARE over the blocks of 32 neighbouring rows. The last square
    has the rows that are left.

    Special values, per block: all zeros give scale byte 127 and zero codes with their signs. Any
    NaN or infinity gives scale byte 255 and NaN codes (e2m1: code 7) throughout, so that all 32
    values read back as NaN. float64 magnitudes above the largest value times 2^127 saturate.
    Blocks below the range of byte 0 (2^-127) round to its subnormals or to zero.

    Args:
        x: float32, bfloat16, float16 or float64; any shape and strides. Not differentiated.
        fmt: MX format or its name ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2").
        axis: quantised axis; its length must be a multiple of 32 (0 is one).
        rule: how the scale follows from the block's maximum.
        span: BLOCK or SQUARE, which needs axis -1 or -2 of a tensor with two dimensions or more.
        random: `stochastic.random_bits` of the shape of x, to round stochastically; not float64.

    Returns:
        MXTensor with contiguous `qdata` (MXFP4 packed along `axis`) and `scale`, in the dimension
        order of `x`, its axis negative.

    Raises:
        TypeError: wrong dtype, or `rule` no ScaleRule.
        ValueError: no dimensions, `axis` out of range, length not a multiple of 32, unknown format.

    Source:
        OCP MX 1.0, section 6.3. Equal to torchao 0.18's `to_mx` bit for bit, except that torchao
        writes scale byte 0 for a block of zeros (same values), a finite scale for a block with an
        infinity, scales blocks at byte 0 by 2^126 or 1 instead of 2^127, takes RCEIL's exponent
        from a float32 logarithm, which is one short just above a power of two, and leaves other
        codes beside scale byte 255.

    Example:
        >>> t = quantize_blocks(torch.arange(64.0).reshape(2, 32), "mxfp8_e4m3")
        >>> t.scale.tolist(), t.qdata.shape
        ([[124], [125]], torch.Size([2, 32]))
    """
    op = "quantize_blocks"
    require_tensor(x, op, "x", dtype=WIDE_DTYPES)
    fmt = get_format(fmt, op, "fmt")
    rule = ScaleRule.parse(rule, op, "rule")
    axis = _negative_axis(x, axis, op)
    size, block = x.shape[axis], fmt.block_size
    require(
        size % block == 0,
        op,
        f"x.shape[{axis}]",
        need=f"a multiple of {block}",
        got=size,
        remedy=f"pad the axis with {-size % block} zeros, for example with torch.nn.functional.pad",
    )
    span = ScaleSpan.parse(span, op, "span")
    check_square_axis(span, op, x.dim(), axis)
    blocks = _working(x).unflatten(axis, (size // block, block))
    amax = blocks.abs().amax(axis)
    if span is ScaleSpan.SQUARE:
        amax = _square_maximum(amax, -3 - axis)
    scale = block_scale(amax, fmt, rule)
    inverse = _scale_power(scale, sign=-1, dtype=blocks.dtype).unsqueeze(axis)
    # One exact product. Float32 results below 2^-126 round, but far below half of the smallest
    # code, so that the code is the same; float64 overflow is saturation anyway.
    scaled, kind = blocks * inverse, fmt.element
    codes = encode(scaled, kind) if random is None else encode_stochastic(scaled, kind, random)
    codes = codes.flatten(axis - 1, axis)
    qdata = pack_codes(codes, axis) if fmt.codes_per_byte == 2 else codes.contiguous()
    return MXTensor(qdata, scale.contiguous(), fmt, axis, scale_span=span)


def check_square_axis(span: ScaleSpan, op: str, dims: int, axis: int) -> None:
    """Check a span of `quantize`: BLOCK, or SQUARE with a negative axis of the last two."""
    need = Checks(op)
    need(
        span in (ScaleSpan.BLOCK, ScaleSpan.SQUARE),
        "scale_span",
        "BLOCK or SQUARE",
        span,
        "quantize_dual makes the other spans",
    )
    need(
        span is ScaleSpan.BLOCK or (dims > 1 and axis in (-1, -2)),
        "axis",
        "one of the last two of a matrix, with SQUARE",
        f"axis {axis} of {dims} dimensions",
        "move the matrix to the last two dimensions (torch.movedim)",
    )


def _square_maximum(amax: torch.Tensor, rows: int) -> torch.Tensor:
    """The maximum of each 32 neighbours along axis `rows`, -1 or -2, in the place of each."""
    size = amax.shape[rows]
    count = -(-size // MX_BLOCK_SIZE)
    below = [0, 0] * (-1 - rows) + [0, count * MX_BLOCK_SIZE - size]
    squares = torch.nn.functional.pad(amax, below).unflatten(rows, (count, MX_BLOCK_SIZE))
    each: torch.Tensor = squares.amax(rows).repeat_interleave(MX_BLOCK_SIZE, rows)
    return each.narrow(rows, 0, size)


def dequantize_blocks(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of an MX tensor: ``decode(qdata) * 2^(scale - 127)``.

    float64 is exact for every code and scale. float32 is exact too, except that values from 2^128
    on become infinite and values that need bits below 2^-149 are rounded to nearest even; bfloat16
    and float16 are the nearest even of that dtype.

    Args:
        t: MX tensor in ROW_MAJOR layout, any axis.
        dtype: float32, bfloat16, float16 or float64.

    Returns:
        Contiguous tensor of `dtype`, shape ``t.shape``; NaN where the scale byte is 255.

    Raises:
        TypeError: `t` is no MXTensor, or another `dtype`.
        ValueError: `t` is in a backend's own layout.

    Source:
        OCP MX 1.0, section 6.1 (the value of an MX block).

    Example:
        >>> t = quantize_blocks(torch.full((32,), 3.0), "mxfp4")
        >>> dequantize_blocks(t)[:2].tolist()
        [3.0, 3.0]
    """
    op = "dequantize_blocks"
    if not isinstance(t, MXTensor):
        raise TypeError(message(op, "t", "an MXTensor", type(t).__name__, "quantise it first"))
    require(
        t.layout is Layout.ROW_MAJOR,
        op,
        "t.layout",
        need=Layout.ROW_MAJOR,
        got=t.layout,
        remedy="invert the layout first",
    )
    require_dtype(dtype, WIDE_DTYPES, op)
    working = _working_dtype(dtype)
    axis, block = t.axis, t.format.block_size
    codes = unpack_codes(t.qdata, axis) if t.format.codes_per_byte == 2 else t.qdata
    values = decode(codes, t.format.element, working)
    blocks = values.unflatten(axis, (codes.shape[axis] // block, block))
    scale = _scale_power(t.scale, sign=1, dtype=working).unsqueeze(axis)
    # Float32 holds 4-bit mantissas down to 2^-146: rounding twice to a narrower type never differs.
    result: torch.Tensor = (blocks * scale).flatten(axis - 1, axis).to(dtype).contiguous()
    return result


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64, else float32, which holds the others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _working(values: torch.Tensor) -> torch.Tensor:
    # The bits are read below: a view that torch negates lazily must be negated now.
    return values.detach().to(_working_dtype(values.dtype)).resolve_neg()


def _scale_power(scale: torch.Tensor, *, sign: int, dtype: torch.dtype) -> torch.Tensor:
    """``2^(sign * (scale - 127))`` with NaN for byte 255."""
    exponent = scale.to(torch.int32) - E8M0_BIAS
    power = exact_power_of_two(sign * exponent.clamp(max=E8M0_MAX - E8M0_BIAS), dtype)
    return power.masked_fill(scale == E8M0_NAN, float("nan"))


def _value_table(element: ElementFormat, device: torch.device) -> torch.Tensor:
    """Float64 value of every code, made on `device` (no copy from the host: graph-capturable)."""
    code = torch.arange(1 << element.bits, device=device, dtype=torch.int32)
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    field = magnitude >> element.mantissa_bits
    mantissa = magnitude & ((1 << element.mantissa_bits) - 1)
    steps = mantissa + ((field > 0).to(torch.int32) << element.mantissa_bits)
    exponent = field.clamp(min=1) - element.bias - element.mantissa_bits
    value = steps.to(torch.float64) * exact_power_of_two(exponent, torch.float64)
    value = torch.where(code > magnitude, -value, value)
    if element.has_inf:  # the last exponent holds the infinities and, beside them, the NaNs
        value = torch.where(value.abs() > element.max_value, value * float("inf"), value)
        special = (1 << element.exponent_bits) - 1
        return value.masked_fill((field == special) & (mantissa > 0), float("nan"))
    if element.has_nan:  # only the code of all ones
        return value.masked_fill(magnitude == (1 << (element.bits - 1)) - 1, float("nan"))
    return value


def _negative_axis(x: torch.Tensor, axis: int, op: str) -> int:
    dims = x.dim()
    require(
        isinstance(axis, int) and -dims <= axis < dims,
        op,
        "axis",
        need=f"an axis of a {dims}-dimensional tensor",
        got=axis,
    )
    return axis - dims if axis >= 0 else axis


def _require_element(element: object, op: str) -> None:
    require(
        isinstance(element, ElementFormat),
        op,
        "element",
        need="an ElementFormat",
        got=type(element).__name__,
        remedy=f"pass for example {E2M1.name.upper()}",
        error=TypeError,
    )
