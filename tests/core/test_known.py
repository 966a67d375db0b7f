"""Arguments are recognised only where nothing that `describe` looks at has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import mxpert
from mxpert.core import calls, known
from mxpert.core.geometry import describe
from mxpert.core.known import KnownArguments
from mxpert.core.target import on_device

ROWS = torch.randn(4, 64).bfloat16()
CODES = mxpert.quantize(torch.randn(4, 64), "mxfp8")
IDS = torch.zeros(4, 2, dtype=torch.int32)
VALUES = (ROWS, CODES, None, IDS)


class Options(NamedTuple):
    """Options of an op."""

    dtype: torch.dtype = torch.bfloat16
    is_transposed: bool = True
    axis: int | None = None


OPTIONS = Options()


def learnt(values: tuple[Any, ...] = VALUES, options: Any = OPTIONS) -> KnownArguments[Any, str]:
    arguments = KnownArguments[Any, str]()
    arguments.learn(options, values, "result")
    return arguments


def with_(place: int, value: object) -> tuple[Any, ...]:
    return (*VALUES[:place], value, *VALUES[place + 1 :])


ALIKE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "the-same": lambda: VALUES,
    "other-data": lambda: with_(0, torch.zeros_like(ROWS)),
    "other-codes": lambda: with_(1, mxpert.quantize(torch.ones(4, 64), "mxfp8")),
    "a-view": lambda: with_(0, torch.zeros(6, 64, dtype=torch.bfloat16)[2:]),
}
DIFFERENT: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rows": lambda: with_(3, torch.zeros(5, 2, dtype=torch.int32)),
    "first-rows": lambda: with_(0, ROWS[:3]),
    "strides": lambda: with_(0, torch.zeros(64, 4, dtype=torch.bfloat16).mT),
    "dtype": lambda: with_(3, IDS.long()),
    "device": lambda: with_(3, IDS.to("meta")),
    "parameter": lambda: with_(0, torch.nn.Parameter(ROWS)),
    "subclass": lambda: with_(0, ROWS.as_subclass(type("Other", (torch.Tensor,), {}))),
    "sparse": lambda: with_(3, IDS.to_sparse()),
    "nested": lambda: with_(3, torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(1, 2)])),
    "nested-first": lambda: with_(0, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])),
    "negated-view": lambda: with_(0, torch._neg_view(ROWS)),
    "none-for-a-tensor": lambda: with_(3, None),
    "none-for-the-first": lambda: with_(0, None),
    "a-tensor-for-none": lambda: with_(2, IDS),
    "a-number-for-none": lambda: with_(2, 0),
    "a-tensor-for-codes": lambda: with_(1, ROWS),
    "codes-for-a-tensor": lambda: with_(0, CODES),
    "another-format": lambda: with_(1, mxpert.quantize(torch.randn(4, 64), "mxfp8_e5m2")),
    "another-axis": lambda: with_(1, mxpert.quantize(torch.randn(32, 64), "mxfp8", axis=0)),
    "a-list": lambda: with_(3, [0]),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_tensors_are_those_of_describe(name: str) -> None:
    values = ALIKE[name]()
    found = learnt().recall(OPTIONS, values)
    assert found is not None
    result, tensors = found
    described = describe(values)
    assert described is not None
    assert result == "result"
    assert [*map(id, tensors)] == [*map(id, described[0])]


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_not_recognised(name: str) -> None:
    assert learnt().recall(OPTIONS, DIFFERENT[name]()) is None


@pytest.mark.parametrize(
    "options",
    [Options(torch.float16), Options(is_transposed=1), Options(axis=0), None, "name"],  # type: ignore[arg-type]
    ids=["dtype", "one-for-true", "axis", "none", "name"],
)
def test_other_options_are_not_recognised(options: object) -> None:
    assert learnt().recall(options, VALUES) is None


def test_equal_options_are_recognised() -> None:
    assert learnt().recall(Options(), VALUES) is not None


def test_arguments_without_a_plain_tensor() -> None:
    arguments = learnt((CODES,), None)
    assert arguments.recall(None, (CODES,)) is not None
    assert arguments.recall(None, (ROWS,)) is None


def test_several_arguments_with_one_first_shape() -> None:
    arguments = learnt()
    longer = with_(3, torch.zeros(4, 3, dtype=torch.int32))
    arguments.learn(OPTIONS, longer, "longer")
    for values, result in ((VALUES, "result"), (longer, "longer")):
        found = arguments.recall(OPTIONS, values)
        assert found is not None
        assert found[0] == result


def test_another_device_has_its_own() -> None:
    arguments = learnt()
    with on_device():
        assert arguments.recall(OPTIONS, VALUES) is None
    assert arguments.recall(OPTIONS, VALUES) is not None


def test_a_full_cache_of_calls_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_CACHED", 1)
    cache, problem = calls.CallCache[Any](by_identity=False), mock.Mock()
    for values in (VALUES, with_(0, ROWS[:3])):
        call = cache.add(OPTIONS, describe(values), problem)
        cache.learn(OPTIONS, values, call)
    assert cache.recall(OPTIONS, VALUES) is None
    assert cache.recall(OPTIONS, with_(0, ROWS[:3])) is not None


def test_modes_that_change_a_tensors_keys_are_left_to_describe() -> None:
    arguments = learnt()
    with torch.autocast("cpu"):
        assert arguments.recall(OPTIONS, VALUES) is None
        arguments.learn(OPTIONS, VALUES, "autocast")
        found = arguments.recall(OPTIONS, VALUES)
    assert found is not None
    assert found[0] == "autocast"
    found = arguments.recall(OPTIONS, VALUES)
    assert found is not None
    assert found[0] == "result"


@pytest.mark.parametrize("guards", [None, lambda tensor: None], ids=["none", "of-another-form"])
def test_a_torch_without_such_guards_recognises_nothing(
    guards: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_GUARDS", guards)
    known._has_guards.cache_clear()
    try:
        assert learnt().recall(OPTIONS, VALUES) is None
        codes = [mxpert.quantize(ROWS[:3], "mxfp8").qdata for _ in range(4)]
    finally:
        known._has_guards.cache_clear()
    assert all(torch.equal(each, codes[0]) for each in codes)


def test_this_torch_has_them() -> None:
    assert known._has_guards()
