"""Whatever is slower than the device's fast kernel says so once, with the reason and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("mxpert.backends.hopper", reason="needs Triton with Gluon")

import mxpert
from mxpert import ScaleSpan, SiLU
from mxpert.core import registry
from mxpert.core.problem import GroupedProblem, MoEOptions, MoEProblem, Op, Target
from mxpert.core.registry import resolve
from mxpert.core.target import on_device
from mxpert.errors import PerformanceWarning
from mxpert.formats.tensor import Layout
from support.launches import H200, recorded_launches

GROUPS, ROWS, N, K = 2, 64, 96, 64
OFFSETS = torch.tensor([0, 40, 64])
A = torch.randn(ROWS, K).bfloat16()
B = torch.randn(GROUPS, N, K).bfloat16()
GEMM = GroupedProblem(
    Op.GROUPED_GEMM, H200, ROWS, GROUPS, N, K, "bf16", "bf16", True, torch.bfloat16
)


@pytest.fixture(autouse=True)
def _nothing_was_said() -> Iterator[None]:
    registry._warn_slower.cache_clear()
    yield
    registry._warn_slower.cache_clear()


@pytest.fixture
def on_h200() -> Iterator[None]:
    """Ops resolve as on an H200, and launch nothing."""
    with on_device(H200), recorded_launches():
        yield


def said(call: Callable[[], object]) -> list[str]:
    """The PerformanceWarnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, PerformanceWarning)]


def by_span(span: ScaleSpan, *, transposed: bool) -> tuple[mxpert.MXTensor, mxpert.MXTensor]:
    """Operands of grouped_gemm, b along its last axis, or along the one before (trans_b=False)."""
    a, _ = mxpert.quantize_dual(A, scale_span=span)
    if transposed:
        return a, mxpert.quantize_dual(B, scale_span=span)[0]
    return a, replace(mxpert.quantize(B.mT.contiguous(), "mxfp8", axis=-2), scale_span=span)


SLOW: dict[str, tuple[Callable[[], object], str, str]] = {
    "narrow": (
        lambda: (mxpert.grouped_gemm, A, B[:, :4], OFFSETS),
        "runs on the triton backend: hopper writes rows of whole 16 bytes, got 4 columns",
        "pad the operand to a multiple of 8",
    ),
    "odd depth": (
        lambda: (mxpert.grouped_gemm, A[:, :36].contiguous(), B[..., :36].contiguous(), OFFSETS),
        "runs on the triton backend: hopper reads rows of whole 16 bytes, got K = 36",
        "pad K to a multiple of 8",
    ),
    "bf16 wgrad": (
        lambda: (mxpert.grouped_wgrad, A, A, OFFSETS),
        "runs on the triton backend: hopper reads operands with the reduction contig",
        "quantise both",
    ),
    "not transposed": (
        lambda: (mxpert.grouped_gemm, *by_span(ScaleSpan.ROW, transposed=False), OFFSETS),
        "multiplies in bf16: FP8 tensor cores need the reduction contiguous",
        "the other copy of quantize_dual, with trans_b=True",
    ),
}
"""An op with its arguments, the reason, the remedy."""


def request_of(name: str) -> tuple[Callable[[], object], Callable[[], object], str, str]:
    """A call, its explanation, and what both say."""
    make, reason, remedy = SLOW[name]
    op, *arguments = make()  # type: ignore[misc]
    options = {"trans_b": False} if name == "not transposed" else {}
    return (
        lambda: op(*arguments, **options),
        lambda: mxpert.explain(op, *arguments, **options),
        reason,
        remedy,
    )


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_request_is_told_once(name: str, on_h200: None) -> None:
    call, explain, reason, remedy = request_of(name)
    (told,) = said(call)
    assert reason in told
    assert remedy in told
    assert said(call) == [], "once for each reason"
    shown = str(explain())
    assert f"  slower:  {told.split('sm_90 ', 1)[1]}" in shown.splitlines()


def test_the_warning_names_the_callers_line(on_h200: None) -> None:
    with pytest.warns(PerformanceWarning) as caught:
        mxpert.grouped_gemm(A, B[:, :4], OFFSETS)
    assert [each.filename for each in caught] == [__file__]


def test_generated_code_without_a_module_name_is_warned(on_h200: None) -> None:
    """exec'd code, such as that of torch.fx, may run in globals without ``__name__``."""
    scope = {"op": mxpert.grouped_gemm, "a": A, "b": B[:, :4], "offsets": OFFSETS}
    with pytest.warns(PerformanceWarning):
        exec(compile("op(a, b, offsets)", "generated", "exec"), scope)


@pytest.mark.parametrize("name", SLOW)
def test_explain_does_not_use_the_warning_up(name: str, on_h200: None) -> None:
    call, explain, *_ = request_of(name)
    assert said(explain) == []
    assert len(said(call)) == 1


@pytest.mark.parametrize("name", SLOW)
def test_a_pinned_backend_says_nothing(name: str, on_h200: None) -> None:
    call, explain, *_ = request_of(name)
    with mxpert.override(backend="triton"):
        assert said(call) == []
        assert "slower" not in str(explain())


@pytest.mark.parametrize("trans_b", [True, False], ids=["transposed", "not_transposed"])
def test_bf16_operands_are_fast_in_both_orders(trans_b: bool, on_h200: None) -> None:
    b = B if trans_b else B.mT.contiguous()
    assert said(lambda: mxpert.grouped_gemm(A, b, OFFSETS, trans_b=trans_b)) == []
    shown = str(mxpert.explain(mxpert.grouped_gemm, A, b, OFFSETS, trans_b=trans_b))
    assert "backend: hopper" in shown
    assert "slower" not in shown


@pytest.mark.parametrize("span", [ScaleSpan.BLOCK, ScaleSpan.ROW, ScaleSpan.AUTO])
def test_the_usual_operands_are_fast(span: ScaleSpan, on_h200: None) -> None:
    with mxpert.override(backend="reference"):
        a, b = by_span(span, transposed=True)
    assert said(lambda: mxpert.grouped_gemm(a, b, OFFSETS)) == []


def test_weights_that_are_not_prepared() -> None:
    problem = MoEProblem(
        Op.FUSED_MOE, H200, 16, 4, 8, 256, 256, MoEOptions(SiLU()), Layout.ROW_MAJOR
    )
    (told,) = said(lambda: resolve(problem))
    assert "fused_moe on sm_90 runs on the triton backend: hopper needs weights in" in told
    assert "weights.prepare(device=...)" in told


def test_the_reference_on_a_gpu_is_told_with_every_reason() -> None:
    (told,) = said(lambda: resolve(replace(GEMM, out_dtype=torch.float64)))
    assert "runs on the reference backend: hopper writes bfloat16" in told
    assert "; triton writes bfloat16" in told


def test_gfx950_says_what_its_own_backend_refuses() -> None:
    """MXFP8 operands run on cdna4; bfloat16 runs on the portable backend, and that is said."""
    problem = replace(GEMM, target=Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024))
    (told,) = said(lambda: resolve(problem))
    assert "runs on the triton backend: cdna4 multiplies MXFP8 operands, not bfloat16" in told
    quantised = replace(problem, a_format="mxfp8_e4m3", b_format="mxfp8_e4m3")
    assert said(lambda: resolve(quantised)) == []
    kernel, _ = resolve(quantised)
    assert kernel.backend == "cdna4"


@pytest.mark.parametrize(
    "target",
    [Target("cuda", "sm_100", "NVIDIA B200", 148, 232448), Target("cpu", "cpu", "x86_64", 2, 0)],
    ids=lambda target: target.arch,
)
def test_where_there_is_nothing_faster_nothing_is_said(target: Target) -> None:
    """The portable backend is the fast one elsewhere, and the reference on a CPU."""
    for problem in (GEMM, replace(GEMM, n=4)):
        assert said(lambda problem=problem: resolve(replace(problem, target=target))) == []


def test_an_op_without_a_kernel_for_the_chip_is_no_fallback(on_h200: None) -> None:
    assert said(lambda: mxpert.quantize(A, "mxfp8")) == []
