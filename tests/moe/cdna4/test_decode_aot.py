"""What the binaries of the decode kernels contain, at the shapes of gpt-oss-120b."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

from mxpert.core.problem import MoEOptions, MoEProblem, Op, SwiGLU
from mxpert.formats.tensor import Layout
from mxpert.moe.cdna4.config import decode_config
from mxpert.moe.cdna4.host import Gemm, _decode_launches
from mxpert.testing.gfx950 import MI355X
from support.aot import CompiledKernel, compile_for
from support.gfx950_listing import Loop, check_native, hot_loop

CODES = {"mxfp4": "e2m1", "mxfp8": "e4m3", "bf16": "bf16"}
ROW_BYTES = {"mxfp4": 1440, "mxfp8": 2880, "bf16": 5760}
ROWS_OF = {16: 128, 32: 1024}
"""Tokens with which the heuristic chooses a tile of so many rows."""
CASES = [
    *((Op.MOE_GATE_UP, name, rows) for name in CODES for rows in ROWS_OF),
    (Op.MOE_DOWN, "mxfp4", 16),
]
cases = pytest.mark.parametrize(
    ("op", "a_format", "rows"), CASES, ids=lambda value: getattr(value, "value", str(value))
)


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def compiled(
    op: Op, a_format: str, rows: int, k_slices: int = 1, w_format: str = "mxfp4"
) -> CompiledKernel:
    """The binary that the heuristic's config runs, with biases.

    Stage 2 reads rows of 90 scales as stage 1 stores them: they do not begin at words.
    """
    problem = MoEProblem(
        op,
        MI355X,
        ROWS_OF[rows],
        4,
        128,
        2880,
        2880,
        MoEOptions(SwiGLU(), a_format),
        Layout.CDNA4_FRAGMENT,
        rows,
        weight_format=w_format,
    )
    config = decode_config(problem, op, rows)
    config = replace(config, k_slices=k_slices, block_n=config.block_n // k_slices)
    assert (config.block_m, config.k_splits) == (rows, 1)
    is_mx, is_first = a_format != "bf16", op is Op.MOE_GATE_UP
    row_units = 90 if is_first else 45
    gemm = Gemm(
        op,
        128,
        rows,
        CODES[a_format],
        ROW_BYTES[a_format] // 16,
        0 if not is_mx else 23 if is_first else 90,
        row_units,
        23,
        aligned=is_first,
    )
    launch, _ = _decode_launches(problem, config, gemm)
    x = meta(1024, ROW_BYTES[a_format])
    scales = meta(1024, 92) if is_first else meta(1024 * 90)
    code_dtype = torch.uint8 if is_mx else torch.uint32
    unit_bytes = 4096 if w_format == "mxfp4" else 8192
    tensors = {
        "out_ptr": meta(1024, 2880, dtype=torch.uint8 if is_mx and is_first else torch.bfloat16),
        "out_scale_ptr": meta(1024, 90) if is_mx and is_first else None,
        "partial_ptr": None,
        "x_ptr": x if is_mx else x.view(torch.bfloat16),
        "x_scale_ptr": scales.view(torch.uint32) if is_mx else None,
        "x_row_scale_ptr": None,
        "w_ptr": meta(128, row_units, 23, unit_bytes).view(code_dtype),
        "w_scale_ptr": meta(128, row_units, 23, 256).view(torch.uint32),
        "bias_ptr": meta(128, 5760, dtype=torch.float32),
        "sorted_token_ids_ptr": meta(4096, dtype=torch.int32),
        "sorted_weights_ptr": None if is_first else meta(4096, dtype=torch.float32),
        "block_expert_ids_ptr": meta(256, dtype=torch.int32),
        "num_valid_ptr": meta(2, dtype=torch.int32),
    }
    return compile_for(launch.kernel, launch.arguments(tensors), target="gfx950")


@cases
def test_rules_of_native_kernels(op: Op, a_format: str, rows: int) -> None:
    """No spills and no byte loads; 14 other instructions an MFMA at most; two waves a SIMD.

    An iteration loads four steps of weights: 16 fragments and four words of scales a lane.
    """
    kernel = compiled(op, a_format, rows)
    check_native(kernel, 4, most_overhead=14, least_waves=2, least_non_temporal=20)
    assert kernel.count(r"buffer_load_dwordx4 .* lds$") > 0, "no direct copies of activations"


def matching(loop: Loop, pattern: str) -> int:
    return sum(bool(re.match(pattern, text)) for text in loop.instructions)


@cases
def test_the_hot_loop_does_what_it_has_to(op: Op, a_format: str, rows: int) -> None:
    """One MFMA a fragment (bf16: four), no unpacking beside the conversions that bf16 needs."""
    loop = hot_loop(compiled(op, a_format, rows).listing)
    tiles = rows // 16
    if a_format == "bf16":
        assert matching(loop, "v_mfma_f32_16x16x32_bf16") == loop.count("mfma") == 64 * tiles
        assert matching(loop, "v_cvt_scalef32_pk_bf16_fp4") == 256
        spare = loop.count("valu") - 256
    else:
        scaled = "v_mfma_scale_f32_16x16x128_f8f6f4"
        assert matching(loop, scaled) == loop.count("mfma") == 16 * tiles
        spare = loop.count("valu") - loop.accumulator_moves
    # For each of 16 fragments: its mask, its share of scales and of LDS addresses.
    assert spare <= 9 * 16, dict(loop.counts)
    # Triton 3.6 keeps sums in accumulators and moves a part of them; 3.9 moves none.
    assert loop.accumulator_moves <= 1.5 * loop.count("mfma")
    # Of each row the chunks of four steps, and their four words of scales.
    reads = {"mxfp4": 4 + 1, "mxfp8": 8 + 1, "bf16": 16}[a_format]
    assert matching(loop, "ds_read_b128") == reads * tiles
    waits = [text for text in loop.instructions if re.match(r"s_waitcnt .*vmcnt\(0\)", text)]
    assert len(waits) <= (1 if matching(loop, "s_barrier") else 0), waits


@pytest.mark.parametrize("rows", ROWS_OF)
@pytest.mark.parametrize("a_format", CODES)
def test_mxfp8_weights_are_multiplied_as_they_are(a_format: str, rows: int) -> None:
    """e4m3 codes are operand A of scaled MFMA; bf16 rows need one conversion for two codes."""
    kernel = compiled(Op.MOE_GATE_UP, a_format, rows, w_format="mxfp8_e4m3")
    check_native(kernel, 4, most_overhead=17, least_waves=2, least_non_temporal=36)
    loop = hot_loop(kernel.listing)
    tiles, steps = rows // 16, 4
    assert matching(loop, "buffer_load_dwordx4(?!.* lds)") == 8 * steps  # codes of a lane
    if a_format == "bf16":
        assert matching(loop, "v_mfma_f32_16x16x32_bf16") == loop.count("mfma") == 64 * tiles
        assert matching(loop, "v_cvt_scalef32_pk_bf16_fp8") == 256
        assert not matching(loop, "v_cvt_scalef32_pk_bf16_fp4")
    else:
        scaled = "v_mfma_scale_f32_16x16x128_f8f6f4"
        assert matching(loop, scaled) == loop.count("mfma") == 4 * steps * tiles
        assert not matching(loop, "v_cvt|v_perm")


# --- latency ------------------------------------------------------------------------------------


def instructions(kernel: CompiledKernel) -> list[str]:
    lines = (line.split(";")[0].strip() for line in kernel.listing.splitlines())
    return [line for line in lines if re.match(r"[a-z]+_\w+", line)]


def places(listing: list[str], pattern: str) -> list[int]:
    return [place for place, text in enumerate(listing) if re.match(pattern, text)]


@pytest.mark.parametrize("a_format", CODES)
def test_the_first_copy_of_sorted_rows_precedes_the_branches(a_format: str) -> None:
    """Whether the tile exists and has an expert is found out while its rows are on their way."""
    listing = instructions(compiled(Op.MOE_DOWN, a_format, 16))
    copies = places(listing, r"buffer_load_dword(x4)? .* lds$")
    assert copies[0] < places(listing, r"s_cbranch")[0]


def test_the_epilogue_loads_its_terms_ahead_of_its_barriers() -> None:
    """Ids, weights and biases are on their way while slices add their sums through LDS."""
    listing = instructions(compiled(Op.MOE_DOWN, "mxfp4", 16, k_slices=4))
    last_mfma = places(listing, "v_mfma")[-1]
    end_of_loop, entry, *_ = (at for at in places(listing, "s_barrier") if at > last_mfma)
    loads = [at for at in places(listing, r"(global|buffer)_load") if at > end_of_loop]
    assert len(loads) >= 3
    assert all(at < entry for at in loads), [listing[at] for at in loads if at > entry]
    waits = places(listing, r"s_waitcnt .*vmcnt")
    assert not [at for at in waits if loads[0] < at < entry]
