"""`prepare(keep_fp8=True)`: an FP8 copy beside prepared MXFP4 weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, MoEWeights
from mxpert.core.geometry import parts_of
from mxpert.core.schema import kind_of
from mxpert.core.target import on_device
from mxpert.formats import MXTensor
from mxpert.formats.tensor import Layout
from support.devices import DEVICES
from tests.moe.test_weights import (
    FRAGMENT,
    E,
    F,
    H,
    assert_identical,
    make_weights,
    projection,
    wide,
)


def test_hopper_keeps_an_fp8_copy() -> None:
    weights = make_weights(bias=True)
    for layout in (None, FRAGMENT, Layout.HOPPER_FRAGMENT_FP8):
        with on_device(DEVICES["sm_90"]):
            prepared = weights.prepare(device="cpu", layout=layout, keep_fp8=True)
        assert prepared.layout is prepared.down_proj.layout is Layout.HOPPER_FRAGMENT_FP8
        assert_identical(prepared.unprepare(), weights)
    assert_identical(weights.prepare(device="cpu", layout="hopper_fragment_fp8"), prepared)


@pytest.mark.parametrize(
    "arch, change, got",
    [
        ("sm_90", lambda w: wide(w, "down_proj"), "ROW_MAJOR on sm_90; 1 blocks do not fold"),
        ("sm_100", lambda w: w, "ROW_MAJOR on sm_100; 0 blocks do not fold"),
        ("gfx950", lambda w: w, "CDNA4_FRAGMENT on gfx950"),
    ],
)
def test_an_fp8_copy_is_refused_by_name(
    arch: str, change: Callable[[MoEWeights], MoEWeights], got: str
) -> None:
    weights = change(make_weights())
    with (
        on_device(DEVICES[arch]),
        pytest.raises(ValueError, match=f"prepare: keep_fp8 — .* got {got}.*; prepare without it"),
    ):
        weights.prepare(device="cpu", keep_fp8=True)


def test_an_fp8_copy_is_of_mxfp4() -> None:
    dense = torch.randn(E, 2 * F, H), torch.randn(E, H, F)
    weights = mxpert.quantize_weights(
        *dense, gate_up_order="concatenated", weight_format="mxfp8_e4m3"
    )
    with pytest.raises(ValueError, match=r"keep_fp8 — need False .*, got mxfp8_e4m3; omit it"):
        weights.prepare(device="cpu", keep_fp8=True)
    with pytest.raises(TypeError, match=r"prepare: keep_fp8 — need a bool, got 1"):
        make_weights().prepare(device="cpu", keep_fp8=1)  # type: ignore[arg-type]


def test_an_fp8_copy_takes_two_bytes_a_byte() -> None:
    """One byte a weight beside 17 of 32 bytes; both are padded to units of 64 × 128."""
    weights = MoEWeights(
        projection(1, 5760, 2880), projection(1, 2880, 2880), gate_up_order=GateUpOrder.INTERLEAVED
    )
    prepared = weights.prepare(device="cpu", layout=FRAGMENT, keep_fp8=True)
    assert 2.88 <= prepared.nbytes / weights.nbytes <= 2.95


def test_an_fp8_copy_has_its_own_shape() -> None:
    part = make_weights().prepare(device="cpu", layout=FRAGMENT, keep_fp8=True).down_proj
    assert isinstance(part, MXTensor)
    with pytest.raises(ValueError, match="fp8_codes — need a value"):
        replace(part, fp8_codes=None)
    with pytest.raises(ValueError, match="fp8_codes — need None"):
        replace(part, layout=FRAGMENT)
    weights = make_weights().prepare(device="cpu", layout=FRAGMENT, keep_fp8=True)
    cut = replace(part, fp8_codes=part.fp8_codes[..., :4096])
    with pytest.raises(ValueError, match=r"MoEWeights: fp8_codes"):
        replace(weights, down_proj=cut)


def test_ops_take_an_fp8_copy_through_the_dispatcher() -> None:
    weights = make_weights().prepare(device="cpu", layout=FRAGMENT, keep_fp8=True)
    kind = kind_of(MoEWeights)
    flat = kind.flatten(weights)
    assert len(flat) == len(kind.types)
    again = kind.rebuild(*flat)
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(again, name).fp8_codes is getattr(weights, name).fp8_codes
    known = parts_of(weights)[0]  # to a replay
    assert any(weights.gate_up_proj.fp8_codes is tensor for tensor in known)
