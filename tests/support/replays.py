"""Comparison of replayed calls with ordinary ones, on the mock driver of `support.launches`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch

from mxpert.core.replay import Recording, Replayed

LOWEST_ADDRESS = 1 << 22
"""Integers from here on count as addresses. The heap of a Python at a fixed address lies low."""

Launches = list[tuple[Any, ...]]
"""Arguments of Triton's C launcher."""


@contextlib.contextmanager
def without_replay() -> Iterator[None]:
    """Switch off replay inside the block: every call runs the kernel's own host code."""

    def decline(kernel: Replayed[Any, Any, Any], *_: Any) -> None:
        """A plain function, because a mock would add its own time to the ops' time."""

    with mock.patch.object(Replayed, "replay", decline):
        yield


@contextlib.contextmanager
def watched_replays() -> Iterator[list[object]]:
    """Yield a list of the recordings that are replayed inside the block."""
    seen: list[object] = []
    run = Recording.replay

    def counted(recording: Recording, *arguments: Any) -> Any:
        seen.append(recording)
        return run(recording, *arguments)

    with mock.patch.object(Recording, "replay", counted):
        yield seen


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a result or in arguments, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def flat(value: Any) -> Iterator[Any]:
    """All leaves of nested launch arguments: descriptors are expanded into their parts."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from flat(part)
    else:
        yield value


def check_same(
    owner: object, ordinary: tuple[Launches, Any], repeated: tuple[Launches, Any]
) -> None:
    """Check that two calls made the same launches and returned equal results.

    Addresses of the arguments (attributes of `owner`) must be equal. Addresses of other buffers may
    differ, but the mapping between them must be consistent.
    """
    ranges = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors_of(vars(owner))
    ]
    moved: dict[int, int] = {}
    counts = len(ordinary[0]), len(repeated[0])
    _check(counts[0] == counts[1] > 0, "launches", *counts)
    for want, have in zip(flat(ordinary[0]), flat(repeated[0]), strict=True):
        if not isinstance(want, int) or want < LOWEST_ADDRESS:
            _check(have == want, "a number or name", want, have)
        elif any(start <= want < end for start, end in ranges):
            _check(have == want, "the address of an argument", want, have)
        else:
            _check(moved.setdefault(have, want) == want, "a buffer of its own", want, have)
    for result, repeat in zip(tensors_of(ordinary[1]), tensors_of(repeated[1]), strict=True):
        facts = [(each.shape, each.stride(), each.dtype) for each in (result, repeat)]
        _check(facts[0] == facts[1], "a result", *facts)
        if result.numel():
            place = repeat.data_ptr()
            _check(
                moved.get(place, place) == result.data_ptr(),
                "where a result lies",
                result.data_ptr(),
                place,
            )


def check_replay(
    launches: Launches,
    replays: list[object],
    make: Callable[[], Any],
    run: Callable[[Any], Any],
    *,
    is_first: bool = True,
) -> None:
    """Check that the third `run(owner)` is replayed and makes the launches of an ordinary call.

    Args:
        make: makes an owner of the arguments, in newly allocated memory.
        is_first: whether `make` makes no call of `run`'s geometry itself.
    """
    first = make()
    for _ in range(2):
        run(first)
    assert not (is_first and replays)
    for owner in (first, make()):  # new arguments, the same geometry
        want = ordinary(launches, lambda owner=owner: run(owner))  # type: ignore[misc]
        replays.clear()
        launches.clear()
        result = run(owner)
        assert replays
        check_same(owner, want, (launches.copy(), result))


def check_interleaved(
    launches: Launches, replays: list[object], calls: list[tuple[object, Callable[[], Any]]]
) -> None:
    """Check interleaved calls, each with its owner: a key that is too coarse would replay another
    call."""
    for _ in range(3):
        for _, call in calls:
            call()
    assert replays
    for owner, call in calls:
        want = ordinary(launches, call)
        launches.clear()
        result = call()
        check_same(owner, want, (launches.copy(), result))


def _check(holds: bool, what: str, want: object, have: object) -> None:
    if not holds:
        raise AssertionError(f"{what}: {want} in the ordinary call, {have} in the replay")


def ordinary(launches: Launches, call: Callable[[], Any]) -> tuple[Launches, Any]:
    """Launches and result of a call that runs its ordinary host code."""
    with without_replay():
        call()
        launches.clear()
        result = call()
    return launches.copy(), result
