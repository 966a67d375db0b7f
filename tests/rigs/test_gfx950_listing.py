"""What the gates of gfx950 listings see: loops, classes of instructions, occupancy, the ratchet."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
import triton
import triton.language as tl

from mxpert.core.problem import GemmConfig, Target
from mxpert.device import tile_rules
from support import gfx950_listing
from support.aot import CompiledKernel, Metrics, compile_for
from support.gfx950_listing import (
    Occupancy,
    check_figures,
    check_native,
    classify,
    figures_of,
    hot_loop,
    occupancy,
)

MI355X = Target("hip", "gfx950", "AMD Instinct MI355X", 256, 160 * 1024)

NESTED = """
	.globl	_kernel
_kernel:
	s_load_dwordx2 s[0:1], s[0:1], 0x0
.LBB0_1:                                ; outer loop
	s_waitcnt lgkmcnt(0)
	v_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
.LBB0_2:                                ; inner loop, part of which is out of line
	buffer_load_dwordx4 v[0:3], v8, s[4:7], 0 offen nt
	buffer_load_dword v9, s[4:7], 0 offen lds
	buffer_load_ubyte v10, v8, s[4:7], 0 offen
	s_cbranch_vccnz .LBB0_5
.LBB0_3:
	ds_read_b128 v[4:7], v11
	s_waitcnt vmcnt(0) lgkmcnt(0)
	s_barrier
	v_mfma_scale_f32_16x16x128_f8f6f4 a[0:3], v[0:3], v[4:7], a[0:3], v10, v10 cbsz:4
	s_add_i32 s8, s8, 1
	s_cbranch_scc1 .LBB0_2
	s_cbranch_vccz .LBB0_1
	s_branch .LBB0_6
.LBB0_4:                                ; branches here go back, and are no loop
	v_mfma_f32_16x16x32_bf16 a[0:3], v[0:3], v[4:7], a[0:3]
	s_endpgm
.LBB0_5:
	v_add_u32_e32 v8, 16, v8
	s_branch .LBB0_3
.LBB0_6:
	s_cbranch_scc0 .LBB0_4
	s_endpgm
	.section	.rodata,"a",@progbits
"""


def test_the_innermost_loop_is_found_with_its_blocks_out_of_line() -> None:
    loop = hot_loop(NESTED)
    assert loop.counts == {"vmem": 3, "mfma": 1, "lds": 1, "waits": 2, "valu": 1, "salu": 4}
    assert loop.overhead == 11
    assert loop.byte_loads == ["buffer_load_ubyte v10, v8, s[4:7], 0 offen"]
    assert loop.direct_to_lds == ["buffer_load_dword v9, s[4:7], 0 offen lds"]
    assert loop.non_temporal == ["buffer_load_dwordx4 v[0:3], v8, s[4:7], 0 offen nt"]


def test_code_without_a_loop_is_refused() -> None:
    straight = "\n".join(line for line in NESTED.splitlines() if "branch" not in line)
    with pytest.raises(ValueError, match="need a loop with MFMA, got none"):
        hot_loop(straight)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("v_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], v[4:7], a[0:15]", "mfma"),
        ("v_accvgpr_read_b32 v0, a0", "valu"),
        ("s_waitcnt vmcnt(3)", "waits"),
        ("s_nop 1", "waits"),
        ("s_load_dword s0, s[0:1], 0x0", "salu"),
        ("global_load_lds_dwordx4 v[0:1], off", "vmem"),
        ("ds_read_b64_tr_b8 v[0:1], v2", "lds"),
    ],
)
def test_classes(text: str, kind: str) -> None:
    assert classify(text) == kind
    with pytest.raises(ValueError, match="need an instruction of gfx950"):
        classify("wgmma.mma_async")


@pytest.mark.parametrize(
    "registers, shared_memory, num_warps, expected",
    [
        (64, 0, 4, Occupancy(8, 8, 8)),
        (65, 0, 4, Occupancy(7, 7, 8)),
        (128, 80 * 1024, 4, Occupancy(2, 4, 2)),
        (256, 80 * 1024 + 1, 8, Occupancy(2, 2, 2)),
        (257, 0, 8, Occupancy(0, 1, 8)),
        (512, 0, 4, Occupancy(1, 1, 8)),
    ],
)
def test_occupancy(registers: int, shared_memory: int, num_warps: int, expected: Occupancy) -> None:
    """Eight warps of 257 registers do not fit at all."""
    assert occupancy(registers, shared_memory, num_warps) == expected


@triton.jit
def _multiply_kernel(
    out_ptr, a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, steps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). e4m3 tiles [M, K] and [N, K], `steps` times."""
    m, n, k, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    total = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + m[:, None] * K + k[None, :] + step * M * K)
        b = tl.load(b_ptr + n[None, :] * K + k[:, None] + step * N * K)
        a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + groups[None, :])
        b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + groups[None, :])
        total = tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", total)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total)


def multiply(config: GemmConfig) -> CompiledKernel:
    """The kernel above for a tile."""
    codes = torch.empty(1 << 20, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(1 << 16, dtype=torch.uint8, device="meta")
    out = torch.empty(1 << 16, device="meta")
    arguments = {
        "out_ptr": out, "a_ptr": codes, "a_scale_ptr": scale, "b_ptr": codes,
        "b_scale_ptr": scale, "steps": 16, "M": config.block_m, "N": config.block_n,
        "K": config.block_k, "num_warps": config.num_warps, "num_stages": 2,
    }  # fmt: skip
    return compile_for(_multiply_kernel, arguments, target="gfx950")


TILES = [
    GemmConfig(16, 64, 64, 4),
    GemmConfig(16, 64, 128, 4),
    GemmConfig(16, 64, 128, 1),
    GemmConfig(16, 64, 128, 2),
    GemmConfig(32, 64, 64, 4),
    GemmConfig(64, 64, 64, 8),
    GemmConfig(64, 64, 128, 1),
]


@pytest.mark.parametrize(
    "config", TILES, ids=lambda config: "x".join(map(str, vars(config).values()))
)
def test_tiles_without_scaled_mfma_are_known(config: GemmConfig) -> None:
    """The rule of the tile choice and the compiler agree; the occupancy is that of the listing."""
    compiled = multiply(config)
    reason = tile_rules.without_scaled_mfma(MI355X, config)
    assert (compiled.metrics.matrix_instruction == "mfma_scale") is (reason is None)
    _, _, stated = compiled.listing.partition("; Occupancy: ")
    by_registers = occupancy(compiled.metrics.registers, 0, config.num_warps).by_registers
    assert int(stated.split()[0]) == by_registers


def test_other_devices_have_no_such_rule() -> None:
    h200 = Target("cuda", "sm_90", "NVIDIA H200", 132, 232448)
    assert tile_rules.without_scaled_mfma(h200, TILES[0]) is None


def native(listing: str = NESTED, **changes: int) -> CompiledKernel:
    metrics = Metrics("hip", lambda: listing, 64, 0, 0, "mfma_scale", spilled=0)
    return CompiledKernel(
        "_native_kernel",
        "gfx950",
        MappingProxyType({"amdgcn": listing}),
        replace(metrics, **changes),
    )


CLEAN = NESTED.replace("buffer_load_ubyte", "buffer_load_dword")


def test_a_native_kernel_within_the_rules_passes() -> None:
    loop = check_native(
        native(CLEAN), 4, most_overhead=11, least_waves=8, least_direct=1, least_non_temporal=1
    )
    assert loop == hot_loop(CLEAN)


BROKEN: dict[str, tuple[Callable[[], CompiledKernel], dict[str, float], str]] = {
    "spills": (lambda: native(CLEAN, spilled=2), {}, "2 registers are spilled"),
    "scratch": (lambda: native(CLEAN, scratch=16), {}, "16 bytes of scratch"),
    "bytes": (native, {}, "one by one in the hot loop: .*ubyte"),
    "overhead": (lambda: native(CLEAN), {"most_overhead": 10}, "11.0 other instructions"),
    "waves": (lambda: native(CLEAN, registers=300), {"least_waves": 2}, "1.0 waves by SIMD"),
    "direct": (lambda: native(CLEAN), {"least_direct": 2}, "direct loads to LDS"),
    "streamed": (lambda: native(CLEAN), {"least_non_temporal": 2}, "non-temporal loads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    make, limits, text = BROKEN[name]
    with pytest.raises(AssertionError, match=f"_native_kernel: .*{text}"):
        check_native(make(), 4, **{"most_overhead": 14, **limits})


WORSE = {
    "instructions_per_mfma": -0.1,
    "byte_accesses": -1,
    "registers": -8,
    "direct_loads": 1,
    "waves": 1,
}


@pytest.mark.parametrize("figure", WORSE)
def test_the_ratchet_sees_a_worse_figure(figure: str, tmp_path, monkeypatch) -> None:
    found = figures_of(native(), 4)
    release = ".".join(map(str, gfx950_listing.TRITON_RELEASE))

    def record(change: float) -> None:
        figures = {**found, figure: found[figure] + change}
        (tmp_path / "figures.json").write_text(json.dumps({release: {"here": figures}}), "utf-8")

    monkeypatch.setattr(gfx950_listing, "FIGURES", tmp_path / "figures.json")
    for holds in (0, -WORSE[figure]):
        record(holds)
        check_figures("here", native(), 4)
    record(WORSE[figure])
    with pytest.raises(AssertionError, match=rf"\['{figure}'\] are worse than recorded"):
        check_figures("here", native(), 4)
    with pytest.raises(AssertionError, match="has no figures of this kernel; measured"):
        check_figures("elsewhere", native(), 4)
