"""Reads a code object: an ELF file with one kernel, its descriptor and its metadata.

Source: LLVM's `AMDGPUUsage` (code object, kernel descriptor, metadata), the ELF and MessagePack
specifications.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import message, require

_WHAT = "code object"
_AMDGPU, _GFX950 = 224, 0x4F
"""Machine of the ELF file, and its kind in the lowest byte of the flags."""
_SYMBOLS, _NOTES = 2, 7
_METADATA = 32
"""Type of the note with the metadata."""
_RSRC1 = {
    "float_round_mode_32": (12, 2),
    "float_round_mode_16_64": (14, 2),
    "float_denorm_mode_32": (16, 2),
    "float_denorm_mode_16_64": (18, 2),
    "dx10_clamp": (21, 1),
    "ieee_mode": (23, 1),
    "fp16_overflow": (26, 1),
}
_RSRC2 = {
    "user_sgpr_count": (1, 5),
    "system_sgpr_workgroup_id_x": (7, 1),
    "system_sgpr_workgroup_id_y": (8, 1),
    "system_sgpr_workgroup_id_z": (9, 1),
}
_PROPERTIES = {
    "user_sgpr_private_segment_buffer": (0, 1),
    "user_sgpr_dispatch_ptr": (1, 1),
    "user_sgpr_queue_ptr": (2, 1),
    "user_sgpr_kernarg_segment_ptr": (3, 1),
    "user_sgpr_dispatch_id": (4, 1),
}
_PRELOAD = {"user_sgpr_kernarg_preload_length": (0, 7), "user_sgpr_kernarg_preload_offset": (7, 9)}
"""First bit and number of bits of each field, by the name of its directive."""


@dataclass(frozen=True)
class Kernel:
    """The kernel of a code object.

    Args:
        name: its symbol. code: its instructions.
        descriptor: fields of the kernel descriptor, named as the directives ``.amdhsa_``.
        metadata: entries of the kernel in the note, without the dots of their names.
    """

    name: str
    code: bytes = field(repr=False)
    descriptor: Mapping[str, int] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class _Section:
    name: int
    kind: int
    address: int
    offset: int
    size: int
    link: int


def read_kernel(content: bytes) -> Kernel:
    """The kernel of a code object, linked or not.

    Raises:
        ValueError: the file is no code object for gfx950, or has not exactly one kernel.
    """
    is_elf = content[:6] == b"\x7fELF\x02\x01" and len(content) >= 64
    machine = struct.unpack_from("<H", content, 18)[0] if is_elf else 0
    kind = content[48] if is_elf else 0
    require(
        (machine, kind) == (_AMDGPU, _GFX950),
        "gfx950",
        _WHAT,
        need="an ELF file for gfx950",
        got=f"machine {machine}, kind {kind:#x}" if is_elf else repr(content[:8]),
    )
    try:
        return _kernel(content)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(message("gfx950", _WHAT, "a whole file", repr(error))) from error


def _kernel(content: bytes) -> Kernel:
    sections = _sections(content)
    kernels = _metadata(content, sections).get("amdhsa.kernels", [])
    require(len(kernels) == 1, "gfx950", _WHAT, need="one kernel", got=f"{len(kernels)}")
    metadata = {name.removeprefix("."): value for name, value in kernels[0].items()}
    symbols = dict(_symbols(content, sections))
    name = str(metadata["symbol"]).removesuffix(".kd")
    missing = [each for each in (name, f"{name}.kd") if each not in symbols]
    require(not missing, "gfx950", _WHAT, need=f"symbols of {name}", got=f"no {missing}")
    return Kernel(name, symbols[name], _descriptor(symbols[f"{name}.kd"]), metadata)


def _sections(content: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    rows = (struct.unpack_from("<IIQQQQI", content, table + k * size) for k in range(count))
    return [_Section(*row[:2], *row[3:]) for row in rows]


def text_section(content: bytes) -> bytes:
    """The section ``.text`` of an ELF file: all its code, padding included.

    Raises:
        ValueError: it has none, or an empty one.
    """
    sections = _sections(content)
    (names,) = struct.unpack_from("<H", content, 62)
    for each in sections:
        if each.size and _string(content, sections[names].offset + each.name) == ".text":
            return content[each.offset : each.offset + each.size]
    raise ValueError(message("gfx950", _WHAT, "instructions", "none"))


def _string(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _symbols(content: bytes, sections: list[_Section]) -> Iterator[tuple[str, bytes]]:
    """Names of defined symbols, and what stands there: to the section's end if it has no size."""
    for table in sections:
        if table.kind != _SYMBOLS:
            continue
        for place in range(table.offset, table.offset + table.size, 24):
            name, _, _, index, value, size = struct.unpack_from("<IBBHQQ", content, place)
            if name and 0 < index < len(sections):
                section = sections[index]
                start = section.offset + value - section.address
                end = start + size if size else section.offset + section.size
                yield _string(content, sections[table.link].offset + name), content[start:end]


def _metadata(content: bytes, sections: list[_Section]) -> Mapping[str, Any]:
    """What the compiler noted of the kernels."""
    for each in sections:
        place = each.offset
        while each.kind == _NOTES and place < each.offset + each.size:
            name, size, kind = struct.unpack_from("<III", content, place)
            start = place + 12 + (name + 3 & ~3)
            if kind == _METADATA and content[place + 12 :].startswith(b"AMDGPU\0"):
                unpacked: Mapping[str, Any] = _Unpacker(content[start : start + size]).value()
                return unpacked
            place = start + (size + 3 & ~3)
    raise ValueError(message("gfx950", _WHAT, "a note with the kernel's metadata", "none"))


def _descriptor(content: bytes) -> dict[str, int]:
    """The fields of a kernel descriptor of 64 bytes."""
    lds, scratch, kernarg = struct.unpack_from("<III", content, 0)
    rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIHH", content, 48)
    found = {
        "group_segment_fixed_size": lds,
        "private_segment_fixed_size": scratch,
        "kernarg_size": kernarg,
    }
    words = (rsrc1, _RSRC1), (rsrc2, _RSRC2), (properties, _PROPERTIES), (preload, _PRELOAD)
    for word, fields in words:
        found |= {name: word >> bit & (1 << size) - 1 for name, (bit, size) in fields.items()}
    return found


_NUMBERS = dict(enumerate((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), 0xCA))
_SIZES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
"""Forms of MessagePack's numbers, and of the sizes of its strings, by the byte ahead of them."""


class _Unpacker:
    """Reads MessagePack.

    >>> _Unpacker(bytes.fromhex("82a161 92 01cd0100 a162 c3")).value()
    {'a': [1, 256], 'b': True}
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def value(self) -> Any:
        """The next value."""
        kind = self._number(">B")
        if kind < 0x80:
            return kind
        if kind >= 0xE0:
            return kind - 256
        if kind < 0x90 or kind in (0xDE, 0xDF):
            count = kind & 15 if kind < 0x90 else self._number(">H" if kind == 0xDE else ">I")
            return {self.value(): self.value() for _ in range(count)}
        if kind < 0xA0 or kind in (0xDC, 0xDD):
            count = kind & 15 if kind < 0xA0 else self._number(">H" if kind == 0xDC else ">I")
            return [self.value() for _ in range(count)]
        if kind < 0xC0 or kind in _SIZES:
            size = kind & 31 if kind < 0xC0 else self._number(_SIZES[kind])
            self._place += size
            return self._content[self._place - size : self._place].decode(errors="replace")
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind]

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self._content, self._place)
        self._place += struct.calcsize(form)
        return number
