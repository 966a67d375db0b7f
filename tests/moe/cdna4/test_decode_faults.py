"""Bugs planted in a copy of the decode kernel's binary: each kind is caught, by its name."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import mxpert
from gfx950emu import Fault, LdsDirectFault, LdsRaceFault, OutOfBoundsFault, WaitFault, run
from mxpert.formats.tensor import Layout
from mxpert.testing.problems import MoEShape
from support.exact import exact_moe_problem
from support.gfx950_mutants import Mutant, Trial, capture, changed, copied, sample
from support.layers import plan_of

SHAPE = MoEShape(2336, 96, 1, 1, has_bias=True)
"""One expert; the depth takes two copies of activations."""


@functools.cache
def trial() -> Trial:
    """The gate/up GEMM of an exact problem with MXFP4 activations."""
    inputs = exact_moe_problem(SHAPE, 20)
    weights = inputs.weights.prepare(device="cpu", layout=Layout.CDNA4_FRAGMENT)
    plan = plan_of(inputs, 16)
    options = {"activation": inputs.activation, "activation_format": "mxfp4"}
    with mxpert.override(backend="cdna4"), capture() as launches:
        mxpert.moe_gate_up(inputs.x, weights, plan, **options)
    return Trial(launches[-1])


def of_kind(kind: str, count: int) -> list[Mutant]:
    found = [mutant for mutant in trial().mutants if mutant.kind == kind]
    assert found, kind
    return sample(found, count)


def faults(mutants: list[Mutant]) -> Iterator[type[Fault]]:
    """Kind of the fault of each mutant that has one."""
    for mutant in mutants:
        try:
            run(changed(trial().launch.code, mutant), (1,), copied(trial().launch.arguments))
        except Fault as fault:
            yield type(fault)


def test_a_missing_wait() -> None:
    assert WaitFault in faults(of_kind("dropped wait", 6))


def test_a_missing_barrier() -> None:
    assert {LdsRaceFault, LdsDirectFault} & set(faults(of_kind("dropped barrier", 9)))


@pytest.mark.parametrize(
    "kind",
    ["scale byte of A", "scale byte of B", "swapped scales", "swapped operands", "LDS offset"],
)
def test_wrong_operands(kind: str) -> None:
    for mutant in of_kind(kind, 2):
        assert trial().judge(mutant) != "survived", mutant.label


@pytest.mark.parametrize("name", ["row_units", "num_k_blocks"])
def test_a_tail_out_of_bounds(name: str) -> None:
    """Weight rows beyond the last expert, and depth beyond the last activation row."""
    arguments = copied(trial().launch.arguments)
    arguments[name] += {"row_units": 1, "num_k_blocks": 64}[name]
    with pytest.raises(OutOfBoundsFault):
        run(trial().launch.code, trial().launch.grid, arguments)
