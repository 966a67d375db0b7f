"""Instructions of gfx950 that Gluon has no operation for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _decode_words():
    """Assembly that decodes four words of e2m1 codes, two codes an instruction.

    Operands 0 to 15 are results, 16 to 19 the words, 20 to 23 their scales; op_sel selects a byte.
    The compiler does not see what assembly writes when it keeps distances to MFMA: eight wait
    states let an MFMA of four passes write its result before one of these replaces it.
    """
    lines = ["s_nop 7"]
    for word in range(4):
        for byte in range(4):
            result = 8 * (word % 2) + 2 * byte + word // 2
            selected = f" op_sel:[{byte % 2},{byte // 2},0]" if byte else ""
            operands = f"${result}, ${16 + word}, ${20 + word}"
            lines.append(f"v_cvt_scalef32_pk_bf16_fp4 {operands}{selected}")
    return "\n".join(lines)


_CONSTRAINTS = gl.constexpr(",".join(["=&v"] * 16 + ["v"] * 8))


@gluon.jit
def decode_e2m1(words, scale):
    """Bfloat16 values of e2m1 codes times a power of two, exact.

    Args:
        words: uint32 [slices, fragments, 64, 4], eight codes each; a thread holds all four.
        scale: float32 like `words`; only the exponent field counts.

    Returns:
        Bfloat16 [slices, fragments, 64, 32], in the order of the codes.
    """
    parts = gl.inline_asm_elementwise(
        _decode_words(),
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


@gluon.jit
def _join(parts, first: gl.constexpr, stride: gl.constexpr):
    """Join eight tensors along three new dimensions, the lowest bit of the index last."""
    if stride == 8:
        return parts[first]
    else:
        low = _join(parts, first, 2 * stride)
        return gl.join(low, _join(parts, first + stride, 2 * stride))
