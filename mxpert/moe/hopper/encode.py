"""Row encoding: activations become sorted e4m3 rows for the FP8 GEMMs, K permuted.

There are three encodings. Each row has one scale:

- bf16 as hi + lo / 16 in two e4m3 rows: exact for values within 14 binades of the row maximum.
- MX codes: each block of 32 is rebased from its own scale to the largest scale of the row, a power
  of two. This is exact if the code is still an e4m3 number; otherwise the absolute error is at most
  2^-10 of the row's scale. bf16 rows are quantised and rebased in one pass.
- fp8_token: bf16 rows are quantised to e4m3 with one float32 scale per row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...core.launch import CACHED_LAUNCHES, Launch
from ...core.problem import MoEOptions
from ...device.compat import aggregate
from ...device.hopper_tile_scheduler import reset_tile_counter
from ...device.mx_codec import scale_rule_constants
from ...device.pdl import PDL_LAUNCH, launch_dependents, wait_and_launch_dependents
from ...formats.layouts import UNIT_CODES
from ...formats.spec import E2M1
from ...formats.tensor import MXTensor
from ...routing.plan import RoutingPlan
from .encode_codes import RowFormat, encode_step, row_maximum, row_scale, statistic_of
from .encode_steps import RowsOut, RowSteps, load_row, load_step, step_offsets, store_step

_MAX_CHUNKS = 64
"""Most depth units of 128 values per step: 8192 values, 32 a thread."""

_CHUNKS_PER_WARP = 4

_ROW_VALUES = 16384
"""Values that a program encodes if there are many rows; it prefetches its next row."""

_MANY_PROGRAMS = 4096
"""Programs that fill the GPU; with fewer rows than this, each row has its own program."""

_MOST_STEPS = 4
"""Most steps of a row in registers: 16 values a thread and step, and as many for the next row."""

_PARALLEL_TOKENS = 32
"""Up to this many tokens each slot has its own program: SMs are free, and latency is the limit."""


@aggregate
class Targets:
    """Sorted rows that get a row of the source.

    If num_slots is 0 it is `row`, nothing if `row` is −1. Otherwise these are the rows of num_slots
    slots from first_slot on; `slot_rows` points to the row of each slot, −1 for absent ones.
    """

    row: gl.tensor
    slot_rows: gl.tensor
    first_slot: gl.tensor
    num_slots: gl.tensor


@gluon.jit
def _store_slots(out, targets, scale, encoded, step, STEPS: gl.constexpr):
    """Store step number `step` of an encoded row to all its targets."""
    _source, _block, offsets = step_offsets(step, STEPS)
    row = targets.row
    for slot in range(gl.maximum(targets.num_slots, 1)):
        if targets.num_slots > 0:
            row = gl.load(targets.slot_rows + targets.first_slot + slot)
        if row >= 0:
            store_step(out, row, scale, encoded, offsets)


@gluon.jit
def _encode_row(out, targets, x, x_scale, held, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Encode and store the row at `x`. `held` has its first steps, all of them if STEPS.whole.

    Further steps are loaded twice: for the row's scale, and to be encoded.
    """
    HELD: gl.constexpr = STEPS.held
    steps = gl.cdiv(out.padded_depth, STEPS.chunks * 128)
    for index in gl.static_range(HELD):
        found = statistic_of(held[index], FORMAT)
        if index == 0:
            numbers = found
        else:
            numbers = gl.maximum(numbers, found)
    largest = row_maximum(numbers)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            largest = gl.maximum(largest, row_maximum(statistic_of(step, FORMAT)))
    scale, encoding = row_scale(largest, FORMAT)
    for index in gl.static_range(HELD):
        encoded = encode_step(held[index], encoding, FORMAT, STEPS)
        _store_slots(out, targets, scale, encoded, index, STEPS)
    if not STEPS.whole:
        for index in range(HELD, steps):
            step = load_step(x, x_scale, index, depth, FORMAT, STEPS)
            encoded = encode_step(step, encoding, FORMAT, STEPS)
            _store_slots(out, targets, scale, encoded, index, STEPS)


@gluon.jit
def _load_source(
    x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT: gl.constexpr, STEPS: gl.constexpr
):
    """Load the held steps of row `row` of x; nothing is read if `row` is −1."""
    start = gl.maximum(row, 0).to(gl.int64)
    if FORMAT.coded:
        x_scale += start * x_scale_stride
    return load_row(x + start * x_stride, x_scale, gl.where(row >= 0, depth, 0), FORMAT, STEPS)


@gluon.jit(
    do_not_specialize=[
        "num_slots",
        "top_k",
        "slots",
        "depth",
        "num_rows",
        "x_scale_stride",
        "rows",
        "release_first",
    ]
)
def _moe_encode_rows_kernel(
    codes,
    scale,
    tile_counter,
    x,
    x_scale,
    slot_rows,
    num_slots,
    top_k,
    slots,
    depth,
    padded_depth,
    num_rows,
    x_stride,
    x_scale_stride,
    rows,
    release_first,
    FORMAT: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Encode rows x, bfloat16 or MX codes with x_scale, to e4m3 rows (see `encode_codes`).

    slots > 0: a program encodes one token and stores it for `slots` of its top_k slots. slots = 0:
    x is sorted; a program encodes the rows of `rows` of the num_slots slots, and prefetches the
    next row while it encodes the current one. Padding rows have no slot: they are neither read nor
    written.

    Grid: [num_slots / slots], or [num_slots / rows] rounded up if slots = 0.

    release_first: call launch_dependents at once (see `pdl`).
    """
    if release_first:
        launch_dependents()
    wait_and_launch_dependents()
    reset_tile_counter(tile_counter)
    out = RowsOut(codes, scale, padded_depth, num_rows)
    program = gl.program_id(0)
    first = program * rows
    first_slot = program * slots
    count = gl.where(slots > 0, 1, gl.minimum(num_slots - first, rows))
    row = gl.load(slot_rows + first, mask=slots == 0, other=first_slot // top_k)
    next_row = gl.load(slot_rows + first + 1, mask=count > 1, other=-1)
    following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
    for index in range(count):
        held = following
        source = row
        row = next_row
        next_row = gl.load(slot_rows + first + index + 2, mask=index + 2 < count, other=-1)
        # Loads of the next row are issued before this row is encoded, to hide their latency.
        following = _load_source(x, x_scale, row, depth, x_stride, x_scale_stride, FORMAT, STEPS)
        start = gl.maximum(source, 0).to(gl.int64)
        own_scale = x_scale
        if FORMAT.coded:
            own_scale += start * x_scale_stride
        targets = Targets(source, slot_rows, first_slot, slots)
        _encode_row(out, targets, x + start * x_stride, own_scale, held, depth, FORMAT, STEPS)


@dataclass(frozen=True)
class SortedRows:
    """Encoded rows for an FP8 GEMM.

    codes: e4m3 [P, K padded to 128], or [2P, …] for P rows of hi and then P rows of lo (hi_lo).
    scale: float32 [P], one per row. tile_counter: int32 [1], the tile counter of the GEMM that
    reads these rows.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tile_counter: torch.Tensor
    hi_lo: bool


def padded(depth: int) -> int:
    """Depth of a stored row: `depth` rounded up to a multiple of 128."""
    return -(-depth // UNIT_CODES) * UNIT_CODES


def fits_one_step(depth: int) -> bool:
    """Whether one step covers a whole row, so that a program can hold it in registers."""
    return padded(depth) <= _MAX_CHUNKS * UNIT_CODES


def one_step(depth: int) -> RowSteps:
    """A step of as many chunks as cover a row, at most _MAX_CHUNKS: many threads, low latency."""
    units = padded(depth) // UNIT_CODES
    chunks = min(_MAX_CHUNKS, max(_CHUNKS_PER_WARP, 1 << (units - 1).bit_length()))
    return RowSteps(chunks, min(8, chunks // _CHUNKS_PER_WARP), whole=fits_one_step(depth))


def _several_steps(depth: int) -> RowSteps:
    """Steps of a whole row with few threads, for many rows.

    This amortises the work per row over more values, and wastes less if the depth is no power of
    two.
    """
    units = padded(depth) // UNIT_CODES
    sizes = [chunks for chunks in (4, 8, 16) if -(-units // chunks) <= _MOST_STEPS]
    chunks = min(sizes, key=lambda size: (-(-units // size) * size, size))
    return RowSteps(chunks, chunks // _CHUNKS_PER_WARP, held=-(-units // chunks))


def empty_rows(plan: RoutingPlan, num_rows: int, depth: int, options: MoEOptions) -> SortedRows:
    """Allocate SortedRows without initialising them."""
    hi_lo = options.activation_format == "bf16"
    scale = plan.sorted_weights.new_empty(num_rows)
    codes = scale.new_empty(
        (num_rows * (2 if hi_lo else 1), padded(depth)), dtype=torch.float8_e4m3fn
    )
    return SortedRows(codes, scale, plan.num_valid.new_empty(1), hi_lo)


def encode_rows(
    x: torch.Tensor | MXTensor,
    plan: RoutingPlan,
    num_rows: int,
    options: MoEOptions,
    *,
    scatter: bool,
    release_first: bool = False,
) -> SortedRows:
    """Encode the plan's rows for the FP8 GEMMs.

    Args:
        x: bfloat16 or MXTensor, [T, K] (scatter) or [P, K] in sorted order.
        plan: the routing plan. num_rows: rows to allocate, at least the rows in use.
        options: activation format and scale rule for bfloat16 rows.
        scatter: x holds tokens; each token is written to the rows of all its slots.
        release_first: call launch_dependents before x is complete, so that the GEMM of these rows
            starts early. The plan must be older than the GEMM that computes x (see `common.pdl`).

    Returns:
        SortedRows; padding rows are uninitialised. The GEMM's outputs of these rows are not used.
    """
    rows = empty_rows(plan, num_rows, x.shape[1], options)
    work = _Work(plan.num_tokens, plan.top_k, num_rows, x.shape[1], scatter, release_first)
    if isinstance(x, MXTensor):
        element = x.format.element
        data = x.qdata if element is E2M1 else x.qdata.view(torch.float8_e4m3fn)
        x_scale, x_scale_stride, coded = x.scale, x.scale.stride(0), element.name
    else:
        data, x_scale, x_scale_stride, coded = x, None, 0, None
    _encode_launch(work, data.stride(0), x_scale_stride, coded, options)(
        x=data,
        x_scale=x_scale,
        codes=rows.codes,
        scale=rows.scale,
        tile_counter=rows.tile_counter,
        slot_rows=plan.slot_rows,
    )
    return rows


class _Work(NamedTuple):
    """Sizes and flags of a launch, and how programs share the work."""

    num_tokens: int
    top_k: int
    num_rows: int
    depth: int
    scatter: bool
    release_first: bool

    @property
    def num_slots(self) -> int:
        """Number of slots of all tokens."""
        return self.num_tokens * self.top_k

    @property
    def rows(self) -> int:
        """Slots per program if the rows are sorted already."""
        most = _ROW_VALUES // padded(self.depth)
        return max(1, min(most, self.num_slots // _MANY_PROGRAMS))

    @property
    def slots(self) -> int:
        """Slots of a token per program; 0 if the rows are sorted already."""
        if not self.scatter:
            return 0
        return 1 if self.num_tokens <= _PARALLEL_TOKENS else self.top_k

    @property
    def programs(self) -> int:
        """Number of programs."""
        if self.scatter:
            return self.num_tokens * (self.top_k // self.slots)
        return -(-self.num_slots // self.rows)

    @property
    def steps(self) -> RowSteps:
        """Several steps a row if one program per row fills the GPU, otherwise one."""
        many = (self.num_tokens if self.scatter else self.num_slots) >= _MANY_PROGRAMS
        return (_several_steps if many and fits_one_step(self.depth) else one_step)(self.depth)


@functools.lru_cache(CACHED_LAUNCHES)
def _encode_launch(
    work: _Work, x_stride: int, x_scale_stride: int, coded: str | None, options: MoEOptions
) -> Launch:
    """Launch of the row-encoding kernel. coded: element format of MX rows, None for bfloat16."""
    steps = work.steps
    return Launch(
        _moe_encode_rows_kernel,
        (work.programs,),
        num_slots=work.num_slots,
        top_k=work.top_k,
        slots=work.slots,
        depth=work.depth,
        padded_depth=padded(work.depth),
        num_rows=work.num_rows,
        x_stride=x_stride,
        x_scale_stride=x_scale_stride,
        rows=work.rows,
        release_first=int(work.release_first),
        FORMAT=RowFormat(coded, coded=True) if coded else row_format(options),
        STEPS=steps,
        num_warps=steps.warps,
        **PDL_LAUNCH,
    )


def row_format(options: MoEOptions) -> RowFormat:
    """Format of the rows that bfloat16 becomes with these options."""
    format = options.mx_format
    if format is None:
        return RowFormat("hi_lo" if options.activation_format == "bf16" else "token")
    rule = scale_rule_constants(format, options.scale_rule)
    return RowFormat(format.element.name, emax=rule["EMAX"], threshold=rule["THRESHOLD"])
