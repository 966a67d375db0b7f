"""Comparators that raise, and tolerances that are derived, not tuned.

A kernel is compared with the float64 reference on the same quantised operands. Three errors are
allowed: rounding of the output, rounding in the accumulator, and codes that flip because
accumulator noise crosses a rounding boundary. Each has a function here with its derivation.
`stage_tolerance` and `end_to_end_tolerance` add them in squares and never exceed the gates. What
quantisation itself costs is derived in `noise`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..errors import message, require
from ..formats.codec import dequantize_blocks, pack_codes, unpack_codes
from ..formats.spec import MXFormat, get_format
from ..formats.tensor import MXTensor
from ..formats.token import FP8_TOKEN

STAGE_GATE = 2.5e-3
"""Largest relative L2 allowed for any stage with bfloat16 output."""

END_TO_END_GATE = 1e-2
"""Largest relative L2 allowed for a whole layer, and for a stage with MX output."""

UNPROMOTED_ERROR = 2.0**-13 / math.sqrt(6)
"""Times the root of the depth: what Hopper's tensor core may add where it sums fp8 products by
itself; each addition of 32 drops bits below 2^-13 of the sum."""
_UNPROMOTED_DEPTH = 8192
"""Longer sums are promoted to float32 on their way."""

_SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def relative_l2(actual: torch.Tensor | MXTensor, expected: torch.Tensor | MXTensor) -> float:
    """``‖actual − expected‖ / ‖expected‖`` in float64; NaN where either holds a NaN or infinity.

    Args:
        actual, expected: same logical shape; MXTensors are dequantised.

    Returns:
        0.0 for two empty or equal tensors, infinity where only `expected` is zero.

    Raises:
        ValueError: different shapes.

    Example:
        >>> relative_l2(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    actual, expected = _pair(actual, expected, "relative_l2")
    error, norm = (actual - expected).norm().item(), expected.norm().item()
    if not (math.isfinite(error) and math.isfinite(norm)):
        return math.nan
    if error == 0:
        return 0.0
    return error / norm if norm else math.inf


def cosine(actual: torch.Tensor | MXTensor, expected: torch.Tensor | MXTensor) -> float:
    """``⟨actual, expected⟩ / (‖actual‖ ‖expected‖)`` in float64; NaN for NaN or a zero norm.

    Example:
        >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
        0.0
    """
    actual, expected = _pair(actual, expected, "cosine")
    norms = (actual.norm() * expected.norm()).item()
    return (actual * expected).sum().item() / norms if norms else math.nan


def sqnr_db(actual: torch.Tensor | MXTensor, expected: torch.Tensor | MXTensor) -> float:
    """Signal to quantisation noise ``−20 log10(relative_l2)`` in dB; infinity for equal tensors.

    Example:
        >>> sqnr_db(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        20.0
    """
    error = relative_l2(actual, expected)
    return math.inf if error == 0 else -20 * math.log10(error)


def is_exact(
    actual: torch.Tensor | MXTensor,
    expected: torch.Tensor | MXTensor,
    *,
    ignore_zero_sign: bool = False,
) -> bool:
    """Whether two tensors agree bit for bit: dtype, shape, every code, NaN payloads included.

    Args:
        actual, expected: two tensors, or two MXTensors (codes and scales are compared).
        ignore_zero_sign: treat −0 as equal to 0. The sign of a zero sum depends on whether the
            accumulator starts at 0 or at the first product; both are correct.

    Example:
        >>> is_exact(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    if isinstance(actual, MXTensor) and isinstance(expected, MXTensor):
        if ignore_zero_sign:
            actual, expected = _canonical_zeros(actual), _canonical_zeros(expected)
        return (
            actual.format == expected.format
            and actual.axis == expected.axis
            and torch.equal(actual.qdata, expected.qdata)
            and torch.equal(actual.scale, expected.scale)
        )
    if isinstance(actual, MXTensor) or isinstance(expected, MXTensor):
        return False
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if ignore_zero_sign:
        actual, expected = actual + 0, expected + 0  # −0 + 0 = 0
    return torch.equal(_bits(actual), _bits(expected.to(actual.device)))


def assert_exact(
    actual: torch.Tensor | MXTensor,
    expected: torch.Tensor | MXTensor,
    what: str,
    *,
    ignore_zero_sign: bool = False,
) -> None:
    """Raise unless `is_exact`.

    Raises:
        AssertionError: gives the number of differing values and the place of the first.
    """
    if is_exact(actual, expected, ignore_zero_sign=ignore_zero_sign):
        return
    if isinstance(actual, MXTensor) and isinstance(expected, MXTensor):
        actual, expected = dequantize_blocks(actual), dequantize_blocks(expected)
    if isinstance(actual, MXTensor) or isinstance(expected, MXTensor):
        raise AssertionError(message(what, "type", type(expected).__name__, type(actual).__name__))
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            message(
                what,
                "tensor",
                f"{expected.dtype} {list(expected.shape)}",
                f"{actual.dtype} {list(actual.shape)}",
            )
        )
    wrong = (actual.double() != expected.double()).nonzero()
    where = wrong[0].tolist() if len(wrong) else "bits only (zero signs, NaN payloads or codes)"
    first = (
        ""
        if not len(wrong)
        else (f", {actual[tuple(wrong[0])].item()!r} for {expected[tuple(wrong[0])].item()!r}")
    )
    raise AssertionError(
        message(
            what,
            "values",
            "bit-identical tensors",
            f"{len(wrong)} of {actual.numel()} differ, first at {where}{first}",
        )
    )


def assert_close_relative(
    actual: torch.Tensor | MXTensor, expected: torch.Tensor | MXTensor, tolerance: float, what: str
) -> float:
    """Raise unless ``relative_l2(actual, expected) ≤ tolerance``; NaN never passes.

    Args:
        actual, expected: same logical shape. tolerance: derived by a function of this module.
        what: name of the comparison in the message.

    Returns:
        The measured relative L2.

    Raises:
        AssertionError: gives relative L2, cosine and the largest single error.

    Example:
        >>> assert_close_relative(torch.ones(3), torch.ones(3), 1e-3, "ones")
        0.0
    """
    error = relative_l2(actual, expected)
    if error <= tolerance:
        return error
    actual, expected = _pair(actual, expected, what)
    finite = actual.isfinite() & expected.isfinite()
    difference = (actual - expected).abs().masked_fill(~finite, math.inf)
    place = int(difference.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), tuple(actual.shape))]
    raise AssertionError(
        message(
            what,
            "relative L2",
            f"at most {tolerance:.3e}",
            f"{error:.3e} (cosine {cosine(actual, expected):.6f}, {(~finite).sum().item()} of "
            f"{actual.numel()} not finite, largest error at {at}: "
            f"{actual.flatten()[place].item():.6g} for {expected.flatten()[place].item():.6g})",
        )
    )


def rounding_rms(significant_bits: int) -> float:
    """Expected relative L2 of rounding to nearest with p bits: ``2^(1−p) / √(32 ln 2)``.

    The error of a value ``2^e m``, 1 ≤ m < 2, is uniform over one unit ``2^(e + 1 − p)``. Relative
    to the value's energy its variance is ``4^(1−p) / (12 m²)``. For logarithmically uniform
    mantissas ``E[1 / m²] = 3 / (8 ln 2)``. (The worst case is ``2^−p``, 2.4 times as much: every
    value just above a power of two, with an error of half a unit.)

    >>> round(rounding_rms(8), 6)
    0.001659
    """
    return 2.0 ** (1 - significant_bits) / math.sqrt(32 * math.log(2))


def sampling_margin(numel: int) -> float:
    """Factor by which the relative L2 of `numel` roundings may exceed its expectation.

    Squared errors e² and values v² of Gaussian data, scaled to mean 1, have ``E[e⁴] ≤ 9/5 · 3.6``
    (U uniform, times ``E[16^e] / E[4^e]²``) and ``E[e² v²] ≈ E[v⁴] = 3``. The ratio of their means
    has relative variance ``(E[e⁴] − 2 E[e² v²] + E[v⁴]) / N ≤ 3.5 / N``; its square root has half
    the relative deviation. Five deviations are allowed. Another half percent covers where the
    Gaussian's standard deviation lies within a binade.

    >>> round(sampling_margin(8192), 3)
    1.057
    """
    return 1.005 * (1 + 2.5 * math.sqrt(3.5 / max(1, numel)))


def effective_numel(rows: torch.Tensor) -> int:
    """Effective number of values in rows [R, N] of unequal energy, to pass as `numel`.

    The relative L2 of a tensor weights each row's squared error by the row's energy ‖r‖². The
    effective number of rows is ``(Σ‖r‖²)² / Σ‖r‖⁴``: hardly more than one if one row has most of
    the energy. Use the result as `numel` in `sampling_margin` and in the tolerances.

    >>> effective_numel(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    2
    """
    energy = rows.double().square().sum(-1)
    total = energy.sum()
    if total == 0:
        return rows.numel()
    return int(rows.shape[-1] * total.square() / energy.square().sum())


def bf16_output_tolerance(numel: int = 8192) -> float:
    """Relative L2 allowed for one rounding to bfloat16: 1.75e-3 for 8192 values."""
    return min(STAGE_GATE, rounding_rms(8) * sampling_margin(numel))


def accumulation_error(
    k: int, *, significant_bits: int = 24, terms_per_rounding: int = 16
) -> float:
    """Relative L2 of a sum of k independent products in a p-bit accumulator.

    Partial sums of n roundings grow as ``|S_i| ~ √(i/n) |S|``. Rounding to nearest adds
    independent errors of variance ``≤ (2^−p |S_i|)² / 3``: in total ``|S| 2^−p √(n / 6)`` with
    n = k (one rounding per term). A truncating accumulator adds a bias of up to ``2^−p |S_i|`` at
    each rounding: in total ``|S| 2^−p Σ √(i/n) = |S| 2^−p · 2n/3``, with ``n = k /
    terms_per_rounding``, since tensor cores add all products of an instruction at once. The
    function returns the larger of the two, which holds for both kinds.

    Args:
        k: number of products.
        significant_bits: of the accumulator; 24 for float32, 14 for Hopper's fp8 tensor cores.
        terms_per_rounding: products added by one matrix instruction, at least 16.
    """
    return 2.0**-significant_bits * max(math.sqrt(k / 6), 2 * k / (3 * terms_per_rounding))


FP8_SUM_TERMS = 256
"""Products that Hopper's FP8 kernels sum in the tensor cores before they add to float32."""

FP8_SUM_BITS = 14
"""Significant bits of the sums in Hopper's FP8 tensor cores."""

INTERMEDIATE_NOISE = 2 * accumulation_error(
    FP8_SUM_TERMS, significant_bits=FP8_SUM_BITS, terms_per_rounding=32
)
"""Relative error of an FP8 kernel's activation output before rounding. An instruction adds 32
products; the activation at most doubles relative errors."""


def requantisation_error(
    fmt: MXFormat | str | None, value_error: float, numel: int = 8192, *, row: int = 32
) -> float:
    """Relative L2 between two roundings of values that differ by `value_error` before rounding.

    A value v with error e changes its code with probability ``|e| / step``, by one step: expected
    squared error ``|e| · step``. If errors are independent of the values, its mean over rms² is
    ``E = √(2/π) value_error · s``, where s is the mean step over rms. A step is at most
    ``2^−m |v|`` above the smallest exponent, and one subnormal unit times the scale below it. The
    scale is less than ``4 amax / max`` under every rule (half of that except under CEIL), and amax
    is at most ``√32`` times a block's rms. Flips are rare. One flip adds ``q = s² / N``, five
    deviations of their sum are ``5 √(E q)``, and one flip is always allowed: the result is
    ``√(E + 5 √(E q) + q)``. A block's scale flips more rarely, by the ratio of noise to amax.
    Rounding an MX value to bfloat16 first flips with probability ``|e| / ulp``, and the code then
    flips with probability ``ulp / step``: the product is the same.

    The scale of "fp8_token" is proportional to the row's maximum, which is also rounded to
    bfloat16. It moves by one ulp u ≤ 2^−7 with probability ``|e| / ulp``. Every value of the row
    then moves by u, or with probability ``u / step`` by a step. The mean is E once more, and one
    such event adds ``q = u (u + s) row / N``.

    Args:
        fmt: an MX format or "fp8_token"; None is bfloat16 (m = 7; subnormals do not occur).
        value_error: relative L2 before rounding.
        numel: N, the number of values compared.
        row: values per "fp8_token" scale; amax is at most ``√row`` times their rms.
    """
    changes, single = 1, 0.0
    if fmt is None:
        step = 2.0**-7
    elif fmt == FP8_TOKEN:
        step = 2.0**-3 + 2.0**-9 * math.sqrt(row) / 448
        changes, single = 2, 2.0**-7 * (2.0**-7 + step) * row / max(1, numel)
    else:
        element = get_format(fmt).element
        subnormal = 2.0 ** (1 - element.bias - element.mantissa_bits)
        step = 2.0**-element.mantissa_bits + subnormal * 4 * math.sqrt(32) / element.max_value
    expected = changes * math.sqrt(2 / math.pi) * value_error * step
    single = max(single, step**2 / max(1, numel))
    return math.sqrt(expected + 5 * math.sqrt(expected * single) + single)


_ACTIVATION_GAIN = 2.0
"""Factor from the relative error of gate and up to that of the activation's output: both have the
accumulator's error (√2), and f'(g) of a gated activation exceeds f(g)/g by less than √2 in the
mean square."""


def stage_tolerance(
    a_format: str,
    out_dtype: torch.dtype | None,
    k: int,
    *,
    top_k: int = 1,
    numel: int = 8192,
    cancellation: float = 1.0,
    accumulator_bits: int = 24,
) -> float:
    """Relative L2 allowed for one stage against the float64 reference on the same operands.

    Three independent errors are added in squares and multiplied by `sampling_margin`:
        the output's rounding, `rounding_rms` (an MX output: `requantisation_error`);
        with ``top_k > 1`` under REDUCE the rounding of the rows before the sum, `rounding_rms`
        times ``√Σ‖row‖² / ‖Σ row‖``, which is 1 for rows of independent experts. Sums of rounded
        rows lie on a lattice, so ties are frequent: with spacing ``ulp / 2^j`` the output's error
        has variance ``(1 + 2 / 4^j) / 12`` ulp². j is 1 for two rows of one binade and grows by
        one with each further row;
        the accumulator's, `accumulation_error`, times the gain of an activation.

    Args:
        a_format: "bf16", "mxfp8" or "mxfp4": the activation format, also of an MX output.
        out_dtype: dtype of a plain output; None for stage 1's MX output in `a_format`.
        k: length of the reduction. top_k: rows summed by REDUCE; 1 for anything else.
        numel: number of values compared. Under REDUCE with bfloat16 output the expected error is
            2.35e-3 (2.46e-3 for two rows), close to the gate: compare at least ten thousand
            values, or use a float32 output.
        cancellation: ``√Σ‖row‖² / ‖Σ row‖`` of the reference's rows if they are not independent.
        accumulator_bits: significant bits of the kernel's accumulator.

    Returns:
        The tolerance, at most STAGE_GATE (END_TO_END_GATE for an MX output).

    Example:
        >>> round(stage_tolerance("bf16", torch.bfloat16, 2880), 5)
        0.00175
    """
    accumulated = _ACTIVATION_GAIN * accumulation_error(k, significant_bits=accumulator_bits)
    margin = sampling_margin(numel)
    if out_dtype is None:
        return min(END_TO_END_GATE, requantisation_error(mx_format(a_format), accumulated, numel))
    require(
        out_dtype in _SIGNIFICANT_BITS,
        "stage_tolerance",
        "out_dtype",
        got=out_dtype,
        need=[str(dtype) for dtype in _SIGNIFICANT_BITS],
    )
    output = rounding_rms(_SIGNIFICANT_BITS[out_dtype])
    rows = 0.0
    if top_k > 1:
        rows = cancellation * output
        output *= math.sqrt(1 + 2 / 4.0 ** (top_k - 1))
    return min(STAGE_GATE, margin * math.hypot(output, rows, cancellation * accumulated))


def grouped_gate(depth: int) -> float:
    """Largest relative L2 to float64 of a grouped GEMM with bfloat16 output, on every chip.

    The rounding of the output, and the sums of fp8 products in a tensor core.

    Args:
        depth: length of the reduction; of wgrad the mean of its groups.

    Example:
        >>> round(grouped_gate(2880), 5), round(grouped_gate(1 << 20), 5)
        (0.00366, 0.00516)
    """
    return math.hypot(STAGE_GATE, UNPROMOTED_ERROR * math.sqrt(min(depth, _UNPROMOTED_DEPTH)))


def end_to_end_tolerance(
    a_format: str,
    out_dtype: torch.dtype,
    hidden_size: int,
    intermediate_size: int,
    *,
    top_k: int = 1,
    numel: int = 8192,
    cancellation: float = 1.0,
    accumulator_bits: int = 24,
) -> float:
    """Relative L2 allowed for a layer: stage 2's tolerance plus flipped codes of the intermediate.

    Kernel and reference round the intermediate at the same place. Accumulator noise of stage 1
    makes it differ by `requantisation_error`. The down projection keeps the relative size of that
    error. Arguments as in `stage_tolerance`; the result is at most END_TO_END_GATE.
    """
    fmt: MXFormat | str | None = None
    if a_format != "bf16":
        fmt = a_format if a_format == FP8_TOKEN else mx_format(a_format)
    noise = _ACTIVATION_GAIN * accumulation_error(hidden_size, significant_bits=accumulator_bits)
    stage_two = stage_tolerance(
        a_format,
        out_dtype,
        intermediate_size,
        top_k=top_k,
        numel=numel,
        cancellation=cancellation,
        accumulator_bits=accumulator_bits,
    )
    flips = cancellation * requantisation_error(fmt, noise, numel, row=intermediate_size)
    return min(END_TO_END_GATE, math.hypot(stage_two, flips))


def mx_format(a_format: str) -> MXFormat:
    """The MX format of an activation format; refuses the others."""
    require(
        a_format in ("mxfp8", "mxfp4"),
        "mxpert.testing.numerics",
        "a_format",
        need="'mxfp8' or 'mxfp4' for an MX tensor",
        got=repr(a_format),
    )
    return get_format(a_format)


def _pair(
    actual: torch.Tensor | MXTensor, expected: torch.Tensor | MXTensor, op: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors as float64 on the device of `expected`."""
    values = [
        dequantize_blocks(t, torch.float64) if isinstance(t, MXTensor) else t.detach().double()
        for t in (actual, expected)
    ]
    require(
        values[0].shape == values[1].shape,
        op,
        "actual.shape",
        need=list(values[1].shape),
        got=list(values[0].shape),
    )
    return values[0].to(values[1].device), values[1]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that equal NaNs compare equal."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.contiguous().view(integers[tensor.element_size()])


def _canonical_zeros(tensor: MXTensor) -> MXTensor:
    """The MX tensor with every −0 code replaced by +0."""
    packed = tensor.format.codes_per_byte == 2
    codes = unpack_codes(tensor.qdata, tensor.axis) if packed else tensor.qdata
    negative_zero = 1 << (tensor.format.element.bits - 1)
    codes = codes.masked_fill(codes == negative_zero, 0)
    return replace(tensor, qdata=pack_codes(codes, tensor.axis) if packed else codes)
