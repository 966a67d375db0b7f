"""Cases of grouped_gemm and grouped_wgrad, and their comparison with float64.

Sizes are no multiples of the tiles, groups are ragged, some are empty, and rows of no group are
NaN. Exact cases multiply small integers, in grouped_gemm times a power of two for each block of 32:
every sum is exact in float32 in any order, so the result has the bits of float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

import mxpert
from mxpert import MXTensor
from mxpert.configs import GemmConfig
from mxpert.core.launch import record_launches
from mxpert.core.problem import GroupedProblem, Op, Target
from mxpert.core.stage_configs import Config
from mxpert.core.target import detect_target
from mxpert.testing.numerics import (
    assert_close_relative,
    assert_exact,
    effective_numel,
    stage_tolerance,
)
from support.executors import Executor
from support.kernels import kernels_of
from support.poison import poison_tensor
from tests.grouped import oracle
from tests.grouped.oracle import Groups

Operand = torch.Tensor | MXTensor
PAIRS = {
    "bf16": ("bf16", "bf16"),
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "e5m2": ("mxfp8_e5m2", "mxfp8_e5m2"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
    "e5m2_right": ("mxfp8_e4m3", "mxfp8_e5m2"),
}
THREE = ("bf16", "e4m3", "hybrid")
GROUPS = {
    "ragged": Groups((0, 37, 1, 0, 112, 40), tail=10),
    "one_group": Groups((190,), tail=10),
    "empty": Groups((0, 0, 0), tail=200),
    "full_blocks": Groups((64, 64, 64, 8)),
    "all_in_last": Groups((0, 0, 200)),
}
LARGE = {
    "ragged": Groups((0, 37, 1, 0, 252, 20), tail=20),
    "all_in_last": Groups((0, 0, 310), tail=20),
    "empty": Groups((0, 0), tail=330),
}
"""More rows than a tile of 256 has."""
OUTSIDE = {
    "before": Groups((0, 30, 120), first=40, tail=10),
    "no_rows": Groups((0,), first=7, tail=193),
    "only_before": Groups((0,), first=200),
    "one_after": Groups((135,), first=65),
    "before_of_330": Groups((0, 30, 240), first=40, tail=20),
    "only_before_of_330": Groups((0,), first=330),
}
"""Rows before the first group as well."""
MANY = Groups(tuple({3: 5, 500: 70, 1023: 2}.get(group, 0) for group in range(1024)), tail=3)
BEYOND = {"offsets_dtype": torch.int64, "last_offset": 10**6}
"""An offset out of range never accesses rows that do not exist."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILES = {
    "small": GemmConfig(64, 64, 64, group_m=2),
    "wide": GemmConfig(16, 128, 128),
    "high": GemmConfig(128, 32, 64, group_m=8),
    "large": GemmConfig(128, 128, 64),
    "long": GemmConfig(64, 128, 64, group_m=2),
    "whole": GemmConfig(128, 256, 64, num_warps=8),
}
"""Configs of the Triton backend. On gfx950 "large" and "whole" mean the high tile."""


@dataclass(frozen=True)
class GroupedCase:
    """One grouped GEMM.

    Args:
        exact: compare bits; otherwise normal values and a tolerance. tile: one of `TILES`; other
            backends choose theirs. last_offset: given in place of the last group's end.
        poisoned: MX operands lie in larger storage that is NaN. limited: run with `num_sms`.
    """

    op: Op
    pair: str
    groups: Groups
    n: int = 104
    k: int = 160
    exact: bool = True
    out_dtype: torch.dtype = torch.float32
    tile: str = "small"
    trans_b: bool = True
    accumulate: bool = False
    offsets_dtype: torch.dtype = torch.int32
    last_offset: int | None = None
    poisoned: bool = False
    limited: bool = False

    @property
    def formats(self) -> tuple[str, str]:
        return PAIRS[self.pair]

    @property
    def is_wgrad(self) -> bool:
        return self.op is Op.GROUPED_WGRAD

    def problem(self, target: Target) -> GroupedProblem:
        """The problem that a backend is asked for."""
        groups = len(self.groups.sizes)
        rows = self.groups.rows
        if self.is_wgrad and self.pair != "bf16":
            rows = mxpert.padded_capacity(rows, groups)
        trans_b = self.trans_b and not self.is_wgrad
        return GroupedProblem(
            self.op,
            target,
            rows,
            groups,
            self.n,
            self.k,
            *self.formats,
            trans_b,
            self.out_dtype,
            self.accumulate,
        )

    def served_by(self, backend: str) -> bool:
        """`test_backends_serve_what_the_cases_say` compares this with the kernels."""
        mx = self.pair != "bf16"
        if backend == "reference":
            return not self.limited
        if backend == "cdna4":
            return mx
        if backend == "hopper":
            columns = self.k if self.is_wgrad else self.n
            return columns % 8 == 0 and (mx or not (self.is_wgrad or self.k % 8))
        return True

    def config(self, executor: Executor) -> Config:
        """The tile, in the config of the executor's backend."""
        if executor.backend == "triton":
            return TILES[self.tile]
        if executor.backend != "cdna4":
            return None
        high = self.tile in ("large", "whole") and (self.k if self.is_wgrad else self.n) % 16 == 0
        problem = replace(self.problem(detect_target(executor.device)), num_groups=1, num_rows=512)
        configs = kernels_of("cdna4")[self.op].configs(replace(problem, n=256, k=256))
        return next(each for each in configs if each.block_m == (256 if high else 128))

    def operands(self) -> tuple[Operand, Operand]:
        """a and b, or grad and a; memory that may not be read is NaN."""
        groups, formats = self.groups, self.formats
        with mxpert.override(backend="reference"):
            if self.is_wgrad:
                draw = _integers if self.exact else _normal
                first = _rows_of_wgrad(draw(groups.rows, self.n, seed=1), formats[0], groups)
                return first, _rows_of_wgrad(draw(groups.rows, self.k, seed=2), formats[1], groups)
            draw = _scaled if self.exact else _normal
            a = _encoded(draw(groups.rows, self.k, seed=1), formats[0], -1)
            _poison(a, slice(groups.first))
            _poison(a, slice(groups.used, None))
            b = draw(len(groups.sizes), self.n, self.k, seed=2)
            if self.trans_b:
                return a, _encoded(b, formats[1], -1)
            return a, _encoded(b.mT.contiguous(), formats[1], -2)

    def expected(self, left: Operand, right: Operand, into: torch.Tensor | None) -> torch.Tensor:
        if not self.is_wgrad:
            return oracle.forward(left, right, self.groups, trans_b=self.trans_b)
        product = oracle.wgrad(left, right, self.groups)
        return product if into is None else product + into

    def run(
        self,
        left: Operand,
        right: Operand,
        offsets: torch.Tensor,
        into: torch.Tensor | None = None,
        sms: int | None = None,
    ) -> torch.Tensor:
        """The op's result."""
        if not self.is_wgrad:
            return mxpert.grouped_gemm(
                left, right, offsets, trans_b=self.trans_b, out_dtype=self.out_dtype, num_sms=sms
            )
        if into is None:
            return mxpert.grouped_wgrad(left, right, offsets, out_dtype=self.out_dtype, num_sms=sms)
        return mxpert.grouped_wgrad(left, right, offsets, accumulate_into=into, num_sms=sms)

    def check(self, executor: Executor) -> None:
        """Run the case and compare."""
        left, right = self.operands()
        groups, device = self.groups, executor.device
        shape = (len(groups.sizes), self.n, self.k)
        into = _integers(*shape, seed=3) if self.accumulate else None
        expected = self.expected(left, right, into)
        offsets = groups.offsets(self.offsets_dtype, device)
        if self.last_offset is not None:
            offsets[-1] = self.last_offset
        target = None if into is None else into.to(device)
        first, second = (self._arrive(each.to(device)) for each in (left, right))
        with executor.serving(self.config(executor)):
            actual = self.run(first, second, offsets, target)
        assert target is None or actual is target
        self.compare(actual.cpu(), expected)

    def check_limited(self, executor: Executor) -> None:
        """Results with one, half and all SMs have the same bits, and the grids keep to them."""
        offsets = self.groups.offsets(device=executor.device)
        first, second = (self._arrive(each.to(executor.device)) for each in self.operands())
        with executor.serving(self.config(executor)):
            expected = self.run(first, second, offsets)
            for limit in sm_limits(detect_target(executor.device)):
                with record_launches() as records:
                    actual = self.run(first, second, offsets, sms=limit)
                assert_exact(actual.cpu(), expected.cpu(), f"{limit} SMs")
                grids = [each.launch.grid for each in records if "BLOCK_M" in each.launch.constants]
                assert grids == [(self.programs(executor.backend, limit),)]

    def programs(self, backend: str, num_sms: int) -> int:
        """Programs of the GEMM that keeps to `num_sms`."""
        if backend == "hopper":
            return num_sms
        rows, groups = self.problem(detect_target("cpu")).num_rows, len(self.groups.sizes)
        tile = TILES[self.tile]
        if backend == "cdna4":
            tile = GemmConfig(256 if self.tile in ("large", "whole") else 128, 256, 128)
        if self.is_wgrad:
            row_tiles = groups * -(-self.n // tile.block_m)
        elif backend == "cdna4":
            row_tiles = rows // tile.block_m + groups + 2
        else:
            row_tiles = min(-(-rows // tile.block_m) + groups, rows)
        tiles = row_tiles * -(-(self.k if self.is_wgrad else self.n) // tile.block_n)
        if backend == "triton":
            return min(num_sms, tiles)
        return 1 if num_sms < 8 else 8 * min(num_sms // 8, -(-tiles // 8))  # rounds of 8 dies

    def _arrive(self, operand: Operand) -> Operand:
        if self.poisoned and isinstance(operand, MXTensor):
            return poison_tensor(operand)
        return operand

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise unless the result is right."""
        assert (actual.dtype, actual.shape) == (self.out_dtype, expected.shape)
        if self.exact:
            assert_exact(actual, expected.to(self.out_dtype), str(self.op), ignore_zero_sign=True)
            return
        assert not actual[expected.flatten(1).eq(0).all(1)].any()
        depth = max(self.groups.sizes) if self.is_wgrad else self.k
        numel = effective_numel(expected.flatten(0, -2))
        tolerance = stage_tolerance("bf16", self.out_dtype, depth, numel=numel)
        assert_close_relative(actual, expected, tolerance, str(self.op))


def sm_limits(target: Target) -> tuple[int, int, int]:
    """One, half of and all SMs of a target; a CPU, which interprets kernels, counts as six."""
    most = 6 if target.kind == "cpu" else target.num_sms
    return 1, most // 2, most


def _normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _integers(*size: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).float()


def _scaled(*size: int, seed: int) -> torch.Tensor:
    """Integers, times a power of two for each block of 32 along the last axis."""
    generator = torch.Generator().manual_seed(seed + 100)
    blocks = torch.randint(-3, 4, (*size[:-1], -(-size[-1] // 32)), generator=generator)
    factors = torch.exp2(blocks).repeat_interleave(32, -1)[..., : size[-1]]
    return _integers(*size, seed=seed) * factors


def _encoded(x: torch.Tensor, fmt: str, axis: int) -> Operand:
    return x.bfloat16() if fmt == "bf16" else mxpert.quantize(x, fmt, axis=axis)


def _rows_of_wgrad(x: torch.Tensor, fmt: str, groups: Groups) -> Operand:
    x[: groups.first], x[groups.used :] = torch.nan, torch.nan
    if fmt == "bf16":
        return x.bfloat16()
    offsets = groups.offsets()
    copy = mxpert.quantize_dual(x, fmt, group_offsets=offsets)[1]
    end = int(mxpert.padded_group_offsets(offsets)[-1])
    copy.qdata[:, end:], copy.scale[:, end // 32 :] = 0x7F, 255
    return copy


def _poison(operand: Operand, rows: slice) -> None:
    if isinstance(operand, MXTensor):
        operand.qdata[rows], operand.scale[rows] = 0x7F, 255
    else:
        operand[rows] = torch.nan


def _gemm(pair: str, groups: Groups, **options: object) -> GroupedCase:
    return GroupedCase(Op.GROUPED_GEMM, pair, groups, **options)  # type: ignore[arg-type]


def _wgrad(pair: str, groups: Groups, **options: object) -> GroupedCase:
    options = {"n": 96, "tile": "whole"} | options
    return GroupedCase(Op.GROUPED_WGRAD, pair, groups, **options)  # type: ignore[arg-type]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Cases = dict[str, GroupedCase]
EXACT_GEMMS: Cases = {
    f"{pair}-{case}-{'nt' if trans_b else 'nn'}": _gemm(pair, groups, trans_b=trans_b)
    for pair, (case, groups), trans_b in product(THREE, GROUPS.items(), (True, False))
}
ROUNDED_GEMMS: Cases = {
    f"{pair}-{'nt' if trans_b else 'nn'}-{_name(dtype)}": _gemm(
        pair, GROUPS["ragged"], trans_b=trans_b, out_dtype=dtype, exact=False
    )
    for pair, trans_b, dtype in product((*THREE, "e5m2"), (True, False), DTYPES)
}
SHAPES: Cases = {
    "wide_tile": _gemm("e4m3", GROUPS["ragged"], tile="wide"),
    "high_tile": _gemm("e4m3", GROUPS["ragged"], tile="high"),
    "odd": _gemm("bf16", GROUPS["ragged"], n=33, k=77),
    "odd_nn": _gemm("bf16", GROUPS["ragged"], n=33, k=77, trans_b=False),
    "large": _gemm("e4m3", LARGE["ragged"], n=304, k=416, tile="large"),
    "large_int64": _gemm(
        "hybrid", LARGE["ragged"], n=300, k=544, tile="large", offsets_dtype=torch.int64
    ),
    "large_last": _gemm("e5m2_right", LARGE["all_in_last"], n=304, k=544, tile="large"),
    "large_empty": _gemm("e4m3", LARGE["empty"], n=304, k=416, tile="large"),
    "large_nn": _gemm("e5m2_right", LARGE["ragged"], n=304, k=416, tile="large", trans_b=False),
    "lines_nn": _gemm("hybrid", LARGE["ragged"], n=320, k=288, tile="large", trans_b=False),
    "odd_mx_nn": _gemm("e4m3", LARGE["all_in_last"], n=259, k=288, tile="large", trans_b=False),
    "large_rounded": _gemm(
        "e5m2_right",
        Groups((100, 156)),
        n=256,
        k=416,
        tile="large",
        exact=False,
        out_dtype=torch.bfloat16,
    ),
    "most_groups": _gemm("bf16", MANY, n=32, k=32),
    "beyond-bf16": _gemm("bf16", Groups((30, 10)), k=32, **BEYOND),
    "beyond-e4m3": _gemm("e4m3", Groups((30, 10)), k=32, **BEYOND),
    "no_rows": _gemm("bf16", Groups((0, 0)), n=32, k=32, out_dtype=torch.bfloat16),
    "no_columns": _gemm("bf16", Groups((4, 0), tail=4), n=0, k=32, out_dtype=torch.bfloat16),
}
OUTSIDE_GEMMS: Cases = {
    f"{pair}-{case}-{tile}": _gemm(pair, groups, n=304, k=160, tile=tile)
    for (case, groups), (pair, tile) in product(
        OUTSIDE.items(), (("bf16", "small"), ("e4m3", "large"), ("e4m3", "small"))
    )
}
EXACT_WGRADS: Cases = {
    f"{pair}-{case}": _wgrad(pair, groups)
    for pair, (case, groups) in product((*THREE, "e5m2_right"), GROUPS.items())
}
ROUNDED_WGRADS: Cases = {
    f"{pair}-{_name(dtype)}": _wgrad(
        pair, GROUPS["ragged"], out_dtype=dtype, exact=False, tile="long"
    )
    for pair, dtype in product((*THREE, "e5m2"), DTYPES)
}
OTHER_WGRADS: Cases = {
    **{f"into-{pair}": _wgrad(pair, GROUPS["ragged"], accumulate=True) for pair in THREE},
    "int64": _wgrad("e5m2", GROUPS["ragged"], offsets_dtype=torch.int64),
    "int64-bf16": _wgrad("bf16", GROUPS["ragged"], offsets_dtype=torch.int64),
    "large": _wgrad("e4m3", LARGE["ragged"], n=288, k=320),
    "large_into": _wgrad("hybrid", LARGE["ragged"], n=288, k=320, accumulate=True, tile="long"),
    "large_empty": _wgrad("e4m3", LARGE["empty"], n=288, k=320),
}
POISONED: Cases = {
    **{
        f"{pair}-{tile}": _gemm(pair, LARGE["ragged"], n=304, k=416, tile=tile, poisoned=True)
        for pair, tile in (("e4m3", "small"), ("hybrid", "large"))
    },
    **{
        f"{pair}-{tile}-nn": _gemm(
            pair, LARGE["ragged"], n=304, k=416, tile=tile, poisoned=True, trans_b=False
        )
        for pair, tile in (("e4m3", "small"), ("e5m2", "large"))
    },
    **{
        f"{pair}-wgrad": _wgrad(pair, GROUPS["ragged"], poisoned=True, tile=tile)
        for pair, tile in (("e4m3", "small"), ("hybrid", "whole"))
    },
}
"""The last step of 128 is a part of one."""
LIMITED: Cases = {
    **{
        f"{pair}-{'nt' if trans_b else 'nn'}": _gemm(
            pair, GROUPS["ragged"], exact=False, trans_b=trans_b, limited=True
        )
        for pair, trans_b in product(("bf16", "e4m3"), (True, False))
    },
    **{
        f"{pair}-wgrad": _wgrad(
            pair, GROUPS["ragged"], n=288, exact=False, tile="long", limited=True
        )
        for pair in ("bf16", "hybrid")
    },
    "single-rows": _gemm("bf16", Groups((1, 1, 1)), n=32, k=32, exact=False, limited=True),
    "high-wgrad": _wgrad("e4m3", GROUPS["ragged"], exact=False, limited=True),
}
"""Normal values, whose sums depend on their order."""
ALL = (
    EXACT_GEMMS,
    ROUNDED_GEMMS,
    SHAPES,
    OUTSIDE_GEMMS,
    EXACT_WGRADS,
    ROUNDED_WGRADS,
    OTHER_WGRADS,
    POISONED,
)
