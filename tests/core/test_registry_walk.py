"""Calls go down through the packages and never back up: a first call of an op, as on an H200."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

import mxpert
from mxpert.core.target import on_device
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape, random_moe_problem
from support.launches import H200, without_device
from support.layers import run_layer

HEIGHTS = (
    (4, r"\w+\.(op|dual_op|checks)|core\.(ops|schema)"),  # 1 check, 2 describe
    (3, r"core\.(registry|calls|support|tables)"),  # 3 resolve
    (2, r"moe|grouped|quantize|routing|backends"),  # 4 launch
    (1, r"core|device|formats|errors|configs"),
)
"""Height of modules, the first pattern that matches. Each step of a call stands below the last."""


def layer_call() -> Callable[[], object]:
    shape = MoEShape(64, 64, num_experts=4, top_k=2, activation=mxpert.SwiGLU())
    inputs = random_moe_problem(shape, 16)
    weights = inputs.weights.prepare(device="cpu", layout=Layout.HOPPER_FRAGMENT)
    return lambda: run_layer(
        inputs, weights=weights, activation=shape.activation, activation_format="mxfp8"
    )


def grouped_call() -> Callable[[], object]:
    offsets = torch.tensor([0, 40, 64])
    a, _ = mxpert.quantize_dual(torch.randn(64, 64), scale_span=mxpert.ScaleSpan.ROW)
    b, _ = mxpert.quantize_dual(torch.randn(2, 64, 64), scale_span=mxpert.ScaleSpan.ROW)
    return lambda: mxpert.grouped_gemm(a, b, offsets)


def walk(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(caller, called) modules of the library, of every call that goes from one to another.

    Calls by others (Triton runs constexpr functions as it compiles) and construction of objects do
    not count, nor does `mxpert.testing`: its emulator stands before each launch of a process that
    has emulated once.
    """
    steps: list[tuple[str, str]] = []

    def module(frame: FrameType | None) -> str:
        name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        return "" if name.startswith("mxpert.testing.") or not name.startswith("mxpert.") else name

    def note(frame: FrameType, event: str, argument: object) -> None:
        caller, called = module(frame.f_back), module(frame)
        is_function = event == "call" and not frame.f_code.co_name.startswith("__")
        if is_function and caller and called and caller != called:
            steps.append((caller, called))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def height(module: str) -> int:
    name = module.removeprefix("mxpert.")
    return next(level for level, pattern in HEIGHTS if re.match(rf"({pattern})(\.|$)", name))


@pytest.mark.parametrize("make", [layer_call, grouped_call])
def test_a_first_call_goes_down_and_never_back_up(make: Callable[[], Callable[[], object]]) -> None:
    call = make()
    with without_device(), on_device(H200):
        steps = walk(call)
    climbs = {step for step in steps if height(step[1]) > height(step[0])}
    # A first launch compiles its whole call: what launches it was handed down as a function.
    assert not {step for step in climbs if step[0] != "mxpert.core.compilation"}
    assert ("mxpert.core.ops", "mxpert.core.registry") in steps
    assert ("mxpert.core.ops", "mxpert.core.calls") in steps
    assert any("hopper" in caller for caller, _ in steps)
