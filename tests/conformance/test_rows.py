"""Activation and combine of training in Triton's interpreter, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import Activation, Op, RowsProblem
from mxpert.core.target import detect_target
from mxpert.testing.numerics import assert_close_relative, rounding_rms
from mxpert.training.rows.triton import COMBINE_BLOCK
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.training import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("nan_scratch")

REFERENCE = kernels_of("reference")
TRITON = kernels_of("triton")
DTYPES = (torch.bfloat16, torch.float32)
STEPS = 16
"""Upper bound of the float32 operations per value in these kernels."""

activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tolerance(value: torch.Tensor, terms: int = 1) -> float:
    """Half a unit of the dtype for the final rounding, plus the float32 roundings before it.

    The worst case is used, since all clamped values have the same error.
    """
    steps = (STEPS + terms) * rounding_rms(24)
    return steps + (2.0**-8 if value.dtype == torch.bfloat16 else 0)


def run(
    op: Op,
    kernels: dict[Op, Any],
    width: int,
    dtype: torch.dtype,
    top_k: int = 1,
    activation: Activation | None = None,
    **tensors: Any,
) -> Any:
    rows = len(tensors.get("gate_up", tensors.get("rows")))
    problem = RowsProblem(op, detect_target("cpu"), rows, width, dtype, top_k, activation)
    kernel = kernels[op]
    assert kernel.unsupported(problem) is None
    return kernel.launch(problem, kernel.heuristic(problem), INPUTS[problem.op](**tensors))


def wide(**tensors: Any) -> dict[str, Any]:
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in tensors.items()
    }


def compare(
    op: Op, width: int, dtype: torch.dtype, top_k: int = 1, terms: int = 1, **tensors: Any
) -> None:
    activation = tensors.pop("activation", None)
    found = run(op, TRITON, width, dtype, top_k, activation, **tensors)
    precise = wide(**tensors)
    if "out_dtype" in precise:
        precise["out_dtype"] = torch.float64
    wanted = run(op, REFERENCE, width, torch.float64, top_k, activation, **precise)
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for index, (actual, expected) in enumerate(pairs):
        assert_close_relative(actual, expected, tolerance(actual, terms), f"{op.value} {index}")


@dtypes
@activations
@pytest.mark.parametrize("rows, width", [(5, 96), (3, 700), (1, 1), (0, 64)])
def test_activation(activation: Activation, dtype: torch.dtype, rows: int, width: int) -> None:
    """Rows and columns are no multiples of the tile; gates are on both sides of each clamp."""
    torch.manual_seed(rows)
    gate_up = (2 * torch.randn(rows, 2 * width)).to(dtype)
    grad = torch.randn(rows, width).to(dtype)
    compare(Op.ACTIVATE_ROWS, width, dtype, gate_up=gate_up, activation=activation)
    compare(
        Op.ACTIVATE_ROWS_BACKWARD, width, dtype, grad=grad, gate_up=gate_up, activation=activation
    )


@activations
def test_activation_sees_gate_and_up_exchanged(activation: Activation) -> None:
    gate_up = torch.randn(4, 128)
    swapped = torch.cat(gate_up.chunk(2, -1)[::-1], -1)
    found, wanted = (
        run(Op.ACTIVATE_ROWS, kernels, 64, torch.float32, activation=activation, gate_up=value)
        for kernels, value in ((TRITON, swapped), (REFERENCE, gate_up))
    )
    with pytest.raises(AssertionError):
        assert_close_relative(found, wanted.double(), tolerance(found), "exchanged")


@activations
def test_not_a_number_stays_one(activation: Activation) -> None:
    gate_up = torch.zeros(2, 64)
    gate_up[0, 3] = gate_up[1, 35] = float("nan")
    for op, rest in (
        (Op.ACTIVATE_ROWS, {}),
        (Op.ACTIVATE_ROWS_BACKWARD, {"grad": torch.ones(2, 32)}),
    ):
        found, wanted = (
            run(op, kernels, 32, torch.float32, activation=activation, gate_up=gate_up, **rest)
            for kernels in (TRITON, REFERENCE)
        )
        assert torch.equal(found.isnan(), wanted.isnan())
        assert found.isnan().any()


@dtypes
@pytest.mark.parametrize("absent", [0, 2, None], ids=["every-row", "two-absent", "no-row"])
@pytest.mark.parametrize(
    "tokens, top_k, width",
    [(7, 2, 96), (3, 1, COMBINE_BLOCK + 31), (2, 8, COMBINE_BLOCK + 1), (0, 4, 64)],
)
def test_combine(
    dtype: torch.dtype, tokens: int, top_k: int, width: int, absent: int | None
) -> None:
    """Ids of rows that are not there add nothing, and the gradients of their weights are 0."""
    torch.manual_seed(top_k)
    pairs = tokens * top_k
    rows = torch.randn(0 if absent is None else max(0, pairs - absent), width).to(dtype)
    row_ids = torch.randperm(pairs).view(tokens, top_k)
    weights, grad = torch.rand(tokens, top_k), torch.randn(tokens, width).to(dtype)
    for each in (weights, None):
        compare(
            Op.COMBINE_ROWS,
            width,
            dtype,
            top_k,
            top_k,
            rows=rows,
            row_ids=row_ids,
            weights=each,
            out_dtype=dtype,
        )
    compare(
        Op.COMBINE_ROWS_BACKWARD,
        width,
        dtype,
        top_k,
        width,
        grad=grad,
        rows=rows,
        row_ids=row_ids,
        weights=weights,
    )


def test_a_whole_block_trains_on_the_kernels() -> None:
    """MXMoE on the portable backend against the reference, with equal permutation and weights."""
    torch.manual_seed(0)
    moe = mxpert.training.MXMoE(32, 32, 3, 2, recipe=mxpert.training.MXFP8Recipe(enabled=False))
    x, grad = torch.randn(2, 5, 32)
    results = []
    for backend in ("reference", "triton"):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        with mxpert.override(backend=backend):
            y = moe(leaf)
            y.backward(grad)
        results.append((y.detach(), leaf.grad, moe.router.grad.clone()))
    for found, wanted in zip(*results[::-1], strict=True):
        assert_close_relative(found, wanted.double(), 4 * tolerance(found, 32), "MXMoE")
