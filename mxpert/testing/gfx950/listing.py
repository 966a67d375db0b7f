"""Programs from compiled kernels: the code object says what is executed, the listing names it.

Source of the listing's directives: LLVM's `AMDGPUUsage`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import message
from .decode import BRANCH, Decoded, decode, decode_at
from .program import Argument, Instruction, Program

_TARGET = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n\t.text\n'
_LOCATION = re.compile(r"\.loc\s.*;\s*(\S+:\d+)")
_NO_LOCATION = re.compile(r"\.loc\s+\d+\s+0\s")
_POSITIONS = re.compile(r"^\s*\.(loc|file)\b.*$", re.M)
_METADATA_ARGUMENT = re.compile(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)\s+\.value_kind:\s*(\w+)")
_FORM = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


@dataclass(frozen=True)
class _Line:
    """An instruction's text, and its place in the source of the kernel or ""."""

    text: str
    source: str

    @property
    def name(self) -> str:
        return _FORM.sub("", self.text.partition(" ")[0])


def read_program(listing: str, code_object: bytes | None = None) -> Program:
    """The program of one kernel.

    Args:
        listing: amdgcn text of the kernel, as Triton's ``asm["amdgcn"]`` holds it. Its directives
            give names, arguments and resources; its instructions are used in messages alone.
        code_object: the ELF file of the same kernel (``asm["hsaco"]``), whose words are decoded;
            None assembles the listing.

    Raises:
        ValueError: the text is no gfx950 listing of one kernel, or is not the code object's.
        DecodingError: a word that is no instruction of gfx950.
    """
    code, _, metadata = listing.partition("\t.amdgpu_metadata")
    body, _, descriptor = code.partition("\t.section\t.rodata")
    name = re.search(r"\.amdhsa_kernel\s+(\S+)", descriptor)
    if name is None or not re.search(r'\.amdgcn_target\s+"[^"]*gfx950', body):
        raise ValueError(
            message("gfx950", "listing", "amdgcn text of a kernel for gfx950", repr(listing[:60]))
        )
    lines, labels = _parse_body(body)
    words = decode(text_section(code_object or assemble(body)))
    instructions, labels = _named(_matched(words, lines), words, lines, labels)
    arguments = [
        Argument(int(offset), int(size), kind)
        for offset, size, kind in _METADATA_ARGUMENT.findall(metadata)
    ]
    facts = _integers(r"^ +(?:- )?\.(\w+):\s+(\d+)$", metadata)
    return Program(
        name=name[1],
        instructions=instructions,
        labels=labels,
        arguments=tuple(a for a in arguments if not a.kind.startswith("hidden")),
        hidden={a.kind: a for a in arguments if a.kind.startswith("hidden")},
        kernarg_size=facts.get("kernarg_segment_size", 0),
        descriptor=_integers(r"\.amdhsa_(\w+)\s+(\d+)", descriptor),
        metadata=facts,
    )


@functools.lru_cache(maxsize=4096)
def read_instruction(text: str) -> Instruction:
    """Assemble and decode one instruction. A branch goes to the label that the text names.

    >>> add = read_instruction("v_add_f32_e64 v1, |v2|, -s3 clamp")
    >>> add.name, add.encoding, add.operands[2].neg, add.modifiers["clamp"]
    ('v_add_f32', 'e64', True, True)

    Raises:
        ValueError: gfx950 has no such instruction.
    """
    name, _, label = text.partition(" ")
    target = label.strip() if BRANCH.fullmatch(name) else None
    source = text if target is None else f"{name} 0"
    found = decode_at(text_section(assemble(f"{_TARGET}\t{source}\n")), 0)
    return dataclasses.replace(found.instruction, text=text, target=target)


def assemble(listing: str) -> bytes:
    """The ELF file that Triton's LLVM makes of amdgcn text, without source positions.

    Raises:
        ValueError: LLVM refuses the text; it says why on standard error.
    """
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    plain = _POSITIONS.sub("", listing)
    code_object: bytes = amd.assemble_amdgcn(plain, "gfx950", "")
    if not code_object:
        raise ValueError(message("gfx950", "listing", "a text for gfx950", repr(plain[-80:])))
    return code_object


def text_section(code_object: bytes) -> bytes:
    """The section ``.text`` of an ELF file.

    Raises:
        ValueError: it has none, or an empty one.
    """
    (table,) = struct.unpack_from("<Q", code_object, 40)
    size, count, names = struct.unpack_from("<HHH", code_object, 58)
    sections = [struct.unpack_from("<IIQQQQ", code_object, table + k * size) for k in range(count)]
    strings = sections[names][4]
    for name, _, _, _, offset, length in sections:
        start = strings + name
        if length and code_object[start : code_object.index(b"\0", start)] == b".text":
            return code_object[offset : offset + length]
    raise ValueError(message("gfx950", "code object", "instructions", "none"))


def _integers(pattern: str, text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(pattern, text, re.M)}


def _parse_body(body: str) -> tuple[list[_Line], dict[str, int]]:
    """The instructions' lines, and the number of the line after each label."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    source = ""
    for raw in body.splitlines():
        if ".loc" in raw and (found := _LOCATION.search(raw)):
            source = "" if _NO_LOCATION.search(raw) else found[1]
        text = raw.partition(";")[0].strip()
        if label := re.fullmatch(r"([\w.$]+):", text):
            labels[label[1]] = len(lines)
        elif text and not text.startswith("."):
            lines.append(_Line(text, source))
    return lines, labels


def _matched(words: Sequence[Decoded], lines: Sequence[_Line]) -> list[int]:
    """The number of each line's word. Words of padding, which are s_nop, have no line."""
    numbers, place = [], 0
    for line in lines:
        while place < len(words) and words[place].instruction.name == "s_nop" != line.name:
            place += 1
        if place == len(words) or words[place].instruction.name != line.name:
            got = "its end" if place == len(words) else words[place].instruction.name
            raise ValueError(message("gfx950", "code object", line.text, got))
        numbers.append(place)
        place += 1
    if any(word.instruction.name != "s_nop" for word in words[place:]):
        got = words[place].instruction.name
        raise ValueError(message("gfx950", "code object", "the listing's end", got))
    return numbers


def _named(
    numbers: Sequence[int], words: Sequence[Decoded], lines: Sequence[_Line], labels: dict[str, int]
) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """The lines' instructions with their texts; branches go where their words say."""
    places: dict[int, int] = {}  # of the first line at or after each word
    for place, number in enumerate(numbers):
        first = numbers[place - 1] + 1 if place else 0
        places.update({words[k].address: place for k in range(first, number + 1)})
    names = {place: label for label, place in labels.items()}
    instructions = []
    for number, line in zip(numbers, lines, strict=True):
        word, target = words[number], None
        if word.branch is not None:
            place = places[word.branch]
            target = names.setdefault(place, f"address {word.branch:#x}")
        instructions.append(
            dataclasses.replace(word.instruction, target=target, text=line.text, line=line.source)
        )
    return tuple(instructions), labels | {label: place for place, label in names.items()}
