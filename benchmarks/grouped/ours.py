"""Our side of grouped/run.py: calls, the operands they multiply, and the gate before timing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mxpert
from benchmarks.grouped.cells import (
    MODES,
    PARTS,
    Operands,
    Part,
    Rows,
    expected,
    pick,
    plain_operands,
)
from mxpert.cli.measure import GateError
from mxpert.formats import MXTensor, dequantize_blocks
from mxpert.testing.numerics import UNPROMOTED_ERROR, relative_l2, sqnr_db
from mxpert.training import MXFP8Recipe, grouped_linear

OURS = "mxpert"
GATE = 3e-3
"""Relative L2 to float64 on the dequantised operands; rounding to bfloat16 alone is 1.7e-3."""

GATE_DB = {OURS: 25.0}
PEER_GATE_DB = 20.0
"""Whatever is below this multiplies something else; e4m3 with any scales is near 28."""

Pick = Callable[[Sequence[Part], str, Any], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One timed call. `exact` are its operands, dequantised to float64, where they are known;
    `accumulator` is what it adds to; `pick` finds the sampled rows in its result."""

    impl: str
    mode: str
    op: str
    with_quant: bool
    call: Callable[[], Any]
    exact: tuple[Rows, Rows] | None = None
    accumulator: torch.Tensor | None = None
    pick: Pick = pick

    @property
    def name(self) -> str:
        return f"{self.impl}/{self.mode}/{self.op}/{'quantised' if self.with_quant else 'kernel'}"


def recipe_of(mode: str) -> MXFP8Recipe:
    """The recipe that trains in a mode; its spans say how each copy is quantised.

    >>> [span.name for span in recipe_of("block128").spans(torch.device("cpu")).x]
    ['SPAN128', 'ROW']
    """
    return MXFP8Recipe(scale_span=MODES[mode])


class Ours:
    """mxpert in one mode: both copies of every operand, and the three GEMMs."""

    def __init__(self, data: Operands, mode: str, backend: str | None = None) -> None:
        self.data, self.mode, self.backend = data, mode, backend
        self.impl = OURS if backend is None else f"{OURS}_{backend}"
        self.recipe, offsets = recipe_of(mode), data.group_offsets
        spans = self.recipe.spans(data.x.device)
        self.x = mxpert.quantize_dual(data.x, group_offsets=offsets, scale_span=spans.x)
        self.grad = mxpert.quantize_dual(data.grad, group_offsets=offsets, scale_span=spans.grad)
        self.weight = mxpert.quantize_dual(data.weight, scale_span=spans.weight)

    def kernels(self, main_grad: torch.Tensor) -> list[Variant]:
        """The GEMMs on ready operands."""
        offsets = self.data.group_offsets
        (x_row, x_col), (g_row, g_col) = self.x, self.grad
        w_row, w_col = self.weight
        wgrad = functools.partial(mxpert.grouped_wgrad, g_col, x_col, offsets)
        calls = {
            "forward": functools.partial(mxpert.grouped_gemm, x_row, w_row, offsets),
            "dgrad": functools.partial(mxpert.grouped_gemm, g_row, w_col, offsets),
            "wgrad": wgrad,
            "wgrad_accumulate": functools.partial(wgrad, accumulate_into=main_grad),
        }
        sums = {"wgrad_accumulate": main_grad}
        return [
            Variant(self.impl, self.mode, op, False, self._run(call), self.exact(op), sums.get(op))
            for op, call in calls.items()
        ]

    def layer(self) -> list[Variant]:
        """`grouped_linear` from bfloat16 to bfloat16, as training runs it: forward makes both
        copies of x and weight, backward those of the gradient."""
        x, weight = (value.detach().requires_grad_() for value in (self.data.x, self.data.weight))
        grad, offsets = self.data.grad, self.data.group_offsets

        def forward() -> torch.Tensor:
            return grouped_linear(x, weight, offsets, recipe=self.recipe)

        y = self._run(forward)()

        def backward(*leaves: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(y, leaves, grad, retain_graph=True)[0]

        def gradients() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(y, (x, weight), grad, retain_graph=True)

        def both() -> tuple[torch.Tensor, ...]:
            out = forward()
            return (out, *torch.autograd.grad(out, (x, weight), grad))

        calls: dict[str, Callable[[], Any]] = {
            "forward": forward,
            "dgrad": functools.partial(backward, x),
            "wgrad": functools.partial(backward, weight),
            "backward": gradients,
            "forward+backward": both,
        }
        exact = {op: self.exact(op) for op in ("forward", "dgrad", "wgrad")}
        return [
            Variant(self.impl, self.mode, op, True, self._run(call), exact.get(op))
            for op, call in calls.items()
        ]

    def exact(self, op: str) -> tuple[Rows, Rows]:
        """What the op multiplies, dequantised."""
        weight_row, weight_col = self.weight
        match op:
            case "forward":
                return (lambda p: rows_of(self.x[0], p), lambda p: wide(weight_row[p.group]))
            case "dgrad":
                return (lambda p: rows_of(self.grad[0], p), lambda p: wide(weight_col[p.group]))
        return (
            lambda p: columns_of(self.grad[1], p, p.features),
            lambda p: columns_of(self.x[1], p, slice(None)),
        )

    def explain(self) -> dict[str, str]:
        """Backend and config of each GEMM."""
        offsets = self.data.group_offsets
        cases: dict[str, tuple[Any, ...]] = {
            "forward": (mxpert.grouped_gemm, self.x[0], self.weight[0], offsets),
            "dgrad": (mxpert.grouped_gemm, self.grad[0], self.weight[1], offsets),
            "wgrad": (mxpert.grouped_wgrad, self.grad[1], self.x[1], offsets),
        }
        found = {}
        for op, case in cases.items():
            chosen = self._run(functools.partial(mxpert.explain, *case))().resolution
            found[op] = f"{chosen.kernel.backend}: {chosen.config}"
        return found

    def _run(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call under the backend that was asked for."""
        if self.backend is None:
            return call

        def run() -> Any:
            with mxpert.override(backend=self.backend):
                return call()

        return run


def wide(tensor: MXTensor) -> torch.Tensor:
    """Values in float64."""
    return dequantize_blocks(tensor, torch.float64)


def rows_of(tensor: MXTensor, part: Part) -> torch.Tensor:
    """The sampled rows of a rowwise copy in float64."""
    return wide(MXTensor(tensor.qdata[part.rows], tensor.scale[part.rows], tensor.format))


def columns_of(tensor: MXTensor, part: Part, features: torch.Tensor | slice) -> torch.Tensor:
    """One group's columns of a columnwise copy, its padding included: zeros add nothing."""
    first = part.padded_start
    size = -(-(part.end - part.start) // 32) * 32
    codes = tensor.qdata[features, first : first + size]
    scale = tensor.scale[features, first // 32 : (first + size) // 32]
    return wide(MXTensor(codes, scale, tensor.format))


def check(variant: Variant, data: Operands, parts: Sequence[Part]) -> tuple[float | None, float]:
    """Relative L2 to float64 on the same operands (ours), and SNR in dB on unquantised ones.

    Raises:
        GateError: the result is wrong; it is not timed then.
    """
    if variant.accumulator is not None:
        variant.accumulator.zero_()
    result = variant.call()
    ops = PARTS.get(variant.op, (variant.op,))
    results = result if variant.op in PARTS else (result,)
    snr = float("inf")
    for op, each in zip(ops, results, strict=True):
        found = variant.pick(parts, op, each).double()
        snr = min(snr, sqnr_db(found, expected(parts, plain_operands(data, op))))
    error = None
    if variant.exact is not None:
        found = variant.pick(parts, variant.op, result).double()
        error = relative_l2(found, expected(parts, variant.exact))
        depth = max(part.end - part.start for part in parts) if "wgrad" in variant.op else 0
        gate = math.hypot(GATE, UNPROMOTED_ERROR * math.sqrt(depth))
        if not error <= gate:
            raise GateError(f"{variant.name}: relative L2 {error:.2e}, gate {gate:.1e}")
    gate = GATE_DB.get(variant.impl, PEER_GATE_DB)
    if not snr >= gate:
        raise GateError(f"{variant.name}: SNR {snr:.1f} dB, gate {gate:.0f} dB")
    return error, snr
