"""Every device kernel computes tanh in one form, so that tiles do not change SiTUv2's numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mxpert
from mxpert import GateUpOrder, SiTUv2
from mxpert.configs import GemmConfig
from mxpert.core.problem import MoEOptions, MoEProblem, Op, RowsProblem
from mxpert.device.activation import tanh
from mxpert.formats import MXFP4, MXTensor
from mxpert.formats.tensor import Layout
from mxpert.moe.inputs import GateUpInputs
from mxpert.moe.weights import MoEWeights
from mxpert.routing.plan import RoutingPlan, plan_capacity
from mxpert.training.rows.inputs import ActivateBackwardInputs, ActivateInputs
from support.aot import compile_for
from support.launches import H200, RecordedLaunch, recorded_launches

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import host as hopper
from mxpert.moe.triton import host as portable
from mxpert.training.rows.triton import ACTIVATE_ROWS, ACTIVATE_ROWS_BACKWARD

PACKAGE = Path(mxpert.__file__).parent
SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835)
"""Coefficients that no other device code has."""
EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, UNIT = 8, 2880, 2880, 16, 2, 16


def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def plan() -> RoutingPlan:
    capacity = plan_capacity(TOKENS, TOP_K, EXPERTS, UNIT)
    return RoutingPlan(
        empty(capacity, dtype=torch.int32),
        empty(capacity, dtype=torch.float32),
        empty(capacity // UNIT, dtype=torch.int32),
        empty(2, dtype=torch.int32),
        empty(TOKENS, TOP_K, dtype=torch.int32),
        TOKENS,
        TOP_K,
        EXPERTS,
        UNIT,
    )


def matrix(rows: int, depth: int, layout: Layout) -> MXTensor:
    if layout is Layout.ROW_MAJOR:
        return MXTensor(empty(EXPERTS, rows, depth // 2), empty(EXPERTS, rows, depth // 32), MXFP4)
    units, steps = -(-rows // 64), -(-depth // 128)
    return MXTensor(
        empty(EXPERTS, units, steps, 4096),
        empty(EXPERTS, units, steps, 256),
        MXFP4,
        -1,
        layout,
        empty(EXPERTS, units * 64),
        (EXPERTS, rows, depth),
    )


def gate_up_launches(backend: str, k_splits: int) -> list[RecordedLaunch]:
    """What stage 1 would launch on an H200 with SiTUv2."""
    on_hopper = backend == "hopper"
    layout = Layout.HOPPER_FRAGMENT if on_hopper else Layout.ROW_MAJOR
    problem = MoEProblem(
        Op.MOE_GATE_UP,
        H200,
        TOKENS,
        TOP_K,
        EXPERTS,
        HIDDEN,
        INNER,
        MoEOptions(SiTUv2()),
        layout,
        UNIT,
    )
    order = GateUpOrder.INTERLEAVED if on_hopper else GateUpOrder.CONCATENATED
    weights = MoEWeights(
        matrix(2 * INNER, HIDDEN, layout), matrix(HIDDEN, INNER, layout), gate_up_order=order
    )
    config = (
        replace(heuristics.tiles(hi_lo=True)["decode16"], k_splits=k_splits)
        if on_hopper
        else GemmConfig(UNIT, 64, 128, num_warps=8, split_k=k_splits)
    )
    with recorded_launches() as launches:
        stage = hopper.GATE_UP if on_hopper else portable.GATE_UP
        stage.launch(
            problem,
            config,
            GateUpInputs(
                weights=weights, plan=plan(), x=empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
            ),
        )
    return launches


def row_launches() -> list[RecordedLaunch]:
    """The activation of training, forward and backward."""
    gate_up = empty(64, 512, dtype=torch.bfloat16)
    problem = RowsProblem(Op.ACTIVATE_ROWS, H200, 64, 256, torch.bfloat16, activation=SiTUv2())
    with recorded_launches() as launches:
        ACTIVATE_ROWS.launch(problem, None, ActivateInputs(gate_up=gate_up))
        ACTIVATE_ROWS_BACKWARD.launch(
            problem, None, ActivateBackwardInputs(gate_up=gate_up, grad=gate_up[:, :256])
        )
    return launches


def constants(launch: RecordedLaunch) -> list[float]:
    """Float32 constants of a kernel as the compiler reads it."""
    compiled = compile_for(launch.kernel, launch.arguments, target="sm_90")
    text = compiled.asm.get("ttir") or compiled.asm["ttgir"]
    number = r"-?\d+\.\d+(?:E[+-]?\d+)?"
    found = re.findall(rf"arith\.constant (?:dense<)?({number})>? : .*f32", text)
    return [float(each) for each in found]


def test_one_function_in_the_source() -> None:
    """No second tanh and no second activation, under whatever name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "triton" not in path.read_text() or path.stem == "reference":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (
                "tanh" in node.name
                or any(
                    isinstance(part, ast.Constant) and part.value == "situ_v2"
                    for part in ast.walk(node)
                )
            ):
                found.append((path.relative_to(PACKAGE).as_posix(), node.name))
    assert found == [
        ("device/activation.py", "tanh"),
        ("device/activation.py", "gated_activation"),
        ("training/rows/triton_kernels.py", "_derivatives"),
    ]
    assert tanh.__name__ == "tanh"


@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(lambda: gate_up_launches("hopper", 1), id="hopper"),
        pytest.param(lambda: gate_up_launches("hopper", 3), id="hopper-split"),
        pytest.param(lambda: gate_up_launches("triton", 1), id="triton"),
        pytest.param(lambda: gate_up_launches("triton", 3), id="triton-split"),
        pytest.param(row_launches, id="training"),
    ],
)
def test_every_epilogue_compiles_the_same_series(
    launches: Callable[[], list[RecordedLaunch]],
) -> None:
    """The kernel that activates has each coefficient, and no other kernel of the stage has any."""
    found = [constants(launch) for launch in launches()]
    with_tanh = [
        numbers
        for numbers in found
        if any(abs(number / SERIES[0] - 1) < 1e-6 for number in numbers)
    ]
    assert len(with_tanh) == (2 if launches is row_launches else 1)
    for numbers in with_tanh:
        for coefficient in SERIES:
            assert any(abs(number / coefficient - 1) < 1e-6 for number in numbers), coefficient


def test_worst_case_of_the_form() -> None:
    """2^-20 holds whatever the signs of the errors that PTX allows the exponential, the division
    and the roundings; between 1/4, where the exponential takes over, and saturation."""
    unit = 2.0**-24
    x = torch.linspace(0.25, 12, 1 << 16, dtype=torch.float64)
    decay, value = torch.exp(-2 * x), torch.tanh(x)
    # ex2.approx: 2^-22; its argument is rounded twice (product and log2 e), each half a unit of 2x.
    decay_error = decay * (4 * unit + 2 * x * 2 * unit)
    size_error = 2 / (1 + decay) ** 2 * decay_error + value * (4 * unit + 2 * unit)
    assert (size_error / value).max() < 2.0**-20
    assert (size_error / value).max() > 2.0**-21, "the bound is not a loose one"
    series = 1382 / 155925 * 0.25**10 + 3 * unit
    assert series < 2.0**-22
