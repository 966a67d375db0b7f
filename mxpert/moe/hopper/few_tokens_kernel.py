"""A whole MoE layer for a few tokens in one launch, from expert ids to combined outputs.

Such a layer takes the time to read the weights of the experts that the tokens hit, and the latency
of what is between reads: launches, routing, row encoding, sums. One launch has no others to wait
for. Each CTA works out the routing and encodes the rows by itself. It multiplies its share of
stage 1 and publishes the sums. It builds the features that its share of stage 2 needs, multiplies
and publishes again. Then it sums up its outputs. The weights of stage 2 are loaded while it waits
for features.

Roles: 8 warps, 64 registers per thread at launch (maxnreg), so that four CTAs fit on an SM. All
    must be resident, since each waits for others: the launch is cooperative, and one that does not
    fit fails.
    consumer: 4 warps, 104 registers.
    producer: 1 warp, 24 registers. Three idle warps fill its warpgroup.

Barriers: two mbarriers a stage.
    ready: 1 arrival, by the producer with the number of bytes of an item. It completes when the TMA
        loads have written them.
    free: 1 arrival, by the consumer when it has read the item.

Pipeline: STAGES stages of an item: 64 × 64 bytes of codes and 256 of shifts. Stage 2 follows
    stage 1 in the same ring. Operands of wgmma stay in shared memory: 1,024 bytes a depth unit, of
    x for one range of the depth, and of `depth` units of features.

Timeline:
    producer: grid_dependency_wait → ids → loads of stage 1 → loads of stage 2, which begin while
        the consumer still waits for features.
    consumer: launch_dependents, grid_dependency_wait → ids, x → encode x → per row unit of stage 1:
        products, publish → per group of stage 2: collect features, encode; per row unit: products,
        publish → collect the sums of its outputs, store.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...device.compat import aggregate, async_load, barrier, reinterpret
from ...device.hopper import consumer_start, producer_start
from ...device.hopper_ptx import LO_SCALE, decode_tables, group_lanes
from ...device.pdl import grid_dependency_wait, launch_dependents
from .encode import encode_step, load_step, row_maximum, row_scale, statistic_of
from .epilogue import ActivationParameters, row_factor
from .few_tokens_shares import (
    Routing,
    Sizes,
    Tables,
    fill_tables,
    first_share,
    flat_layout,
    lane_value,
    make_tables,
    of_columns,
    second_share,
    slot_layout,
)
from .few_tokens_sums import (
    COLUMNS,
    UNIT,
    Exchange,
    Features,
    FirstEpilogue,
    SecondEpilogue,
    build_operand,
    chunk_layout,
    load_output_terms,
    operand_layout,
    publish,
    store_operand,
    store_outputs,
)
from .weight_fragments import accumulator_layout, decode_weights

_ROWS = gl.constexpr(64)
_ITEM_BYTES = gl.constexpr(4096 + 256)
"""Codes and shifts of an item."""
_PRODUCER_WARPS = gl.constexpr(1)
_PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class Ring:
    """Stages of weights in shared memory, an item each.

    codes: uint8 [STAGES, 1, 32, 128]. shifts: uint8 [STAGES, 1, 8, 32]. ready, free: mbarriers.
    """

    codes: gl.shared_memory_descriptor
    shifts: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    STAGES: gl.constexpr


@gluon.jit
def _make_ring(codes, shifts, STAGES: gl.constexpr):
    """Allocate the stages and initialise their mbarriers."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    return Ring(
        codes=gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 32, 128], codes.layout),
        shifts=gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 8, 32], shifts.layout),
        ready=ready,
        free=free,
        STAGES=STAGES,
    )


@aggregate
class Matrix:
    """TMA descriptors of a weight: codes and shifts of a depth unit of a row unit."""

    codes: tma.tensor_descriptor
    shifts: tma.tensor_descriptor


@aggregate
class ProducerArgs:
    """Arguments of the producer. first, second: the weights of both stages."""

    ring: Ring
    first: Matrix
    second: Matrix
    routing: Routing
    sizes: Sizes


@gluon.jit
def _load_item(ring, state, matrix, row_unit, depth_unit):
    """Start the loads of an item, with row units counted over experts; return the next state."""
    mbarrier.wait(ring.free.index(state.stage), state.phase)
    ready = ring.ready.index(state.stage)
    mbarrier.expect(ready, _ITEM_BYTES)
    async_load(matrix.codes, [row_unit, depth_unit * 32, 0], ready, ring.codes.index(state.stage))
    async_load(matrix.shifts, [row_unit, depth_unit * 8, 0], ready, ring.shifts.index(state.stage))
    return state.advance()


@gluon.jit
def _load_first_share(args, state, experts, hit):
    """Load this CTA's items of stage 1; experts: int32 [32] by rank."""
    sizes = args.sizes
    share = first_share(sizes, hit)
    u = share.first // (sizes.rows1 * share.units)
    r = share.first // share.units % sizes.rows1
    k = share.first % share.units
    row_unit = lane_value(experts, u) * sizes.rows1 + r
    for _ in range(share.first, share.last):
        state = _load_item(args.ring, state, args.first, row_unit, share.first_unit + k)
        k += 1
        if k == share.units:
            k = 0
            r += 1
            row_unit += 1
            if r == sizes.rows1:
                r = 0
                u += 1
                row_unit = lane_value(experts, u) * sizes.rows1
    return state


@gluon.jit
def _load_second_share(args, state, experts, hit):
    """Load this CTA's items of stage 2; experts: int32 [32] by rank."""
    sizes = args.sizes
    DEPTH: gl.constexpr = sizes.SPLIT.depth
    first, last = second_share(sizes, hit)
    groups = sizes.groups()
    d = first % DEPTH
    r = first // DEPTH % sizes.rows2
    g = first // (DEPTH * sizes.rows2) % groups
    u = first // (DEPTH * sizes.rows2 * groups)
    row_unit = lane_value(experts, u) * sizes.rows2
    for _ in range(first, last):
        state = _load_item(args.ring, state, args.second, row_unit + r, g * DEPTH + d)
        d += 1
        if d == DEPTH:
            d = 0
            r += 1
            if r == sizes.rows2:
                r = 0
                g += 1
                if g == groups:
                    g = 0
                    u += 1
                    row_unit = lane_value(experts, u) * sizes.rows2
    return state


@gluon.jit
def _produce(args):
    """The producer warp: load the weights of all items of this CTA."""
    grid_dependency_wait()
    place, exists = args.routing.place(gl.arange(0, 32, slot_layout(_PRODUCER_WARPS)))
    groups = group_lanes(args.routing.load_experts(place, exists))
    hit = gl.max(groups.count, 0)
    state = producer_start(args.ring.STAGES)
    state = _load_first_share(args, state, groups.key, hit)
    _load_second_share(args, state, groups.key, hit)


@aggregate
class Activations:
    """Tokens, bfloat16 or MX codes with x_scale. FORMAT, STEPS: of `encode`, for a range."""

    x: gl.tensor
    x_scale: gl.tensor | gl.constexpr
    x_stride: gl.tensor
    x_scale_stride: gl.tensor
    hidden: gl.tensor
    chunks: gl.shared_memory_descriptor
    FORMAT: gl.constexpr
    STEPS: gl.constexpr


@gluon.jit
def _load_tokens(tokens, first_unit, units, num_tokens, TOKENS: gl.constexpr):
    """Load depth units of all tokens, a step each."""
    FORMAT: gl.constexpr = tokens.FORMAT
    BYTES: gl.constexpr = UNIT // 2 if FORMAT.coded and FORMAT.name == "e2m1" else UNIT
    depth = gl.minimum(tokens.hidden - first_unit * UNIT, units * UNIT)
    steps = ()
    for t in gl.static_range(TOKENS):
        start = tokens.x + t * tokens.x_stride + first_unit * BYTES
        scale = tokens.x_scale
        if FORMAT.coded:
            scale += t * tokens.x_scale_stride + first_unit * 4
        known = gl.where(t < num_tokens, depth, 0)
        steps += (load_step(start, scale, 0, known, FORMAT, tokens.STEPS),)  # type: ignore[assignment]
    return steps


@gluon.jit
def _encode_tokens(tokens, steps, column):
    """Encode and store loaded tokens; return the scale of each token's column."""
    scales = gl.zeros_like(column).to(gl.float32)
    columns = ()
    for t in gl.static_range(len(steps)):
        scale, encoding = row_scale(
            row_maximum(statistic_of(steps[t], tokens.FORMAT)), tokens.FORMAT
        )
        columns += encode_step(steps[t], encoding, tokens.FORMAT, tokens.STEPS)
        scales = gl.where(column == t, scale, scales)
    store_operand(tokens.chunks, columns)
    return scales


@aggregate
class ConsumerArgs:
    """Arguments of the consumer. launches: int32 [CTAs], launches that each CTA has counted."""

    ring: Ring
    tables: Tables
    routing: Routing
    sizes: Sizes
    tokens: Activations
    features: Features
    exchange: Exchange
    first: FirstEpilogue
    second: SecondEpilogue
    launches: gl.tensor


@gluon.constexpr_function
def _joined_layout(HI_LO):
    """Sums [64 weight rows, tokens], as wgmma's accumulator [64, 8] has them."""
    rows = [[2, 0], [4, 0], [8, 0]]
    warps = [[16, 0], [32, 0]]
    if HI_LO:
        return gl.DistributedLinearLayout([[1, 0]], [[0, 1], [0, 2], *rows], warps, [], [64, 4])
    registers = [[0, 1], [1, 0]]
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], *rows], warps, [], [64, 8])


@gluon.jit
def _join(sums, HI_LO: gl.constexpr):
    """Add the columns of high and low parts, and relabel rows to weight-row order."""
    if HI_LO:
        hi, lo = sums.reshape([64, 4, 2]).split()
        sums = hi + lo * LO_SCALE
    TOKENS: gl.constexpr = sums.shape[1]
    sums = sums.reshape([4, 2, 8, TOKENS]).permute((0, 2, 1, 3)).reshape([64, TOKENS])
    return gl.convert_layout(sums, _joined_layout(HI_LO), assert_trivial=True)


@gluon.jit
def _multiply_item(ring, state, operand, tables):
    """Multiply an item by an operand [8, 128]: float32 [64, 8], and the next state."""
    LAYOUT: gl.constexpr = accumulator_layout(COLUMNS)
    mbarrier.wait(ring.ready.index(state.stage), state.phase)
    weights = decode_weights(
        ring.codes.index(state.stage).reshape([32, 128]),
        ring.shifts.index(state.stage).reshape([8, 32]),
        tables,
        LAYOUT,
        STEPS=1,
    )
    mbarrier.arrive(ring.free.index(state.stage), count=1)
    sums = warpgroup_mma(
        weights,
        operand.permute((1, 0)),
        gl.zeros((64, COLUMNS), gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma_wait(0, deps=(sums,)), state.advance()


@gluon.jit
def _multiply_first_share(args, state, x_scales, hit, launch, decode):
    """Multiply this CTA's items of stage 1, and publish the sums of each row unit."""
    sizes, epilogue = args.sizes, args.first
    TOKENS: gl.constexpr = sizes.SPLIT.tokens
    HI_LO: gl.constexpr = args.features.FORMAT.name == "hi_lo"
    LAYOUT: gl.constexpr = _joined_layout(HI_LO)
    UNITS: gl.constexpr = args.tokens.STEPS.chunks
    x = reinterpret(args.tokens.chunks, gl.float8e4nv, [UNITS, COLUMNS, UNIT], operand_layout())
    column = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    share = first_share(sizes, hit)
    u = share.first // (sizes.rows1 * share.units)
    r = share.first // share.units % sizes.rows1
    k = share.first % share.units
    item = share.first
    while item < share.last:
        # Factors and biases come from memory: the products hide their latency.
        row = r * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
        expert = gl.max(args.tables.experts.index(u).load(slot_layout(4)), 0)
        factor = row_factor(gl.load(epilogue.reference + expert * (sizes.rows1 * _ROWS) + row))
        bias = gl.zeros_like(factor)
        if epilogue.bias is not None:  # part of the sums that have the first depth unit
            own = (share.first_unit + k == 0) & (row < 2 * epilogue.features)
            place = epilogue.bias + expert * (2 * epilogue.features) + row
            bias = gl.load(place, mask=own, other=0.0).to(gl.float32)
        run = gl.minimum(share.units - k, share.last - item)
        total = gl.zeros((64, COLUMNS), gl.float32, accumulator_layout(COLUMNS))
        for index in range(k, k + run):
            found, state = _multiply_item(args.ring, state, x.index(index), decode)
            total += found
        slot = of_columns(args.tables.slots, u, column, -1, TOKENS)
        scale = x_scales
        if epilogue.WEIGHT_FIRST:
            scale *= of_columns(args.tables.weights, u, column, 0, TOKENS)
        part = 2 * share.part + share.member - (u * sizes.rows1 + r) * share.units // share.length
        place = (part * sizes.SPLIT.all_slots + slot) * (sizes.rows1 * _ROWS)
        value = _join(total, HI_LO) * factor[:, None] * scale[None, :] + bias[:, None]
        place = args.exchange.parts + place[None, :] + row[:, None]
        publish(place, value, (slot >= 0)[None, :], launch)
        item += run
        k = 0
        r += 1
        if r == sizes.rows1:
            r = 0
            u += 1
    return state


@gluon.jit
def _multiply_second_share(args, state, hit, launch, decode):
    """Multiply this CTA's items of stage 2, and publish the sums of each group of a row unit."""
    sizes = args.sizes
    DEPTH: gl.constexpr = sizes.SPLIT.depth
    TOKENS: gl.constexpr = sizes.SPLIT.tokens
    HI_LO: gl.constexpr = args.features.FORMAT.name == "hi_lo"
    LAYOUT: gl.constexpr = _joined_layout(HI_LO)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    WIDE: gl.constexpr = LAYOUT.shape[1]
    h = reinterpret(args.features.chunks, gl.float8e4nv, [DEPTH, COLUMNS, UNIT], operand_layout())
    column = gl.arange(0, WIDE, COLUMN)
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    groups = sizes.groups()
    item, last = second_share(sizes, hit)
    d = item % DEPTH
    r = item // DEPTH % sizes.rows2
    g = item // (DEPTH * sizes.rows2) % groups
    u = item // (DEPTH * sizes.rows2 * groups)
    built = -1
    while item < last:
        if u * groups + g != built:
            built = u * groups + g
            build_operand(args.features, u, g, hit, launch)
        run = gl.minimum(DEPTH - d, last - item)
        total = gl.zeros((64, WIDE), gl.float32, LAYOUT)
        for index in range(d, d + run):
            found, state = _multiply_item(args.ring, state, h.index(index), decode)
            total += _join(found, HI_LO) * args.features.scales.index(index).load(COLUMN)[None, :]
        slot = of_columns(args.tables.slots, u, column, -1, TOKENS)
        half = (d > 0).to(gl.int32)
        place = ((half * groups + g) * sizes.SPLIT.all_slots + slot) * (sizes.rows2 * _ROWS)
        place = args.exchange.sums + place[None, :] + (r * _ROWS + row)[:, None]
        publish(place, total, (slot >= 0)[None, :], launch)
        item += run
        d = 0
        r += 1
        if r == sizes.rows2:
            r = 0
            g += 1
            if g == groups:
                g = 0
                u += 1
    return state


@gluon.jit
def _consume(args):
    """The consumer warps: all products of this CTA, and its outputs."""
    sizes, tokens = args.sizes, args.tokens
    TOKENS: gl.constexpr = sizes.SPLIT.tokens
    LAYOUT: gl.constexpr = _joined_layout(args.features.FORMAT.name == "hi_lo")
    decode = decode_tables()
    launch_dependents()
    grid_dependency_wait()
    counted = args.launches + gl.program_id(0)
    launch = gl.load(counted) + 1  # the same number in all CTAs
    own = first_share(sizes, 0)  # for its range
    steps = _load_tokens(tokens, own.first_unit, own.units, args.routing.num_tokens, TOKENS)
    hit = fill_tables(args.tables, args.routing)
    terms = load_output_terms(args.second, args.routing, sizes, args.first.WEIGHT_FIRST)
    column = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, LAYOUT))
    x_scales = _encode_tokens(tokens, steps, column)
    fence_async_shared()
    barrier()
    gl.store(counted, launch)
    state = consumer_start(args.ring.STAGES)
    state = _multiply_first_share(args, state, x_scales, hit, launch, decode)
    _multiply_second_share(args, state, hit, launch, decode)
    num_tokens = args.routing.num_tokens
    store_outputs(args.second, terms, args.exchange, args.tables, sizes, num_tokens, hit, launch)


@gluon.jit(
    do_not_specialize=[
        "num_tokens",
        "top_k",
        "num_global",
        "features",
        "rows1",
        "depth1",
        "rows2",
        "depth2",
        "x_scale_stride",
    ]
)
def _moe_few_tokens_kernel(
    out,
    code1_desc,
    shift1_desc,
    code2_desc,
    shift2_desc,
    reference1,
    reference2,
    bias1,
    bias2,
    x,
    x_scale,
    topk_ids,
    topk_weights,
    expert_map,
    launches,
    parts,
    sums,
    p0,
    p1,
    p2,
    num_tokens,
    top_k,
    num_global,
    hidden,
    features,
    rows1,
    depth1,
    rows2,
    depth2,
    x_stride,
    x_scale_stride,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    X_FORMAT: gl.constexpr,
    H_FORMAT: gl.constexpr,
    X_STEPS: gl.constexpr,
    H_STEPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WEIGHT_FIRST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute out [num_tokens, hidden]; arguments are described at the structures that hold them.

    Grid: as many CTAs as are resident, four an SM; `launches` has one number for each.
    """
    CHUNKS: gl.constexpr = 8 * X_STEPS.chunks
    DEPTH: gl.constexpr = SPLIT.depth
    TOKEN_COLUMNS: gl.constexpr = COLUMNS // 2 if H_FORMAT.name == "hi_lo" else COLUMNS
    gl.static_assert(num_warps == 4, "the consumer is the default partition")
    ring = _make_ring(code1_desc, shift1_desc, STAGES)
    x_chunks = gl.allocate_shared_memory(gl.float8e4nv, [CHUNKS, COLUMNS, 16], chunk_layout(CHUNKS))
    h_chunks = gl.allocate_shared_memory(gl.float8e4nv, [DEPTH, 8, COLUMNS, 16], chunk_layout(8))
    scales = gl.allocate_shared_memory(gl.float32, [DEPTH, TOKEN_COLUMNS], flat_layout(1))
    tables = make_tables(SPLIT.tokens)
    sizes = Sizes(rows1, depth1, rows2, depth2, gl.num_programs(0), SPLIT)
    routing = Routing(topk_ids, topk_weights, expert_map, num_tokens, top_k, num_global, SPLIT)
    tokens = Activations(x, x_scale, x_stride, x_scale_stride, hidden, x_chunks, X_FORMAT, X_STEPS)
    parameters = ActivationParameters(p0, p1, p2)
    first = FirstEpilogue(reference1, bias1, features, parameters, ACTIVATION, WEIGHT_FIRST)
    second = SecondEpilogue(out, reference2, bias2, hidden)
    exchange = Exchange(parts, sums)
    made = Features(exchange, tables, sizes, first, h_chunks, scales, H_FORMAT, H_STEPS)
    consumer = ConsumerArgs(
        ring=ring,
        tables=tables,
        routing=routing,
        sizes=sizes,
        tokens=tokens,
        features=made,
        exchange=exchange,
        first=first,
        second=second,
        launches=launches,
    )
    producer = ProducerArgs(
        ring, Matrix(code1_desc, shift1_desc), Matrix(code2_desc, shift2_desc), routing, sizes
    )
    gl.warp_specialize(
        [(_consume, (consumer,)), (_produce, (producer,))], [_PRODUCER_WARPS], [_PRODUCER_REGISTERS]
    )
