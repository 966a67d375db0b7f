"""MoEWeights in MXFP8, NVFP4 and INT4: kept, saved, sliced, held by modules, refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert import MoEWeights
from mxpert.core import schema
from mxpert.core.target import on_device
from mxpert.formats import WeightTensor
from mxpert.formats.tensor import Layout
from mxpert.moe.local_weights import take_experts
from support.devices import DEVICES

FORMATS = ("mxfp8", "nvfp4", "int4_g32", "int4_g64")
DRAW = torch.Generator().manual_seed(0)
GATE_UP, DOWN = torch.randn(4, 128, 128, generator=DRAW), torch.randn(4, 128, 64, generator=DRAW)
BIASES = dict(
    gate_up_bias=torch.randn(4, 128, generator=DRAW), down_bias=torch.randn(4, 128, generator=DRAW)
)
X, ROUTED = (
    torch.randn(5, 128, generator=DRAW).bfloat16(),
    mxpert.route_topk(torch.randn(5, 4, generator=DRAW), top_k=2),
)


def weights_in(format: Any, order: Any = "concatenated") -> MoEWeights:
    dense = (GATE_UP if order else GATE_UP[:, :64]), DOWN
    biases = BIASES if order else {}
    return mxpert.quantize_weights(*dense, gate_up_order=order, weight_format=format, **biases)


def run(weights: MoEWeights, **options: Any) -> torch.Tensor:
    activation = "silu" if weights.has_gate else "relu2"
    return mxpert.fused_moe(X, weights, *ROUTED, activation=activation, **options)


@pytest.mark.parametrize("order", ["concatenated", None])
@pytest.mark.parametrize("format", FORMATS)
def test_saved_copied_and_pickled(format: str, order: Any, tmp_path: Path) -> None:
    weights = weights_in(format, order)
    expected, path = run(weights), tmp_path / "layer.safetensors"
    weights.save(path)
    torch.save(weights, tmp_path / "layer.pt")
    for other in (
        MoEWeights.load(path),
        MoEWeights.from_state_dict(weights.state_dict()),
        torch.load(tmp_path / "layer.pt", weights_only=True),
        pickle.loads(pickle.dumps(weights)),
        copy.deepcopy(weights),
        weights.clone(),
        weights.prepare(device="cpu"),
        weights.prepare(device="cpu", layout="row_major").unprepare(),
    ):
        assert other.weight_format == weights.weight_format
        assert torch.equal(run(other), expected)
    target = mxpert.quantize_weights(
        torch.ones_like(GATE_UP if order else GATE_UP[:, :64]),
        torch.ones_like(DOWN),
        gate_up_order=order,
        weight_format=format,  # type: ignore[arg-type]
        **(BIASES if order else {}),
    )
    target.load_state_dict(weights.state_dict())
    assert torch.equal(run(target), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_taken_with_all_their_parts(format: str) -> None:
    weights = weights_in(format)
    taken = take_experts(weights, [2, 0])
    for whole, part in zip(weights.dequantize(), taken.dequantize(), strict=True):
        assert torch.equal(part, whole[[2, 0]])


@pytest.mark.parametrize("order", ["concatenated", "interleaved", None])
@pytest.mark.parametrize("format", FORMATS)
def test_a_module_saves_and_loads_them(format: str, order: Any) -> None:
    weights, router = weights_in(format, order), torch.randn(4, 128, generator=DRAW)
    activation: Any = "silu" if order else "relu2"
    layer = mxpert.MoE(weights, router, top_k=2, activation=activation)
    state = layer.state_dict()
    assert any(name.endswith("_proj_qdata") for name in state)
    other = weights_in(format, order)
    other = replace(other, down_proj=other.down_proj.clone())
    other.down_proj.qdata.zero_()
    empty = mxpert.MoE(other, router, top_k=2, activation=activation)
    assert not torch.equal(empty(X), layer(X))
    empty.load_state_dict(state)
    assert torch.equal(empty(X), layer(X))
    assert torch.equal(layer(X), mxpert.MoE(weights, router, top_k=2, activation=activation)(X))
    state.pop("experts.down_proj_scale")
    with pytest.raises(RuntimeError, match="down_proj_scale"):
        empty.load_state_dict(state)
    state["experts.down_proj_scale"] = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for experts\.down_proj_scale"):
        empty.load_state_dict(state)


@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_call_sees_one_op(format: str) -> None:
    weights = weights_in(format)

    @torch.compile(backend="eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return mxpert.fused_moe(x, weights, *ROUTED, activation="silu")

    assert torch.equal(layer(X), run(weights))


@pytest.mark.parametrize("format", FORMATS)
def test_explain_names_the_format(format: str) -> None:
    weights = weights_in(format)
    text = str(mxpert.explain(mxpert.fused_moe, X, weights, *ROUTED, activation="silu"))
    assert f"bf16x{weights.weight_format}" in text


def test_formats_of_both_projections_are_one() -> None:
    one, other = weights_in("mxfp8"), weights_in("nvfp4")
    with pytest.raises(ValueError, match=r"down_proj.format — need mxfp8_e4m3, as gate_up_proj"):
        replace(one, down_proj=other.down_proj)


def test_sizes_are_whole_blocks() -> None:
    codes, scale = torch.zeros(1, 48, 16, dtype=torch.uint8), torch.ones(1, 48, 1)
    down = WeightTensor(codes, scale, "int4_g32")
    wide = torch.zeros(1, 64, 24, dtype=torch.uint8), torch.zeros(1, 64, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"H and F as multiples of 32"):
        MoEWeights(
            WeightTensor(*wide, "nvfp4"),
            replace(down, format="nvfp4", scale=torch.zeros(1, 48, 2, dtype=torch.uint8)),
            gate_up_order="concatenated",
        )  # type: ignore[arg-type]


def test_what_other_formats_cannot_do_is_refused() -> None:
    weights = weights_in("nvfp4")
    with pytest.raises(ValueError, match="layout — need ROW_MAJOR for nvfp4"):
        weights.prepare(device="cpu", layout="hopper_fragment")
    with pytest.raises(ValueError, match="weight_format — need one of"):
        weights_in("int8")


def test_zero_points_lie_as_the_scales() -> None:
    """Kernels read both with the strides of the scales; `prepare` brings them there."""
    weights = weights_in("int4_g32")
    down = weights.down_proj
    assert isinstance(down, WeightTensor)
    wide = torch.full((4, 128, 6), 8, dtype=torch.uint8)
    strided = replace(weights, down_proj=replace(down, zero_point=wide[..., :2]))
    with pytest.raises(ValueError, match=r"down_proj\.zero_point\.stride\(\) — need \(256, 2, 1\)"):
        run(strided)
    assert torch.equal(run(strided.prepare(device="cpu")), run(weights))


def test_gfx950_chooses_its_layout_for_mxfp8(tmp_path: Path) -> None:
    """Prepared MXFP8 weights come back from a file, and are the published ones again."""
    plain = {name: weights_in(name) for name in ("mxfp8", "nvfp4")}
    with on_device(DEVICES["gfx950"]):
        prepared, others = (weights.prepare(device="cpu") for weights in plain.values())
    assert prepared.layout is prepared.down_proj.layout is Layout.CDNA4_FRAGMENT
    assert others.layout is Layout.ROW_MAJOR
    prepared.save(tmp_path / "layer.safetensors")
    loaded = MoEWeights.load(tmp_path / "layer.safetensors")
    for found, wanted in ((loaded, prepared), (loaded.unprepare(), plain["mxfp8"])):
        assert (found.layout, found.gate_up_order) == (wanted.layout, wanted.gate_up_order)
        for name in ("gate_up_proj", "down_proj"):
            left, right = getattr(found, name), getattr(wanted, name)
            assert torch.equal(left.qdata, right.qdata)
            assert torch.equal(left.scale, right.scale)
        assert found.gate_up_bias is not None
        assert wanted.gate_up_bias is not None
        assert torch.equal(found.gate_up_bias, wanted.gate_up_bias)
    with pytest.raises(ValueError, match="prepare: layout — need ROW_MAJOR for nvfp4"):
        plain["nvfp4"].prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)


def identical(one: MoEWeights, other: MoEWeights) -> None:
    """Raise unless both have the same facts, and the same bits under the same names."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype
            assert torch.equal(value, b[name]), name
        else:
            assert value == b[name]


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_for_hopper_they_are_saved_copied_and_held(format: str, tmp_path: Path) -> None:
    weights = weights_in(format)
    held = weights.prepare(device="cpu", layout="hopper_groups")
    path = tmp_path / "layer.safetensors"
    held.save(path)
    torch.save(held, tmp_path / "layer.pt")
    for other in (
        MoEWeights.load(path),
        MoEWeights.from_state_dict(held.state_dict()),
        torch.load(tmp_path / "layer.pt", weights_only=True),
        pickle.loads(pickle.dumps(held)),
        copy.deepcopy(held),
    ):
        identical(other, held)
        assert torch.equal(run(other.unprepare()), run(weights))
    for one, other in zip(held.dequantize(), weights.dequantize(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(mxpert.UnsupportedError, match="reference reads ROW_MAJOR weights"):
        run(held)


@pytest.mark.parametrize("format", FORMATS)
def test_modules_publish_what_was_prepared_for_hopper(format: str) -> None:
    """Their state dict has the tensors of unprepared weights, and takes them back."""
    weights, router = weights_in(format), torch.zeros(4, 128)
    held = weights.prepare(device="cpu", layout="hopper_groups")
    plain, packed = (
        mxpert.MoE(each, router, top_k=2, activation="silu") for each in (weights, held)
    )
    mine, theirs = packed.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    packed.load_state_dict(theirs)
    assert packed.experts.weights.layout is mxpert.Layout.ROW_MAJOR, "prepared for this CPU"


@pytest.mark.parametrize("format", FORMATS)
def test_the_schema_keeps_the_layout(format: str) -> None:
    """Ops flatten weights to tensors and names, and build them again."""
    held = weights_in(format).prepare(device="cpu", layout="hopper_groups")
    for part in (held.gate_up_proj, held.down_proj):
        again = schema._rebuild_weight(*schema._flatten_weight(part))
        assert type(again) is type(part)
        assert (again.layout, again.shape, again.format) == (part.layout, part.shape, part.format)
        assert again.qdata is part.qdata
