"""Layout, loads and stores of rows in steps of `chunks` * 128 values.

A step is a tensor [chunk, q h, t, j]. In the source the order is (t, q h, j), in storage
(q h, t, j): K is permuted as in the weights (see `layout.py`). A thread has 16 stored bytes,
which it gathers by four loads. A step of bfloat16 is a tensor, a step of MX codes a `CodedStep`.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.compat import aggregate


@dataclass(frozen=True)
class RowSteps:
    """How a program divides a row. Kernels take it as one constexpr.

    Args:
        chunks: depth units of 128 values in a step, a power of two.
        warps: warps of the program.
        held: steps that the program keeps in registers.
        whole: whether these are all steps of a row.
    """

    chunks: int
    warps: int
    held: int = 1
    whole: bool = True


@aggregate
class CodedStep:
    """One step of an MX row: words of four codes [chunks, 8, 4] int32, and their scale bytes."""

    words: gl.tensor
    scales: gl.tensor


@aggregate
class RowsOut:
    """Where encoded rows go: pointers to e4m3 codes and float32 scales.

    padded_depth: bytes of a row of codes. num_rows: rows of hi codes; lo codes follow them.
    """

    codes: gl.tensor
    scale: gl.tensor
    padded_depth: gl.tensor
    num_rows: gl.tensor


@gluon.constexpr_function
def step_layout(STEPS):
    """Layout of a step [chunk, q h, t, j]: a thread holds the 16 bytes that it stores."""
    return gl.BlockedLayout([1, 1, 4, 4], [4, 8, 1, 1], [STEPS.warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def step_offsets(step, STEPS: gl.constexpr):
    """Offsets of one step.

    Returns source offsets of words [chunks, 8, 4], their block indices (same shape), and target
    offsets of each thread's 16 bytes [chunks, 8].
    """
    LAYOUT: gl.constexpr = step_layout(STEPS)
    NO_BYTE: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    NO_BLOCK: gl.constexpr = gl.SliceLayout(2, NO_BYTE)
    CHUNKS: gl.constexpr = STEPS.chunks
    chunk = step * CHUNKS + gl.arange(0, CHUNKS, gl.SliceLayout(1, NO_BLOCK))[:, None]
    word = gl.arange(0, 8, gl.SliceLayout(0, NO_BLOCK))[None, :]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, NO_BYTE)))[None, None, :]
    block = (chunk * 4 + word * 0)[:, :, None] + block  # word * 0 broadcasts to [chunks, 8]
    return block * 32 + (word * 4)[:, :, None], block, chunk * 128 + word * 16


@gluon.jit
def _load_values(x, source, mask, STEPS: gl.constexpr):
    """Load four adjacent bfloat16 values per word, [chunks, 8, 4, 4]; 0 where masked."""
    LAYOUT: gl.constexpr = step_layout(STEPS)
    byte = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    offsets = source[:, :, :, None] + byte[None, None, None, :]
    return gl.load(x + offsets, mask=mask[:, :, :, None], other=0.0)


@gluon.jit
def _load_codes(x, x_scale, source, block, mask, PACKED: gl.constexpr):
    """Load MX codes and their scale bytes as a CodedStep; 0 where masked."""
    scales = gl.load(x_scale + block, mask=mask, other=0).to(gl.int32)
    if PACKED:  # four codes in two bytes, low nibble first
        pairs = (x + source // 2).cast(gl.pointer_type(gl.uint16))
        words = gl.load(pairs, mask=mask, other=0).to(gl.int32)
    else:
        words = gl.load((x + source).cast(gl.pointer_type(gl.int32)), mask=mask, other=0)
    return CodedStep(words, scales)


@gluon.jit
def load_step(x, x_scale, step, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Load one step of the row at `x`: bfloat16 values or a CodedStep; 0 past `depth`.

    FORMAT: a `RowFormat` (see `encode_codes`).
    """
    source, block, _target = step_offsets(step, STEPS)
    mask = block * 32 < depth
    if FORMAT.coded:
        return _load_codes(x, x_scale, source, block, mask, PACKED=FORMAT.name == "e2m1")
    else:
        return _load_values(x, source, mask, STEPS)


@gluon.jit
def load_row(x, x_scale, depth, FORMAT: gl.constexpr, STEPS: gl.constexpr):
    """Load the first `held` steps of a row into a tuple."""
    HELD: gl.constexpr = STEPS.held
    row = ()
    for step in gl.static_range(HELD):
        row += (load_step(x, x_scale, step, depth, FORMAT, STEPS),)  # type: ignore[assignment]
    return row


@gluon.jit
def _store_bytes(codes, values, target, padded_depth):
    """Store e4m3 codes of one step [chunks, 8, 4, 4], 16 bytes a thread."""
    flat = values.reshape([values.shape[0], 8, 16])
    offsets = gl.convert_layout(target, gl.SliceLayout(2, flat.type.layout), assert_trivial=True)
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, flat.type.layout)))
    gl.store(
        codes + offsets[:, :, None] + byte[None, None, :],
        flat,
        mask=(offsets < padded_depth)[:, :, None],
    )


@gluon.jit
def _store_words(codes, words, target, padded_depth):
    """Store e4m3 codes of one step, four a word [chunks, 8, 4] int32, 16 bytes a thread."""
    offsets = gl.convert_layout(target, gl.SliceLayout(2, words.type.layout), assert_trivial=True)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, words.type.layout)))
    pointers = (codes + offsets).cast(gl.pointer_type(gl.int32))[:, :, None] + word[None, None, :]
    gl.store(pointers, words, mask=(offsets < padded_depth)[:, :, None])


@gluon.jit
def store_step(out, row, scale, encoded, target):
    """Store the scale and one encoded step of sorted row `row`; `encoded` is (codes,) or (hi, lo).

    out: RowsOut. target: offsets in the row [chunks, 8], from `step_offsets`.
    """
    gl.store(out.scale + row, scale)
    for part in gl.static_range(len(encoded)):
        codes = out.codes + (row + part * out.num_rows).to(gl.int64) * out.padded_depth
        if len(encoded[part].shape) == 3:
            _store_words(codes, encoded[part], target, out.padded_depth)
        else:
            _store_bytes(codes, encoded[part], target, out.padded_depth)
