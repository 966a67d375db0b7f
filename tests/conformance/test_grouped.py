"""grouped_gemm and grouped_wgrad of every executor, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mxpert
from mxpert import MXTensor
from support.devices import DEVICES
from support.executors import CHIPS, Executor
from support.kernels import kernels_of
from tests.conformance.cases import grouped as cases
from tests.conformance.cases.grouped import GroupedCase


@pytest.mark.cases(
    exact=cases.EXACT_GEMMS,
    rounded=cases.ROUNDED_GEMMS,
    other_shapes=cases.SHAPES,
    rows_of_no_group=cases.OUTSIDE_GEMMS,
    exact_wgrad=cases.EXACT_WGRADS,
    rounded_wgrad=cases.ROUNDED_WGRADS,
    other_wgrads=cases.OTHER_WGRADS,
    poisoned_padding=cases.POISONED,
)
def test_product(case: GroupedCase, executor: Executor) -> None:
    case.check(executor)


@pytest.mark.cases(cases.LIMITED)
def test_fewer_sms_give_the_same_bits(case: GroupedCase, executor: Executor) -> None:
    case.check_limited(executor)


@pytest.mark.parametrize("arch", [*CHIPS, "sm_100"])
def test_backends_serve_what_the_cases_say(arch: str) -> None:
    backend = CHIPS.get(arch, "triton")
    kernels = kernels_of(backend)
    for name, case in [item for group in cases.ALL for item in group.items()]:
        refused = kernels[case.op].unsupported(case.problem(DEVICES[arch]))
        assert case.served_by(backend) == (refused is None), f"{name}: {refused}"


def shifted(offsets: torch.Tensor) -> torch.Tensor:
    offsets[2:-1] += 1
    return offsets


Planted = Callable[[GroupedCase, MXTensor, MXTensor, torch.Tensor], torch.Tensor]
PLANTED: dict[str, Planted] = {
    "scales-one-block-off": lambda case, a, b, at: case.run(
        replace(a, scale=a.scale.roll(1, -1)), b, at
    ),
    "next-group's-weights": lambda case, a, b, at: case.run(
        a, replace(b, qdata=b.qdata.roll(1, 0), scale=b.scale.roll(1, 0)), at
    ),
    "offsets-one-row-off": lambda case, a, b, at: case.run(a, b, shifted(at)),
    "no-transposition": lambda case, a, b, at: replace(case, trans_b=False).run(
        a, replace(b, axis=-2, scale=b.scale.mT), at
    ),
    "rows-one-off": lambda case, a, b, at: case.run(a, b, at).roll(1, 0),
    "columns-one-off": lambda case, a, b, at: case.run(a, b, at).roll(1, 1),
    "last-row-lost": lambda case, a, b, at: case.run(a, b, at).index_fill(
        0, at[-1:].long() - 1, 0.0
    ),
}


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_the_comparison_catches(plant: Planted, exact: bool) -> None:
    case = replace(cases.EXACT_GEMMS["e4m3-ragged-nt"], n=160, exact=exact)
    a, b = case.operands()
    assert isinstance(a, MXTensor)
    assert isinstance(b, MXTensor)
    expected, offsets = case.expected(a, b, None), case.groups.offsets()
    with mxpert.override(backend="reference"):
        case.compare(case.run(a, b, offsets), expected)
        wrong = plant(case, a, b, offsets)
    with pytest.raises(AssertionError):
        case.compare(wrong, expected)
