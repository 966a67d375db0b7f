"""The training kernels of the Hopper backend: dual quantisation, grouped_gemm, grouped_wgrad.

Cases are numbered; case i uses entry ``i % len`` of each list. For lists with coprime lengths p and
q, the first p q cases contain all pairs, without the full product of all lists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.problem import DualProblem, Op
from mxpert.core.target import detect_target
from mxpert.formats import MXTensor, ScaleRule, ScaleSpan
from mxpert.formats.spec import get_format
from mxpert.testing.numerics import assert_exact
from support.inputs import INPUTS
from support.races import hunt
from tests.grouped.hopper_problems import (
    BLOCK,
    DUAL,
    GEMM,
    HOPPER,
    PAIRS,
    REFERENCE,
    ROW,
    SIZES,
    SPAN128,
    SPANS,
    TAIL,
    WGRAD,
    Case,
    check,
    expect,
    make,
    offsets_of,
    poison,
    run,
    values,
)

pytestmark = pytest.mark.usefixtures("hopper")

OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SHAPES = ((736, 1056), (2880, 160), (8, 2880), (96, 32), (264, 416), (1056, 736), (128, 256))
"""(N, K) with full and ragged tiles, down to one vector of columns and one block."""


# --- grouped_gemm and grouped_wgrad -------------------------------------------------------------


def check_both(case: Case, device: torch.device) -> None:
    for whole in (True, False):
        problem, arguments = make(case, device, whole=whole)
        expected = expect(problem, **arguments)
        actual = run(problem, **arguments)
        check(case, actual, expected, whole=whole)
        if case.op is GEMM:
            assert torch.count_nonzero(actual[sum(case.sizes) :]) == 0
        if case.accumulate:
            assert actual is arguments["accumulate_into"]


def numbered(op: Op, index: int) -> Case:
    """The pairwise case number `index`."""
    modes = list(SPANS) if op is GEMM else ["row", "span128", "exact"]
    sizes, dtypes = list(SIZES.values()), OUT_DTYPES
    if op is GEMM:  # 5 modes, 3 types, 4 sizes, 7 shapes
        sizes = sizes[:4]
    else:  # 3 modes, 4 types (one to add to), 5 sizes, 7 shapes
        dtypes = (*OUT_DTYPES, torch.float32)
    n, k = SHAPES[index % len(SHAPES)]
    return Case(
        op,
        modes[index % len(modes)],
        list(PAIRS)[index // len(modes) % 4],
        dtypes[index % len(dtypes)],
        tuple(sizes[index % len(sizes)]),
        n,
        k,
        (torch.int32, torch.int64)[index // 2 % 2],
        index % len(dtypes) == 3,
    )


def label(case: Case) -> str:
    return "-".join(
        [
            case.mode,
            case.pair,
            str(case.out_dtype)[6:],
            f"{len(case.sizes)}groups",
            f"{case.n}x{case.k}",
            *(["into"] if case.accumulate else []),
        ]
    )


CASES = [numbered(op, index) for op in (GEMM, WGRAD) for index in range(35)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op.value}-{label(case)}")
def test_grouped(case: Case, device: torch.device) -> None:
    check_both(case, device)


LONG = {
    "gemm-odd": Case(GEMM, out_dtype=torch.float32, n=264, k=8224),
    "gemm-even": Case(GEMM, pair="hybrid", n=96, k=8448),
    "gemm-last-unpromoted": Case(GEMM, out_dtype=torch.float32, n=264, k=8192),
    "gemm-span128": Case(GEMM, "span128", n=264, k=8224),
    "gemm-exact": Case(GEMM, "exact", out_dtype=torch.float32, n=96, k=8224),
    "wgrad": Case(WGRAD, out_dtype=torch.float32, sizes=(9001, 40, 16200), n=96, k=264),
    "wgrad-into": Case(
        WGRAD,
        pair="hybrid",
        out_dtype=torch.float32,
        sizes=(0, 20000, 6001),
        n=264,
        k=128,
        accumulate=True,
    ),
}


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_sums(case: Case, device: torch.device) -> None:
    """Sums of more than 8192 values are promoted to float32 in the main loop."""
    check_both(case, device)


@pytest.mark.parametrize("mode", SPANS)
def test_no_group_has_rows(mode: str, device: torch.device) -> None:
    check_both(Case(GEMM, mode, sizes=tuple(SIZES["empty"])), device)


@pytest.mark.parametrize("mode", ["row", "bf16"])
def test_nothing_to_sum(mode: str, device: torch.device) -> None:
    problem, arguments = make(Case(GEMM, mode, k=0), device)
    assert not run(problem, **arguments).any()


EVERY_MODE = [Case(GEMM, mode) for mode in SPANS] + [
    Case(WGRAD, mode) for mode in ("row", "span128", "exact")
]
every_mode = pytest.mark.parametrize("case", EVERY_MODE, ids=lambda c: f"{c.op.value}-{c.mode}")


@every_mode
def test_every_config_computes_the_same(case: Case, device: torch.device) -> None:
    problem, arguments = make(case, device)
    kernel = HOPPER[case.op]
    first = run(problem, **arguments)
    for config in kernel.configs(problem):
        assert_exact(
            kernel.launch(problem, config, INPUTS[problem.op](**arguments)), first, str(config)
        )


@every_mode
def test_a_bad_group_spoils_itself_alone(case: Case, device: torch.device) -> None:
    """NaN in one group does not affect others, although tiles read into the next group."""
    problem, arguments = make(case, device)
    clean = run(problem, **arguments)
    ends = arguments["group_offsets"]
    ends = (mxpert.padded_group_offsets(ends) if case.op is WGRAD else ends).tolist()
    for group in (3, 4):
        _, arguments = make(case, device)
        rows = slice(ends[group], ends[group + 1])
        for name in ("grad", "a") if case.op is WGRAD else ("a",):
            poison(arguments[name], (slice(None), rows) if case.op is WGRAD else rows)
        spoiled, place = run(problem, **arguments), group if case.op is WGRAD else rows
        assert spoiled[place].isnan().all()
        spoiled[place] = clean[place]
        assert_exact(spoiled, clean, "other groups")


@pytest.mark.parametrize("mode", SPANS)
def test_a_bad_expert_spoils_its_rows_alone(mode: str, device: torch.device) -> None:
    problem, arguments = make(Case(GEMM, mode), device)
    clean, ends = run(problem, **arguments), arguments["group_offsets"].tolist()
    poison(arguments["b"], 3)
    spoiled, rows = run(problem, **arguments), slice(ends[3], ends[4])
    assert spoiled[rows].isnan().all()
    spoiled[rows] = clean[rows]
    assert_exact(spoiled, clean, "other experts")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@every_mode
def test_a_dropped_block_is_seen(case: Case, out_dtype: torch.dtype, device: torch.device) -> None:
    """Control: 32 of 2880 products missing in 64 rows of one tile."""
    case = replace(case, out_dtype=out_dtype, k=2880)
    problem, arguments = make(case, device)
    actual = run(problem, **arguments)
    check(case, actual, expect(problem, **arguments))
    planted = arguments["grad" if case.op is WGRAD else "a"]
    codes = planted.qdata if isinstance(planted, MXTensor) else planted
    if case.op is WGRAD:  # the second block of the group of 257 rows
        start = int(mxpert.padded_group_offsets(arguments["group_offsets"])[-2]) + 32
        codes[64:128, start : start + 32] = 0
    else:
        codes[256:320, 2848:] = 0
    with pytest.raises(AssertionError, match="relative L2"):
        check(case, actual, expect(problem, **arguments))


# --- quantize_dual ------------------------------------------------------------------------------

DUAL_SPANS = {
    "block": (BLOCK, BLOCK),
    "span128": (SPAN128, SPAN128),
    "row": (ROW, ROW),
    "span128-row": (SPAN128, ROW),
    "block-row": (BLOCK, ROW),
}
SOURCES: dict[str, tuple[list[int] | None, tuple[int, ...]]] = {
    "ragged": ([0, 1, 31, 63, 130, 257], (482 + TAIL, 2880)),
    "many": ([5, 0, 33, 64] * 256, (102 * 256 + TAIL, 32)),
    "empty": ([0, 0, 0], (TAIL, 160)),
    "strided": ([100, 0, 300], (400 + TAIL, 64)),
    "matrix": (None, (480, 160)),
    "weights": (None, (3, 160, 736)),
    "transposed": ([777], (777 + TAIL, 256)),
}
"""Group sizes (None: no groups) and the shape of x."""


def dual_values(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Values of many magnitudes, blocks of zeros, NaN of both signs, infinities; NaN after the last
    group."""
    sizes, shape = SOURCES[name]
    generator = torch.Generator(device).manual_seed(seed)
    exponents = torch.randint(
        -9, 5, [-(-size // 32) for size in shape[-2:]], device=device, generator=generator
    )
    exponents = exponents.repeat_interleave(32, 0).repeat_interleave(32, 1)
    x = torch.randn(shape, generator=generator, device=device)
    x = x * 2.0 ** exponents[: shape[-2], : shape[-1]]
    x.view(-1)[::97] = 0
    rows = x.view(-1, shape[-1])
    if len(rows) > 400:
        rows[32:96, :32] = 0
        rows[5] = 0
        if dtype is not torch.float16:  # values outside the range of scales
            rows[200] *= 2.0**100
            rows[240] *= 2.0**-110
        rows[7, 3], rows[311, 33 % shape[-1]] = torch.nan, -torch.nan
        rows[100, 1], rows[333, -1] = torch.inf, -torch.inf
    if sizes is not None:
        x[sum(sizes) :] = torch.nan
    x = x.to(dtype)
    if name == "strided":
        wide = x.new_full((shape[0], shape[1] + (8, 1)[seed % 2]), torch.nan)
        wide[:, : shape[1]] = x
        return wide[:, : shape[1]]
    return x.t().contiguous().t() if name == "transposed" else x


def dual_problem(
    x: torch.Tensor,
    offsets: torch.Tensor | None,
    fmt: str,
    rule: ScaleRule,
    spans: tuple[ScaleSpan, ScaleSpan],
) -> DualProblem:
    groups = offsets.numel() - 1 if offsets is not None else x.shape[0] if x.dim() == 3 else 0
    return DualProblem(
        DUAL,
        detect_target(x.device),
        tuple(x.shape),
        x.dtype,
        get_format(fmt),
        rule,
        groups,
        offsets is not None,
        *spans,
    )


@pytest.mark.parametrize("index", range(35))
def test_dual_is_exact(index: int, device: torch.device) -> None:
    """5 pairs of spans, 4 scale rules, 3 types, 7 sources, 2 formats, offsets of both types."""
    spans = list(DUAL_SPANS.values())[index % 5]
    rule, name = list(ScaleRule)[index % 4], list(SOURCES)[index % 7]
    dtype = (torch.bfloat16, torch.float16, torch.float32)[index % 3]
    fmt = ("mxfp8_e4m3", "mxfp8_e5m2")[index // 4 % 2]
    x, sizes = dual_values(name, dtype, device, index), SOURCES[name][0]
    offsets = (
        None
        if sizes is None
        else offsets_of(sizes, device, (torch.int32, torch.int64)[index // 2 % 2])
    )
    problem = dual_problem(x, offsets, fmt, rule, spans)
    what = f"{name} {dtype} {rule} {fmt} {spans}"
    expected = REFERENCE[DUAL].launch(problem, None, INPUTS[DUAL](x=x, group_offsets=offsets))
    for side, ours, theirs, span in zip(
        ("row", "column"), run(problem, x=x, group_offsets=offsets), expected, spans, strict=True
    ):
        assert ours.scale_span is theirs.scale_span is span
        assert_exact(ours, theirs, f"{side}: {what}")


def test_what_the_gemms_multiply_is_what_dual_made(device: torch.device) -> None:
    """The GEMMs read the scales of spans in the form that the dual quantiser writes."""
    offsets = offsets_of(SIZES["ragged"], device)
    x, grad, weight = (
        values(*shape, device=device, whole=False, seed=seed).bfloat16()
        for seed, shape in enumerate(((527, 416), (527, 352), (6, 352, 416)))
    )
    rule = ScaleRule.RCEIL
    for mode, (first, second) in (("row", (ROW, ROW)), ("span128", (SPAN128, ROW))):
        (x_row, x_col), (grad_row, grad_col), (w_row, w_col) = (
            run(dual_problem(t, at, "mxfp8_e4m3", rule, spans), x=t, group_offsets=at)
            for t, at, spans in (
                (x, offsets, (first, second)),
                (grad, offsets, (first, first)),
                (weight, None, (second, second)),
            )
        )
        gemm = Case(GEMM, mode, n=352, k=416)
        for case, a, b in ((gemm, x_row, w_row), (replace(gemm, n=416, k=352), grad_row, w_col)):
            problem, _ = make(case, device)
            arguments = {"a": a, "b": b, "group_offsets": offsets}
            check(case, run(problem, **arguments), expect(problem, **arguments))
        problem, arguments = make(replace(gemm, op=WGRAD), device)
        arguments |= {"grad": grad_col, "a": x_col}
        check(replace(gemm, op=WGRAD), run(problem, **arguments), expect(problem, **arguments))


# --- repeats, graphs, the host ------------------------------------------------------------------


class Variant:
    """One op on fixed buffers; their contents and group sizes can be redrawn. Results are bits."""

    def __init__(self, case: Case | DualProblem, device: torch.device) -> None:
        self.case, self.device, self.seed = case, device, 0
        self.arguments: dict[str, Any]
        self.problem, self.arguments = self._draw(0)

    def _draw(self, seed: int) -> tuple[Any, dict[str, Any]]:
        case, groups = self.case, 6
        rows = case.num_rows if isinstance(case, Case) else case.shape[0]
        ends = torch.randint(0, rows + 1, (groups,), generator=torch.Generator().manual_seed(seed))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends.sort().values])
        offsets = offsets.to(self.device, torch.int32)
        if isinstance(case, Case):
            return make(case, self.device, seed=seed, offsets=offsets)
        x = values(*case.shape, device=self.device, whole=False, seed=seed).to(case.dtype)
        return case, {"x": x, "group_offsets": offsets}

    def renew(self) -> None:
        self.seed += 1
        for name, value in self._draw(self.seed)[1].items():
            fixed = self.arguments[name]
            if isinstance(value, MXTensor):
                fixed.qdata.copy_(value.qdata)
                fixed.scale.copy_(value.scale)
            elif value is not None:
                fixed.copy_(value)

    def run(self) -> tuple[torch.Tensor, ...]:
        kernel = HOPPER[self.problem.op]
        into = self.arguments.get("accumulate_into")
        arguments = self.arguments | ({} if into is None else {"accumulate_into": into.clone()})
        result = kernel.launch(
            self.problem, kernel.heuristic(self.problem), INPUTS[self.problem.op](**arguments)
        )
        if isinstance(result, torch.Tensor):
            return (result.view(torch.int16 if result.itemsize == 2 else torch.int32),)
        return tuple(part for copy in result for part in (copy.qdata, copy.scale))


def dual_case(
    device: torch.device, spans: tuple[ScaleSpan, ScaleSpan], dtype: torch.dtype
) -> DualProblem:
    return DualProblem(
        DUAL,
        detect_target(device),
        (1500, 2880),
        dtype,
        get_format("mxfp8_e4m3"),
        ScaleRule.RCEIL,
        6,
        True,
        *spans,
    )


VARIANTS: dict[str, Case | tuple[tuple[ScaleSpan, ScaleSpan], torch.dtype]] = {
    **{f"{case.op.value}-{case.mode}": case for case in EVERY_MODE},
    "hybrid": Case(GEMM, pair="hybrid", out_dtype=torch.float32, n=2880, k=416),
    "not-transposed": Case(GEMM, "bf16", trans_b=False),
    "promoted": LONG["gemm-odd"],
    "into": replace(LONG["wgrad-into"], sizes=(1, 2, 3, 4, 5, 700)),
    "wgrad-promoted": Case(WGRAD, sizes=(1, 2, 3, 4, 5, 50000), n=264, k=352),
    "dual-block": ((BLOCK, BLOCK), torch.bfloat16),
    "dual-row": ((ROW, ROW), torch.bfloat16),
    "dual-span128-row": ((SPAN128, ROW), torch.float32),
}
variants = pytest.mark.parametrize("name", VARIANTS)


def variant(name: str, device: torch.device) -> Variant:
    found = VARIANTS[name]
    return Variant(found if isinstance(found, Case) else dual_case(device, *found), device)


@pytest.mark.timeout(3600)
@variants
def test_repeats_give_the_same_bits(
    name: str, device: torch.device, pytestconfig: pytest.Config
) -> None:
    """Repeats run next to other work, with new values and group sizes after every hundred."""
    repeats, each = pytestconfig.getoption("--race-repeats"), variant(name, device)
    assert any(result.any() for result in each.run())
    found = hunt(each.run, each.renew, repeats, device)
    assert found.mismatches == 0, f"{found.mismatches} values"


@variants
def test_captured_graph_follows_the_group_sizes(name: str, device: torch.device) -> None:
    """One graph is replayed with other offsets, and a call does not synchronise with the device."""
    each = variant(name, device)
    each.run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        each.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = each.run()
    for _ in range(3):
        each.renew()
        graph.replay()
        for index, (ours, theirs) in enumerate(zip(captured, each.run(), strict=True)):
            assert torch.equal(ours, theirs), f"result {index}, draw {each.seed}"
