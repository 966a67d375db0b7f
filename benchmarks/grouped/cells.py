"""What grouped/run.py measures: shapes, group sizes, operands, and the sample that is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import mxpert
from mxpert.errors import message

OPS = ("forward", "dgrad", "wgrad", "wgrad_accumulate", "backward", "forward+backward")
"""wgrad_accumulate adds to a float32 gradient; backward is dgrad and wgrad of a layer with one
quantisation of the gradient; forward+backward is all three GEMMs."""
PARTS = {"backward": ("dgrad", "wgrad"), "forward+backward": ("forward", "dgrad", "wgrad")}
"""GEMMs of an op that has several."""

BALANCES = ("balanced", "random", "skewed")
MODES = {
    "auto": mxpert.ScaleSpan.AUTO,
    "row": mxpert.ScaleSpan.ROW,
    "block128": mxpert.ScaleSpan.SPAN128,
    "exact": mxpert.ScaleSpan.BLOCK,
}
"""Name in the results → the recipe's span: how many values share a power of two."""

SAMPLED_GROUPS, SAMPLED_ROWS = 3, 16


@dataclass(frozen=True)
class Shape:
    """G groups of `rows` rows (their mean where groups are skewed), weights [G, N, K]."""

    G: int
    rows: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.G}x{self.rows}-{self.N}-{self.K}"

    def flops(self, op: str) -> float:
        """Of the rows that are there; a peer's padding does not count.

        >>> Shape(1, 1, 2, 3).flops("forward+backward")
        36
        """
        return 2 * self.G * self.rows * self.N * self.K * len(PARTS.get(op, (op,)))


SHAPES = tuple(
    Shape(groups, rows, n, k)
    for counts, layers in (
        ((16, 32), ((4096, 7168), (7168, 2048))),
        ((4, 32), ((5760, 2880), (2880, 2880))),
    )
    for n, k in layers
    for groups in counts
    for rows in (2048, 4096)
)
"""Gate/up and down of DeepSeek-V3, then of gpt-oss-20b: the shapes of Primus-Turbo's table."""


def tiny(shape: Shape) -> Shape:
    """The same proportions in sizes that a CPU multiplies in milliseconds.

    >>> str(tiny(SHAPES[0]))
    '4x32-64-128'
    """
    n, k = (-(-size // 2048) * 32 for size in (shape.N, shape.K))
    return Shape(max(2, shape.G // 4), shape.rows // 64, n, k)


def group_sizes(shape: Shape, balance: str) -> list[int]:
    """Rows of each group; "random" splits them at random, every share between 0 and 1 equally
    likely before they are scaled; "skewed" is Zipf in a shuffled order with one empty group.

    >>> sizes = group_sizes(SHAPES[0], "skewed")
    >>> sum(sizes) == 16 * 2048, sizes.count(0), sum(size % 8 > 0 for size in sizes) > 8
    (True, 1, True)
    """
    if balance not in BALANCES:
        raise ValueError(message("group_sizes", "balance", f"one of {BALANCES}", repr(balance)))
    if balance == "balanced":
        return [shape.rows] * shape.G
    total, filled = shape.G * shape.rows, shape.G - 1
    if balance == "random":
        shares = torch.rand(shape.G, generator=torch.Generator().manual_seed(shape.G)).double()
        ends = (shares.cumsum(0) / shares.sum() * total).round().long()
        return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long)).tolist()
    weights = [1 / (rank + 1) for rank in range(filled)]
    sizes = [int(total * weight / sum(weights)) for weight in weights]
    sizes[0] += total - sum(sizes)
    order = torch.randperm(shape.G, generator=torch.Generator().manual_seed(shape.G)).tolist()
    return [(sizes + [0])[index] for index in order]


@dataclass(frozen=True)
class Operands:
    """x bfloat16 [M, K], weight bfloat16 [G, N, K], grad bfloat16 [M, N], group_offsets [G + 1]."""

    shape: Shape
    sizes: list[int]
    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    group_offsets: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, balance: str, device: torch.device) -> Operands:
        """Normal values, the same on every run."""
        generator = torch.Generator(device).manual_seed(shape.G + shape.N)
        sizes = group_sizes(shape, balance)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        rows = sum(sizes)
        offsets = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
        x, weight = normal(rows, shape.K), normal(shape.G, shape.N, shape.K)
        return cls(shape, sizes, x, weight, normal(rows, shape.N), offsets)


@dataclass(frozen=True)
class Part:
    """One sampled group: its rows start … end, where its columns begin in a padded copy, and the
    rows of the result that are checked (wgrad: rows of [N, K])."""

    group: int
    start: int
    end: int
    padded_start: int
    rows: torch.Tensor
    features: torch.Tensor


def sample(data: Operands) -> list[Part]:
    """The first, the largest and the last group that have rows, and a few rows of each."""
    sizes, device = data.sizes, data.x.device
    filled = [group for group, size in enumerate(sizes) if size]
    largest = max(filled, key=lambda group: sizes[group])
    starts = data.group_offsets.tolist()
    padded = mxpert.padded_group_offsets(data.group_offsets).tolist()
    parts = []
    for group in sorted({filled[0], largest, filled[-1]})[:SAMPLED_GROUPS]:
        start, end = starts[group : group + 2]
        rows, features = (
            torch.linspace(first, last - 1, SAMPLED_ROWS).round().long().unique().to(device)
            for first, last in ((start, end), (0, data.shape.N))
        )
        parts.append(Part(group, start, end, padded[group], rows, features))
    return parts


Rows = Callable[[Part], torch.Tensor]
"""A sampled group → float64 values of one operand, what is summed over last."""


def plain_operands(data: Operands, op: str) -> tuple[Rows, Rows]:
    """Unquantised operands of an op in float64."""
    match op:
        case "forward":
            return lambda p: data.x[p.rows].double(), lambda p: data.weight[p.group].double()
        case "dgrad":
            return lambda p: data.grad[p.rows].double(), lambda p: data.weight[p.group].double().T
    return (
        lambda p: data.grad[p.start : p.end, p.features].double().T,
        lambda p: data.x[p.start : p.end].double().T,
    )


def expected(parts: Sequence[Part], operands: tuple[Rows, Rows]) -> torch.Tensor:
    """The sampled rows of all parts in float64."""
    first, second = operands
    return torch.cat([first(part) @ second(part).T for part in parts])


def pick(parts: Sequence[Part], op: str, result: Any) -> torch.Tensor:
    """The sampled rows of a result [M, …] or, of wgrad, [G, N, K]."""
    if op.startswith("wgrad"):
        return torch.cat([result[part.group, part.features] for part in parts])
    return torch.cat([result[part.rows] for part in parts])


def parse_shapes(text: str) -> list[Shape]:
    """Numbers of shapes, from 1, comma-separated.

    >>> [str(shape) for shape in parse_shapes("16,1")]
    ['32x4096-2880-2880', '16x2048-4096-7168']
    """
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    allowed = [str(number) for number in range(1, len(SHAPES) + 1)]
    if not chosen or not set(chosen) <= set(allowed):
        need = f"some of {', '.join(allowed)}"
        raise ValueError(message("grouped_gemm", "--shapes", need, repr(text)))
    return [SHAPES[int(number) - 1] for number in dict.fromkeys(chosen)]
