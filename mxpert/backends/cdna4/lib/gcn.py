"""Instructions of gfx950 that Gluon has no operation for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_DECODE_WORD = gl.constexpr(
    """
    v_cvt_scalef32_pk_bf16_fp4 $0, $4, $5
    v_cvt_scalef32_pk_bf16_fp4 $1, $4, $5 op_sel:[1,0,0]
    v_cvt_scalef32_pk_bf16_fp4 $2, $4, $5 op_sel:[0,1,0]
    v_cvt_scalef32_pk_bf16_fp4 $3, $4, $5 op_sel:[1,1,0]
    """
)
"""Decode the eight e2m1 codes of a word, two an instruction; op_sel selects the byte."""

_EARLY = gl.constexpr("=&v,=&v,=&v,=&v,v,v,v,v,v")


@gluon.jit
def decode_e2m1(codes, scale):
    """Bfloat16 values of e2m1 codes times a power of two, exact.

    Args:
        codes: uint8, two codes a byte; a thread holds runs of four bytes in the last dimension.
        scale: float32, the power of two of each byte; only its exponent field counts.

    Returns:
        Two bfloat16 tensors shaped like `codes`. Of four bytes they hold codes 0 to 3 and 4 to 7.
    """
    return gl.inline_asm_elementwise(
        _DECODE_WORD,
        _EARLY,
        [codes, scale],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
