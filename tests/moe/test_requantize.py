"""requantize_: the offline path's bits at the addresses of the prepared weights, or nothing."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, Layout, MoEWeights, ScaleRule
from mxpert.modules import quantize_weights, requantize_

E, H, F = 3, 160, 96
OTHER_FORMATS = ("mxfp8", "nvfp4", "int4_g32", "int4_g64", "int4_g128")
LAYOUTS = (
    Layout.ROW_MAJOR,
    Layout.HOPPER_FRAGMENT,
    Layout.HOPPER_FRAGMENT_FP8,
    Layout.CDNA4_FRAGMENT,
)


def dense(
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: bool = False,
    hidden: int = H,
    inner: int = F,
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    made = dict(gate_up_proj=normal(E, 2 * inner, hidden), down_proj=normal(E, hidden, inner))
    biases = dict(gate_up_bias=normal(E, 2 * inner), down_bias=normal(E, hidden))
    return made | (biases if bias else {})


def offline(
    given: dict[str, object], order: GateUpOrder, layout: Layout, **options: object
) -> MoEWeights:
    made = quantize_weights(**given, gate_up_order=order, **options)
    return made.prepare(device="cpu", layout=layout)


def tensors(weights: MoEWeights) -> dict[str, torch.Tensor]:
    state = weights.state_dict()
    return {name: value for name, value in state.items() if name != "_extra_state"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", GateUpOrder)
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_are_those_of_the_offline_path(
    layout: Layout, order: GateUpOrder, bias: bool
) -> None:
    weights = offline(dense(0, bias=bias), order, layout)
    before = {n: t.data_ptr() for n, t in tensors(weights).items() if ".certificate." not in n}
    dtypes = itertools.cycle((torch.bfloat16, torch.float16, torch.float32))
    for seed, rule, dtype in zip((1, 2), (ScaleRule.RCEIL, ScaleRule.FLOOR), dtypes, strict=False):
        given = dense(seed, dtype, bias=bias)
        requantize_(weights, **given, scale_rule=rule)
        wanted = offline(given, order, layout, scale_rule=rule)
        assert weights.state_dict()["_extra_state"] == wanted.state_dict()["_extra_state"]
        for name, tensor in tensors(wanted).items():
            assert torch.equal(tensors(weights)[name], tensor), name
    assert {n: t.data_ptr() for n, t in tensors(weights).items() if n in before} == before


OTHERS = [
    *(
        (name, layout)
        for name in OTHER_FORMATS
        for layout in (Layout.ROW_MAJOR, Layout.HOPPER_GROUPS)
    ),
    ("mxfp8", Layout.CDNA4_FRAGMENT),
]
"""Further formats and the layouts that hold them."""


@pytest.mark.parametrize("name, layout", OTHERS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_of_other_formats(name: str, layout: Layout, bias: bool) -> None:
    order, sizes = GateUpOrder.CONCATENATED, dict(hidden=256, inner=128)
    options: dict[str, object] = dict(weight_format=name)
    weights = offline(dense(0, bias=bias, **sizes), order, layout, **options)
    before = {n: t.data_ptr() for n, t in tensors(weights).items()}
    for seed in (1, 2):
        given = dense(seed, bias=bias, **sizes)
        rule = ScaleRule.FLOOR if name == "mxfp8" and seed == 2 else ScaleRule.RCEIL
        requantize_(weights, **given, scale_rule=rule)
        wanted = offline(given, order, weights.layout, scale_rule=rule, **options)
        assert weights.state_dict()["_extra_state"] == wanted.state_dict()["_extra_state"]
        assert tensors(weights).keys() == tensors(wanted).keys()
        for each, tensor in tensors(wanted).items():
            assert torch.equal(tensors(weights)[each], tensor), each
    assert {n: t.data_ptr() for n, t in tensors(weights).items()} == before


def test_rounded_weights_are_plain_ones_afterwards() -> None:
    """MXFP8 of dense weights: what rounding had cost says nothing about them."""
    weights = offline(dense(0), GateUpOrder.CONCATENATED, Layout.ROW_MAJOR, weight_format="nvfp4")
    rounded = weights.round_weights("e4m3")
    assert rounded.rounding_certificates is not None
    requantize_(rounded, **dense(1))
    wanted = offline(dense(1), GateUpOrder.CONCATENATED, Layout.ROW_MAJOR, weight_format="mxfp8")
    assert torch.equal(rounded.gate_up_proj.qdata, wanted.gate_up_proj.qdata)
    assert rounded.rounding_certificates is None


@pytest.mark.parametrize("layout", [Layout.ROW_MAJOR, Layout.HOPPER_GROUPS], ids=str)
def test_integers_that_no_quantiser_makes_are_refused(layout: Layout) -> None:
    order, sizes = GateUpOrder.CONCATENATED, dict(hidden=256, inner=128)
    made = quantize_weights(**dense(0, **sizes), gate_up_order=order, weight_format="int4_g32")
    zeros = [
        torch.full(t.scale.shape, 7, dtype=torch.uint8) for t in (made.gate_up_proj, made.down_proj)
    ]
    with_zeros = dataclasses.replace(
        made,
        gate_up_proj=dataclasses.replace(made.gate_up_proj, zero_point=zeros[0]),
        down_proj=dataclasses.replace(made.down_proj, zero_point=zeros[1]),
    )
    for weights, given, said in (
        (with_zeros, dense(1, **sizes), "weights.gate_up_proj — need INT4 without zero points"),
        (made, dense(1, torch.float32, **sizes), "gate_up_proj.dtype — need torch.bfloat16"),
    ):
        prepared = weights.prepare(device="cpu", layout=layout)
        before = {name: tensor.clone() for name, tensor in tensors(prepared).items()}
        with pytest.raises(ValueError, match=f"requantize_: {said}"):
            requantize_(prepared, **given)
        for name, tensor in tensors(prepared).items():
            assert torch.equal(tensor, before[name]), name


def test_scales_that_a_layout_cannot_hold_change_nothing() -> None:
    """NaN in the second projection, seen before the first is written."""
    order, sizes = GateUpOrder.CONCATENATED, dict(hidden=256, inner=128)
    options: dict[str, object] = dict(weight_format="mxfp8")
    weights = offline(dense(0, **sizes), order, Layout.HOPPER_GROUPS, **options)
    before, given = {n: t.clone() for n, t in tensors(weights).items()}, dense(1, **sizes)
    given["down_proj"][2, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"requantize_: down_proj — need INT4, NVFP4 or MXFP8"):
        requantize_(weights, **given)
    for name, tensor in tensors(weights).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_rows_in_another_order(layout: Layout) -> None:
    weights = offline(dense(0), GateUpOrder.CONCATENATED, layout)
    given = dense(1)
    requantize_(weights, **given, gate_up_order=GateUpOrder.INTERLEAVED)
    wanted = offline(given, GateUpOrder.INTERLEAVED, layout)
    assert torch.equal(weights.gate_up_proj.qdata, wanted.gate_up_proj.qdata)
    assert torch.equal(
        weights.unprepare().gate_up_proj.qdata, wanted.unprepare().gate_up_proj.qdata
    )


def test_strided_weights_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed view, as of gpt-oss's [E, H, 2F]; one expert at a time."""
    monkeypatch.setattr("mxpert.moe.requantize._CODES", 1)
    weights, given = offline(dense(0), GateUpOrder.INTERLEAVED, LAYOUTS[1]), dense(1)
    views = {name: value.mT.contiguous().mT for name, value in given.items()}
    requantize_(weights, **views)
    wanted = offline(given, GateUpOrder.INTERLEAVED, LAYOUTS[1])
    assert torch.equal(weights.gate_up_proj.qdata, wanted.gate_up_proj.qdata)


def test_weights_that_do_not_fit_change_nothing() -> None:
    """Rows of more than 15 binades in the second projection, seen before the first is written."""
    weights, given = offline(dense(0), GateUpOrder.INTERLEAVED, Layout.HOPPER_FRAGMENT), dense(1)
    given["down_proj"][2, 0, :32] *= 2.0**-30
    before = {name: tensor.clone() for name, tensor in tensors(weights).items()}
    with pytest.raises(ValueError, match=r"rows within 15 binades .* got others in experts \[2\]"):
        requantize_(weights, **given)
    for name, tensor in tensors(weights).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(gate_up_proj=torch.zeros(E, F, H)), "gate_up_proj"),
        (dict(down_proj=torch.zeros(E, H, F, dtype=torch.float64)), "down_proj.dtype"),
        (dict(gate_up_bias=torch.zeros(E, 2 * F)), "gate_up_bias — need None, got a tensor"),
        (dict(scale_rule="rceil"), "scale_rule — need a ScaleRule"),
        (dict(weights=None), "weights — need MoEWeights"),
        (dict(gate_up_order=GateUpOrder.INTERLEAVED), "gate_up_order"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(change: dict[str, object], said: str) -> None:
    weights = offline(dense(0), GateUpOrder.CONCATENATED, Layout.ROW_MAJOR)
    with pytest.raises((TypeError, ValueError), match=f"requantize_: {said}"):
        requantize_(**{"weights": weights, **dense(1), **change})


def test_a_layer_computes_with_the_new_weights() -> None:
    order, given = GateUpOrder.CONCATENATED, dense(1)
    weights = offline(dense(0), order, Layout.ROW_MAJOR)
    x, logits = torch.randn(4, H).bfloat16(), torch.randn(4, E)
    routing = mxpert.route_topk(logits, top_k=2)
    requantize_(weights, **given)
    wanted = offline(given, order, Layout.ROW_MAJOR)
    y, y2 = (mxpert.fused_moe(x, w, *routing, activation=mxpert.SiLU()) for w in (weights, wanted))
    assert torch.equal(y, y2)
