"""Every op of inference and training, by its public function, executed as gfx950 code.

All problems are exactly representable: every product and partial sum is a float32 number, so the
bits must be those of the reference in float64, whatever the tile and the order of the waves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import mxpert
from mxpert.core.backend import BACKENDS
from mxpert.core.launch import record_launches
from mxpert.core.problem import Op
from mxpert.testing.gfx950 import emulate
from mxpert.testing.numerics import assert_exact
from mxpert.testing.problems import MoEInputs, MoEShape
from mxpert.training.rows import op as row_ops
from support.exact import exact_moe_problem
from support.gfx950_suite import SCHEDULES
from support.layers import plan_of, run_layer
from support.poison import nan_filled_scratch
from support.replays import tensors_of

ELSEWHERE = {"reference", "hopper"}
"""Backends that have no kernel for gfx950."""

NOT_SERVED = {("cdna4", "grouped_gemm-bf16"), ("cdna4", "grouped_wgrad-bf16")}
"""Cases that a backend leaves to the next one: the native grouped GEMMs multiply MX operands."""

Call = Callable[[], Any]
FLOAT64 = mxpert.configs.ReferenceConfig(torch.float64)


class Case(NamedTuple):
    """A call of a public function: the op that it is about, and the call."""

    op: Op
    call: Call


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(*size: int, seed: int = 0, largest: int = 3) -> torch.Tensor:
    """Integers that bf16, e4m3 and e5m2 hold, also as sums of 160 products in float32."""
    return torch.randint(-largest, largest + 1, size, generator=draw(seed)).float()


def layer() -> MoEInputs:
    """21 tokens on 5 experts, with ragged tiles in every dimension."""
    inputs = exact_moe_problem(MoEShape(160, 96, 5, 2, mxpert.SwiGLU(), has_bias=True), 21)
    return replace(inputs, weights=inputs.weights.prepare(device="cpu"))


def stages() -> torch.Tensor:
    """Plan, stage 1 and stage 2 one by one."""
    inputs = layer()
    plan = plan_of(inputs, 32)
    h = mxpert.moe_gate_up(inputs.x, inputs.weights, plan, activation=inputs.activation)
    return mxpert.moe_down(h, inputs.weights, plan)


def routed() -> tuple[torch.Tensor, torch.Tensor]:
    """Two equal logits a token and the others far below: both weights are 1/2."""
    ids = torch.stack([torch.randperm(12, generator=draw(seed))[:2] for seed in range(9)])
    logits = torch.full((9, 12), -500.0).scatter_(1, ids, 4.0)
    return mxpert.route_topk(logits, 2)


def plan() -> mxpert.RoutingPlan:
    ids = torch.stack([torch.randperm(12, generator=draw(seed))[:3] for seed in range(40)]).int()
    weights = torch.full(ids.shape, 0.5)
    return mxpert.make_routing_plan(weights, ids, num_experts=12, routing_block_m=16)


OFFSETS = torch.tensor([0, 0, 37, 38, 150, 190], dtype=torch.int32)


def operands(fmt: str, seed: int) -> tuple[Any, Any]:
    """Rows [200, 96] in a format, along the columns and along the rows of each group."""
    x = integers(200, 96, seed=seed).bfloat16()
    if fmt == "bf16":
        return x, x
    return mxpert.quantize_dual(x, fmt, group_offsets=OFFSETS)


def grouped(a_format: str, b_format: str) -> Call:
    def call() -> torch.Tensor:
        a, _ = operands(a_format, 1)
        b: Any = integers(5, 64, 96, seed=2).bfloat16()
        b = b if b_format == "bf16" else mxpert.quantize(b, b_format)
        return mxpert.grouped_gemm(a, b, OFFSETS, out_dtype=torch.float32)

    return call


def wgrad(grad_format: str, a_format: str) -> Call:
    def call() -> torch.Tensor:
        _, a = operands(a_format, 1)
        _, grad = operands(grad_format, 3)
        return mxpert.grouped_wgrad(grad, a, OFFSETS, out_dtype=torch.float32)

    return call


def quantized(fmt: str, axis: int) -> Call:
    scales = torch.exp2(integers(70, 64, seed=5, largest=8))
    x = integers(70, 64, seed=4) * scales
    return lambda: mxpert.quantize(x if axis == -1 else x[:64], fmt, axis=axis)


def gates() -> torch.Tensor:
    """Gates of 64 to 192, where the sigmoid rounds to 1, and ups of −3 to 3."""
    gate = 64.0 * torch.randint(1, 4, (50, 48), generator=draw(6))
    return torch.cat([gate, integers(50, 48, seed=7)], -1)


def combine() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [60, 72], their places by token and slot, and weights that are powers of two."""
    weights = torch.exp2(integers(20, 3, seed=8))
    return integers(60, 72), torch.randperm(60, generator=draw(9)).view(20, 3), weights


def trained(layer: torch.nn.Module, *arguments: Any) -> Iterator[torch.Tensor]:
    """Output and all gradients of a module whose parameters are set to integers."""
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed, largest=1))
    x = integers(200, 96, seed=11).requires_grad_()
    y = layer(x, *arguments)
    y.backward(integers(*y.shape, seed=12))
    yield from (y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters()))


def grouped_layer(recipe: mxpert.training.MXFP8Recipe) -> Call:
    def call() -> list[torch.Tensor]:
        made = mxpert.training.MXGroupedLinear(5, 96, 64, bias=True, recipe=recipe)
        return list(trained(made, OFFSETS))

    return call


def torchs_grouped_mm() -> torch.Tensor:
    a, b = integers(190, 96, seed=1).bfloat16(), integers(5, 96, 64, seed=2).bfloat16()
    return mxpert.training.grouped_mm(a, b, OFFSETS[1:])


E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
CASES = {
    **{f"quantize-{fmt}-rows": Case(Op.QUANTIZE, quantized(fmt, -1)) for fmt in ("mxfp4", E4M3)},
    "quantize-e5m2-columns": Case(Op.QUANTIZE, quantized(E5M2, -2)),
    "dequantize-mxfp4": Case(Op.DEQUANTIZE, lambda: mxpert.dequantize(quantized("mxfp4", -1)())),
    "dequantize-e4m3": Case(Op.DEQUANTIZE, lambda: mxpert.dequantize(quantized(E4M3, -2)())),
    "route_topk": Case(Op.ROUTE_TOPK, routed),
    "make_routing_plan": Case(Op.ROUTING_PLAN, plan),
    "layer": Case(Op.FUSED_MOE, lambda: run_layer(layer(), activation_format="mxfp8")),
    "moe_gate_up": Case(Op.MOE_GATE_UP, stages),
    "moe_down": Case(Op.MOE_DOWN, stages),
    "quantize_dual": Case(Op.QUANTIZE_DUAL, lambda: operands(E4M3, 1)),
    "grouped_gemm-bf16": Case(Op.GROUPED_GEMM, grouped("bf16", "bf16")),
    "grouped_gemm-e4m3": Case(Op.GROUPED_GEMM, grouped(E4M3, E4M3)),
    "grouped_gemm-hybrid": Case(Op.GROUPED_GEMM, grouped(E5M2, E4M3)),
    "grouped_wgrad-bf16": Case(Op.GROUPED_WGRAD, wgrad("bf16", "bf16")),
    "grouped_wgrad-e4m3": Case(Op.GROUPED_WGRAD, wgrad(E4M3, E4M3)),
    "grouped_wgrad-hybrid": Case(Op.GROUPED_WGRAD, wgrad(E5M2, E4M3)),
    "activate_rows": Case(Op.ACTIVATE_ROWS, lambda: row_ops.activate_rows(gates(), mxpert.SiLU())),
    "activate_rows_backward": Case(
        Op.ACTIVATE_ROWS_BACKWARD,
        lambda: row_ops.activate_rows_backward(integers(50, 48), gates(), mxpert.SiLU()),
    ),
    "combine_rows": Case(Op.COMBINE_ROWS, lambda: row_ops.combine_rows(*combine())),
    "combine_rows_backward": Case(
        Op.COMBINE_ROWS_BACKWARD,
        lambda: row_ops.combine_rows_backward(integers(20, 72, seed=13), *combine()),
    ),
    "MXGroupedLinear": Case(Op.GROUPED_WGRAD, grouped_layer(mxpert.training.MXFP8Recipe())),
    "MXGroupedLinear-hybrid": Case(
        Op.GROUPED_GEMM, grouped_layer(mxpert.training.MXFP8Recipe.hybrid())
    ),
    "grouped_mm": Case(Op.GROUPED_GEMM, torchs_grouped_mm),
}


def kernels() -> set[tuple[str, Op]]:
    """Backends and ops of the kernels that may serve an MI355X."""
    return {
        (name, op)
        for name, backend in BACKENDS.items()
        if name not in ELSEWHERE
        for op in backend.kernels
    }


def pairs() -> list[Any]:
    """Each case with each backend that has a kernel for its op."""
    return [
        pytest.param(backend, name, id=f"{backend}-{name}")
        for backend, op in sorted(kernels(), key=str)
        for name, case in CASES.items()
        if case.op is op and (backend, name) not in NOT_SERVED
    ]


def preferring(backend: str) -> contextlib.AbstractContextManager[None]:
    """Let a backend serve what it can; others serve ops that it lacks."""
    return mxpert.override(backend=backend) if backend == "triton" else contextlib.nullcontext()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend, name", pairs())
def test_an_exact_problem_has_the_bits_of_float64(
    backend: str, name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":  # reads the published layout
        monkeypatch.setattr(mxpert.MoEWeights, "prepare", lambda weights, **_: weights)
    call = CASES[name].call
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = list(tensors_of(call()))
    with (
        emulate(schedule=schedule, seed=len(name)),
        nan_filled_scratch(),
        preferring(backend),
        record_launches() as records,
    ):
        found = list(tensors_of(call()))
    modules = {record.launch.kernel.__module__ for record in records}
    assert not any("hopper" in module for module in modules)
    assert any("cdna4" in module for module in modules) == (backend == "cdna4"), modules
    assert len(found) == len(expected) > 0
    for actual, wanted in zip(found, expected, strict=True):
        assert_exact(actual, wanted, name, ignore_zero_sign=True)


def test_every_kernel_of_the_chip_has_a_case() -> None:
    """A new op, and a new backend's kernel for an old one, need a case here."""
    covered = {case.op for case in CASES.values()}
    assert {op for _, op in kernels()} <= covered
    assert covered == set(Op), "every op has a kernel for gfx950"
