"""An eviction policy stands in the source only where the binary has it."""

from __future__ import annotations

import ast
from pathlib import Path

import mxpert
from mxpert.testing._read_kernel import _read_stream_kernel
from mxpert.testing.aot import compile_kernel

PACKAGE = Path(mxpert.__file__).parent


def test_only_the_bandwidth_kernel_names_a_policy() -> None:
    """Triton drops the policy of a load that it turns into an asynchronous copy (sm_90, sm_100) and
    ignores it on gfx950, so that on pipelined weight loads it does nothing."""
    found = {path.relative_to(PACKAGE).as_posix()
             for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.keyword) and node.arg == "eviction_policy"}
    assert found == {"testing/_read_kernel.py"}


def test_the_bandwidth_kernel_has_it() -> None:
    kernel = compile_kernel(
        _read_stream_kernel, target="sm_90", num_warps=8, constexprs={"BLOCK": 4096},
        signature={"sums_ptr": "*i32", "data_ptr": "*i32", "num_elements": "i64"},
        divisible=("sums_ptr", "data_ptr", "num_elements"))
    loads = kernel.count(r"ld\.global\S*evict_first\S*v4", "ptx")
    assert loads == kernel.count(r"ld\.global", "ptx") > 0
    assert kernel.count(r"\bLDG\.E\.EF\.128") == loads, "in the machine code too"
