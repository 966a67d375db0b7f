"""Tests of the ahead-of-time harness on kernels with known instructions, on every target."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxpert.core.launch import Launch
from mxpert.testing import ahead_of_time
from mxpert.testing.ahead_of_time import compile_kernel
from support.aot import SHARED_MEMORY_LIMIT, TARGETS, Specialization, compile_for, specialize


@triton.jit
def _copy_kernel(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size)
    tl.store(out_ptr + offsets, x, mask=offsets < size)


@triton.jit(do_not_specialize=["rows"])
def _sizes_kernel(out_ptr, rows, columns, scale, bias, BLOCK: tl.constexpr = 32):
    tl.store(out_ptr + tl.arange(0, BLOCK), rows * columns * scale)


@triton.jit
def _matmul_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _shares_kernel(out_ptr, a_ptr, b_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product divided by its sum: all of it is held until the last value is there."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    product = tl.dot(a, b)
    total = tl.sum(tl.sum(product, axis=1), axis=0)
    tl.store(out_ptr + m[:, None] * N + n[None, :], product / total)


@triton.jit
def _matmul_scaled_kernel(
    out_ptr,
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    m, n, k, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + groups[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + groups[None, :])
    acc = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3")
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


@gluon.jit
def _gluon_copy_kernel(out_ptr, x_ptr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    offsets = gl.arange(0, BLOCK, LAYOUT)
    gl.store(out_ptr + offsets, gl.load(x_ptr + offsets))


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("target", TARGETS)
def test_copy_of_aligned_rows_uses_128_bit_accesses(target: str) -> None:
    x = meta(4096, dtype=torch.float32)
    kernel = compile_for(
        _copy_kernel, {"out_ptr": x, "x_ptr": x, "size": 4096, "BLOCK": 1024}, target=target
    )
    assert set(kernel.metrics.global_loads) == {128}
    assert set(kernel.metrics.global_stores) == {128}
    assert kernel.metrics.spills == kernel.metrics.scratch == 0
    assert 0 < kernel.metrics.registers < 64
    assert kernel.metrics.matrix_instruction is None
    assert kernel.count(r"LDG\.E\.128|load_dwordx4") == kernel.metrics.global_loads[128]


@pytest.mark.parametrize("target", TARGETS)
def test_copy_without_alignment_uses_narrow_accesses(target: str) -> None:
    x = meta(4097, dtype=torch.float32)[1:]
    kernel = compile_for(
        _copy_kernel, {"out_ptr": x, "x_ptr": x, "size": 4095, "BLOCK": 1024}, target=target
    )
    assert set(kernel.metrics.global_loads) == {32}


@pytest.mark.parametrize(
    "target, options", [("sm_90", {}), ("gfx950", {"waves_per_eu": 4})], ids=["sm_90", "gfx950"]
)
def test_spills_are_seen(target: str, options: dict[str, int]) -> None:
    """A 128x128 float32 accumulator in one warp needs 512 registers of 255 a lane, or 256 of the
    128 that four waves leave each other."""
    half = meta(1 << 20, dtype=torch.bfloat16)
    kernel = compile_for(
        _shares_kernel,
        {
            "out_ptr": meta(1 << 14, dtype=torch.float32),
            "a_ptr": half,
            "b_ptr": half,
            "M": 128,
            "N": 128,
            "K": 32,
            "num_warps": 1,
            **options,
        },
        target=target,
    )
    assert kernel.metrics.spills > 0


@pytest.mark.parametrize(
    "target, instruction", [("sm_90", "wgmma"), ("sm_100", "tcgen05.mma"), ("gfx950", "mfma")]
)
def test_matrix_instruction_of_dot(target: str, instruction: str) -> None:
    half = meta(1 << 20, dtype=torch.bfloat16)
    kernel = compile_for(
        _matmul_kernel,
        {
            "out_ptr": meta(1 << 16, dtype=torch.float32),
            "a_ptr": half,
            "b_ptr": half,
            "M": 128,
            "N": 128,
            "K": 64,
        },
        target=target,
    )
    assert kernel.metrics.matrix_instruction == instruction
    assert 0 < kernel.metrics.shared_memory <= SHARED_MEMORY_LIMIT[target]


@pytest.mark.parametrize(
    "target, instruction",
    [("sm_90", "wgmma"), ("sm_100", "tcgen05.mma.block_scale"), ("gfx950", "mfma_scale")],
)
def test_matrix_instruction_of_dot_scaled(target: str, instruction: str) -> None:
    codes, scale = meta(1 << 20, dtype=torch.float8_e4m3fn), meta(1 << 15, dtype=torch.uint8)
    kernel = compile_for(
        _matmul_scaled_kernel,
        {
            "out_ptr": meta(1 << 16, dtype=torch.float32),
            "a_ptr": codes,
            "a_scale_ptr": scale,
            "b_ptr": codes,
            "b_scale_ptr": scale,
            "M": 128,
            "N": 128,
            "K": 128,
        },
        target=target,
    )
    assert kernel.metrics.matrix_instruction == instruction


@pytest.mark.parametrize("target", TARGETS)
def test_gluon_kernel_keeps_its_layout(target: str) -> None:
    layout = gl.BlockedLayout([4], [TARGETS[target].warp_size], [4], [0])
    x = meta(4096, dtype=torch.float32)
    kernel = compile_for(
        _gluon_copy_kernel,
        {"out_ptr": x, "x_ptr": x, "BLOCK": 16 * TARGETS[target].warp_size, "LAYOUT": layout},
        target=target,
    )
    assert kernel.metrics.global_loads == {128: 1}


def test_specialize_follows_the_jit() -> None:
    x = torch.empty(64, dtype=torch.float8_e4m3fn)
    call = specialize(
        _sizes_kernel,
        {"out_ptr": x, "rows": 1, "columns": 48, "scale": 2**40, "bias": None},
        "sm_90",
    )
    assert call.signature == {
        "out_ptr": "*fp8e4nv",
        "rows": "i32",
        "columns": "i32",
        "scale": "i64",
        "bias": "constexpr",
        "BLOCK": "constexpr",
    }
    assert call.constexprs == {(4,): None, (5,): 32}
    assert promised(call) == {(0,): ALIGNED, (2,): ALIGNED, (3,): ALIGNED}
    call = specialize(
        _sizes_kernel,
        {"out_ptr": x[4:], "rows": 16, "columns": 1, "scale": 1.5, "bias": 3},
        "sm_90",
    )
    assert call.constexprs == {(2,): 1, (5,): 32}
    assert promised(call) == {}


ALIGNED = [["tt.divisibility", 16]]
SHORT = [["tt.pointer_range", 32]]


def promised(call: Specialization) -> dict[tuple[int, ...], list[list[object]]]:
    return {place: attributes for place, attributes in call.attributes.items() if attributes}


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("gibibytes, loads", [(1, "buffer_load"), (3, "global_load")])
def test_amd_addresses_small_tensors_through_buffers(
    gibibytes: int, loads: str, offset: int
) -> None:
    """AMD's launcher marks tensors below 2 GiB with 32-bit offsets; the compiler then uses buffer
    loads."""
    x = meta(gibibytes << 30, dtype=torch.uint8)[offset:]
    arguments = {"out_ptr": x, "x_ptr": x, "size": 4096, "BLOCK": 1024}
    expected = ([] if offset else ALIGNED) + (SHORT if gibibytes < 2 else [])
    call = specialize(_copy_kernel, arguments, "gfx950")
    assert call.attributes[0,] == call.attributes[1,] == expected
    assert call.options.num_stages == 2, "the backend's own default"
    kernel = compile_for(_copy_kernel, arguments, target="gfx950")
    found = {name.rpartition("_")[0] for name in kernel.metrics.instructions if "_load_" in name}
    assert {name for name in found if name.startswith(("buffer", "global"))} == {loads}


@pytest.mark.parametrize("target", TARGETS)
def test_fusion_of_products_and_sums_is_asked_for(target: str) -> None:
    """Every launch and every ahead-of-time compilation sets FP fusion explicitly."""
    x = meta(64, dtype=torch.int32)
    call = {"out_ptr": x, "x_ptr": x, "size": 64, "BLOCK": 64}
    assert Launch(_copy_kernel, (1,), size=64, BLOCK=64).constants["enable_fp_fusion"] is True
    assert specialize(_copy_kernel, call, target).options.enable_fp_fusion is True
    unfused = specialize(_copy_kernel, {**call, "enable_fp_fusion": False}, target)
    assert unfused.options.enable_fp_fusion is False


def test_the_binary_has_the_fusion_that_was_asked_for() -> None:
    x = meta(64, dtype=torch.int32)
    call = {"out_ptr": x, "x_ptr": x, "size": 64, "BLOCK": 64}
    for target in ("sm_90", "gfx950"):
        assert compile_kernel(_copy_kernel, call, target=target).metadata.enable_fp_fusion is True


def launches_without_fusion(source: str) -> list[int]:
    """Lines of ``kernel[grid](…)`` and ``triton.compile(…)`` that leave FP fusion to Triton."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (
                isinstance(node.func, ast.Subscript)
                and ast.unparse(node.func.value).endswith("kernel")
            )
            or ast.unparse(node.func) == "triton.compile"
        )
        and not {"enable_fp_fusion", "options", None} & {word.arg for word in node.keywords}
    ]


def test_every_launch_says_whether_it_fuses() -> None:
    """Triton 3.10 changes its default, and 3.9 warns of every compilation without a choice."""
    planted = "f_kernel[(1,)](x, n=3)\ntriton.compile(source, target=t)\nkernel[g](**arguments)\n"
    assert launches_without_fusion(planted) == [1, 2]
    root = Path(__file__).resolve().parents[2]
    never_compiled = (root / "tests/conformance", root / "tests/gfx950/test_emulate.py")
    folders = [root / each for each in ("mxpert", "benchmarks", "tests")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    found = {
        str(path.relative_to(root)): lines
        for path in sources
        if not any(path.is_relative_to(each) for each in never_compiled)
        and (lines := launches_without_fusion(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_the_process_ends_without_a_word() -> None:
    """Triton 3.9 reports its objects that are alive then, such as a layout held by a module."""
    backends = ("cdna4", "hopper", "triton")
    done = subprocess.run(
        [sys.executable, "-c", ";".join(f"import mxpert.backends.{each}" for each in backends)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""


def test_processes_do_not_compile_a_binary_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Threads with a memo of nothing stand for processes: each opens the lock file itself."""
    running: list[str] = []
    most: list[int] = []

    def compiles(*_: object, **__: object) -> None:
        running.append("")
        most.append(len(running))
        time.sleep(0.2)
        running.pop()

    monkeypatch.setattr(ahead_of_time, "_compiled", {})
    monkeypatch.setattr(triton, "compile", compiles)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "new"))
    x = torch.empty(64, device="meta")
    call = specialize(_copy_kernel, {"out_ptr": x, "x_ptr": x, "size": 64, "BLOCK": 64}, "gfx950")
    arguments = (_copy_kernel, call, "gfx950")
    threads = [threading.Thread(target=ahead_of_time.compile_call, args=arguments) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]


def test_same_arguments_give_the_same_object() -> None:
    arguments = {
        "out_ptr": meta(64, dtype=torch.int32),
        "x_ptr": meta(64, dtype=torch.int32),
        "size": 64,
        "BLOCK": 64,
    }
    first = compile_for(_copy_kernel, arguments, target="sm_90")
    assert compile_for(_copy_kernel, arguments, target="sm_90") is first
    assert compile_for(_copy_kernel, {**arguments, "num_warps": 1}, target="sm_90") is not first


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"target": "sm_70"}, ValueError, "target — need one of"),
        ({"y_ptr": 3}, ValueError, r"arguments — need names out of \['out_ptr'"),
        ({"fn": len}, TypeError, "need a @triton.jit"),
        ({"x_ptr": ...}, TypeError, "missing .* 'x_ptr'"),
    ],
    ids=["target", "unknown", "function", "missing"],
)
def test_bad_input(change: dict, error: type[Exception], text: str) -> None:
    x = meta(64, dtype=torch.int32)
    arguments = {
        "fn": _copy_kernel,
        "target": "sm_90",
        "out_ptr": x,
        "x_ptr": x,
        "size": 64,
        "BLOCK": 64,
        **change,
    }
    given = {name: value for name, value in arguments.items() if value is not ...}
    with pytest.raises(error, match=text):
        compile_for(given.pop("fn"), target=given.pop("target"), arguments=given)
