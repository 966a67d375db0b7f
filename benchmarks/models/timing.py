"""Clocks for whole models: steps of `generate`, forward passes, graph replays, MoE blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StaticCache, StoppingCriteria
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mxpert.testing.timing import Timing, time_graph

CACHE_MARGIN = 32
"""Positions beyond the prompt: runs before and during capture advance the cache."""


def steps(samples: Sequence[float]) -> dict[str, float]:
    """Of milliseconds: the median, and the width of the 10–90 % band."""
    timing = Timing.of(samples)
    return {"ms": timing.us, "ms_spread": timing.high_us - timing.low_us}


class Stopwatch:
    """Marks on the device's stream, or on the host's clock where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def between(self, first: int, second: int) -> float:
        """Milliseconds between two marks; waits for the device."""
        if not self.on_gpu:
            return 1e3 * (self.marks[second] - self.marks[first])
        self.marks[second].synchronize()
        return float(self.marks[first].elapsed_time(self.marks[second]))

    def spans(self, stride: int = 1) -> list[float]:
        """Milliseconds from every `stride`-th mark to the next one."""
        return [self.between(i, i + 1) for i in range(0, len(self.marks) - 1, stride)]


class StepClock(StoppingCriteria):
    """Asked after every token by `generate`, it stops nothing and marks the time."""

    def __init__(self, device: torch.device) -> None:
        self.watch = Stopwatch(device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.watch.mark()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def steps(self) -> dict[str, float]:
        """Times between tokens: the prompt's pass lies before the first mark."""
        return steps(self.watch.spans())


@contextmanager
def moe_milliseconds(
    blocks: Sequence[torch.nn.Module], device: torch.device
) -> Iterator[Callable[[], list[float]]]:
    """Time what runs inside of the blocks while the context is open; gives a function that returns
    the milliseconds of each forward pass."""
    watch = Stopwatch(device)

    def per_pass() -> list[float]:
        inside, count = watch.spans(2), len(blocks)
        return [sum(inside[start : start + count]) for start in range(0, len(inside), count)]

    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(lambda module, given: watch.mark()))
        handles.append(block.register_forward_hook(lambda module, given, result: watch.mark()))
    try:
        yield per_pass
    finally:
        for handle in handles:
            handle.remove()


def timed_forward(
    run: Callable[[], object], device: torch.device, repeats: int
) -> dict[str, float]:
    """Times of single calls."""
    watch = Stopwatch(device)
    for _ in range(repeats):
        watch.mark()
        run()
        watch.mark()
    return steps(watch.spans(2))


@torch.no_grad()
def _masks(model: Any, token: torch.Tensor, cache: StaticCache) -> dict[str, torch.Tensor | None]:
    """Attention masks of the step after `cache`, as the model would make them itself."""
    arguments = {
        "config": model.config,
        "inputs_embeds": model.get_input_embeddings()(token),
        "attention_mask": None,
        "past_key_values": cache,
    }
    return {
        "full_attention": create_causal_mask(**arguments),
        "sliding_attention": create_sliding_window_causal_mask(**arguments),
    }


def graph_step(
    model: Any, blocks: Sequence[torch.nn.Module], prompt: torch.Tensor, repeats: int
) -> dict[str, float]:
    """One decode step after `prompt` [B, S] on a static cache, and its MoE blocks alone.

    Replays are the same step each time: the cache's position is the captured one.
    """
    batch, length = prompt.shape
    cache = StaticCache(config=model.config, max_cache_len=length + CACHE_MARGIN)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = prompt[:, -1:].clone()
    position = torch.full((batch, 1), length, device=prompt.device)

    # Transformers makes an eager mask from a CPU scalar, which no graph can capture.
    masks = _masks(model, token, cache)

    def step() -> object:
        return model(
            token,
            past_key_values=cache,
            position_ids=position,
            attention_mask=masks,
            use_cache=True,
        ).logits

    inputs: list[torch.Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
        for block in blocks
    ]
    step()
    for handle in handles:
        handle.remove()

    def moe() -> None:
        for block, hidden in zip(blocks, inputs, strict=True):
            block(hidden)

    timings = time_graph({"step": [step], "moe": [moe]}, device=prompt.device, repeats=repeats)
    whole, part = timings["step"], timings["moe"]
    return {
        "ms": whole.us / 1e3,
        "ms_spread": (whole.high_us - whole.low_us) / 1e3,
        "moe_ms": part.us / 1e3,
        "step_ms_hooked": whole.us / 1e3,
    }
