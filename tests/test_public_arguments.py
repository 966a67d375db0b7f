"""Arguments that passed unchecked, or whose error did not name the caller's argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mxpert
from mxpert import ScaleRule, ScaleSpan
from mxpert.core.describe import describe
from mxpert.core.problem import ACTIVATION_FORMATS, FORMAT_OF, SHORT_NAMES, parse_activation_format
from mxpert.formats import count_wide_blocks, quantize_blocks, quantize_spans
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.training.rows.op import activate_rows, activate_rows_backward

LAYER = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
ROUTED = (LAYER.topk_weights, LAYER.topk_ids)
X = torch.randn(4, 128)
Q8 = quantize_blocks(X, "mxfp8")
LOGITS = torch.randn(3, 8)


def spans(
    x: Any = X,
    fmt: Any = "mxfp8",
    rule: Any = ScaleRule.RCEIL,
    span: Any = ScaleSpan.ROW,
    **options: Any,
) -> Callable[[], Any]:
    return lambda: quantize_spans(x, fmt, rule, span, **options)


def count(tensor: Any = Q8, span: Any = ScaleSpan.ROW, **options: Any) -> Callable[[], Any]:
    return lambda: count_wide_blocks(tensor, span, **options)


def capacity(rows: Any, groups: Any = 3) -> Callable[[], Any]:
    return lambda: mxpert.padded_capacity(rows, groups)


def prepare(device: Any) -> Callable[[], Any]:
    return lambda: LAYER.weights.prepare(device=device)


def route(factor: Any) -> Callable[[], Any]:
    return lambda: mxpert.route_topk(LOGITS, 2, routed_scaling_factor=factor)


def fused(**options: Any) -> Callable[[], Any]:
    return lambda: mxpert.fused_moe(
        LAYER.x, LAYER.weights, *ROUTED, **{"activation": mxpert.SiLU(), **options}
    )


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "spans-complex": (spans(X + 0j), TypeError, r"quantize_spans: x\.dtype — need float32 or"),
    "spans-int64": (spans(X.long()), TypeError, r"quantize_spans: x\.dtype — .* got int64"),
    "spans-int64-empty": (spans(X.long()[:0]), TypeError, r"quantize_spans: x\.dtype"),
    "spans-list": (spans([1.0]), TypeError, "quantize_spans: x — need a torch.Tensor, got list"),
    "spans-scalar": (spans(torch.tensor(1.0)), ValueError, r"quantize_spans: x\.shape — need"),
    "spans-ragged": (spans(X[:, :100]), ValueError, r"x\.shape — need .* multiple of 32, got"),
    "spans-rule": (spans(rule="up"), ValueError, "quantize_spans: rule — need a ScaleRule"),
    "spans-format": (spans(fmt="nvfp4"), ValueError, "quantize_spans: fmt — need one of"),
    "spans-starts-float": (
        spans(group_starts=torch.zeros(2)),
        TypeError,
        r"quantize_spans: group_starts\.dtype — need int32 or int64",
    ),
    "spans-starts-shape": (
        spans(group_starts=torch.zeros(2, 2).long()),
        ValueError,
        r"quantize_spans: group_starts\.shape",
    ),
    "spans-starts-empty": (
        spans(group_starts=torch.zeros(0).long()),
        ValueError,
        r"quantize_spans: group_starts\.shape",
    ),
    "count-name": (count(span="rows"), ValueError, "count_wide_blocks: span — need a ScaleSpan"),
    "count-none": (count(span=None), TypeError, "count_wide_blocks: span — need a ScaleSpan"),
    "count-auto": (count(span=ScaleSpan.AUTO), ValueError, "count_wide_blocks: span — need BLOCK"),
    "count-type": (count(X), TypeError, "count_wide_blocks: tensor — need an MXTensor"),
    "count-mxfp4": (
        count(quantize_blocks(X, "mxfp4")),
        ValueError,
        "count_wide_blocks: tensor.format — need mxfp8",
    ),
    "count-axis": (
        count(quantize_blocks(torch.zeros(32, 32), "mxfp8", 0)),
        ValueError,
        "count_wide_blocks: tensor — need axis -1",
    ),
    "capacity-negative": (capacity(-1), ValueError, "padded_capacity: num_rows — need at least 0"),
    "capacity-float": (capacity(2.5), TypeError, "padded_capacity: num_rows — need an int, got"),
    "capacity-nan": (capacity(float("nan")), TypeError, "padded_capacity: num_rows — need an int"),
    "capacity-bool": (capacity(True), TypeError, "padded_capacity: num_rows — need an int"),
    "capacity-groups": (capacity(4, -2), ValueError, "padded_capacity: num_groups — need at"),
    "capacity-groups-float": (capacity(4, 1.0), TypeError, "padded_capacity: num_groups — need an"),
    "device-huge": (prepare(10**30), ValueError, "prepare: device — need a device, got 1000"),
    "device-negative": (prepare(-1), ValueError, "prepare: device — need a device, got -1"),
    "device-bool": (prepare(True), ValueError, "prepare: device — need a device, got True"),
    "device-other": (prepare("xla"), ValueError, "prepare: device — need a device that this torch"),
    "factor-nan": (route(float("nan")), ValueError, "routed_scaling_factor — need a finite"),
    "factor-inf": (route(float("inf")), ValueError, "routed_scaling_factor — need a finite"),
    "factor-huge": (route(10**400), ValueError, "routed_scaling_factor — need a finite"),
    "factor-bool": (route(True), TypeError, "routed_scaling_factor — need a number, got True"),
    "limit-huge": (lambda: mxpert.SwiGLU(limit=10**400), ValueError, "SwiGLU: limit — need a fin"),
    "alpha-huge": (lambda: mxpert.SwiGLU(alpha=10**400), ValueError, "SwiGLU: alpha — need a fin"),
    "format-of-quantize": (
        lambda: mxpert.quantize(X, "nvfp4"),
        ValueError,
        r"^quantize: format — need one of \['mxfp4', 'mxfp8', .*got 'nvfp4'",
    ),
    "format-of-dual": (
        lambda: mxpert.quantize_dual(X, "nvfp4"),
        ValueError,
        "^quantize_dual: format — need one of",
    ),
    "format-of-blocks": (
        lambda: quantize_blocks(X, "nvfp4"),
        ValueError,
        "^quantize_blocks: fmt — need one of",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert re.search(text, str(caught.value)), str(caught.value)


def test_wide_blocks_of_a_block_are_none() -> None:
    tensor = quantize_blocks(torch.tensor([[1.0] * 32 + [2.0**12] * 32]), "mxfp8")
    assert [
        int(count_wide_blocks(tensor, span))
        for span in (ScaleSpan.ROW, ScaleSpan.SPAN128, ScaleSpan.BLOCK)
    ] == [1, 1, 0]


@pytest.mark.parametrize(
    "starts", [[-320, 64, 9999], [64, 32, 0], [0, 2**60], [96], [-1, -1]], ids=str
)
@pytest.mark.parametrize("span", [ScaleSpan.ROW, ScaleSpan.SPAN128], ids=lambda span: span.name)
def test_group_starts_are_clamped(starts: list[int], span: ScaleSpan) -> None:
    """Every block keeps a scale that holds its own values: no span is lost or read outside."""
    x = torch.randn(3, 256) * torch.logspace(-3, 3, 8).repeat_interleave(32)
    q = quantize_spans(x, "mxfp8", ScaleRule.RCEIL, span, group_starts=torch.tensor(starts))
    assert (q.scale >= quantize_blocks(x, "mxfp8").scale).all()
    by_row = x.abs().amax(-1, keepdim=True) * 2.0**-4
    assert ((q.dequantize() - x).abs() <= by_row).all()


@pytest.mark.parametrize(
    "activation", ["geglu", "SiLU", "", None, mxpert.SiLU, torch.nn.SiLU()], ids=repr
)
def test_a_wrong_activation_is_told_what_to_pass(activation: Any) -> None:
    rows = torch.zeros(2, 64)
    calls = (
        fused(activation=activation),
        lambda: activate_rows(rows, activation),
        lambda: activate_rows_backward(torch.zeros(2, 32), rows, activation),
    )
    for call in calls:
        with pytest.raises(ValueError if isinstance(activation, str) else TypeError) as caught:
            call()
        text = str(caught.value)
        assert re.search(r"activation — need an activation object: SiLU\(\), .* got ", text)
        assert "'silu', 'swiglu', 'swigluoai', 'clamped_silu', 'situ_v2'" in text
        assert text.endswith("; pass mxpert.SiLU()") == (activation is mxpert.SiLU)


@pytest.mark.parametrize("alias", [name for name in FORMAT_OF if name not in ACTIVATION_FORMATS])
def test_aliases_name_the_same_layer(alias: str) -> None:
    """Every function takes "a8w4" where it takes "mxfp8", and describes the same problem."""
    name = FORMAT_OF[alias]
    silu = mxpert.SiLU()
    whole = [fused(activation_format=spelled)() for spelled in (alias, name)]
    assert torch.equal(*whole)
    plan = mxpert.make_routing_plan(*ROUTED, num_experts=4, routing_block_m=16)
    rows = [
        mxpert.moe_gate_up(LAYER.x, LAYER.weights, plan, activation=silu, activation_format=spelled)
        for spelled in (alias, name)
    ]
    assert type(rows[0]) is type(rows[1])
    out = [
        mxpert.moe_down(h, LAYER.weights, plan, activation_format=spelled)
        for h, spelled in zip(rows, (alias, name), strict=True)
    ]
    assert torch.equal(*out)
    for problem_of in (
        lambda spelled: describe(
            mxpert.fused_moe,
            LAYER.x,
            LAYER.weights,
            *ROUTED,
            activation=silu,
            activation_format=spelled,
        ),
        lambda spelled: describe(
            mxpert.moe_gate_up,
            LAYER.x,
            LAYER.weights,
            plan,
            activation=silu,
            activation_format=spelled,
        ),
        lambda spelled: describe(
            mxpert.moe_down, rows[0], LAYER.weights, plan, activation_format=spelled
        ),
    ):
        assert problem_of(alias) == problem_of(name)


def test_the_error_of_a_format_lists_both_names() -> None:
    with pytest.raises(ValueError, match="fused_moe: activation_format — need one of") as caught:
        fused(activation_format="w4a8")()
    for name in (*ACTIVATION_FORMATS, *SHORT_NAMES.values()):
        assert repr(name) in str(caught.value)
    for name in ACTIVATION_FORMATS:
        assert parse_activation_format(name, "op") == name
