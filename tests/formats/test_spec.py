"""Enums are taken by their names, and type hints list the names."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import mxpert
from mxpert import Combine, GateUpOrder, ScaleRule, ScaleSpan, Scoring
from mxpert.core.problem import CombineLike, ScoringLike
from mxpert.distributed import ExpertParallel, Transport
from mxpert.distributed.transport import WIRE_FORMATS, TransportLike, WireFormat
from mxpert.formats import FORMATS, MXFP4, Layout, count_wide_blocks, quantize_blocks
from mxpert.formats.gate_up import GateUpOrderLike
from mxpert.formats.spec import LINE_SPANS, MXFormatLike, ScaleRuleLike, ScaleSpanLike, get_format
from mxpert.formats.tensor import LayoutLike
from mxpert.testing.problems import MoEShape, random_moe_problem
from mxpert.training import MXFP8Recipe
from support.layers import run_layer

HINTS = {
    ScaleRule: ScaleRuleLike,
    ScaleSpan: ScaleSpanLike,
    Combine: CombineLike,
    Scoring: ScoringLike,
    GateUpOrder: GateUpOrderLike,
    Layout: LayoutLike,
    Transport: TransportLike,
}
LAYER = random_moe_problem(MoEShape(64, 32, 4, 2), 5)
GATE_UP, DOWN = torch.randn(4, 64, 64), torch.randn(4, 64, 32)


def names_in(hint: Any) -> set[str]:
    return {name for each in get_args(hint) for name in get_args(each)}


@pytest.mark.parametrize("kind", HINTS, ids=lambda kind: kind.__name__)
def test_members_are_taken_by_name_and_hints_list_them(kind: Any) -> None:
    is_open = str in get_args(HINTS[kind])  # backends register layouts
    assert is_open or names_in(HINTS[kind]) == {member.value for member in kind}
    for member in kind:
        assert kind.parse(member, "op", "x") is kind.parse(member.value, "op", "x") is member
    with pytest.raises(ValueError, match=r"^op: x — need a \w+ \('.* or '.*'\), got 'Row'; help$"):
        kind.parse("Row", "op", "x", "help")
    with pytest.raises(TypeError, match=r"^op: x — need a \w+ \('.*'\), got 3$"):
        kind.parse(3, "op", "x")


def test_hints_of_formats_list_them() -> None:
    assert {get_format(name).name for name in names_in(MXFormatLike)} == set(FORMATS)
    assert get_args(WireFormat) == WIRE_FORMATS


@pytest.mark.parametrize("rule", ScaleRule)
def test_a_scale_rule(rule: ScaleRule) -> None:
    name: Any = rule.value
    x = torch.randn(4, 64).bfloat16() * 100
    for call in (
        lambda rule: mxpert.quantize(x, "mxfp8", scale_rule=rule),
        lambda rule: quantize_blocks(x, "mxfp8", rule=rule),
        lambda rule: mxpert.quantize_dual(x, scale_rule=rule, group_offsets=torch.tensor([0, 4]))[
            1
        ],
        lambda rule: (
            mxpert.quantize_weights(
                GATE_UP, DOWN, gate_up_order="concatenated", scale_rule=rule
            ).down_proj
        ),
    ):
        assert torch.equal(call(name).scale, call(rule).scale)
    y = [
        run_layer(LAYER, activation="silu", activation_format="a8w4", scale_rule=each)
        for each in (name, rule)
    ]
    assert torch.equal(*y)
    assert MXFP8Recipe(scale_rule=name) == MXFP8Recipe(scale_rule=rule)


@pytest.mark.parametrize("span", LINE_SPANS)
def test_a_scale_span(span: ScaleSpan) -> None:
    name: Any = span.value
    x = torch.randn(64, 128)
    for given, expected in ((name, span), ((name, "row"), (span, ScaleSpan.ROW))):
        made = mxpert.quantize_dual(x, scale_span=given)
        wanted = mxpert.quantize_dual(x, scale_span=expected)
        for one, other in zip(made, wanted, strict=True):
            assert torch.equal(one.scale, other.scale)
            assert one.scale_span is other.scale_span
    assert MXFP8Recipe(scale_span=name) == MXFP8Recipe(scale_span=span)
    if span is not ScaleSpan.AUTO:
        blocks = quantize_blocks(x, "mxfp8")
        assert torch.equal(mxpert.rebase(blocks, name).scale, mxpert.rebase(blocks, span).scale)
        assert count_wide_blocks(blocks, name) == count_wide_blocks(blocks, span)


@pytest.mark.parametrize("span", ["block", "square"])
def test_a_span_of_quantize(span: Any) -> None:
    x = torch.randn(64, 128)
    one, other = (mxpert.quantize(x, "mxfp4", scale_span=each) for each in (span, ScaleSpan(span)))
    assert torch.equal(one.scale, other.scale)
    assert one.scale_span is other.scale_span is ScaleSpan(span)


def test_a_recipe_takes_formats_by_name() -> None:
    assert MXFP8Recipe("mxfp8", "mxfp8_e5m2") == MXFP8Recipe.hybrid()
    with pytest.raises(ValueError, match="MXFP8Recipe: forward_format — need one of"):
        MXFP8Recipe("mxfp4")  # type: ignore[arg-type]


def test_options_of_layers() -> None:
    routed = LAYER.x, LAYER.weights, LAYER.topk_weights, LAYER.topk_ids
    options = dict(activation="silu", activation_format="a8w4")
    atomic = [
        mxpert.explain(mxpert.fused_moe, *routed, combine=combine, **options).problem
        for combine in ("atomic", Combine.ATOMIC)
    ]
    assert atomic[0] == atomic[1]
    logits = torch.randn(5, 8)
    assert torch.equal(
        mxpert.route_topk(logits, 2, scoring="sigmoid")[0],
        mxpert.route_topk(logits, 2, scoring=Scoring.SIGMOID)[0],
    )
    assert mxpert.TopKOptions("sigmoid") == mxpert.TopKOptions(Scoring.SIGMOID)
    with pytest.raises(ValueError, match="TopKOptions: scoring — need a Scoring"):
        mxpert.TopKOptions("tanh")  # type: ignore[arg-type]
    sizes = dict(num_experts=4, top_k=2, hidden_size=64, max_tokens=8)
    assert ExpertParallel(transport="gather", **sizes).transport is Transport.GATHER


def test_aggregates() -> None:
    q = mxpert.quantize(GATE_UP, "mxfp4")
    made = mxpert.MXTensor(q.qdata, q.scale, "mxfp4", layout="row_major", scale_span="block")
    assert made.format is MXFP4
    assert made.layout is Layout.ROW_MAJOR
    assert made.scale_span is ScaleSpan.BLOCK
    down = mxpert.quantize(DOWN, "mxfp4")
    weights = mxpert.MoEWeights(q, down, gate_up_order="interleaved_16")
    assert weights.gate_up_order is GateUpOrder.INTERLEAVED_16


def test_compiled_calls_take_names() -> None:
    """Names are read as constants: one graph, the same bits."""
    routed = LAYER.weights, LAYER.topk_weights, LAYER.topk_ids

    def layer(x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = mxpert.fused_moe(
            x,
            *routed,
            activation="swigluoai",
            activation_format="a8w4-token",
            combine="reduce",
            scale_rule="floor",
        )
        chosen = mxpert.route_topk(logits, 2, scoring="sigmoid")[0]
        return y, chosen, mxpert.quantize(x, "mxfp8", scale_rule="even").scale

    logits = torch.randn(5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for one, other in zip(compiled(LAYER.x, logits), layer(LAYER.x, logits), strict=True):
        assert torch.equal(one, other)


def test_named_calls_share_a_cached_call() -> None:
    """A call by names finds the call by objects: no second check, no second recording."""
    from mxpert.moe import op as moe

    routed = LAYER.x, LAYER.weights, LAYER.topk_weights, LAYER.topk_ids

    def options(*choices: Any) -> object:
        return moe.moe_options("fused_moe", *choices)

    assert options("silu", "a8w4", "rceil", False, "reduce", torch.bfloat16) is options(
        mxpert.SiLU(), "mxfp8", ScaleRule.RCEIL, False, Combine.REDUCE, torch.bfloat16
    )
    mxpert.fused_moe(*routed, activation=mxpert.SiLU())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe._FUSED_MOE, "problem", None)  # a call that is not cached would call it
        mxpert.fused_moe(*routed, activation="silu", combine="reduce")
