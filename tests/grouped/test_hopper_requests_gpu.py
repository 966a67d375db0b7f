"""Requests that the portable kernel served before: b without transposition, and wide data."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from mxpert.core.problem import GroupedProblem
from mxpert.formats import MXTensor, ScaleSpan
from mxpert.testing.numerics import assert_exact
from tests.grouped.hopper_problems import GEMM, SIZES, WGRAD, Case, check, expect, make, poison, run

pytestmark = pytest.mark.usefixtures("hopper")

SHAPES = ((736, 1056), (2880, 160), (8, 2880), (96, 32), (264, 416), (128, 256))
"""(N, K) of whole tiles and of ragged ones, down to one vector of columns and one block."""


# --- b [G, K, N] --------------------------------------------------------------------------------

LAYOUTS = [
    Case(GEMM, mode, pair, dtype, tuple(SIZES[sizes]), n, k, trans_b=False)
    for ((mode, pair), (n, k)), (sizes, dtype) in zip(
        itertools.product((("bf16", "e4m3"), ("exact", "hybrid"), ("exact", "e5m2")), SHAPES),
        itertools.cycle(
            itertools.product(
                ("ragged", "many", "one_group", "all_in_last", "empty"),
                (torch.bfloat16, torch.float32, torch.float16),
            )
        ),
        strict=False,
    )
]


@pytest.mark.parametrize(
    "case", LAYOUTS, ids=lambda c: f"{c.mode}-{c.pair}-{c.n}x{c.k}-{len(c.sizes)}-{c.out_dtype}"
)
def test_not_transposed(case: Case, device: torch.device) -> None:
    """Against float64, and bit for bit what the transposed operand gives."""
    for whole in (True, False):
        problem, arguments = make(case, device, whole=whole)
        actual = run(problem, **arguments)
        check(case, actual, expect(problem, **arguments), whole=whole)
        assert torch.count_nonzero(actual[sum(case.sizes) :]) == 0
        same, arguments = make(replace(case, trans_b=True), device, whole=whole)
        assert_exact(actual, run(same, **arguments), "transposed")


@pytest.mark.parametrize("mode", ["bf16", "exact"])
def test_a_bad_expert_spoils_its_rows_alone(mode: str, device: torch.device) -> None:
    """The last stage reaches beyond K, where the next expert's rows lie in memory."""
    problem, arguments = make(Case(GEMM, mode, k=1056, trans_b=False), device)
    clean, ends = run(problem, **arguments), arguments["group_offsets"].tolist()
    poison(arguments["b"], 3)
    spoiled, rows = run(problem, **arguments), slice(ends[3], ends[4])
    assert spoiled[rows].isnan().all()
    spoiled[rows] = clean[rows]
    assert_exact(spoiled, clean, "other experts")


def test_a_dropped_block_is_seen(device: torch.device) -> None:
    """Control: 32 of 2880 products missing in 64 rows of one tile."""
    case = Case(GEMM, "bf16", k=2880, trans_b=False)
    problem, arguments = make(case, device)
    actual = run(problem, **arguments)
    check(case, actual, expect(problem, **arguments))
    arguments["a"][256:320, 2848:] = 0
    with pytest.raises(AssertionError, match="relative L2"):
        check(case, actual, expect(problem, **arguments))


# --- ScaleSpan.AUTO -----------------------------------------------------------------------------

AUTO_CASES = [
    Case(
        op,
        mode,
        pair,
        dtype,
        tuple(SIZES[sizes]),
        n,
        k,
        accumulate=op is WGRAD and dtype is torch.float32,
    )
    for op in (GEMM, WGRAD)
    for mode in ("exact", "row")
    for pair, dtype, sizes, (n, k) in (
        ("e4m3", torch.bfloat16, "ragged", (736, 1056)),
        ("hybrid", torch.float32, "many", (264, 416)),
        ("e5m2", torch.float16, "all_in_last", (96, 2880)),
        ("mixed", torch.float32, "empty", (128, 256)),
    )
]


def counted(
    problem: GroupedProblem,
    arguments: dict[str, Any],
    counts: tuple[int, int],
    device: torch.device,
) -> tuple[GroupedProblem, dict[str, Any]]:
    """The same operands as ScaleSpan.AUTO, with these counts of wide blocks."""
    names = ("a", "b") if problem.op is GEMM else ("grad", "a")
    changed = dict(arguments)
    for name, count in zip(names, counts, strict=True):
        value = arguments[name]
        assert isinstance(value, MXTensor)
        changed[name] = replace(
            value,
            scale_span=ScaleSpan.AUTO,
            wide_blocks=torch.tensor([count], dtype=torch.int32, device=device),
        )
    into = changed.get("accumulate_into")
    if into is not None:
        changed["accumulate_into"] = into.clone()
    return replace(problem, a_span=ScaleSpan.AUTO, b_span=ScaleSpan.AUTO), changed


@pytest.mark.parametrize(
    "case", AUTO_CASES, ids=lambda c: f"{c.op.value}-{c.mode}-{c.pair}-{c.n}x{c.k}"
)
def test_what_the_device_chooses(case: Case, device: torch.device) -> None:
    """Wide operands give the bits of the exact kernel, others those of one scale a row; both
    against float64."""
    problem, arguments = make(case, device)
    expected = expect(problem, **arguments)
    for counts in ((1, 0), (-5, 3), (2, 2)) if case.mode == "exact" else ((0, 0), (-5, 0)):
        auto, operands = counted(problem, arguments, counts, device)
        actual = run(auto, **operands)
        check(case, actual, expected)
        again = arguments | (
            {"accumulate_into": arguments["accumulate_into"].clone()} if case.accumulate else {}
        )
        assert_exact(actual, run(problem, **again), f"counts {counts}")
