"""Words are decoded as they are listed, and the table knows all that kernels use.

Each word is decoded three times: by the executor, by tinygrad's tables, which come from AMD's
machine-readable ISA, and from the text of the listing, which LLVM wrote.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import mxpert
from gfx950_support.assembler import read_instruction
from gfx950_support.decoder import as_text, decoded, from_binary
from gfx950_support.forms import FORMS, differs
from gfx950_support.pseudocode import PSEUDOCODE
from gfx950_support.text import parse_instruction
from gfx950emu.code_object import text_section
from gfx950emu.decode import decode
from gfx950emu.instructions import bind
from gfx950emu.listing import read_program
from gfx950emu.program import Program
from mxpert.core.target import on_device
from mxpert.testing.gfx950 import MI355X, Emulation
from mxpert.testing.problems import MoEShape
from support.exact import exact_moe_problem
from support.gfx950_exchange import turns
from support.layers import run_layer

pytestmark = pytest.mark.filterwarnings("ignore::mxpert.errors.PerformanceWarning")
"""Weights in the published layout run on the portable kernels, which are wanted, too."""

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
    return tuple(read_program(kernel.asm["hsaco"], kernel.asm["amdgcn"]) for kernel in kernels())


def _call_ops() -> None:
    inputs = exact_moe_problem(MoEShape(256, 256, 4, 2, has_bias=True), 16)
    published, native = inputs.weights, inputs.weights.prepare(device="cpu")
    for name, weights in itertools.product(("mxfp8", "mxfp4", "bf16"), (published, native)):
        run_layer(inputs, weights=weights, activation_format=name)
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


def test_words_are_what_the_listing_says() -> None:
    """Every instruction of the library's ops: mnemonic, form, operands, modifiers, targets."""
    count = 0
    for program in programs():
        for instruction in program.instructions:
            written = parse_instruction(instruction.text)
            if written.target is not None:
                assert program.labels[written.target] == program.labels[str(instruction.target)]
                written = replace(written, target=instruction.target)
            assert not differs(instruction, written), (program.name, instruction.text, instruction)
            count += 1
    assert count > 15_000


def test_the_code_object_is_enough() -> None:
    """Without the listing: the same instructions and facts, texts that say the same."""
    for kernel, program in zip(kernels(), programs(), strict=True):
        alone = read_program(kernel.asm["hsaco"])
        assert replace(alone, instructions=(), labels={}) == replace(
            program, instructions=(), labels={}
        )
        directives = re.findall(r"\.amdhsa_(\w+)\s+(\d+)", kernel.asm["amdgcn"])
        given = {name: int(value) for name, value in directives}
        for name, value in alone.descriptor.items():
            assert given.get(name, value) == value, name
        padding = [each for each in alone.instructions if each.name == "s_nop"]
        assert len(alone.instructions) - len(program.instructions) <= len(padding)
        for each in alone.instructions:
            assert not differs(each, parse_instruction(each.text)), each.text


def test_words_are_what_other_tables_say() -> None:
    """The same words by tinygrad's decoder, padding included."""
    for kernel in kernels():
        code = text_section(kernel.asm["hsaco"])
        for word, found in zip(decode(code), decoded(code), strict=True):
            assert as_text(word.instruction) == from_binary(found), (hex(word.address), word)


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
