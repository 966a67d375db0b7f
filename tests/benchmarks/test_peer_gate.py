"""The gate of peers: what passes, and the faults that it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from benchmarks.moe.cells import Cell, Model, random_inputs
from benchmarks.moe.humming import NO_PADDING, TO_128, TO_256, input_config, paddings
from benchmarks.moe.ours import ACTIVATION, Call, Truth, random_weights
from benchmarks.moe.peer_gate import (
    MULTIPLIER_ERROR,
    SPANS,
    PeerGate,
    Steps,
    as_encoded,
    decoded,
    encoding_error,
)
from mxpert.cli.measure import GateError
from mxpert.formats.token import quantize_token_rows
from mxpert.moe.reference import activate
from mxpert.testing.numerics import rounding_rms

MODEL = Model("small", 8, 2, 384, 320)
CELL = Cell(MODEL, 4)
ACTIVATIONS = ("bf16", *SPANS)


def gate_of(activation: str) -> PeerGate:
    weights = random_weights(MODEL, torch.device("cpu")).plain
    return PeerGate(CELL, activation, weights, random_inputs(CELL, torch.device("cpu"))[0])


def right_steps(gate: PeerGate) -> Steps:
    """A peer that sums in float32."""
    weights, k = gate.weights, MODEL.k
    topk_weights, ids = mxpert.route_topk(gate.inputs.logits, k)
    x = as_encoded(gate.inputs.x, gate.activation)
    experts = ids.flatten().tolist()
    first, second = (
        [mxpert.dequantize(part[expert]).float() for expert in experts]
        for part in (weights.gate_up_proj, weights.down_proj)
    )
    rows = zip(x.float().repeat_interleave(k, 0), first, strict=True)
    gate_up = torch.stack([row @ weight.T for row, weight in rows]).bfloat16()
    h = as_encoded(
        activate(ACTIVATION, *gate_up.float().view(-1, MODEL.F, 2).unbind(-1)), gate.activation
    )
    parts = [row @ weight.T for row, weight in zip(h.float(), second, strict=True)]
    parts = torch.stack(parts).bfloat16().float() * topk_weights.flatten()[:, None]
    return Steps(x, gate_up, h, parts.view(-1, k, MODEL.H).sum(1).bfloat16())


def check(gate: PeerGate, steps: Steps) -> float:
    exact = Truth.of(gate.weights, gate.inputs, MODEL.k, "bf16")
    calls: dict[str, list[Call]] = {"steps": [lambda: steps], "layer": [lambda: steps.y]}
    return gate.checked(exact, [calls])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_right_peer_passes(activation: str) -> None:
    gate = gate_of(activation)
    assert 1e-4 < check(gate, right_steps(gate)) < 4e-3


def test_a_value_between_two_codes_may_become_either() -> None:
    """With a scale of 1, 29 lies exactly between the codes of 28 and 30."""
    x = torch.zeros(1, 384, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([448.0, 29.0, 27.0])
    ours = as_encoded(x, "fp8_group")
    assert ours[0, :3].tolist() == [448.0, 28.0, 28.0]
    for code, passes in ((28.0, True), (30.0, True), (32.0, False), (26.0, False)):
        found = ours.clone()
        found[0, 1] = code
        assert (encoding_error(found, x, "fp8_group") <= MULTIPLIER_ERROR) == passes
    found = ours.clone()
    found[0, 2] = 26.0  # 27 lies between 26 and 28
    assert encoding_error(found, x, "fp8_group") <= MULTIPLIER_ERROR


def sliced(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """bfloat16 sums of bfloat16 sums of 128 values each."""
    total = torch.zeros(len(weights), dtype=torch.bfloat16)
    for part, other in zip(rows.split(128), weights.split(128, 1), strict=True):
        total += (part.float() @ other.float().T).bfloat16()
    return total


def test_a_peer_may_add_slices_of_the_depth_in_bfloat16() -> None:
    gate, k = gate_of("fp8_group"), MODEL.k
    steps = right_steps(gate)
    experts = mxpert.route_topk(gate.inputs.logits, k)[1].flatten().tolist()
    first = [mxpert.dequantize(gate.weights.gate_up_proj[expert]).float() for expert in experts]
    x = steps.x.repeat_interleave(k, 0)
    gate_up = torch.stack([sliced(row, weight) for row, weight in zip(x, first, strict=True)])
    h = activate(ACTIVATION, *gate_up.float().view(-1, MODEL.F, 2).unbind(-1))
    errors = gate.step_errors(
        replace(steps, gate_up=gate_up, h=as_encoded(h, "fp8_group")), torch.arange(CELL.tokens)
    )
    assert 1.1 * rounding_rms(8) < errors["gate_up_gemm"] <= gate.step_gates(4)["gate_up_gemm"]


def other_span(gate: PeerGate, steps: Steps) -> Steps:
    """One scale for 64 values."""
    groups = quantize_token_rows(gate.inputs.x.float().view(-1, 64))
    return replace(steps, x=groups.dequantize(torch.float64).view(steps.x.shape))


def shifted_scales(gate: PeerGate, steps: Steps) -> Steps:
    """Each span of the intermediate has its neighbour's scale."""
    scale = torch.ones(len(steps.h), 3)
    scale[:, 1] = 1.02
    return replace(steps, h=steps.h * decoded(torch.ones_like(steps.h), scale))


def swapped(gate: PeerGate, steps: Steps) -> Steps:
    """Gate and up exchanged."""
    pairs = steps.gate_up.view(-1, MODEL.F, 2).flip(-1)
    return replace(steps, gate_up=pairs.reshape(steps.gate_up.shape))


def unweighted(gate: PeerGate, steps: Steps) -> Steps:
    """Router weights left out."""
    return replace(steps, y=steps.y * 1.01)


def invalid(gate: PeerGate, steps: Steps) -> Steps:
    """A NaN in one output."""
    y = steps.y.clone()
    y[0, 0] = float("nan")
    return replace(steps, y=y)


@pytest.mark.parametrize(
    "plant, step",
    [
        pytest.param(other_span, "x", id="span"),
        pytest.param(swapped, "gate_up_gemm", id="gate-up"),
        pytest.param(shifted_scales, "activation", id="scales"),
        pytest.param(unweighted, "down", id="weights"),
        pytest.param(invalid, "down", id="nan"),
    ],
)
def test_a_fault_is_found_in_its_step(plant: Callable[[PeerGate, Steps], Steps], step: str) -> None:
    gate = gate_of("fp8_group")
    with pytest.raises(GateError, match=f"fp8_group {step} — need relative L2"):
        check(gate, plant(gate, right_steps(gate)))


def test_a_peer_that_shows_no_steps_is_compared_as_a_whole() -> None:
    gate = gate_of("bf16")
    exact = Truth.of(gate.weights, gate.inputs, MODEL.k, "bf16")
    y = torch.zeros(CELL.tokens, MODEL.H)
    y[exact.tokens] = exact.layer.float()
    assert gate.checked(exact, [{"layer": [lambda: y]}]) == 0
    with pytest.raises(GateError, match="bf16 layer"):
        gate.checked(exact, [{"layer": [lambda: y]}, {"layer": [lambda: 1.02 * y]}])


def test_a_span_may_be_short_at_the_end_of_a_row() -> None:
    rows = torch.full((2, 320), 448.0)
    rows[:, 256:] = 448 * 2.0**-20  # lost without a scale of its own
    assert as_encoded(rows, "fp8_group").equal(rows.double())
    rows = torch.ones(2, 320)
    scale = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    assert decoded(rows, scale)[0, [0, 128, 256, 319]].tolist() == [1.0, 2.0, 4.0, 4.0]
    assert decoded(rows, scale[:, 1:2])[0, [0, 319]].tolist() == [2.0, 2.0]


def test_humming_is_told_how_many_values_share_a_scale() -> None:
    assert [input_config(name) for name in ACTIVATIONS] == [
        {"dtype": "bfloat16"},
        {"dtype": "float8e4m3"},
        {"dtype": "float8e4m3", "group_size": 128},
    ]


def test_humming_pads_what_spans_do_not_divide_and_as_vllm_does() -> None:
    sizes = {name: paddings(MODEL, name) for name in ACTIVATIONS}
    three = (NO_PADDING, TO_128, TO_256)
    assert sizes == {"bf16": three, "fp8_token": three, "fp8_group": three[1:]}
    for F, H, found in ((256, 512, (NO_PADDING,)), (256, 384, (NO_PADDING, TO_256))):
        model = replace(MODEL, F=F, H=H)
        assert {paddings(model, name) for name in ACTIVATIONS} == {found}
