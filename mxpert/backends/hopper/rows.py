"""Activations for the FP8 GEMMs: gathered into sorted rows, scaled per row, K permuted.

Three encodings of a row, each with one scale per row:

- bf16 as hi + lo / 16, two e4m3 rows: exact for values within 14 binades of the row maximum.
- MX codes, each 32-block rebased from its own scale to the row's largest, a power of two: exact as
  long as a code stays an e4m3 number, an absolute error of at most 2^-10 of the row's scale below
  that. bf16 rows are quantised and rebased in one pass.
- fp8_token: bf16 rows quantised to e4m3 by the row's own float32 scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...formats.layouts import UNIT_CODES
from ...formats.spec import E2M1
from ...formats.tensor import MXTensor
from ...problem import MoEOptions, activation_mx_format
from ...routing import RoutingPlan
from ..dependent import FOLLOWS
from ..launch import CACHED_LAUNCHES, Launch
from ..triton.quantize_kernels import scale_rule_constants
from .rows_kernels import _moe_encode_rows_kernel

_MAX_CHUNKS = 64
"""Depth units of 128 values in one step: 8192 values, 32 a thread."""

_CHUNKS_PER_WARP = 4

_ROW_VALUES = 16384
"""Values that a program encodes where rows are many: its rows are asked for one ahead."""

_MANY_PROGRAMS = 4096
"""Programs that fill the GPU; where rows are fewer, each has its own."""

_MOST_STEPS = 4
"""Steps of a row that a program holds: 16 values a thread and step, and those of the next row."""

_PARALLEL_TOKENS = 32
"""Up to this many tokens each slot has a program of its own: the GPU is idle, latency counts."""


@dataclass(frozen=True)
class SortedRows:
    """e4m3 rows [P, K padded to 128] (twice as many for hi and lo) and float32 row scales [P], and
    the int32 counter [1] of the tiles that the GEMM of these rows has claimed."""

    codes: torch.Tensor
    scale: torch.Tensor
    claimed: torch.Tensor
    split: bool

    @property
    def low_rows(self) -> int:
        """Row where the low parts begin."""
        return self.scale.shape[0]


def padded(depth: int) -> int:
    """Depth of a stored row: whole units."""
    return -(-depth // UNIT_CODES) * UNIT_CODES


def fits_one_step(depth: int) -> bool:
    """Whether a program holds a whole row in registers."""
    return padded(depth) <= _MAX_CHUNKS * UNIT_CODES


def step_options(depth: int) -> dict[str, int]:
    """CHUNKS of a step, and warps: a power of two, which holds a row or else the most."""
    units = padded(depth) // UNIT_CODES
    chunks = min(_MAX_CHUNKS, max(_CHUNKS_PER_WARP, 1 << (units - 1).bit_length()))
    return {"CHUNKS": chunks, "num_warps": min(8, chunks // _CHUNKS_PER_WARP)}


def held_options(depth: int, many: bool) -> dict[str, int | bool]:
    """STEPS of a row that stay in registers, whether these are the WHOLE row, and a step's size.

    Few rows: one step and many threads, for latency. `many`: few threads with several steps, which
    shares the work of a row out over more values and fits depths that are no powers of two.
    """
    units = padded(depth) // UNIT_CODES
    if not many or units > _MAX_CHUNKS:
        return {"STEPS": 1, "WHOLE": fits_one_step(depth), **step_options(depth)}
    sizes = [chunks for chunks in (4, 8, 16) if -(-units // chunks) <= _MOST_STEPS]
    chunks = min(sizes, key=lambda size: (-(-units // size) * size, size))
    return {"STEPS": -(-units // chunks), "WHOLE": True, "CHUNKS": chunks,
            "num_warps": chunks // _CHUNKS_PER_WARP}


def empty_rows(plan: RoutingPlan, num_rows: int, depth: int, options: MoEOptions) -> SortedRows:
    """Rows without values."""
    split = options.activation_format == "bf16"
    scale = plan.sorted_weights.new_empty(num_rows)
    codes = scale.new_empty((num_rows * (2 if split else 1), padded(depth)),
                            dtype=torch.float8_e4m3fn)
    return SortedRows(codes, scale, plan.num_valid.new_empty(1), split)


def sorted_rows(x: torch.Tensor | MXTensor, plan: RoutingPlan, num_rows: int,
                options: MoEOptions, *, scatter: bool, release_first: bool = False) -> SortedRows:
    """Encode the plan's rows for the FP8 GEMMs.

    Args:
        x: bfloat16 or MXTensor, [T, K] (scatter) or [P, K] in sorted order.
        plan: the routing plan. num_rows: rows to allocate, at least the rows in use.
        options: the activation format, which bfloat16 rows are quantised to, by the scale rule.
        scatter: x holds tokens, each of which goes to the rows of all its slots.
        release_first: let the GEMM of these rows start before x is there. Its plan must be older
            than the GEMM that x comes from (see `dependent`).

    Returns:
        SortedRows; padding rows are left as allocated, their outputs are dropped.
    """
    rows = empty_rows(plan, num_rows, x.shape[1], options)
    sizes = _Sizes(plan.num_tokens, plan.top_k, num_rows, x.shape[1], scatter, release_first)
    tensors = dict(
        codes=rows.codes, scale=rows.scale, claimed=rows.claimed, slot_rows=plan.slot_rows)
    if isinstance(x, MXTensor):
        element = x.format.element
        data = x.qdata if element is E2M1 else x.qdata.view(torch.float8_e4m3fn)
        _encode_launch(sizes, data.stride(0), x.scale.stride(0), element.name, options)(
            x=data, x_scale=x.scale, **tensors)
    else:
        _encode_launch(sizes, x.stride(0), 0, None, options)(x=x, x_scale=None, **tensors)
    return rows


class _Sizes(NamedTuple):
    """Sizes that the launch depends on."""

    num_tokens: int
    top_k: int
    num_rows: int
    depth: int
    scatter: bool
    release_first: bool

    @property
    def num_slots(self) -> int:
        """Slots of all tokens."""
        return self.num_tokens * self.top_k

    @property
    def many(self) -> bool:
        """Whether rows alone fill the GPU."""
        return (self.num_tokens if self.scatter else self.num_slots) >= _MANY_PROGRAMS

    @property
    def rows(self) -> int:
        """Slots of one program whose rows are sorted already."""
        most = _ROW_VALUES // padded(self.depth)
        return max(1, min(most, self.num_slots // _MANY_PROGRAMS))

    @property
    def slots(self) -> int:
        """A token's slots that one program serves; 0: rows are sorted already."""
        if not self.scatter:
            return 0
        return 1 if self.num_tokens <= _PARALLEL_TOKENS else self.top_k

    @property
    def programs(self) -> int:
        """Programs in all."""
        if self.scatter:
            return self.num_tokens * (self.top_k // self.slots)
        return -(-self.num_slots // self.rows)


@functools.lru_cache(CACHED_LAUNCHES)
def _encode_launch(sizes: _Sizes, x_stride: int, x_scale_stride: int, coded: str | None,
                   options: MoEOptions) -> Launch:
    """coded: element of the MX rows; None: bfloat16 rows."""
    format = (dict(FORMAT=coded, EMAX=0, THRESHOLD=0, INF_BYTE=0) if coded
              else format_constants(options))
    return Launch(
        _moe_encode_rows_kernel, (sizes.programs,), num_slots=sizes.num_slots,
        top_k=sizes.top_k, slots=sizes.slots, depth=sizes.depth, padded_depth=padded(sizes.depth),
        num_rows=sizes.num_rows, x_stride=x_stride, x_scale_stride=x_scale_stride, rows=sizes.rows,
        release_first=int(sizes.release_first),
        CODED=coded is not None, **format, **held_options(sizes.depth, sizes.many), **FOLLOWS)


def format_constants(options: MoEOptions) -> dict[str, Any]:
    """What kernels need to know of an activation format and its scale rule (`rows_codes`)."""
    format = activation_mx_format(options.activation_format, "sorted_rows")
    if format is None:
        name = "split" if options.activation_format == "bf16" else "token"
        return dict(FORMAT=name, EMAX=0, THRESHOLD=0, INF_BYTE=0)
    return dict(FORMAT=format.element.name, **scale_rule_constants(format, options.scale_rule))
