"""Peak memory of PyTorch's CPU allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mxpert.integrations.checkpoints.load import load_expert_weights
from mxpert.integrations.checkpoints.safetensors_files import CheckpointReader
from mxpert.moe.weights import MoEWeights


class _AtOnce:
    """An executor without threads."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done


def peak_bytes(
    make: Callable[[], Any], work: Callable[[Any], object], *, mapped: int | None = None
) -> int:
    """Most bytes that PyTorch's CPU allocator held at once during `work(made)`, above what
    `make()` left. Both are profiled: what was allocated before is not seen when it is freed.
    The profiler sees this thread alone, so that a checkpoint's threads do their work in it: each of
    them holds as much as one matrix takes here.

    mapped: size of a file that is mapped into memory, which torch reports as allocated.
    """
    gc.collect()  # else garbage from before is counted as freed by `work`
    activity = [torch.profiler.ProfilerActivity.CPU]
    with (
        mock.patch.object(CheckpointReader, "threads", _AtOnce()),
        torch.profiler.profile(activities=activity, profile_memory=True) as profile,
    ):
        made = make()
        with torch.profiler.record_function("work"):
            work(made)
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "work")
    held = before = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        if mapped is not None and abs(event.nbytes()) == mapped:
            continue
        held += event.nbytes()
        if event.start_ns() < begin:
            before = peak = held
        peak = max(peak, held)
    return int(peak - before)


def held_and_peak(checkpoint: Path) -> tuple[int, int]:
    """Bytes of a checkpoint's largest layer, and the most that reading layer by layer takes."""
    held = 0

    def work(loaded: Iterable[tuple[int, MoEWeights]]) -> None:
        nonlocal held
        for _, weights in loaded:
            held = max(held, weights.nbytes)
            del weights

    peak = peak_bytes(lambda: load_expert_weights(checkpoint), work)
    return held, peak
