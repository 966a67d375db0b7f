"""What FlashInfer is given: order, room and scales of the weights, arguments of its calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mxpert
from benchmarks.moe import flashinfer
from benchmarks.moe.cells import Cell, Model, random_inputs
from benchmarks.moe.ours import ACTIVATION, Truth, random_weights
from benchmarks.moe.peer_gate import PeerGate
from mxpert.cli.measure import GateError
from mxpert.formats.codec import dequantize_blocks
from mxpert.formats.spec import MXFP4
from mxpert.formats.tensor import MXTensor
from mxpert.moe.reference import activate

MODEL = Model("odd", 4, 2, 192, 96)
CELL = Cell(MODEL, 4)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize_blocks(MXTensor(codes, scales, MXFP4), torch.float64)


class Runner:
    """Computes what the kernels would, from weights that were not rearranged."""

    def __init__(self, narrow: bool, swap: bool = False) -> None:
        self.narrow, self.swap, self.profiled = narrow, swap, []
        self.get_gemm1_tactic_count, self.get_gemm2_tactic_count = (lambda: 2), (lambda: 3)

    def run_gemm_profile(self, *arguments: Any) -> None:
        gemm, tactic, preparing = arguments[14:17]
        assert len(arguments) == 19
        self.profiled.append((gemm, tactic, preparing))
        if tactic in (0, 4):
            raise RuntimeError("this tile was left out")

    def run_moe(self, out: Any, x: Any, ids: Any, weights: Any, *rest: Any) -> None:
        gate_up, _, down, _, scales, _, alpha, beta, limit = rest[:9]
        assert len(rest) == 25
        assert (alpha[0], beta[0], limit[0]) == (ACTIVATION.alpha, ACTIVATION.beta, 7.0)
        first, second = scales[0].view(torch.uint8), scales[-2 if self.narrow else 1]
        first = first.view(*gate_up.shape[:2], -1)
        second = second.view(torch.uint8).view(*down.shape[:2], -1)
        out.zero_()
        for token, slot in torch.ones_like(ids).nonzero().tolist():
            expert = ids[token, slot]
            both = values(gate_up[expert], first[expert]) @ x[token].double()
            up, gate = both.chunk(2)
            h = activate(ACTIVATION, *((up, gate) if self.swap else (gate, up))).bfloat16().double()
            row = values(down[expert], second[expert]) @ h
            out[token] += (weights[token, slot] * row).bfloat16()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    def top_k(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mxpert.route_topk(logits, MODEL.k)

    monkeypatch.setattr(flashinfer, "MoEOps", lambda *_: SimpleNamespace(topk=top_k))
    monkeypatch.setattr(flashinfer.FlashInfer, "_seconds", lambda self, call: call() or 1.0)
    package = SimpleNamespace(
        init=Runner,
        NOTES={"bf16": "two of its tiles", "fp8_token": ""},
        interleave_moe_weights_for_sm90_mixed_gemm=lambda codes, _: codes,
        interleave_moe_scales_for_sm90_mixed_gemm=lambda scales: scales,
        preprocess_moe_weights_for_sm90_mixed_gemm_humming=lambda codes, scales: (
            *(codes, scales),
            torch.ones(1),
        ),
    )
    monkeypatch.setitem(sys.modules, "flashinfer_moe", package)

    def make(activation: str) -> flashinfer.FlashInfer:
        weights = random_weights(MODEL, torch.device("cpu")).plain
        return flashinfer.FlashInfer(Path(), MODEL, weights, activation)

    return make


def check(peer: flashinfer.FlashInfer) -> float:
    weights = random_weights(MODEL, torch.device("cpu")).plain
    batches = random_inputs(CELL, torch.device("cpu"))
    variants = peer.prepare(CELL, batches)
    exact = Truth.of(weights, batches[0], MODEL.k, "bf16")
    return PeerGate(CELL, "bf16", weights, batches[0]).checked(exact, list(variants.values()))


def test_the_layer_is_ours(peer: Any) -> None:
    """Rows of up before those of gate, sizes with room to multiples of 128."""
    made = peer("bf16")
    assert made.gate_up.shape == (4, 2 * 128, 256 // 2)
    assert made.down.shape == (4, 256, 128 // 2)
    assert made.note == "two of its tiles"
    assert check(made) < 6e-3
    made.runner = Runner(False, swap=True)
    with pytest.raises(GateError, match="odd T=4 uniform bf16 layer"):
        check(made)


def test_kernels_that_were_left_out_are_not_chosen(peer: Any) -> None:
    made = peer("bf16")
    assert made._tuned(4) == [1, 2]
    gemm_1 = [(1, 0, True), (1, 1, True), (1, 1, False)]  # the first kernel is left out
    gemm_2 = [(2, 2, True), (2, 2, False), (2, 3, False), (2, 4, False)]
    assert made.runner.profiled == gemm_1 + gemm_2


def test_a_gemm_without_any_kernel_is_named(peer: Any) -> None:
    made = peer("bf16")
    made.runner.get_gemm1_tactic_count = lambda: 1
    with pytest.raises(RuntimeError, match="none of its kernels runs GEMM 1"):
        made._tuned(4)


def test_narrow_activations_have_a_factor_for_each_expert(peer: Any) -> None:
    made = peer("fp8_token")
    assert [each.numel() for each in (made.scales[1], made.scales[2], made.scales[4])] == [4, 1, 4]
    assert made.scales[1].tolist() == [64.0] * 4
    assert made.runner.narrow


def test_room_widens_no_range_of_scales() -> None:
    weights = random_weights(MODEL, torch.device("cpu")).plain
    codes, scales = flashinfer.aligned(weights.gate_up_proj, True)
    stored = weights.gate_up_proj.scale.view(torch.uint8)
    assert torch.equal(scales.flatten(1).amin(1), stored.flatten(1).amin(1))
    assert torch.equal(scales.flatten(1).amax(1), stored.flatten(1).amax(1))
    assert not codes[:, 96:128].any()
    assert not codes[:, :, 96:].any()
    assert torch.equal(codes[:, 128:224, :96], weights.gate_up_proj.qdata[:, ::2])
