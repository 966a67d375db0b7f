"""Latin squares hold every pair of values."""

from __future__ import annotations

import itertools

import pytest

from support.pairwise import latin


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("third", [(0, 1), (0, 1, 2)])
def test_each_value_meets_each_other(third: tuple[int, ...], shift: int) -> None:
    parameters = "abc", "defg", third
    cases = latin(*parameters, shift=shift)
    assert len(cases) == 12
    for one, other in itertools.combinations(range(3), 2):
        pairs = {(case[one], case[other]) for case in cases}
        assert pairs == {*itertools.product(parameters[one], parameters[other])}


def test_too_many_values_are_refused() -> None:
    with pytest.raises(ValueError, match="third — need at most as many values"):
        latin("ab", "cde", (0, 1, 2))
