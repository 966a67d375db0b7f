"""Dual quantisation and the grouped GEMMs in Triton's interpreter, against codec and reference.

Tiles are few and large, since the interpreter's time depends on operations, not on elements. Sizes
are no multiples of the tiles, groups are ragged, some are empty, and rows outside the groups are
NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from mxpert.core.launch import record_launches
from mxpert.core.problem import DualProblem, GemmConfig, GroupedProblem, Op, ReferenceConfig, Target
from mxpert.core.target import detect_target, on_device
from mxpert.device.groups import MAX_GROUPS, padded_offsets
from mxpert.formats import MXTensor, ScaleRule, quantize_blocks
from mxpert.formats.spec import get_format
from mxpert.routing.plan import padded_capacity, padded_group_offsets
from mxpert.testing.numerics import assert_close_relative, assert_exact, stage_tolerance
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.poison import nan_filled_scratch
from support.quantize_cases import block_cases

REFERENCE = kernels_of("reference")
TRITON = kernels_of("triton")
FLOAT64 = ReferenceConfig(torch.float64)
GFX950 = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)
CONFIG = GemmConfig(64, 64, 64, group_m=2)
WGRAD_TILES = GemmConfig(64, 128, 64, group_m=2)
WHOLE = GemmConfig(128, 256, 64, num_warps=8)
"""One tile for all of wgrad's output; `test_wgrad` uses several tiles."""
OFFSETS = {
    "ragged": (0, 0, 37, 38, 38, 150, 190),
    "one_group": (0, 190),
    "empty": (0, 0, 0, 0),
    "full_blocks": (0, 64, 128, 192, 200),
    "all_in_last": (0, 0, 0, 200),
}
NUM_ROWS = 200
FORMATS = ("bf16", "mxfp8_e4m3", "mxfp8_e5m2")
offset_cases = pytest.mark.parametrize("case", OFFSETS)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that results cannot depend on its contents."""
    with nan_filled_scratch():
        yield


def offsets_of(case: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(OFFSETS[case], dtype=dtype)


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def integers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).float()


def dual(
    x: torch.Tensor,
    offsets: torch.Tensor | None,
    fmt: str = "mxfp8_e4m3",
    rule: ScaleRule = ScaleRule.RCEIL,
    *,
    kernels: dict = TRITON,
) -> tuple[MXTensor, MXTensor]:
    groups = offsets.numel() - 1 if offsets is not None else x.shape[0] if x.dim() == 3 else 0
    problem = DualProblem(
        Op.QUANTIZE_DUAL,
        detect_target("cpu"),
        tuple(x.shape),
        x.dtype,
        get_format(fmt),
        rule,
        groups,
        offsets is not None,
    )
    kernel = kernels[Op.QUANTIZE_DUAL]
    assert kernel.unsupported(problem) is None
    return kernel.launch(
        problem, kernel.heuristic(problem), INPUTS[problem.op](x=x, group_offsets=offsets)
    )


def assert_dual_exact(
    actual: tuple[MXTensor, MXTensor], expected: tuple[MXTensor, MXTensor]
) -> None:
    for name, ours, theirs in zip(("row", "column"), actual, expected, strict=True):
        assert_exact(ours, theirs, name)


@pytest.mark.parametrize("rule", ScaleRule, ids=lambda rule: rule.name)
@pytest.mark.parametrize("fmt", FORMATS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dual_is_the_codec_twice(dtype: torch.dtype, fmt: str, rule: ScaleRule) -> None:
    """Includes ties, infinities, NaN and subnormals, along either axis."""
    x = torch.cat(
        [block_cases((64, 160), -1, torch.float32), block_cases((96, 160), -2, torch.float32)]
    ).to(dtype)
    row, column = dual(x, None, fmt, rule)
    assert_exact(row, quantize_blocks(x, fmt, -1, rule), "row")
    assert_exact(column, quantize_blocks(x.T.contiguous(), fmt, -1, rule), "column")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weights": lambda x: x.view(3, 64, 160),
    "rows_apart": lambda x: x[::2],
    "columns": lambda x: x[:, 32:96],
    "transposed": lambda x: x.T,
    "no_rows": lambda x: x[:0],
    "weights_transposed": lambda x: x.view(3, 64, 160).mT,
}


@pytest.mark.parametrize("view", VIEWS)
def test_dual_of_any_strides(view: str) -> None:
    x = VIEWS[view](normal(192, 160))
    row, column = dual(x, None)
    assert_exact(row, quantize_blocks(x, "mxfp8_e4m3"), "row")
    assert_exact(column, quantize_blocks(x.mT.contiguous(), "mxfp8_e4m3"), "column")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@offset_cases
def test_grouped_dual(case: str, dtype: torch.dtype) -> None:
    """Groups are padded separately, other positions are zero; rows of no group are not read."""
    x, offsets = normal(NUM_ROWS, 160).to(torch.bfloat16), offsets_of(case, dtype)
    x[OFFSETS[case][-1] :] = torch.nan
    actual = dual(x, offsets)
    assert_dual_exact(actual, dual(x, offsets, kernels=REFERENCE))
    assert actual[1].shape == (160, padded_capacity(NUM_ROWS, len(OFFSETS[case]) - 1))
    assert (actual[1].scale != 255).all()


def test_grouped_dual_of_no_rows() -> None:
    x, offsets = torch.empty(0, 64), torch.zeros(3, dtype=torch.int32)
    assert_dual_exact(dual(x, offsets), dual(x, offsets, kernels=REFERENCE))


def test_grouped_dual_of_many_groups() -> None:
    """More groups than a program has rows, including empty groups and single rows."""
    sizes = torch.randint(0, 3, (130,), generator=torch.Generator().manual_seed(1))
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    x = normal(int(offsets[-1]) + 5, 32)
    assert_dual_exact(dual(x, offsets), dual(x, offsets, kernels=REFERENCE))


def grouped_problem(
    op: Op,
    num_rows: int,
    num_groups: int,
    n: int,
    k: int,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    *,
    trans_b: bool = True,
    accumulate: bool = False,
) -> GroupedProblem:
    return GroupedProblem(
        op,
        detect_target("cpu"),
        num_rows,
        num_groups,
        n,
        k,
        *formats,
        trans_b,
        out_dtype,
        accumulate,
    )


def encoded(values: torch.Tensor, fmt: str, axis: int = -1) -> torch.Tensor | MXTensor:
    return values.to(torch.bfloat16) if fmt == "bf16" else quantize_blocks(values, fmt, axis)


def poison_rows(operand: torch.Tensor | MXTensor, first: int) -> None:
    """Write NaN to all rows from `first` on."""
    (operand.scale if isinstance(operand, MXTensor) else operand)[first:] = (
        255 if isinstance(operand, MXTensor) else torch.nan
    )


def gemm(
    problem: GroupedProblem, config: GemmConfig = CONFIG, **arguments: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the kernel and of the reference in float64."""
    kernel, oracle = TRITON[problem.op], REFERENCE[problem.op]
    assert kernel.unsupported(problem) is None
    expected = oracle.launch(
        replace(problem, out_dtype=torch.float64),
        FLOAT64,
        INPUTS[problem.op](
            **{
                name: value.double() if name == "accumulate_into" and value is not None else value
                for name, value in arguments.items()
            }
        ),
    )
    return kernel.launch(problem, config, INPUTS[problem.op](**arguments)), expected


def forward(
    case: str,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    *,
    trans_b: bool = True,
    values: Callable[..., torch.Tensor] = normal,
    n: int = 100,
    k: int = 160,
    config: GemmConfig = CONFIG,
) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = offsets_of(case)
    groups = len(offsets) - 1
    a = encoded(values(NUM_ROWS, k), formats[0])
    b = values(groups, n, k, seed=1)
    b = encoded(b, formats[1]) if trans_b else encoded(b.mT.contiguous(), formats[1], -2)
    poison_rows(a, OFFSETS[case][-1])
    problem = grouped_problem(
        Op.GROUPED_GEMM, NUM_ROWS, groups, n, k, formats, out_dtype, trans_b=trans_b
    )
    return gemm(problem, config, a=a, b=b, group_offsets=offsets)


@pytest.mark.parametrize("offsets", [(40, 40, 70, 190), (7, 7), (200, 200), (65, 200)], ids=str)
@pytest.mark.parametrize("config", [CONFIG, GemmConfig(128, 128, 64)], ids=["low", "high"])
def test_rows_of_no_group_are_zero(offsets: tuple[int, ...], config: GemmConfig) -> None:
    """Rows before the first group as well; neither part is read."""
    groups, n, k = len(offsets) - 1, 100, 64
    a, b = normal(NUM_ROWS, k), normal(groups, n, k, seed=1)
    a[: offsets[0]], a[offsets[-1] :] = torch.nan, torch.nan
    problem = grouped_problem(
        Op.GROUPED_GEMM, NUM_ROWS, groups, n, k, ("bf16", "bf16"), torch.float32
    )
    found, expected = gemm(
        problem,
        config,
        a=a.bfloat16(),
        b=b.bfloat16(),
        group_offsets=torch.tensor(offsets, dtype=torch.int32),
    )
    inside = slice(offsets[0], offsets[-1])
    assert not found[: offsets[0]].any()
    assert not found[offsets[-1] :].any()
    tolerance = stage_tolerance("bf16", torch.float32, k, numel=max(1, found.numel()))
    if found[inside].numel():
        assert_close_relative(found[inside], expected[inside], tolerance, "grouped_gemm")


def wgrad(
    case: str,
    formats: tuple[str, str],
    out_dtype: torch.dtype,
    values: Callable[..., torch.Tensor] = normal,
    into: torch.Tensor | None = None,
    config: GemmConfig = WHOLE,
    n: int = 96,
    k: int = 160,
) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = offsets_of(case)
    groups, num_rows = len(offsets) - 1, NUM_ROWS
    grad, a = values(NUM_ROWS, n), values(NUM_ROWS, k, seed=1)
    for rows in (grad, a):
        rows[OFFSETS[case][-1] :] = torch.nan
    if formats[0] == "bf16":
        grad, a = grad.to(torch.bfloat16), a.to(torch.bfloat16)
    else:
        grad, a = (
            dual(rows, offsets, fmt, kernels=REFERENCE)[1]
            for rows, fmt in zip((grad, a), formats, strict=True)
        )
        for operand in (grad, a):  # rows after the last group are not read
            operand.scale[:, int(padded_group_offsets(offsets)[-1]) // 32 :] = 255
        num_rows = grad.shape[1]
    problem = grouped_problem(
        Op.GROUPED_WGRAD,
        num_rows,
        groups,
        n,
        k,
        formats,
        out_dtype,
        trans_b=False,
        accumulate=into is not None,
    )
    return gemm(problem, config, grad=grad, a=a, group_offsets=offsets, accumulate_into=into)


def assert_gemm(actual: torch.Tensor, expected: torch.Tensor, k: int, what: str) -> None:
    tolerance = stage_tolerance("bf16", actual.dtype, k, numel=actual.numel())
    assert_close_relative(actual, expected, tolerance, what)


PAIRS = {
    "bf16": ("bf16", "bf16"),
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("trans_b", [True, False], ids=["nt", "nn"])
@pairs
def test_gemm(pair: str, trans_b: bool, out_dtype: torch.dtype) -> None:
    actual, expected = forward("ragged", PAIRS[pair], out_dtype, trans_b=trans_b)
    assert actual.dtype is out_dtype
    assert_gemm(actual, expected, 160, "grouped_gemm")
    assert torch.count_nonzero(actual[OFFSETS["ragged"][-1] :]) == 0


@pytest.mark.parametrize("trans_b", [True, False], ids=["nt", "nn"])
@offset_cases
@pairs
def test_gemm_of_integers_is_exact(pair: str, case: str, trans_b: bool) -> None:
    """Sums of 160 products of integers up to 3 are exact in float32 in any order."""
    actual, expected = forward(case, PAIRS[pair], torch.float32, trans_b=trans_b, values=integers)
    assert_exact(actual, expected.float(), "grouped_gemm", ignore_zero_sign=True)


@pytest.mark.parametrize("op", ["nt", "nn", "wgrad"])
def test_loops_of_amd_are_exact(op: str) -> None:
    """On AMD kernels load scales in the step that multiplies them, elsewhere one step ahead."""
    with on_device(GFX950), record_launches() as records:
        if op == "wgrad":
            actual, expected = wgrad("ragged", PAIRS["e4m3"], torch.float32, values=integers)
        else:
            actual, expected = forward(
                "ragged", PAIRS["e4m3"], torch.float32, values=integers, trans_b=op == "nt"
            )
    assert_exact(actual, expected.float(), op, ignore_zero_sign=True)
    ahead = [
        record.launch.constants["PREFETCH_SCALES"]
        for record in records
        if "PREFETCH_SCALES" in record.launch.constants
    ]
    assert ahead == [False]


@pytest.mark.parametrize("trans_b", [True, False], ids=["nt", "nn"])
def test_bf16_needs_no_multiples_of_32(trans_b: bool) -> None:
    actual, expected = forward(
        "ragged", PAIRS["bf16"], torch.float32, trans_b=trans_b, values=integers, n=33, k=77
    )
    assert_exact(actual, expected.float(), "grouped_gemm", ignore_zero_sign=True)


@pytest.mark.parametrize(
    "config", [GemmConfig(16, 128, 128), GemmConfig(128, 32, 64, group_m=8)], ids=["wide", "high"]
)
def test_tiles_do_not_change_exact_results(config: GemmConfig) -> None:
    actual, expected = forward(
        "ragged", PAIRS["e4m3"], torch.float32, values=integers, config=config
    )
    assert_exact(actual, expected.float(), "grouped_gemm", ignore_zero_sign=True)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pairs
def test_wgrad(pair: str, out_dtype: torch.dtype) -> None:
    actual, expected = wgrad("ragged", PAIRS[pair], out_dtype, config=WGRAD_TILES)
    assert actual.dtype is out_dtype
    assert_gemm(actual, expected, NUM_ROWS, "grouped_wgrad")
    assert torch.count_nonzero(actual[0]) == 0  # an empty group


@offset_cases
@pairs
def test_wgrad_of_integers_is_exact(pair: str, case: str) -> None:
    actual, expected = wgrad(case, PAIRS[pair], torch.float32, values=integers)
    assert_exact(actual, expected.float(), "grouped_wgrad", ignore_zero_sign=True)


@pairs
def test_wgrad_accumulates_in_place(pair: str) -> None:
    into = integers(len(OFFSETS["ragged"]) - 1, 96, 160, seed=2)
    actual, expected = wgrad("ragged", PAIRS[pair], torch.bfloat16, values=integers, into=into)
    assert actual is into
    assert_exact(actual, expected.float(), "accumulate_into", ignore_zero_sign=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 127, 128, 129, 1000])
def test_padded_offsets(groups: int, dtype: torch.dtype) -> None:
    """More groups than the kernel handles per iteration; offsets are clamped to the copies' end."""
    sizes = torch.randint(0, 70, (groups,), generator=torch.Generator().manual_seed(groups))
    sizes[::3] = 0
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(dtype)
    expected = padded_group_offsets(offsets)
    for length in (int(expected[-1]) + 64, int(expected[-1]) // 64 * 32):
        problem = grouped_problem(
            Op.GROUPED_WGRAD, length, groups, 32, 32, PAIRS["e4m3"], torch.float32, trans_b=False
        )
        actual = padded_offsets(problem, offsets)
        assert_exact(actual, expected.clamp(max=length), "padded offsets")


def test_many_groups() -> None:
    """The largest supported number of groups works; one more is refused."""
    sizes = torch.zeros(MAX_GROUPS, dtype=torch.int32)
    sizes[[3, 500, MAX_GROUPS - 1]] = torch.tensor([5, 70, 2], dtype=torch.int32)
    offsets = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    problem = grouped_problem(Op.GROUPED_GEMM, 80, MAX_GROUPS, 32, 32, PAIRS["bf16"], torch.float32)
    a = encoded(integers(80, 32), "bf16")
    b = encoded(integers(MAX_GROUPS, 32, 32), "bf16")
    actual, expected = gemm(problem, a=a, b=b, group_offsets=offsets)
    assert_exact(actual, expected.float(), "grouped_gemm", ignore_zero_sign=True)
    reason = TRITON[problem.op].unsupported(replace(problem, num_groups=MAX_GROUPS + 1))
    assert reason is not None
    assert "1024 groups" in reason


def test_offsets_out_of_range_stay_inside() -> None:
    """Offsets out of range never access rows that do not exist."""
    offsets = torch.tensor([0, 30, 10**6], dtype=torch.int64)
    a, b = encoded(integers(40, 32), "bf16"), encoded(integers(2, 32, 32), "bf16")
    problem = grouped_problem(Op.GROUPED_GEMM, 40, 2, 32, 32, PAIRS["bf16"], torch.float32)
    actual, expected = gemm(problem, a=a, b=b, group_offsets=offsets)
    assert_exact(actual, expected.float(), "grouped_gemm", ignore_zero_sign=True)
    x = normal(40, 32)
    assert_dual_exact(dual(x, offsets), dual(x, offsets.clamp(max=40), kernels=REFERENCE))


@pytest.mark.parametrize("num_rows, num_groups, n", [(0, 2, 32), (8, 2, 0)], ids=["rows", "n"])
def test_nothing_to_do(num_rows: int, num_groups: int, n: int) -> None:
    problem = grouped_problem(
        Op.GROUPED_GEMM, num_rows, num_groups, n, 32, PAIRS["bf16"], torch.bfloat16
    )
    actual, _ = gemm(
        problem,
        a=encoded(normal(num_rows, 32), "bf16"),
        group_offsets=torch.zeros(num_groups + 1, dtype=torch.int32),
        b=encoded(normal(num_groups, n, 32), "bf16"),
    )
    assert actual.shape == (num_rows, n)


PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neighbouring_group": lambda c: torch.roll(c, 1, 0),
    "columns": lambda c: torch.roll(c, 1, 1),
    "dropped_tail": lambda c: c.index_fill(0, torch.tensor([OFFSETS["ragged"][-1] - 1]), 0.0),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_errors_are_found(planted: str) -> None:
    actual, expected = forward("ragged", PAIRS["e4m3"], torch.bfloat16)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_gemm(PLANTED[planted](actual), expected, 160, planted)


@pytest.mark.parametrize(
    "config, reason",
    [
        (replace(CONFIG, block_n=48), "block_n must be a power of two"),
        (replace(CONFIG, split_k=2), "split_k 1"),
        (GemmConfig(256, 256, 64, num_warps=4), "accumulators a thread"),
        (GemmConfig(128, 128, 256, num_warps=8, num_stages=8), "bytes of shared memory"),
    ],
    ids=["shape", "split", "registers", "memory"],
)
def test_invalid_configs_are_refused(config: GemmConfig, reason: str) -> None:
    target = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
    problem = replace(
        grouped_problem(Op.GROUPED_GEMM, 64, 2, 64, 64, PAIRS["e4m3"], torch.bfloat16),
        target=target,
    )
    operand = encoded(normal(64, 64), "mxfp8_e4m3")
    with pytest.raises(ValueError, match=reason):
        TRITON[problem.op].launch(
            problem,
            config,
            INPUTS[problem.op](
                a=operand, b=operand, group_offsets=torch.zeros(3, dtype=torch.int32)
            ),
        )
