"""The reference backend's grouped GEMMs against float64 on the same operands, and their SNR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import MXTensor
from mxpert.configs import ReferenceConfig
from mxpert.testing.numerics import (
    accumulation_error,
    assert_close_relative,
    assert_exact,
    effective_numel,
    rounding_rms,
    sampling_margin,
    sqnr_db,
)
from tests.grouped import oracle
from tests.grouped.oracle import GROUPS, Groups

K, N = 96, 64
FORMATS = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2"),
    "mixed": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "bf16": ("bf16", "bf16"),
}
SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
ORACLE = ReferenceConfig(accumulate=torch.float64)
Operand = torch.Tensor | MXTensor

each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
each_grouping = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with mxpert.override(backend="reference"):
        yield


def normal(*shape: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def rows_of(x: torch.Tensor, name: str, groups: Groups) -> Operand:
    if name == "bf16":
        return x.bfloat16()
    return mxpert.quantize_dual(x, name, group_offsets=groups.offsets(device=x.device))[0]


def columns_of(x: torch.Tensor, name: str, groups: Groups) -> Operand:
    if name == "bf16":
        return x.bfloat16()
    return mxpert.quantize_dual(x, name, group_offsets=groups.offsets(device=x.device))[1]


def weights_of(w: torch.Tensor, name: str, trans_b: bool) -> Operand:
    """w [G, N, K] as the operand b of `grouped_gemm`."""
    if not trans_b:
        w = w.mT.contiguous()
    return w.bfloat16() if name == "bf16" else mxpert.quantize(w, name, axis=-1 if trans_b else -2)


def tolerance(out_dtype: torch.dtype, k: int, numel: int) -> float:
    """The output's rounding and the float32 accumulator's, independent (see testing.numerics)."""
    squares = rounding_rms(SIGNIFICANT_BITS[out_dtype]) ** 2 + accumulation_error(k) ** 2
    return sampling_margin(numel) * squares**0.5


# --- against float64 ----------------------------------------------------------------------------


@each_grouping
@each_format
@pytest.mark.parametrize("trans_b", [True, False], ids=["b-nk", "b-kn"])
@pytest.mark.parametrize("out_dtype", SIGNIFICANT_BITS, ids=lambda d: str(d).split(".")[1])
def test_forward_equals_float64(groups, formats, trans_b, out_dtype, device):
    a = rows_of(normal(groups.rows, K, seed=1, device=device), formats[0], groups)
    b = weights_of(normal(len(groups.sizes), N, K, seed=2, device=device), formats[1], trans_b)
    have = mxpert.grouped_gemm(
        a, b, groups.offsets(device=device), trans_b=trans_b, out_dtype=out_dtype
    )
    want = oracle.forward(a, b, groups, trans_b=trans_b)
    assert (have.dtype, have.shape) == (out_dtype, (groups.rows, N))
    assert not have[groups.used :].any()
    assert_close_relative(have, want, tolerance(out_dtype, K, groups.used * N), "forward")


@each_grouping
@each_format
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_wgrad_equals_float64(groups, formats, out_dtype, device):
    grad = columns_of(normal(groups.rows, N, seed=3, device=device), formats[0], groups)
    a = columns_of(normal(groups.rows, K, seed=4, device=device), formats[1], groups)
    have = mxpert.grouped_wgrad(grad, a, groups.offsets(device=device), out_dtype=out_dtype)
    want = oracle.wgrad(grad, a, groups)
    assert (have.dtype, have.shape) == (out_dtype, (len(groups.sizes), N, K))
    assert not have[torch.tensor(groups.sizes, device=device) == 0].any()
    assert_close_relative(
        have,
        want,
        tolerance(out_dtype, max(groups.sizes), effective_numel(want.flatten(1))),
        "wgrad",
    )


@each_format
def test_float64_accumulation_is_an_oracle(formats):
    """With float64 throughout both sides round within 2^-53 per addition."""
    groups, name = GROUPS["mixed"], formats[0]
    a = rows_of(normal(groups.rows, K, seed=1), name, groups)
    b = weights_of(normal(len(groups.sizes), N, K, seed=2), formats[1], True)
    x, g = (columns_of(normal(groups.rows, width, seed=5), name, groups) for width in (K, N))
    with mxpert.override(config=ORACLE, backend="reference"):
        c = mxpert.grouped_gemm(a, b, groups.offsets(), out_dtype=torch.float64)
        dw = mxpert.grouped_wgrad(g, x, groups.offsets(), out_dtype=torch.float64)
    limit = 2 * accumulation_error(max(K, *groups.sizes), significant_bits=53)
    assert_close_relative(c, oracle.forward(a, b, groups), limit, "forward")
    assert_close_relative(dw, oracle.wgrad(g, x, groups), limit, "wgrad")


def shifted_offsets(a: Operand, b: Operand, groups: Groups) -> torch.Tensor:
    offsets = groups.offsets()
    offsets[3:-1] += 1
    return mxpert.grouped_gemm(a, b, offsets, out_dtype=torch.float32)


PLANTED = {
    "scales-one-block-off": lambda a, b, groups: mxpert.grouped_gemm(
        replace(a, scale=a.scale.roll(1, -1)), b, groups.offsets(), out_dtype=torch.float32
    ),
    "next-group's-weights": lambda a, b, groups: mxpert.grouped_gemm(
        a,
        replace(b, qdata=b.qdata.roll(1, 0), scale=b.scale.roll(1, 0)),
        groups.offsets(),
        out_dtype=torch.float32,
    ),
    "offsets-one-row-off": shifted_offsets,
    "no-transposition": lambda a, b, groups: mxpert.grouped_gemm(
        a,
        replace(b, axis=-2, scale=b.scale.mT),
        groups.offsets(),
        trans_b=False,
        out_dtype=torch.float32,
    ),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_the_comparison_catches(plant):
    groups = GROUPS["mixed"]
    a = rows_of(normal(groups.rows, K, seed=1), "mxfp8_e4m3", groups)
    b = weights_of(normal(len(groups.sizes), K, K, seed=2), "mxfp8_e4m3", True)
    want = oracle.forward(a, b, groups)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_close_relative(
            plant(a, b, groups), want, tolerance(torch.float32, K, want.numel()), "planted"
        )


# --- memory of no group -------------------------------------------------------------------------


def poisoned(operand: Operand, used: int, *, columns: bool) -> Operand:
    """The operand with NaN in the rows (of a columnwise copy: columns) from `used` on."""
    if not isinstance(operand, MXTensor):
        operand = operand.clone()
        operand[used:] = torch.nan
        return operand
    qdata, scale = operand.qdata.clone(), operand.scale.clone()
    if columns:
        qdata[:, used:], scale[:, used // 32 :] = 0x7F, 255
    else:
        qdata[used:], scale[used:] = 0x7F, 255
    return replace(operand, qdata=qdata, scale=scale)


@pytest.mark.parametrize("name", ["bf16", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_rows_beyond_the_last_group_are_not_read(name):
    groups = GROUPS["mixed"]
    offsets = groups.offsets(torch.int64)
    a = rows_of(normal(groups.rows, K, seed=1), name, groups)
    b = weights_of(normal(len(groups.sizes), N, K, seed=2), name, True)
    assert_exact(
        mxpert.grouped_gemm(poisoned(a, groups.used, columns=False), b, offsets),
        mxpert.grouped_gemm(a, b, offsets),
        "forward",
    )
    x, g = (columns_of(normal(groups.rows, width, seed=5), name, groups) for width in (K, N))
    used = groups.used if name == "bf16" else int(mxpert.padded_group_offsets(offsets)[-1])
    want = mxpert.grouped_wgrad(g, x, offsets)
    have = mxpert.grouped_wgrad(*(poisoned(t, used, columns=True) for t in (g, x)), offsets)
    assert not have.isnan().any()
    assert_exact(have, want, "wgrad")


@pytest.mark.parametrize("name", ["bf16", "mxfp8_e4m3"])
def test_nan_in_a_group_stays_in_its_rows(name):
    groups, x = GROUPS["mixed"], normal(GROUPS["mixed"].rows, K, seed=1)
    x[groups.starts[3] + 2, 5] = torch.nan
    b = weights_of(normal(len(groups.sizes), N, K, seed=2), name, True)
    out = mxpert.grouped_gemm(rows_of(x, name, groups), b, groups.offsets())
    assert out.isnan().any(-1).nonzero().tolist() == [[groups.starts[3] + 2]]


@pytest.mark.parametrize("view", ["expanded", "transposed", "sliced"])
def test_strided_bf16_operands(view):
    """What autograd hands over: an expanded scalar, a transposed view, a part of a wider tensor."""
    groups = GROUPS["mixed"]
    grad = {
        "expanded": torch.ones(1, 1).expand(groups.rows, N),
        "transposed": normal(N, groups.rows, seed=7).mT,
        "sliced": normal(groups.rows, 2 * N, seed=7)[:, ::2],
    }[view].bfloat16()
    a, offsets = normal(groups.rows, K, seed=8).bfloat16(), groups.offsets()
    assert_exact(
        mxpert.grouped_wgrad(grad, a, offsets),
        mxpert.grouped_wgrad(grad.contiguous(), a, offsets),
        "wgrad",
    )
    have, want = (mxpert.quantize_dual(x, group_offsets=offsets) for x in (grad, grad.contiguous()))
    assert_exact(have[0], want[0], "row")
    assert_exact(have[1], want[1], "col")


# --- accumulate_into ----------------------------------------------------------------------------


@each_format
def test_accumulate_into_adds_in_place(formats):
    groups = GROUPS["mixed"]
    offsets = groups.offsets()
    grad = columns_of(normal(groups.rows, N, seed=3), formats[0], groups)
    a = columns_of(normal(groups.rows, K, seed=4), formats[1], groups)
    start = normal(len(groups.sizes), N, K, seed=6)
    total = start.clone()
    assert mxpert.grouped_wgrad(grad, a, offsets, accumulate_into=total) is total
    once = mxpert.grouped_wgrad(grad, a, offsets, out_dtype=torch.float32)
    assert_exact(total, start + once, "accumulated once")
    mxpert.grouped_wgrad(grad, a, offsets, accumulate_into=total)
    assert_exact(total, start + once + once, "accumulated twice")
    assert_exact(total[0], start[0], "an empty group's gradient")


# --- the three GEMMs belong together ------------------------------------------------------------


def test_wgrad_and_dgrad_are_the_gradients_of_the_bf16_forward():
    groups = GROUPS["mixed"]
    offsets = groups.offsets()
    x, w, grad = (
        normal(*shape, seed=i).bfloat16()
        for i, shape in enumerate([(groups.rows, K), (len(groups.sizes), N, K), (groups.rows, N)])
    )
    leaves = [t.double().requires_grad_() for t in (x, w)]
    oracle.forward(*leaves, groups).backward(grad.double())
    with mxpert.override(config=ORACLE, backend="reference"):
        dx = mxpert.grouped_gemm(grad, w, offsets, trans_b=False, out_dtype=torch.float64)
        dw = mxpert.grouped_wgrad(grad, x, offsets, out_dtype=torch.float64)
    limit = 2 * accumulation_error(max(N, *groups.sizes), significant_bits=53)
    assert_close_relative(dx, leaves[0].grad, limit, "dgrad")
    assert_close_relative(dw, leaves[1].grad, limit, "wgrad")


SNR_GATES = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3", 28.0),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2", 20.0),
    "hybrid": ("mxfp8_e4m3", "mxfp8_e5m2", 20.0),
}


@pytest.mark.parametrize(("forward", "backward", "gate"), SNR_GATES.values(), ids=SNR_GATES)
def test_snr_of_the_three_gemms(forward, backward, gate):
    """Quantisation, float32 sums and bf16 output against float64 on the unquantised normal data."""
    groups, k, n = Groups((150, 0, 33, 260, 1, 68), tail=16), 256, 192
    offsets = groups.offsets()
    x, w, grad = (
        normal(*shape, seed=i)
        for i, shape in enumerate([(groups.rows, k), (len(groups.sizes), n, k), (groups.rows, n)])
    )
    x_row, x_col = mxpert.quantize_dual(x, forward, group_offsets=offsets)
    w_row, w_col = mxpert.quantize_dual(w, forward)
    grad_row, grad_col = mxpert.quantize_dual(grad, backward, group_offsets=offsets)
    snr = {
        "forward": sqnr_db(
            mxpert.grouped_gemm(x_row, w_row, offsets), oracle.forward(x, w, groups)
        ),
        "dgrad": sqnr_db(
            mxpert.grouped_gemm(grad_row, w_col, offsets),
            oracle.forward(grad, w, groups, trans_b=False),
        ),
        "wgrad": sqnr_db(
            mxpert.grouped_wgrad(grad_col, x_col, offsets), oracle.wgrad(grad, x, groups)
        ),
    }
    least = {name: 28.0 if name == "forward" and forward == "mxfp8_e4m3" else gate for name in snr}
    assert all(snr[name] >= least[name] for name in snr), snr
