"""The patched interpreter against torch, code for code.

torch's own conversions and matmul are the oracle; the stock interpreter of Triton 3.6.0 fails 89 of
these 91 tests.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from mxpert.formats import E2M1, E4M3, E5M2, decode, decode_scale, pack_codes

FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
BF16_CODES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@triton.jit
def _cast_kernel(out_ptr, x_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _cast_kernel[(1,)](out, x, N=x.numel(), ROUNDING=rounding)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check equality bit for bit; any two NaN count as equal."""
    nan = expected.float().isnan()
    torch.testing.assert_close(actual.float().isnan(), nan)
    torch.testing.assert_close(bits(actual)[~nan], bits(expected)[~nan], rtol=0, atol=0)


def float32_near_bfloat16() -> torch.Tensor:
    """float32 values around every bf16 value: exact, ties, and near ties."""
    low = torch.tensor([0, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    high = (torch.arange(1 << 16, dtype=torch.int64) << 16).to(torch.int32)
    return (high[:, None] | low).view(torch.float32).flatten()


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_to_fp8_saturates_and_rounds_to_even(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    x = BF16_CODES.view(torch.int16).view(torch.float16) if source == torch.float16 else BF16_CODES
    x = float32_near_bfloat16() if source == torch.float32 else x
    actual = cast(x, dtype)
    finite = ~x.isnan()
    expected = x.float().clamp(-FP8[dtype], FP8[dtype]).to(dtype)
    assert torch.equal(bits(actual)[finite], bits(expected)[finite])
    assert (bits(actual)[~finite] == 0x7F).all()


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_fp8_code_decodes(dtype: torch.dtype, target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert_same_codes(cast(codes, target), codes.to(target))


def test_float32_to_bfloat16_rounds_to_even() -> None:
    x = float32_near_bfloat16()
    assert_same_codes(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_float32_to_bfloat16_towards_zero() -> None:
    x = float32_near_bfloat16()
    x = torch.where(x.isfinite(), x, 0.0)
    truncated = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert_same_codes(cast(x, torch.bfloat16, "rtz"), truncated)


@pytest.mark.parametrize("source", [torch.int32, torch.uint8, torch.float16], ids=str)
def test_other_types_to_bfloat16_and_back(source: torch.dtype) -> None:
    x = torch.arange(256, dtype=torch.int32).to(source)
    assert_same_codes(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(cast(x.to(torch.bfloat16), source), x.to(torch.bfloat16).to(source))


@triton.jit
def _arithmetic_kernel(out_ptr, mask_ptr, a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    a = tl.load(a_ptr + offsets)
    b = tl.load(b_ptr + offsets)
    c = tl.load(c_ptr + offsets)
    tl.store(out_ptr + 0 * N + offsets, a + b)
    tl.store(out_ptr + 1 * N + offsets, a - b)
    tl.store(out_ptr + 2 * N + offsets, a * b)
    tl.store(out_ptr + 3 * N + offsets, tl.minimum(a, b))
    tl.store(out_ptr + 4 * N + offsets, tl.maximum(a, b))
    tl.store(out_ptr + 5 * N + offsets, tl.where(a < b, a, c))
    tl.store(out_ptr + 6 * N + offsets, tl.clamp(a, tl.full([N], -1, a.dtype), tl.abs(b)))
    tl.store(out_ptr + 7 * N + offsets, tl.fma(a, b, c))
    tl.store(mask_ptr + 0 * N + offsets, a < b)
    tl.store(mask_ptr + 1 * N + offsets, a >= b)
    tl.store(mask_ptr + 2 * N + offsets, a == b)
    tl.store(mask_ptr + 3 * N + offsets, (a != b) & (a > c))


def test_bfloat16_arithmetic_and_comparisons() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 1 << 14
    a, b, c = (
        torch.randint(0, 1 << 16, (n,), generator=generator).to(torch.int16).view(torch.bfloat16)
        for _ in range(3)
    )
    # torch.fmin keeps signalling NaN; the instructions and the patch return one NaN only.
    a, b, c = (torch.where(x.isnan(), float("nan"), x) for x in (a, b, c))
    a[:6] = torch.tensor([float("nan"), 1.0, float("inf"), -0.0, 1.0, 2.0])
    b[:6] = torch.tensor([1.0, float("nan"), float("-inf"), 0.0, 1.0, -2.0])
    out = torch.empty(8, n, dtype=torch.bfloat16)
    mask = torch.empty(4, n, dtype=torch.bool)
    _arithmetic_kernel[(1,)](out, mask, a, b, c, N=n)

    fma = (a.double() * b.double() + c.double()).float().bfloat16()
    low = torch.tensor(-1.0, dtype=torch.bfloat16)
    expected = [
        a + b,
        a - b,
        a * b,
        torch.fmin(a, b),
        torch.fmax(a, b),
        torch.where(a < b, a, c),
        None,
        fma,
    ]
    for row, want in zip(out, expected, strict=True):
        if want is not None:
            ordered = want != 0  # the sign of min(-0, 0) is not fixed
            assert_same_codes(row[ordered], want[ordered])
            assert (row[~ordered] == 0).all()
    ordered = ~(a.isnan() | b.isnan())
    assert_same_codes(out[6][ordered], torch.minimum(torch.maximum(a, low), b.abs())[ordered])
    for row, want in zip(mask, [a < b, a >= b, a == b, (a != b) & (a > c)], strict=True):
        assert torch.equal(row, want)


@triton.jit
def _reduce_kernel(sum_ptr, scan_ptr, x_ptr, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)
    columns = tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns)
    tl.store(sum_ptr + rows, tl.sum(x, axis=1))
    tl.store(scan_ptr + rows[:, None] * N + columns, tl.cumsum(x, axis=1))


def test_bfloat16_sum_and_cumsum() -> None:
    x = torch.randint(-8, 9, (16, 32), generator=torch.Generator().manual_seed(1)).bfloat16() / 4
    total, scan = torch.empty(16, dtype=torch.bfloat16), torch.empty(16, 32, dtype=torch.bfloat16)
    _reduce_kernel[(1,)](total, scan, x, M=16, N=32)
    assert_same_codes(total, x.float().sum(1).bfloat16())
    assert_same_codes(scan, x.float().cumsum(1).bfloat16())


@triton.jit
def _fma_kernel(out_ptr, a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    a, b, c = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets), tl.load(c_ptr + offsets)
    tl.store(out_ptr + offsets, tl.fma(a, b, c))


def test_float32_fma_rounds_once() -> None:
    a = torch.full((16,), 1.0 + 2.0**-12)
    out = torch.empty(16)
    _fma_kernel[(1,)](out, a, a, torch.full((16,), -1.0), N=16)
    assert (out == 2.0**-11 + 2.0**-24).all()


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.full([M, N], 0.5, tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, acc))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FP8], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    """Small integers over 8: every product and partial sum is exact in any order."""
    generator = torch.Generator().manual_seed(2)
    a = (torch.randint(-8, 9, (32, 64), generator=generator) / 8).to(dtype)
    b = (torch.randint(-8, 9, (64, 16), generator=generator) / 8).to(dtype)
    a[3, 5] = float("nan")
    out = torch.empty(32, 16)
    _dot_kernel[(1,)](out, a, b, M=32, N=16, K=64)
    torch.testing.assert_close(out, a.float() @ b.float() + 0.5, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _dot_scaled_kernel(
    out_ptr,
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_BYTES: tl.constexpr,
    B_BYTES: tl.constexpr,  # stored elements along K
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
):
    m, n, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * A_BYTES + tl.arange(0, A_BYTES)[None, :])
    b = tl.load(b_ptr + n[None, :] * B_BYTES + tl.arange(0, B_BYTES)[:, None])
    a_scale = None
    if A_SCALED:
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + groups[None, :])
    b_scale = None
    if B_SCALED:
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + groups[None, :])
    acc = tl.full([M, N], 0.25, tl.float32)
    acc = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


def scaled_operand(
    fmt: str, rows: int, k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored tensor, scale bytes and float64 values (without scales) of [rows, k] codes."""
    scale = torch.randint(117, 138, (rows, k // 32), generator=generator).to(torch.uint8)
    if fmt == "bf16":
        stored = torch.randn(rows, k, generator=generator).bfloat16()
        return stored, scale, stored.double()
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[fmt]
    codes = torch.randint(0, 1 << element.bits, (rows, k), generator=generator).to(torch.uint8)
    codes[~decode(codes, element).isfinite()] = 0
    return pack_codes(codes) if fmt == "e2m1" else codes, scale, decode(codes, element).double()


FORMATS = ("bf16", "e4m3", "e5m2", "e2m1")


@pytest.mark.parametrize(
    "scaled",
    list(itertools.product([True, False], repeat=2)),
    ids=lambda s: f"scales_{'a' * s[0]}{'b' * s[1]}" if any(s) else "unscaled",
)
@pytest.mark.parametrize("b_format", FORMATS)
@pytest.mark.parametrize("a_format", FORMATS)
def test_dot_scaled(a_format: str, b_format: str, scaled: tuple[bool, bool]) -> None:
    """Against float64, rounded once: the patch accumulates in float64, so one ulp bounds it."""
    generator = torch.Generator().manual_seed(3)
    m, n, k = 16, 32, 64
    a, a_scale, a_values = scaled_operand(a_format, m, k, generator)
    b, b_scale, b_values = scaled_operand(b_format, n, k, generator)
    out = torch.empty(m, n)
    _dot_scaled_kernel[(1,)](
        out,
        a,
        a_scale,
        b,
        b_scale,
        M=m,
        N=n,
        K=k,
        A_BYTES=a.shape[1],
        B_BYTES=b.shape[1],
        A_FORMAT=a_format,
        B_FORMAT=b_format,
        A_SCALED=scaled[0],
        B_SCALED=scaled[1],
    )
    if scaled[0]:
        a_values = a_values * decode_scale(a_scale, torch.float64).repeat_interleave(32, 1)
    if scaled[1]:
        b_values = b_values * decode_scale(b_scale, torch.float64).repeat_interleave(32, 1)
    # Sums of 64 products in another order differ by at most 64 eps of the sum of magnitudes.
    order = 64 * torch.finfo(torch.float64).eps * (a_values.abs() @ b_values.abs().T)
    exact = a_values @ b_values.T + 0.25
    error = (out.double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-24 + order).all()


@pytest.mark.parametrize("b_format", ["e2m1", "e4m3", "e5m2"])
def test_dot_scaled_scale_255_is_nan_in_its_row_alone(b_format: str) -> None:
    generator = torch.Generator().manual_seed(4)
    a, a_scale, _ = scaled_operand("e4m3", 16, 64, generator)
    b, b_scale, _ = scaled_operand(b_format, 32, 64, generator)
    a_scale[5, 1] = 255
    b_scale[9, 0] = 255
    out = torch.empty(16, 32)
    _dot_scaled_kernel[(1,)](
        out,
        a,
        a_scale,
        b,
        b_scale,
        M=16,
        N=32,
        K=64,
        A_BYTES=64,
        B_BYTES=b.shape[1],
        A_FORMAT="e4m3",
        B_FORMAT=b_format,
        A_SCALED=True,
        B_SCALED=True,
    )
    expected = torch.zeros(16, 32, dtype=torch.bool)
    expected[5], expected[:, 9] = True, True
    assert torch.equal(out.isnan(), expected)


@triton.jit
def _pack_outer_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    k, half_m, n = tl.arange(0, K), tl.arange(0, M // 2), tl.arange(0, N)
    a = tl.load(a_ptr + half_m[:, None] * K + k[None, :])  # [M/2, K], packed along M
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.dot_scaled(a, None, "e2m1", b, None, "bf16", lhs_k_pack=False)
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + n[None, :], acc)


def test_dot_scaled_packed_along_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (32, 64), generator=generator).to(torch.uint8)
    b = (torch.randint(-8, 9, (64, 16), generator=generator) / 8).bfloat16()
    out = torch.empty(32, 16)
    _pack_outer_kernel[(1,)](out, pack_codes(codes, axis=0), b, M=32, N=16, K=64)
    assert torch.equal(out, decode(codes, E2M1) @ b.float())
