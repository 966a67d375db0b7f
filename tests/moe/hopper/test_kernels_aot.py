"""The Hopper kernels compiled without a GPU: every variant that the dispatcher can choose.

The tests record launches on meta tensors with the heuristic's tiles, specialise them as the JIT
does, and compile them.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")

from triton.backends.nvidia.compiler import get_ptxas

from mxpert.configs import HopperGemmConfig, HopperKernel
from mxpert.core.problem import (
    ACTIVATION_FORMATS,
    GELU,
    Activation,
    ClampedSiLU,
    SiLU,
    SiTUv2,
    SwiGLU,
    activation_mx_format,
)
from mxpert.core.toolchain import copies_register_operands, toolchain
from mxpert.moe.hopper import config as heuristics
from mxpert.moe.hopper import tile_list as schedule
from mxpert.testing.problems import MODEL_SHAPES, MoEShape
from support.aot import SHARED_MEMORY_LIMIT, TRITON_RELEASE, CompiledKernel, let_specialize
from support.hopper_launches import Launch, Recorder, describe
from support.pairwise import latin
from support.sass import overwritten_operands, parse, register_operands, reused_barriers

ACTIVATIONS = (SiLU(), SwiGLU(), ClampedSiLU(), SiTUv2())
GELUS, WITH_BETA = (GELU(), GELU("tanh")), SwiGLU(limit=None, beta=0.5)
GEMM_FORMATS = ("bf16", "mxfp8")
"""Activation formats with their own GEMM binaries. mxfp4 and fp8_token rows use those of mxfp8: all
are encoded as e4m3 rows with one scale each."""

STEPS = re.compile(r"griddepcontrol\.\w+|\b(?:ld|st|red|atom)\.global(?:\.cg)?|\bcp\.async[.\w]*")
"""Dependent-launch instructions and all accesses to global memory, in the order of the PTX text."""

WAIT_FIRST = ("_moe_encode_rows_kernel", "_moe_gemm_decode_kernel", "_moe_gemm_prefill_kernel")
READ_EARLY = ("_moe_gemm_decode_kernel", "_moe_finish_rows_kernel", "_moe_combine_parts_kernel")

RESERVED_SHARED = 1024
"""Bytes of each CTA's shared memory that the driver reserves."""

SM_SHARED = 228 * 1024
SM_REGISTERS = 65536
WARP_REGISTERS = 32

MOST_SPILLS = dict(decode8=0, decode16=10, decode32=44)
MOST_SPILLS |= dict(short=10, triple=48, narrow=20, middle=96, wide=136)
"""Local-memory instructions allowed per tile. In large tiles they are in the epilogue, in decode
tiles between two tiles."""

SPILLS_OF_THIRD_PARAMETER = 5
"""More of them where an activation has three parameters: one scalar more lives between tiles."""

MOST_LOOP_SPILLS = {"decode32": 6, "wide": 1}
"""How many of these may be in the main loop, if not 0: a few scalars or sums, hidden by memory
latency."""

HI_LO = "short with high and low parts"
MOST_SPILLS[HI_LO] = 24

COPYING = "triple with copies"
"""The tile of three consumers and 96 rows, where Triton copies operands: no heuristic takes it."""

if copies_register_operands():  # as measured: its PTX needs more registers
    MOST_SPILLS |= dict(decode16=45, decode32=90, short=22, narrow=28)
    MOST_SPILLS |= {HI_LO: 64, COPYING: 343}
    MOST_LOOP_SPILLS |= {HI_LO: 8, "wide": 18, COPYING: 46}

MOST_ROW_REGISTERS = 128
"""Registers per thread of the row kernels on bfloat16 with eight warps, so that two CTAs fit on an
SM; in proportion more with fewer warps."""

MOST_BINARIES = {"_moe_encode_rows_kernel": 12}
"""Binaries per config and epilogue over all models, if not 1. The row kernel holds a row in
registers: with few rows in one step of 512 to 8192 values (powers of two), with many in several."""


def shape_of(activation: Activation = SwiGLU()) -> MoEShape:
    return MoEShape(2880, 2880, 128, 4, activation)


TILES = [
    pytest.param(a_format, name, id=f"{a_format}-{name}")
    for a_format in GEMM_FORMATS
    for name in heuristics.tiles(a_format == "bf16")
]
tiles = pytest.mark.parametrize("a_format, tile", TILES)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def config_of(a_format: str, tile: str) -> HopperGemmConfig:
    return heuristics.tiles(a_format == "bf16")[tile]


def limits_of(a_format: str, tile: str) -> str:
    """The name that a tile's limits have."""
    if (a_format, tile) == ("bf16", "short"):
        return HI_LO
    copies = copies_register_operands() and (a_format, tile) == ("mxfp8", "triple")
    return COPYING if copies else tile


def gemms(launches: list[Launch]) -> list[Launch]:
    return [launch for launch in launches if "gemm" in launch.name]


MATRIX_INSTRUCTIONS = {
    torch.float8_e4m3fn: r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3",
    torch.bfloat16: r"HGMMA\.64x\d+x16\.F32\.BF16",
    torch.float16: r"HGMMA\.64x\d+x16\.F32\s",
}


def check_gemm_of_any_format(
    kernel: CompiledKernel,
    tile: str,
    most_spills: int,
    most_in_loop: int,
    *,
    rows: torch.dtype = torch.float8_e4m3fn,
) -> None:
    """Check the limits that hold for every GEMM of every weight format.

    most_spills, most_in_loop: local-memory instructions in all, and in the main loop. rows: dtype
    of activation rows.
    """
    metrics = kernel.metrics
    matrix = MATRIX_INSTRUCTIONS[rows]
    assert kernel.count(rf"\b{matrix}") > 0
    assert kernel.count(r"\bUTMALDG\.[23]D") > 0
    assert register_operands(kernel.listing) == kernel.count(r"\b[HQ]GMMA") == kernel.count(matrix)
    assert metrics.instructions.get("LDS.128", 0) > 0, "codes must come 16 bytes at a time"
    assert metrics.spills <= most_spills
    for block in parse(kernel.listing):
        names = [one.name for one in block.instructions]
        if any(n.startswith(("QGMMA", "HGMMA")) for n in names):
            local = [n for n in names if n.startswith(("STL", "LDL"))]
            assert len(local) <= most_in_loop, "spills in the main loop"
    assert not overwritten_operands(kernel.listing)
    assert not reused_barriers(kernel.listing)
    if tile.startswith("decode"):
        assert metrics.registers <= heuristics.DECODE_REGISTERS
        assert 2 * (metrics.shared_memory + RESERVED_SHARED) <= SM_SHARED, "two CTAs per SM"
    else:
        assert metrics.shared_memory <= SHARED_MEMORY_LIMIT["sm_90"]


def check_gemm(kernel: CompiledKernel, a_format: str, tile: str, more_spills: int = 0) -> None:
    """Check the limits of every variant with MXFP4 weights, and for spills one that is larger."""
    rows, limits = config_of(a_format, tile).rows_dtype, limits_of(a_format, tile)
    most = MOST_SPILLS[limits] + more_spills
    check_gemm_of_any_format(kernel, tile, most, MOST_LOOP_SPILLS.get(limits, 0), rows=rows)
    if not tile.startswith("decode"):
        stores = kernel.metrics.global_stores
        assert sum(stores.values()) == 1, "the counter of claims; outputs go by TMA"
        assert kernel.count(r"\bUTMASTG\.2D") > 0


@tiles
def test_gemms(recorder: Recorder, a_format: str, tile: str) -> None:
    """Both stages use FP8 wgmma with A in registers and TMA; two decode CTAs fit on an SM.

    Registers and spills follow from the tile (of one tile they differ by up to 8 instructions among
    activations), so each tile has SwiGLU. The two tests that follow have three others of each tile.
    """
    problem = describe(shape_of(), 64, a_format)
    launches = gemms(recorder.run(problem, config_of(a_format, tile), has_bias=True))
    assert len(launches) == 2
    for launch in launches:
        check_gemm(launch.compile(), a_format, tile)


@pytest.mark.epilogues
@tiles
def test_first_stage_of_other_activations(recorder: Recorder, a_format: str, tile: str) -> None:
    """Every tile with a third parameter and with another activation, every second time a GELU."""
    index = list(heuristics.tiles(a_format == "bf16")).index(tile)
    others = GELUS if index % 2 else (SiLU(), ClampedSiLU(), SiTUv2())
    for activation in (WITH_BETA, others[index // 2 % len(others)]):
        problem = describe(shape_of(activation), 64, a_format)
        launch, _ = gemms(recorder.run(problem, config_of(a_format, tile), has_bias=True))
        third = len(activation.parameters) > 2
        check_gemm(launch.compile(), a_format, tile, SPILLS_OF_THIRD_PARAMETER if third else 0)


@pytest.mark.epilogues
@tiles
def test_gemms_without_bias(recorder: Recorder, a_format: str, tile: str) -> None:
    """Other epilogues: SiLU without biases (DeepSeek, Kimi, Qwen). Every second tile has another
    activation and the routing weight on the input. Of a prefill tile one stage is compiled: with
    biases, as in `test_gemms`, both need as many registers and as much stack or more."""
    index = list(heuristics.tiles(a_format == "bf16")).index(tile)
    activation = ACTIVATIONS[index % 4] if index % 2 else SiLU()
    problem = describe(
        shape_of(activation), 64, a_format, apply_router_weight_on_input=bool(index % 2)
    )
    launches = gemms(recorder.run(problem, config_of(a_format, tile), has_bias=False))
    assert [launch.arguments["HAS_BIAS"] for launch in launches] == [False, False]
    assert [launch.arguments["WEIGHTED"] for launch in launches] == [index % 2 == 1, index % 2 == 0]
    stage = index // 2 % 2
    for launch in launches if tile.startswith("decode") else launches[stage : stage + 1]:
        check_gemm(launch.compile(), a_format, tile)


HIDDEN, FEW_AND_MANY = (512, 2880, 7168, 16384), (64, 8192)
ROWS = {
    f"{a_format}{'-quantised' * quantised}": (a_format, quantised, "decode8")
    for quantised in (False, True)
    for a_format in ACTIVATION_FORMATS
    if not quantised or activation_mx_format(a_format) is not None  # others travel as bfloat16
} | {"float16": ("bf16", False, "middle")}
"""Activation format, whether it is already quantised, and a tile that takes such rows."""


@pytest.mark.parametrize("rows, hidden, num_tokens", latin(ROWS, HIDDEN, FEW_AND_MANY))
def test_row_kernels(recorder: Recorder, rows: str, hidden: int, num_tokens: int) -> None:
    """No spills; codes are stored in 16 bytes; only scales are loaded as bytes.

    Pairwise: each kind of rows with each width and number of tokens, each width with both numbers.
    """
    a_format, quantised, tile = ROWS[rows]
    shape = MoEShape(hidden, hidden, 128, 4)
    launches = [
        launch
        for launch in recorder.run(
            describe(shape, num_tokens, a_format),
            config_of(a_format, tile),
            has_bias=True,
            quantised=quantised,
        )
        if "rows" in launch.name
    ]
    assert len(launches) == 2
    for launch in launches:
        kernel = launch.compile()
        metrics = kernel.metrics
        division = a_format == "fp8_token" and hidden > 8192  # a call, with values held around it
        assert metrics.spills <= (2 if division else 0)
        assert metrics.global_stores.get(128, 0) >= (2 if a_format == "bf16" else 1)
        assert not metrics.global_stores.keys() & {8, 16}
        if not quantised:
            assert metrics.global_loads.get(64, 0) > 0
            assert not metrics.global_loads.keys() & {8, 16}
            warps = launch.arguments["num_warps"]
            assert metrics.registers * warps <= MOST_ROW_REGISTERS * 8
            if a_format == "fp8_token":  # float32 product, then one conversion of two values
                assert kernel.count(r"cvt\.rn\.satfinite\.e4m3x2\.f32", "ptx") > 0
        else:  # one byte, the scale, for each of the places where values are loaded
            values = metrics.global_loads.get(16 if a_format == "mxfp4" else 32, 0)
            assert metrics.global_loads[8] <= values


@tiles
def test_split_depth(recorder: Recorder, a_format: str, tile: str) -> None:
    """With split-K both stages store float32 partial sums, and finishing kernels follow."""
    config = config_of(a_format, tile)
    if config.kernel is HopperKernel.PREFILL or config.block_m > 16:
        pytest.skip("few tokens alone leave CTAs idle")
    launches = recorder.run(
        describe(shape_of(), 4, a_format), replace(config, k_splits=3), has_bias=True
    )
    parts = gemms(launches)
    assert [launch.arguments["EPILOGUE"] for launch in parts] == ["linear"] * 2
    for launch in parts:
        check_gemm(launch.compile(), a_format, tile)
    finishing = [launch for launch in launches if "finish" in launch.name or "parts" in launch.name]
    assert [launch.name for launch in finishing] == [
        "_moe_finish_rows_kernel",
        "_moe_combine_parts_kernel",
    ]
    for launch in finishing:
        assert launch.compile().metrics.spills == 0


INNER = (512, 2880, 8192, 8320)


@pytest.mark.parametrize(
    "a_format, inner, activation",
    latin(ACTIVATION_FORMATS, INNER, ACTIVATIONS),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_finish_of_stage_one(
    recorder: Recorder, a_format: str, inner: int, activation: Activation
) -> None:
    """If a row fits in registers, one kernel with wide loads makes the encoded rows of stage 2.

    Pairwise: each format with each width and activation, each width with each activation.
    """
    on_input = inner == 512
    problem = describe(
        MoEShape(2880, inner, 128, 4, activation),
        1,
        a_format,
        apply_router_weight_on_input=on_input,
    )
    config = replace(config_of(a_format, "decode8"), k_splits=3)
    launches = recorder.run(problem, config, has_bias=not on_input)
    name = "_moe_finish_rows_kernel" if inner <= 8192 else "_moe_gate_up_sum_splits_kernel"
    (finish,) = (launch for launch in launches if launch.name == name)
    metrics = finish.compile().metrics
    assert metrics.spills == 0
    assert metrics.registers <= 2 * MOST_ROW_REGISTERS
    if inner <= 8192:
        assert metrics.global_loads[128] > 0
        assert metrics.global_stores[128] > 0


def test_schedule_kernel(recorder: Recorder) -> None:
    for a_format in GEMM_FORMATS:
        launches = recorder.run(
            describe(shape_of(), 8192, a_format), config_of(a_format, "middle"), has_bias=True
        )
        schedules = [launch for launch in launches if "schedule" in launch.name]
        assert schedules
        for launch in schedules:
            metrics = launch.compile().metrics
            assert metrics.spills == 0
            assert metrics.shared_memory <= 4096


@pytest.mark.parametrize("k_splits", [1, 3])
@pytest.mark.parametrize("tile", ["decode8", "middle"])
@pytest.mark.parametrize("a_format", GEMM_FORMATS)
def test_kernels_wait_for_the_one_before(
    recorder: Recorder, a_format: str, tile: str, k_splits: int
) -> None:
    """Every kernel waits before it accesses global memory, except for early loads that bypass L1.

    Early loads rely on this order: GEMMs and row-encoding kernels wait, then call
    launch_dependents.
    """
    config = config_of(a_format, tile)
    if config.kernel is HopperKernel.PREFILL and k_splits > 1:
        pytest.skip("has no split")
    launches = recorder.run(
        describe(shape_of(), 4, a_format), replace(config, k_splits=k_splits), has_bias=True
    )
    assert len(launches) >= 4
    for launch in launches:
        assert launch.arguments["launch_pdl"] is True, launch.name
        ptx = launch.compile().asm["ptx"]
        steps = STEPS.findall(ptx)
        waits = [place for place, step in enumerate(steps) if step == "griddepcontrol.wait"]
        release = steps.index("griddepcontrol.launch_dependents")
        if launch.name == "_moe_encode_rows_kernel":  # one more before the wait, if release_first
            assert launch.arguments["release_first"] == 0
            assert re.search(r"@!?%p\d+ bra", ptx.split("griddepcontrol.launch_dependents")[0])
            release = steps.index("griddepcontrol.launch_dependents", release + 1)
        assert (waits[0] < release) is (launch.name in WAIT_FIRST), launch.name
        before = {step for step in steps[: waits[0]] if not step.startswith("griddepcontrol")}
        early = {"ld.global.cg"} if launch.name in READ_EARLY else set()
        assert before <= early, launch.name
        if launch.name != "_moe_gemm_decode_kernel":
            assert len(waits) == 1
            continue
        copies = [place for place, step in enumerate(steps) if step.startswith("cp.async.bulk")]
        assert len(waits) == 3  # one in each partition, the producer's the last
        assert sum(place < waits[-1] for place in copies) == 4  # a step's weights
        assert all(place > waits[1] for place in copies)


@pytest.mark.parametrize("tile", ["decode8", "middle"])
@pytest.mark.parametrize("a_format", GEMM_FORMATS)
def test_rows_of_stage_2_release_first_in_a_layer(
    recorder: Recorder, a_format: str, tile: str
) -> None:
    """Only in a layer does the row kernel of stage 2 call launch_dependents first: the data that
    its GEMM reads early are older than stage 1 there."""
    launches = recorder.run_layer(describe(shape_of(), 16, a_format), config_of(a_format, tile))
    assert [
        launch.arguments["release_first"]
        for launch in launches
        if launch.name == "_moe_encode_rows_kernel"
    ] == [0, 1]


# --- one binary for all models ------------------------------------------------------------------

MODELS = {
    **MODEL_SHAPES,
    "one_of_everything": MoEShape(128, 128, 1, 1),
    "odd_units": MoEShape(192, 352, 3, 2),
}
TOKENS = (1, 3, 16, 333, 1024, 8192)


@tiles
def test_schedules_reach_as_far_as_tiles(a_format: str, tile: str) -> None:
    assert config_of(a_format, tile).blocks_per_tile <= schedule._MOST_BLOCKS.value


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_a_layer_schedules_its_tiles_once(recorder: Recorder, a_format: str) -> None:
    """Both stages of a layer share one tile list; separate stages make their own."""
    problem = describe(shape_of(SiLU()), 2048, a_format)
    for config in heuristics.tiles(a_format == "bf16").values():
        stages = [launch.name for launch in recorder.run(problem, config, has_bias=False)]
        layer = [launch.name for launch in recorder.run_layer(problem, config)]
        expected = 2 if config.kernel is HopperKernel.PREFILL else 0
        assert stages.count("_moe_tile_schedule_kernel") == expected
        assert layer.count("_moe_tile_schedule_kernel") == expected // 2
        assert len(gemms(recorder.launches)) == 2


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_one_binary_serves_all_models(recorder: Recorder, a_format: str) -> None:
    """H, F, E, k and T are run-time values: per kernel, tile and epilogue one specialisation."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    for config in (config_of(a_format, "decode16"), config_of(a_format, "middle")):
        for (model, shape), num_tokens in itertools.product(MODELS.items(), TOKENS):
            same = MoEShape(
                shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k, SwiGLU()
            )
            for launch in recorder.run(describe(same, num_tokens, a_format), config, has_bias=True):
                key = (launch.name, str(launch.arguments.get("EPILOGUE")), str(config.rows_dtype))
                seen.setdefault(key, {}).setdefault(launch.binary, f"{model}, T = {num_tokens}")
    many = {
        key: list(models.values())
        for key, models in seen.items()
        if len(models) > MOST_BINARIES.get(key[0], 1)
    }
    assert not many, f"several binaries, the first user of each: {many}"
    assert {key[0] for key in seen if "gemm" in key[0]} == {
        "_moe_gemm_decode_kernel",
        "_moe_gemm_prefill_kernel",
    }


@pytest.mark.parametrize("a_format", ACTIVATION_FORMATS)
def test_few_binaries_finish_the_first_stage(recorder: Recorder, a_format: str) -> None:
    seen: dict[str, set[str]] = {}
    for k_splits, shape in itertools.product((2, 5), MODELS.values()):
        same = MoEShape(
            shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k, SwiGLU()
        )
        config = replace(config_of(a_format, "decode8"), k_splits=k_splits)
        for launch in recorder.run(describe(same, 1, a_format), config, has_bias=True):
            if "finish" in launch.name or "parts" in launch.name:
                seen.setdefault(launch.name, set()).add(launch.binary)
    counts = {name: len(binaries) for name, binaries in seen.items()}
    assert counts["_moe_combine_parts_kernel"] == 1
    assert counts["_moe_finish_rows_kernel"] <= 5


def test_a_specialised_argument_is_caught(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if row_units is specialised, models have different binaries."""
    found = set()
    for shape in (MoEShape(64, 64, 4, 2), MoEShape(1024, 1024, 4, 2)):
        config = config_of("bf16", "decode16")
        launch = gemms(recorder.run(describe(shape, 5, "bf16"), config, has_bias=True))[1]
        let_specialize(monkeypatch, launch.kernel, "row_units")
        found.add(launch.binary)
    assert len(found) == 2


# --- the register-A hazard ----------------------------------------------------------------------


def test_scan_fails_without_the_waits(recorder: Recorder) -> None:
    """Control on real code: the scan fails if the waits are removed."""
    for config in (config_of("bf16", "decode16"), config_of("bf16", "middle")):
        launch = gemms(recorder.run(describe(shape_of(), 64, "bf16"), config, has_bias=True))[0]
        lines = launch.compile().listing.splitlines()
        blind = "\n".join(line for line in lines if "WARPGROUP.DEPBAR" not in line)
        assert overwritten_operands(blind, most_groups=8)


def test_the_assembler_for_hopper_is_named() -> None:
    """The scan is valid for the ptxas that compiles for Hopper; `doctor` reports it, one of two."""
    tools = toolchain()
    assert tools.ptxas_path == get_ptxas(90).path
    assert tools.register_operand_hazard is (TRITON_RELEASE < (3, 9)), "3.9 brings CUDA 13.4"
    assert copies_register_operands() is (TRITON_RELEASE >= (3, 9))
