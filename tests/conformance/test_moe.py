"""fused_moe, moe_gate_up and moe_down of every executor, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.core.problem import GELU, Op, SiLU, SwiGLU
from mxpert.moe import reference
from mxpert.testing.problems import MoEInputs
from support.devices import DEVICES
from support.executors import CHIPS, Executor
from support.kernels import kernels_of
from support.poison import PLANTED_ERRORS, plant_exchanged_gate_up
from tests.conformance.cases import moe as cases
from tests.conformance.cases.moe_case import MoECase

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.mark.cases(
    exact=cases.EXACT,
    other_tiles=cases.OTHER_TILES,
    high_tiles=cases.HIGH_TILES,
    rounded=cases.ROUNDED,
    routed=cases.ROUTED,
    operands=cases.OPERANDS,
    poisoned_padding=cases.POISONED,
    no_gate=cases.NO_GATE,
    weights=cases.WEIGHTS,
    out=cases.OUT,
)
def test_layer(case: MoECase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.cases(round_once=cases.STAGES, no_tokens=cases.NO_TOKENS, weights=cases.WEIGHT_STAGES)
def test_stages(case: MoECase, executor: Executor) -> None:
    case.check_stages(executor)


@pytest.mark.cases(cases.FROM_LOGITS)
def test_layer_from_logits(case: MoECase, executor: Executor) -> None:
    """It has the bits of the layer with the ids of `route_topk` on the same executor."""
    case.check_from_logits(executor)


@pytest.mark.parametrize("arch", [*CHIPS, "sm_100"])
def test_backends_serve_what_the_cases_say(arch: str) -> None:
    backend = CHIPS.get(arch, "triton")
    kernel = kernels_of(backend)[Op.FUSED_MOE]
    for name, case in [item for group in cases.ALL for item in group.items()]:
        refused = kernel.unsupported(case.problem(DEVICES[arch], backend))
        assert case.served_by(backend) == (refused is None), f"{name}: {refused}"


def test_exact_cases_are_exact() -> None:
    """Every value of the float64 result is a bfloat16 number, and most are not zero."""
    for name, case in cases.EXACT.items():
        y = case.expected(case.inputs()).y.sum(1)
        assert torch.equal(y.bfloat16().double(), y), name
        assert y.count_nonzero() > y.numel() / 2, name


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("a_format", ["bf16", "mxfp4"])
@pytest.mark.parametrize("name", PLANTED_ERRORS)
def test_the_comparison_catches(name: str, a_format: str, exact: bool) -> None:
    case = replace(cases.EXACT[f"{a_format}-silu-small"], exact=exact)
    inputs = case.inputs()
    expected = case.expected(inputs)
    with mxpert.override(backend="reference"):
        case.compare(case.run(inputs), inputs, expected)
        wrong = case.run(PLANTED_ERRORS[name](inputs))
    with pytest.raises(AssertionError):
        case.compare(wrong, inputs, expected)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("mxfp8-gelu", lambda inputs: replace(inputs, activation=GELU("tanh"))),
        ("bf16-gelu", plant_exchanged_gate_up),
        ("mxfp4-gelu_tanh", lambda inputs: replace(inputs, activation=SiLU())),
        ("bf16-swiglu_beta", lambda inputs: replace(inputs, activation=SwiGLU(limit=None))),
        ("mxfp4-swiglu", lambda inputs: replace(inputs, activation=SwiGLU(limit=1.0))),
    ],
    ids=["tanh for erf", "gate for up", "silu for gelu", "another beta", "another alpha"],
)
def test_the_comparison_catches_another_activation(
    name: str, plant: Callable[[MoEInputs], MoEInputs]
) -> None:
    check_catches(cases.STAGES[name], plant)


@pytest.mark.parametrize("a_format", cases.FORMATS)
def test_the_comparison_catches_relu_without_a_square(
    a_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(inputs: MoEInputs) -> MoEInputs:
        monkeypatch.setattr(reference, "activate", lambda activation, gate, up: up.clamp(min=0))
        return inputs

    check_catches(cases.STAGES[f"{a_format}-relu2"], plant)


def check_catches(case: MoECase, plant: Callable[[MoEInputs], MoEInputs]) -> None:
    """Stage 1 of the reference is right, and is told from one with a fault."""
    inputs = case.inputs()
    expected = case.expected(inputs)
    with mxpert.override(backend="reference"):
        case.compare_gate_up(case.run_stages(inputs, expected, 16)[0], expected, "")
        wrong, _ = case.run_stages(plant(inputs), expected, 16)
    with pytest.raises(AssertionError, match="relative L2"):
        case.compare_gate_up(wrong, expected, "")
