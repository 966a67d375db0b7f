"""Layout, loads and stores of rows in steps of CHUNKS * 128 values.

A step is a tensor [chunk, q h, t, j]. In the source the order is (t, q h, j), in storage
(q h, t, j): K is permuted as in the weights (see `formats.layouts`). A thread has 16 stored bytes,
which it gathers by four loads. A row is a tuple of steps; of MX rows each step is two elements,
words and scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def step_layout(WARPS):
    return gl.BlockedLayout([1, 1, 4, 4], [4, 8, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def step_offsets(step, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Offsets of one step.

    Returns source offsets of words [CHUNKS, 8, 4], their block indices (same shape), and target
    offsets of each thread's 16 bytes [CHUNKS, 8].
    """
    LAYOUT: gl.constexpr = step_layout(WARPS)
    NO_BYTE: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    NO_BLOCK: gl.constexpr = gl.SliceLayout(2, NO_BYTE)
    chunk = step * CHUNKS + gl.arange(0, CHUNKS, gl.SliceLayout(1, NO_BLOCK))[:, None]
    word = gl.arange(0, 8, gl.SliceLayout(0, NO_BLOCK))[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, NO_BYTE)))[None, None, :]
    block = (chunk * 4 + word * 0)[:, :, None] + block
    return block * 32 + (word * 4)[:, :, None], block, chunk * 128 + word * 16


@gluon.jit
def _load_values(x, source, mask, WARPS: gl.constexpr):
    """Load four adjacent bfloat16 values per word, [CHUNKS, 8, 4, 4]; 0 where masked."""
    LAYOUT: gl.constexpr = step_layout(WARPS)
    byte = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = source[:, :, :, None] + byte[None, None, None, :]
    return gl.load(x + offsets, mask=mask[:, :, :, None], other=0.0)


@gluon.jit
def _load_codes(x, x_scale, source, block, mask, PACKED: gl.constexpr):
    """Load MX codes, four a word [CHUNKS, 8, 4] int32, and their scale bytes; 0 where masked."""
    scales = gl.load(x_scale + block, mask=mask, other=0).to(gl.int32)
    if PACKED:  # four codes in two bytes, low nibble first
        pairs = (x + source // 2).cast(gl.pointer_type(gl.uint16))
        return gl.load(pairs, mask=mask, other=0).to(gl.int32), scales
    else:
        words = (x + source).cast(gl.pointer_type(gl.int32))
        return gl.load(words, mask=mask, other=0), scales


@gluon.jit
def load_step(
    x,
    x_scale,
    step,
    depth,
    CODED: gl.constexpr,
    PACKED: gl.constexpr,
    CHUNKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load one step as a tuple: bfloat16 values, or (CODED) MX words and scales; 0 past `depth`."""
    source, block, _target = step_offsets(step, CHUNKS, WARPS)
    mask = block * 32 < depth
    if CODED:
        return _load_codes(x, x_scale, source, block, mask, PACKED)
    else:
        return (_load_values(x, source, mask, WARPS),)


@gluon.jit
def load_row(
    x,
    x_scale,
    depth,
    CODED: gl.constexpr,
    PACKED: gl.constexpr,
    STEPS: gl.constexpr,
    CHUNKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Load the first STEPS steps of a row into one flat tuple."""
    row = ()
    for step in gl.static_range(STEPS):
        row += load_step(x, x_scale, step, depth, CODED, PACKED, CHUNKS, WARPS)
    return row


@gluon.jit
def _store_bytes(codes, values, target, padded_depth, CHUNKS: gl.constexpr):
    """Store e4m3 codes of one step [CHUNKS, 8, 4, 4], 16 bytes a thread."""
    flat = values.reshape([CHUNKS, 8, 16])
    offsets = gl.convert_layout(target, gl.SliceLayout(2, flat.type.layout), assert_trivial=True)
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, flat.type.layout)))
    gl.store(
        codes + offsets[:, :, None] + byte[None, None, :],
        flat,
        mask=(offsets < padded_depth)[:, :, None],
    )


@gluon.jit
def _store_words(codes, words, target, padded_depth):
    """Store e4m3 codes of one step, four a word [CHUNKS, 8, 4] int32, 16 bytes a thread."""
    offsets = gl.convert_layout(target, gl.SliceLayout(2, words.type.layout), assert_trivial=True)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, words.type.layout)))
    pointers = (codes + offsets).cast(gl.pointer_type(gl.int32))[:, :, None] + word[None, None, :]
    gl.store(pointers, words, mask=(offsets < padded_depth)[:, :, None])


@gluon.jit
def store_step(
    codes, scale, factor, encoded, target, row, padded_depth, num_rows, CHUNKS: gl.constexpr
):
    """Store one step of sorted row `row` and its scale; lo codes are `num_rows` rows after hi."""
    gl.store(scale + row, factor)
    for part in gl.static_range(len(encoded)):
        own = codes + (row + part * num_rows).to(gl.int64) * padded_depth
        if len(encoded[part].shape) == 3:
            _store_words(own, encoded[part], target, padded_depth)
        else:
            _store_bytes(own, encoded[part], target, padded_depth, CHUNKS)
