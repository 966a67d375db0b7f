"""Tensors, weights and plans behave as users of torch expect: move, save, load, print, compare."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import mxpert
from mxpert import GateUpOrder, MoEWeights
from mxpert.formats import dequantize_blocks, quantize_blocks, quantize_token_rows
from mxpert.formats.spec import ScaleRule, ScaleSpan
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape, random_moe_problem

SHAPE = MoEShape(96, 160, 3, 2, has_bias=True)
PLAIN = random_moe_problem(SHAPE, 4).weights
KINDS = {
    "plain": PLAIN,
    "no-bias": replace(PLAIN, gate_up_bias=None, down_bias=None),
    "prepared": PLAIN.prepare(device="cpu"),
    "hopper": PLAIN.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT),
    "hopper-fp8": PLAIN.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT, keep_fp8=True),
    "cdna4": PLAIN.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT),
}
kinds = pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)


def tensors(weights: MoEWeights) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in weights.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(actual: MoEWeights, expected: MoEWeights) -> None:
    left, right = tensors(actual), tensors(expected)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name
    assert actual.state_dict()["_extra_state"] == expected.state_dict()["_extra_state"]
    assert actual.gate_up_proj.shape == expected.gate_up_proj.shape


def through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@kinds
def test_weights_go_through_files_and_states(weights: MoEWeights, tmp_path: Path) -> None:
    weights.save(tmp_path / "layer.safetensors")
    loaded = MoEWeights.load(str(tmp_path / "layer.safetensors"))
    assert_same(loaded, weights)
    assert_same(loaded.unprepare(), weights.unprepare())
    assert_same(MoEWeights.from_state_dict(through_torch(weights.state_dict())), weights)
    assert_same(through_torch(weights), weights)
    assert_same(pickle.loads(pickle.dumps(weights)), weights)
    assert sorted(os.listdir(tmp_path)) == ["layer.safetensors"]


@kinds
def test_load_state_dict_copies_in_place(weights: MoEWeights) -> None:
    other = random_moe_problem(SHAPE, 4, seed=7).weights
    if weights.gate_up_bias is None:
        other = replace(other, gate_up_bias=None, down_bias=None)
    if weights.fold_certificates is not None:
        other = other.prepare(device="cpu", layout=weights.layout)
    target = copy.deepcopy(weights)
    places = {
        name: tensor.data_ptr()
        for name, tensor in tensors(target).items()
        if "certificate" not in name
    }
    assert not torch.equal(target.down_proj.qdata, other.down_proj.qdata)
    target.load_state_dict(other.state_dict())
    assert_same(target, other)
    now = tensors(target)
    assert all(now[name].data_ptr() == place for name, place in places.items())


def test_load_state_dict_refuses_what_does_not_fit() -> None:
    target = copy.deepcopy(PLAIN)
    before = copy.deepcopy(PLAIN)
    facts = PLAIN.state_dict()["_extra_state"]
    smaller = random_moe_problem(MoEShape(96, 160, 2, 2, has_bias=True), 4).weights
    bad = {
        "experts": (smaller.state_dict(), "need weights of"),
        "layout": (KINDS["hopper"].state_dict(), "need weights of"),
        "bias": (KINDS["no-bias"].state_dict(), "gate_up_bias — need a tensor"),
        "missing": (
            {k: v for k, v in PLAIN.state_dict().items() if k != "down_proj.scale"},
            "a state without",
        ),
        "unknown": (PLAIN.state_dict() | {"w1": torch.zeros(1)}, "others: "),
        "foreign": ({"weight": torch.zeros(1)}, "a dict of facts"),
        "order": (
            PLAIN.state_dict() | {"_extra_state": facts | {"gate_up_order": "up"}},
            "gate_up_order — need one of",
        ),
        "dtype": (
            PLAIN.state_dict() | {"down_proj.scale": PLAIN.down_proj.scale.int()},
            "scale.dtype — need uint8",
        ),
        "none": (None, "need a dict, got NoneType"),
    }
    for case, (state, text) in bad.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            target.load_state_dict(state)  # type: ignore[arg-type]
        assert text in str(caught.value), case
    assert_same(target, before)


def test_foreign_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    PLAIN.save(path)
    whole = path.read_bytes()
    header = {"format": "mxpert.MoEWeights", "version": "1"}
    contents = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"not a checkpoint",
        "foreign": safetensors.torch.save({"weight": torch.zeros(2)}),
        "facts": safetensors.torch.save({"weight": torch.zeros(2)}, header | {"facts": "{"}),
        "no-facts": safetensors.torch.save({"weight": torch.zeros(2)}, header),
        "deep": safetensors.torch.save(
            {"weight": torch.zeros(2)}, header | {"facts": "[" * 100_000}
        ),
        "digits": safetensors.torch.save(
            {"weight": torch.zeros(2)}, header | {"facts": "1" * 5000}
        ),
        "version": safetensors.torch.save({"weight": torch.zeros(2)}, header | {"version": "9"}),
        "sizes": safetensors.torch.save(
            tensors(PLAIN),
            header | {"facts": json.dumps(PLAIN.state_dict()["_extra_state"] | {"num_experts": 4})},
        ),
    }
    for content in contents.values():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^MoEWeights.load: .* — need .*, got "):
            MoEWeights.load(path)
    for missing in (tmp_path / "none", tmp_path, "a\0b"):
        with pytest.raises(ValueError, match=r"MoEWeights.load: path — need a file, got"):
            MoEWeights.load(missing)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"MoEWeights.load: path — need a file, got"):
        MoEWeights.load(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"MoEWeights.save: path — need a path that can be"):
        PLAIN.save(tmp_path / "no folder" / "layer.safetensors")
    with pytest.raises(TypeError, match=r"MoEWeights.save: path — need a path, got None"):
        PLAIN.save(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on 'meta'"):
        PLAIN.to("meta").save(path)


def test_saved_files_respect_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    before = os.umask(0o027)
    try:
        PLAIN.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_views_and_shared_tensors_can_be_saved(tmp_path: Path) -> None:
    wide = torch.zeros(3, 96, 400)
    bias = torch.zeros(3, 320 + 96)
    weights = replace(
        PLAIN,
        down_proj=replace(PLAIN.down_proj, scale=wide.to(torch.uint8)[..., :5]),
        gate_up_bias=bias[:, :320].contiguous(),
        down_bias=torch.zeros(576)[:288].view(3, 96),
    )
    weights.save(tmp_path / "layer.safetensors")
    assert_same(MoEWeights.load(tmp_path / "layer.safetensors"), weights)


@kinds
def test_weights_move_whole(weights: MoEWeights) -> None:
    moved = weights.to("meta")
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert moved.layout is weights.layout
    assert_same(weights.to("cpu"), weights)
    with pytest.raises(ValueError, match=r"MoEWeights.to: device — need a device"):
        weights.to("gpu")


def test_tampered_pickles_are_checked() -> None:
    tensor = quantize_blocks(torch.ones(2, 64), "mxfp4")
    state = tensor.__getstate__() | {"scale": tensor.scale[:, :1]}
    with pytest.raises(ValueError, match="MXTensor: scale — need"):
        object.__new__(mxpert.MXTensor).__setstate__(state)
    with pytest.raises(ValueError, match="MXTensor: state — need the fields"):
        object.__new__(mxpert.MXTensor).__setstate__({"qdata": tensor.qdata})
    with pytest.raises(ValueError, match="MXTensor: format — need one of"):
        replace(tensor, format=replace(tensor.format, block_size=16))


@pytest.mark.parametrize(
    "value",
    [
        quantize_blocks(torch.randn(4, 64), "mxfp4"),
        quantize_blocks(torch.randn(64, 4), "mxfp8_e5m2", 0),
        mxpert.quantize_dual(torch.randn(32, 64), scale_span=mxpert.ScaleSpan.AUTO)[0],
        quantize_token_rows(torch.randn(4, 8)),
        mxpert.make_routing_plan(
            torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), num_experts=2, routing_block_m=8
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torch_load_weights_only(value: Any) -> None:
    loaded = through_torch(value)
    assert type(loaded) is type(value)
    for name, field in value.__getstate__().items():
        got = getattr(loaded, name)
        assert torch.equal(got, field) if isinstance(field, torch.Tensor) else got == field


@pytest.mark.parametrize("kind", [GateUpOrder, Layout, ScaleRule, ScaleSpan])
def test_members_of_enums_are_pickled_by_value(kind: Any) -> None:
    for member in kind:
        assert member.__reduce_ex__(pickle.HIGHEST_PROTOCOL) == (kind, (member.value,))
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(member) is member


def test_torch_load_weights_only_in_a_process_that_only_imports(tmp_path: Path) -> None:
    torch.save({"layer": PLAIN, "x": PLAIN.down_proj}, tmp_path / "layer.pt")
    code = (
        "import sys, torch, mxpert; loaded = torch.load(sys.argv[1], weights_only=True); "
        "print(loaded['layer'].num_experts, loaded['x'].format.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "layer.pt")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["3", "mxfp4"], done.stderr


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_tensor_has_a_dtype_and_dequantizes(name: str) -> None:
    tensor = quantize_blocks(torch.randn(4, 64), name)
    assert tensor.qdata.view(tensor.dtype).shape == tensor.qdata.shape
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(tensor.dequantize(dtype), dequantize_blocks(tensor, dtype))
    if name != "mxfp4":  # torch decodes these codes itself
        values = tensor.qdata.view(tensor.dtype).to(torch.float32)
        scale = torch.exp2(tensor.scale.float() - 127).repeat_interleave(32, -1)
        assert torch.equal(tensor.dequantize(), values * scale)
    with pytest.raises(TypeError, match="dtype — need float32"):
        tensor.dequantize(torch.int8)


PLAN = mxpert.make_routing_plan(
    torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32), num_experts=2, routing_block_m=8
)


@pytest.mark.parametrize(
    "value",
    [
        *KINDS.values(),
        *(w.down_proj for w in KINDS.values()),
        PLAN,
        KINDS["hopper"].fold_certificates,
        PLAIN.to("meta"),
        mxpert.quantize(torch.ones(2, 32), "mxfp8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr_fits_on_three_lines(value: Any) -> None:
    text = repr(value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 130
    assert "tensor(" not in text


def test_repr_says_what_it_is() -> None:
    assert repr(PLAIN.down_proj) == (
        "MXTensor(mxfp4, shape=[3, 96, 160], axis=-1, layout=ROW_MAJOR, device='cpu')"
    )
    for part in ("num_experts=3", "hidden_size=96", "intermediate_size=160", "INTERLEAVED"):
        assert part in repr(KINDS["hopper"])
    assert "capacity=24" in repr(PLAN)


def test_objects_compare_by_identity() -> None:
    """As modules do: comparing tensors would raise."""
    again = replace(PLAIN)
    assert again != PLAIN
    assert len({PLAIN, again, PLAN, PLAIN.down_proj}) == 4


def test_dir_shows_public_names_only() -> None:
    assert dir(mxpert) == sorted([*mxpert.__all__, "__version__"])
    assert all(hasattr(mxpert, name) for name in dir(mxpert))


def test_the_package_has_a_tour() -> None:
    assert mxpert.__doc__ is not None
    lines = [line.strip() for line in mxpert.__doc__.splitlines()]
    lines = [line for line in lines if line.startswith((">>>", "..."))]
    assert len(lines) <= 12
    for name in ("quantize_weights", "prepare", "route_topk", "fused_moe"):
        assert name in "".join(lines)


@pytest.mark.parametrize(
    "order", [GateUpOrder.CONCATENATED, GateUpOrder.INTERLEAVED], ids=lambda order: order.name
)
def test_saved_prepared_weights_compute_the_same(order: GateUpOrder, tmp_path: Path) -> None:
    inputs = random_moe_problem(SHAPE, 4)
    weights = replace(inputs.weights, gate_up_order=order)
    weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT).save(tmp_path / "layer")
    back = MoEWeights.load(tmp_path / "layer").unprepare()
    arguments = (inputs.topk_weights, inputs.topk_ids)
    y, expected = (
        mxpert.fused_moe(inputs.x, w, *arguments, activation=mxpert.SwiGLU())
        for w in (back, weights)
    )
    assert torch.equal(y, expected)
