"""Programs from code objects, and what a listing adds to them: texts, labels, source lines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .code_object import read_kernel
from .decode import Decoded, decode
from .errors import message
from .program import Argument, Instruction, Program
from .text import as_text

_LOCATION = re.compile(r"\.loc\s.*;\s*(\S+:\d+)")
_NO_LOCATION = re.compile(r"\.loc\s+\d+\s+0\s")
_FORM = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


@dataclass(frozen=True)
class _Line:
    """An instruction's text, and its place in the source of the kernel or ""."""

    text: str
    source: str

    @property
    def name(self) -> str:
        return _FORM.sub("", self.text.partition(" ")[0])


def read_program(code_object: bytes, listing: str = "") -> Program:
    """The program of one kernel.

    Args:
        code_object: its ELF file, whose words are decoded.
        listing: its amdgcn text, as Triton's ``asm["amdgcn"]`` holds it. Messages then have its
            texts, labels and source lines; what is executed does not depend on it.

    Raises:
        ValueError: the file is no code object of one kernel for gfx950, or the text is another's.
        DecodingError: a word that is no instruction of gfx950.
    """
    kernel = read_kernel(code_object)
    words = decode(kernel.code)
    if listing:
        lines, labels = _parse_body(listing.partition("\t.section\t.rodata")[0])
        instructions, labels = _named(_matched(words, lines), words, lines, labels)
    else:
        instructions, labels = _unnamed(words)
    arguments = [
        Argument(each[".offset"], each[".size"], each[".value_kind"], each.get(".name", ""))
        for each in kernel.metadata.get("args", ())
    ]
    return Program(
        name=kernel.name,
        instructions=instructions,
        labels=labels,
        arguments=tuple(a for a in arguments if not a.kind.startswith("hidden")),
        hidden={a.kind: a for a in arguments if a.kind.startswith("hidden")},
        kernarg_size=kernel.metadata.get("kernarg_segment_size", 0),
        descriptor=kernel.descriptor,
        metadata={name: each for name, each in kernel.metadata.items() if isinstance(each, int)},
    )


def _unnamed(words: Sequence[Decoded]) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions with texts of the decoder; a label is the place that it stands for."""
    places = {word.address: place for place, word in enumerate(words)}
    found, labels = [], {}
    for word in words:
        target = None
        if word.branch is not None:
            target = f"+{places[word.branch]}"
            labels[target] = places[word.branch]
        instruction = dataclasses.replace(word.instruction, target=target)
        found.append(dataclasses.replace(instruction, text=as_text(instruction)))
    return tuple(found), labels


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
