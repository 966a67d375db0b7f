"""Dual quantisation and the grouped GEMMs of the Triton backend on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert.core.problem import DualProblem, GroupedProblem, Op, ReferenceConfig
from mxpert.core.target import detect_target
from mxpert.formats import MXTensor, ScaleRule, quantize_blocks
from mxpert.formats.spec import get_format
from mxpert.routing.plan import padded_group_offsets
from mxpert.testing.numerics import assert_close_relative, assert_exact, stage_tolerance
from support.inputs import INPUTS
from support.kernels import kernels_of
from support.poison import nan_filled_scratch

REFERENCE = kernels_of("reference")
TRITON = kernels_of("triton")
FLOAT64 = ReferenceConfig(torch.float64)
SIZES = {
    "balanced": [256] * 8,
    "skewed": [1, 0, 37, 1024, 3, 511, 0, 129],
    "one_group": [777],
    "all_in_last": [0, 0, 0, 1000],
    "empty": [0, 0, 0],
    "many": [5, 0, 33, 64] * 256,
}
TAIL = 45
"""Rows after the last group."""

PAIRS = {
    "bf16": ("bf16", "bf16"),
    "e4m3": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "hybrid": ("mxfp8_e5m2", "mxfp8_e4m3"),
}
pairs = pytest.mark.parametrize("pair", PAIRS)
sizes = pytest.mark.parametrize("case", SIZES)


def offsets_of(case: str, device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *SIZES[case]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device)


def values(*size: int, device: torch.device, whole: bool, seed: int = 0) -> torch.Tensor:
    """Normal values, or integers up to 3, which are exact in every format."""
    generator = torch.Generator(device).manual_seed(seed)
    if whole:
        return torch.randint(-3, 4, size, generator=generator, device=device).float()
    return torch.randn(size, generator=generator, device=device)


def dual(
    x: torch.Tensor, offsets: torch.Tensor | None, fmt: str, *, kernels: dict = TRITON
) -> tuple[MXTensor, MXTensor]:
    groups = offsets.numel() - 1 if offsets is not None else x.shape[0] if x.dim() == 3 else 0
    problem = DualProblem(
        Op.QUANTIZE_DUAL,
        detect_target(x.device),
        tuple(x.shape),
        x.dtype,
        get_format(fmt),
        ScaleRule.RCEIL,
        groups,
        offsets is not None,
    )
    kernel = kernels[Op.QUANTIZE_DUAL]
    return kernel.launch(
        problem, kernel.heuristic(problem), INPUTS[problem.op](x=x, group_offsets=offsets)
    )


def run(problem: GroupedProblem, **arguments: object) -> torch.Tensor:
    kernel = TRITON[problem.op]
    assert kernel.unsupported(problem) is None
    with nan_filled_scratch():
        return kernel.launch(problem, kernel.heuristic(problem), INPUTS[problem.op](**arguments))


def expect(problem: GroupedProblem, **arguments: object) -> torch.Tensor:
    return REFERENCE[problem.op].launch(
        replace(problem, out_dtype=torch.float64), FLOAT64, INPUTS[problem.op](**arguments)
    )


def check(actual: torch.Tensor, expected: torch.Tensor, depth: int, whole: bool, what: str) -> None:
    if whole:
        assert_exact(actual, expected.float(), what, ignore_zero_sign=True)
    else:
        tolerance = stage_tolerance("bf16", actual.dtype, depth, numel=actual.numel())
        assert_close_relative(actual, expected, tolerance, what)


def gemm_case(
    case: str,
    pair: str,
    device: torch.device,
    *,
    trans_b: bool,
    whole: bool,
    n: int,
    k: int,
    seed: int = 0,
) -> tuple[GroupedProblem, dict[str, object]]:
    """A grouped_gemm problem with NaN in the rows after the last group."""
    offsets = offsets_of(case, device)
    groups, used = len(SIZES[case]), sum(SIZES[case])
    a = values(used + TAIL, k, device=device, whole=whole, seed=2 * seed)
    b = values(groups, n, k, device=device, whole=whole, seed=2 * seed + 1)
    b = b if trans_b else b.mT.contiguous()
    if pair == "bf16":
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        a[used:] = torch.nan
    else:
        a = quantize_blocks(a, PAIRS[pair][0])
        b = quantize_blocks(b, PAIRS[pair][1], -1 if trans_b else -2)
        a.scale[used:] = 255
    problem = GroupedProblem(
        Op.GROUPED_GEMM,
        detect_target(device),
        used + TAIL,
        groups,
        n,
        k,
        *PAIRS[pair],
        trans_b,
        torch.float32 if whole else torch.bfloat16,
    )
    return problem, {"a": a, "b": b, "group_offsets": offsets}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("mode", ["bf16", "row"])
@pytest.mark.parametrize("offsets", [(40, 40, 70, 777), (130, 800), (800, 800)], ids=str)
def test_rows_of_no_group_are_zero(
    offsets: tuple[int, ...], mode: str, backend: str, device: torch.device
) -> None:
    """Rows before the first group as well; neither part is read."""
    if backend == "hopper" and detect_target(device).arch != "sm_90":
        pytest.skip("needs sm_90")
    groups = len(offsets) - 1
    a = values(800, 256, device=device, whole=True)
    a[: offsets[0]], a[offsets[-1] :] = torch.nan, torch.nan
    b = values(groups, 384, 256, device=device, whole=True, seed=1)
    ends = torch.tensor(offsets, dtype=torch.int32, device=device)
    if mode == "bf16":
        left, right = a.bfloat16(), b.bfloat16()
    else:
        span = mxpert.ScaleSpan.ROW
        left, right = (mxpert.quantize_dual(x, scale_span=span)[0] for x in (a, b))
    with mxpert.override(backend=backend), nan_filled_scratch():
        found = mxpert.grouped_gemm(left, right, ends, out_dtype=torch.float32)
    with mxpert.override(backend="reference", config=FLOAT64):
        expected = mxpert.grouped_gemm(left, right, ends, out_dtype=torch.float64)
    assert_exact(found, expected.float(), "grouped_gemm", ignore_zero_sign=True)


@pytest.mark.parametrize("whole", [False, True], ids=["normal", "integers"])
@pytest.mark.parametrize("trans_b", [True, False], ids=["nt", "nn"])
@sizes
@pairs
def test_gemm(pair: str, case: str, trans_b: bool, whole: bool, device: torch.device) -> None:
    n, k = (96, 160) if case == "many" else (736, 1056)
    problem, arguments = gemm_case(case, pair, device, trans_b=trans_b, whole=whole, n=n, k=k)
    actual = run(problem, **arguments)
    check(actual, expect(problem, **arguments), k, whole, "grouped_gemm")
    assert torch.count_nonzero(actual[sum(SIZES[case]) :]) == 0


@pytest.mark.parametrize("whole", [False, True], ids=["normal", "integers"])
@sizes
@pairs
def test_wgrad(pair: str, case: str, whole: bool, device: torch.device) -> None:
    """With and without accumulation; NaN after the last group is not read."""
    n, k = (96, 160) if case == "many" else (736, 1056)
    offsets, used = offsets_of(case, device), sum(SIZES[case])
    grad = values(used + TAIL, n, device=device, whole=whole)
    a = values(used + TAIL, k, device=device, whole=whole, seed=1)
    grad[used:], a[used:] = torch.nan, torch.nan
    length = used + TAIL
    if pair == "bf16":
        grad, a = grad.to(torch.bfloat16), a.to(torch.bfloat16)
    else:
        grad, a = (dual(x, offsets, fmt)[1] for x, fmt in zip((grad, a), PAIRS[pair], strict=True))
        for operand in (grad, a):
            operand.scale[:, int(padded_group_offsets(offsets)[-1]) // 32 :] = 255
        length = grad.shape[1]
    problem = GroupedProblem(
        Op.GROUPED_WGRAD,
        detect_target(device),
        length,
        len(SIZES[case]),
        n,
        k,
        *PAIRS[pair],
        False,
        torch.float32 if whole else torch.bfloat16,
    )
    arguments = {"grad": grad, "a": a, "group_offsets": offsets}
    expected = expect(problem, **arguments, accumulate_into=None)
    actual = run(problem, **arguments, accumulate_into=None)
    check(actual, expected, max(SIZES[case]), whole, "grouped_wgrad")
    into = values(len(SIZES[case]), n, k, device=device, whole=whole, seed=2)
    expected = expected + into
    assert run(replace(problem, accumulate=True), **arguments, accumulate_into=into) is into
    check(into, expected, max(SIZES[case]), whole, "accumulate_into")


@sizes
def test_grouped_dual(case: str, device: torch.device) -> None:
    x, offsets = (
        values(sum(SIZES[case]) + TAIL, 736, device=device, whole=False),
        offsets_of(case, device),
    )
    x[sum(SIZES[case]) :] = torch.nan
    with nan_filled_scratch():
        actual = dual(x, offsets, "mxfp8_e4m3")
    expected = dual(x, offsets, "mxfp8_e4m3", kernels=REFERENCE)
    for name, ours, theirs in zip(("row", "column"), actual, expected, strict=True):
        assert_exact(ours, theirs, name)


def test_every_config_computes_the_same(device: torch.device) -> None:
    """The tuner may choose any config; the integer problem is exact with all tiles."""
    problem, arguments = gemm_case("skewed", "e4m3", device, trans_b=True, whole=True, n=352, k=416)
    expected = expect(problem, **arguments).float()
    kernel = TRITON[Op.GROUPED_GEMM]
    for config in list(kernel.configs(problem))[::8]:
        actual = kernel.launch(problem, config, INPUTS[problem.op](**arguments))
        assert_exact(actual, expected, str(config), ignore_zero_sign=True)


@pairs
def test_repeats_are_exact(pair: str, device: torch.device, request: pytest.FixtureRequest) -> None:
    """Race test with new integers each time: on Hopper wgmma reads decoded operands from registers
    asynchronously, and early reuse by the compiler shows only in some runs."""
    for seed in range(request.config.getoption("--race-repeats")):
        problem, arguments = gemm_case(
            "skewed", pair, device, trans_b=True, whole=True, n=736, k=1056, seed=seed
        )
        first, second = run(problem, **arguments), run(problem, **arguments)
        assert_exact(second, first, f"repeat of seed {seed}")
        assert_exact(
            first, expect(problem, **arguments).float(), f"seed {seed}", ignore_zero_sign=True
        )


@pytest.mark.parametrize(
    "op", [Op.QUANTIZE_DUAL, Op.GROUPED_GEMM, Op.GROUPED_WGRAD], ids=lambda op: op.value
)
def test_captured_graph_follows_the_group_sizes(op: Op, device: torch.device) -> None:
    """One graph is replayed with other offsets: the host does not know the group sizes."""
    rows, n, k, groups = 900, 320, 416, 8
    static = torch.zeros(groups + 1, dtype=torch.int32, device=device)
    x = values(rows, k, device=device, whole=True)
    grad = values(rows, n, device=device, whole=True, seed=1).to(torch.bfloat16)
    weight = values(groups, n, k, device=device, whole=True, seed=2).to(torch.bfloat16)
    problem = GroupedProblem(
        op,
        detect_target(device),
        rows,
        groups,
        n,
        k,
        "bf16",
        "bf16",
        op is Op.GROUPED_GEMM,
        torch.float32,
    )
    a = x.to(torch.bfloat16)

    def compute(offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if op is Op.QUANTIZE_DUAL:
            row, column = dual(x, offsets, "mxfp8_e4m3")
            return row.qdata, row.scale, column.qdata, column.scale
        kernel = TRITON[op]
        arguments = (
            {"a": a, "b": weight}
            if op is Op.GROUPED_GEMM
            else {"grad": grad, "a": a, "accumulate_into": None}
        )
        return (
            kernel.launch(
                problem,
                kernel.heuristic(problem),
                INPUTS[problem.op](group_offsets=offsets, **arguments),
            ),
        )

    compute(static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute(static)
    for seed in range(3):
        sizes = torch.randint(0, 110, (groups,), generator=torch.Generator().manual_seed(seed))
        offsets = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
        static.copy_(offsets)
        graph.replay()
        for ours, theirs in zip(captured, compute(offsets), strict=True):
            assert torch.equal(ours, theirs)


def test_more_than_2_to_the_31_values(device: torch.device) -> None:
    """Row offsets need 64 bits in data, both copies and results."""
    rows, k, n = (1 << 20) + 64, 2080, 32
    if torch.cuda.mem_get_info(device)[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    assert rows * k > 2**31
    x = torch.ones(rows, k, dtype=torch.bfloat16, device=device)
    x[-1] = 2
    offsets = torch.tensor([0, rows - 33, rows], dtype=torch.int32, device=device)
    row, column = dual(x, offsets, "mxfp8_e4m3")
    assert_exact(
        MXTensor(row.qdata[-64:], row.scale[-64:], row.format),
        quantize_blocks(x[-64:], "mxfp8_e4m3"),
        "row",
    )
    first = int(padded_group_offsets(offsets)[1])
    group = torch.nn.functional.pad(x[-33:, -1].float(), (0, 31))[None]  # two blocks, 31 padded
    assert torch.equal(
        column.qdata[-1:, first : first + 64], quantize_blocks(group, "mxfp8_e4m3").qdata
    )
    weight = quantize_blocks(torch.ones(2, n, k, device=device), "mxfp8_e4m3")
    problem = GroupedProblem(
        Op.GROUPED_GEMM, detect_target(device), rows, 2, n, k, *PAIRS["e4m3"], True, torch.float32
    )
    actual = run(problem, a=row, b=weight, group_offsets=offsets)
    assert (actual[:-1] == k).all()
    assert (actual[-1] == 2 * k).all()
