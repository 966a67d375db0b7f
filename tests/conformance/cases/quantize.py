"""Cases of quantize, dequantize and quantize_dual, and their comparison with the codec, bit by bit.

Data reach every branch of block quantisation: ties, infinities, NaN and subnormals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch.nn.functional import pad

import mxpert
from mxpert.core.problem import DualProblem, Op, Target
from mxpert.formats import FORMATS, MXTensor, ScaleRule, ScaleSpan, quantize_blocks
from mxpert.formats.spec import get_format
from mxpert.formats.stochastic import random_bits
from mxpert.testing.numerics import assert_exact
from support.executors import Executor
from support.quantize_cases import (
    assert_dequantizes_exactly,
    assert_quantizes_exactly,
    block_cases,
    every_bfloat16_amax,
    every_code_and_scale,
    square_cases,
)
from tests.conformance.cases.grouped import GROUPS, Groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "77x96": ((77, 96), -1),
    "3x5x320": ((3, 5, 320), -1),
    "64x133-across": ((64, 133), -2),
    "2x96x3x7-across": ((2, 96, 3, 7), -3),
    "96": ((96,), -1),
    "64x1-across": ((64, 1), -2),
}
"""Blocks along rows, across rows, and in the middle; tails in every other dimension."""
View = Callable[[torch.Tensor], torch.Tensor]
VIEWS: dict[str, View] = {
    "columns": lambda x: x[:, 32:352],  # dense rows with a larger stride
    "rows": lambda x: x[::3, :64],
    "misaligned": lambda x: x[:, 1:353],
    "every_other": lambda x: x[:, ::2],  # rows that are not dense
    "transposed": lambda x: x.T,
    "expanded": lambda x: x[:1].expand(96, 384),
    "three_dims": lambda x: x.view(8, 12, 384)[:, :5, :96],  # leading strides that do not nest
    "vector": lambda x: x[3, ::3],
}


class _Portable:
    """A case of an op that only the reference and the portable kernels have."""

    def served_by(self, backend: str) -> bool:
        return backend in ("reference", "triton")


@dataclass(frozen=True)
class QuantizeCase(_Portable):
    """One call of quantize on a view of a CPU tensor; memory outside of the view is NaN."""

    base: Callable[[], torch.Tensor]
    fmt: str
    axis: int = -1
    rule: ScaleRule = ScaleRule.RCEIL
    view: View | None = None
    span: ScaleSpan = ScaleSpan.BLOCK
    seed: int | None = None

    def check(self, executor: Executor) -> None:
        base, view = self.base(), self.view or (lambda x: x)
        unused = torch.ones(base.numel(), dtype=torch.bool)
        unused[view(torch.arange(base.numel()).view(base.shape)).flatten()] = False
        base[unused.view(base.shape)] = torch.nan
        with executor.serving():
            actual = mxpert.quantize(
                view(base.to(executor.device)),
                self.fmt,
                axis=self.axis,
                scale_rule=self.rule,
                scale_span=self.span,
                stochastic_seed=self.seed,
            )
        fmt, x = get_format(self.fmt), view(base)
        if self.seed is None:
            assert_quantizes_exactly(actual, x, fmt, self.axis, self.rule, self.span)
        else:
            random = random_bits(torch.tensor([self.seed]), tuple(x.shape))
            expected = quantize_blocks(x, fmt, self.axis, self.rule, span=self.span, random=random)
            assert_exact(actual.to("cpu"), expected, "stochastic")


@dataclass(frozen=True)
class DequantizeCase(_Portable):
    """One call of dequantize."""

    tensor: Callable[[], MXTensor]
    dtype: torch.dtype

    def check(self, executor: Executor) -> None:
        tensor = self.tensor()
        with executor.serving():
            actual = mxpert.dequantize(tensor.to(executor.device), dtype=self.dtype)
        assert (actual.dtype, actual.shape) == (self.dtype, tensor.shape)
        assert_dequantizes_exactly(actual, tensor)


@dataclass(frozen=True)
class DualCase:
    """One call of quantize_dual; rows of no group are NaN.

    Args:
        last_offset: given in place of the last group's end.
    """

    x: Callable[[], torch.Tensor]
    fmt: str = "mxfp8_e4m3"
    rule: ScaleRule = ScaleRule.RCEIL
    groups: Groups | None = None
    offsets_dtype: torch.dtype = torch.int32
    last_offset: int | None = None
    seed: int | None = None

    def problem(self, target: Target) -> DualProblem:
        x, groups = self.x(), self.groups
        count = len(groups.sizes) if groups else x.shape[0] if x.dim() == 3 else 0
        return DualProblem(
            Op.QUANTIZE_DUAL,
            target,
            tuple(x.shape),
            x.dtype,
            get_format(self.fmt),
            self.rule,
            count,
            groups is not None,
            stochastic=self.seed is not None,
        )

    def served_by(self, backend: str) -> bool:
        return self.seed is None or backend in ("reference", "triton")

    def check(self, executor: Executor) -> None:
        x, groups, offsets = self.x().to(executor.device), self.groups, None
        if groups is not None:
            x[groups.used :] = torch.nan
            offsets = groups.offsets(self.offsets_dtype, executor.device)
            if self.last_offset is not None:
                offsets[-1] = self.last_offset
        with executor.serving():
            actual = mxpert.quantize_dual(
                x, self.fmt, group_offsets=offsets, scale_rule=self.rule, stochastic_seed=self.seed
            )
        for name, ours, theirs in zip(("row", "column"), actual, self.expected(), strict=True):
            assert_exact(ours.to("cpu"), theirs, name)

    def expected(self) -> tuple[MXTensor, MXTensor]:
        """The codec on rows, and on each group's columns, padded to whole blocks."""
        x, groups = self.x(), self.groups
        random = None
        if self.seed is not None:
            random = random_bits(torch.tensor([self.seed]), tuple(x.shape))
        if groups is None:
            return self._codec(x, random), self._codec(x.mT, None if random is None else random.mT)
        x[groups.used :] = 0

        def columns_of(rows: torch.Tensor) -> torch.Tensor:
            parts = rows[: groups.used].split(groups.sizes)
            return torch.cat([pad(part.T, (0, -len(part) % 32)) for part in parts], 1)

        columns = columns_of(x)
        column = self._codec(columns, None if random is None else columns_of(random))
        unused = mxpert.padded_capacity(groups.rows, len(groups.sizes)) - columns.shape[1]
        codes, scale = (
            pad(column.qdata, (0, unused)),
            pad(column.scale, (0, unused // 32), value=127),
        )
        return self._codec(x, random), MXTensor(codes, scale, column.format)

    def _codec(self, x: torch.Tensor, random: torch.Tensor | None) -> MXTensor:
        own = None if random is None else random.contiguous()
        return quantize_blocks(x.contiguous(), self.fmt, -1, self.rule, random=own)


def _normal(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def _blocks(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: block_cases(shape, axis, dtype)


def _squares(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: square_cases(shape, dtype)


def _both_axes(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    parts = (((64, 160), -1), ((96, 160), -2))
    return lambda: torch.cat([block_cases(*part, torch.float32) for part in parts]).to(dtype)


def _some_amax() -> torch.Tensor:
    """Every mantissa of the block maximum at low, middle and high exponents (a GPU test: all)."""
    exponents = torch.cat([torch.arange(n, n + 12) for n in (0, 120, 244)])
    return every_bfloat16_amax().view(2, 256, 128, 32)[:, exponents].reshape(-1, 32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


QUANTIZE = {
    f"{fmt}-{rule.value}-{_name(dtype)}-{layout}": QuantizeCase(
        _blocks(shape, axis, dtype), fmt, axis, rule
    )
    for fmt, rule, dtype, (layout, (shape, axis)) in product(
        FORMATS, ScaleRule, DTYPES, LAYOUTS.items()
    )
}
QUANTIZE_AMAX = {
    f"{fmt}-{rule.value}": QuantizeCase(_some_amax, fmt, rule=rule)
    for fmt, rule in product(FORMATS, ScaleRule)
}
QUANTIZE_VIEWS = {
    f"{fmt}-{name}": QuantizeCase(_blocks((96, 384), -1, torch.bfloat16), fmt, view=view)
    for fmt, (name, view) in product(("mxfp4", "mxfp8_e4m3"), VIEWS.items())
}
SQUARES: dict[str, tuple[tuple[int, ...], int]] = {
    "77x96": ((77, 96), -1),
    "2x33x320": ((2, 33, 320), -1),
    "64x133-across": ((64, 133), -2),
    "2x96x1-across": ((2, 96, 1), -2),
    "nothing": ((0, 32), -1),
    "nothing-across": ((32, 0), -2),
}
"""Cut squares in the dimension that is not quantised; more columns than a program has."""
QUANTIZE_SQUARES = {
    **{
        f"{fmt}-{rule.value}-{layout}": QuantizeCase(
            _squares(shape, torch.float32), fmt, axis, rule, span=ScaleSpan.SQUARE
        )
        for fmt, rule, (layout, (shape, axis)) in product(FORMATS, ScaleRule, SQUARES.items())
    },
    **{
        f"{_name(dtype)}-{name}": QuantizeCase(
            _squares((96, 384), dtype), "mxfp4", -1, view=view, span=ScaleSpan.SQUARE
        )
        for dtype in (torch.bfloat16, torch.float16)
        for name, view in VIEWS.items()
        if name != "vector"
    },
}
QUANTIZE_NOTHING = {
    f"{fmt}-{'x'.join(map(str, shape))}": QuantizeCase(_normal(*shape), fmt, axis)
    for fmt, (shape, axis) in product(FORMATS, (((0, 32), -1), ((32, 0), -2), ((4, 0), -1)))
}
DEQUANTIZE = {
    f"{fmt}-{axis}-{_name(dtype)}": DequantizeCase(
        lambda fmt=fmt, axis=axis: every_code_and_scale(get_format(fmt), axis), dtype
    )
    for fmt, axis, dtype in product(FORMATS, (-1, -2), DTYPES)
}
DEQUANTIZE_SHAPES = {
    f"{fmt}-{'x'.join(map(str, shape))}": DequantizeCase(
        lambda fmt=fmt, shape=shape, axis=axis: quantize_blocks(
            block_cases(shape, axis, torch.float32), fmt, axis, ScaleRule.FLOOR
        ),
        torch.bfloat16,
    )
    for fmt, (shape, axis) in product(
        FORMATS, (*LAYOUTS.values(), ((0, 32), -1), ((32, 0), -2), ((4, 0), -1))
    )
}
DUAL = {
    f"{fmt}-{_name(dtype)}-{rule.value}": DualCase(_both_axes(dtype), fmt, rule)
    for dtype, fmt, rule in product(DTYPES, ("mxfp8_e4m3", "mxfp8_e5m2"), ScaleRule)
}
DUAL_VIEWS = {
    f"{name}-{_name(dtype)}": DualCase(
        lambda view=view, dtype=dtype: view(_normal(192, 160, dtype=dtype)())
    )
    for dtype in (torch.float32, torch.bfloat16)
    for name, view in {
        "weights": lambda x: x.view(3, 64, 160),
        "rows_apart": lambda x: x[::2],
        "columns": lambda x: x[:, 32:96],
        "transposed": lambda x: x.T,
        "no_rows": lambda x: x[:0],
        "weights_transposed": lambda x: x.view(3, 64, 160).mT,
    }.items()
}
MANY = Groups(
    tuple(torch.randint(0, 3, (130,), generator=torch.Generator().manual_seed(1)).tolist()), tail=5
)
"""More groups than a program has rows or a wave has lanes; empty ones and single rows."""
DUAL_GROUPS = {
    **{
        f"{name}-{_name(dtype)}": DualCase(
            _normal(groups.rows, 160, dtype=torch.bfloat16), groups=groups, offsets_dtype=dtype
        )
        for (name, groups), dtype in product(GROUPS.items(), (torch.int32, torch.int64))
    },
    **{
        f"ragged-{fmt}-{rule.value}": DualCase(
            _normal(GROUPS["ragged"].rows, 96), fmt, rule, GROUPS["ragged"]
        )
        for fmt, rule in product(("mxfp8_e4m3", "mxfp8_e5m2"), ScaleRule)
    },
    "no_rows": DualCase(_normal(0, 64), groups=Groups((0, 0))),
    "many": DualCase(_normal(MANY.rows, 32), groups=MANY),
    "beyond": DualCase(
        _normal(40, 32), groups=Groups((30, 10)), offsets_dtype=torch.int64, last_offset=10**6
    ),
}
SEED = (1 << 62) + 12345
"""Both words of the generator's key are used."""
STOCHASTIC = {
    **{
        f"{fmt}-{layout}": QuantizeCase(_blocks(shape, axis, dtype), fmt, axis, seed=SEED)
        for fmt, ((layout, (shape, axis)), dtype) in product(
            FORMATS, zip(LAYOUTS.items(), (*DTYPES, *DTYPES), strict=True)
        )
    },
    **{
        f"{fmt}-square-{layout}": QuantizeCase(
            _squares(shape, torch.float32), fmt, axis, span=ScaleSpan.SQUARE, seed=7
        )
        for fmt, (layout, (shape, axis)) in product(FORMATS, SQUARES.items())
    },
    **{
        f"mxfp4-{name}": QuantizeCase(
            _blocks((96, 384), -1, torch.bfloat16), "mxfp4", view=VIEWS[name], seed=0
        )
        for name in ("columns", "every_other", "three_dims")
    },
}
DUAL_STOCHASTIC = {
    **{
        f"{fmt}-{name}": DualCase(_normal(*shape), fmt, seed=SEED)
        for fmt, (name, shape) in product(
            ("mxfp8_e4m3", "mxfp8_e5m2"), {"matrix": (64, 160), "weights": (3, 64, 96)}.items()
        )
    },
    **{
        f"groups-{name}": DualCase(_normal(groups.rows, 96), groups=groups, seed=7)
        for name, groups in GROUPS.items()
    },
}
