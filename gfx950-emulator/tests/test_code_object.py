"""The package by itself: what it imports, its example, its README, and files that it refuses."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import gfx950emu
from gfx950_support.assembler import assemble, compile_kernel
from gfx950_support.instruction_page import mnemonics
from gfx950_support.listings import code_of, listing
from gfx950emu.code_object import read_kernel

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gfx950emu"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)

ALONE = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("mxpert", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[1])
import torch
import gfx950emu.timing
x, out = torch.arange(64.0), torch.zeros(64)
gfx950emu.run(gfx950emu.example("copy"), (1,), [out, x])
assert torch.equal(out, x)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("mxpert", "triton")))
"""


def test_a_code_object_runs_without_mxpert_and_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_no_module_names_mxpert_or_triton_in_an_import() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"mxpert", "triton"}, path


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (python,) = (block for kind, block in BLOCKS if kind == "python")
    (text,) = (block for kind, block in BLOCKS if kind == "text")
    assert len([line for line in python.splitlines() if line]) <= 12
    exec(compile(python, "README", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == text


def test_the_readme_has_the_figures_of_the_table() -> None:
    encodings = re.findall(r"\((\w+), \d+\)", (ROOT / "docs/instructions.md").read_text())
    executed = {name for each in encodings for name in mnemonics(each)[0]}
    assert f"the {len(executed)} of " in README


MODULES = [found.name for found in pkgutil.walk_packages(gfx950emu.__path__, "gfx950emu.")]


@pytest.mark.parametrize("name", ["gfx950emu", *MODULES])
def test_doctests(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_everything_public_exists_and_is_documented() -> None:
    for name in gfx950emu.__all__:
        assert getattr(gfx950emu, name).__doc__, name


def test_the_example_is_its_source() -> None:
    """By the kernel: LLVM's release may change the file around it."""
    source = (PACKAGE / "data/copy.s").read_text(encoding="utf-8")
    assert read_kernel(assemble(source)) == read_kernel(gfx950emu.example("copy"))


@triton.jit
def _scaled_sum_kernel(out_ptr, x_ptr, factor, count, BLOCK: tl.constexpr):
    """Sum of each program's BLOCK elements, times a factor. Grid: (blocks,)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(x) * factor)


def test_run_takes_what_triton_compiles() -> None:
    types = {"out_ptr": "*fp32", "x_ptr": "*fp32", "factor": "fp32", "count": "i32"}
    compiled = compile_kernel(_scaled_sum_kernel, types, BLOCK=256)
    x, want = torch.arange(512.0), [256 * 255.0, 256 * 767.0]
    by_name, in_order, of_bytes = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    named = {"out_ptr": by_name, "x_ptr": x, "factor": 2.0, "count": 512, "BLOCK": 256}
    report = gfx950emu.run(compiled, (2,), named)
    gfx950emu.run(compiled, [2], [in_order, x, 2.0, 512], schedule="random")
    alone = gfx950emu.CodeObject.of(compiled.asm["hsaco"], lds=compiled.metadata.shared)
    again = gfx950emu.run(alone, (2,), [of_bytes, x, 2.0, 512])
    assert by_name.tolist() == in_order.tolist() == of_bytes.tolist() == want
    assert report.kernel == again.kernel == "_scaled_sum_kernel"
    assert report.lds == again.lds == compiled.metadata.shared
    with pytest.raises(ValueError, match="no \\['count'\\]"):
        gfx950emu.run(compiled, (2,), {"out_ptr": by_name, "x_ptr": x, "factor": 2.0})


def test_faults_name_the_line_where_there_is_a_listing() -> None:
    types = {"out_ptr": "*fp32", "x_ptr": "*fp32", "factor": "fp32", "count": "i32"}
    compiled = compile_kernel(_scaled_sum_kernel, types, BLOCK=256)
    arguments = [torch.zeros(1), torch.zeros(4), 1.0, 512]
    with pytest.raises(gfx950emu.OutOfBoundsFault, match=r"test_code_object\.py:\d+"):
        gfx950emu.run(compiled, (1,), arguments)
    code = gfx950emu.CodeObject.of(compiled.asm["hsaco"], lds=compiled.metadata.shared)
    with pytest.raises(gfx950emu.OutOfBoundsFault) as caught:
        gfx950emu.run(code, (1,), arguments)
    assert (caught.value.place.line, caught.value.place.text.split("_")[0]) == ("", "global")


def test_a_code_object_without_names() -> None:
    text = listing("s_nop 0", arguments=2)
    assert code_of(text).parameters == ()
    code = gfx950emu.CodeObject.of(assemble(text), parameters=("out", "x"))
    assert code.parameters == ("out", "x")
    assert gfx950emu.CodeObject.of(code) is code
    gfx950emu.run(code, (1,), {"x": torch.zeros(1), "out": None})


@pytest.mark.parametrize(
    "find, put, words",
    [
        (b"\x7fELF", b"\x7fELG", "need an ELF file for gfx950, got b"),
        (b"AMDGPU\0", b"AMDGPV\0", "need a note with the kernel's metadata, got none"),
        (b"amdhsa.kernels", b"amdhsa.kernelz", "need one kernel, got 0"),
        (b"copy.kd", b"cope.kd", "need symbols of cope"),
    ],
)
def test_a_file_of_the_wrong_content_is_refused(find: bytes, put: bytes, words: str) -> None:
    content = gfx950emu.example("copy").replace(find, put, 1)
    with pytest.raises(ValueError, match=words):
        read_kernel(content)


@pytest.mark.parametrize("size", range(0, 1408, 128))
def test_a_part_of_a_file_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"gfx950: code object — need"):
        read_kernel(gfx950emu.example("copy")[:size])
