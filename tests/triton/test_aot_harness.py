"""Tests of the ahead-of-time harness on kernels with known instructions, on every target."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mxpert.testing.aot import (
    SHARED_MEMORY_LIMIT,
    TARGETS,
    compile_for,
    compile_kernel,
    specialize,
)


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
def _matmul_scaled_kernel(
    out_ptr, a_ptr, a_scale_ptr, b_ptr, b_scale_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
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
    kernel = compile_for(_copy_kernel, {"out_ptr": x, "x_ptr": x, "size": 4096, "BLOCK": 1024},
                         target=target)
    assert set(kernel.metrics.global_loads) == {128}
    assert set(kernel.metrics.global_stores) == {128}
    assert kernel.metrics.spills == kernel.metrics.scratch == 0
    assert 0 < kernel.metrics.registers < 64
    assert kernel.metrics.matrix_instruction is None
    assert kernel.count(r"LDG\.E\.128|load_dwordx4") == kernel.metrics.global_loads[128]


@pytest.mark.parametrize("target", TARGETS)
def test_copy_without_alignment_uses_narrow_accesses(target: str) -> None:
    kernel = compile_kernel(
        _copy_kernel, signature={"out_ptr": "*fp32", "x_ptr": "*fp32", "size": "i32"},
        constexprs={"BLOCK": 1024}, target=target)
    assert set(kernel.metrics.global_loads) == {32}


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_spills_are_seen(target: str) -> None:
    """A 256x256 float32 accumulator in one warp needs 1024 or 2048 registers a lane."""
    half = meta(1 << 20, dtype=torch.bfloat16)
    kernel = compile_for(_matmul_kernel, {
        "out_ptr": meta(1 << 16, dtype=torch.float32), "a_ptr": half, "b_ptr": half,
        "M": 256, "N": 256, "K": 32}, target=target, num_warps=1)
    assert kernel.metrics.spills > 0


@pytest.mark.parametrize("target, instruction",
                         [("sm_90", "wgmma"), ("sm_100", "tcgen05.mma"), ("gfx950", "mfma")])
def test_matrix_instruction_of_dot(target: str, instruction: str) -> None:
    half = meta(1 << 20, dtype=torch.bfloat16)
    kernel = compile_for(_matmul_kernel, {
        "out_ptr": meta(1 << 16, dtype=torch.float32), "a_ptr": half, "b_ptr": half,
        "M": 128, "N": 128, "K": 64}, target=target)
    assert kernel.metrics.matrix_instruction == instruction
    assert 0 < kernel.metrics.shared_memory <= SHARED_MEMORY_LIMIT[target]


@pytest.mark.parametrize("target, instruction", [
    ("sm_90", "wgmma"), ("sm_100", "tcgen05.mma.block_scale"), ("gfx950", "mfma_scale")])
def test_matrix_instruction_of_dot_scaled(target: str, instruction: str) -> None:
    codes, scale = meta(1 << 20, dtype=torch.float8_e4m3fn), meta(1 << 15, dtype=torch.uint8)
    kernel = compile_for(_matmul_scaled_kernel, {
        "out_ptr": meta(1 << 16, dtype=torch.float32), "a_ptr": codes, "a_scale_ptr": scale,
        "b_ptr": codes, "b_scale_ptr": scale, "M": 128, "N": 128, "K": 128}, target=target)
    assert kernel.metrics.matrix_instruction == instruction


@pytest.mark.parametrize("target", TARGETS)
def test_gluon_kernel_keeps_its_layout(target: str) -> None:
    layout = gl.BlockedLayout([4], [TARGETS[target].warp_size], [4], [0])
    x = meta(4096, dtype=torch.float32)
    kernel = compile_for(_gluon_copy_kernel, {
        "out_ptr": x, "x_ptr": x, "BLOCK": 16 * TARGETS[target].warp_size, "LAYOUT": layout},
        target=target)
    assert kernel.metrics.global_loads == {128: 1}


def test_specialize_follows_the_jit() -> None:
    x = torch.empty(64, dtype=torch.float8_e4m3fn)
    signature, constexprs, divisible = specialize(_sizes_kernel, {
        "out_ptr": x, "rows": 1, "columns": 48, "scale": 2**40, "bias": None})
    assert signature == {"out_ptr": "*fp8e4nv", "rows": "i32", "columns": "i32", "scale": "i64"}
    assert constexprs == {"bias": None, "BLOCK": 32}
    assert divisible == {"out_ptr", "columns", "scale"}
    _, constexprs, divisible = specialize(_sizes_kernel, {
        "out_ptr": x[4:], "rows": 16, "columns": 1, "scale": 1.5, "bias": 3})
    assert constexprs == {"columns": 1, "BLOCK": 32}
    assert divisible == set()


def test_same_arguments_give_the_same_object() -> None:
    arguments = {"out_ptr": meta(64, dtype=torch.int32), "x_ptr": meta(64, dtype=torch.int32),
                 "size": 64, "BLOCK": 64}
    first = compile_for(_copy_kernel, arguments, target="sm_90")
    assert compile_for(_copy_kernel, arguments, target="sm_90") is first
    assert compile_for(_copy_kernel, arguments, target="sm_90", num_warps=1) is not first


@pytest.mark.parametrize("change, error, text", [
    ({"target": "sm_70"}, ValueError, "target — need one of"),
    ({"signature": {"x_ptr": "*fp32"}}, ValueError, "name every argument once"),
    ({"divisible": ["y_ptr"]}, ValueError, "divisible — need names out of"),
    ({"fn": len}, TypeError, "need a @triton.jit"),
], ids=["target", "signature", "divisible", "function"])
def test_bad_input(change: dict, error: type[Exception], text: str) -> None:
    arguments = {
        "fn": _copy_kernel, "signature": {"out_ptr": "*fp32", "x_ptr": "*fp32", "size": "i32"},
        "constexprs": {"BLOCK": 1024}, "target": "sm_90", **change}
    with pytest.raises(error, match=text):
        compile_kernel(arguments.pop("fn"), **arguments)
