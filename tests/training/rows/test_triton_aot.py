"""Activation and combine of training compiled for three targets: wide accesses, no spills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import Activation, Op, RowsProblem
from mxpert.training.rows.inputs import ActivateInputs
from support.aot import TARGETS, Metrics, compile_for
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.launches import H200, RecordedLaunch, recorded_launches

TRITON = kernels_of("triton")
ACTIVATIONS = (
    mxpert.SiLU(),
    mxpert.SwiGLU(),
    mxpert.ClampedSiLU(),
    mxpert.SiTUv2(),
    mxpert.GELU(),
    mxpert.GELU("tanh"),
    mxpert.SwiGLU(limit=None, beta=0.25),
)
ROWS, TOP_K, WIDTH = 4096, 8, 2880
targets = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture
def launches() -> Iterator[list[RecordedLaunch]]:
    with recorded_launches() as recorded:
        yield recorded


def metrics_of(
    launches: list[RecordedLaunch],
    target: str,
    op: Op,
    activation: Activation | None = None,
    **tensors: Any,
) -> Metrics:
    """Compile the launch of one op and return its metrics."""
    problem = RowsProblem(
        op, H200, ROWS, WIDTH, torch.bfloat16, 1 if activation else TOP_K, activation
    )
    TRITON[op].launch(problem, None, INPUTS[op](**tensors))
    (launch,) = launches
    return compile_for(launch.kernel, launch.arguments, target=target).metrics


def check(metrics: Metrics) -> None:
    assert metrics.spills == metrics.scratch == 0
    assert metrics.global_loads.get(128, 0) > 0
    assert metrics.global_stores.get(128, 0) > 0
    assert {8, 16}.isdisjoint(metrics.global_loads)


@targets
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation(launches: list[RecordedLaunch], activation: Activation, target: str) -> None:
    gate_up = torch.zeros(ROWS, 2 * WIDTH, dtype=torch.bfloat16)
    check(metrics_of(launches, target, Op.ACTIVATE_ROWS, activation, gate_up=gate_up))
    launches.clear()
    check(
        metrics_of(
            launches,
            target,
            Op.ACTIVATE_ROWS_BACKWARD,
            activation,
            gate_up=gate_up,
            grad=gate_up[:, :WIDTH].contiguous(),
        )
    )


@targets
def test_combine(launches: list[RecordedLaunch], target: str) -> None:
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    row_ids = torch.arange(ROWS).view(-1, TOP_K)
    weights = torch.zeros(row_ids.shape)
    for each in (weights, None):
        check(
            metrics_of(
                launches,
                target,
                Op.COMBINE_ROWS,
                rows=rows,
                row_ids=row_ids,
                weights=each,
                out_dtype=torch.bfloat16,
            )
        )
        launches.clear()
    check(
        metrics_of(
            launches,
            target,
            Op.COMBINE_ROWS_BACKWARD,
            rows=rows,
            row_ids=row_ids,
            weights=weights,
            grad=rows[: ROWS // TOP_K],
        )
    )


def test_one_binary_serves_every_size(launches: list[RecordedLaunch]) -> None:
    """Sizes are run-time values: binaries depend only on the activation and the tile."""
    problem = RowsProblem(Op.ACTIVATE_ROWS, H200, 2, 64, torch.bfloat16, activation=mxpert.SwiGLU())
    for width, alpha in ((64, 1.702), (2880, 1.0)):
        TRITON[Op.ACTIVATE_ROWS].launch(
            replace(problem, width=width, activation=mxpert.SwiGLU(alpha)),
            None,
            ActivateInputs(gate_up=torch.zeros(2, 2 * width, dtype=torch.bfloat16)),
        )
    constants = [
        {name: value for name, value in launch.arguments.items() if name.isupper()}
        for launch in launches
    ]
    assert constants[0] == constants[1]
