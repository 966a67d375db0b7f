"""NVFP4 layers rounded to e4m3 on request: said everywhere, and never by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mxpert
from mxpert.formats import round_to_e4m3
from mxpert.moe.weights import MoEWeights
from mxpert.testing.numerics import assert_exact


def layer(weight_format: Any = "nvfp4") -> MoEWeights:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(4, 128, 128, generator=generator)
    down = torch.randn(4, 128, 64, generator=generator)
    return mxpert.quantize_weights(
        gate_up, down, gate_up_order="concatenated", weight_format=weight_format
    )


def test_a_rounded_layer_is_mxfp8_and_says_what_it_cost() -> None:
    weights = layer()
    rounded = weights.round_weights("e4m3")
    assert rounded.weight_format == "mxfp8_e4m3"
    assert rounded.gate_up_order is weights.gate_up_order
    for name, cost in zip(
        ("gate_up_proj", "down_proj"), rounded.rounding_certificates or (), strict=True
    ):
        wanted, same = round_to_e4m3(getattr(weights, name))
        assert torch.equal(getattr(rounded, name).qdata, wanted.qdata)
        assert torch.equal(getattr(rounded, name).scale, wanted.scale)
        assert cost == same
        assert 30 < cost.snr_db < 33
    assert "nvfp4 rounded to e4m3, SNR 3" in repr(rounded)
    assert rounded.nbytes / weights.nbytes == pytest.approx(8.25 / 4.5, rel=0.08)


def test_nothing_is_rounded_by_default() -> None:
    weights = layer()
    assert weights.rounding_certificates is None
    assert weights.prepare(device="cpu").weight_format == "nvfp4"
    assert "rounded" not in repr(weights)


@pytest.mark.parametrize("layout", [None, "hopper_groups", "cdna4_fragment"])
def test_a_prepared_layer_keeps_values_and_certificate(layout: Any) -> None:
    rounded = layer().round_weights()
    prepared = rounded.prepare(device="cpu", layout=layout)
    assert prepared.rounding_certificates == rounded.rounding_certificates
    back = prepared.unprepare()
    assert back.rounding_certificates == rounded.rounding_certificates
    for found, wanted in zip(back.dequantize(), rounded.dequantize(), strict=True):
        assert_exact(found, wanted, "unprepared")


def test_files_and_states_keep_the_certificate(tmp_path: Path) -> None:
    rounded = layer().round_weights()
    rounded.save(tmp_path / "layer.safetensors")
    loaded = MoEWeights.load(tmp_path / "layer.safetensors")
    assert loaded.rounding_certificates == rounded.rounding_certificates
    plain = layer("mxfp8")
    plain.load_state_dict(rounded.state_dict())
    assert plain.rounding_certificates == rounded.rounding_certificates
    state = rounded.state_dict()
    state["_extra_state"]["rounding"] = [{"source": "nvfp4"}]
    with pytest.raises(ValueError, match=r"MoEWeights\.from_state_dict: rounding"):
        MoEWeights.from_state_dict(state)


def test_pickles_keep_the_certificate(tmp_path: Path) -> None:
    rounded = layer().round_weights()
    torch.save(rounded, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert loaded.rounding_certificates == rounded.rounding_certificates


def test_explain_says_it() -> None:
    rounded, x = layer().round_weights(), torch.randn(3, 128, dtype=torch.bfloat16)
    routing = mxpert.route_topk(torch.randn(3, 4), top_k=2)
    shown = str(mxpert.explain(mxpert.fused_moe, x, rounded, *routing, activation="silu"))
    assert "\n  weights: nvfp4 rounded to e4m3, SNR 3" in shown
    plain = str(mxpert.explain(mxpert.fused_moe, x, layer(), *routing, activation="silu"))
    assert "rounded" not in plain


def test_the_layer_computes_with_the_rounded_values() -> None:
    rounded = layer().round_weights()
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing = mxpert.route_topk(torch.randn(5, 4), top_k=2)
    dense = mxpert.quantize_weights(
        *rounded.dequantize(), gate_up_order="concatenated", weight_format="mxfp8"
    )
    assert torch.equal(dense.dequantize()[0], rounded.dequantize()[0])
    outputs = [mxpert.fused_moe(x, each, *routing, activation="silu") for each in (rounded, dense)]
    assert torch.equal(*outputs)


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^round_weights: weights — need nvfp4, got mxfp4"):
        layer("mxfp4").round_weights()
    with pytest.raises(ValueError, match=r"^round_weights: weight_rounding — need e4m3, got e5m2"):
        layer().round_weights("e5m2")  # type: ignore[arg-type]
    prepared = layer().prepare(device="cpu", layout="hopper_groups")
    with pytest.raises(ValueError, match="ROW_MAJOR"):
        prepared.round_weights()
