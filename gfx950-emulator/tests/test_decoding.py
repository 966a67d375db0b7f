"""Words are decoded as they are listed.

Each word is decoded three times: by the emulator, by tinygrad's tables, which come from AMD's
machine-readable ISA, and from the text, which LLVM assembles. The emulator's own text is read back.
"""

from __future__ import annotations

import re

import pytest

from gfx950_support.assembler import assembled_code, read_instruction
from gfx950_support.decoder import as_text as plain
from gfx950_support.decoder import decoded, from_binary
from gfx950_support.forms import FORMS, differs
from gfx950_support.text import parse_instruction
from gfx950emu.decode import DecodingError, decode, decode_at
from gfx950emu.opcodes import Opcode, opcodes
from gfx950emu.text import as_text

VECTOR_ENCODINGS = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3P")


def test_forms_are_their_encodings() -> None:
    """Assembled by LLVM, decoded by tinygrad and by the executor, and read as text."""
    lines = FORMS.strip().splitlines()
    code = assembled_code(*lines)
    words = decode(code)
    binary = list(map(from_binary, decoded(code)))
    assert len(words) == len(binary) == len(lines)
    for line, word, found in zip(lines, words, binary, strict=True):
        assert plain(word.instruction) == found, line
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
    code = bytearray(assembled_code(plain))
    first = decode_at(bytes(code), 0).instruction
    code[bit // 8] ^= 1 << bit % 8
    try:
        second = decode_at(bytes(code), 0).instruction
    except DecodingError:
        return
    assert second != first


@pytest.mark.parametrize("word", ["ffffffff", "0000e0d900000000", "0000ffd200000000"])
def test_what_is_no_instruction_is_refused(word: str) -> None:
    with pytest.raises(DecodingError, match="at 0x0"):
        decode_at(bytes.fromhex(word), 0)


@pytest.mark.parametrize("line", FORMS.strip().splitlines())
def test_the_text_of_a_word_says_what_it_is(line: str) -> None:
    """Assembled again, it is the same word; most texts are those of LLVM to the letter."""
    code = assembled_code(line)
    assert assembled_code(as_text(decode_at(code, 0).instruction)) == code
