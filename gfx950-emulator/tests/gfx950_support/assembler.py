"""Code objects and instructions from text, by the LLVM that Triton brings."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from gfx950emu.code_object import text_section
from gfx950emu.decode import BRANCH, decode_at
from gfx950emu.program import Instruction

_TARGET = '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n\t.text\n'
_POSITIONS = re.compile(r"^\s*\.(loc|file)\b.*$", re.M)


def assemble(listing: str) -> bytes:
    """The ELF file of amdgcn text, without source positions.

    Raises:
        ValueError: LLVM refuses the text; it says why on standard error.
    """
    from triton._C.libtriton import amd, llvm
    from triton.backends.amd import compiler

    llvm.init_targets()
    plain = _POSITIONS.sub("", listing)
    # Triton 3.9 has the assembler in a library of its own, which its compiler calls.
    assembler = getattr(compiler, "assemble_amdgcn", amd.assemble_amdgcn)
    code_object: bytes = assembler(plain, "gfx950", "")
    if not code_object:
        raise ValueError(f"no text for gfx950: {plain[-80:]!r}")
    return code_object


def compile_kernel(kernel: Any, signature: Mapping[str, str], **constexprs: int) -> Any:
    """Triton's binary of a kernel: types by argument, and the values that are compiled in."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    places = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    source = triton.compiler.ASTSource(kernel, types, places)
    options = {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("hip", "gfx950", 64), options=options)


def assembled_code(*lines: str) -> bytes:
    """The words of some instructions."""
    return text_section(assemble(_TARGET + "".join(f"\t{line}\n" for line in lines)))


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
    found = decode_at(assembled_code(text if target is None else f"{name} 0"), 0)
    return dataclasses.replace(found.instruction, text=text, target=target)
