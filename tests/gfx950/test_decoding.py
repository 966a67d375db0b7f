"""Words are decoded as they are listed, and the table knows all that kernels use.

Each word is decoded three times: by the executor, by tinygrad's tables, which come from AMD's
machine-readable ISA, and from the text of the listing, which LLVM wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import pytest
import torch

import mxpert
from mxpert.core.target import on_device
from mxpert.testing.gfx950 import MI355X, Emulation
from mxpert.testing.gfx950.decode import DecodingError, decode, decode_at
from mxpert.testing.gfx950.instructions import bind
from mxpert.testing.gfx950.listing import assemble, read_instruction, read_program, text_section
from mxpert.testing.gfx950.opcodes import Opcode, opcodes
from mxpert.testing.gfx950.program import Instruction, Program
from mxpert.testing.problems import MoEShape
from support.exact import exact_moe_problem
from support.gfx950.decoder import as_text, decoded, from_binary
from support.gfx950.pseudocode import PSEUDOCODE
from support.gfx950.text import parse_instruction
from support.gfx950_exchange import turns

pytestmark = pytest.mark.filterwarnings("ignore::mxpert.errors.PerformanceWarning")
"""Weights in the published layout run on the portable kernels, which are wanted, too."""

VECTOR_ENCODINGS = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3P")

FORMS = """
buffer_atomic_add_f32 v0, v20, s[20:23], 0 offen
buffer_atomic_pk_add_bf16 v0, v20, s[20:23], s4 offen offset:16
buffer_load_ushort v20, v12, s[8:11], 0 offen
buffer_load_dwordx4 v12, s[8:11], 0 offen offset:64 lds
buffer_load_dwordx4 v[0:3], v12, s[8:11], 0 offen sc0 nt
ds_read2st64_b64 v[8:11], v4 offset1:2
ds_read_b64_tr_b8 v[98:99], v78 offset:16384
ds_read_b64_tr_b4 v[98:99], v78
ds_read_b96 v[22:24], v12 offset:16
ds_write_b8_d16_hi v22, v12 offset:16
global_atomic_add_f32 v[18:19], v41, off
global_atomic_add v2, v[18:19], v41, off sc0
global_atomic_pk_add_bf16 v18, v41, s[2:3]
global_load_dwordx2 v[2:3], v153, s[16:17] nt
global_load_lds_dword v[2:3], off
global_load_lds_dwordx4 v[2:3], off offset:16
global_load_ubyte v5, v[2:3], off offset:-8
global_store_byte v[0:1], v5, off
global_store_dword v0, v1, s[0:1]
global_store_dwordx4 v[4:5], v[0:3], off
global_store_short v[4:5], v0, off nt
s_andn2_b32 s51, s51, 31
s_andn2_saveexec_b64 s[0:1], s[0:1]
s_ashr_i64 s[0:1], s[0:1], 19
s_bfe_u32 s35, s2, 0x30006
s_bitcmp0_b32 s19, 7
s_bitcmp1_b32 s19, s4
s_brev_b32 s30, -2
s_cmp_gt_u32 s18, 3
s_cmp_lg_u64 s[18:19], 0
s_cmp_lt_u32 s18, 3
s_cmpk_gt_i32 s0, 0x100
s_cmpk_lt_i32 s0, 0x100
s_cmpk_lt_u32 s31, 0x120
s_lshl1_add_u32 s0, s44, s16
s_lshl2_add_u32 s0, s44, s16
s_lshl3_add_u32 s0, s44, s16
s_mul_hi_i32 s6, s34, s9
s_mulk_i32 s17, 0xfa00
s_not_b64 s[62:63], s[40:41]
s_or_saveexec_b64 s[24:25], s[4:5]
s_setprio 3
s_sub_u32 s8, vcc_lo, s8
s_subb_u32 s9, vcc_hi, s9
s_xor_b64 s[4:5], exec, s[6:7]
v_accvgpr_mov_b32 a16, a0
v_add_u16_e32 v2, -2, v15
v_cmp_ge_f32_e32 vcc, s10, v14
v_cmp_le_f32_e64 s[4:5], |v19|, -s10
v_cmp_lt_f32_e32 vcc, s17, v11
v_cmp_lt_i16_sdwa s[4:5], sext(v1), v2 src0_sel:BYTE_1 src1_sel:DWORD
v_cvt_scalef32_pk_bf16_fp8 v141, v39, v153 op_sel:[1,0,0]
v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4 op_sel:[0,0,1,1]
v_fmamk_f32 v0, v1, 0x3f000001, v2
v_fmaak_f32 v0, v1, v2, 0x3f000001
v_lshlrev_b64 v[4:5], 2, v[0:1]
v_mad_i64_i32 v[2:3], s[22:23], v10, s15, v[2:3]
v_mad_u32_u24 v18, v1, 56, v55
v_max3_f32 v11, v11, -v13, |v14|
v_max3_i32 v1, v1, v23, v29
v_max_u16_sdwa v191, v221, v182 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], a[8:11], 0
v_mfma_f32_32x32x16_fp8_bf8 a[0:15], v[4:5], v[6:7], a[0:15]
v_min3_i32 v1, v1, v23, v29
v_min_u32_e32 v1, s18, v18
v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[4:7], v[8:15], a[0:3] cbsz:4 blgp:1
v_mov_b32_dpp v1, v2 row_half_mirror row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v1, v2 row_newbcast:5 row_mask:0x3 bank_mask:0xf bound_ctrl:1
v_mov_b32_dpp v1, v2 wave_shl:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v1, v2 wave_ror:1 row_mask:0xf bank_mask:0xf
v_mov_b64_e32 v[10:11], s[0:1]
v_mul_f32_e64 v1, v2, -2.0 clamp
v_mul_i32_i24_e32 v0, -12, v41
v_pack_b32_f16 v0, v1, v2
v_permlane16_swap_b32_e32 v0, v1
v_pk_add_f32 v[0:1], v[2:3], 1.0 op_sel_hi:[1,0] neg_lo:[1,0] neg_hi:[1,0]
v_pk_add_u16 v0, v1, v2
v_pk_lshlrev_b16 v84, 7, v85 op_sel_hi:[0,1]
v_pk_max_u16 v95, v84, 64 op_sel_hi:[1,0]
v_pk_mov_b32 v[42:43], v[24:25], v[22:23] op_sel:[1,0]
v_sub_co_u32_e64 v22, s[24:25], v0, v2
v_subb_co_u32_e64 v23, s[24:25], v1, v3, s[24:25]
v_subrev_f32_e32 v8, s7, v12
v_trunc_f32_e32 v8, v1
v_writelane_b32 v194, s19, 0
v_add_f64 v[0:1], -v[2:3], 1.0
v_cmp_class_f64_e64 s[0:1], v[2:3], s26
v_cvt_i32_f64_e32 v17, v[6:7]
v_fma_f16 v8, v1, -v2, v3 op_sel:[1,0,0,1]
v_fma_f64 v[20:21], -v[8:9], |v[12:13]|, 1.0
v_fma_mix_f32 v1, -v2, |v3|, v4 op_sel:[1,0,0] op_sel_hi:[1,0,1]
v_fma_mixhi_f16 v1, v2, s8, -|v4| op_sel_hi:[1,0,0]
v_fmac_f64_e32 v[0:1], 0xc1f00000, v[4:5]
v_ldexp_f64 v[8:9], v[8:9], v17
v_mfma_i32_16x16x64_i8 a[0:3], v[4:7], v[8:11], a[0:3]
v_pk_fma_f16 v0, v1, v2, v3 op_sel:[0,1,0] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
v_rsq_f16_e32 v2, v2
"""
"""Instructions of other kernels and of rarer modifiers, as compilers emit them.

An unscaled f8f6f4 follows one of 4 bytes: after 8 bytes tinygrad takes both for a scaled one."""

NO_PSEUDOCODE = {
    *("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", "s_setprio"),
    *("global_load_lds_dword", "global_load_lds_dwordx4", "s_barrier", "s_endpgm"),
    *("buffer_wbl2", "buffer_inv", "s_memrealtime"),
    *("v_accvgpr_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32"),
    *("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"),
    *("v_mfma_scale_f32_16x16x128_f8f6f4", "v_mfma_scale_f32_32x32x64_f8f6f4"),
}
"""Mnemonics of kernels that the manual describes in prose alone: their tests hold plain loops.
So do those of all matrix instructions and of ds_swizzle, whose pseudocode is one line."""


@functools.cache
def kernels() -> tuple[Any, ...]:
    """Binaries of the library's ops, compiled for gfx950; none is executed."""
    found = []

    class Compiler(Emulation):
        def execute(self, *launch: Any, warmup: bool) -> None:
            found.append(super().execute(*launch, warmup=True))

    with on_device(MI355X, Compiler({})):
        _call_ops()
    return tuple({binary.asm["amdgcn"]: binary for binary in found}.values())


@functools.cache
def programs() -> tuple[Program, ...]:
    """Their code objects, decoded."""
    return tuple(read_program(kernel.asm["amdgcn"], kernel.asm["hsaco"]) for kernel in kernels())


def _call_ops() -> None:
    inputs = exact_moe_problem(MoEShape(256, 256, 4, 2, has_bias=True), 16)
    published, native = inputs.weights, inputs.weights.prepare(device="cpu")
    for name, weights in itertools.product(("mxfp8", "mxfp4", "bf16"), (published, native)):
        mxpert.fused_moe(
            inputs.x,
            weights,
            inputs.topk_weights,
            inputs.topk_ids,
            activation=inputs.activation,
            activation_format=name,
        )
    x, b = torch.zeros(64, 256).bfloat16(), torch.zeros(2, 128, 256).bfloat16()
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"):
        for axis in (-1, -2):
            mxpert.dequantize(mxpert.quantize(x, name, axis=axis))
    offsets = torch.tensor([0, 32, 64], dtype=torch.int32)
    mxpert.quantize_dual(x)
    mxpert.route_topk(torch.zeros(16, 128), 4)
    mxpert.grouped_gemm(x, b, offsets)
    mxpert.grouped_gemm(*(mxpert.quantize(t, "mxfp8_e4m3") for t in (x, b)), offsets)
    mxpert.grouped_wgrad(x, x[:, :128], offsets)
    with turns() as pair:
        pair.dispatch(0, waits=True)
        pair.combine(0)


def differs(read: Instruction, written: Instruction) -> bool:
    """Whether the decoded word is not what the text says. Texts may leave out the suffix e32."""
    forms = {"": "e32", **dict.fromkeys(("e32", "e64", "dpp", "sdwa"))}
    return (
        read.name != written.name
        or read.operands != written.operands
        or dict(read.modifiers) != dict(written.modifiers)
        or read.target != written.target
        or written.encoding not in (read.encoding, forms.get(read.encoding), "")
    )


def test_words_are_what_the_listing_says() -> None:
    """Every instruction of the library's ops: mnemonic, form, operands, modifiers, targets."""
    count = 0
    for program in programs():
        for instruction in program.instructions:
            written = parse_instruction(instruction.text)
            if written.target is not None:
                assert program.labels[written.target] == program.labels[str(instruction.target)]
                written = dataclasses.replace(written, target=instruction.target)
            assert not differs(instruction, written), (program.name, instruction.text, instruction)
            count += 1
    assert count > 15_000


def test_words_are_what_other_tables_say() -> None:
    """The same words by tinygrad's decoder, padding included."""
    for kernel in kernels():
        words = decode(text_section(kernel.asm["hsaco"]))
        for word, found in zip(words, decoded(kernel.asm["hsaco"]), strict=True):
            assert as_text(word.instruction) == from_binary(found), (hex(word.address), word)


def test_forms_are_their_encodings() -> None:
    """Assembled by LLVM, decoded by tinygrad and by the executor, and read as text."""
    lines = FORMS.strip().splitlines()
    source = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n\t.text\n' + "".join(
        f"\t{line}\n" for line in lines
    )
    code_object = assemble(source)
    words = decode(text_section(code_object))
    binary = list(map(from_binary, decoded(code_object)))
    assert len(words) == len(binary) == len(lines)
    for line, word, found in zip(lines, words, binary, strict=True):
        assert as_text(word.instruction) == found, line
        assert not differs(word.instruction, parse_instruction(line)), line


def plain_text(encoding: str, entry: Opcode) -> str:
    """An instruction with registers of the sizes that the table states."""
    bank = "s" if encoding.startswith("S") else "v"
    ranges = [(8 * place, size) for place, size in enumerate(entry.sizes)]
    if encoding.startswith("VOP"):
        ranges = [(16 * place, size) for place, size in enumerate(entry.sizes)]
    operands = [f"{bank}[{k}:{k + size - 1}]" if size > 1 else f"{bank}{k}" for k, size in ranges]
    operands = {
        "VOPC": ["vcc", *operands],
        "VOP3SD": [*operands[:1], "s[2:3]", *operands[1:]],
        "SOPK": [*operands, "5"],
    }.get(encoding, operands)
    return f"{entry.name} {', '.join(operands)}".rstrip()


OTHER_FORMS = re.compile(
    r"ds_gws_sema.*|s_set_gpr_idx_on|s_setreg.*|v_(clrexcp|readfirstlane_b32|readlane_b32)|"
    r"v_writelane_b32|v_accvgpr_.*|v_(fmamk|fmaak)_f32|v_(madmk|madak)_f16|"
    r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32|v_cndmask_b32|v_mfma_ld_scale_b32|"
    r"v_mfma_scale_.*|v_mfma_.*xf32|v_nop"
)
"""Opcodes whose text has other operands than registers of these sizes, or that LLVM refuses for
gfx950; `FORMS` has those that kernels use."""


@pytest.mark.parametrize("encoding", ["SOP1", "SOP2", "SOPC", "SOPK", "DS", *VECTOR_ENCODINGS])
def test_opcodes_and_sizes_are_those_of_llvm(encoding: str) -> None:
    """Assembled from the table's name and sizes, a word decodes to the same name and sizes."""
    entries = [e for e in opcodes(encoding).values() if not OTHER_FORMS.fullmatch(e.name)]
    assert entries
    for entry in entries:
        text = plain_text(encoding, entry)
        found = read_instruction(text)
        sizes = [each.count for each in found.operands if each.kind in "vs"]
        extra = {"VOPC": 1, "VOP3SD": 1}.get(encoding, 0)  # the mask
        assert found.name == entry.name, text
        assert sorted(sizes) == sorted([*entry.sizes, *[2] * extra]), text


MISREAD = {
    "v_mov_b32_dpp v1, v2 row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:0": ("bound_ctrl", 1),
    "v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[0:7], v[8:15], a[0:3], v16, v17": (
        "op_sel_hi",
        (0, 0, 0),
    ),
}
"""Texts that say something else than they seem to, and the modifier that their word has."""


@pytest.mark.parametrize("text", MISREAD)
def test_the_word_decides(text: str) -> None:
    name, value = MISREAD[text]
    assert read_instruction(text).modifiers[name] == value


@pytest.mark.parametrize("bit", range(64))
def test_each_bit_of_a_word_counts(bit: int) -> None:
    """A word with one other bit is another instruction, or none; three fields change nothing."""
    plain = "v_fma_f32 v1, v2, v3, v4"
    code = bytearray(text_section(assemble(_HEAD + plain)))
    first = decode_at(bytes(code), 0).instruction
    code[bit // 8] ^= 1 << bit % 8
    try:
        second = decode_at(bytes(code), 0).instruction
    except DecodingError:
        return
    assert second != first


_HEAD = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n\t.text\n\t'


@pytest.mark.parametrize("word", ["ffffffff", "0000e0d900000000", "0000ffd200000000"])
def test_what_is_no_instruction_is_refused(word: str) -> None:
    with pytest.raises(DecodingError, match="at 0x0"):
        decode_at(bytes.fromhex(word), 0)


def used() -> set[str]:
    """Mnemonics of the kernels above and of `FORMS`."""
    names = {read_instruction(line).name for line in FORMS.strip().splitlines()}
    for program in programs():
        names |= {instruction.name for instruction in program.instructions}
    return names


def test_table_knows_what_kernels_use() -> None:
    """Every instruction binds: all operands and modifiers have a meaning."""
    for program in programs():
        for instruction in program.instructions:
            bind(instruction, program)
    for line in FORMS.strip().splitlines():
        bind(read_instruction(line), programs()[0])
    assert len(used()) >= 230


def test_semantics_are_tested() -> None:
    """What the pseudocode does not describe is known by name."""
    undescribed = {name for name in used() if name not in PSEUDOCODE}
    assert undescribed == NO_PSEUDOCODE & used()
    assert not NO_PSEUDOCODE & PSEUDOCODE.keys()
