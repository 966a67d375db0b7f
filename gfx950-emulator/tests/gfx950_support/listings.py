"""Listings of hand-written gfx950 kernels, in the form in which Triton's compiler emits them."""

from __future__ import annotations

import textwrap

import torch

from gfx950emu import CodeObject, Report, run
from gfx950emu.listing import read_program
from gfx950emu.program import Program

from .assembler import assemble

_LISTING = """\
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.text
\t.globl\t{name}
{name}:
\t.loc\t1 7 0                          ; {name}.py:7:0
{body}
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\t.amdhsa_kernel {name}
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_private_segment_fixed_size {scratch}
\t\t.amdhsa_user_sgpr_count {user_registers}
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_user_sgpr_kernarg_preload_length {preload}
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t\t.amdhsa_system_sgpr_workgroup_id_y 1
\t\t.amdhsa_next_free_vgpr 512
\t\t.amdhsa_next_free_sgpr 96
\t\t.amdhsa_accum_offset 256
\t\t.amdhsa_float_denorm_mode_32 3
\t\t.amdhsa_float_denorm_mode_16_64 3
\t\t.amdhsa_dx10_clamp 1
\t\t.amdhsa_ieee_mode 1
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:{arguments}
    .group_segment_fixed_size: {lds}
    .kernarg_segment_align: 8
    .kernarg_segment_size: {size}
    .max_flat_workgroup_size: {threads}
    .name:           {name}
    .private_segment_fixed_size: {scratch}
    .sgpr_count:     96
    .symbol:         {name}.kd
    .vgpr_count:     16
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx950
amdhsa.version:
  - 1
  - 2
...
\t.end_amdgpu_metadata
"""

ADDRESS = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
"""Puts the address of the first argument into s[4:5], and 4 times the lane's number into v1."""


def listing(
    body: str,
    *,
    arguments: int = 1,
    waves: int = 1,
    lds: int = 0,
    scratch: int = 0,
    preload: int = 0,
) -> str:
    """A kernel of these instructions.

    Its registers at the start: s[0:1] address of the arguments, then `preload` dwords of them, then
    the workgroup's numbers along x and y; v0 the lane's number in the workgroup.

    Args:
        arguments: how many pointers it takes.
    """
    places = [
        f"      - .offset:         {8 * place}\n        .size:           8\n"
        "        .value_kind:     global_buffer"
        for place in range(arguments)
    ]
    return _LISTING.format(
        name="written",
        body=textwrap.indent(textwrap.dedent(body).strip(), "\t").replace("\t.L", ".L"),
        lds=lds,
        scratch=scratch,
        user_registers=2 + preload,
        preload=preload,
        arguments="".join(f"\n{each}" for each in places) or " []",
        size=8 * arguments,
        threads=64 * waves,
    )


def code_of(text: str) -> CodeObject:
    """The code object that a listing describes."""
    return CodeObject.of(assemble(text), listing=text)


def program_of(text: str) -> Program:
    """The program that a listing describes."""
    return read_program(assemble(text), text)


def execute(
    body: str, *tensors: torch.Tensor, grid: tuple[int, ...] = (1,), **options: object
) -> Report:
    """Run a kernel of these instructions, with checks, on tensors."""
    shape = {
        name: options.pop(name)
        for name in ("waves", "lds", "scratch", "preload")
        if name in options
    }
    code = listing(body, arguments=len(tensors), **shape)  # type: ignore[arg-type]
    return run(code_of(code), grid, tensors, **options)  # type: ignore[arg-type]
