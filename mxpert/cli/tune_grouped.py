"""Cells of `mxpert tune --grouped`: the grouped GEMMs of a training layer, and their trial."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..core.backend import BACKENDS
from ..core.kernel import AnyKernel
from ..core.problem import GemmConfig, GroupedProblem, Op, Target
from ..core.registry import kernel_of
from ..core.tables import GROUPED_FORMATS, GroupedRow
from ..core.target import on_device
from ..errors import require
from ..formats.spec import MX_BLOCK_SIZE, ScaleSpan
from ..formats.tensor import MXTensor, Operand
from ..grouped.inputs import GroupedGemmInputs, GroupedWgradInputs
from ..grouped.op import grouped_gemm, grouped_wgrad
from ..quantize.dual_op import quantize_dual
from ..routing.plan import MAX_ROUTED_ROWS, padded_capacity
from ..testing.numerics import grouped_gate
from ..training.recipe import MXFP8Recipe
from .measure import float64_reference
from .options import parse_choices, parse_numbers
from .tune_cells import BATCH_SIZE, NUM_PROBES, AnyTrial, Choice, choose_kernel

RECIPES = {
    "mxfp8": MXFP8Recipe(),
    "hybrid": MXFP8Recipe.hybrid(),
    "bf16": MXFP8Recipe(enabled=False),
}
"""Operands of --operands: what the three GEMMs of a layer multiply."""
PARTS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class GroupedShape:
    """A training layer: weights [G, N, K] and `num_rows` rows, the same number in each group."""

    num_groups: int
    n: int
    k: int
    num_rows: int

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Where groups begin; they differ by one row at most."""
        index = torch.arange(self.num_groups + 1, device=device, dtype=torch.int64)
        return (index * self.num_rows // self.num_groups).to(torch.int32)


@dataclass(frozen=True)
class GroupedCell:
    """One GEMM of a layer to tune: forward, dgrad or wgrad of some operands."""

    shape: GroupedShape
    operands_name: str
    part: str

    @property
    def name(self) -> str:
        """As "32,4096,7168 M=65536 wgrad mxfp8"."""
        shape = self.shape
        sizes = f"{shape.num_groups},{shape.n},{shape.k} M={shape.num_rows}"
        return f"{sizes} {self.part} {self.operands_name}"

    @property
    def batch_size(self) -> int:
        """Configs that are timed together."""
        return BATCH_SIZE // 2

    @property
    def recipe(self) -> MXFP8Recipe:
        """What quantises the operands."""
        return RECIPES[self.operands_name]

    @property
    def formats(self) -> tuple[str, str]:
        """Names of the operands' formats."""
        recipe = self.recipe
        if not recipe.enabled:
            return "bf16", "bf16"
        forward = recipe.forward_format
        return forward if self.part == "forward" else recipe.backward_format, forward

    def problem(self, target: Target, spans: tuple[ScaleSpan, ScaleSpan]) -> GroupedProblem:
        """The GEMM on a target; spans: of its two operands."""
        shape, recipe, wgrad = self.shape, self.recipe, self.part == "wgrad"
        rows, n, k = shape.num_rows, shape.n, shape.k
        if self.part == "dgrad":
            n, k = k, n
        if recipe.enabled and wgrad:
            rows = padded_capacity(rows, shape.num_groups)
        return GroupedProblem(
            Op.GROUPED_WGRAD if wgrad else Op.GROUPED_GEMM,
            target,
            rows,
            shape.num_groups,
            n,
            k,
            *self.formats,
            not wgrad and (recipe.enabled or self.part == "forward"),
            torch.bfloat16,
            False,
            *spans,
        )

    def spans(self, target: Target) -> tuple[ScaleSpan, ScaleSpan]:
        """Spans of the operands that a recipe quantises on a target."""
        if not self.recipe.enabled:
            return ScaleSpan.BLOCK, ScaleSpan.BLOCK
        with on_device(target):
            spans = self.recipe.spans(torch.device("cpu"))
        return {
            "forward": (spans.x[0], spans.weight[0]),
            "dgrad": (spans.grad[0], spans.weight[1]),
            "wgrad": (spans.grad[1], spans.x[1]),
        }[self.part]

    def choose(self, target: Target, backend: str | None) -> Choice[GroupedProblem]:
        """The kernel that would serve the cell.

        Raises:
            UnsupportedError: no kernel serves it, or only the reference.
        """
        return choose_kernel([self.problem(target, self.spans(target))], backend)

    def operands(self, device: torch.device) -> GroupedOperands:
        """Random operands, which cells of one shape share."""
        return GroupedOperands(self.shape, device)

    def trial(
        self, operands: GroupedOperands, target: Target, backend: str | None
    ) -> tuple[Choice[GroupedProblem], Callable[[], GroupedTrial]]:
        """What serves the cell, and how to make its trial."""
        choice = self.choose(target, backend)
        return choice, lambda: GroupedTrial(choice, self, operands)


class GroupedOperands:
    """x [M, K], weight [G, N, K] and grad [M, N] in bfloat16, normal values."""

    def __init__(self, shape: GroupedShape, device: torch.device) -> None:
        self.device, self.offsets = device, shape.offsets(device)
        generator = torch.Generator(device).manual_seed(shape.num_rows)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        rows, groups = shape.num_rows, shape.num_groups
        self.x, self.grad = normal(rows, shape.k), normal(rows, shape.n)
        self.weight = normal(groups, shape.n, shape.k)

    def of(self, cell: GroupedCell) -> tuple[Operand, Operand]:
        """Both operands of a cell's GEMM, quantised as its recipe does."""
        pairs = {
            "forward": (self.x, self.weight, 0),
            "dgrad": (self.grad, self.weight, 0),
            "wgrad": (self.grad, self.x, 1),
        }
        first, second, copy = pairs[cell.part]
        recipe, forward = cell.recipe, cell.part == "forward"
        if not recipe.enabled:
            return first, second
        spans, fmt = recipe.spans(self.device), recipe.forward_format
        quantize = functools.partial(quantize_dual, scale_rule=recipe.scale_rule)
        of_rows = functools.partial(quantize, group_offsets=self.offsets)
        if forward:
            rows = of_rows(first, fmt, scale_span=spans.x)
        else:
            rows = of_rows(first, recipe.backward_format, scale_span=spans.grad)
        if cell.part == "wgrad":
            return rows[copy], of_rows(second, fmt, scale_span=spans.x)[copy]
        return rows[copy], quantize(second, fmt, scale_span=spans.weight)[0 if forward else 1]


class GroupedTrial(AnyTrial):
    """Configs of a grouped GEMM; the probes are rows of the result, of wgrad rows of each group."""

    def __init__(
        self, choice: Choice[GroupedProblem], cell: GroupedCell, operands: GroupedOperands
    ) -> None:
        self.choice, self.device = choice, operands.device
        problem, offsets = choice.problem, operands.offsets
        a, b = operands.of(cell)
        self.wgrad = problem.op is Op.GROUPED_WGRAD
        self.batches = [(GroupedWgradInputs if self.wgrad else GroupedGemmInputs)(a, b, offsets)]
        total = problem.n if self.wgrad else problem.num_rows
        count = min(total, NUM_PROBES)
        places = torch.linspace(0, total - 1, count, dtype=torch.float64).round().long()
        self.places = places.to(self.device)
        with float64_reference():
            if self.wgrad:
                part = _take(a, self.places) if isinstance(a, MXTensor) else a[:, self.places]
                self.truth = grouped_wgrad(part, b, offsets, out_dtype=torch.float64)
            else:
                own = torch.searchsorted(self.places, offsets.long()).to(torch.int32)
                self.truth = grouped_gemm(
                    _take(a, self.places), b, own, trans_b=problem.trans_b, out_dtype=torch.float64
                )
        depth = problem.num_rows // problem.num_groups if self.wgrad else problem.k
        self.limit = grouped_gate(depth)

    def run(
        self, config: GemmConfig, batch: GroupedGemmInputs | GroupedWgradInputs
    ) -> torch.Tensor:
        result: torch.Tensor = self.choice.kernel.launch(self.choice.problem, config, batch)
        return result

    def probes(self, result: torch.Tensor) -> torch.Tensor:
        return result[:, self.places] if self.wgrad else result[self.places]


def _take(operand: Operand, rows: torch.Tensor) -> Operand:
    """Some rows of an operand, for the reference."""
    if isinstance(operand, MXTensor):
        return MXTensor(operand.qdata[rows], operand.scale[rows], operand.format)
    return operand[rows]


def invalid_grouped_row(row: GroupedRow, target: Target) -> str | None:
    """Why a row of a tuned table cannot run on its device, None if it can."""
    known = row.backend in BACKENDS
    kernel = kernel_of(BACKENDS[row.backend], Op(row.op)) if known else "is no backend"
    reason = kernel if isinstance(kernel, str) else _refusal(kernel, row, target)
    return f"{row.place}: {row.backend} {reason}" if reason else None


def _refusal(kernel: AnyKernel, row: GroupedRow, target: Target) -> str | None:
    first, second = GROUPED_FORMATS[row.formats]
    a_span, b_span = (ScaleSpan(name) for name in row.spans.split(","))
    sizes = row.num_rows, row.num_groups, row.n, row.k
    problem = GroupedProblem(
        Op(row.op),
        target,
        *sizes,
        first,
        second,
        row.trans_b,
        torch.bfloat16,
        a_span=a_span,
        b_span=b_span,
    )
    reason = kernel.unsupported(problem)
    if reason is None and row.config not in kernel.configs(problem):
        reason = f"has no config {row.config}"
    return reason


def make_grouped_cells(
    shapes: Iterable[str], rows: Sequence[int], operands: str
) -> list[GroupedCell]:
    """All cells without duplicates, ordered by shape so that each shape's operands are made once.

    >>> [cell.name for cell in make_grouped_cells(["4,64,96"], [256], "mxfp8")][::2]
    ['4,64,96 M=256 forward mxfp8', '4,64,96 M=256 wgrad mxfp8']
    """
    names = parse_choices(operands, tuple(RECIPES), "tune", "--operands")
    cells: dict[tuple[object, ...], GroupedCell] = {}
    for text, num_rows in itertools.product(shapes, rows):
        sizes = parse_numbers(text, "tune", "--grouped")
        need = "three numbers G,N,K"
        require(len(sizes) == 3, "tune", "--grouped", need=need, got=repr(text))
        groups, n, k = sizes
        need = f"N and K in multiples of {MX_BLOCK_SIZE}"
        whole = n % MX_BLOCK_SIZE == 0 and k % MX_BLOCK_SIZE == 0
        require(whole, "tune", "--grouped", need=need, got=f"{n}, {k}")
        need = f"at most {MAX_ROUTED_ROWS} rows"
        require(num_rows <= MAX_ROUTED_ROWS, "tune", "--rows", need=need, got=num_rows)
        shape = GroupedShape(groups, n, k, num_rows)
        for name, part in itertools.product(names, PARTS):
            cell = GroupedCell(shape, name, part)
            cells.setdefault((shape, part, *cell.formats), cell)  # hybrid's forward is mxfp8's
    return list(cells.values())
