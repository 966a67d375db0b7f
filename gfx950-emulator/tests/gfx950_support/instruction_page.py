"""Renders docs/instructions.md from the emulator's table and the decoder's opcodes.

Run ``PYTHONPATH=.:tests python -m gfx950_support.instruction_page`` here to write the page.
"""

from __future__ import annotations

import re
from pathlib import Path

from gfx950emu.instructions import TABLE
from gfx950emu.opcodes import opcodes

PAGE = Path(__file__).resolve().parents[2] / "docs/instructions.md"

ENCODINGS = {
    "SOP1": "Scalar, one source",
    "SOP2": "Scalar, two sources",
    "SOPC": "Scalar comparisons",
    "SOPK": "Scalar with a constant",
    "SOPP": "Program control",
    "SMEM": "Scalar memory",
    "VOP1": "Vector, one source",
    "VOP2": "Vector, two sources",
    "VOPC": "Vector comparisons",
    "VOP3": "Vector, up to three sources",
    "VOP3SD": "Vector with a scalar result",
    "VOP3P": "Packed and matrix",
    "VOP3PX2": "Scaled matrix",
    "DS": "LDS",
    "GLOBAL": "Global memory",
    "SCRATCH": "Scratch memory",
    "MUBUF": "Buffers",
}
_UNUSED = "no kernel that was tried has it"
_GRAPHICS = "it belongs to graphics or to a debugger"

REFUSED = {
    "float64 division, roots, reduction of angles": (
        r"v_(rcp|rsq|sqrt|fract)_f64|v_div_\w+_f64|v_trig_preop_f64",
        "the bits of hardware's estimates are not published, or the manual's text cannot be right",
    ),
    "sine, cosine, fractions, legacy exponentials": (
        r"v_(sin|cos|fract|exp_legacy|log_legacy|mul_legacy)_f(16|32)",
        "the reduction of large arguments is not published",
    ),
    "stochastic rounding": (
        r"v_cvt_(scalef32_)?sr_\w+|v_prng_b32",
        "results depend on random bits; " + _UNUSED,
    ),
    "fp6 and bf6": (
        r"v_cvt_scalef32_\w*(fp6|bf6)\w*|ds_read_b96_tr_b6",
        "no MXFP6 kernel exists; matrix instructions refuse these formats, too",
    ),
    "conversions of fp8 and bf8 without scales, or of one value": (
        r"v_cvt_(pk_)?(f32_)?(fp8|bf8)(_f32)?|v_cvt_pk_f32_(fp8|bf8)|v_cvt_f32_bf16"
        r"|v_cvt_scalef32_(f32|f16)_(fp8|bf8)",
        _UNUSED,
    ),
    "sparse matrices": (r"v_smfmac_\w+", _UNUSED),
    "float64, xf32 and blocked matrices": (
        r"v_mfma_(f64_\w+|f32_\w+_xf32|[fi]32_\d+x\d+x\d+_\d+b_\w+|ld_scale_b32)",
        _UNUSED,
    ),
    "dot products": (r"v_dot\w+", _UNUSED),
    "float16 beyond add, multiply, fma, division, min, max": (
        r"v_(mac|madmk|madak|mad|mad_legacy|fma_legacy|ldexp|frexp_mant|div_fixup_legacy"
        r"|min3|max3|med3|pk_fmac|pk_minimum3|pk_maximum3)_f16|v_frexp_exp_i16_f16"
        r"|v_(minimum3|maximum3)_f32",
        _UNUSED,
    ),
    "16-bit integers beyond two sources": (
        r"v_(min3|max3|med3|mad|add|sub)_[iu]16|v_mad_[iu]32_[iu]16|v_pk_\w+_[iu]16"
        r"|v_ashr_pk_\w+|v_cvt_pk_[iu]16_[iu]32|v_sat_pk_u8_i16|v_(add|sub)_i32"
        r"|v_mul_hi_[iu]32_[iu]24|v_swap_b32|v_alignbyte_b32|v_nop",
        _UNUSED,
    ),
    "conversions of graphics": (
        r"v_cvt_(rpi|flr|off|norm|pknorm|pkrtz|pk_u8|pkaccum)_\w+|v_cube\w+|v_lerp_u8"
        r"|v_\w*sad_\w+|v_screen_\w+|v_clrexcp",
        _GRAPHICS,
    ),
    "comparisons that write EXEC, or are constant": (r"v_cmpx_\w+|v_cmp_(f|t|tru)_\w+", _UNUSED),
    "64-bit and rare LDS operations": (r"ds_\w+", _UNUSED),
    "float64 atomics": (r"(global|buffer)_atomic_\w+_f64", _UNUSED),
    "loads to LDS of odd sizes": (r"(global|scratch)_load_lds_\w+", _UNUSED),
    "typed buffers": (r"buffer_(load|store)_format_\w+", _GRAPHICS),
    "scalar buffers, stores and caches": (
        r"s_(buffer|store|dcache|scratch|atc|memtime)\w*",
        _UNUSED,
    ),
    "calls, jumps by register, relative registers": (
        r"s_(getpc|setpc|swappc|call|rfe|rfe_restore|cbranch_g_fork|cbranch_i_fork|cbranch_join)\w*"
        r"|s_(movrel|set_gpr_idx)\w*",
        _UNUSED,
    ),
    "messages, traps, debugging": (
        r"s_(wakeup|setkill|sethalt|sendmsg|trap|icache_inv|incperf|decperf|ttracedata"
        r"|cbranch_cdbg|endpgm_|setvskip|set_valu)\w*",
        _GRAPHICS,
    ),
    "rare scalar arithmetic": (r"s_\w+", _UNUSED),
}
"""Classes of refused mnemonics: what matches them, and why. The first that matches counts."""


def refusal(name: str) -> str:
    """The class of a refused mnemonic."""
    for title, (pattern, _) in REFUSED.items():
        if re.fullmatch(pattern, name):
            return title
    raise KeyError(f"{name}: no class of REFUSED names it")


def mnemonics(encoding: str) -> tuple[list[str], list[str]]:
    """Executed and refused mnemonics of an encoding."""
    names = {entry.name for entry in opcodes(encoding).values()}
    names = {f"{n}_b32" if n.startswith("v_accvgpr") and n[-4:] != "_b32" else n for n in names}
    return sorted(names & TABLE.keys()), sorted(names - TABLE.keys())


def page() -> str:
    """The page's text."""
    found = {encoding: mnemonics(encoding) for encoding in ENCODINGS}
    executed = {name for pair in found.values() for name in pair[0]}
    refused = sorted({name for pair in found.values() for name in pair[1]})
    lines = [
        "# Instructions that the gfx950 emulator knows",
        "",
        "This page is made from the emulator's table; a test compares both. "
        f"Of {len(executed) + len(refused)} mnemonics of gfx950 the emulator knows "
        f"{len(executed)}. It refuses all others, and every modifier without a meaning here, with "
        "`UnknownInstructionError`. Each executed one is compared with AMD's pseudocode or with a "
        "loop written from the manual (`tests/`).",
        "",
        "Assumptions: rounding to nearest even, denormals kept. The transcendental instructions "
        "(`v_exp`, `v_log`, `v_rcp`, `v_rsq`, `v_sqrt`) are correctly rounded, hardware errs by up "
        "to 1 ulp. Sums of matrix instructions are rounded once.",
        "",
        "## Executed",
        "",
    ]
    for encoding, title in ENCODINGS.items():
        names = found[encoding][0]
        if names:
            listed = " ".join(f"`{name}`" for name in names)
            lines += [f"**{title}** ({encoding}, {len(names)}): {listed}", ""]
    lines += ["## Refused", "", "| Class | Why | Mnemonics |", "|---|---|---|"]
    for title, (_, reason) in REFUSED.items():
        names = [name for name in refused if refusal(name) == title]
        listed = " ".join(f"`{name}`" for name in names)
        lines.append(f"| {title} ({len(names)}) | {reason} | {listed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
