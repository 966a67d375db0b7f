"""Order of tiles on gfx950's eight dies (XCDs), each with an L2 of its own."""

from __future__ import annotations

from typing import Any

from triton.backends.amd.compiler import HIPOptions
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from .compat import reinterpret

# ---- Instructions of gfx950 that Gluon has no operation for.

WITHOUT_ACCUMULATOR_REGISTERS: dict[str, Any] = (
    {"llvm_fn_attrs": (("amdgpu-agpr-alloc", "0,0"),)}
    if "llvm_fn_attrs" in HIPOptions.__dataclass_fields__
    else {"waves_per_eu": 2}
)
"""Launch options that keep the sums of MFMA in vector registers; otherwise operands and sums can be
copied to accumulator registers and back. Triton 3.6 lacks the option; its LLVM uses accumulator
registers only where a wave may have more than 256 registers."""


@gluon.jit
def opaque(words):
    """Return int32 `words` unchanged, as a value of which the compiler knows nothing.

    LLVM otherwise follows single bytes of a word through their way to an MFMA and puts the word
    together again, byte by byte.
    """
    return gl.inline_asm_elementwise("", "=v,0", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _decode_words(NEAR_MFMA):
    """Assembly that decodes four words of e2m1 codes, two codes an instruction.

    Operands 0 to 15 are results, 16 to 19 the words, 20 to 23 their scales; op_sel selects a byte.
    The compiler does not see what assembly writes when it keeps distances to MFMA: with NEAR_MFMA
    eight wait states let one of four passes write its result before one of these replaces it.
    """
    lines = ["s_nop 7"] if NEAR_MFMA else []
    for word in range(4):
        for byte in range(4):
            result = 8 * (word % 2) + 2 * byte + word // 2
            selected = f" op_sel:[{byte % 2},{byte // 2},0]" if byte else ""
            operands = f"${result}, ${16 + word}, ${20 + word}"
            lines.append(f"v_cvt_scalef32_pk_bf16_fp4 {operands}{selected}")
    return "\n".join(lines)


_CONSTRAINTS = gl.constexpr(",".join(["=&v"] * 16 + ["v"] * 8))


@gluon.jit
def decode_e2m1(words, scale, NEAR_MFMA: gl.constexpr = True):
    """Bfloat16 values of e2m1 codes times a power of two, exact.

    Args:
        words: uint32 [slices, fragments, 64, 4], eight codes each; a thread holds all four.
        scale: float32 like `words`; only the exponent field counts.
        NEAR_MFMA: whether an MFMA may stand right before this.

    Returns:
        Bfloat16 [slices, fragments, 64, 32], in the order of the codes.
    """
    parts = gl.inline_asm_elementwise(
        _decode_words(NEAR_MFMA),
        _CONSTRAINTS,
        [words, scale],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=4,
    )
    # Part 4 w + b at place 2 m + o holds code o of byte b of word 2 m + w.
    SLICES: gl.constexpr = words.shape[0]
    FRAGMENTS: gl.constexpr = words.shape[1]
    joined = _join(parts, 0, 1).reshape(SLICES, FRAGMENTS, 64, 2, 2, 2, 2, 2)  # m, o, w, b1, b0
    return joined.permute(0, 1, 2, 3, 5, 6, 7, 4).reshape(SLICES, FRAGMENTS, 64, 32)


@gluon.constexpr_function
def _decode_bytes():
    """Assembly that decodes four words of e4m3 codes, two codes an instruction.

    Operands 0 to 7 are results, 8 to 11 the words, 12 to 15 their scales; op_sel selects a half.
    The wait states are those of `_decode_words`.
    """
    lines = ["s_nop 7"]
    for word in range(4):
        for half in range(2):
            result = 2 * (2 * (word % 2) + half) + word // 2
            selected = " op_sel:[1,0,0]" if half else ""
            operands = f"${result}, ${8 + word}, ${12 + word}"
            lines.append(f"v_cvt_scalef32_pk_bf16_fp8 {operands}{selected}")
    return "\n".join(lines)


_BYTE_CONSTRAINTS = gl.constexpr(",".join(["=&v"] * 8 + ["v"] * 8))


@gluon.jit
def decode_e4m3(words, scale):
    """Bfloat16 values of e4m3 codes times a power of two, exact.

    Args:
        words: uint32 [slices, halves of fragments, 64, 4], four codes each; a thread holds all.
        scale: float32 like `words`; only the exponent field counts.

    Returns:
        Bfloat16 [slices, halves of fragments, 64, 16], in the order of the codes.
    """
    first, second, third, fourth = gl.inline_asm_elementwise(
        _decode_bytes(),
        _BYTE_CONSTRAINTS,
        [words, scale],
        dtype=(gl.bfloat16,) * 4,
        is_pure=True,
        pack=4,
    )
    # Part 2 w + q at place 2 m + o holds code o of half q of word 2 m + w.
    SLICES: gl.constexpr = words.shape[0]
    FRAGMENTS: gl.constexpr = words.shape[1]
    low, high = gl.join(first, third), gl.join(second, fourth)
    joined = gl.join(low, high).reshape(SLICES, FRAGMENTS, 64, 2, 2, 2, 2)  # m, o, w, q
    return joined.permute(0, 1, 2, 3, 5, 6, 4).reshape(SLICES, FRAGMENTS, 64, 16)


@gluon.jit
def _join(parts, first: gl.constexpr, stride: gl.constexpr):
    """Join eight tensors along three new dimensions, the lowest bit of the index last."""
    if stride == 8:
        return parts[first]
    else:
        low = _join(parts, first, 2 * stride)
        return gl.join(low, _join(parts, first + stride, 2 * stride))


@gluon.constexpr_function
def _one_value_a_thread(WARPS):
    """Layout of one value in each thread."""
    return gl.BlockedLayout([1], [64], [WARPS], [0])


@gluon.jit
def scheduling_fence():
    """Keep every instruction on its side of this point; emits no instruction.

    LLVM schedules between boundaries, and an instruction that writes EXEC is one. The empty
    assembly says that it does. Triton 3.9 has `amd.hint.sched_barrier`, Triton 3.6 has nothing
    else.
    """
    LAYOUT: gl.constexpr = _one_value_a_thread(gl.num_warps())
    nothing = gl.full([64 * gl.num_warps()], 0, gl.int32, LAYOUT)
    gl.inline_asm_elementwise("", "={exec},n", [nothing], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def delay_half_of_waves(SECOND: gl.constexpr):
    """One barrier for half of a workgroup's waves: the second half if SECOND, else the first.

    Called with SECOND it makes the second half lag one barrier behind the first, which therefore
    executes other code at the same time. The call without SECOND ends that. Each barrier between
    them is one that both halves reach at different places.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _one_value_a_thread(WARPS)
    thread = gl.arange(0, 64 * WARPS, LAYOUT)
    first_of_second = gl.full([64 * WARPS], 32 * WARPS, gl.int32, LAYOUT)
    COMPARE: gl.constexpr = "s_cmp_lt_u32" if SECOND else "s_cmp_ge_u32"
    gl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1\n" + COMPARE + " $0, $2\ns_cbranch_scc1 .Lnot_delayed${:uid}\n"
        "s_waitcnt lgkmcnt(0)\ns_barrier\n.Lnot_delayed${:uid}:",
        "=&s,v,n,~{scc}",
        [thread, first_of_second],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def set_priority(PRIORITY: gl.constexpr):
    """Priority of this wave among those of its SIMD, 0 to 3; also a scheduling fence."""
    LAYOUT: gl.constexpr = _one_value_a_thread(gl.num_warps())
    value = gl.full([64 * gl.num_warps()], PRIORITY, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        "s_setprio $1", "={exec},n", [value], dtype=gl.int64, is_pure=False, pack=1
    )


# ---- Two wave groups that alternate: while one reads LDS and starts copies, the other runs MFMA.
#
# A workgroup has eight waves, two on each SIMD. Waves 0 to 3 are the early group, waves 4 to 7 the
# late one, so each SIMD has a wave of both. The program is a sequence of memory phases and compute
# phases with a barrier after each. The late group runs one phase behind: it waits at one more
# barrier before the first phase, and the early group at one more after the last.
#
#     early:  memory 0 | compute 0 | memory 1  | compute 1 | …         | (waits)
#     late:   (waits)  | memory 0  | compute 0 | memory 1  | compute 1 | …
#
# The memory phase has the higher priority: its few instructions go ahead of the other group's MFMA,
# which keep the matrix cores busy anyway.

NUM_WARPS = gl.constexpr(8)
"""Waves of a workgroup: two groups of four."""


@gluon.jit
def enter_phases():
    """Put the late group one phase behind; comes after a barrier of all waves."""
    delay_half_of_waves(True)


@gluon.jit
def leave_phases():
    """Let the early group wait until the late one has finished its last phase."""
    delay_half_of_waves(False)


@gluon.jit
def end_memory(COPIES: gl.constexpr):
    """End a memory phase: wait for this wave's LDS reads and for all but COPIES groups of copies.

    Triton places ``s_waitcnt lgkmcnt(0)`` and ``s_barrier`` after the wait.
    """
    async_copy.wait_group(COPIES)
    set_priority(0)


@gluon.jit
def end_compute(COPIES: gl.constexpr):
    """End a compute phase. COPIES: as in the memory phase before, so that nothing is waited for."""
    scheduling_fence()
    async_copy.wait_group(COPIES)
    set_priority(1)


# ---- Tiles of codes in LDS: copied straight from global memory, read as MFMA fragments.
#
# A row of a tile holds 128 bytes of the contracted dimension in eight chunks of 16 bytes. Chunk c
# of row r lies at place ``c ^ (r / 2 % 8)``, so that the 16 rows of a fragment touch all 64 banks.
# A direct copy writes LDS in the order of lanes; therefore each lane reads the chunk that belongs
# at its place.

ROW_BYTES = gl.constexpr(128)

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Rows one after the other, as a direct copy writes them."""

SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 8, [1, 0]))
"""The order in which fragments are read."""

COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 8], [NUM_WARPS.value, 1], [1, 0]))
"""Layout of a copy: 16 bytes a lane, 8 rows a wave, 64 rows an instruction of all waves."""


@gluon.jit
def chunk_columns(ROWS: gl.constexpr):
    """Column that each byte of LDS holds, int32 [ROWS, 128] in `COPY`."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, ROW_BYTES, gl.SliceLayout(0, COPY))
    columns = column[None, :] ^ (row // 2 % 8 * 16)[:, None]
    return gl.max_contiguous(gl.multiple_of(columns, [1, 16]), [1, 16])


@gluon.jit
def row_offsets(rows, pitch):
    """Byte offsets [ROWS, 128] of the columns `chunk_columns` of `rows`, int32 [ROWS]."""
    offsets = rows[:, None] * pitch + chunk_columns(rows.shape[0])
    return gl.max_contiguous(gl.multiple_of(offsets, [1, 16]), [1, 16])


@gluon.jit
def copy_rows(memory, slot, base, offsets, lead, depth):
    """Start copying a tile to ``memory[slot]``, [ROWS, 128] bytes; columns lead … depth, others 0.

    base: pointer to column 0. offsets: of `row_offsets`. lead, depth: multiples of 16, as the
    compiler can see: chunks are copied whole or not at all.
    """
    ROWS: gl.constexpr = offsets.shape[0]
    columns = chunk_columns(ROWS)
    target = reinterpret(memory.index(slot), gl.uint8, [ROWS, ROW_BYTES], PLAIN)
    inside = (columns >= lead) & (columns < depth)
    async_copy.buffer_load_to_shared(target, base, offsets, mask=inside)


NUM_XCDS = gl.constexpr(8)
"""Workgroup p runs on die p % 8."""


@gluon.jit
def first_tile():
    """First tile of this workgroup; the number of workgroups is a multiple of 8.

    Each die gets consecutive tiles, which share operands in its L2. The workgroup's further tiles
    are `num_programs` apart.
    """
    program = gl.program_id(0)
    return program % NUM_XCDS * (gl.num_programs(0) // NUM_XCDS) + program // NUM_XCDS


@gluon.jit
def in_band(tile, row_tiles, column_tiles, BAND: gl.constexpr):
    """Row tile and column tile of tile number `tile` in a matrix of row_tiles x column_tiles.

    BAND row tiles of the same column tile follow each other.
    """
    band = tile // (BAND * column_tiles)
    inside = tile - band * BAND * column_tiles
    height = gl.maximum(gl.minimum(BAND, row_tiles - band * BAND), 1)
    column = inside // height
    return band * BAND + inside - column * height, column
