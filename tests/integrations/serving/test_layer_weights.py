"""Layers are prepared as they are asked to be; poison of a refused reload reaches every value."""

from __future__ import annotations

import pytest
import torch

import mxpert
from mxpert import GateUpOrder
from mxpert.formats import Layout
from mxpert.integrations.serving.layer_weights import poison, prepare_layer
from mxpert.integrations.serving.refusals import refuse_copies
from support.devices import prepared_for
from support.weight_formats import WITH_GROUPS, in_format


@pytest.mark.parametrize("layout", ["row_major", "hopper_groups"])
@pytest.mark.parametrize("name", WITH_GROUPS)
def test_poisoned_weights_are_nan(name: str, layout: str) -> None:
    torch.manual_seed(0)
    dense = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
    plain = mxpert.quantize_weights(*dense, gate_up_order="concatenated")
    format, _, zeros = name.partition("-")
    weights = in_format(plain, format, exact=False, zero_points=bool(zeros))
    prepared = weights.prepare(device="cpu", layout=layout)
    assert not any(each.isnan().any() for each in prepared.dequantize())
    poison(prepared)
    assert all(each.isnan().all() for each in prepared.dequantize())


ORDER = GateUpOrder.CONCATENATED


def loaded(seed: int = 0) -> tuple[torch.nn.Module, mxpert.MoEWeights]:
    """A layer as an engine has loaded it, and its weights."""
    generator = torch.Generator().manual_seed(seed)
    dense = (torch.randn(2, *size, generator=generator) for size in ((256, 128), (128, 128)))
    weights = mxpert.quantize_weights(*dense, gate_up_order=ORDER)
    layer = torch.nn.Module()
    for name, part in (("w13", weights.gate_up_proj), ("w2", weights.down_proj)):
        for suffix, tensor in (("weight", part.qdata), ("weight_scale", part.scale)):
            setattr(layer, f"{name}_{suffix}", torch.nn.Parameter(tensor, requires_grad=False))
    return layer, weights


def test_copies_are_kept_on_request_and_renewed_in_place() -> None:
    with prepared_for("sm_90"):
        assert prepare_layer(loaded()[0], ORDER, None, op="op").layout is Layout.HOPPER_FRAGMENT
        held = prepare_layer(loaded()[0], ORDER, None, op="op", keep_fp8=True)
        assert held.layout is Layout.HOPPER_FRAGMENT_FP8
        copies = held.gate_up_proj.fp8_codes
        layer, other = loaded(seed=1)
        assert prepare_layer(layer, ORDER, held, op="op", keep_fp8=True) is held
        wanted = other.prepare(device="cpu", keep_fp8=True)
    assert held.gate_up_proj.fp8_codes is copies
    for name in ("gate_up_proj", "down_proj"):
        found = getattr(held, name)
        assert torch.equal(found.fp8_codes, getattr(wanted, name).fp8_codes)
        assert torch.equal(found.reference, getattr(wanted, name).reference)


def test_copies_that_cannot_be_are_refused_in_one_line() -> None:
    """Starting with what users search the log of a server for."""
    text = "^mxpert for X: prepare: keep_fp8 — need .* got ROW_MAJOR on %s; %d blocks do not fold; "
    with pytest.raises(ValueError, match=text % ("cpu", 0) + "prepare without it$"):
        prepare_layer(loaded()[0], ORDER, None, op="mxpert for X", keep_fp8=True)
    layer, _ = loaded()
    layer.w2_weight_scale.data[1, 0, 0] += 30
    with (
        prepared_for("sm_90"),
        pytest.raises(ValueError, match=text % ("sm_90", 1) + "prepare without it$"),
    ):
        prepare_layer(layer, ORDER, None, op="mxpert for X", keep_fp8=True)


@pytest.mark.parametrize("format", ["MXFP4", "NVFP4", "MXFP8", "INT4"])
def test_other_formats_have_no_copies(format: str) -> None:
    refuse_copies(False, format, "layers.0", "op", "keep_fp8")
    if format.endswith("FP4"):
        refuse_copies(True, format, "layers.0", "op", "keep_fp8")
        return
    match = rf"^op: keep_fp8 — need MXFP4 weights, .*, got {format} \(layers.0\); omit it$"
    with pytest.raises(ValueError, match=match):
        refuse_copies(True, format, "layers.0", "op", "keep_fp8")
