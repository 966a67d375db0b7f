"""An eviction policy stands in the source only where the binary has it."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import mxpert
from mxpert.testing._read_kernel import _read_stream_kernel
from support.aot import compile_for

PACKAGE = Path(mxpert.__file__).parent


def test_only_the_bandwidth_kernel_names_a_policy() -> None:
    """Triton drops the policy of a load that it turns into an asynchronous copy (sm_90, sm_100) and
    ignores it on gfx950, so that on pipelined weight loads it does nothing."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "eviction_policy"
    }
    assert found == {"testing/_read_kernel.py"}


def test_the_bandwidth_kernel_has_it() -> None:
    data = torch.empty(1 << 32, dtype=torch.int32, device="meta")
    kernel = compile_for(
        _read_stream_kernel,
        {
            "sums_ptr": data,
            "data_ptr": data,
            "num_elements": data.numel(),
            "BLOCK": 4096,
            "num_warps": 8,
        },
        target="sm_90",
    )
    loads = kernel.count(r"ld\.global\S*evict_first\S*v4", "ptx")
    assert loads == kernel.count(r"ld\.global", "ptx") > 0
    assert kernel.count(r"\bLDG\.E\.EF\.128") == loads, "in the machine code too"
