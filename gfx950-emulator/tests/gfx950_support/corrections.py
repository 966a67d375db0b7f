"""Where AMD's pseudocode cannot be what the hardware does, and what it should read.

Each correction replaces a piece of text; `tests/gfx950/test_instructions.py` shows that the
executor differs from the text as published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gfx950_support.pseudocode import PSEUDOCODE


@dataclass(frozen=True)
class Correction:
    """`replacements` of a mnemonic's text, and why."""

    reason: str
    replacements: tuple[tuple[str, str], ...]


_FLUSHES = (
    "the transcendental unit takes denormals as zeros, which is why LLVM scales around it "
    "(AMDGPUISelLowering: needsDenormHandlingF32; v_rcp_f32 does not support denormals)"
)
_ROOT = "the text rounds the root before it divides"
_CLEARS = "GFX9 clears the upper half (LLVM: SITargetLowering::zeroesHigh16BitsOfDest)"


def _flushes(expression: str) -> Correction:
    old = f"D0.f32 = {expression}"
    new = old.replace("S0.f32", "flush(S0.f32)").replace("= ", "= flush(", 1) + ")"
    return Correction(_FLUSHES, ((old, new),))


def _clears(name: str) -> Correction:
    return Correction(_CLEARS, ((PSEUDOCODE[name], "D0.u32 = 0U;\n" + PSEUDOCODE[name]),))


def _rounds(kind: str) -> Correction:
    return Correction(
        "the text adds a half, which is rounded itself and makes +0 of -0",
        ((PSEUDOCODE[f"v_rndne_{kind}"], f"D0.{kind} = rint(S0.{kind})"),),
    )


CORRECTIONS: dict[str, Correction] = {
    "v_exp_f32": _flushes("pow(2.0F, S0.f32)"),
    "v_log_f32": _flushes("log2(S0.f32)"),
    "v_rcp_f32": _flushes("1.0F / S0.f32"),
    "v_rcp_iflag_f32": _flushes("1.0F / S0.f32"),
    "v_rsq_f32": Correction(
        f"{_FLUSHES}; and {_ROOT}", (("1.0F / sqrt(S0.f32)", "flush(rsqrt(flush(S0.f32)))"),)
    ),
    "v_sqrt_f32": _flushes("sqrt(S0.f32)"),
    "v_rndne_f32": _rounds("f32"),
    "v_rndne_f64": _rounds("f64"),
    **{
        f"v_frexp_exp_i32_{kind}": Correction(
            "denormals and zero have the exponent of their value "
            "(LLVM folds llvm.amdgcn.frexp.exp as C's frexp does)",
            ((f"exponent(S0.{kind}) - {bias} + 1", f"frexp_exponent(S0.{kind})"),),
        )
        for kind, bias in (("f32", 127), ("f64", 1023))
    },
    "v_div_fmas_f32": Correction(
        "no division comes out right with 2**32; the RDNA manuals have 2**64 and 2**-64",
        (
            (
                "D0.f32 = 2.0F ** 32 * fma(S0.f32, S1.f32, S2.f32)",
                "D0.f32 = fma_scaled(S0.f32, S1.f32, S2.f32, exponent(S2.f32) > 127 ? 64 : -64)",
            ),
        ),
    ),
    "v_div_scale_f32": Correction(
        "no reciprocal of a float32 is a denormal float64; and with a denormal quotient a "
        "denominator above 2**126, scaled up by 2**64, would be infinite; and what is not scaled "
        "stays as it is",
        (
            ("VCC = 0x0LL;\n", "VCC = 0x0LL;\nD0.f32 = S0.f32;\n"),
            ("1.0 / 64'F(S1.f32) == DENORM.f64", "32'F(1.0 / 64'F(S1.f32)) == DENORM.f32"),
            (
                "// Only scale the denominator\nD0.f32 = ldexp(S0.f32, 64)\nendif\nelsif 32'F",
                "D0.f32 = ldexp(S0.f32, -64)\nendif\nelsif 32'F",
            ),
        ),
    ),
    "v_ldexp_f32": Correction(
        "2.0F ** n alone leaves the range of float32",
        (("S0.f32 * 2.0F ** S1.i32", "ldexp(S0.f32, S1.i32)"),),
    ),
    "v_ldexp_f64": Correction(
        "2.0 ** n alone leaves the range of float64",
        (("S0.f64 * 2.0 ** S1.i32", "ldexp(S0.f64, S1.i32)"),),
    ),
    "v_div_fixup_f32": Correction(
        "a quotient beyond the range is infinite; the text tests for an exponent that is excluded",
        (("exponent(S1.f32) == 255", "exponent(S2.f32) - exponent(S1.f32) > 128"),),
    ),
}


_KEEPS_UPPER = re.compile(
    r"v_(pk|cmp|cmpx|bitop3|mad|fma|med3|min3|max3|div_fixup|cvt_scalef32|cvt_f32|pack)_"
)
"""16 bits in the name, but no result of 16 bits, or one that leaves the upper half."""

CORRECTIONS |= {
    name: _clears(name)
    for name in PSEUDOCODE
    if re.fullmatch(r"v_\w+_[uibf]16|v_cvt_f16_f32", name) and not _KEEPS_UPPER.match(name)
}
CORRECTIONS |= {
    "v_rndne_f16": Correction(
        f"{_rounds('f16').reason}; {_CLEARS}",
        ((PSEUDOCODE["v_rndne_f16"], "D0.u32 = 0U;\nD0.f16 = rint(S0.f16)"),),
    ),
    "v_rsq_f16": Correction(
        f"{_ROOT}; {_CLEARS}", ((PSEUDOCODE["v_rsq_f16"], "D0.u32 = 0U;\nD0.f16 = rsqrt(S0.f16)"),)
    ),
}


def corrected(name: str) -> str:
    """A mnemonic's pseudocode, corrections applied."""
    text = PSEUDOCODE[name]
    if name in CORRECTIONS:
        for old, new in CORRECTIONS[name].replacements:
            if old not in text:
                raise ValueError(f"{name}: the pseudocode has no {old!r}")
            text = text.replace(old, new)
    return text
