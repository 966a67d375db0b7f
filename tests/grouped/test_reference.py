"""The reference's grouped GEMMs in float64, as gradients, and their SNR.

tests/conformance/test_grouped.py compares its float32 sums with float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mxpert
from mxpert import MXTensor
from mxpert.configs import ReferenceConfig
from mxpert.testing.numerics import accumulation_error, assert_close_relative, assert_exact, sqnr_db
from tests.grouped import oracle
from tests.grouped.oracle import GROUPS, Groups

K, N = 96, 64
FORMATS = {
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2"),
    "mixed": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "bf16": ("bf16", "bf16"),
}
ORACLE = ReferenceConfig(accumulate=torch.float64)
Operand = torch.Tensor | MXTensor

each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)


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
