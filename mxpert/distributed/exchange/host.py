"""Host side of the exchange: the layout of a rank's memory, and launches; no synchronisation."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import Target
from ...core.target import tell_executor
from ...device.exchange_wait import (
    ARRIVED_ADDRESS,
    DECIDED,
    DIFFERS,
    MAX_CTAS,
    MAX_RANKS,
    NO_WAIT,
    NUM_ARRIVALS,
    NUM_CTAS,
    NUM_RANKS,
    NUM_WORDS,
    TICKS_PER_SECOND,
    TIMEOUT,
    TWO_STREAMS,
    WORDS_ADDRESS,
)
from ...device.mx_codec import scale_rule_constants
from ...device.pdl import pdl_options
from ...device.targets import refuse_without
from ...formats.spec import ScaleRule, get_format
from .combine import _exchange_combine_kernel
from .dispatch import _exchange_dispatch_kernel
from .schedule import Work, combine_schedule, dispatch_schedule

_ALIGNMENT = 256
_MXFP8 = get_format("mxfp8")
_TAG_MODULUS = 1_048_573
"""The largest prime below 2^TAG_BITS: calls that differ in one field have different tags."""
_NOT_QUANTISED = {"EMAX": None, "THRESHOLD": None}


@dataclass(frozen=True)
class Layout:
    """Sections of the memory that each rank has for the others, the same on all ranks.

    Args:
        num_ranks: N. max_tokens: slots of each rank. top_k, hidden_size: of the model.
        mx_rows: whether received rows are MXFP8; else they are bfloat16.
        combine_dtype: of partial rows.
    """

    num_ranks: int
    max_tokens: int
    top_k: int
    hidden_size: int
    mx_rows: bool
    combine_dtype: torch.dtype

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each section, in order."""
        flags = (self.num_ranks, MAX_CTAS.value), torch.int64
        slots = self.num_ranks * self.max_tokens
        routing = (slots, self.top_k)
        rows = torch.uint8 if self.mx_rows else torch.bfloat16
        blocks = self.hidden_size // _MXFP8.block_size if self.mx_rows else 0
        return {
            "arrived": flags,
            "returned": flags,
            "calls": ((self.num_ranks,), torch.int64),
            "rows": ((slots, self.hidden_size), rows),
            "scales": ((slots, blocks), torch.uint8),
            "ids": (routing, torch.int32),
            "weights": (routing, torch.float32),
            "partials": ((slots, self.hidden_size), self.combine_dtype),
        }

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """First byte of each section."""
        return dict(zip(self.shapes, self._ends[:-1], strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's memory."""
        return self._ends[-1]

    @functools.cached_property
    def _ends(self) -> list[int]:
        sizes = (_bytes(shape, dtype) for shape, dtype in self.shapes.values())
        aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        return list(itertools.accumulate(aligned, initial=0))

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sections of `memory`, uint8 [nbytes], as tensors."""
        return {
            name: memory[self.offsets[name] :][: _bytes(shape, dtype)].view(dtype).view(shape)
            for name, (shape, dtype) in self.shapes.items()
        }


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass(frozen=True)
class Rank:
    """Everything that the launches of one rank depend on, beside the tokens of a call.

    Args:
        layout: of the ranks' memories. rank, num_experts: this rank, and the global experts.
        target: its device.
        most_ctas: CTAs of a kernel, at most; the same on all ranks.
    """

    layout: Layout
    rank: int
    num_experts: int
    target: Target
    most_ctas: int

    def work(self, bound: int) -> Work:
        """Work of kernels in calls with `bound` slots a rank."""
        return Work(bound, self.layout.hidden_size, self.most_ctas)


def refuse(num_ranks: int, target: Target) -> str | None:
    """Why the kernels cannot serve N ranks on `target`, as a phrase; None if they can."""
    if num_ranks > MAX_RANKS.value:
        return f"serves at most {MAX_RANKS.value} ranks, got {num_ranks}"
    return refuse_without(target, "stores to other GPUs", least=90)


def new_words(timeout_s: float, target: Target, device: torch.device) -> torch.Tensor:
    """An exchange's private words before its first epoch."""
    words = torch.zeros(NUM_WORDS, dtype=torch.int64)
    words[TIMEOUT.value] = int(timeout_s * TICKS_PER_SECOND[target.kind])
    return words.to(device)


def new_arrivals(arrived: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Arrivals that sort kernels wait for, int64 [CTAs by power of two, NUM_ARRIVALS].

    Row ``log2(CTAs)`` serves the calls whose dispatch has that many CTAs.
    """
    tell_executor("the words of an exchange", words)
    rows = torch.zeros(MAX_CTAS.value.bit_length(), NUM_ARRIVALS, dtype=torch.int64)
    rows[:, ARRIVED_ADDRESS.value] = arrived.data_ptr()
    rows[:, WORDS_ADDRESS.value] = words.data_ptr()
    rows[:, NUM_RANKS.value] = arrived.shape[0]
    rows[:, NUM_CTAS.value] = 1 << torch.arange(len(rows))
    return rows.to(arrived.device)


def arrivals_row(own: Rank, bound: int) -> int:
    """The row of `new_arrivals` for calls with `bound` slots a rank."""
    return dispatch_schedule(own.work(bound)).ctas.bit_length() - 1


class Loss(NamedTuple):
    """First failure of an exchange: a lost rank, a rank with another call, or another misuse."""

    rank: int | None = None
    differs: int | None = None
    misuse: str | None = None


def lost(words: torch.Tensor) -> Loss:
    """The failure of an exchange, if there is one; synchronises."""
    decided = int(words[DECIDED.value])
    if decided >= 0:
        return Loss()
    if decided > TWO_STREAMS.value:
        return Loss(rank=-1 - decided)
    if decided <= DIFFERS.value:
        return Loss(differs=DIFFERS.value - decided)
    return Loss(misuse="no wait" if decided == NO_WAIT.value else "two streams")


def is_lost(words: torch.Tensor) -> torch.Tensor:
    """Whether anything is lost, bool [1] on the device."""
    found: torch.Tensor = words[DECIDED.value : DECIDED.value + 1] < 0
    return found


@functools.lru_cache(CACHED_LAUNCHES)
def dispatch_launch(
    own: Rank, num_tokens: int, bound: int, rule: ScaleRule | None, call: int
) -> Launch:
    """The launch of dispatch.

    Args:
        rule: None if rows travel as they are. call: int64 of at least 2^62, the same on all ranks.
    """
    layout = own.layout
    schedule = dispatch_schedule(own.work(bound))
    offsets = layout.offsets
    return Launch(
        _exchange_dispatch_kernel,
        (schedule.ctas,),
        rows_offset=offsets["rows"],
        scales_offset=offsets["scales"],
        ids_offset=offsets["ids"],
        weights_offset=offsets["weights"],
        flags_offset=offsets["arrived"],
        calls_offset=offsets["calls"],
        call=call,
        tag=call % _TAG_MODULUS,
        num_experts=own.num_experts,
        **_sizes(own, num_tokens, bound),
        **(_NOT_QUANTISED if rule is None else scale_rule_constants(_MXFP8, rule)),
        ROWS=schedule.rows,
        BLOCK=schedule.block,
        **_options(own.target, schedule.num_warps),
    )


@functools.lru_cache(CACHED_LAUNCHES)
def combine_launch(own: Rank, num_tokens: int, bound: int) -> Launch:
    """The launch of combine."""
    layout = own.layout
    schedule = combine_schedule(own.work(bound), layout.combine_dtype.itemsize)
    return Launch(
        _exchange_combine_kernel,
        (schedule.ctas,),
        partials_offset=layout.offsets["partials"],
        flags_offset=layout.offsets["returned"],
        **_sizes(own, num_tokens, bound),
        ROWS=schedule.rows,
        BLOCK=schedule.block,
        **_options(own.target, schedule.num_warps),
    )


def _sizes(own: Rank, num_tokens: int, bound: int) -> dict[str, Any]:
    layout = own.layout
    return {
        "rank": own.rank,
        "num_ranks": layout.num_ranks,
        "num_tokens": num_tokens,
        "bound": bound,
        "top_k": layout.top_k,
        "num_blocks": layout.hidden_size // 32,
        "SLOTS": triton.next_power_of_2(layout.top_k),
    }


def _options(target: Target, num_warps: int) -> dict[str, Any]:
    """KIND and launch options. `num_warps` counts warps of 32 threads."""
    if target.kind == "hip":
        num_warps //= 2
    # Without a limit ptxas spills registers to raise the occupancy, which does not matter here. The
    # 65536 registers of an SM must do for all threads of a CTA.
    limit = {"maxnreg": min(160, 2048 // num_warps)} if target.kind == "cuda" else {}
    return {"KIND": target.kind, "num_warps": num_warps, **limit, **pdl_options(target)}
